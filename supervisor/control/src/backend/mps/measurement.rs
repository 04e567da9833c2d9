//! The measurement of a GPU under MPS, before workers start on it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowslice_shared::boot::SHARE_VARIABLE;
use shadowslice_shared::errors;
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Percent, Sms};

use super::monitor::DaemonMonitor;
use super::{MpsError, MpsSetup};
use crate::backend::probe::{IsolationProbe, isolation, probe};

/// The number of failed measurements after which partitions count as not isolated.
const MAX_ISOLATION_ATTEMPTS: u32 = 3;

/// The measured properties of a GPU under MPS.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct MeasuredGpu {
    pub(super) total: Sms,
    pub(super) least: Sms,
    pub(super) division: Result<Arc<Division>, String>,
}

/// Measures the SMs at the whole share and at the smallest share, and the isolation of partitions.
pub(super) async fn measure(monitor: &DaemonMonitor, setup: &MpsSetup) -> Result<MeasuredGpu, MpsError> {
    let at = async |share: Percent| {
        let mut environment = monitor.control.environment.clone();
        environment.push((SHARE_VARIABLE, share.get().to_string()));
        let found = probe(&setup.probe, &environment).await.map_err(MpsError::Probe)?;
        if !found.uuid.eq_ignore_ascii_case(&setup.uuid) {
            return Err(MpsError::OtherGpu { expected: setup.uuid.clone(), found: found.uuid });
        }
        Ok(Sms(found.sms))
    };
    let smallest = Percent::new(1).expect("1 is a percentage");
    let (total, least) = (at(Percent::WHOLE).await?, at(smallest).await?);
    let found = MeasuredGpu { total, least, division: division(monitor, setup).await.map(Arc::new) };
    if found.least == found.total { Err(MpsError::Outside(found.total)) } else { Ok(found) }
}

/// Returns the division into groups, if partitions are isolated. Repeats a failed measurement,
/// because it can fail on a busy host.
async fn division(monitor: &DaemonMonitor, setup: &MpsSetup) -> Result<Division, String> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let isolation = isolation(&setup.probe, &monitor.control.environment).await;
        match isolation.map_err(|error| errors::chain(&error)).and_then(IsolationProbe::proven) {
            Err(why) if attempts < MAX_ISOLATION_ATTEMPTS => {
                tracing::debug!(
                    device = setup.device,
                    why,
                    "the measurement of partitions failed; measuring again"
                );
            }
            proven => return proven,
        }
    }
}
