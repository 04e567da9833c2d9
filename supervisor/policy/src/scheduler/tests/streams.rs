//! Tests of streams: the order of their steps, and how streams end.

use shadowslice_shared::batch::StreamLimits;

use super::*;

/// Returns the limits of a model whose streams take turns.
fn turns(open: u32) -> Option<StreamLimits> {
    Some(StreamLimits { open, per_step: 1 })
}

/// Returns the limits of a model whose streams advance together.
fn together(open: u32) -> Option<StreamLimits> {
    Some(StreamLimits { open, per_step: open })
}

impl Asked {
    fn step(number: u32) -> QueuedRequest<(), Self> {
        request(STEPS + number, 0)
    }
}

#[test]
fn streams_begin_up_to_their_number_and_then_go_on_in_turns_where_they_began() {
    let mut model = serving();
    model.set_model_limits(0, 1, turns(2));
    (1..=3).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    let sent: Vec<_> = [0, 20].into_iter().flat_map(|now| go(&mut model, at(now)).0).collect();
    assert_eq!(sent, [(WORKER, vec![1]), (WORKER, vec![2])]);
    for _ in 0..2 {
        model.open_stream(WORKER);
        answer(&mut model, WORKER, ms(11), at(22));
    }
    assert_eq!(go(&mut model, at(22)).0, [], "two streams are open");
    (1..=3).for_each(|number| model.queue_step(WORKER, Asked::step(number)).unwrap());
    assert_eq!(go(&mut model, at(23)).0, [(WORKER, vec![STEPS + 1]), (WORKER, vec![STEPS + 2])]);
    answer(&mut model, WORKER, ms(1), at(24));
    assert!(!model.close_stream(WORKER));
    assert_eq!(go(&mut model, at(24)).0, [(WORKER, vec![3])], "a stream that begins goes first, and at once");
    answer(&mut model, WORKER, ms(1), at(41));
    assert_eq!(go(&mut model, at(41)).0, [(WORKER, vec![STEPS + 3])]);
    assert_eq!(
        model.serving_lane().unwrap().predictor.predict(1),
        Some(ms(11)),
        "steps do not change predictions"
    );

    model.attach(lane(OTHER));
    model.route(Some(OTHER));
    assert!(!model.drain(WORKER));
    answer(&mut model, WORKER, ms(11), at(42));
    assert!(!answer(&mut model, WORKER, ms(1), at(43)), "a stream is open");
    model.queue_step(WORKER, Asked::step(4)).unwrap();
    assert_eq!(go(&mut model, at(44)).0, [(WORKER, vec![STEPS + 4])], "though another lane serves");
    assert!(!answer(&mut model, WORKER, ms(1), at(45)));
    assert!(
        model.close_stream(WORKER) && !model.close_stream(WORKER),
        "the end of draining is reported once"
    );
}

#[test]
fn streams_go_on_beside_requests_that_end_with_their_first_answer() {
    let mut model = serving();
    model.set_model_limits(0, 1, turns(8));
    // A lane without predictions makes the scheduler send batches without waiting.
    model.detach(WORKER);
    let slice = Slice { times: Vec::new(), ..slice(Groups::WHOLE, 100) };
    model.attach(Lane::new(WORKER, &slice, Predictor::new(None, Sms(100)), SLOTS));
    model.route(Some(WORKER));
    model.open_stream(WORKER);
    (1..=90).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    let mut sent = Vec::new();
    let mut waits = false;
    for now in 0..40 {
        let gone = go(&mut model, at(now)).0;
        waits = waits && gone.iter().all(|(_, batch)| batch[0] < STEPS);
        sent.extend(gone);
        // The stream's client requests its next step only after the next new request has arrived.
        if !waits {
            model.queue_step(WORKER, Asked::step(now as u32 + 1)).unwrap();
            waits = true;
        }
        answer(&mut model, WORKER, ms(0), at(now));
    }
    let steps = sent.iter().filter(|(_, batch)| batch[0] >= STEPS).count();
    assert!(steps >= sent.len() / 3, "{steps} of {}", sent.len());
}

