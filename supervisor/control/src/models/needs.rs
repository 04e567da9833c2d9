//! The resources that a copy of a model needs, according to its profile and its statistics.

use shadowslice_config::ModelConfig;
use shadowslice_policy::placement::{self, CopyLoad, Share, SmRequirement, UnmetLoad};
use shadowslice_shared::groups::GROUP_SMS;
use shadowslice_shared::profile::{Execution, ExecutionRow};
use shadowslice_shared::units::{Percent, Sms};

use crate::backend::GpuBackend;
use crate::controller::{ModelReport, ReportedRole, Served};
use crate::nvml::Reading;
use shadowslice_datapath::pipeline::{Rates, SleepPhase, SleepReport};

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq)]
pub struct Needs {
    /// The SMs that it needs for its SLO at `rate`. `None` if its execution times are not known.
    pub sms: Option<Result<SmRequirement, UnmetLoad>>,
    /// The rows that arrive per second, over the last minute or two.
    pub rate: f64,
    /// The maximum requests per second that a copy answers within the SLO on the whole GPU. `None` if it
    /// is not known, or if the SLO cannot be met.
    pub capacity: Option<f64>,
    /// The GPU memory in bytes, with the weights unless the model sleeps.
    pub memory: Option<u64>,
    /// The additional GPU memory of a second worker, or for the wake of a model that sleeps, in bytes.
    pub shadow: Option<u64>,
    /// The fraction of the GPU's memory bandwidth, from 0 to 1. It is 0 if it is not known.
    pub bandwidth: f64,
}

impl Needs {
    /// Returns the needs of a model that has not run, without requests.
    pub(super) fn from_profile(model: &ModelConfig, gpu: &dyn GpuBackend) -> Self {
        let execution = model.profile.as_ref().map(|profile| &profile.execution);
        let (shadow, memory) = profile_memory(model).unzip();
        Self::with(model, gpu, execution, load_of(model, 0.0), (memory, shadow))
    }

    /// Returns the needs of a model that runs. `gpus` are the driver's readings.
    pub fn of(served: &Served, gpus: &[Option<Reading>]) -> Self {
        let Served { model, gpu, pipeline, report, .. } = served;
        let seen = pipeline.report();
        let sleep = pipeline.sleep_report().filter(|sleep| sleep.phase == SleepPhase::Asleep);
        let report = report.borrow();
        let observed = match &model.profile {
            Some(profile) => Some(profile.execution.clone()),
            None => observed(&seen.execution, Sms(report.sms)),
        };
        let (rows, answered) = (pipeline.totals().rows, seen.counts.succeeded);
        let rows = (rows.max(1) as f64 / answered.max(1) as f64).max(1.0);
        let traffic = seen.latencies.traffic;
        let rate = traffic.rate(traffic.counts.offered()) * rows;
        let reading = gpus.get(model.gpu).and_then(Option::as_ref);
        let memory = match sleep {
            Some(sleep) => Some(memory_asleep(model, &report, reading, &sleep)),
            None => observed_memory(&report, reading).or_else(|| profile_memory(model)),
        };
        let (shadow, memory) = memory.unzip();
        let load = match seen.streams.filter(|streams| streams.limits.per_step > 1) {
            // A step computes an answer of each of its streams.
            Some(streams) => CopyLoad {
                slo: model.slo.next.unwrap_or(model.slo.latency),
                rate: rate + streams.answers_per_s,
                max_batch: streams.limits.per_step,
            },
            None => load_of(model, rate),
        };
        let needs = Self::with(model, &**gpu, observed.as_ref(), load, (memory, shadow));
        Self { capacity: needs.capacity.map(|most| most / rows), ..needs }
    }

    fn with(
        model: &ModelConfig,
        gpu: &dyn GpuBackend,
        execution: Option<&Execution>,
        load: CopyLoad,
        (memory, shadow): (Option<u64>, Option<u64>),
    ) -> Self {
        let sms =
            execution.map(|execution| placement::sm_requirement(execution, gpu.sms(Percent::WHOLE), &load));
        let boundless = CopyLoad { rate: f64::INFINITY, ..load };
        let most = execution
            .map(|execution| placement::sm_requirement(execution, gpu.sms(Percent::WHOLE), &boundless));
        let capacity = match most {
            Some(Err(UnmetLoad::Rate { max: most })) => Some(most),
            _ => None,
        };
        let busy = sms.as_ref().and_then(|need| need.as_ref().ok()).map_or(1.0, |need| need.busy);
        let bandwidth = model.profile.as_ref().map_or(0.0, |profile| profile.bandwidth * busy);
        Self { sms, rate: load.rate, capacity, memory, shadow, bandwidth }
    }

