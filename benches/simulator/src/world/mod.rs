//! The world: models, GPUs and hand-overs under a virtual clock.
//!
//! ```text
//! arrivals ─▶ scheduler ─▶ worker (two batches in flight) ─▶ seat on a GPU
//!                 ▲            ▲
//!                 └─ admission ─ policy ── changes (a shadow warms up, then takes over between batches)
//! ```
//!
//! The world moves from event to event: the next arrival, or the first of a few timers per model.
//! It tells a policy what the supervisor can tell, and no more. All changes of a decision begin at
//! once, in its order; each takes effect when its shadow is warm.

mod contention;
mod gpus;
mod handover;
mod model;
mod partitions;
mod tally;
#[cfg(test)]
mod tests;

use std::time::Duration;

use shadowslice_policy::sharing::{Decision, PolicyInput};
use shadowslice_shared::contention::Gpu;

pub(crate) use tally::Counts;

use gpus::{Gpus, Rules};
use model::Model;

use crate::random::{Purpose, Random};
use crate::scenario::{Arrival, Scenario};
use crate::time::{NEVER, at_ns, moment, ns};
use crate::timers::Timers;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Between two questions to the policy; above zero.
    pub interval: Duration,
    /// How long a relieved worker stands ready.
    pub dwell: Duration,
    /// Models that need much memory bandwidth slow each other down.
    pub interference: bool,
    pub sharing: Sharing,
    /// Of execution times from batch to batch, as a part of them.
    pub noise: f64,
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// Kernels take turns where workers use the same SMs, as was measured.
    #[default]
    Turns,
    /// Workers divide the GPU in proportion where their shares do not fit.
    Proportional,
    /// Workers have the whole GPU one after the other, in slices of time.
    Slices,
}

#[derive(Debug, Clone)]
pub struct Outcome {
    pub(crate) models: Vec<ModelOutcome>,
}

#[derive(Debug, Clone)]
pub(crate) struct ModelOutcome {
    pub(crate) tally: Counts,
    /// Requests without an answer when the run ended.
    pub(crate) pending: u64,
    /// In nanoseconds.
    pub(crate) repartitions: Vec<u64>,
    pub(crate) share: u32,
}

#[derive(Debug)]
struct Stage<'a> {
    gpus: Gpus<'a>,
    timers: Timers,
    dwell: Duration,
    deviation: f64,
    random: Random,
}

