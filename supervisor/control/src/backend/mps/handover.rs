//! The MPS daemon of a GPU that one supervisor hands over to the next.

use serde::{Deserialize, Serialize};

use super::daemon::Daemon;
use super::directories::Directories;
use super::measurement::MeasuredGpu;
use super::monitor::{DaemonMonitor, ServerState};
use super::{MpsError, MpsGpu, MpsSetup};

/// The description of a GPU's MPS daemon for the next supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsHandover {
    pub uuid: String,
    daemon: i32,
    several_users: bool,
    #[serde(rename = "place")]
    pub(super) directories: Directories,
    #[serde(flatten)]
    measured: MeasuredGpu,
}

impl MpsHandover {
    /// Returns the description of the GPU's daemon, or `None` while no daemon runs.
    pub(super) fn of(gpu: &MpsGpu) -> Option<Self> {
        Some(Self {
            uuid: gpu.setup.uuid.clone(),
            daemon: gpu.state.borrow().daemon?,
            several_users: gpu.setup.several_users,
            directories: gpu.directories.clone(),
            measured: MeasuredGpu {
                total: gpu.facts.sms,
                least: gpu.least,
                division: gpu.facts.division.clone(),
            },
        })
    }

    /// Adopts the daemon, which belongs to the previous supervisor until [`Daemon::keep`]. The
    /// earlier measurements remain valid. New ones would be wrong, because the GPU is busy.
    pub(super) async fn adopt(
        &self,
        monitor: &DaemonMonitor,
        setup: &MpsSetup,
    ) -> Result<(Daemon, MeasuredGpu), MpsError> {
        if self.several_users != setup.several_users {
            return Err(MpsError::Users);
        }
        let (daemon, server) = monitor.adopt(self.daemon).await?;
        tracing::info!(
            device = setup.device,
            daemon = self.daemon,
            server,
            "took over MPS from the previous supervisor"
        );
        monitor.state.send_replace(ServerState {
            generation: 0,
            server: Ok(server),
            daemon: Some(self.daemon),
        });
        Ok((daemon, self.measured.clone()))
    }
}
