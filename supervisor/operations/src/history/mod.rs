//! The last hour of all models and GPUs, as samples that the web page draws. `shadowslice top`
//! shows the last sample.
//!
//! Each sample is stored as the message that open pages receive. A page that is opened later
//! receives the same messages.

mod events;
mod parts;
mod sample;
#[cfg(test)]
mod tests;
mod usage;

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::admin::AdminContext;
use crate::plan::PlanReport;
use crate::status::HostStatus;
use events::{HistoryEvent, RefusalTracker};
use sample::HistorySample;
pub use sample::ModelSample;
use shadowslice_control::controller::ReportedState;
use shadowslice_datapath::pipeline::RecentLatencies;
use usage::HourlyUsage;

/// The time between two samples.
const INTERVAL: Duration = Duration::from_secs(2);

/// The largest number of stored samples: one hour.
const MAX_SAMPLES: usize = 1800;

/// The largest size of all stored samples, in bytes. If there are many models, less than one hour
/// fits.
const MAX_BYTES: usize = 16 << 20;

/// The bytes that end a message. They occur only at the end of a message.
const END: &[u8] = b"\n\n";

/// The number of samples that are queued for a slow page. A page that falls further behind must
/// reconnect.
const PAGE_CAPACITY: usize = 32;

/// The state from which a sample is created.
#[derive(Debug, Clone)]
struct Snapshot {
    at: Instant,
    status: HostStatus,
    plan: PlanReport,
    /// The latencies since the last sample, by model name.
    latencies: BTreeMap<String, RecentLatencies>,
}

impl Snapshot {
    fn now(context: &AdminContext) -> Self {
        let models = context.models();
        let latency = |name: &String, latency: Option<RecentLatencies>| Some((name.clone(), latency?));
        let latencies = models
            .served
            .iter()
            .filter_map(|served| latency(&served.shown_name(), served.pipeline.take_recent_latencies()));
        Self {
            at: Instant::now(),
            latencies: latencies.collect(),
            status: context.status(),
            plan: context.plan(),
        }
    }
}

/// The stored samples, and the channel for new samples.
#[derive(Debug)]
pub struct History {
    stored: Mutex<StoredMessages>,
    sample_tx: broadcast::Sender<Bytes>,
}

#[derive(Debug, Default)]
struct StoredMessages {
    /// The messages in ascending order of time.
    messages: VecDeque<Bytes>,
    bytes: usize,
    /// The models of the last sample.
    latest: Vec<ModelSample>,
}

impl Default for History {
    fn default() -> Self {
        Self { stored: Mutex::default(), sample_tx: broadcast::Sender::new(PAGE_CAPACITY) }
    }
}

impl History {
    /// Returns the stored samples and a receiver for new samples. Each sample is a server-sent
    /// event.
    pub fn follow(&self) -> (Vec<Bytes>, broadcast::Receiver<Bytes>) {
        // The lock ensures that each sample is either in the list or sent to the receiver, but
        // never both.
        let stored = self.stored.lock();
        (stored.messages.iter().cloned().collect(), self.sample_tx.subscribe())
    }

    /// Returns the models of the last sample.
    pub fn latest(&self) -> Vec<ModelSample> {
        self.stored.lock().latest.clone()
    }

    /// Writes the samples to a file for the next supervisor.
    pub fn leave(&self, file: &Path) -> io::Result<()> {
        let (stored, _) = self.follow();
        fs::write(file, stored.concat())
    }

    /// Reads the samples of the previous supervisor from a file, and removes the file. New samples
    /// are appended to them.
    pub fn take(&self, file: &Path) -> io::Result<()> {
        let mut left = Vec::new();
        File::open(file)?.take(MAX_BYTES as u64).read_to_end(&mut left)?;
        fs::remove_file(file)?;
        let mut left = &left[..];
        while let Some(end) = left.windows(END.len()).position(|window| window == END) {
            let (message, later) = left.split_at(end + END.len());
            self.keep(Bytes::copy_from_slice(message));
            left = later;
        }
        Ok(())
    }

    /// Adds a sample every `INTERVAL`. Never returns.
    pub async fn write(&self, context: Arc<AdminContext>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let (mut before, mut refusing) = (Snapshot::now(&context), RefusalTracker::default());
        let (mut begins, mut usage) = (Some(HistoryEvent::begin()), HourlyUsage::default());
        usage.record(before.at, &before.status);
        loop {
            ticks.tick().await;
            let now = Snapshot::now(&context);
            if now.status.models.iter().any(|model| model.state == ReportedState::Moved) {
                // The models have moved to the next supervisor, so this supervisor has no figures
                // about them.
                continue;
            }
            let mut sample = HistorySample::between(&before, &now, SystemTime::now(), &mut refusing);
            sample.marks.splice(..0, begins.take());
            sample.set_usage(&usage, &now.status);
            usage.record(now.at, &now.status);
            self.push(&sample);
            before = now;
        }
    }

    fn push(&self, sample: &HistorySample) {
        let json =
            serde_json::to_string(sample).expect("keys of samples are texts, which is all that can fail");
        self.keep(Bytes::from(format!("data: {json}\n\n")));
        self.stored.lock().latest = sample.models.clone();
    }

    fn keep(&self, message: Bytes) {
        let mut stored = self.stored.lock();
        stored.bytes += message.len();
        stored.messages.push_back(message.clone());
        while stored.messages.len() > MAX_SAMPLES || stored.bytes > MAX_BYTES {
            let Some(oldest) = stored.messages.pop_front() else { break };
            stored.bytes -= oldest.len();
        }
        // An error means that no page is open, so it is ignored.
        self.sample_tx.send(message).ok();
    }
}
