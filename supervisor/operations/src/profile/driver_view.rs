//! Reads the measured GPU's data from NVIDIA's driver.

use std::time::{SystemTime, UNIX_EPOCH};

use shadowslice_shared::profile::ProfileSource;

use shadowslice_config::GpuConfig;
use shadowslice_control::nvml::NvmlLibrary;

const SECONDS_A_DAY: u64 = 86_400;

/// The driver and the measured GPU, or `None` for an emulated device.
#[derive(Debug)]
pub(super) struct DriverView(Option<(NvmlLibrary, GpuConfig)>);

impl DriverView {
    pub(super) fn of(gpu: &GpuConfig) -> Self {
        let real = matches!(gpu, GpuConfig::Cuda { .. });
        // If the driver cannot be loaded, workers fail too, and the worker's error is reported.
        Self(real.then(NvmlLibrary::open).and_then(Result::ok).map(|library| (library, gpu.clone())))
    }

    fn gpu(&self) -> Option<(String, shadowslice_control::nvml::Gpu)> {
        let (library, GpuConfig::Cuda { device, .. }) = self.0.as_ref()? else { return None };
        let host = library.host().ok()?;
        let found = host.gpus.into_iter().flatten().find(|gpu| gpu.identity.is(device))?;
        Some((host.driver, found))
    }

    /// Returns the GPU memory of a process in bytes, or 0 if it is unknown.
    pub(super) fn memory_of(&self, pid: i32) -> u64 {
        self.gpu().and_then(|(_, gpu)| gpu.usage.bytes_of(pid)).unwrap_or(0)
    }

    /// Returns the source that the profile names for its measurements, or `None` for an emulated
    /// device.
    pub(super) fn source(&self) -> Option<ProfileSource> {
        let (driver, gpu) = self.gpu()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(ProfileSource::Measured {
            device: gpu.identity.name,
            driver,
            date: date(now.as_secs() / SECONDS_A_DAY),
        })
    }
}

/// Returns the UTC date that is `days` days after 1970-01-01, in ISO 8601 format. In the
/// calculation, years begin in March, so that a leap day is the last day of its year (Howard
/// Hinnant, chrono-Compatible Low-Level Date Algorithms).
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        let dates = [(0, "1970-01-01"), (58, "1970-02-28"), (11_016, "2000-02-29"), (20_777, "2026-11-20")];
        for (days, wanted) in dates {
            assert_eq!(date(days), wanted);
        }
    }
}
