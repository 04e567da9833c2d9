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

use shadowslice_shared::units::{Moment, Sms};

use crate::scenario::{Arrival, Scenario};
pub use cost::{Cost, cheapest};
use sweep::{Job, lost_work};

/// How many workers of a model execute at once, in a hand-over.
const LANES: f64 = 2.0;

/// What nothing can exceed.
#[derive(Debug, Clone, PartialEq)]
pub struct Bound {
    /// The most requests that can be answered in time, over all models.
    pub in_time: u64,
    /// The same per second of the span.
    pub goodput_rps: f64,
    /// For each model the most requests a second if it had its GPU to itself.
    pub models: Vec<f64>,
    /// The priority classes, the highest first.
    pub classes: Vec<Class>,
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

/// The bound for this load; rates are per second of `span`.
pub fn goodput(scenario: &Scenario, arrivals: &[Arrival], span: Duration) -> Bound {
    let per_second = |count: f64| per_second(whole(count), span);
    let models = models(scenario, arrivals);
    let all: Vec<usize> = (0..models.len()).collect();
    let priority = |m: &usize| scenario.models[*m].terms.priority;
    let answered: f64 = most(scenario, &models, all.clone(), |_| 0).iter().sum();
    let in_order = most(scenario, &models, all.clone(), |m| priority(&m));
    let classes: BTreeSet<u32> = all.iter().map(priority).collect();
    let class = |level| {
        let members: Vec<usize> = all.iter().copied().filter(|m| priority(m) == level).collect();
        let after: f64 = members.iter().map(|&m| in_order[m]).sum();
        let alone: f64 = most(scenario, &models, members, |_| 0).iter().sum();
        Class { priority: level, goodput_rps: per_second(alone), after_rps: per_second(after) }
    };
    Bound {
        in_time: whole(answered),
        goodput_rps: per_second(answered),
        models: models.iter().map(|model| per_second(model.lanes_serve)).collect(),
        classes: classes.into_iter().map(class).collect(),
    }
}

/// One model with its load.
struct Model {
    gpu: usize,
    slo: Duration,
    /// In the order of their arrival.
    arrivals: Vec<Moment>,
    /// Nothing if no request can be answered in time.
    cost: Option<Cost>,
    /// The most requests that its lanes can answer in time.
    lanes_serve: f64,
}

fn models(scenario: &Scenario, arrivals: &[Arrival]) -> Vec<Model> {
    let mut own = vec![Vec::new(); scenario.models.len()];
    for arrival in arrivals {
        if let Some(own) = own.get_mut(arrival.model) {
            own.push(arrival.at);
        }
    }
    let with_load = |(served, mut arrivals): (&crate::scenario::Served, Vec<Moment>)| {
        arrivals.sort_unstable();
        let terms = &served.terms;
        let sms = scenario.gpus.get(terms.gpu).copied().unwrap_or(Sms(0));
        let cost = cheapest(&served.truth.execution, terms.max_batch, terms.max.min(sms), terms.slo);
        let mut model = Model { gpu: terms.gpu, slo: terms.slo, arrivals, cost, lanes_serve: 0.0 };
        model.lanes_serve = lanes_serve(&model);
        model
    };
    scenario.models.iter().zip(own).map(with_load).collect()
}

fn lanes_serve(model: &Model) -> f64 {
    let Some(cost) = &model.cost else {
        return 0.0;
    };
    let jobs: Vec<Job> = model.arrivals.iter().map(|&at| Job::new(at, model.slo, cost.lane_ns)).collect();
    jobs.len() as f64 - lost_work(&jobs, LANES) / cost.lane_ns
}

/// For each model the requests answered in time when the members are served greedily, by rank and then
/// the cheapest first.
fn most(scenario: &Scenario, models: &[Model], members: Vec<usize>, rank: impl Fn(usize) -> u32) -> Vec<f64> {
    let mut answered = vec![0.0; models.len()];
    for (gpu, sms) in scenario.gpus.iter().enumerate() {
        let mut order: Vec<(usize, f64)> = members
            .iter()
            .filter(|&&m| models[m].gpu == gpu)
            .filter_map(|&m| Some((m, models[m].cost.as_ref()?.sm_ns)))
            .collect();
        order.sort_by(|a, b| rank(a.0).cmp(&rank(b.0)).then(a.1.total_cmp(&b.1)));
        greedy(models, &order, f64::from(sms.0), &mut answered);
    }
    answered
}

/// The greedy choice on one GPU, over models and their costs in this order.
fn greedy(models: &[Model], order: &[(usize, f64)], sms: f64, answered: &mut [f64]) {
    let offered = |first: usize| -> f64 {
        order[..first].iter().map(|&(m, cost)| models[m].arrivals.len() as f64 * cost).sum()
    };
    let lost = |first: usize| lost_work(&jobs(models, &order[..first]), sms);
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

/// The requests of these models, in the order of their arrival.
fn jobs(models: &[Model], of: &[(usize, f64)]) -> Vec<Job> {
    let of_model = |&(m, cost): &(usize, f64)| {
        let model = &models[m];
        model.arrivals.iter().map(move |&at| Job::new(at, model.slo, cost))
    };
    let mut jobs: Vec<Job> = of.iter().flat_map(of_model).collect();
    jobs.sort_by_key(Job::at);
    jobs
}

/// Whole requests; what is a hair below one more is one more, rounding errors being what they are.
fn whole(count: f64) -> u64 {
    (count + 1e-3).floor() as u64
}

fn per_second(count: u64, span: Duration) -> f64 {
    if span.is_zero() { 0.0 } else { count as f64 / span.as_secs_f64() }
}

#[cfg(test)]
mod tests;
