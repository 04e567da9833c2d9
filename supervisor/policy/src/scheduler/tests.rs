mod expiry;
mod streams;
mod tenants;

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::latency::Predictor;
use crate::tenants::TenantId;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

const WORKER: WorkerId = WorkerId(1);
const OTHER: WorkerId = WorkerId(2);
const SLO: Duration = Duration::from_millis(50);
const SLOTS: u8 = 2;
/// The lowest number of a request that is a step of a stream.
const STEPS: u32 = 1_000_000;

/// A request's number, and a flag that is true if its client has disconnected.
#[derive(Debug, Clone, Default)]
struct Asked(u32, Rc<Cell<bool>>);

impl Ticket for Asked {
    fn is_settled(&self) -> bool {
        self.1.get()
    }

    fn is_step(&self) -> bool {
        self.0 > STEPS
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(after: u64) -> Timestamp {
    Timestamp::after_origin(ms(after))
}

fn slice(groups: Groups, sms: u32) -> Slice {
    // A batch takes 10 ms plus 1 ms per row.
    let times = (1..=16).map(|rows| (rows, ms(10 + u64::from(rows)))).collect();
    Slice { groups, sms: Sms(sms), times, max_rows: None }
}

/// Returns a scheduler for batches of up to 4 rows, with one serving worker.
fn serving() -> Scheduler<(), Asked> {
    let rules = SchedulingRules { slo: SLO, next_slo: None, max_delay: Duration::ZERO, reject_late: true };
    let mut model = Scheduler::new(rules, 100, at(0));
    model.set_model_limits(4, 100, None);
    model.attach(lane(WORKER));
    model.route(Some(WORKER));
    model
}

fn lane(worker: WorkerId) -> Lane<(), Asked> {
    Lane::new(worker, &slice(Groups::WHOLE, 100), Predictor::new(None, Sms(100)), SLOTS)
}

fn request(number: u32, came: u64) -> QueuedRequest<(), Asked> {
    let (arrived, item) = (at(came), Asked(number, Rc::default()));
    QueuedRequest {
        shape: (),
        rows: 1,
        arrived,
        deadline: arrived + SLO,
        expires: None,
        level: 1,
        tenant: TenantId::DEFAULT,
        alone: false,
        item,
    }
}

fn numbers<'a>(requests: impl IntoIterator<Item = &'a QueuedRequest<(), Asked>>) -> Vec<u32> {
    requests.into_iter().map(|request| request.item.0).collect()
}

/// The worker that gets a batch, and the numbers of the batch's requests.
type Sent = (WorkerId, Vec<u32>);

/// Applies all actions until the scheduler waits. Returns the sent batches and the numbers of the
/// refused requests.
fn go(model: &mut Scheduler<(), Asked>, now: Timestamp) -> (Vec<Sent>, Vec<u32>, SchedulerWait) {
    let (mut sent, mut refused) = (Vec::new(), Vec::new());
    loop {
        match model.next(now) {
            NextAction::Act(late, batch) => {
                refused.extend(late.iter().map(|late| late.request.item.0));
                if let Some(batch) = batch {
                    sent.push((batch.worker, numbers(&batch.requests)));
                    model.confirm_sent(batch, now);
                }
            }
            NextAction::Wait(rest) => return (sent, refused, rest),
        }
    }
}

/// Answers the worker's first batch with the execution time `took`. Returns true if a draining lane is
/// now empty.
fn answer(model: &mut Scheduler<(), Asked>, worker: WorkerId, took: Duration, now: Timestamp) -> bool {
    let id = model.lane(worker).and_then(|lane| lane.in_flight().next()).map(|batch| batch.id).unwrap();
    let batch = model.take_batch(worker, id, now).unwrap();
    model.record_completion(worker, &batch, took);
    model.recycle(worker, batch.slot)
}

#[test]
fn a_batch_goes_at_once_to_an_idle_worker_and_the_next_shortly_before_that_ends() {
    let mut model = serving();
    model.accept(request(1, 0), at(0)).unwrap();
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![1])]);
    (2..=6).for_each(|number| drop(model.accept(request(number, 1), at(1)).unwrap()));
    let (sent, _, rest) = go(&mut model, at(1));
    assert!(sent.is_empty());
    let SchedulerWait::Until(then) = rest else { panic!("{rest:?}") };
    assert!(then > at(10) && then < at(11), "{then:?}");
    assert_eq!(go(&mut model, then).0, [(WORKER, vec![2, 3, 4, 5])]);
    assert_eq!(go(&mut model, at(20)).2, SchedulerWait::Idle, "both slots are taken");
    answer(&mut model, WORKER, ms(11), at(11));
    answer(&mut model, WORKER, ms(14), at(25));
    assert_eq!(go(&mut model, at(25)).0, [(WORKER, vec![6])]);
}

