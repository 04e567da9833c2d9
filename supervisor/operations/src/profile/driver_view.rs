//! Reads the measured GPU's data from NVIDIA's driver.

use shadowslice_shared::profile::ProfileSource;
use time::OffsetDateTime;

use shadowslice_config::GpuConfig;
use shadowslice_control::nvml::Library;

/// The driver and the measured GPU, or `None` for an emulated device.
#[derive(Debug)]
pub(super) struct DriverView(Option<(Library, GpuConfig)>);

impl DriverView {
    pub(super) fn of(gpu: &GpuConfig) -> Self {
        let real = matches!(gpu, GpuConfig::Cuda { .. });
        // If the driver cannot be loaded, workers fail too, and the worker's error is reported.
        Self(real.then(Library::open).and_then(Result::ok).map(|library| (library, gpu.clone())))
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
        // A date is displayed in the ISO 8601 format.
        let date = OffsetDateTime::now_utc().date().to_string();
        Some(ProfileSource::Measured { device: gpu.identity.name, driver, date })
    }
}
