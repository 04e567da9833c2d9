//! MPS for one GPU, as one supervisor leaves it to the next.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::Sms;

use super::daemon::Daemon;
use super::directories::Directories;
use super::monitor::{Condition, Keeper};
use super::{Found, MpsError, MpsGpu, MpsSetup};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsEstate {
    pub uuid: String,
    daemon: i32,
    several_users: bool,
    pub(super) place: Directories,
    total: Sms,
    least: Sms,
    division: Result<Division, String>,
}

impl MpsEstate {
    /// `None` while there is no daemon.
    pub(super) fn of(gpu: &MpsGpu) -> Option<Self> {
        let Found { total, least, division } = &gpu.found;
        Some(Self {
            uuid: gpu.setup.uuid.clone(),
            daemon: gpu.condition.borrow().daemon?,
            several_users: gpu.setup.several_users,
            place: gpu.place.clone(),
            total: *total,
            least: *least,
            division: division.as_ref().map(|division| (**division).clone()).map_err(String::clone),
        })
    }

    /// The daemon stays the other supervisor's until it is kept. What was measured stands: the GPU
    /// is busy now.
    pub(super) async fn adopt(&self, keeper: &Keeper, setup: &MpsSetup) -> Result<(Daemon, Found), MpsError> {
        if self.several_users != setup.several_users {
            return Err(MpsError::Users);
        }
        let (daemon, server) = keeper.adopt(self.daemon).await?;
        tracing::info!(
            device = setup.device,
            daemon = self.daemon,
            server,
            "took over MPS from the previous supervisor"
        );
        keeper.condition.send_replace(Condition { life: 0, server: Ok(server), daemon: Some(self.daemon) });
        let division = self.division.clone().map(Arc::new);
        Ok((daemon, Found { total: self.total, least: self.least, division }))
    }
}