#[test]
fn admission_counts_full_batches_before_a_request_and_its_own() {
    let mut model = serving();
    model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    model.accept(request(0, 0), at(0)).unwrap();
    go(&mut model, at(0));
    // The first batch ends after 11 ms, and each batch of four takes 14 ms. A request that starts a new
    // batch behind two full batches is answered after 11 + 2 * 14 + 11 ms.
    let refused = (1..=20).filter(|&number| model.accept(request(number, 0), at(0)).is_err());
    assert_eq!(refused.collect::<Vec<_>>(), (10..=20).collect::<Vec<_>>(), "11 + 2 * 14 + 12 ms is too late");
    let seen = model.observe(at(1));
    assert_eq!((seen.arrived, seen.queued), (21, 9));
}

#[test]
fn who_would_have_the_answer_too_late_because_of_its_writing_is_refused() {
    for (writing, let_in) in [(None, 9), (Some(ms(1)), 8), (Some(ms(60_000)), 6)] {
        let mut model = serving();
        model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
        (0..500).for_each(|_| writing.into_iter().for_each(|took| model.record_write_time(took)));
        model.accept(request(0, 0), at(0)).unwrap();
        go(&mut model, at(0));
        let accepted = (1..=20).filter(|&number| model.accept(request(number, 0), at(0)).is_ok());
        assert_eq!(accepted.count(), let_in, "{writing:?}");
    }
}

#[test]
fn a_request_that_finds_nothing_before_it_is_let_in_however_late_it_should_be() {
    let mut model = serving();
    model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    let late = QueuedRequest { deadline: at(1), ..request(1, 0) };
    model.accept(late, at(0)).unwrap();
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![1])]);
}

#[test]
fn while_no_worker_serves_requests_wait_and_none_is_refused_for_that() {
    let mut model = serving();
    model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    model.route(None);
    (0..8).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    assert_eq!(go(&mut model, at(0)).2, SchedulerWait::NoLane);
    model.route(Some(WORKER));
    let (sent, refused, _) = go(&mut model, at(500));
    assert_eq!((sent.len(), refused.len()), (1, 0), "the outage made them late");
    let comes = |model: &mut Scheduler<(), Asked>| {
        (0..40).all(|number| model.accept(request(number, 500), at(500)).is_ok())
    };
    assert!(comes(&mut model), "requests behind them are accepted, too");
}

#[test]
fn what_comes_back_from_a_worker_is_not_refused_for_that() {
    let mut model = serving();
    model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    (0..8).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    go(&mut model, at(0));
    let AbandonedRequests { executing, .. } = model.take_back(WORKER);
    model.put_back(executing, at(45));
    model.attach(lane(OTHER));
    model.route(Some(OTHER));
    let (sent, refused, _) = go(&mut model, at(45));
    assert_eq!((sent.len(), refused.len()), (1, 0));
    let (_, refused, _) = go(&mut model, at(56));
    assert_eq!(refused.len(), 0, "they waited for the requests that came back");
}

#[test]
fn admission_counts_what_goes_before_a_request_and_not_what_goes_after() {
    let mut model = serving();
    model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    model.accept(request(0, 0), at(0)).unwrap();
    go(&mut model, at(0));
    for number in 1..=9 {
        model.accept(QueuedRequest { level: 2, ..request(number, 0) }, at(0)).unwrap();
    }
    let with = |level| QueuedRequest { level, ..request(20, 0) };
    assert!(model.accept(with(3), at(0)).is_err());
    assert!(model.accept(with(2), at(0)).is_err());
    assert!(model.accept(with(1), at(0)).is_ok());
}

