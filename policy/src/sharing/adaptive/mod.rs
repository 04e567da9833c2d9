//! The adaptive policy.
//!
//! It rests on what a cap is: no reservation, but a **weight**. While those who execute may use more than
//! the GPU has, each has its proportion of it; an execution holds SMs only while it runs. So with generous caps
//! the SMs follow the demand from batch to batch, without any hand-over: whoever has much to do takes what
//! the others leave, and those with little to do have it done at once. A share that is cut to a
//! forecast instead gives that up, and is wrong until the next hand-over. What wastes SMs is not a generous cap but a
//! batch that is too small: it pays its fixed part for few requests. Hence:
//!
//! 1. [`demand`] says how much comes, [`curve`] what it costs, [`contention`] what neighbours leave, [`capacity`] what a share carries.
//! 2. [`layout`] gives every model a level: as much as it may have, the same for all. Where [`regime`] has seen that
//!    generous caps do not pay, the levels fit onto the GPU together, and are less the lower the priority; where [`yielding`] has seen
//!    that a higher priority misses its SLO beside lower ones, those have less, and where [`proportion`] has seen that one does beside itself, those
//!    of it have less that need less. What these found out is kept by [`gpu`];
//!    of who is seldom asked several intervals are taken together for it ([`gathering`]).
//! 3. [`sizing`] gives it as much of that as carries its demand with head-room, and moves it only when that is off by much; who would
//!    have no slack with less keeps what he has ([`tightness`]), and gets it back if that turns out later ([`hindsight`]), which is remembered ([`pressed`]); who has come to
//!    [`rest`] shrinks no more. At its level a second worker should stand ready: when slack runs out or more comes than the share is for,
//!    that takes over at once.
//! 4. [`batching`] makes batches as large as the SLO allows, and lets them wait for company beside who is short of SMs ([`shortage`]), where
//!    somebody comes ([`company`]) and nobody asks less for it ([`idling`]).
//! 5. [`outlook`] lets in what there is room for, the lowest priority last, by a forecast only where a higher one misses its SLO. Doors act at
//!    once, where a hand-over takes seconds, and follow what comes between two decisions.

mod batching;
mod capacity;
mod chance;
mod classes;
mod company;
mod contention;
mod curve;
mod demand;
mod gathering;
mod gpu;
mod hindsight;
mod idling;
mod lasting;
mod layout;
mod learnt;
mod loads;
mod model;
mod narrowing;
mod outlook;
mod pacing;
mod pressed;
mod proportion;
mod regime;
mod rest;
mod shortage;
mod sizing;
mod tally;
mod tightness;
mod trials;
mod yielding;

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

use super::carry_out::plan;
use super::{Change, Decision, Door, Facts, Live, Relief, Terms, Verdict, Waiting};
use classes::There;
use gpu::Gpu;
use model::Model;
use narrowing::Admitted;
use outlook::Outlook;
use pacing::Pacing;
use sizing::{Sizing, near};
use tightness::Tenant;

/// A share that just changed stays for this long, the fast path aside.
const DWELL: Duration = Duration::from_secs(5);

/// Whether a model wants another share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// What it has is right.
    Stays,
    /// Less would do, but for now it keeps what it has.
    Keeps { to: Sms, waiting: Waiting },
    /// Another one.
    Moves { to: Sms },
}

/// The adaptive policy and what it remembers.
#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    models: Vec<Model>,
    gpus: Vec<Gpu>,
    /// The most that each model should have.
    levels: Vec<Sms>,
    /// Whose SLO leaves no room for a smaller share.
    tight: Vec<bool>,
    /// The part of each model's requests that is let in.
    admitted: Vec<Admitted>,
    /// When it last learnt: what was seen until then is known.
    learnt: Option<Moment>,
}

impl Adaptive {
    pub(super) fn new(gpus: &[Sms], terms: &[Terms]) -> Self {
        let models = terms.iter().map(|terms| Model::new(terms, gpus[terms.gpu])).collect();
        let levels = terms.iter().map(|terms| terms.initial).collect();
        let mut new = Self {
            models,
            gpus: vec![Gpu::new(); gpus.len()],
            levels,
            tight: vec![false; terms.len()],
            admitted: vec![Admitted::default(); terms.len()],
            learnt: None,
        };
        for (gpu, &sms) in gpus.iter().enumerate() {
            new.lay_out(gpu, terms, sms);
        }
        new
    }

    fn lay_out(&mut self, gpu: usize, terms: &[Terms], sms: Sms) {
        let here = outlook::on(gpu, terms);
        let levels = self.gpus[gpu].levels(&here, &self.models, terms, sms);
        here.into_iter().zip(levels).for_each(|(model, level)| self.levels[model] = level);
    }

