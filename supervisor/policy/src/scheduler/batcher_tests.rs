use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::test_runner::TestCaseError;
use shadowslice_shared::units::Sms;

use super::*;
use crate::tenants::TenantId;

type Request = QueuedRequest<u8, u32>;

const LIMITS: BatchLimits =
    BatchLimits { max_rows: 4, max_requests: 16, max_delay: Duration::from_millis(10) };

fn ms(ms: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_millis(ms))
}

/// Returns a request that arrives at 0 ms and has its deadline at 100 ms.
fn request(item: u32, shape: u8, rows: u32) -> Request {
    QueuedRequest {
        shape,
        rows,
        arrived: ms(0),
        deadline: ms(100),
        expires: None,
        level: 0,
        tenant: TenantId::DEFAULT,
        alone: false,
        item,
    }
}

fn queue_of(requests: Vec<Request>) -> RequestQueue<u8, u32> {
    let mut queue = RequestQueue::default();
    for request in requests {
        queue.push(request);
    }
    queue
}

/// Returns the items of the batch that runs now.
fn run(queue: &mut RequestQueue<u8, u32>, limits: &BatchLimits, now: Timestamp) -> Vec<u32> {
    match next(queue, limits, None, now) {
        NextBatch::Run(taken) => taken.batch.into_iter().map(|entry| entry.item).collect(),
        other => panic!("nothing runs: {other:?}"),
    }
}

#[test]
fn without_a_delay_a_free_slot_takes_all_queued_requests() {
    let limits = BatchLimits { max_delay: Duration::ZERO, ..LIMITS };
    let mut queue = queue_of(vec![request(1, 0, 1), request(2, 1, 1), request(3, 0, 1)]);
    assert_eq!(run(&mut queue, &limits, ms(0)), [1, 3]);
    assert_eq!(run(&mut queue, &limits, ms(0)), [2]);
    assert_eq!(next(&mut queue, &limits, None, ms(0)), NextBatch::Idle);
}

#[test]
fn a_batch_waits_for_requests_from_its_oldest_arrival() {
    let mut young = request(2, 0, 1);
    young.arrived = ms(7);
    young.deadline = ms(50);
    let mut queue = queue_of(vec![request(1, 0, 1), young]);
    assert_eq!(next(&mut queue, &LIMITS, None, ms(8)), NextBatch::WaitUntil(ms(10)));
    assert_eq!(run(&mut queue, &LIMITS, ms(10)), [2, 1]);
}

#[test]
fn a_batch_never_waits_past_its_oldest_deadline() {
    let mut urgent = request(2, 0, 1);
    urgent.deadline = ms(3);
    let mut queue = queue_of(vec![request(1, 0, 1), urgent]);
    assert_eq!(next(&mut queue, &LIMITS, None, ms(0)), NextBatch::WaitUntil(ms(3)));
    assert_eq!(run(&mut queue, &LIMITS, ms(3)), [2, 1]);
}

#[test]
fn a_full_batch_does_not_wait_and_the_next_one_does_not_fit() {
    let mut queue = queue_of(vec![request(1, 0, 3), request(2, 0, 2), request(3, 0, 1)]);
    assert_eq!(run(&mut queue, &LIMITS, ms(0)), [1], "a request that does not fit is not overtaken");
    assert_eq!(next(&mut queue, &LIMITS, None, ms(0)), NextBatch::WaitUntil(ms(10)));
}

#[test]
fn a_waiting_head_does_not_keep_the_slot_from_a_full_batch() {
    let mut head = request(1, 0, 1);
    head.deadline = ms(40);
    let mut queue = queue_of(vec![head, request(2, 1, 2), request(3, 1, 2), request(4, 1, 4)]);
    assert_eq!(run(&mut queue, &LIMITS, ms(0)), [2, 3]);
    assert_eq!(run(&mut queue, &LIMITS, ms(10)), [1], "the head goes first once its wait is over");
}