#[test]
fn a_batch_is_parted_where_the_parts_take_no_longer() {
    let mut model = serving();
    model.detach(WORKER);
    let padded = Predictor::new(None, Sms(100)).padded_to(vec![2, 16]);
    let times = vec![(2, ms(1)), (16, ms(20))];
    let slice = Slice { times, ..slice(Groups::WHOLE, 100) };
    model.attach(Lane::new(WORKER, &slice, padded, SLOTS));
    (0..4).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    model.route(Some(WORKER));
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![0, 1])]);
}

#[test]
fn what_is_settled_is_never_sent_nor_in_the_way() {
    let mut model = serving();
    model.route(None);
    let gone: Vec<_> = (0..100).map(|number| request(number, 0)).collect();
    let clients: Vec<_> = gone.iter().map(|request| Rc::clone(&request.item.1)).collect();
    gone.into_iter().for_each(|request| drop(model.accept(request, at(0)).unwrap()));
    let full = model.accept(request(100, 0), at(0)).unwrap_err();
    assert_eq!(full.why, RefusalReason::QueueFull);
    for client in &clients[1..] {
        client.set(true);
        model.give_up();
    }
    model.accept(request(100, 0), at(0)).unwrap();
    assert!(model.queued() < 20, "{}", model.queued());
    model.route(Some(WORKER));
    assert_eq!(go(&mut model, at(1)).0, [(WORKER, vec![0, 100])]);
}

#[test]
fn nothing_is_sent_behind_a_suspect() {
    let mut model = serving();
    model.accept(QueuedRequest { level: SUSPECT_LEVEL, ..request(1, 0) }, at(0)).unwrap();
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![1])]);
    model.accept(request(2, 10), at(10)).unwrap();
    assert_eq!(go(&mut model, at(12)).0, [], "another request would be sent by now");
    let suspect = model.take_batch(WORKER, 1, at(13)).unwrap();
    model.recycle(WORKER, suspect.slot);
    assert_eq!(go(&mut model, at(13)).0, [(WORKER, vec![2])]);
}

#[test]
fn a_lower_level_goes_first_and_no_batch_has_two() {
    let mut model = serving();
    model.route(None);
    for number in 0..4 {
        model
            .accept(QueuedRequest { level: 2 - u64::from(number) % 2, ..request(number, 0) }, at(0))
            .unwrap();
    }
    model.route(Some(WORKER));
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![1, 3])]);
}

#[test]
fn each_partition_has_times_of_its_own_which_are_kept() {
    let mut model = serving();
    let whole = slice(Groups::WHOLE, 100);
    let part = Slice { times: Vec::new(), ..slice(Groups::first(1), 25) };
    let time = |model: &Scheduler<(), Asked>| model.serving_lane().unwrap().predictor.predict(1);
    model.accept(request(1, 0), at(0)).unwrap();
    go(&mut model, at(0));
    model.move_to(WORKER, &part);
    assert_eq!(time(&model), None);
    // The batch ran on the whole GPU, so its time does not count for the partition.
    answer(&mut model, WORKER, ms(11), at(11));
    assert_eq!((time(&model), model.observe(at(11)).batches), (None, Vec::new()));
    model.accept(request(2, 20), at(20)).unwrap();
    go(&mut model, at(20));
    answer(&mut model, WORKER, ms(30), at(50));
    assert_eq!(time(&model), Some(ms(30)));
    let elsewhere = Slice { groups: Groups::first(2).without(Groups::first(1)), ..part.clone() };
    model.move_to(WORKER, &elsewhere);
    assert_eq!(time(&model), Some(ms(30)), "the number of SMs is the same");
    model.move_to(WORKER, &whole);
    assert_eq!(time(&model), Some(ms(11)));
    model.move_to(WORKER, &part);
    assert_eq!(time(&model), Some(ms(30)));
}

