//! The adaptive policy.
//!
//! It rests on one property of caps: while those who execute may use more than the GPU has, each has
//! its proportion. So caps are *weights*, and an execution holds SMs only while it runs. With caps in proportion to
//! what the models need, everybody has his need even when all execute, and takes what the others
//! leave whenever they do not. Demand that moves between models moves the SMs with it, within
//! a batch's time and without any hand-over. Hand-overs correct the weights when the needs themselves have moved.
//!
//! ```text
//! demand ─┐
//! curve ──┴▶ need ─▶ layout ─▶ caps ─▶ price ─▶ plan
//!   ▲                   contention ─────▲
//!   └── seen
//! ```

mod contention;
mod curve;
mod demand;
mod layout;
mod learnt;
mod model;
mod need;
mod outlook;

use std::time::Duration;

use shadowslice_shared::units::Sms;

use super::carry_out::plan;
use super::door::LEAD;
use super::{Change, Decision, Door, Facts, Live, Pressure, Terms, Verdict, Waiting};
use model::Model;
use outlook::Outlook;

/// A share that just changed stays for this long.
const DWELL: Duration = Duration::from_secs(5);

/// Seconds to look on before the first change.
const FIRST_LOOK: f64 = 1.0;

/// Shares nearer to each other than this, as a factor, are not worth a hand-over.
const DEAD_BAND: f64 = 1.2;

/// How long a change is expected to pay, in seconds.
const HORIZON: f64 = 20.0;

/// The adaptive policy and what it remembers.
#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    models: Vec<Model>,
    epoch: u64,
}

impl Adaptive {
    pub(super) fn new(gpus: &[Sms], terms: &[Terms]) -> Self {
        Self { models: terms.iter().map(|terms| Model::new(terms, gpus[terms.gpu])).collect(), epoch: 0 }
    }

    pub(super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Decision {
        for (gpu, &sms) in facts.gpus.iter().enumerate() {
            outlook::observe(&mut self.models, terms, facts, gpu, sms);
        }
        let mut report = vec![Verdict::Keep; terms.len()];
        let mut changes = Vec::new();
        for (gpu, &sms) in facts.gpus.iter().enumerate() {
            let outlook = Outlook::of(&self.models, terms, facts, gpu, sms);
            self.weigh(&outlook, facts, &mut report, &mut changes);
        }
        let doors = self.doors(terms, facts);
        Decision { plan: plan(changes, &mut self.epoch), doors, report }
    }

    /// Finds what should change on one GPU, and says why.
    fn weigh(&self, outlook: &Outlook, facts: &Facts, report: &mut [Verdict], changes: &mut Vec<Change>) {
        if outlook.suffices() {
            return;
        }
        let wanted = outlook.wanted();
        let pays = outlook.gain(&wanted) * HORIZON > outlook.price(&wanted, DEAD_BAND);
        for (&model, &to) in outlook.here().iter().zip(&wanted) {
            let live = &facts.models[model];
            let to = standing_near(live, Sms(to));
            if outlook::near(live.share.0, to.0, DEAD_BAND) {
                continue;
            }
            let waiting = self.waits(model, live, facts).or((!pays).then_some(Waiting::TooDear));
            report[model] = match waiting {
                Some(waiting) => Verdict::Wait { to, waiting },
                None => verdict(live.share, to, outlook.pressure(model)),
            };
            if waiting.is_none() {
                changes.push(Change { model, from: live.share, to, at_once: live.standing == Some(to) });
            }
        }
    }

    fn waits(&self, model: usize, live: &Live, facts: &Facts) -> Option<Waiting> {
        if live.held {
            return Some(Waiting::Held);
        }
        if live.coming.is_some() {
            return Some(Waiting::Handover);
        }
        if !self.models[model].ready(FIRST_LOOK) {
            return Some(Waiting::Observations);
        }
        let until = live.since + DWELL;
        let changed = !live.since.since_origin().is_zero();
        (changed && facts.now < until).then_some(Waiting::Dwell { until })
    }

    fn doors(&self, terms: &[Terms], facts: &Facts) -> Vec<Door> {
        let door = |((model, terms), live): ((&Model, &Terms), &Live)| Door {
            max_batch: model.max_batch(terms, live.share),
            refuse_late: true,
            lead: LEAD,
        };
        self.models.iter().zip(terms).zip(&facts.models).map(door).collect()
    }

    /// The standing worker takes over when it has more SMs than the one in force, and those are needed.
    pub(super) fn pressure(&mut self, model: usize, terms: &[Terms], facts: &Facts) -> Option<Change> {
        let live = facts.models.get(model)?;
        let to = live.standing.filter(|&to| to > live.share && !live.held && live.coming.is_none())?;
        let gpu = terms[model].gpu;
        let outlook = Outlook::of(&self.models, terms, facts, gpu, facts.gpus[gpu]);
        (!outlook.enough(model)).then_some(Change { model, from: live.share, to, at_once: true })
    }
}

/// The share of the standing worker, if that is about what is wanted: it costs nothing.
fn standing_near(live: &Live, to: Sms) -> Sms {
    live.standing.filter(|standing| outlook::near(standing.0, to.0, DEAD_BAND)).unwrap_or(to)
}

fn verdict(from: Sms, to: Sms, because: Pressure) -> Verdict {
    if to > from { Verdict::Grow { from, to, because } } else { Verdict::Shrink { from, to } }
}
