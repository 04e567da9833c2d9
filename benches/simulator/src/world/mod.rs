//! The simulated world: models, GPUs and hand-overs with a virtual clock.
//!
//! ```text
//! arrivals ─▶ scheduler ─▶ worker (two batches in flight) ─▶ seat on a GPU
//!                 ▲            ▲
//!                 └─admission─ policy ── changes (a shadow warms up, then takes over between batches)
//! ```
//!
//! The world advances from event to event. The next event is the next arrival or the earliest
//! timer. A policy gets only data that the supervisor also provides. All changes of a decision
//! begin immediately, in the order in which the decision lists them. An in-process change takes
//! effect at the next batch, and a hand-over when its shadow is warm.
//!
//! If batches can be paused, `pauses` decides which batches wait between two pieces.
//!
//! After each event, `residency` decides which models sleep and wake, if some models may sleep.

mod contention;
mod gpus;
mod handover;
mod model;
mod partitions;
mod pauses;
mod residency;
mod seats;
mod tally;
#[cfg(test)]
mod tests;

use std::time::Duration;

use shadowslice_policy::sharing::{Decision, PolicyInput};
use shadowslice_shared::contention::SharedGpu;

pub(crate) use residency::SleepTally;
pub(crate) use tally::{PauseTally, RequestTally};

use gpus::{GpuRules, WorldGpus};
use model::WorldModel;
use pauses::WorldPauses;
use residency::SleepFlags;

use crate::random::{Random, RandomPurpose};
use crate::scenario::{Scenario, SimulatedArrival};
use crate::time::{NEVER, at_ns, ns, timestamp};
use crate::timers::Timers;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorldSettings {
    /// The interval between two decisions of the policy, which must be positive.
    pub interval: Duration,
    /// The time for which a replaced worker stays as a standby worker.
    pub dwell: Duration,
    /// True if models slow each other down by contention for memory bandwidth.
    pub interference: bool,
    pub sharing: GpuSharing,
    /// True if long batches wait between two pieces for batches of other models that would be late.
    pub pause: bool,
    /// The standard deviation of execution times, as a fraction of the expected time.
    pub noise: f64,
    pub seed: u64,
}

/// The way in which workers share a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GpuSharing {
    /// Kernels of workers that use the same SMs take turns, as measured on real GPUs.
    #[default]
    Turns,
    /// Workers whose shares together exceed the GPU divide the GPU in proportion to their shares.
    Proportional,
    /// Each worker uses the whole GPU in time slices.
    Slices,
}

#[derive(Debug, Clone)]
pub struct WorldOutcome {
    pub(crate) models: Vec<ModelOutcome>,
}

/// The outcome of a run for one model.
#[derive(Debug, Clone)]
pub(crate) struct ModelOutcome {
    pub(crate) tally: RequestTally,
    /// The number of requests that had no answer at the end of the run.
    pub(crate) pending: u64,
    /// The times of the share changes, in ns.
    pub(crate) repartitions: Vec<u64>,
    /// The share at the end of the run, in SMs.
    pub(crate) share: u32,
    pub(crate) sleep: SleepTally,
    pub(crate) pauses: PauseTally,
}

/// The part of the world that all models share.
#[derive(Debug)]
struct SharedState<'a> {
    gpus: WorldGpus<'a>,
    timers: Timers,
    pauses: WorldPauses,
    sleep: SleepFlags,
    dwell: Duration,
    deviation: f64,
    random: Random,
}

