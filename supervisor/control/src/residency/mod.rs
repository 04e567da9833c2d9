//! The task that decides which models sleep and which wake, on all GPUs. It runs on the threads of the data
//! path, because requests wait for its decisions.
//!
//! ```text
//! pipelines (waiting requests, sleeps, wakes) ─▶ ResidencyTask ─▶ decide ─▶ pipelines
//!              readings of the GPUs' memory ────────┘
//! ```

mod budget;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shadowslice_config::{GpuConfig, SleepConfig};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::pipeline::{ResidencySignal, SleepCause, SleepState};
use shadowslice_policy::residency::{
    AwakeLoad, ModelResidency, ResidencyAction, ResidencyDecision, WeightsState, decide,
};
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::units::Timestamp;
use tokio::sync::watch;

use crate::backend::Gpus;
use crate::models::{ModelSet, Served};
use crate::nvml::Readings;
use budget::{EmulatedWorker, ModelWeights, WeightsBudget};

/// The longest time between two decisions. New readings of the GPUs' memory arrive in this interval.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The memory that is free if nothing limits it, in bytes. It is larger than that of any GPU.
const UNLIMITED: i128 = 1 << 60;

/// The results of the task that other parts of the supervisor need.
#[derive(Debug)]
pub struct ResidencyBoard {
    pub signal: Arc<ResidencySignal>,
    /// The memory in bytes that a starting worker can get on each GPU, if models sleep for it.
    /// [`u64::MAX`] means that it is unknown.
    available: Vec<AtomicU64>,
}

impl ResidencyBoard {
    /// Creates the board for this number of GPUs.
    pub fn new(gpus: usize) -> Self {
        let available = (0..gpus).map(|_| AtomicU64::new(u64::MAX)).collect();
        Self { signal: Arc::default(), available }
    }

    /// Returns the memory in bytes that a starting worker can get, or `None` if nothing limits it.
    pub fn available(&self, gpu: usize) -> Option<u64> {
        let bytes = self.available.get(gpu)?.load(Ordering::Relaxed);
        (bytes != u64::MAX).then_some(bytes)
    }
}

/// The task that decides about sleep.
#[derive(Debug)]
pub struct ResidencyTask {
    board: Arc<ResidencyBoard>,
    models_rx: watch::Receiver<Arc<ModelSet>>,
    gpus: Gpus,
    budgets: Vec<WeightsBudget>,
    readings: Arc<Readings>,
    clock: Clock,
    /// The maximum host memory for the weights of models that sleep, in bytes.
    host_memory: u64,
}

/// A model that can sleep.
struct Sleeper<'s> {
    served: &'s Served,
    state: SleepState,
}

impl ResidencyTask {
    pub fn new(
        board: Arc<ResidencyBoard>,
        models_rx: watch::Receiver<Arc<ModelSet>>,
        (configs, gpus): (&[GpuConfig], Gpus),
        readings: Arc<Readings>,
        clock: Clock,
        host_memory: u64,
    ) -> Self {
        let now = Instant::now();
        let budgets = configs.iter().map(|gpu| WeightsBudget::new(gpu.memory(), now)).collect();
        Self { board, models_rx, gpus, budgets, readings, clock, host_memory }
    }

