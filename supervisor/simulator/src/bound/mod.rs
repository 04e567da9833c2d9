//! How many requests anything at all could answer in time: the fluid relaxation.
//!
//! A request of model m costs its GPU at least `c` SM·ns, spent between its arrival and its deadline
//! (see [`cheapest`]), and its model's lanes at least `e` ns, since a lane runs one batch at a time, and a model has two at most:
//! while one drains in a hand-over, the next one works. Any
//! schedule that answers a set of requests therefore yields, by giving each request its part of its
//! batch, a fluid one: each request gets its `c` within its window, and the GPU never spends more
//! than its SMs. Fluid schedules may also answer fractions of requests, so their maximum is an upper
//! bound.
//!
//! That maximum is computed exactly, but for the lanes. The work that a fluid schedule can do for
//! each model is the flow from sources (requests) through a network of moments, so the feasible
//! vectors of work form a polymatroid. On it the greedy algorithm is optimal: do as much work as
//! possible for the model with the cheapest requests, then as much as possible for the next one in
//! addition. The rank of the first k models, the most work that can be done for them together, is
//! what earliest deadline first does, because windows are intervals (Glover's matching in convex
//! bipartite graphs). A lane bounds its model's total from above, and a chain of prefix sums with
//! such bounds is again a polymatroid, so the greedy choice stays the best.
//!
//! What is maximised is the number of requests; [`Class::after_rps`] alone goes by priority first.
//! Bounds are rounded down to whole requests, for nobody answers half of one. Takes `O(n log n)` for
//! each model that comes too late to be served in full, and `O(n log n log k)` to find the first of
//! those.
//!
//! Valid as long as execution is never faster than the truth profile (a world with noise is bounded by a
//! profile scaled to its fastest executions) and no batch executes for as long as lies between two hand-overs of a model, so that
//! three of its workers never execute at once.

mod cost;
mod sweep;

use std::collections::BTreeSet;
use std::time::Duration;

use shadowslice_shared::units::Sms;

use crate::scenario::{Arrival, Scenario};
pub use cost::{Cost, cheapest};
use sweep::{Job, Sweep};

/// How many workers of a model execute at once, in a hand-over.
const LANES: f64 = 2.0;

/// What nothing can exceed under one load.
pub struct Bound<'s> {
    scenario: &'s Scenario,
    models: Vec<Demand>,
    /// In their order.
    arrivals: Vec<Arrival>,
    span: Duration,
}

/// What a priority class can get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Class {
    /// 1 is the highest.
    pub priority: u32,
    /// The most requests a second that can be answered in time if there were no other class.
    pub goodput_rps: f64,
    /// The same after each higher class has had the most work done that can be done for it.
    pub after_rps: f64,
}

impl<'s> Bound<'s> {
    /// The bound for this load; rates are per second of `span`.
    pub fn new(scenario: &'s Scenario, arrivals: &[Arrival], span: Duration) -> Self {
        let mut arrivals = arrivals.to_vec();
        arrivals.sort_by_key(|arrival| arrival.at);
        Self { scenario, models: models(scenario, &arrivals), arrivals, span }
    }

    /// The most requests that can be answered in time, over all models.
    pub fn in_time(&self) -> u64 {
        whole(self.most(|_| true, |_| 0).iter().sum())
    }

    /// The same per second of the span.
    pub fn goodput_rps(&self) -> f64 {
        self.per_second(self.in_time())
    }

    /// For each model the most requests a second if it had its GPU to itself.
    pub fn models(&self) -> Vec<f64> {
        self.models.iter().map(|model| self.per_second(whole(model.lanes_serve))).collect()
    }

    /// The priority classes, the highest first.
    pub fn classes(&self) -> Vec<Class> {
        let priority = |m: usize| self.scenario.models[m].terms.priority;
        let in_order = self.most(|_| true, priority);
        let levels: BTreeSet<u32> = (0..self.models.len()).map(priority).collect();
        let class = |level| {
            let members = (0..self.models.len()).filter(|&m| priority(m) == level);
            let after: f64 = members.map(|m| in_order[m]).sum();
            let alone: f64 = self.most(|m| priority(m) == level, |_| 0).iter().sum();
            let per_second = |count: f64| self.per_second(whole(count));
            Class { priority: level, goodput_rps: per_second(alone), after_rps: per_second(after) }
        };
        levels.into_iter().map(class).collect()
    }

