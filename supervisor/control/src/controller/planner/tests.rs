use shadowslice_policy::sharing::{BatchStats, Observation};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Sms, Timestamp};
use tokio::sync::{mpsc, watch};

use super::super::reports::{HandoverReport, Handovers, ModelReport, ModelState, NextStart};
use super::super::{
    Cause, ChangeOutcome, Changes, MAX_QUEUED_ORDERS, Mechanism, Order, ReportedVerdict, ResizeRefused,
};
use super::*;
use crate::backend::EmulatedBackend;
use shadowslice_config as config;
use shadowslice_config::Config;
use shadowslice_datapath::pipeline::{self, Pipeline};

/// Two models of a configuration, with controllers that do nothing by themselves. Each model has a
/// share of 20 %, and its configured share is 50 %.
struct Rig {
    planner: Planner,
    planned: watch::Receiver<Planned>,
    reports: Vec<watch::Sender<ModelReport>>,
    ordered: Vec<mpsc::Receiver<Order>>,
}

fn config(controller: &str, initial: &str, more: &str) -> Config {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let model = |name: &str| {
        format!(
            "  - {{name: {name}, engine: emulated, slo: 20ms, share: {{{initial}min: 10%, max: 60%}}, {more}\
             tensors: [{{input: x, output: y, datatype: FP32, shape: [1]}}]}}\n"
        )
    };
    let text = format!(
        "run_dir: /tmp/x\ngpus: [{{device: emulated, sms: 132}}]\ncontroller: {{{controller}}}\nmodels:\n{}{}",
        model("a"),
        model("b")
    );
    std::fs::write(&path, text).unwrap();
    config::load(&path, &|_| None, true).unwrap()
}

fn report(state: ModelState, share: Percent, gpu: &dyn GpuBackend) -> ModelReport {
    ModelReport {
        execution: None,
        state,
        state_since: std::time::Instant::now(),
        share,
        sms: gpu.sms(share).0,
        partition: None,
        mechanism: Mechanism::Shadow,
        no_partition: None,
        since: Timestamp::default(),
        coming: None,
        ready: None,
        memory_need: None,
        warming: None,
        batch_limit: None,
        no_standby: None,
        waits: Vec::new(),
        held: false,
        workers: Vec::new(),
        worker_deaths: 0,
        last_death: None,
        worker_restarts: 0,
        handovers: Handovers::default(),
        changes: Changes::default(),
    }
}

impl Rig {
    fn new(controller: &str) -> Self {
        let config = config(controller, "initial: 50%, ", "");
        let gpu: Arc<dyn GpuBackend> = Arc::new(EmulatedBackend::new(Sms(132)).unwrap());
        let (clock, share) = (Clock::start(), Percent::new(20).unwrap());
        let (mut served, mut reports, mut ordered) = (Vec::new(), Vec::new(), Vec::new());
        for model in &config.models {
            let (lane_events_tx, _) = mpsc::channel(1);
            let settings = pipeline::PipelineSettings {
                tenant_weights: vec![1.0],
                step_timeout: Duration::from_secs(10),
                name: model.name.clone(),
                version: 1,
                live: pipeline::LiveSettings {
                    slo: model.slo,
                    max_delay: Duration::ZERO,
                    reject_late: true,
                    priority: 1,
                },
                max_requests: 1,
                memory: 4096,
                cache: None,
                profile: None,
                content: Arc::default(),
                residency: Arc::default(),
            };
            let (orders, orders_rx) = mpsc::channel(MAX_QUEUED_ORDERS);
            let (report_tx, report_rx) = watch::channel(report(ModelState::Ready, share, &*gpu));
            served.push(Served {
                role: Default::default(),
                id: served.len(),
                model: Arc::new(model.clone()),
                gpu: Arc::clone(&gpu),
                pipeline: Arc::new(Pipeline::new(settings, clock, lane_events_tx).unwrap()),
                report: report_rx,
                orders,
                successor: None,
                files: Arc::default(),
            });
            reports.push(report_tx);
            ordered.push(orders_rx);
        }
        let (planner, planned) = Planner::new(
            &config.controller,
            clock,
            &[gpu],
            watch::channel(served).1,
            watch::channel(shadowslice_datapath::phase::Phase::Serving).1,
        )
        .unwrap();
        Self { planner, planned, reports, ordered }
    }

    fn decide(&mut self) -> Vec<ModelDecision> {
        self.planner.decide();
        self.planned.borrow().models.clone()
    }