    /// Decides whenever a model or a reading has changed. Never returns.
    pub async fn run(mut self) {
        let board = Arc::clone(&self.board);
        loop {
            let changed = board.signal.changed.notified();
            let next = self.decide();
            let check = tokio::time::Instant::now() + CHECK_INTERVAL;
            let due = next.map_or(check, |next| self.clock.instant(next).min(check));
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(due) => {}
            }
        }
    }

    /// Decides once for all GPUs. Returns the time of the next decision, unless something changes earlier.
    fn decide(&mut self) -> Option<Timestamp> {
        let models = Arc::clone(&self.models_rx.borrow());
        let (mut next, mut is_short) = (None, false);
        for gpu in 0..self.gpus.len() {
            let served: Vec<&Served> =
                models.served.iter().filter(|served| served.model.gpu == gpu).collect();
            let decision = self.decide_on(gpu, &served);
            is_short |= decision.is_short;
            next = [next, decision.next].into_iter().flatten().min();
        }
        self.board.signal.is_short.store(is_short, Ordering::Relaxed);
        next
    }

    fn decide_on(&mut self, gpu: usize, served: &[&Served]) -> ResidencyDecision {
        let mut sleepers: Vec<Sleeper<'_>> = served.iter().filter_map(|served| Sleeper::of(served)).collect();
        sleepers.iter_mut().filter(|sleeper| sleeper.state.ends_worker).for_each(|sleeper| {
            self.measure(gpu, sleeper);
        });
        let free = self.free(gpu, served, &sleepers);
        let models: Vec<ModelResidency> = sleepers.iter().map(Sleeper::residency).collect();
        let now = self.clock.now();
        let mut decision = decide(free.unwrap_or(UNLIMITED), &models, now);
        let retries = sleepers.iter().filter_map(|sleeper| sleeper.state.retry_at);
        decision.next = retries.chain(decision.next).min();
        self.publish(gpu, free, &sleepers);
        self.limit_pinned(&sleepers);
        for &(index, action) in &decision.actions {
            sleepers[index].perform(action);
        }
        record_shortage(&sleepers, &models, &decision);
        decision
    }

    /// Returns the memory that is free for weights, or `None` if nothing limits it.
    fn free(&mut self, gpu: usize, served: &[&Served], sleepers: &[Sleeper<'_>]) -> Option<i128> {
        let budget = &mut self.budgets[gpu];
        let weights: Vec<ModelWeights> = sleepers.iter().map(Sleeper::weights).collect();
        budget.update(&weights, Instant::now());
        if self.gpus[gpu].is_real() {
            let pids: BTreeSet<i32> = served.iter().flat_map(|served| pids(served)).collect();
            let readings = self.readings.look();
            if let Some(reading) = readings.get(gpu).and_then(Option::as_ref)
                && let Some(usage) = &reading.usage
            {
                budget.read(usage, reading.read_at, &pids);
            }
        } else {
            let sleeper = |served: &Served| sleepers.iter().find(|sleeper| sleeper.served.id == served.id);
            let workers = served.iter().flat_map(|served| {
                let sleeper = sleeper(served);
                let (memory, can_sleep) = (emulated_memory(served), sleeper.is_some());
                let is_counted = sleeper.is_some_and(|sleeper| sleeper.state.ends_worker);
                let pids = pids(served).into_iter().filter(move |_| !is_counted);
                pids.map(move |pid| EmulatedWorker { pid, memory, can_sleep })
            });
            budget.emulate(&workers.collect::<Vec<_>>());
        }
        let reserved = self.reserved(gpu, sleepers);
        self.budgets[gpu].free(reserved)
    }

    /// Updates the memory of a model's worker, which the model releases if the worker exits.
    fn measure(&self, gpu: usize, Sleeper { served, state }: &mut Sleeper<'_>) {
        let readings = self.readings.look();
        let usage = readings.get(gpu).and_then(Option::as_ref).and_then(|reading| reading.usage.as_ref());
        let of_workers = |usage| -> u64 {
            served.report.borrow().workers.iter().filter_map(|worker| worker.gpu_bytes(usage)).sum()
        };
        let bytes = match (self.gpus[gpu].is_real(), usage) {
            (true, Some(usage)) => of_workers(usage),
            (true, None) => 0,
            (false, _) => served.model.copy_memory().map_or(0, |memory| memory.total()),
        };
        // The memory of a worker that starts is not complete yet, and the driver lists the worker late.
        if bytes > state.bytes || (bytes > 0 && matches!(state.weights, WeightsState::Awake { .. })) {
            state.bytes = bytes;
            served.pipeline.set_process_bytes(bytes);
        }
    }

    /// Publishes the memory that a starting worker can get.
    fn publish(&self, gpu: usize, free: Option<i128>, sleepers: &[Sleeper<'_>]) {
        let is_idle = |sleeper: &&Sleeper<'_>| {
            matches!(
                sleeper.residency().state,
                WeightsState::Awake { load: AwakeLoad::Idle, .. } | WeightsState::InUse { leaves: true }
            )
        };
        let idle: i128 = sleepers.iter().filter(is_idle).map(|idle| i128::from(idle.state.bytes)).sum();
        let reserved = i128::from(self.reserved(gpu, sleepers));
        let available =
            free.map(|free| u64::try_from((free + reserved + idle).max(0)).unwrap_or(u64::MAX - 1));
        self.board.available[gpu].store(available.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the memory of workers that start or are about to start.
    fn reserved(&self, gpu: usize, sleepers: &[Sleeper<'_>]) -> u64 {
        let starting = sleepers.iter().filter(|sleeper| sleeper.state.starts_worker);
        let starting: u64 = starting.map(|sleeper| sleeper.state.bytes).sum();
        starting.max(self.gpus[gpu].facts().reserved())
    }

    /// Permits models to pin host memory as long as the limit allows it.
    fn limit_pinned(&self, sleepers: &[Sleeper<'_>]) {
        let pinned: u64 = sleepers.iter().map(|sleeper| sleeper.state.pinned).sum();
        let mut left = self.host_memory.saturating_sub(pinned);
        for Sleeper { served, state } in sleepers.iter().filter(|sleeper| !sleeper.state.ends_worker) {
            let fits = state.pinned > 0 || state.bytes <= left;
            if state.pinned == 0 && fits {
                left -= state.bytes;
            }
            served.pipeline.set_pins(fits);
        }
    }
}

/// Tells the models that wait for memory whether some is becoming free.
fn record_shortage(sleepers: &[Sleeper<'_>], models: &[ModelResidency], decision: &ResidencyDecision) {
    let leaves = models.iter().any(|model| model.state == WeightsState::InUse { leaves: true })
        || decision.actions.iter().any(|(_, action)| *action != ResidencyAction::Wake);
    for (index, (sleeper, model)) in sleepers.iter().zip(models).enumerate() {
        let waits = matches!(model.state, WeightsState::Asleep { wanted: Some(_) });
        if waits && !decision.actions.iter().any(|(acted, _)| *acted == index) {
            sleeper.served.pipeline.record_shortage(!leaves);
        }
    }
}

fn pids(served: &Served) -> Vec<i32> {
    served.report.borrow().workers.iter().map(|worker| worker.pid).collect()
}

/// Returns the memory of a worker on an emulated GPU.
fn emulated_memory(served: &Served) -> ProcessMemory {
    served.model.profile.as_ref().map(|profile| profile.memory).unwrap_or_default()
}

impl<'s> Sleeper<'s> {
    /// Returns `None` if no worker serves, or if the worker would have to exit and the configuration does
    /// not allow this.
    fn of(served: &'s Served) -> Option<Self> {
        let state = served.pipeline.sleep_state()?;
        let is_awake = !matches!(state.weights, WeightsState::Asleep { .. });
        let must_stay = state.ends_worker && is_awake && served.model.sleep == SleepConfig::Never;
        (!must_stay).then_some(Self { served, state })
    }

    fn weights(&self) -> ModelWeights {
        let sleeps = matches!(self.state.weights, WeightsState::Asleep { .. }) || self.state.starts_worker;
        ModelWeights { id: self.served.id, bytes: if sleeps { 0 } else { self.state.bytes } }
    }

    fn residency(&self) -> ModelResidency {
        let SleepState { bytes, wake_time, weights, .. } = self.state.clone();
        let model = &self.served.model;
        let state = match weights {
            WeightsState::Awake { .. } if model.sleep == SleepConfig::Never => {
                WeightsState::InUse { leaves: false }
            }
            state => state,
        };
        ModelResidency { priority: model.priority, bytes, wake_time, state, sleep_after: model.sleep.after() }
    }

    fn perform(&self, action: ResidencyAction) {
        let pipeline = &self.served.pipeline;
        let slept = match action {
            ResidencyAction::Wake => return pipeline.wake(),
            ResidencyAction::SleepIdle => pipeline.sleep(SleepCause::Idle, true),
            ResidencyAction::SleepForOthers => pipeline.sleep(SleepCause::Pressure, true),
            ResidencyAction::Interrupt { behind } => pipeline.interrupt(behind),
        };
        if let Err(why) = slept {
            tracing::debug!(model = self.served.model.name, why, "the model does not sleep");
        }
    }
}
