//! What is remembered of one model.

use std::time::Duration;

use shadowslice_shared::units::Sms;

use crate::pressure::Watch;

use super::super::{Door, Executed, Live, Terms};
use super::batching::Batching;
use super::capacity::Capacity;
use super::company::{Coming, Company};
use super::curve::{Curve, Sample};
use super::demand::Demand;
use super::hindsight::Hindsight;
use super::idling::Idling;
use super::pressed::Pressed;
use super::rest::Rest;
use super::shortage::Shortage;

/// The parts of a GPU at which it is tried how cheap a request can be.
const PARTS: [f64; 5] = [1.0, 0.5, 0.25, 0.125, 0.0625];

/// Who executes for this part of the time is reckoned with whenever another does; who executes for less, in proportion.
const PRESENT: f64 = 0.05;

/// A curve that has moved by more than this part since its capacity was worked out has another one.
const MOVED: f64 = 0.02;

/// SMs that a demand is to find free.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Needs {
    /// For all that is asked for,
    pub(super) asked: f64,
    /// and for what of that the whole GPU executes at most: more takes no more of it.
    pub(super) executed: f64,
}

/// One model.
#[derive(Debug, Clone)]
pub(super) struct Model {
    curve: Curve,
    pub(super) demand: Demand,
    shortage: Shortage,
    hindsight: Hindsight,
    company: Company,
    idling: Idling,
    rest: Rest,
    gpu: f64,
    /// Whether it has been looked at, be it that nobody came.
    observed: bool,
    capacity: Capacity,
    /// The SM·s that a row takes at least, in full batches that keep the SLO; nothing where none does.
    cheapest: Option<f64>,
    /// The demand for which less than the level was last too little.
    pressed: Option<Pressed>,
    /// The times of the smallest and the largest batch on the whole GPU, in seconds, for which capacity and cost were worked out.
    worked_out_for: [f64; 2],
}

impl Model {
    pub(super) fn new(terms: &Terms, gpu: Sms) -> Self {
        let execution = terms.profile.as_ref().map(|profile| &profile.execution);
        let mut new = Self {
            curve: Curve::new(execution),
            demand: Demand::default(),
            shortage: Shortage::default(),
            hindsight: Hindsight::default(),
            company: Company::default(),
            idling: Idling::default(),
            rest: Rest::default(),
            gpu: f64::from(gpu.0),
            observed: false,
            capacity: Capacity::default(),
            cheapest: None,
            pressed: None,
            worked_out_for: [0.0; 2],
        };
        new.work_out_capacity(terms);
        new
    }

    /// Learns from what was seen, about execution only if it had about `sms` SMs all the time.
    pub(super) fn observe(&mut self, terms: &Terms, live: &Live, sms: Option<f64>) {
        if live.seen.span.is_zero() {
            return;
        }
        self.observed = true;
        self.demand.observe(&live.seen);
        self.idling.observe(live, self.demand.safe_dispersion());
        if self.hindsight.observe(live, self.demand.safe_dispersion(), terms.may_miss()) {
            self.press();
        }
        if let Some(pressed) = &mut self.pressed {
            pressed.observe(self.demand.row_rate());
        }
        if let Some(sms) = sms {
            let sample = |executed: &Executed| Sample {
                rows: f64::from(executed.rows),
                count: executed.count as f64,
                seconds: executed.mean.as_secs_f64(),
            };
            let ran = live.seen.executed.iter().filter(|executed| executed.count > 0 && executed.rows > 0);
            let samples: Vec<Sample> = ran.map(sample).collect();
            self.curve.observe(&samples, live.share.0, sms);
        }
        self.work_out_capacity(terms);
    }

    /// Learns from the batches of an interval, where the largest may have so many rows.
    pub(super) fn observe_batches(&mut self, terms: &Terms, live: &Live, largest: u32) {
        self.shortage.observe(&live.seen, terms.may_miss(), largest);
        let (rate, bunch) = (self.demand.rate(), self.demand.safe_dispersion());
        self.company.observe(&live.seen, Coming::to(rate, bunch, largest, self.demand.rows(1.0)));
    }

    /// How short of SMs it is.
    pub(super) fn shortage(&self) -> Shortage {
        self.shortage
    }

    /// What it would be if as much came on as since the last interval.
    pub(super) fn foreseen(&self, live: &Live) -> Self {
        Self { demand: self.demand.foreseen(&live.seen), ..self.clone() }
    }

    fn work_out_capacity(&mut self, terms: &Terms) {
        if !self.curve.known() {
            return;
        }
        let times = [1.0, f64::from(terms.max_batch.max(1))].map(|rows| self.curve.time(rows, self.gpu));
        let moved = |(now, then): (&f64, &f64)| (now / then.max(1e-12) - 1.0).abs() > MOVED;
        if times.iter().zip(&self.worked_out_for).any(moved) {
            self.capacity = Capacity::of(terms, &self.curve, Sms(self.gpu as u32));
            let most = f64::from(self.most(terms).0);
            let costs = PARTS.iter().filter_map(|part| self.batching(terms, part * most, 1.0).cost());
            self.cheapest = costs.reduce(f64::min);
            self.worked_out_for = times;
        }
    }

    /// Less than the level turned out to be too little.
    pub(super) fn press(&mut self) {
        let (rate, now) = (self.demand.row_rate(), self.demand.observed());
        self.pressed = Some(Pressed::again(self.pressed, rate, now));
    }

    /// Whether less than the level was too little for as large a demand, or just now.
    pub(super) fn was_pressed(&self) -> bool {
        let (rate, now) = (self.demand.row_rate(), self.demand.observed());
        self.pressed.is_some_and(|pressed| pressed.keeps(rate, now))
    }

