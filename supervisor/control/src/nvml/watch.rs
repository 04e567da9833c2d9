//! The monitoring of the configured GPUs while the supervisor runs.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::facts::{Identity, Usage};
use super::library::{NvmlFault, NvmlLibrary};
use super::xid;
use shadowslice_config as config;
use shadowslice_shared::errors;

/// The time between two readings of the GPUs' usage.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// The longest wait for an error. It limits the time that the end of a watch takes.
const EVENT_TIMEOUT: Duration = Duration::from_millis(250);

/// The time for which the end of a watch waits for a driver that does not respond.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The capacity of a channel that carries no messages and only signals by being closed.
const CLOSE_ONLY: usize = 0;

/// The queries that a watch makes. Tests implement them without a GPU.
pub trait Driver: Send + Sync + 'static {
    fn identities(&self) -> Result<Vec<Identity>, NvmlFault>;
    fn usage(&self, uuid: &str) -> Result<Usage, NvmlFault>;
    /// Subscribes to the errors of these GPUs.
    fn xids<'a>(&'a self, uuids: &[String]) -> Result<Box<dyn Xids + 'a>, NvmlFault>;
}

pub trait Xids {
    /// Waits for the next error. Returns `None` if none arrives in this time.
    fn wait(&mut self, at_most: Duration) -> Result<Option<XidEvent>, NvmlFault>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidEvent {
    pub uuid: String,
    /// NVIDIA's number of the error, or 0 if it is unknown.
    pub xid: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    pub identity: Identity,
    /// The last usage, or `None` before the first reading and while NVML cannot read it.
    pub usage: Option<Usage>,
    /// The time at which the usage was read.
    pub read_at: Instant,
    /// The number of errors that the driver has reported since the start.
    pub xid_errors: u64,
}

#[derive(Debug)]
pub struct Readings(Mutex<Vec<Option<Reading>>>);

/// The thread that reads the usage of the GPUs once a second and receives their errors. A slow NVML
/// delays only this thread. It ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    readings: Arc<Readings>,
    /// The sender whose drop stops the thread.
    stop_tx: Option<SyncSender<Infallible>>,
    /// The receiver of a channel that closes when the thread has ended.
    ended_rx: Receiver<Infallible>,
}

impl Readings {
    /// Returns the readings in the order of the configuration. A reading is `None` for an emulated GPU
    /// and for a GPU that NVML does not find.
    pub fn look(&self) -> Vec<Option<Reading>> {
        self.0.lock().clone()
    }

    fn uuids(&self) -> Vec<String> {
        self.0.lock().iter().flatten().map(|reading| reading.identity.uuid.clone()).collect()
    }

    fn update(&self, uuid: &str, update: impl FnOnce(&mut Reading)) {
        let mut all = self.0.lock();
        let mut readings = all.iter_mut().flatten();
        if let Some(reading) = readings.find(|reading| reading.identity.uuid == uuid) {
            update(reading);
        }
    }
}

impl Watch {
    /// Starts the monitoring. Logs the facts that NVML cannot read.
    /// They are missing from the readings.
    pub fn start(gpus: &[config::GpuConfig]) -> Self {
        if !gpus.iter().any(|gpu| matches!(gpu, config::GpuConfig::Cuda { .. })) {
            return Self::of_nothing(gpus);
        }
        match NvmlLibrary::open() {
            Ok(library) => Self::over(Arc::new(library), gpus),
            Err(error) => {
                let error = errors::chain(&error);
                tracing::warn!(
                    error,
                    "cannot load NVML, a library of the NVIDIA driver; `status` and the metrics do not show the GPUs' memory, load and errors, and no warm standbys start; correct the cause, and restart or upgrade the supervisor"
                );
                Self::of_nothing(gpus)
            }
        }
    }

    fn of_nothing(gpus: &[config::GpuConfig]) -> Self {
        let readings = Arc::new(Readings(Mutex::new(vec![None; gpus.len()])));
        Self { readings, stop_tx: None, ended_rx: mpsc::sync_channel(CLOSE_ONLY).1 }
    }

