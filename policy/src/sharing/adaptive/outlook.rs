//! How the models of one GPU will fare, with the caps in force or with others.

use shadowslice_shared::units::Sms;

use super::super::{Facts, Pressure, Terms};
use super::contention::{Tenant, effective};
use super::layout::{self, Claim};
use super::model::Model;

/// Rounds in which how busy everybody is follows from what everybody has, and the other way round.
const ROUNDS: usize = 3;

/// Whether two shares are nearer than `factor` to each other.
pub(super) fn near(one: u32, other: u32, factor: f64) -> bool {
    let (small, large) = (one.min(other), one.max(other));
    large - small <= Sms::STEP || f64::from(large) <= f64::from(small) * factor
}

/// Lets the models of one GPU learn from what was seen. What neighbours cost is told apart by
/// how long each of them executed.
pub(super) fn observe(models: &mut [Model], terms: &[Terms], facts: &Facts, gpu: usize, sms: Sms) {
    let here: Vec<usize> = (0..terms.len()).filter(|&model| terms[model].gpu == gpu).collect();
    let tenant = |&model: &usize| {
        let live = &facts.models[model];
        Tenant { cap: f64::from(live.share.0), busy: live.seen.busy.clamp(0.0, 1.0) }
    };
    let tenants: Vec<Tenant> = here.iter().map(tenant).collect();
    let settled = here.iter().all(|&model| {
        let live = &facts.models[model];
        live.coming.is_none() && facts.now.since(live.since) >= live.seen.span
    });
    for (&model, sms) in here.iter().zip(effective(&tenants, f64::from(sms.0))) {
        models[model].observe(&facts.models[model], settled, sms);
    }
}

/// The models of one GPU: what they need, and what they have.
#[derive(Debug)]
pub(super) struct Outlook<'a> {
    models: &'a [Model],
    terms: &'a [Terms],
    facts: &'a Facts,
    gpu: u32,
    here: Vec<usize>,
    claims: Vec<Claim>,
    caps: Vec<u32>,
    /// What they have while they execute, as a part of what they need; at most 1.
    supply: Vec<f64>,
}

impl<'a> Outlook<'a> {
    pub(super) fn of(
        models: &'a [Model],
        terms: &'a [Terms],
        facts: &'a Facts,
        gpu: usize,
        sms: Sms,
    ) -> Self {
        let here: Vec<usize> = (0..terms.len()).filter(|&model| terms[model].gpu == gpu).collect();
        let claim = |&model: &usize| {
            let (one, terms) = (&models[model], &terms[model]);
            let need = one.need_at(terms, 1.0);
            Claim {
                priority: terms.priority,
                min: terms.min.0,
                limit: one.limit(terms).max(need).min(terms.max.0),
                need,
                peak: one.need_at_peak(terms),
            }
        };
        let claims = here.iter().map(claim).collect();
        let cap = |&model: &usize| {
            let live = &facts.models[model];
            live.coming.unwrap_or(live.share).0
        };
        let caps: Vec<u32> = here.iter().map(cap).collect();
        let mut outlook =
            Self { models, terms, facts, gpu: sms.0, here, claims, supply: Vec::new(), caps: Vec::new() };
        outlook.supply = outlook.supplied(&caps);
        outlook.caps = caps;
        outlook
    }

    /// The models, as indices.
    pub(super) fn here(&self) -> &[usize] {
        &self.here
    }

    /// Whether everybody has what he needs.
    pub(super) fn suffices(&self) -> bool {
        self.supply.iter().all(|&supply| supply >= 1.0)
    }

    /// Whether this one has.
    pub(super) fn enough(&self, model: usize) -> bool {
        let at = self.here.iter().position(|&other| other == model);
        at.is_none_or(|at| self.supply[at] >= 1.0)
    }

    /// The caps that would be best.
    pub(super) fn wanted(&self) -> Vec<u32> {
        let need_at = |at: usize, part: f64| {
            let model = self.here[at];
            self.models[model].need_at(&self.terms[model], part)
        };
        let guarantees = layout::guarantees(&self.claims, self.gpu, need_at);
        layout::caps(&self.claims, &guarantees, self.gpu)
    }

    /// Requests in time that these caps gain in a second.
    pub(super) fn gain(&self, caps: &[u32]) -> f64 {
        let supply = self.supplied(caps);
        let mut gain = 0.0;
        for ((&model, &after), &before) in self.here.iter().zip(&supply).zip(&self.supply) {
            gain += self.models[model].demand.level() * (after - before);
        }
        gain
    }

    /// Requests that it costs to bring these caps about: what the shadows execute to warm up.
    pub(super) fn price(&self, caps: &[u32], dead_band: f64) -> f64 {
        let all: f64 = self.here.iter().map(|&model| self.models[model].demand.level()).sum();
        let mut price = 0.0;
        for ((&model, &to), &from) in self.here.iter().zip(caps).zip(&self.caps) {
            if !near(from, to, dead_band) {
                let warm = self.terms[model]
                    .profile
                    .as_ref()
                    .map_or(0.5, |profile| profile.start.warm.as_secs_f64());
                price += all * warm * f64::from(to) / f64::from(self.gpu);
            }
        }
        price
    }

    /// What shows that a model needs more.
    pub(super) fn pressure(&self, model: usize) -> Pressure {
        let seen = &self.facts.models[model].seen;
        if seen.answered > 0 && seen.p99_latency > self.terms[model].slo {
            Pressure::Latency
        } else if seen.refused > 0 {
            Pressure::Throughput
        } else {
            Pressure::Forecast
        }
    }

    /// What everybody would have with these caps, as a part of his need.
    fn supplied(&self, caps: &[u32]) -> Vec<f64> {
        let mut have: Vec<f64> = caps.iter().map(|&cap| f64::from(cap)).collect();
        for _ in 0..ROUNDS {
            let tenant = |(at, &cap): (usize, &u32)| {
                let model = self.here[at];
                let busy = self.models[model].busy(&self.terms[model], have[at]);
                Tenant { cap: f64::from(cap), busy }
            };
            let tenants: Vec<Tenant> = caps.iter().enumerate().map(tenant).collect();
            have = effective(&tenants, f64::from(self.gpu));
        }
        let part = |(&have, claim): (&f64, &Claim)| (have / f64::from(claim.need.max(1))).min(1.0);
        have.iter().zip(&self.claims).map(part).collect()
    }
}