    /// All that it may have of its GPU.
    pub(super) fn most(&self, terms: &Terms) -> Sms {
        terms.max.min(Sms(self.gpu as u32))
    }

    /// The smallest share that carries so many requests a second, or the largest that is of use; nothing while
    /// nothing is known.
    pub(super) fn share_for(&self, rate: f64) -> Option<Sms> {
        self.capacity.share_for(self.demand.rows(rate))
    }

    /// The requests a second that so many SMs carry; nothing where more would be of no use, or where nothing is known.
    pub(super) fn carried_by(&self, share: Sms) -> Option<f64> {
        self.capacity.of_less(share).map(|rows| rows / self.demand.rows(1.0))
    }

    /// Whether the whole GPU would carry its demand, if what batches take longer than its profile says is the neighbours' fault; true
    /// while nothing is known.
    pub(super) fn could_be_carried(&self) -> bool {
        let rows = self.demand.row_rate() / self.curve.scale().max(1.0);
        self.capacity.most().is_none_or(|most| rows <= most)
    }

    /// Its batches when it has so many SMs and a part of its demand is let in.
    pub(super) fn batching<'a>(&'a self, terms: &'a Terms, sms: f64, admit: f64) -> Batching<'a> {
        let (rate, each) = (self.demand.rows(self.demand.rate() * admit), self.demand.rows(1.0));
        Batching { terms, curve: &self.curve, sms, rate, each }
    }

    /// The SMs that its demand takes at least, in full batches that keep its SLO; nothing where none does, or
    /// where nothing is known.
    pub(super) fn load(&self) -> Option<f64> {
        self.cheapest.map(|cost| self.demand.row_rate() * cost)
    }

    /// The same, if what batches take longer than its profile says is the neighbours' fault.
    pub(super) fn load_undisturbed(&self) -> f64 {
        self.load().unwrap_or(0.0) / self.curve.scale().max(1.0)
    }

    /// Learns whether it comes to rest in this interval, in which it wanted less or not.
    pub(super) fn rest(&mut self, live: &Live, wants_less: bool) {
        // What is remembered fades, what its level is kept for ends, and so does learning.
        let may = !wants_less && !self.demand.is_fading() && !self.was_pressed() && self.curve.known();
        self.rest.observe(live, &self.demand, may);
    }

    /// Whether its share is not to shrink any more because more than enough is.
    pub(super) fn is_at_rest(&self) -> bool {
        self.rest.is_reached()
    }

    /// Whether it has a profile.
    pub(super) fn is_profiled(&self) -> bool {
        matches!(self.curve, Curve::Profiled { .. })
    }

    /// The SMs that it is to find free: half-way between what its demand takes at least and what at the smallest share that carries it. The more
    /// requests come, the more each of them costs there; but beside others that rest now and then, fewer of them at a time are soon through.
    pub(super) fn needs(&self, terms: &Terms) -> Needs {
        let least = self.cheapest.unwrap_or(0.0);
        let cost_at = |share: Sms| self.batching(terms, f64::from(share.0), 1.0).cost();
        let there = self.capacity.share_for(self.executed()).and_then(cost_at).unwrap_or(least);
        self.needs_at(least.midpoint(there.max(least)))
    }

    /// The SMs that it takes at least.
    pub(super) fn needs_at_least(&self) -> Needs {
        self.needs_at(self.cheapest.unwrap_or(0.0))
    }

    /// What it needs if a row takes so many SM·s.
    fn needs_at(&self, cost: f64) -> Needs {
        Needs { asked: self.demand.row_rate() * cost, executed: self.executed() * cost }
    }

    /// The rows a second of its demand that the whole GPU would execute.
    fn executed(&self) -> f64 {
        let asked = self.demand.row_rate();
        self.capacity.limit().map_or(asked, |limit| asked.min(limit))
    }

    /// The seconds for which a request alone executes on so many SMs; nothing while nothing is known.
    pub(super) fn time_of_one(&self, sms: f64) -> Option<f64> {
        self.curve.known().then(|| self.curve.time(self.demand.rows(1.0), sms))
    }

    /// Whether it cannot keep its SLO even with all that it may have of the GPU, and nobody beside it.
    pub(super) fn hopeless(&self, terms: &Terms) -> bool {
        let most = f64::from(self.most(terms).0);
        self.curve.known() && self.curve.time(1.0, most) > terms.slo.as_secs_f64()
    }

    /// The smallest share at which a request can keep its SLO; nothing where none does, or while nothing is known.
    pub(super) fn least_share(&self) -> Option<Sms> {
        self.capacity.least()
    }

    /// How much of it is to be reckoned with while another model executes, from 0 for who is never asked to 1, if it has so many SMs.
    pub(super) fn presence(&self, sms: f64) -> f64 {
        if !self.observed {
            return 1.0;
        }
        let rate = self.demand.peak();
        // One by one is the most that requests take.
        self.time_of_one(sms).map_or(rate / PRESENT, |time| rate * time / PRESENT).min(1.0)
    }

    /// Its door with these batches, if a part of its demand is let in, and if they may wait for company.
    pub(super) fn door(&self, batching: &Batching<'_>, admit: f64, wait: bool) -> Door {
        let max_batch = batching.max();
        let wait = wait && self.idling.lets_wait();
        let longest = if wait { batching.longest_delay(max_batch) } else { Duration::ZERO };
        let max_delay = self.company.worth(longest);
        let expected_batch = batching.expected(max_batch, max_delay);
        Door { max_batch, expected_batch, max_delay, admit, refuse_late: true, watch: Watch::OFF }
    }
}