    /// Returns why no share would do: more requests arrive than a copy answers.
    pub fn overload(&self, rates: &Rates) -> Option<String> {
        let most = self.capacity.filter(|most| rates.requests > *most)?;
        let (arrive, window_s) = (rates.requests, rates.window_s.floor().clamp(1.0, 10.0));
        Some(format!(
            "a copy serves at most {most:.0} requests/s within the SLO, but {arrive:.0} requests/s arrive (over the last {window_s:.0} s)"
        ))
    }

    /// Rows each second that a copy serves within the SLO at most, where more are offered.
    pub fn most(&self) -> Option<f64> {
        match self.sms {
            Some(Err(UnmetLoad::Rate { max: most })) => Some(most),
            _ => None,
        }
    }

    /// Returns the part of a GPU that the model needs. If a need is not known, assumes the minimum.
    pub(super) fn share(&self, model: &ModelConfig, gpu: &dyn GpuBackend) -> Share {
        let whole = gpu.sms(Percent::WHOLE);
        let sms = match &self.sms {
            Some(Ok(need)) => need.sms,
            Some(Err(_)) => whole,
            None => Sms(GROUP_SMS).min(whole),
        };
        let (memory, shadow) = (self.memory.unwrap_or(0), self.shadow.unwrap_or(0));
        Share { sms: sms.max(gpu.sms(model.share.min)), memory, shadow, bandwidth: self.bandwidth }
    }
}

/// Returns the load of a copy that gets `rate` rows per second.
fn load_of(model: &ModelConfig, rate: f64) -> CopyLoad {
    CopyLoad { slo: model.slo.latency, rate, max_batch: model.batch.resolve(true).0.max(1) }
}

/// Times at one number of SMs: with fewer a batch takes longer in proportion, with more as long.
fn observed(times: &[(u32, std::time::Duration)], at: Sms) -> Option<Execution> {
    let row = |&(batch, took): &(u32, std::time::Duration)| ExecutionRow {
        batch,
        ms: vec![took.as_secs_f64() * 1e3],
    };
    Execution::new(vec![at], times.iter().map(row).collect()).ok()
}

/// Returns the memory of a worker without and with its weights, in bytes, according to the profile.
fn profile_memory(model: &ModelConfig) -> Option<(u64, u64)> {
    let memory = model.copy_memory()?;
    let shadow = memory.without_weights();
    Some((shadow, shadow.saturating_add(memory.weights)))
}

/// Returns the memory for the wake of a model that sleeps, and the memory that it has meanwhile, in bytes.
fn memory_asleep(
    model: &ModelConfig,
    report: &ModelReport,
    gpu: Option<&Reading>,
    sleep: &SleepReport,
) -> (u64, u64) {
    let usage = gpu.and_then(|gpu| gpu.usage.as_ref());
    let worker = report.workers.iter().find(|worker| worker.role == ReportedRole::Incumbent);
    let kept = match worker {
        None => 0,
        Some(worker) => match usage.and_then(|usage| worker.gpu_bytes(usage)) {
            // These figures are from the start of the worker.
            Some(bytes) if worker.shared.is_some() => bytes.saturating_sub(sleep.bytes),
            Some(bytes) => bytes,
            None => model.copy_memory().map_or(0, |memory| memory.without_weights()),
        },
    };
    (sleep.bytes, kept)
}

/// Returns the memory of a worker without and with its weights, in bytes, according to the driver.
fn observed_memory(report: &ModelReport, gpu: Option<&Reading>) -> Option<(u64, u64)> {
    let worker = report.workers.iter().find(|worker| worker.role == ReportedRole::Incumbent)?;
    let memory = worker.memory?;
    let own = worker.gpu_bytes(gpu?.usage.as_ref()?)?;
    let shadow = own.saturating_sub(memory.brought_mib.saturating_mul(MIB));
    Some((shadow, shadow.saturating_add(memory.weights_mib.saturating_mul(MIB))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overload_is_told_by_both_rates() {
        let capacity =
            |capacity| Needs { sms: None, rate: 0.0, capacity, memory: None, shadow: None, bandwidth: 0.0 };
        let rates = Rates { window_s: 10.7, requests: 180.4, refused: 80.0, failed: 0.0 };
        let why = "a copy serves at most 100 requests/s within the SLO, but 180 requests/s arrive (over the last 10 s)";
        assert_eq!(capacity(Some(100.0)).overload(&rates).as_deref(), Some(why));
        assert_eq!(capacity(Some(181.0)).overload(&rates), None);
        assert_eq!(capacity(None).overload(&rates), None);
    }

    #[test]
    fn times_at_one_number_of_sms_are_times_at_all_of_them() {
        use std::time::Duration;
        let ms = Duration::from_millis;
        let execution = observed(&[(1, ms(4)), (8, ms(10))], Sms(66)).unwrap();
        assert_eq!(execution.time(1, 33.0), ms(8));
        assert_eq!(execution.time(8, 132.0), ms(10));
        assert_eq!(observed(&[], Sms(66)), None);
    }
}
