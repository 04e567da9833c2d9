use std::time::Duration;

use super::super::carry_out::towards;
use super::super::fixtures::{live, terms};
use super::super::{Executed, Live};
use super::*;

const GPU: Sms = Sms(132);
const STEP: Duration = Duration::from_millis(100);

/// Two models: one that matters most, and one that matters less.
struct World {
    policy: Adaptive,
    terms: Vec<Terms>,
    now: Moment,
    shares: Vec<Sms>,
    changes: Vec<(usize, Sms)>,
}

impl World {
    fn new(priorities: &[u32]) -> Self {
        let model = |&priority: &u32| Terms { priority, max: GPU, ..terms("model", 10) };
        let terms: Vec<Terms> = priorities.iter().map(model).collect();
        let policy = Adaptive::new(&[GPU], &terms);
        let shares = policy.shares();
        Self { policy, terms, now: Moment::default(), shares, changes: Vec::new() }
    }

    /// So many times a tenth of a second passes in which all models see this; changes are in force at once. Returns the last doors.
    fn pass(&mut self, times: usize, seen: impl Fn(&[Sms]) -> Vec<Seen>) -> Vec<Door> {
        let mut doors = Vec::new();
        for _ in 0..times {
            self.now = self.now + STEP;
            let models = self.shares.iter().zip(seen(&self.shares));
            let models = models.map(|(&share, seen)| Live { seen, ..live(share) }).collect();
            let facts = Facts { now: self.now, gpus: vec![GPU], models };
            let decision = towards(&self.policy.decide(&self.terms, &facts), &self.terms, &facts);
            for change in decision.plan.iter().flat_map(|plan| &plan.changes) {
                self.shares[change.model] = change.to;
                self.changes.push((change.model, change.to));
            }
            doors = decision.doors;
        }
        doors
    }
}

/// A tenth of a second: a hundred requests, of which so many missed, in batches of 4 that take half of what is promised.
fn seen(missed: u64) -> Seen {
    let executed = vec![Executed { rows: 4, count: 25, mean: Duration::from_millis(3) }];
    let (answered, in_time) = (100, 100 - missed);
    let p99_latency = Duration::from_millis(4);
    Seen { span: STEP, arrived: 100, answered, in_time, busy: 0.5, p99_latency, executed, ..Seen::default() }
}

/// The first is short of SMs as long as the second has more than half of them.
fn helped_by_half(shares: &[Sms]) -> Vec<Seen> {
    vec![seen(if shares[1] > Sms(66) { 20 } else { 0 }), seen(0)]
}

#[test]
fn nothing_is_done_while_nobody_misses() {
    let mut world = World::new(&[1, 2]);
    let doors = world.pass(1000, |_| vec![seen(0), seen(1)]);
    assert!(world.changes.is_empty(), "one in a hundred may miss");
    assert_eq!(doors, [Door::open(world.terms[0].max_batch); 2]);
}

#[test]
fn the_least_that_helps_is_done_within_half_a_second() {
    let mut world = World::new(&[1, 2]);
    world.pass(10, helped_by_half);
    assert_eq!(world.shares, [GPU, Sms(66)]);
    assert!(world.changes.iter().all(|(model, _)| *model == 1));
}