    /// For each model the requests answered in time when the members are served greedily, by rank and then
    /// the cheapest first.
    fn most(&self, member: impl Fn(usize) -> bool, rank: impl Fn(usize) -> u32) -> Vec<f64> {
        let mut answered = vec![0.0; self.models.len()];
        for (gpu, sms) in self.scenario.gpus.iter().enumerate() {
            let here = self.models.iter().enumerate().filter(|&(m, model)| model.gpu == gpu && member(m));
            let mut order: Vec<(usize, f64)> =
                here.filter_map(|(m, model)| Some((m, model.cost?.sm_ns))).collect();
            order.sort_by(|a, b| rank(a.0).cmp(&rank(b.0)).then(a.1.total_cmp(&b.1)));
            self.greedy(&order, f64::from(sms.0), &mut answered);
        }
        answered
    }

    /// The greedy choice on one GPU, over models and their costs in this order.
    fn greedy(&self, order: &[(usize, f64)], sms: f64, answered: &mut [f64]) {
        let models = &self.models;
        let offered =
            |first: usize| order[..first].iter().map(|&(m, cost)| models[m].requests * cost).sum::<f64>();
        let lost = |first: usize| self.lost(&order[..first], sms);
        let counts: Vec<usize> = (1..=order.len()).collect();
        let all_served = if lost(order.len()) == 0.0 {
            order.len()
        } else {
            counts.partition_point(|&first| lost(first) == 0.0)
        };
        let mut used = 0.0;
        for (index, &(m, cost)) in order.iter().enumerate() {
            let own = models[m].lanes_serve * cost;
            let room = if index < all_served { own } else { offered(index + 1) - lost(index + 1) - used };
            let work = own.min(room).max(0.0);
            used += work;
            answered[m] = work / cost;
        }
    }

    /// The work of these models that a GPU leaves undone, in SM·ns.
    fn lost(&self, of: &[(usize, f64)], sms: f64) -> f64 {
        let mut costs = vec![None; self.models.len()];
        of.iter().for_each(|&(m, cost)| costs[m] = Some(cost));
        let mut sweep = Sweep::new(sms);
        for arrival in &self.arrivals {
            if let Some(&Some(cost)) = costs.get(arrival.model) {
                sweep.arrive(Job::new(arrival.at, self.models[arrival.model].slo, cost));
            }
        }
        sweep.lost()
    }

    fn per_second(&self, count: u64) -> f64 {
        if self.span.is_zero() { 0.0 } else { count as f64 / self.span.as_secs_f64() }
    }
}

/// One model with its load.
struct Demand {
    gpu: usize,
    slo: Duration,
    requests: f64,
    /// Nothing if no request can be answered in time.
    cost: Option<Cost>,
    /// The most requests that its lanes can answer in time.
    lanes_serve: f64,
}

/// The models, and what their lanes can do of these arrivals, the first first.
fn models(scenario: &Scenario, arrivals: &[Arrival]) -> Vec<Demand> {
    let mut lanes = Vec::with_capacity(scenario.models.len());
    for served in &scenario.models {
        let terms = &served.terms;
        let sms = scenario.gpus.get(terms.gpu).copied().unwrap_or(Sms(0));
        let cost = cheapest(&served.truth.execution, terms.max_batch, terms.most().min(sms), terms.slo);
        let model = Demand { gpu: terms.gpu, slo: terms.slo, requests: 0.0, cost, lanes_serve: 0.0 };
        lanes.push((model, Sweep::new(LANES)));
    }
    for arrival in arrivals {
        if let Some((model, lane)) = lanes.get_mut(arrival.model) {
            model.requests += 1.0;
            if let Some(cost) = model.cost {
                lane.arrive(Job::new(arrival.at, model.slo, cost.lane_ns));
            }
        }
    }
    let served = |(model, lane): (Demand, Sweep)| {
        let lanes_serve = model.cost.map_or(0.0, |cost| model.requests - lane.lost() / cost.lane_ns);
        Demand { lanes_serve, ..model }
    };
    lanes.into_iter().map(served).collect()
}

/// Whole requests; what is a hair below one more is one more, rounding errors being what they are.
fn whole(count: f64) -> u64 {
    (count + 1e-3).floor() as u64
}

#[cfg(test)]
mod tests;