#[test]
fn steps_end_with_their_lane() {
    let mut model = serving();
    model.set_model_limits(0, 1, turns(2));
    model.open_stream(WORKER);
    for number in 1..=3 {
        model.queue_step(WORKER, Asked::step(number)).unwrap();
    }
    assert_eq!(go(&mut model, at(0)).0.len(), 2);
    let AbandonedRequests { executing, behind } = model.take_back(WORKER);
    assert_eq!((numbers(&executing), numbers(&behind)), (vec![STEPS + 1], vec![STEPS + 2, STEPS + 3]));
    assert!(model.queue_step(WORKER, Asked::step(4)).is_err());
    model.detach(WORKER);
    assert!(model.queue_step(WORKER, Asked::step(5)).is_err() && !model.close_stream(WORKER));
}

#[test]
fn a_step_that_a_lane_does_not_take_is_next_again() {
    let mut model = serving();
    (1..=2).for_each(|number| model.queue_step(WORKER, Asked::step(number)).unwrap());
    let NextAction::Act(_, Some(step)) = model.next(at(0)) else { panic!("the batch may be sent") };
    model.return_unsent(step, at(0));
    assert_eq!(go(&mut model, at(0)).0, [(WORKER, vec![STEPS + 1]), (WORKER, vec![STEPS + 2])]);
}

/// Returns a scheduler whose lane has three open streams that advance together. A step of `n` streams
/// takes 10 ms plus 1 ms per stream, and a start takes 4 ms.
fn stepping(next_slo: Option<Duration>) -> Scheduler<(), Asked> {
    let mut model = serving();
    model.set_model_limits(0, 1, together(8));
    model.set_rules(SchedulingRules { slo: SLO, next_slo, max_delay: Duration::ZERO, reject_late: true });
    for number in 1..=3 {
        model.accept(request(number, 0), at(0)).unwrap();
        go(&mut model, at(0));
        model.open_stream(WORKER);
        answer(&mut model, WORKER, ms(4), at(0));
    }
    model
}

#[test]
fn one_step_contains_all_streams_that_are_ready_and_no_other_step_runs_beside_it() {
    let mut model = stepping(None);
    (1..=3).for_each(|number| model.queue_step(WORKER, Asked::step(number)).unwrap());
    assert_eq!(go(&mut model, at(1)).0, [(WORKER, vec![STEPS + 1, STEPS + 2, STEPS + 3])]);
    model.queue_step(WORKER, Asked::step(4)).unwrap();
    assert_eq!(go(&mut model, at(2)).0, [], "its streams are not ready again");
    model.queue_step(WORKER, Asked::step(5)).unwrap();
    answer(&mut model, WORKER, ms(20), at(21));
    assert_eq!(go(&mut model, at(21)).0, [(WORKER, vec![STEPS + 4, STEPS + 5])]);
    let predictor = &model.serving_lane().unwrap().predictor;
    assert!(predictor.predict(3) > Some(ms(13)), "steps are predicted by their number of streams");
    let suspect = QueuedRequest { alone: true, ..Asked::step(6) };
    answer(&mut model, WORKER, ms(12), at(33));
    for step in [Asked::step(7), suspect, Asked::step(8)] {
        model.queue_step(WORKER, step).unwrap();
    }
    let mut steps = Vec::new();
    for now in 34..37 {
        steps.extend(go(&mut model, at(now)).0);
        answer(&mut model, WORKER, ms(1), at(now));
    }
    assert_eq!(
        steps.into_iter().map(|(_, batch)| batch).collect::<Vec<_>>(),
        [vec![STEPS + 7], vec![STEPS + 6], vec![STEPS + 8]]
    );
}