#[test]
fn batches_are_no_larger_than_what_fits_on_the_partition() {
    let mut model = serving();
    let waiting = |model: &mut Scheduler<(), Asked>, came: u64| {
        model.route(None);
        (0..4).for_each(|number| drop(model.accept(request(number, came), at(came)).unwrap()));
        model.accept(QueuedRequest { rows: 3, ..request(4, came) }, at(came)).unwrap();
        model.route(Some(WORKER));
    };
    let part = Slice { max_rows: Some(2), ..slice(Groups::first(1), 25) };
    model.move_to(WORKER, &part);
    waiting(&mut model, 0);
    let mut sizes = Vec::new();
    for now in [0, 12, 24] {
        sizes.extend(go(&mut model, at(now)).0.into_iter().map(|(_, numbers)| numbers));
        answer(&mut model, WORKER, ms(12), at(now + 12));
    }
    assert_eq!(sizes, [vec![0, 1], vec![2, 3], vec![4]], "a larger request runs by itself");
    model.move_to(WORKER, &slice(Groups::WHOLE, 100));
    waiting(&mut model, 40);
    assert_eq!(go(&mut model, at(40)).0[0].1, [0, 1, 2, 3], "all fit on the whole GPU");
}

#[test]
fn a_hand_over_drains_the_old_lane_while_the_new_one_serves() {
    let mut model = serving();
    for (number, came) in [(0, 0), (1, 11)] {
        model.accept(request(number, came), at(came)).unwrap();
        go(&mut model, at(came));
    }
    model.attach(lane(OTHER));
    model.route(Some(OTHER));
    assert!(!model.drain(WORKER));
    model.accept(request(2, 12), at(12)).unwrap();
    assert_eq!(go(&mut model, at(12)).0, [(OTHER, vec![2])], "the new lane is idle");
    assert!(!answer(&mut model, WORKER, ms(11), at(12)), "one batch is left");
    assert!(answer(&mut model, WORKER, ms(11), at(23)), "drained");
    model.detach(WORKER);
    assert!(model.lane(WORKER).is_none() && model.drain(OTHER) == model.lane(OTHER).unwrap().is_empty());
}

#[test]
fn what_is_taken_back_goes_first_and_its_batch_stays_until_it_is_answered() {
    let mut model = serving();
    model.accept(request(1, 5), at(5)).unwrap();
    go(&mut model, at(5));
    model.accept(request(2, 0), at(6)).unwrap();
    let AbandonedRequests { executing, behind } = model.take_back(WORKER);
    assert_eq!((numbers(&executing), behind.len()), (vec![1], 0));
    assert!(model.stop_sending(WORKER) && !model.lane(WORKER).unwrap().is_empty());
    model.put_back(executing, at(6));
    model.attach(lane(OTHER));
    model.route(Some(OTHER));
    assert_eq!(go(&mut model, at(6)).0, [(OTHER, vec![1, 2])]);
}

#[test]
fn what_was_sent_to_a_worker_that_is_gone_waits_again() {
    let mut model = serving();
    model.accept(request(1, 0), at(0)).unwrap();
    let NextAction::Act(_, Some(batch)) = model.next(at(0)) else { panic!("the batch may be sent") };
    model.detach(WORKER);
    assert!(!model.confirm_sent(batch, at(0)));
    assert_eq!(model.queued(), 1);
}

#[test]
fn what_a_lane_does_not_take_is_next_again() {
    let mut model = serving();
    model.accept(request(1, 0), at(0)).unwrap();
    let NextAction::Act(_, Some(batch)) = model.next(at(0)) else { panic!("the batch may be sent") };
    model.return_unsent(batch, at(0));
    assert!(model.lane(WORKER).unwrap().is_empty());
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![1])]);
}

/// An event in the random test.
#[derive(Debug, Clone, Copy)]
enum Event {
    Arrive { rows: u32, level: u64, alone: bool },
    GiveUp(u32),
    Answer(WorkerId),
    Route(Option<WorkerId>),
    Drain(WorkerId),
    Move(WorkerId, u32),
    Die(WorkerId),
    Admission(u32, bool),
    Blocked(bool),
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let worker = || prop_oneof![Just(WORKER), Just(OTHER)];
    let arrive = (1_u32..6, 0_u64..3, any::<bool>());
    let event = prop_oneof![
        12 => arrive.prop_map(|(rows, level, alone)| Event::Arrive { rows, level, alone }),
        2 => (0_u32..200).prop_map(Event::GiveUp),
        8 => worker().prop_map(Event::Answer),
        2 => prop::option::of(worker()).prop_map(Event::Route),
        1 => worker().prop_map(Event::Drain),
        1 => (worker(), 1_u32..100).prop_map(|(worker, sms)| Event::Move(worker, sms)),
        1 => worker().prop_map(Event::Die),
        1 => (0_u32..6, any::<bool>()).prop_map(|(rows, late)| Event::Admission(rows, late)),
        1 => any::<bool>().prop_map(Event::Blocked),
    ];
    prop::collection::vec((0_u64..20, event), 1..300)
}

