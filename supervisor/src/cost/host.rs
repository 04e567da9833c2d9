//! The models of a configuration, which this process runs without servers for clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use shadowslice_config::{Choice, Config, ControllerConfig, ModelConfig, ShareConfig, TenantsConfig};
use shadowslice_control::backend::GpuBackend;
use shadowslice_control::controller::Context;
use shadowslice_control::models::{Served, start_timeout};
use shadowslice_control::nvml::Readings;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::phase::Phase;
use shadowslice_policy::sharing::PolicyName;
use shadowslice_shared::exit;
use shadowslice_shared::units::Percent;
use tokio::sync::watch;
use tokio::time::timeout;

use super::inputs;
use super::load::{LoadCounts, LoadTarget};
use crate::lifecycle::Signals;
use crate::running::{Running, run_models, settled};
use crate::serve::Failed;
use crate::temporary::{end_workers, with_host};

/// The duration of the measurement of the power of idle GPUs.
const IDLE_SPAN: Duration = Duration::from_secs(3);

/// Models that are ready, and a way to load them.
pub(super) struct CostHost {
    models: Vec<CostModel>,
    readings: Arc<Readings>,
    /// The GPUs with models, by their index in the configuration.
    gpus: BTreeMap<usize, Arc<dyn GpuBackend>>,
    clock: Clock,
}

struct CostModel {
    served: Served,
    target: LoadTarget,
}

/// The results of one load.
pub(super) struct LoadRun {
    /// The counts of each model.
    pub(super) counts: Vec<LoadCounts>,
    /// The SM time of each model in SM·s.
    pub(super) sm_seconds: Vec<f64>,
    pub(super) measured: Duration,
    /// The power of each GPU with models in W, or `None` if it is unknown.
    powers: BTreeMap<usize, Option<f64>>,
}

impl LoadRun {
    pub(super) fn power_of(&self, gpu: usize) -> Option<f64> {
        self.powers.get(&gpu).copied().flatten()
    }

    /// Returns the power of all GPUs in W.
    pub(super) fn power(&self) -> Option<f64> {
        self.powers.values().copied().sum()
    }
}

/// Starts the models under a policy, runs `work` when they are ready, and ends them.
pub(super) fn with_models<T>(
    config: &Config,
    policy: PolicyName,
    work: impl AsyncFnOnce(&CostHost) -> Result<T, Failed>,
) -> Result<T, Failed> {
    let config = Config {
        controller: ControllerConfig { policy: Choice::of(policy), act: true, ..config.controller },
        models: config.models.iter().map(whole).collect(),
        tenants: TenantsConfig::default(),
        ..config.clone()
    };
    with_host(config, async |config, context| with_workers(config, context, work).await)
}

/// Returns the model with the whole GPU at the start. Its answers are computed, never cached.
fn whole(model: &ModelConfig) -> ModelConfig {
    let share = ShareConfig { initial: Percent::WHOLE, given: false, max: Percent::WHOLE, ..model.share };
    ModelConfig { share, cache: None, ..model.clone() }
}

async fn with_workers<T>(
    config: &Config,
    context: &Context,
    work: impl AsyncFnOnce(&CostHost) -> Result<T, Failed>,
) -> Result<T, Failed> {
    let mut signals = Signals::new()?;
    let (_phase, phase_rx) = watch::channel(Phase::Starting);
    let nowhere = config.run_dir.join("none");
    let (running, mut control) = run_models((&nowhere, &nowhere), config, context, None, phase_rx).await?;
    let outcome = tokio::select! {
        outcome = async { work(&CostHost::ready(&running, config, context).await?).await } => outcome,
        _ = signals.next() => {
            let why = "a signal stopped the measurement".to_owned();
            Err(Failed { why, code: exit::REFUSED })
        }
    };
    end_workers(config, &mut control).await;
    outcome
}

impl CostHost {
    /// Waits until all models are ready.
    async fn ready(running: &Running, config: &Config, context: &Context) -> Result<Self, Failed> {
        let all = Arc::clone(&running.models.borrow());
        let limit = start_timeout(&config.timeouts);
        let mut models = Vec::new();
        for served in &all.served {
            let refused = |why: String| {
                let why = format!("cannot measure model '{}': {why}", served.model.name);
                Failed { why, code: exit::REFUSED }
            };
            let settled = timeout(limit, settled(served)).await;
            settled.unwrap_or_else(|_| Err("it was not ready in time".to_owned())).map_err(refused)?;
            models.push(CostModel {
                target: target(running, served).map_err(refused)?,
                served: served.clone(),
            });
        }
        let has_models = |gpu: &usize| config.models.iter().any(|model| model.gpu == *gpu);
        let gpus = (0..context.gpus.len()).filter(has_models);
        let gpus = gpus.map(|gpu| (gpu, Arc::clone(&context.gpus[gpu]))).collect();
        Ok(Self { models, readings: Arc::clone(&context.readings), gpus, clock: context.clock })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.models.iter().map(|model| model.served.model.name.as_str())
    }

