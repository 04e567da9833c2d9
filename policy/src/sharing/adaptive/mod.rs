//! The adaptive policy.
//!
//! It rests on what a cap is: no reservation, but a **weight**. While those who execute may use more than
//! the GPU has, each has its proportion of it; an execution holds SMs only while it runs. So with generous caps
//! the SMs follow the demand from batch to batch, without any hand-over: whoever has much to do takes what
//! the others leave, and those with little to do have it done at once. A share that is cut to a
//! forecast instead gives that up, and is wrong until the next hand-over. What wastes SMs is not a generous cap but a
//! batch that is too small: it pays its fixed part for few requests. Hence:
//!
//! 1. [`demand`] says how much comes, [`curve`] what it costs, [`contention`] what neighbours leave.
//! 2. [`layout`] gives every model as much as it may have, at the same level within a priority, and less
//!    the lower the priority. That changes only when the models, their bounds or the operator's mind do.
//! 3. [`batching`] makes batches as large as the SLO allows, and lets them wait for company on a GPU that is crowded.
//! 4. [`outlook`] lets in what there is room for, the lowest priority last. Doors act within an interval, where a hand-over
//!    takes seconds.

mod batching;
mod contention;
mod curve;
mod demand;
mod layout;
mod learnt;
mod model;
mod outlook;

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

use super::carry_out::plan;
use super::{Change, Decision, Door, Facts, Live, Terms, Verdict, Waiting};
use model::Model;
use outlook::Outlook;

/// A share that just changed stays for this long, the fast path aside.
const DWELL: Duration = Duration::from_secs(5);

/// Shares nearer to each other than this, as a factor, are not worth a hand-over.
const DEAD_BAND: f64 = 1.1;

/// The adaptive policy and what it remembers.
#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    models: Vec<Model>,
    /// The share that each should have.
    shares: Vec<Sms>,
    epoch: u64,
}

impl Adaptive {
    pub(super) fn new(gpus: &[Sms], terms: &[Terms]) -> Self {
        let models = terms.iter().map(|terms| Model::new(terms, gpus[terms.gpu])).collect();
        Self { models, shares: layout::shares(gpus, terms), epoch: 0 }
    }

    /// The shares that the models should have.
    pub(super) fn shares(&self) -> &[Sms] {
        &self.shares
    }

    pub(super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Decision {
        self.observe(terms, facts);
        let (doors, mut report) = self.doors(terms, facts);
        let mut changes = Vec::new();
        for (model, (&to, live)) in self.shares.iter().zip(&facts.models).enumerate() {
            if near(live.coming.unwrap_or(live.share), to) {
                continue;
            }
            report[model] = moved(to, live, facts);
            if let Verdict::Grow { from, to } | Verdict::Shrink { from, to } = report[model] {
                let at_once = live.standing == Some(to);
                changes.push(Change { model, from, to, at_once, onset: facts.now });
            }
        }
        Decision { plan: plan(changes, &mut self.epoch), doors, standby: vec![None; terms.len()], report }
    }

    /// Learns from what was seen.
    pub(super) fn observe(&mut self, terms: &[Terms], facts: &Facts) {
        for (gpu, &sms) in facts.gpus.iter().enumerate() {
            outlook::observe(&mut self.models, terms, facts, gpu, sms);
        }
    }

    /// Our batching and admission for whatever shares are in force, and what there is to say about each model.
    pub(super) fn doors(&self, terms: &[Terms], facts: &Facts) -> (Vec<Door>, Vec<Verdict>) {
        let mut doors: Vec<Door> = terms.iter().map(|terms| Door::open(terms.max_batch.max(1))).collect();
        let mut report = vec![Verdict::Keep; terms.len()];
        for (gpu, &sms) in facts.gpus.iter().enumerate() {
            let outlook = Outlook::of(&self.models, terms, facts, gpu, sms);
            for (model, door) in outlook.doors() {
                report[model] = outlook.verdict(model, &door);
                doors[model] = door;
            }
        }
        (doors, report)
    }

    /// The standing worker takes over when it has more SMs than the one in force and no more than it should have.
    pub(super) fn pressure(&self, model: usize, onset: Moment, facts: &Facts) -> Option<Change> {
        let live = facts.models.get(model)?;
        let to = live.standing.filter(|&to| to > live.share && to <= self.shares[model])?;
        let free = !live.held && live.coming.is_none();
        free.then_some(Change { model, from: live.share, to, at_once: true, onset })
    }
}

fn near(one: Sms, other: Sms) -> bool {
    let (small, large) = (one.min(other), one.max(other));
    large.0 - small.0 < Sms::STEP || f64::from(large.0) <= f64::from(small.0) * DEAD_BAND
}

/// What becomes of a model that has another share than it should have.
fn moved(to: Sms, live: &Live, facts: &Facts) -> Verdict {
    let from = live.share;
    let to = live.standing.filter(|&standing| near(standing, to)).unwrap_or(to);
    let until = live.since + DWELL;
    // A share since the origin is the one that the worker was started with.
    let settling = !live.since.since_origin().is_zero() && facts.now < until;
    match live {
        Live { held: true, .. } => Verdict::Wait { to, waiting: Waiting::Held },
        Live { coming: Some(_), .. } => Verdict::Wait { to, waiting: Waiting::Handover },
        _ if settling => Verdict::Wait { to, waiting: Waiting::Dwell { until } },
        _ if to > from => Verdict::Grow { from, to },
        _ => Verdict::Shrink { from, to },
    }
}

#[cfg(test)]
mod tests;