    pub(super) fn over(driver: Arc<dyn Driver>, gpus: &[config::GpuConfig]) -> Self {
        let known = driver.identities().unwrap_or_else(|error| {
            tracing::warn!(
                error = errors::chain(&error),
                "NVML cannot list the GPUs; `status` and the metrics do not show the GPUs' memory, load and errors"
            );
            Vec::new()
        });
        let readings = gpus.iter().map(|gpu| reading(gpu, &known)).collect();
        let readings = Arc::new(Readings(Mutex::new(readings)));
        let (stop_tx, stop_rx) = mpsc::sync_channel(CLOSE_ONLY);
        let (ended_tx, ended_rx) = mpsc::sync_channel(CLOSE_ONLY);
        if !readings.uuids().is_empty() {
            let watched = Arc::clone(&readings);
            let work = move || {
                watch(&*driver, &watched, &stop_rx);
                // The driver must be free before the waiting thread sees that this one has ended.
                drop(driver);
                drop(ended_tx);
            };
            if let Err(error) = std::thread::Builder::new().name("nvml".to_owned()).spawn(work) {
                tracing::warn!(
                    %error,
                    "cannot start the thread that monitors the GPUs, so their figures are missing; raise the limit on processes"
                );
            }
        }
        Self { readings, stop_tx: Some(stop_tx), ended_rx }
    }

    pub fn readings(&self) -> Arc<Readings> {
        Arc::clone(&self.readings)
    }
}

/// Returns the reading of a configured GPU before the first query.
fn reading(gpu: &config::GpuConfig, known: &[Identity]) -> Option<Reading> {
    let config::GpuConfig::Cuda { device, .. } = gpu else { return None };
    let Some(identity) = known.iter().find(|identity| identity.is(device)) else {
        tracing::warn!(
            ?device,
            "NVML does not find this GPU, so its memory, load and errors are not shown; compare the device with `nvidia-smi -L`"
        );
        return None;
    };
    Some(Reading { identity: identity.clone(), usage: None, read_at: Instant::now(), xid_errors: 0 })
}

/// Reads the usage of the GPUs and receives their errors, until the stop.
fn watch(driver: &dyn Driver, readings: &Readings, stop_rx: &Receiver<Infallible>) {
    let uuids = readings.uuids();
    let unsubscribed = |error: &NvmlFault| {
        tracing::warn!(
            error = errors::chain(error),
            "cannot subscribe to the GPUs' Xid errors, so they are not logged or counted; look for them in `dmesg`"
        );
    };
    let mut xids = driver.xids(&uuids).inspect_err(unsubscribed).ok();
    let is_stopped = |within| stop_rx.recv_timeout(within) == Err(RecvTimeoutError::Disconnected);
    let mut is_silent = false;
    loop {
        uuids.iter().for_each(|uuid| read_usage(driver, readings, uuid));
        let next = Instant::now() + READ_INTERVAL;
        while let Some(left) = next.checked_duration_since(Instant::now()) {
            let idle = match xids.as_mut().map(|xids| xids.wait(left.min(EVENT_TIMEOUT))) {
                Some(Ok(event)) => {
                    is_silent = false;
                    event.iter().for_each(|event| count(event, readings));
                    Duration::ZERO
                }
                Some(Err(error)) => {
                    if !std::mem::replace(&mut is_silent, true) {
                        tracing::error!(
                            error = errors::chain(&error),
                            "cannot receive the GPUs' Xid errors, perhaps because a GPU is lost; trying again every second; check `nvidia-smi`"
                        );
                    }
                    left
                }
                None => left,
            };
            if is_stopped(idle) {
                return;
            }
        }
    }
}

fn read_usage(driver: &dyn Driver, readings: &Readings, uuid: &str) {
    let usage = driver.usage(uuid);
    readings.update(uuid, |reading| {
        if let (Err(error), true) = (&usage, reading.usage.is_some()) {
            let (gpu, error) = (reading.identity.index, errors::chain(error));
            tracing::warn!(
                gpu,
                error,
                "NVML cannot read the GPU's memory and load; trying again every second"
            );
        }
        reading.usage = usage.ok();
        reading.read_at = Instant::now();
    });
}

fn count(event: &XidEvent, readings: &Readings) {
    let XidEvent { uuid, xid } = event;
    let mut gpu = None;
    readings.update(uuid, |reading| {
        gpu = Some(reading.identity.index);
        reading.xid_errors += 1;
    });
    tracing::error!(
        gpu,
        uuid,
        xid,
        meaning = xid::meaning(*xid),
        "the NVIDIA driver reports an Xid error on this GPU; if a worker exits, the supervisor restarts the worker"
    );
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.stop_tx.take().is_some()
            && self.ended_rx.recv_timeout(END_TIMEOUT) == Err(RecvTimeoutError::Timeout)
        {
            tracing::warn!(
                "the supervisor stops without waiting for the monitoring thread, because the NVIDIA driver does not respond; check `nvidia-smi` and `dmesg`"
            );
        }
    }
}