/// Returns the number of starts between the first two steps while many requests wait.
fn starts_between_steps(next_slo: Option<Duration>) -> usize {
    let mut model = stepping(next_slo);
    let mut sent = Vec::new();
    (11..=16).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    for now in 0..12 {
        model.queue_step(WORKER, Asked::step(now + 1)).unwrap();
        sent.extend(go(&mut model, at(now.into())).0.into_iter().map(|(_, batch)| batch[0]));
        while model.lane(WORKER).is_some_and(|lane| !lane.is_idle()) {
            let is_step = model.lane(WORKER).unwrap().in_flight().next().unwrap().step;
            if !is_step {
                model.open_stream(WORKER);
            }
            answer(&mut model, WORKER, if is_step { ms(13) } else { ms(4) }, at(now.into()));
        }
    }
    let steps: Vec<_> = sent.iter().enumerate().filter(|(_, first)| **first >= STEPS).collect();
    steps[1].0 - steps[0].0 - 1
}

#[test]
fn the_slo_of_the_next_answer_bounds_the_starts_between_two_steps() {
    assert_eq!(starts_between_steps(Some(ms(13))), 1, "a start always goes on");
    assert_eq!(starts_between_steps(Some(ms(34))), 2, "half of about 20 ms");
    assert_eq!(starts_between_steps(None), 4, "as long as a step of 17 ms");
}

#[test]
fn a_request_for_which_no_stream_is_free_waits_until_its_deadline() {
    let mut model = stepping(None);
    model.set_model_limits(0, 1, together(3));
    model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    (11..=20).for_each(|number| drop(model.accept(request(number, 1), at(1)).unwrap()));
    let (sent, refused, rest) = go(&mut model, at(2));
    assert_eq!((sent, refused), (vec![], vec![]));
    let SchedulerWait::Until(due) = rest else { panic!("{rest:?}") };
    assert!(due > at(1) + SLO && due < at(2) + SLO, "{due:?}");
    model.close_stream(WORKER);
    assert_eq!(go(&mut model, at(3)).0, [(WORKER, vec![11])]);
    assert_eq!(go(&mut model, due).1, (12..=20).collect::<Vec<_>>());
}

#[test]
fn gaps_count_for_the_policy_by_their_own_slo() {
    let mut model = stepping(Some(ms(30)));
    model.record_answer(ms(40), at(5));
    for gap in [10, 20, 40, 90] {
        model.record_gap(ms(gap), at(5));
    }
    let seen = model.observe(at(10));
    assert_eq!((seen.answered, seen.arrived, seen.missed()), (5, 3 + 4, 2));
    assert_eq!(seen.attainment, Some(0.6));
    assert_eq!(model.traffic().total().answered, 1, "clients see the first answer as before");
    let mut free = stepping(None);
    free.record_gap(ms(90), at(5));
    assert_eq!(free.observe(at(10)).answered, 0);
}

#[test]
fn the_next_step_waits_until_the_answers_of_the_last_one_are_copied() {
    let mut model = stepping(None);
    model.queue_step(WORKER, Asked::step(1)).unwrap();
    assert_eq!(go(&mut model, at(1)).0.len(), 1);
    let id = model.lane(WORKER).unwrap().in_flight().next().unwrap().id;
    let copied = model.take_batch(WORKER, id, at(12)).unwrap();
    model.queue_step(WORKER, Asked::step(2)).unwrap();
    assert_eq!(go(&mut model, at(12)).0, [], "the other streams of the step are not queued yet");
    model.queue_step(WORKER, Asked::step(3)).unwrap();
    model.recycle(WORKER, copied.slot);
    assert_eq!(go(&mut model, at(12)).0, [(WORKER, vec![STEPS + 2, STEPS + 3])]);
}

#[test]
fn a_request_that_an_outage_delayed_waits_for_a_stream_beyond_its_deadline() {
    let mut model = stepping(None);
    model.set_model_limits(0, 1, together(3));
    model.accept(request(11, 1), at(1)).unwrap();
    let late = at(2) + SLO;
    model.put_back(Vec::new(), late);
    model.put_back(vec![request(12, 1)], late + ms(1));
    assert_eq!(go(&mut model, late).1, Vec::<u32>::new(), "the outage is forgiven");
    assert_eq!(go(&mut model, late + ms(1)).1, [12, 11]);
}