#[test]
fn without_a_batch_axis_or_when_alone_a_request_runs_by_itself() {
    let no_axis = BatchLimits { max_rows: 0, ..LIMITS };
    let mut queue = queue_of(vec![request(1, 0, 1), request(2, 0, 1)]);
    assert_eq!(run(&mut queue, &no_axis, ms(0)), [1]);
    let suspect = Request { alone: true, ..request(3, 0, 1) };
    queue.put_back(suspect);
    assert_eq!(run(&mut queue, &LIMITS, ms(0)), [3]);
    assert_eq!(next(&mut queue, &LIMITS, None, ms(0)), NextBatch::WaitUntil(ms(10)));
}

#[test]
fn a_batch_holds_no_more_requests_than_allowed() {
    let limits = BatchLimits { max_requests: 2, ..LIMITS };
    let mut queue = queue_of((1..=3).map(|item| request(item, 0, 1)).collect());
    assert_eq!(run(&mut queue, &limits, ms(0)), [1, 2]);
    assert_eq!(next(&mut queue, &limits, None, ms(0)), NextBatch::WaitUntil(ms(10)));
}

/// An event in the random test of a queue.
#[derive(Debug, Clone)]
enum Step {
    Arrive {
        shape: u8,
        rows: u32,
        patience: u64,
        alone: bool,
    },
    Ask {
        after: u64,
    },
    /// The last batch is put back into the queue.
    Return,
}

fn step() -> impl Strategy<Value = Step> {
    let arrive = (0..3_u8, 1..=8_u32, 0..40_u64, any::<u8>())
        .prop_map(|(shape, rows, patience, odd)| Step::Arrive { shape, rows, patience, alone: odd < 25 });
    let ask = (0..15_u64).prop_map(|after| Step::Ask { after });
    prop_oneof![4 => arrive, 3 => ask, 1 => Just(Step::Return)]
}

/// A reference model of the queue as a sorted list. The `bool` is false for requests that were put
/// back.
#[derive(Default)]
struct Model {
    waiting: Vec<(bool, Timestamp, Request)>,
}

impl Model {
    fn add(&mut self, fresh: bool, request: Request) {
        self.waiting.push((fresh, request.deadline, request));
        self.waiting.sort_by_key(|(fresh, deadline, _)| (*fresh, *deadline));
    }

    fn of_shape(&self, shape: u8) -> Vec<&Request> {
        let joinable = |request: &&Request| request.shape == shape && !request.alone;
        self.waiting.iter().map(|(_, _, request)| request).filter(joinable).collect()
    }

    /// Returns true if a batch of this shape does not wait for further requests.
    fn is_closed(&self, shape: u8, limits: &BatchLimits, now: Timestamp) -> bool {
        let joinable = self.of_shape(shape);
        joinable.iter().map(|request| request.rows).sum::<u32>() >= limits.max_rows
            || joinable.iter().any(|r| r.deadline <= now || r.arrived + limits.max_delay <= now)
    }

    /// Checks that exactly this batch can run next, and removes its requests.
    fn takes(
        &mut self,
        batch: &[Request],
        limits: &BatchLimits,
        now: Timestamp,
    ) -> Result<(), TestCaseError> {
        let first = &batch[0];
        if first.alone || limits.max_rows == 0 {
            prop_assert_eq!(batch.len(), 1);
            let earliest = self.waiting.iter().find(|(_, _, r)| r.alone || limits.max_rows == 0);
            prop_assert_eq!(earliest.map(|(_, _, r)| r.item), Some(first.item));
        } else {
            prop_assert!(self.is_closed(first.shape, limits, now), "ran too early");
            let queued = self.of_shape(first.shape);
            let (taken, left) = queued.split_at(batch.len());
            prop_assert!(taken.iter().zip(batch).all(|(a, b)| a.item == b.item), "out of order");
            let rows: u32 = batch.iter().map(|request| request.rows).sum();
            prop_assert!(rows <= limits.max_rows, "too large");
            prop_assert!(left.first().is_none_or(|r| rows + r.rows > limits.max_rows), "too small");
        }
        for request in self.waiting.iter().map(|(_, _, r)| r).take_while(|r| r.item != first.item) {
            let ready = request.alone || self.is_closed(request.shape, limits, now);
            prop_assert!(!ready, "{} was ready before {}", request.item, first.item);
        }
        self.waiting.retain(|(_, _, r)| batch.iter().all(|taken| taken.item != r.item));
        Ok(())
    }
}

