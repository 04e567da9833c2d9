//! The conversion of a configuration to a scenario.

use std::collections::BTreeMap;

use shadowslice_shared::contention::ClientPriority;
use shadowslice_shared::groups::Division;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Sms};
use shadowslice_simulator::scenario::{Scenario, ScenarioModel, SleepRule};

use shadowslice_config::{
    Config, ConfigFault, FaultList, GpuConfig, HandoverMode, MAX_MEMBERS, ModelConfig, OnLate, SleepConfig,
};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotSimulated {
    #[error(
        "cannot simulate GPU {0}: its number of SMs is unknown, because it is a real GPU; use for example `device: emulated, sms: 132`"
    )]
    RealGpu(usize),
    #[error("cannot simulate model {0}: its costs are unknown, because it has no profile; set `profile`")]
    NoProfile(String),
    #[error("{}", FaultList(.0))]
    BadFiles(Vec<ConfigFault>),
}

/// Returns the scenario of a configuration. The models' files are not needed, because only the
/// profiles are read.
pub(super) fn of(config: &Config) -> Result<Scenario, NotSimulated> {
    let gpu = |(index, gpu): (usize, &GpuConfig)| match gpu {
        GpuConfig::Emulated { sms, .. } => Ok(*sms),
        GpuConfig::Cuda { .. } => Err(NotSimulated::RealGpu(index)),
    };
    let gpus = config.gpus.iter().enumerate().map(gpu).collect::<Result<Vec<Sms>, _>>()?;
    let model = |(model, shared_process): (&ModelConfig, Option<usize>)| {
        let profile = model.profile.as_ref().ok_or_else(|| no_profile(config, model))?;
        Ok(ScenarioModel { shared_process, ..scenario_model(model, profile, gpus[model.gpu]) })
    };
    let processes = shared_processes(&config.models);
    let models = config.models.iter().zip(processes).map(model).collect::<Result<_, _>>()?;
    let memory = config.gpus.iter().map(GpuConfig::memory).collect();
    Ok(Scenario { gpus, memory, models })
}

/// Returns the number of each model's shared process, or `None` for a model with its own process. Models
/// with the same GPU, client priority and worker name share a process until it is full.
fn shared_processes<'m>(models: &'m [ModelConfig]) -> Vec<Option<usize>> {
    let (mut members, mut processes) = (BTreeMap::new(), BTreeMap::new());
    let process = |model: &'m ModelConfig| {
        let worker = (model.gpu, ClientPriority::of(model.priority), model.shared_worker.as_ref()?);
        let earlier: &mut usize = members.entry(worker).or_default();
        let key = (worker, *earlier / MAX_MEMBERS);
        *earlier += 1;
        let count = processes.len();
        Some(*processes.entry(key).or_insert(count))
    };
    models.iter().map(process).collect()
}

fn no_profile(config: &Config, model: &ModelConfig) -> NotSimulated {
    let is_relevant = |fault: &&ConfigFault| !fault.path.ends_with("].path");
    let faults: Vec<ConfigFault> = config.file_faults.iter().filter(is_relevant).cloned().collect();
    if model.profile_path.is_none() || faults.is_empty() {
        return NotSimulated::NoProfile(model.name.clone());
    }
    NotSimulated::BadFiles(faults)
}

fn scenario_model(model: &ModelConfig, profile: &Profile, gpu: Sms) -> ScenarioModel {
    let in_process = matches!(model.handover, HandoverMode::Auto | HandoverMode::InProcess);
    let division = Division::of(gpu).filter(|_| in_process);
    let sms_of = |share: Percent| match &division {
        Some(division) => division.sms_of(share),
        None => share.sms_of(gpu),
    };
    ScenarioModel {
        terms: model.spec(sms_of),
        truth: profile.clone(),
        max_queued: model.queue.max_requests,
        serve_late: model.queue.on_late == OnLate::Serve,
        max_delay: model.batch.max_delay,
        in_process,
        shared_process: None,
        sleep: match model.sleep {
            SleepConfig::Never => SleepRule::Never,
            SleepConfig::OnPressure => SleepRule::OnPressure,
            SleepConfig::After(after) => SleepRule::After(after),
        },
    }
}
