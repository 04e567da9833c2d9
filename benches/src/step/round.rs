//! One step of one model: what the client saw, and what the supervisor says of it.

use std::fmt;
use std::time::{Duration, Instant};

use shadowslice_tests::status::Model;

use crate::step::case::{Case, SLO, Standby};
use crate::step::load::{Answer, Done, Request};
use crate::step::orders::{Order, Sign};

/// The aims: detect + effect with a worker that stands ready; and without, how much more than its start that may be. In ms.
pub(super) const STANDING_MS: f64 = 50.0;
pub(super) const STARTING_MS: f64 = 100.0;

/// What is looked at of the clients after a step.
pub(super) const AFTER: Duration = Duration::from_secs(1);

/// A step, and what came of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Round {
    /// The SMs before it.
    pub(super) sms: u32,
    pub(super) clients: Clients,
    pub(super) outcome: Outcome,
}

/// Requests in the second after a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Clients {
    pub(super) offered: u32,
    /// Answered after their SLO.
    pub(super) late: u32,
    pub(super) refused: u32,
    /// Answered wrongly, or not at all.
    pub(super) failed: u32,
    /// How much after its time the client sent the last of a hundred of them, in ms.
    pub(super) sent_late_ms: f64,
}

/// Whether the model had more.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// It was given more.
    Grew(Grown),
    /// It was given more before the step.
    Before,
    /// It was not.
    Never,
}

/// How soon.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Grown {
    pub(super) sign: Sign,
    pub(super) to_sms: u32,
    /// From the step to the order.
    pub(super) detect_ms: f64,
    /// The requests that came meanwhile.
    pub(super) arrivals: u32,
    /// The same as the supervisor counts it, from when the change showed.
    pub(super) seen_ms: f64,
    /// From the order to the first batch at the new share.
    pub(super) effect_ms: f64,
    /// The start and warm-up of the worker that serves now.
    pub(super) start_ms: f64,
}

impl Grown {
    /// Detect and effect.
    pub(super) fn sum_ms(&self) -> f64 {
        self.detect_ms + self.effect_ms
    }

    /// What is held against the aim.
    pub(super) fn judged_ms(&self, standby: Standby) -> f64 {
        match standby {
            Standby::Auto => self.sum_ms(),
            Standby::Off => self.sum_ms() - self.start_ms,
        }
    }
}

/// What must not be exceeded, in ms.
pub(super) const fn aim_ms(standby: Standby) -> f64 {
    match standby {
        Standby::Auto => STANDING_MS,
        Standby::Off => STARTING_MS,
    }
}

impl Round {
    /// Of a load with so many SMs before it, a model's orders to grow, and how it stood when that was over, if it was.
    pub(super) fn of(sms: u32, done: &Done, orders: &[Order], grown: Option<&Model>) -> Self {
        let clients = Clients::after(done.step.at, &done.requests);
        let before = orders.first().is_some_and(|order| order.at < done.step.time);
        let outcome = match (before, orders.first(), grown) {
            (true, ..) => Outcome::Before,
            (false, Some(order), Some(model)) => Outcome::of(order, done, model),
            _ => Outcome::Never,
        };
        Self { sms, clients, outcome }
    }
}

impl Outcome {
    fn of(order: &Order, done: &Done, model: &Model) -> Self {
        let Some(last) = &model.handovers.last else { return Self::Never };
        let (Some(seen_ms), Some(effect_ms)) = (last.detect_ms, last.effect_ms) else { return Self::Never };
        let detect = order.at.duration_since(done.step.time).unwrap_or_default();
        Self::Grew(Grown {
            sign: order.sign.clone(),
            to_sms: order.to_sms,
            detect_ms: detect.as_secs_f64() * 1e3,
            arrivals: arrivals(done, detect),
            seen_ms,
            effect_ms,
            start_ms: start_ms(model),
        })
    }
}

/// The requests that came in so long after the step.
fn arrivals(done: &Done, span: Duration) -> u32 {
    let within = done.step.at..done.step.at + span;
    done.requests.iter().map(|request| u32::from(within.contains(&request.due))).sum()
}

/// How long the worker that serves took to start and to warm up.
fn start_ms(model: &Model) -> f64 {
    let serves = model.workers.iter().find(|worker| worker.role == "incumbent");
    let parts = serves.and_then(|worker| worker.more.get("boot_ms")?.as_object());
    parts.map_or(0.0, |parts| parts.values().filter_map(serde_json::Value::as_f64).sum())
}

impl Clients {
    /// Of those whose time came within [`AFTER`] of the step.
    fn after(step: Instant, requests: &[Request]) -> Self {
        let mut clients = Self::default();
        let mut delays = Vec::new();
        let within = |request: &&Request| (step..step + AFTER).contains(&request.due);
        for request in requests.iter().filter(within) {
            clients.offered += 1;
            delays.push(request.late);
            match request.answer {
                Answer::After(latency) => clients.late += u32::from(latency > SLO),
                Answer::Refused => clients.refused += 1,
                Answer::Failed => clients.failed += 1,
            }
        }
        delays.sort_unstable();
        let p99 = delays.get((delays.len() * 99 / 100).min(delays.len().saturating_sub(1)));
        clients.sent_late_ms = p99.map_or(0.0, |late| late.as_secs_f64() * 1e3);
        clients
    }
}

/// A case, and its rounds.
pub(super) struct Trial {
    pub(super) case: Case,
    pub(super) rounds: Vec<Round>,
}

impl Trial {
    /// The rounds in which the model was given more.
    pub(super) fn grown(&self) -> impl Iterator<Item = &Grown> {
        self.rounds.iter().filter_map(|round| match &round.outcome {
            Outcome::Grew(grown) => Some(grown),
            Outcome::Before | Outcome::Never => None,
        })
    }

    /// The rounds that began as they should.
    pub(super) fn valid(&self) -> usize {
        self.rounds.iter().filter(|round| round.outcome != Outcome::Before).count()
    }

    /// In how many rounds the aim was met.
    pub(super) fn within(&self) -> usize {
        let standby = self.case.standby;
        self.grown().filter(|grown| grown.judged_ms(standby) < aim_ms(standby)).count()
    }

    /// Whether it was in more than half of them.
    pub(super) fn met(&self) -> bool {
        2 * self.within() > self.valid()
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Clients { offered, late, refused, failed, sent_late_ms } = self.clients;
        match &self.outcome {
            Outcome::Grew(Grown { sign, to_sms, detect_ms, seen_ms, effect_ms, start_ms, .. }) => write!(
                f,
                "{} -> {to_sms} SMs, {sign}: detect {detect_ms:.1} ms (by itself {seen_ms:.1}), effect {effect_ms:.1} ms, \
                 start {start_ms:.1} ms",
                self.sms
            ),
            Outcome::Before => write!(f, "it had more before the step"),
            Outcome::Never => write!(f, "{} SMs, and no more", self.sms),
        }?;
        write!(
            f,
            "; {late} late, {refused} refused, {failed} failed of {offered}, sent late by {sent_late_ms:.1} ms"
        )
    }
}