impl Stage<'_> {
    /// The factor on the time of the next batch. No batch takes less than a tenth of its time.
    fn noise(&mut self) -> f64 {
        if self.deviation == 0.0 { 1.0 } else { (1.0 + self.deviation * self.random.normal()).max(0.1) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Timer {
    /// The batch of one of the model's workers is through.
    FirstWorker,
    SecondWorker,
    /// A batch need not wait any more.
    Alarm,
    Shadow,
    /// A phase of the hand-over has lasted as long as it may.
    Phase,
}

const TIMERS: [Timer; 5] =
    [Timer::FirstWorker, Timer::SecondWorker, Timer::Alarm, Timer::Shadow, Timer::Phase];

fn timer(model: usize, timer: Timer) -> usize {
    model * TIMERS.len() + timer as usize
}

/// Called once an interval.
pub type Decide<'d> = dyn FnMut(&PolicyInput) -> Decision + 'd;

/// Arrivals must be in order of time and for the scenario's models only. Requests without an answer
/// when the last one's SLO is over are left so.
pub fn run(
    scenario: &Scenario,
    settings: &Settings,
    arrivals: impl IntoIterator<Item = Arrival>,
    decide: &mut Decide<'_>,
) -> Outcome {
    let mut world = World::new(scenario, settings);
    let mut last = 0;
    for arrival in arrivals {
        last = at_ns(arrival.at);
        world.advance(last, decide);
        world.models[arrival.model].arrive(last, &mut world.stage);
    }
    let longest = scenario.models.iter().map(|served| ns(served.terms.slo)).max().unwrap_or(0);
    world.advance(last.saturating_add(longest), decide);
    world.finish()
}

#[derive(Debug)]
struct World<'a> {
    scenario: &'a Scenario,
    models: Vec<Model<'a>>,
    stage: Stage<'a>,
    now: u64,
    interval: u64,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, settings: &Settings) -> Self {
        let count = scenario.models.len();
        let mut stage = Stage {
            gpus: Gpus::new(
                scenario.gpus.iter().copied().map(Gpu::new),
                Rules { sharing: settings.sharing, interference: settings.interference },
            ),
            timers: Timers::new(count * TIMERS.len() + 1),
            dwell: settings.dwell,
            deviation: settings.noise,
            random: Random::new(settings.seed, Purpose::Noise, 0),
        };
        let served = scenario.models.iter().enumerate();
        let mut models: Vec<Model<'_>> =
            served.map(|(index, served)| Model::new(served, index, &mut stage)).collect();
        (0..scenario.gpus.len()).for_each(|gpu| partitions::place_all(&mut models, gpu, &stage));
        let mut new = Self { scenario, models, stage, now: 0, interval: ns(settings.interval).max(1) };
        new.set_interval();
        new
    }

    fn set_interval(&mut self) {
        self.stage.timers.set(self.models.len() * TIMERS.len(), self.now.saturating_add(self.interval));
    }

    fn advance(&mut self, until: u64, decide: &mut Decide<'_>) {
        while self.stage.timers.due() <= until && self.stage.timers.due() != NEVER {
            self.now = self.stage.timers.due();
            let due = self.stage.timers.first();
            let (model, timer) = (due / TIMERS.len(), TIMERS[due % TIMERS.len()]);
            match self.models.get_mut(model) {
                Some(model) => fire(model, timer, self.now, &mut self.stage),
                None => self.ask(decide),
            }
        }
        self.now = until;
    }

    fn ask(&mut self, decide: &mut Decide<'_>) {
        self.set_interval();
        let Self { scenario, models, stage, now, .. } = self;
        let live = models.iter_mut().map(|model| {
            let gpu = stage.gpus.gpu(model.served.terms.gpu);
            model.live(*now, gpu)
        });
        let live = live.collect();
        let decision = decide(&PolicyInput { now: moment(*now), gpus: scenario.gpus.clone(), models: live });
        for (model, admission) in models.iter_mut().zip(decision.admissions) {
            model.set_admission(admission, *now, stage);
        }
        let (changes, count) = (decision.changes.iter(), models.len());
        let mut moved = vec![false; scenario.gpus.len()];
        for change in changes.filter(|change| change.model < count) {
            let model = &mut models[change.model];
            let gpu = model.served.terms.gpu;
            if model.inside.is_some() {
                model.resize_inside(change, stage.gpus.gpu(gpu), *now);
                moved[gpu] = true;
            } else {
                model.change(change, *now, stage);
            }
        }
        for gpu in (0..moved.len()).filter(|&gpu| moved[gpu]) {
            partitions::place_all(models, gpu, stage);
        }
    }

    fn finish(self) -> Outcome {
        let outcome = |model: Model<'_>| ModelOutcome {
            pending: model.pending(),
            share: model.share().0,
            tally: model.tally,
            repartitions: model.repartitions,
        };
        Outcome { models: self.models.into_iter().map(outcome).collect() }
    }
}

fn fire(model: &mut Model<'_>, timer: Timer, now: u64, stage: &mut Stage<'_>) {
    match timer {
        Timer::FirstWorker => model.completed(0, now, stage),
        Timer::SecondWorker => model.completed(1, now, stage),
        Timer::Alarm => model.dispatch(now, stage),
        Timer::Shadow => model.shadow_came(now, stage),
        Timer::Phase => model.phase_over(now, stage),
    }
}
