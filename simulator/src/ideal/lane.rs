//! One model's batches, on a share that changes.

use super::batching::{Style, Waiting, first_at};
use super::times::Times;

/// A model, its times and all its requests.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) gpu: usize,
    pub(super) priority: u32,
    /// The most that it may get, in steps of the grid. There is no least: a cap keeps nothing free, so neither must the ideal.
    pub(super) max: usize,
    /// From arrival to answer, in nanoseconds.
    pub(super) slo: u64,
    /// When its requests arrive, in nanoseconds, ascending.
    pub(super) arrivals: Vec<u64>,
    pub(super) times: Times,
}

impl Model {
    /// Whether any request can be answered in time.
    fn is_answerable(&self) -> bool {
        self.times.ns(self.max, 1) <= self.slo
    }

    /// The requests that can be answered in time if the model has its GPU to itself and nothing queues.
    pub(super) fn answerable(&self) -> u64 {
        if self.is_answerable() { self.arrivals.len() as u64 } else { 0 }
    }
}

/// A batch that executes.
#[derive(Debug, Clone, Copy)]
struct Running {
    first: usize,
    requests: usize,
    /// The part that is not yet done.
    left: f64,
}

/// What comes of a share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outlook {
    /// Requests answered in time.
    pub(super) answers: u64,
    /// How they are batched.
    pub(super) style: Style,
}

/// Where a model stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lane<'m> {
    pub(super) model: &'m Model,
    /// Whether it may batch patiently.
    patient: bool,
    now: u64,
    running: Option<Running>,
    /// The first request that neither ran nor was dropped.
    next: usize,
    /// Requests answered in time.
    pub(super) answered: u64,
}

impl<'m> Lane<'m> {
    pub(super) fn new(model: &'m Model, patient: bool) -> Self {
        Self { model, patient, now: 0, running: None, next: 0, answered: 0 }
    }

    /// The requests that arrived before `moment`.
    pub(super) fn arrived_before(&self, moment: u64) -> usize {
        first_at(&self.model.arrivals, self.next, moment)
    }

    /// When it next has something to do: at once, or when a request arrives; nothing if no request is
    /// left.
    pub(super) fn next_work(&self) -> Option<u64> {
        if self.running.is_some() {
            Some(self.now)
        } else {
            self.model.arrivals.get(self.next).map(|&at| at.max(self.now))
        }
    }

    /// Requests of which it is known what became of them.
    pub(super) fn settled(&self) -> usize {
        self.next - self.running.map_or(0, |running| running.requests)
    }

    /// Gives up the requests that no share can answer in time any more, even those in a batch that
    /// executes: who knew would not have started it.
    pub(super) fn give_up_hopeless(&mut self) {
        let model = self.model;
        if let Some(running) = &self.running {
            let youngest = model.arrivals[running.first + running.requests - 1];
            let finish =
                self.now + (running.left * model.times.ns(model.max, running.requests) as f64) as u64;
            if finish > youngest.saturating_add(model.slo) {
                self.running = None;
            }
        }
        self.next = if model.is_answerable() {
            let latest = (self.now + model.times.ns(model.max, 1)).saturating_sub(model.slo);
            first_at(&model.arrivals, self.next, latest)
        } else {
            model.arrivals.len()
        };
    }

    /// Waits until a moment, doing nothing.
    pub(super) fn wait(&mut self, until: u64) {
        self.now = self.now.max(until);
    }

    /// What comes of the requests before `end` if the share stays, batched in the better style.
    pub(super) fn outlook(&self, level: usize, end: usize) -> Outlook {
        self.outlook_beside(level, end, self.answers(level, Style::Eager, end))
    }

    /// The same where it is known what eager batches answer.
    pub(super) fn outlook_beside(&self, level: usize, end: usize, eager: u64) -> Outlook {
        if self.patient && level > 0 && eager < (end - self.settled()) as u64 {
            let patient = self.answers(level, Style::Patient, end);
            if patient > eager {
                return Outlook { answers: patient, style: Style::Patient };
            }
        }
        Outlook { answers: eager, style: Style::Eager }
    }

    /// The requests before `end` that are answered in time if share and style stay.
    pub(super) fn answers(&self, level: usize, style: Style, end: usize) -> u64 {
        let mut lane = *self;
        lane.advance(level, style, u64::MAX, end);
        lane.answered - self.answered
    }

    /// Goes on until a moment with a share of `level` steps, with the requests before `end`.
    pub(super) fn advance(&mut self, level: usize, style: Style, until: u64, end: usize) {
        if level == 0 {
            self.now = until;
            return;
        }
        loop {
            if let Some(running) = &mut self.running {
                let whole = self.model.times.ns(level, running.requests);
                let left =
                    if running.left < 1.0 { (running.left * whole as f64).ceil() as u64 } else { whole };
                let finish = self.now.saturating_add(left);
                if finish > until {
                    running.left -= (until - self.now) as f64 / whole as f64;
                    self.now = until;
                    return;
                }
                let batch = *running;
                self.finish(batch, finish);
            }
            if !self.start(level, style, until, end) {
                self.now = until;
                return;
            }
        }
    }

    fn finish(&mut self, batch: Running, at: u64) {
        let requests = &self.model.arrivals[batch.first..batch.first + batch.requests];
        let late = first_at(requests, 0, at.saturating_sub(self.model.slo));
        self.answered += (requests.len() - late) as u64;
        self.now = at;
        self.running = None;
    }

    /// Starts the next batch before `until`, if there is one.
    fn start(&mut self, level: usize, style: Style, until: u64, end: usize) -> bool {
        let Model { slo, times, arrivals, .. } = self.model;
        let waiting = Waiting { slo: *slo, ns: times.of(level), arrivals: &arrivals[..end], from: self.next };
        match waiting.next_batch(self.now, style) {
            Some(batch) if batch.at < until => {
                self.now = batch.at;
                self.running = Some(Running { first: batch.first, requests: batch.requests, left: 1.0 });
                self.next = batch.first + batch.requests;
                true
            }
            _ => false,
        }
    }
}
