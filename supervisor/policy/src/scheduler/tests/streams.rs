//! Tests of streams: the order of their steps, and how streams end.

use super::*;

impl Asked {
    fn step(number: u32) -> QueuedRequest<(), Self> {
        request(STEPS + number, 0)
    }
}

#[test]
fn streams_begin_up_to_their_number_and_then_go_on_in_turns_where_they_began() {
    let mut model = serving();
    model.set_model_limits(0, 1, Some(2));
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
    model.set_model_limits(0, 1, Some(8));
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
    model.set_model_limits(0, 1, Some(2));
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