impl SharedState<'_> {
    /// Returns a random factor for the next batch's execution time, at least 0.1.
    fn noise(&mut self) -> f64 {
        if self.deviation == 0.0 { 1.0 } else { (1.0 + self.deviation * self.random.normal()).max(0.1) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorldTimer {
    /// The timer for the batch of the model's first worker: its end, or the start or end of a wait.
    FirstWorker,
    /// The timer for the batch of the model's second worker.
    SecondWorker,
    /// The timer for the next time at which the scheduler must be called.
    Alarm,
    /// The timer for the next step of the shadow's start.
    Shadow,
    /// The timer for the end of a phase of the hand-over.
    Phase,
    /// The timer for the end of the model's wake.
    Wake,
}

const TIMERS: [WorldTimer; 6] = [
    WorldTimer::FirstWorker,
    WorldTimer::SecondWorker,
    WorldTimer::Alarm,
    WorldTimer::Shadow,
    WorldTimer::Phase,
    WorldTimer::Wake,
];

/// The number of timers that belong to no model: the timers for the next decisions of the policy and
/// about sleep.
const WORLD_TIMERS: usize = 2;

/// Returns the index of a model's timer.
fn timer(model: usize, timer: WorldTimer) -> usize {
    model * TIMERS.len() + timer as usize
}

/// The function that makes the policy's decisions. It is called once per interval.
pub type Decide<'d> = dyn FnMut(&PolicyInput) -> Decision + 'd;

/// Simulates a scenario. Arrivals must be in the order of their times, and name only models of the
/// scenario. The run ends after the last arrival plus the longest SLO of all models. Requests that
/// have no answer by then count as pending.
pub fn run(
    scenario: &Scenario,
    settings: &WorldSettings,
    arrivals: impl IntoIterator<Item = SimulatedArrival>,
    decide: &mut Decide<'_>,
) -> WorldOutcome {
    let mut world = World::new(scenario, settings);
    let mut last = 0;
    for arrival in arrivals {
        last = at_ns(arrival.at);
        world.arrive(arrival, decide);
    }
    let longest = scenario.models.iter().map(|spec| ns(spec.terms.slo)).max().unwrap_or(0);
    world.advance(last.saturating_add(longest), decide);
    world.finish()
}

#[derive(Debug)]
struct World<'a> {
    scenario: &'a Scenario,
    models: Vec<WorldModel<'a>>,
    shared: SharedState<'a>,
    now: u64,
    interval: u64,
    /// The indices of the GPUs with models that may sleep.
    sleep_gpus: Vec<usize>,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, settings: &WorldSettings) -> Self {
        let count = scenario.models.len();
        let sleep_gpus = residency::gpus_with_sleep(scenario);
        let mut shared = SharedState {
            gpus: WorldGpus::new(
                scenario.gpus.iter().copied().map(SharedGpu::new),
                GpuRules { sharing: settings.sharing, interference: settings.interference },
            ),
            timers: Timers::new(count * TIMERS.len() + WORLD_TIMERS),
            pauses: WorldPauses::new(settings.pause, scenario.gpus.len()),
            sleep: SleepFlags { is_due: !sleep_gpus.is_empty(), is_short: false },
            dwell: settings.dwell,
            deviation: settings.noise,
            random: Random::new(settings.seed, RandomPurpose::Noise, 0),
        };
        let spec = scenario.models.iter().enumerate();
        let mut models: Vec<WorldModel<'_>> =
            spec.map(|(index, spec)| WorldModel::new(spec, index, &mut shared)).collect();
        (0..scenario.gpus.len()).for_each(|gpu| partitions::place_all(&mut models, gpu, &shared));
        let interval = ns(settings.interval).max(1);
        let mut new = Self { scenario, models, shared, now: 0, interval, sleep_gpus };
        new.set_interval();
        // All models are loaded now. If they do not fit together, some sleep from the start.
        new.decide_residency();
        new
    }

    /// Sets the timer for the next decision.
    fn set_interval(&mut self) {
        self.shared.timers.set(self.models.len() * TIMERS.len(), self.now.saturating_add(self.interval));
    }

    /// Returns the index of the timer for the next decision about sleep.
    fn residency_timer(&self) -> usize {
        self.models.len() * TIMERS.len() + 1
    }

    /// Handles all timers that fire before a request arrives, and the request.
    fn arrive(&mut self, arrival: SimulatedArrival, decide: &mut Decide<'_>) {
        self.advance(at_ns(arrival.at), decide);
        self.models[arrival.model].arrive(self.now, &mut self.shared);
        self.decide_residency();
    }

    /// Handles all timers that fire up to `until`.
    fn advance(&mut self, until: u64, decide: &mut Decide<'_>) {
        while self.shared.timers.due() <= until && self.shared.timers.due() != NEVER {
            self.now = self.shared.timers.due();
            let due = self.shared.timers.first();
            let (model, timer) = (due / TIMERS.len(), TIMERS[due % TIMERS.len()]);
            let is_residency = due == self.residency_timer();
            match self.models.get_mut(model) {
                Some(model) => fire(model, timer, self.now, &mut self.shared),
                None if is_residency => self.shared.sleep.is_due = true,
                None => self.decide(decide),
            }
            self.decide_residency();
        }
        self.now = until;
    }

    /// Calls the policy, and applies its decision.
    fn decide(&mut self, decide: &mut Decide<'_>) {
        self.set_interval();
        let Self { scenario, models, shared, now, .. } = self;
        let live = models.iter_mut().map(|model| {
            let gpu = shared.gpus.gpu(model.spec.terms.gpu);
            model.live(*now, gpu, shared.pauses.is_enabled)
        });
        let live = live.collect();
        let decision =
            decide(&PolicyInput { now: timestamp(*now), gpus: scenario.gpus.clone(), models: live });
        for (model, admission) in models.iter_mut().zip(decision.admissions) {
            model.set_admission(admission, *now, shared);
        }
        let (changes, count) = (decision.changes.iter(), models.len());
        let mut moved = vec![false; scenario.gpus.len()];
        for change in changes.filter(|change| change.model < count) {
            let model = &mut models[change.model];
            let gpu = model.spec.terms.gpu;
            if model.in_process.is_some() {
                model.resize_in_process(change, shared.gpus.gpu(gpu), *now);
                moved[gpu] = true;
            } else {
                model.change(change, *now, shared);
            }
        }
        for gpu in (0..moved.len()).filter(|&gpu| moved[gpu]) {
            partitions::place_all(models, gpu, shared);
        }
    }

    fn finish(self) -> WorldOutcome {
        let gpus = &self.shared.gpus;
        let outcome = |model: WorldModel<'_>| ModelOutcome {
            pauses: model
                .workers
                .iter()
                .fold(PauseTally::default(), |sum, worker| sum.with(gpus.pauses(worker.seat))),
            pending: model.pending(),
            share: model.share().0,
            sleep: model.weights.tally,
            tally: model.tally,
            repartitions: model.repartitions,
        };
        WorldOutcome { models: self.models.into_iter().map(outcome).collect() }
    }
}

fn fire(model: &mut WorldModel<'_>, timer: WorldTimer, now: u64, shared: &mut SharedState<'_>) {
    match timer {
        WorldTimer::FirstWorker => model.batch_progressed(0, now, shared),
        WorldTimer::SecondWorker => model.batch_progressed(1, now, shared),
        WorldTimer::Alarm => {
            model.refuse_overdue(now);
            model.dispatch(now, shared);
        }
        WorldTimer::Shadow => model.shadow_progressed(now, shared),
        WorldTimer::Phase => model.phase_over(now, shared),
        WorldTimer::Wake => model.awoke(now, shared),
    }
}
