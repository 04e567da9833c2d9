//! From a configuration to what is simulated.

use shadowslice_shared::groups::Division;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Sms};
use shadowslice_simulator::scenario::{Scenario, Served};

use shadowslice_config::{Config, ConfigFault, FaultList, GpuConfig, HandoverMode, ModelConfig, OnLate};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotSimulated {
    #[error(
        "GPU {0} is a real one, of which only it knows how many SMs it has; give `device: emulated, sms: 132`, say"
    )]
    RealGpu(usize),
    #[error("model {0} has no profile, so its costs are not known; give it one")]
    NoProfile(String),
    #[error("{}", FaultList(.0))]
    BadFiles(Vec<ConfigFault>),
    #[error(
        "model {0} is resized by restarting it, which is not simulated; give `handover: shadow` or `never`"
    )]
    Restarts(String),
}

/// Models' files are not needed, only their profiles.
pub(super) fn of(config: &Config) -> Result<Scenario, NotSimulated> {
    let gpu = |(index, gpu): (usize, &GpuConfig)| match gpu {
        GpuConfig::Emulated { sms } => Ok(*sms),
        GpuConfig::Cuda { .. } => Err(NotSimulated::RealGpu(index)),
    };
    let gpus = config.gpus.iter().enumerate().map(gpu).collect::<Result<Vec<Sms>, _>>()?;
    let served = |model: &ModelConfig| {
        let profile = model.profile.as_ref().ok_or_else(|| no_profile(config, model))?;
        served(model, profile, gpus[model.gpu])
    };
    let models = config.models.iter().map(served).collect::<Result<_, _>>()?;
    Ok(Scenario { gpus, models })
}

fn no_profile(config: &Config, model: &ModelConfig) -> NotSimulated {
    let about = |fault: &&ConfigFault| !fault.path.ends_with("].path");
    let faults: Vec<ConfigFault> = config.file_faults.iter().filter(about).cloned().collect();
    if model.profile_path.is_none() || faults.is_empty() {
        return NotSimulated::NoProfile(model.name.clone());
    }
    NotSimulated::BadFiles(faults)
}

fn served(model: &ModelConfig, profile: &Profile, gpu: Sms) -> Result<Served, NotSimulated> {
    if model.handover == HandoverMode::Restart {
        return Err(NotSimulated::Restarts(model.name.clone()));
    }
    let in_process = matches!(model.handover, HandoverMode::Auto | HandoverMode::InProcess);
    let division = Division::of(gpu).filter(|_| in_process);
    let sms_of = |share: Percent| match &division {
        Some(division) => division.sms_of(share),
        None => share.sms_of(gpu),
    };
    Ok(Served {
        terms: model.spec(sms_of),
        truth: profile.clone(),
        max_queued: model.queue.max_requests,
        serve_late: model.queue.on_late == OnLate::Serve,
        max_delay: model.batch.max_delay,
        in_process,
    })
}