    /// Takes over what another one has learnt: of the models that are the `same`, by their places there, and of GPUs that have these and no
    /// others. `before` are the terms that the other one goes by.
    pub(super) fn remember(
        &mut self,
        other: &Self,
        before: &[Terms],
        terms: &[Terms],
        same: &[Option<usize>],
        gpus: &[Sms],
    ) {
        for (model, place) in same.iter().enumerate() {
            let Some(place) = *place else { continue };
            if let (Some(known), Some(&admitted)) = (other.models.get(place), other.admitted.get(place)) {
                self.models[model].clone_from(known);
                self.admitted[model] = admitted;
            }
        }
        for (gpu, &sms) in gpus.iter().enumerate() {
            let here = outlook::on(gpu, terms);
            let stayed = here.iter().filter(|&&model| same[model].is_some()).count();
            if stayed == here.len() && stayed == outlook::on(gpu, before).len() {
                self.gpus[gpu] = other.gpus[gpu].findings();
            }
            self.lay_out(gpu, terms, sms);
        }
        self.learnt = other.learnt;
    }

    /// The shares that the models should start with: all that each may have, as nobody knows what will come.
    pub(super) fn levels(&self) -> &[Sms] {
        &self.levels
    }

    pub(super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Decision {
        self.observe(terms, facts);
        let shares = facts.least_shares();
        let doors = self.doors(terms, facts, &shares);
        let doors = self.watched(doors, &shares);
        let mut report = self.verdicts(terms, &doors);
        let mut changes = Vec::new();
        let mut standby = vec![None; terms.len()];
        let gpus = facts.gpus.iter().enumerate();
        let overloaded: Vec<bool> = gpus.map(|(gpu, &sms)| self.is_overloaded(gpu, terms, sms)).collect();
        let mut pacing = Pacing::of(&overloaded, terms, facts);
        for model in by_priority(terms) {
            let (live, gpu) = (&facts.models[model], terms[model].gpu);
            standby[model] = pacing.standby(gpu, live, self.standby(model, terms, live));
            let have = live.coming.unwrap_or(live.share);
            report[model] = match self.wish(model, have, terms, overloaded[gpu]) {
                Wish::Stays => continue,
                Wish::Keeps { to, waiting } => Verdict::Wait { to, waiting },
                Wish::Moves { to } => match moved(to, self.levels[model], live, facts.now) {
                    Verdict::Shrink { from, to } if self.makes_room(model, from, &terms[model]) => {
                        Verdict::Yield { from, to }
                    }
                    verdict => verdict,
                },
            };
            let Some((from, to)) = report[model].change() else { continue };
            let at_once = live.standing == Some(to);
            if !at_once && !pacing.admits(gpu) {
                report[model] = Verdict::Wait { to, waiting: Waiting::Overload };
                continue;
            }
            let onset = self.models[model].demand.onset(facts.now);
            changes.push(Change { model, from, to, at_once, onset });
        }
        Decision { plan: plan(changes), doors, standby, report }
    }

    /// The share at which a second worker should stand ready: while it is open whether smaller caps help, the one to come back to, if it
    /// stands there already; else all that the model may need at once.
    fn standby(&self, model: usize, terms: &[Terms], live: &Live) -> Option<Sms> {
        let open = !live.held && self.gpus[terms[model].gpu].tries();
        let way_back = live.standing.filter(|&sms| open && sms > live.share.max(self.levels[model]));
        way_back.or_else(|| self.sizing(model, terms).standby(live))
    }

    /// What a model wants that has this share, or will.
    fn wish(&self, model: usize, have: Sms, terms: &[Terms], overloaded: bool) -> Wish {
        let to = self.sizing(model, terms).of_one_with(have);
        if near(have, to) {
            return Wish::Stays;
        }
        match self.keeps(model, have, to, &terms[model], overloaded) {
            Some(waiting) => Wish::Keeps { to, waiting },
            None => Wish::Moves { to },
        }
    }

    /// Why a model that has this share does not shrink to that one now, if it would.
    fn keeps(&self, model: usize, have: Sms, to: Sms, terms: &Terms, overloaded: bool) -> Option<Waiting> {
        let Terms { gpu, priority, .. } = *terms;
        if to >= have || self.makes_room(model, have, terms) {
            None
        } else if self.gpus[gpu].spares(priority) {
            Some(Waiting::Misses)
        } else if self.gpus[gpu].asks(model, priority) && self.gpus[gpu].tries() {
            Some(Waiting::Trial)
        } else {
            overloaded.then_some(Waiting::Overload)
        }
    }

    /// Whether a model with this share is to leave SMs to others.
    fn makes_room(&self, model: usize, have: Sms, terms: &Terms) -> bool {
        have > self.levels[model] && self.gpus[terms.gpu].asks(model, terms.priority)
    }

    /// Whether all demand takes more of a GPU than can be planned for.
    fn is_overloaded(&self, gpu: usize, terms: &[Terms], sms: Sms) -> bool {
        let load = outlook::on(gpu, terms).into_iter().map(|model| self.models[model].load_undisturbed());
        load.sum::<f64>() > outlook::FULL * f64::from(sms.0)
    }

    fn sizing(&self, model: usize, terms: &[Terms]) -> Sizing {
        let sizing = Sizing::of(&self.models[model], &terms[model], self.levels[model]);
        if self.tight[model] {
            sizing.kept()
        } else if self.models[model].is_at_rest() {
            sizing.at_rest()
        } else {
            sizing
        }
    }

    /// Looks whose SLO leaves room for a smaller share on a GPU.
    fn mark_tight(&mut self, terms: &[Terms], facts: &Facts, gpu: usize) {
        let here = outlook::on(gpu, terms);
        let tenant = |&model: &usize| {
            let (live, terms, level) = (&facts.models[model], &terms[model], self.levels[model]);
            let (model, have) = (&self.models[model], live.coming.unwrap_or(live.share));
            let sizing = Sizing::of(model, terms, level);
            let share = |sizing: Sizing| if live.held { have } else { sizing.of_one_with(have) };
            Tenant { model, terms, wanted: share(sizing), kept: share(sizing.kept()) }
        };
        let tight = tightness::tight(&here.iter().map(tenant).collect::<Vec<_>>(), facts.gpus[gpu]);
        here.into_iter().zip(tight).for_each(|(model, tight)| self.tight[model] = tight);
    }

    /// Looks who comes to rest on a GPU.
    fn mark_rest(&mut self, terms: &[Terms], facts: &Facts, gpu: usize, overloaded: bool) {
        for model in outlook::on(gpu, terms) {
            let live = &facts.models[model];
            let wish = self.wish(model, live.share, terms, overloaded);
            let wants_less = matches!(wish, Wish::Moves { to } if to < live.share);
            self.models[model].rest(live, wants_less);
        }
    }

    /// Learns from what was seen, once.
    pub(super) fn observe(&mut self, terms: &[Terms], facts: &Facts) {
        if self.learnt.replace(facts.now) == Some(facts.now) {
            return;
        }
        for (gpu, &sms) in facts.gpus.iter().enumerate() {
            outlook::observe(&mut self.models, terms, facts, gpu);
            let largest = Outlook::of(&self.models, terms, &facts.shares(), gpu, sms).largest_batches();
            for (model, rows) in largest {
                self.models[model].observe_batches(&terms[model], &facts.models[model], rows);
            }
            self.mark_tight(terms, facts, gpu);
            let overloaded = self.is_overloaded(gpu, terms, sms);
            self.mark_rest(terms, facts, gpu, overloaded);
            self.judge(terms, facts, gpu, overloaded);
        }
    }

    /// Looks how well a GPU's caps do, and lays them out anew.
    fn judge(&mut self, terms: &[Terms], facts: &Facts, gpu: usize, overloaded: bool) {
        let (here, sms) = (outlook::on(gpu, terms), facts.gpus[gpu]);
        let settled = here.iter().all(|&model| {
            let live = &facts.models[model];
            let stays = || !matches!(self.wish(model, live.share, terms, overloaded), Wish::Moves { .. });
            live.held || live.coming.is_none() && stays()
        });
        let there = There { models: &self.models, terms, facts, here: &here, sms };
        self.gpus[gpu].observe(&there, settled);
        self.lay_out(gpu, terms, sms);
    }

    /// Our batching and admission for whatever shares are in force.
    pub(super) fn doors(&mut self, terms: &[Terms], facts: &Facts, shares: &[Sms]) -> Vec<Door> {
        let doors = doors_of(&self.models, terms, &facts.gpus, shares);
        self.narrowed(doors, facts.now)
    }

    /// The same between two decisions, by what has come since the last one.
    pub(super) fn doors_meanwhile(&mut self, terms: &[Terms], facts: &Facts, shares: &[Sms]) -> Vec<Door> {
        let foreseen = |(model, live): (&Model, &Live)| model.foreseen(live);
        let models: Vec<Model> = self.models.iter().zip(&facts.models).map(foreseen).collect();
        let doors = doors_of(&models, terms, &facts.gpus, shares);
        self.narrowed(doors, facts.now)
    }

    /// The same before anything has been seen.
    pub(super) fn first_doors(&self, terms: &[Terms], gpus: &[Sms], shares: &[Sms]) -> Vec<Door> {
        doors_of(&self.models, terms, gpus, shares)
    }

    /// Doors that let in less only where that is asked for again.
    fn narrowed(&mut self, mut doors: Vec<Door>, now: Moment) -> Vec<Door> {
        for (door, admitted) in doors.iter_mut().zip(&mut self.admitted) {
            door.admit = admitted.ask(door.admit, now);
        }
        doors
    }

    /// Doors that notice when more comes than our shares are for, which is known since the last decision.
    pub(super) fn watched(&self, mut doors: Vec<Door>, shares: &[Sms]) -> Vec<Door> {
        for ((door, model), &share) in doors.iter_mut().zip(&self.models).zip(shares) {
            door.watch = Sizing::watch(model, share);
        }
        doors
    }

    /// What there is to say about models with these doors whose shares are right.
    fn verdicts(&self, terms: &[Terms], doors: &[Door]) -> Vec<Verdict> {
        let verdict = |((model, terms), door): ((&Model, &Terms), &Door)| {
            if model.hopeless(terms) {
                Verdict::Hopeless
            } else if door.admit < 1.0 {
                Verdict::Crowded { percent: (door.admit * 100.0) as u32 }
            } else {
                Verdict::Keep
            }
        };
        self.models.iter().zip(terms).zip(doors).map(verdict).collect()
    }

    /// All that the model may have, or what the standing worker has of that: at once where one stands, else as fast as a shadow
    /// starts, and then not twice in a dwell time.
    pub(super) fn pressure(
        &mut self,
        model: usize,
        onset: Moment,
        terms: &[Terms],
        facts: &Facts,
    ) -> Option<Relief> {
        let (live, level) = (facts.models.get(model)?, *self.levels.get(model)?);
        if live.held || live.coming.is_some() || live.share >= level || near(live.share, level) {
            return None;
        }
        let standing = live.standing.filter(|&to| to > live.share && to <= level);
        if standing.is_none() && settling(live, facts.now) {
            return None;
        }
        let to = standing.unwrap_or(level);
        self.models[model].press();
        let mut shares = facts.least_shares();
        if standing.is_some() {
            shares[model] = to;
        }
        let doors = self.doors_meanwhile(terms, facts, &shares);
        let doors = self.watched(doors, &shares);
        let change = Change { model, from: live.share, to, at_once: standing.is_some(), onset };
        Some(Relief { change, doors })
    }
}

/// Batching and admission for models with these shares.
fn doors_of(models: &[Model], terms: &[Terms], gpus: &[Sms], shares: &[Sms]) -> Vec<Door> {
    let mut doors: Vec<Door> = terms.iter().map(|terms| Door::open(terms.max_batch.max(1))).collect();
    for (gpu, &sms) in gpus.iter().enumerate() {
        let outlook = Outlook::of(models, terms, shares, gpu, sms);
        outlook.doors().for_each(|(model, door)| doors[model] = door);
    }
    doors
}

/// The models, the highest priorities first: who is to wait for others waits for those above him.
fn by_priority(terms: &[Terms]) -> Vec<usize> {
    let mut models: Vec<usize> = (0..terms.len()).collect();
    models.sort_by_key(|&model| terms[model].priority);
    models
}

/// Whether the share changed too recently. One since the origin is the one that the worker was started with.
fn settling(live: &Live, now: Moment) -> bool {
    !live.since.since_origin().is_zero() && now < live.since + DWELL
}

/// What becomes of a model that wants to move to this share.
fn moved(to: Sms, level: Sms, live: &Live, now: Moment) -> Verdict {
    let from = live.share;
    // Who stands ready with more than is needed brings it now, and who starts soon; a shadow would take its place.
    let suits = |share: &Sms| near(*share, to) || to > from && *share > to && *share <= level;
    let to = [live.standing, live.starting].into_iter().flatten().find(suits).unwrap_or(to);
    match live {
        Live { held: true, .. } => Verdict::Wait { to, waiting: Waiting::Held },
        Live { coming: Some(_), .. } => Verdict::Wait { to, waiting: Waiting::Handover },
        _ if settling(live, now) => {
            Verdict::Wait { to, waiting: Waiting::Dwell { until: live.since + DWELL } }
        }
        _ if to > from => Verdict::Grow { from, to },
        _ => Verdict::Shrink { from, to },
    }
}

#[cfg(test)]
mod tests;