proptest! {
    #[test]
    fn whatever_happens_batches_are_as_the_rules_say(
        steps in proptest::collection::vec(step(), 1..120),
        max_rows in prop_oneof![Just(0_u32), Just(8)],
        max_delay in prop_oneof![Just(0_u64), Just(10)],
    ) {
        let limits = BatchLimits { max_rows, max_requests: 16, max_delay: Duration::from_millis(max_delay) };
        let (mut queue, mut model) = (RequestQueue::default(), Model::default());
        let (mut now, mut latest) = (ms(0), Vec::<Request>::new());
        for (item, step) in (0..).zip(steps) {
            match step {
                Step::Arrive { shape, rows, patience, alone } => {
                    let deadline = now + Duration::from_millis(patience);
                    let request = QueuedRequest { shape, rows, arrived: now, deadline, expires: None, level: 0, tenant: TenantId::DEFAULT, alone, item };
                    queue.push(request.clone());
                    model.add(true, request);
                }
                Step::Return => {
                    for request in std::mem::take(&mut latest) {
                        queue.put_back(request.clone());
                        model.add(false, request);
                    }
                }
                Step::Ask { after } => {
                    now = now + Duration::from_millis(after);
                    match next(&mut queue, &limits, None, now) {
                        NextBatch::Idle => prop_assert!(model.waiting.is_empty()),
                        NextBatch::WaitUntil(until) => {
                            prop_assert!(until > now && !model.waiting.is_empty());
                            let ready = |(_, _, r): &(_, _, Request)| {
                                r.alone || max_rows == 0 || model.is_closed(r.shape, &limits, now)
                            };
                            prop_assert!(!model.waiting.iter().any(ready));
                            prop_assert!((0..3).any(|shape| model.is_closed(shape, &limits, until)));
                        }
                        NextBatch::Run(FormedBatch { batch, late }) => {
                            prop_assert!(late.is_empty());
                            model.takes(&batch, &limits, now)?;
                            latest = batch;
                        }
                    }
                }
            }
            prop_assert_eq!(queue.is_empty(), model.waiting.is_empty());
        }
        let left: Vec<u32> = queue.drain_all().into_iter().map(|entry| entry.item).collect();
        let expected: Vec<u32> = model.waiting.into_iter().map(|(_, _, r)| r.item).collect();
        prop_assert_eq!(left, expected);
    }
}

#[test]
fn a_batch_is_parted_only_where_the_parts_take_no_longer() {
    // These times were measured for VGG-19 on a whole H200, in µs.
    let times = [(1, 828), (2, 1142), (4, 1607), (8, 2683), (16, 4643)];
    let mut predictor = Predictor::new(None, Sms(132)).padded_to(times.map(|(rows, _)| rows).to_vec());
    for (rows, took) in times {
        predictor.expect(rows, Duration::from_micros(took));
    }
    for (rows, first) in
        [(1, 1), (3, 3), (5, 4), (6, 6), (7, 7), (9, 8), (12, 8), (13, 13), (16, 16), (20, 20)]
    {
        assert_eq!(rows_sent_first(rows, &predictor), first, "of {rows}");
    }
    assert_eq!(rows_sent_first(12, &Predictor::new(None, Sms(132))), 12, "there are no predictions");
}

#[test]
fn a_worker_that_claims_to_take_for_ever_breaks_nothing() {
    let mut predictor = Predictor::new(None, Sms(132)).padded_to(vec![1, 2, 4, 8]);
    [1, 2, 4, 8].into_iter().for_each(|rows| predictor.expect(rows, Duration::MAX));
    assert_eq!((rows_sent_first(6, &predictor), rows_sent_first(8, &predictor)), (4, 8));
}
