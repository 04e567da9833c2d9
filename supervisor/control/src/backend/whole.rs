//! A CUDA GPU without MPS. Each worker uses the whole GPU, and the workers take turns.

use std::path::PathBuf;

use shadowslice_shared::boot::{DeviceSpec, SHARE_VARIABLE};
use shadowslice_shared::units::{Percent, Sms};

use super::{
    BackendFacts, BackendKind, GpuBackend, GrantError, GrantRequest, Lease, PIPE_DIRECTORY, VISIBLE,
    Variables,
};

#[derive(Debug)]
pub struct WholeGpu {
    facts: BackendFacts,
    no_pipe: PathBuf,
}

impl WholeGpu {
    /// Creates the backend. `no_pipe` is a path that does not exist. Workers look for MPS there and
    /// find none, even if another MPS daemon runs on the host.
    pub fn new(device: String, uuid: String, sms: Sms, no_pipe: PathBuf) -> Self {
        tracing::warn!(
            device,
            "no share is enforced on this GPU, because the configuration has `partition: none`; workers take turns on the whole GPU"
        );
        let division = Err("without MPS, processes take turns on the whole GPU".to_owned());
        Self { facts: BackendFacts::new(device, Some(uuid), BackendKind::None, sms, division), no_pipe }
    }

    pub fn surroundings(uuid: &str, no_pipe: &std::path::Path) -> Variables {
        vec![(VISIBLE, uuid.to_owned()), (PIPE_DIRECTORY, no_pipe.display().to_string())]
    }
}

impl GpuBackend for WholeGpu {
    fn facts(&self) -> &BackendFacts {
        &self.facts
    }

    fn sms(&self, _share: Percent) -> Sms {
        self.facts.sms
    }

    fn enter(&self, _joins: bool) -> Result<Lease, GrantError> {
        Ok(Lease(0))
    }

    fn environment(&self, wanted: &GrantRequest) -> Variables {
        let mut environment =
            Self::surroundings(self.facts.uuid.as_deref().unwrap_or_default(), &self.no_pipe);
        environment.push((SHARE_VARIABLE, wanted.share.get().to_string()));
        environment
    }

    fn device(&self, _lease: Lease) -> DeviceSpec {
        DeviceSpec::Cuda
    }

    fn admit(&self, _wanted: &GrantRequest, _pid: i32, found: Sms) -> Result<(), String> {
        if found == self.facts.sms {
            return Ok(());
        }
        Err(format!(
            "without MPS, the worker found {found} instead of the whole GPU ({}); check what else limits GPU processes on this host",
            self.facts.sms
        ))
    }
}