proptest! {
    /// Checks random sequences of events. Each accepted request is in the queue or on a lane, or it was
    /// refused or answered exactly once. No batch is too large or mixes priority levels. A request that
    /// must run alone is never in a batch with other requests. No slot is used twice at the same time.
    #[test]
    fn no_request_is_lost_or_served_twice(events in events()) {
        let mut model = serving();
        model.attach(lane(OTHER));
        let mut clients: Vec<Rc<Cell<bool>>> = Vec::new();
        let mut ended = std::collections::BTreeMap::<u32, u32>::new();
        let (mut time, mut blocked) = (0, false);
        for (later, event) in events {
            time += later;
            let now = at(time);
            let mut end = |requests: &[QueuedRequest<(), Asked>]| {
                numbers(requests).into_iter().for_each(|number| *ended.entry(number).or_default() += 1);
            };
            match event {
                Event::Arrive { rows, level, alone } => {
                    let asked = QueuedRequest { rows: rows.min(4), expires: None, level, alone, ..request(clients.len() as u32, time) };
                    clients.push(Rc::clone(&asked.item.1));
                    if let Err(refused) = model.accept(asked, now) {
                        end(&[refused.request]);
                    }
                }
                Event::GiveUp(number) => {
                    if let Some(client) = clients.get(number as usize).filter(|client| !client.get()) {
                        client.set(true);
                        model.give_up();
                    }
                }
                Event::Answer(worker) => {
                    let front = model.lane(worker).and_then(|lane| lane.in_flight().next()).map(|batch| batch.id);
                    if let Some(batch) = front.and_then(|id| model.take_batch(worker, id, now)) {
                        model.record_completion(worker, &batch, ms(later));
                        end(&batch.requests);
                        model.recycle(worker, batch.slot);
                    }
                }
                Event::Route(worker) => model.route(worker),
                Event::Drain(worker) => { model.drain(worker); }
                Event::Move(worker, sms) => model.move_to(worker, &slice(Groups::WHOLE, sms)),
                Event::Die(worker) => {
                    let AbandonedRequests { mut executing, behind } = model.take_back(worker);
                    executing.extend(behind);
                    if model.stop_sending(worker) {
                        model.record_disturbance();
                    }
                    model.put_back(executing, now);
                    model.detach(worker);
                    model.attach(lane(worker));
                }
                Event::Admission(max_batch, refuse_late) => model.set_admission(AdmissionPolicy { refuse_late, ..AdmissionPolicy::accept_all(max_batch) }),
                Event::Blocked(is) => blocked = is,
            }
            while let NextAction::Act(late, batch) = model.next(now) {
                late.into_iter().for_each(|late| end(&[late.request]));
                let Some(batch) = batch else { continue };
                let rows: u32 = batch.requests.iter().map(|request| request.rows).sum();
                prop_assert!(rows <= 4 && !batch.requests.is_empty());
                let first = &batch.requests[0];
                prop_assert!(batch.requests.iter().all(|request| request.level == first.level && !request.item.is_settled()));
                prop_assert!(batch.requests.len() == 1 || batch.requests.iter().all(|request| !request.alone));
                let taken = |lane: &Lane<(), Asked>| lane.in_flight().any(|other| other.slot == batch.slot);
                prop_assert!(!taken(model.lane(batch.worker).unwrap()));
                if blocked {
                    model.return_unsent(batch, now);
                    break;
                }
                model.confirm_sent(batch, now);
            }
        }
        prop_assert!(ended.values().all(|&times| times == 1));
        let waiting = numbers(&model.drain_queue());
        let on_lanes = model.in_flight();
        let settled = clients.iter().filter(|client| client.get()).count();
        let known = ended.len() + waiting.len() + on_lanes;
        prop_assert!(known <= clients.len() && known + settled >= clients.len(), "{known} of {} and {settled}", clients.len());
    }
}