    pub(super) fn target(&self, index: usize) -> &LoadTarget {
        &self.models[index].target
    }

    pub(super) fn gpu(&self, index: usize) -> usize {
        self.models[index].served.model.gpu
    }

    /// Returns the SM time of all GPUs with models, in SM·s.
    pub(super) fn capacity(&self, span: Duration) -> f64 {
        let sms: u32 = self.gpus.values().map(|gpu| gpu.facts().sms.0).sum();
        f64::from(sms) * span.as_secs_f64()
    }

    /// Returns the power of all idle GPUs in W, or `None` if it is unknown.
    pub(super) async fn idle_power(&self) -> Option<f64> {
        let before = self.energies();
        if before.values().all(Option::is_none) {
            return None;
        }
        tokio::time::sleep(IDLE_SPAN).await;
        powers(&before, &self.energies()).into_values().sum()
    }

    /// Sends requests to the models at these rates, and measures `span` after `settle`.
    pub(super) async fn run(&self, rates: &[f64], settle: Duration, span: Duration) -> LoadRun {
        let from = Instant::now() + settle;
        let until = from + span;
        let load = async |model: &CostModel, rate: f64| match rate > 0.0 {
            true => model.target.run(rate, from, until, self.clock).await,
            false => LoadCounts::default(),
        };
        let loads = join_all(self.models.iter().zip(rates).map(|(model, &rate)| load(model, rate)));
        let use_of_sms = async {
            tokio::time::sleep_until(from.into()).await;
            let (sm_seconds, energies, began) = (self.sm_seconds(), self.energies(), Instant::now());
            tokio::time::sleep_until(until.into()).await;
            let used = self.sm_seconds().into_iter().zip(sm_seconds).map(|(now, before)| now - before);
            (used.collect(), powers(&energies, &self.energies()), began.elapsed())
        };
        let (counts, (sm_seconds, powers, measured)) = tokio::join!(loads, use_of_sms);
        LoadRun { counts, sm_seconds, measured, powers }
    }

    fn sm_seconds(&self) -> Vec<f64> {
        let now = self.clock.now();
        self.gpus.values().for_each(|gpu| gpu.facts().sm_time.advance(now));
        self.models.iter().map(|model| model.served.pipeline.report().sm_use.sm_seconds).collect()
    }

    fn energies(&self) -> Energies {
        let sample = |reading: shadowslice_control::nvml::Reading| {
            Some(EnergySample { energy_mj: reading.usage?.power.energy_mj?, at: reading.read_at })
        };
        let readings = self.readings.look().into_iter().enumerate();
        let readings = readings.filter(|(gpu, _)| self.gpus.contains_key(gpu));
        readings.map(|(gpu, reading)| (gpu, reading.and_then(sample))).collect()
    }
}

/// The energies of GPUs, by their index in the configuration.
type Energies = BTreeMap<usize, Option<EnergySample>>;

/// The energy of a GPU since its driver was loaded.
struct EnergySample {
    energy_mj: u64,
    at: Instant,
}

/// Returns the mean power of each GPU between two samples, in W.
fn powers(before: &Energies, after: &Energies) -> BTreeMap<usize, Option<f64>> {
    let power = |before: &Option<EnergySample>, after: &Option<EnergySample>| {
        let (before, after) = (before.as_ref()?, after.as_ref()?);
        let took = after.at.saturating_duration_since(before.at).as_secs_f64();
        let joules = after.energy_mj.checked_sub(before.energy_mj)? as f64 / 1e3;
        (took > 0.0).then(|| joules / took)
    };
    before.iter().zip(after.values()).map(|((&gpu, before), after)| (gpu, power(before, after))).collect()
}

fn target(running: &Running, served: &Served) -> Result<LoadTarget, String> {
    let route = running.router.model(&served.model.name).ok_or("it was removed")?;
    let metadata = served.pipeline.metadata().ok_or("its inputs are unknown")?;
    if metadata.streams.is_some() {
        return Err("it gives many answers to a request; remove it from the configuration".to_owned());
    }
    Ok(LoadTarget {
        route,
        inputs: inputs::one_row(&served.model, &metadata)?,
        max_batch: metadata.max_batch,
        slo: served.model.slo.latency,
        percentile: served.model.slo.percentile,
    })
}