    /// Returns the share in the next order for a model, and the sender for the reply.
    fn ordered(&mut self, model: usize) -> Option<(u32, super::super::outcome::ReplySender)> {
        match self.ordered[model].try_recv().ok()? {
            Order::Resize { share, cause, reply, .. } => {
                assert_eq!(cause, Cause::Policy);
                Some((share.get(), reply))
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn groups_of_a_layout_go_with_an_order_even_at_the_same_share_and_once() {
    let mut rig = Rig::new("policy: adaptive");
    for report_tx in &rig.reports {
        report_tx.send_modify(|report| (report.share, report.sms) = (Percent::new(50).unwrap(), 66));
    }
    let verdict = rig.decide().swap_remove(0).verdict;
    let (low, high): (Groups, Groups) = ((0..8).collect(), (8..16).collect());
    let seen = Observation { span: Duration::from_millis(100), ..Observation::default() };
    let report = rig.reports[0].borrow().clone();
    let snapshot = ModelSnapshot {
        groups: Some(low),
        ..facts::snapshot(&rig.planner.models[0].served, &Orders::default(), seen)
    };
    let sms = rig.planner.models[0].served.sms(report.share);
    let change = ShareChange { model: 0, from: sms, to: sms, groups: Some(high), at_once: false };
    for _ in 0..3 {
        rig.planner.order(&change, &snapshot, &verdict, Timestamp::default()).unwrap();
    }
    let Order::Resize { share, groups, .. } = rig.ordered[0].try_recv().unwrap() else { panic!() };
    assert_eq!((share, groups), (report.share, Some(high)));
    assert!(rig.ordered[0].try_recv().is_err(), "the model may be unable to have them");
}

#[test]
fn a_wanted_share_is_ordered_once_and_not_again_while_that_is_under_way() {
    let mut rig = Rig::new("policy: static+admission");
    assert_eq!(rig.decide()[0].verdict.kind(), ReportedVerdict::Grow);
    let (percent, reply) = rig.ordered(0).unwrap();
    assert_eq!(percent, 50);
    let waiting = rig.decide();
    assert_eq!((waiting[0].verdict.kind(), waiting[0].wanted.get()), (ReportedVerdict::Wait, 50));
    assert!(rig.ordered(0).is_none());
    // The controller drops the order without a reply, as it does when it stops.
    drop(reply);
    assert_eq!(rig.decide()[0].verdict.kind(), ReportedVerdict::Grow);
    assert!(rig.ordered(0).is_some());
}

#[test]
fn what_was_refused_rests_before_it_is_tried_again() {
    let mut rig = Rig::new("policy: static+admission");
    rig.decide();
    let (_, reply) = rig.ordered(0).unwrap();
    reply.send(Err(ResizeRefused::Busy("a".to_owned()))).unwrap();
    let row = rig.decide().swap_remove(0);
    assert_eq!(row.verdict.kind(), ReportedVerdict::Grow);
    let Some(NotOrdered::Backoff { why, left }) = row.not_ordered else { panic!("{row:?}") };
    assert!(why.contains("already changing") && left.as_secs_f64().round() == 1.0, "{why}, {left:?}");
    assert!(rig.ordered(0).is_none());
    assert!(rig.ordered(1).is_some(), "the other model is independent of that");
}

#[test]
fn a_model_whose_answers_are_wrong_with_another_share_is_left_alone() {
    let mut rig = Rig::new("policy: static+admission");
    rig.decide();
    let (_, reply) = rig.ordered(0).unwrap();
    let share = Percent::new(50).unwrap();
    reply.send(Err(ResizeRefused::Wrong { model: "a".to_owned(), share })).unwrap();
    let row = rig.decide().swap_remove(0);
    assert_eq!((row.verdict.kind(), row.snapshot.held), (ReportedVerdict::Wait, true));
    assert!(rig.ordered(0).is_none());
}

#[test]
fn a_hand_over_that_was_taken_back_rests_too() {
    let mut rig = Rig::new("policy: static+admission");
    rig.decide();
    let (_, reply) = rig.ordered(0).unwrap();
    let report = HandoverReport {
        outcome: ChangeOutcome::Completed,
        mechanism: Mechanism::Shadow,
        cause: ChangeCause::Policy,
        at_once: false,
        why: None,
        from_percent: 20,
        to_percent: 50,
        from_sms: 26,
        to_sms: 66,
        effect_ms: None,
        stall_us: 0.0,
        stall_total_us: 0.0,
    };
    reply.send(Ok(report)).unwrap();
    rig.reports[0].send_modify(|report| report.changes.by_policy.rolled_back = 1);
    let obstacle = rig.decide().swap_remove(0).not_ordered;
    let Some(NotOrdered::Backoff { why, .. }) = obstacle else { panic!("{obstacle:?}") };
    assert!(why.contains("probation"), "{why}");
    assert!(rig.ordered(0).is_none());
}

#[test]
fn a_hand_over_by_hand_that_was_taken_back_is_no_failure_of_the_policys() {
    let mut rig = Rig::new("policy: static+admission");
    rig.reports[0].send_modify(|report| {
        report.handovers.rolled_back = 1;
        report.changes.by_hand.rolled_back = 1;
    });
    assert_eq!(rig.decide().swap_remove(0).not_ordered, None);
    assert!(rig.ordered(0).is_some());
}

#[test]
fn nothing_is_ordered_of_a_model_that_is_held_or_does_not_serve() {
    let mut rig = Rig::new("policy: static+admission");
    rig.reports[0].send_modify(|report| report.held = true);
    rig.reports[1].send_modify(|report| {
        report.state = ModelState::Unready { why: "broken".to_owned(), next: NextStart::OnChange }
    });
    let rows = rig.decide();
    assert_eq!(
        (rows[0].verdict.kind(), rows[0].snapshot.held, rows[0].wanted.get()),
        (ReportedVerdict::Wait, true, 50)
    );
    assert_eq!(rows[1].verdict.kind(), ReportedVerdict::Grow);
    assert_eq!(rows[1].not_ordered, Some(NotOrdered::NotReady));
    assert!((0..2).all(|model| rig.ordered(model).is_none()));
}

#[test]
fn recommendations_are_not_orders() {
    let mut rig = Rig::new("policy: static+admission, act: false");
    let rows = rig.decide();
    assert!(
        rows.iter().all(|row| row.verdict.kind() == ReportedVerdict::Grow
            && row.not_ordered == Some(NotOrdered::NotActing)),
        "{rows:?}"
    );
    assert!((0..2).all(|model| rig.ordered(model).is_none()));
}

#[test]
fn late_requests_are_refused_as_the_policy_says_where_it_is_acted_upon() {
    let refuses_late = |controller: &str| {
        let mut rig = Rig::new(controller);
        rig.decide();
        rig.planner.models.iter().map(|model| model.served.pipeline.refuses_late()).collect::<Vec<_>>()
    };
    assert_eq!(refuses_late("policy: adaptive"), [false; 2]);
    assert_eq!(refuses_late("policy: static+admission"), [true; 2]);
    assert_eq!(refuses_late("policy: static+admission, act: false"), [false; 2]);
}

#[test]
fn a_controller_that_is_behind_is_not_waited_for() {
    let mut rig = Rig::new("policy: static+admission");
    // No controller empties the queue of orders, and nothing waits for the replies.
    let orders = rig.planner.models[0].served.orders.clone();
    while orders.try_send(Order::Stop).is_ok() {}
    assert_eq!(rig.decide().swap_remove(0).not_ordered, Some(NotOrdered::Full));
}

#[test]
fn first_shares_are_the_policys_only_where_it_is_acted_upon() {
    let gpus: Vec<Arc<dyn GpuBackend>> = vec![Arc::new(EmulatedBackend::new(Sms(132)).unwrap())];
    let percents = |controller: &str, initial: &str, more: &str| -> Vec<u32> {
        let config = config(controller, initial, more);
        let shares = first_shares(&config.controller, &gpus, &config.models);
        shares.into_iter().map(Percent::get).collect()
    };
    let expected = [
        ("policy: static", "initial: 20%, ", [20, 20]),
        ("policy: static+admission", "initial: 20%, ", [20, 20]),
        ("policy: static+admission", "", [50, 50]),
        ("policy: adaptive", "initial: 20%, ", [20, 20]),
        ("policy: adaptive", "", [60, 60]),
        ("policy: adaptive, act: false", "", [50, 50]),
    ];
    for (controller, initial, shares) in expected {
        assert_eq!(percents(controller, initial, ""), shares, "{controller}");
    }
    assert_eq!(percents("policy: adaptive", "", "handover: never, "), [50, 50]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_decided_before_an_interval_is_over() {
    let Rig { planner, planned, .. } = Rig::new("policy: static+admission, interval: 500ms");
    let decisions = || planned.borrow().took.count;
    let deciding = tokio::spawn(planner.run());
    for (after_ms, decided) in [(499, 0), (2, 1), (498, 1), (2, 2)] {
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        assert_eq!(decisions(), decided);
    }
    deciding.abort();
}

#[test]
fn a_share_is_the_smallest_that_comes_to_its_sms() {
    let rig = Rig::new("policy: static+admission");
    let served = &rig.planner.models[0].served;
    let share = |sms, at| served.share(Sms(sms), Percent::new(at).unwrap()).get();
    assert_eq!(share(66, 20), 50);
    assert_eq!(share(26, 40), 20);
    assert_eq!(share(38, 30), 30, "what is in force stays, though 29 % would do");
    assert_eq!((share(2, 20), share(132, 20)), (10, 60), "bounds");
}

#[test]
fn models_come_and_go_and_what_was_ordered_of_those_that_stay_is_known() {
    let mut rig = Rig::new("policy: static+admission");
    let served = rig.planner.served_rx.borrow().clone();
    let (served_tx, served_rx) = watch::channel(served.clone());
    rig.planner.served_rx = served_rx;
    rig.decide();
    assert!(rig.ordered(0).is_some_and(|(share, _reply)| share == 50));
    served_tx.send_replace(served[..1].to_vec());
    rig.planner.update_models();
    assert_eq!(rig.decide().len(), 1);
    served_tx.send_replace(Vec::new());
    rig.planner.update_models();
    assert!(rig.decide().is_empty(), "nothing is said of models that have gone");
    served_tx.send_replace(served);
    rig.planner.update_models();
    assert_eq!(rig.decide().len(), 2);
}

#[test]
fn a_share_is_in_force_though_its_groups_have_fewer_sms_than_others() {
    let mut rig = Rig::new("policy: static+admission");
    let division = Arc::clone(rig.planner.models[0].served.gpu.division().unwrap());
    let have = |rig: &Rig, share: Percent, groups: Groups| {
        for report_tx in &rig.reports {
            report_tx.send_modify(|report| {
                (report.share, report.sms) = (share, division.sms(groups).0);
                report.partition = Some((Arc::clone(&division), groups));
            });
        }
    };
    have(&rig, Percent::WHOLE, Groups::WHOLE);
    rig.decide();
    let (share, reply) = rig.ordered(0).unwrap();
    drop((reply, rig.ordered(1)));
    let share = Percent::new(share).unwrap();
    let (all, count) = (division.count(), division.groups_of(share));
    let last = Groups::first(all).without(Groups::first(all - count));
    assert!(division.sms(last) < division.sms(Groups::first(count)), "what is left over is among them");
    have(&rig, share, last);
    let rows = rig.decide();
    assert!(rows.iter().all(|row| row.not_ordered.is_none()), "{rows:?}");
    assert!((0..2).all(|model| rig.ordered(model).is_none()));
}

#[test]
fn what_was_learnt_is_known_while_models_stay() {
    let mut rig = Rig::new("policy: adaptive");
    let served = rig.planner.served_rx.borrow().clone();
    let (served_tx, served_rx) = watch::channel(served.clone());
    rig.planner.served_rx = served_rx;
    // The shares stay as they are.
    rig.reports.iter().for_each(|report_tx| report_tx.send_modify(|report| report.held = true));
    let span = Duration::from_millis(100);
    for interval in 1..=20 {
        let missed = Observation {
            span,
            arrived: 100,
            answered: 100,
            in_time_at_client: 60,
            queued: 9,
            batches: vec![BatchStats { rows: 4, count: 10, mean: span / 10 }],
            ..Observation::default()
        };
        let mut input = rig.planner.input(Timestamp::after_origin(span * interval));
        input.models.iter_mut().for_each(|model| model.observation = missed.clone());
        let _not_carried_out = rig.planner.policy.decide(&input);
    }
    let refuses = |rig: &mut Rig| {
        let input = rig.planner.input(Timestamp::after_origin(span * 21));
        rig.planner.policy.decide(&input).admissions[0].refuse_late
    };
    assert!(refuses(&mut rig));
    let mut meets = |first: usize, second: usize| {
        let of = |id: usize| Served { id, ..served[id % 2].clone() };
        served_tx.send_replace(vec![of(first), of(second)]);
        rig.planner.update_models();
        refuses(&mut rig)
    };
    assert!(meets(1, 0), "the same in another order");
    assert!(!meets(1, 2), "one that replaced another");
}

#[test]
fn every_policy_bears_a_server_whose_models_are_all_unloaded() {
    for kind in shadowslice_policy::sharing::PolicyName::ALL {
        let mut rig = Rig::new(&format!("policy: {kind}+admission, act: false"));
        rig.decide();
        rig.planner.served_rx = watch::channel(Vec::new()).1;
        rig.planner.update_models();
        assert!(rig.decide().is_empty(), "{kind}");
    }
}
