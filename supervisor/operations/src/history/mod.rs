//! The last hour of all models and GPUs, sample by sample, for the page that draws it.
//!
//! Each sample is kept as the message by which it is told, so that a page that opens gets the same
//! messages as one that is open.

mod marks;
mod parts;
mod sample;
#[cfg(test)]
mod tests;

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

use crate::admin::Reach;
use crate::status::Status;
use marks::{Mark, Refusing};
use sample::Sample;
use shadowslice_control::controller::PlanReport;
use shadowslice_datapath::pipeline::RecentLatencies;

/// How often it is looked.
const INTERVAL: Duration = Duration::from_secs(2);

/// An hour of them.
const SAMPLES: usize = 1800;

/// The most that all kept samples take; of many models there is less than an hour.
const BYTES: usize = 16 << 20;

/// Of a message; no text in a message has it.
const END: &[u8] = b"\n\n";

/// Samples that wait for a page that reads slowly. One that is further behind begins anew.
const WAITING: usize = 32;

/// All that one sample is made of.
#[derive(Debug, Clone)]
struct Seen {
    at: Instant,
    status: Status,
    plan: PlanReport,
    /// By the model's name.
    looks: BTreeMap<String, RecentLatencies>,
}

impl Seen {
    fn now(reach: &Reach) -> Self {
        let models = reach.models();
        let look = |name: &String, look: Option<RecentLatencies>| Some((name.clone(), look?));
        let looks = models
            .served
            .iter()
            .filter_map(|served| look(&served.model.name, served.pipeline.take_recent_latencies()));
        Self { at: Instant::now(), looks: looks.collect(), status: reach.status(), plan: reach.plan() }
    }
}

#[derive(Debug)]
pub struct History {
    kept: Mutex<Kept>,
    news: broadcast::Sender<Bytes>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The oldest first.
    messages: VecDeque<Bytes>,
    bytes: usize,
}

impl History {
    pub fn new() -> Self {
        Self { kept: Mutex::default(), news: broadcast::Sender::new(WAITING) }
    }

    /// What is kept, and what comes after it: server-sent events, a sample each.
    pub fn follow(&self) -> (Vec<Bytes>, broadcast::Receiver<Bytes>) {
        // Under the lock, so that no sample is told twice or not at all.
        let kept = self.kept.lock();
        (kept.messages.iter().cloned().collect(), self.news.subscribe())
    }

    /// Leaves the samples to the next supervisor, in a file.
    pub fn leave(&self, file: &Path) -> io::Result<()> {
        let (kept, _) = self.follow();
        fs::write(file, kept.concat())
    }

    /// Takes over what was left in a file, which goes. Samples of now come after it.
    pub fn take(&self, file: &Path) -> io::Result<()> {
        let mut left = Vec::new();
        File::open(file)?.take(BYTES as u64).read_to_end(&mut left)?;
        fs::remove_file(file)?;
        let mut left = &left[..];
        while let Some(end) = left.windows(END.len()).position(|window| window == END) {
            let (message, later) = left.split_at(end + END.len());
            self.keep(Bytes::copy_from_slice(message));
            left = later;
        }
        Ok(())
    }

    /// For ever.
    pub async fn write(&self, reach: Arc<Reach>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let (mut before, mut refusing) = (Seen::now(&reach), Refusing::default());
        let mut begins = Some(Mark::begin());
        loop {
            ticks.tick().await;
            let now = Seen::now(&reach);
            if now.status.models.iter().any(|model| model.state == "moved") {
                // What the next supervisor serves is not seen here.
                continue;
            }
            let mut sample = Sample::between(&before, &now, SystemTime::now(), &mut refusing);
            sample.marks.splice(..0, begins.take());
            self.push(&sample);
            before = now;
        }
    }

    fn push(&self, sample: &Sample) {
        let json =
            serde_json::to_string(sample).expect("keys of samples are texts, which is all that can fail");
        self.keep(Bytes::from(format!("data: {json}\n\n")));
    }

    fn keep(&self, message: Bytes) {
        let mut kept = self.kept.lock();
        kept.bytes += message.len();
        kept.messages.push_back(message.clone());
        while kept.messages.len() > SAMPLES || kept.bytes > BYTES {
            let Some(oldest) = kept.messages.pop_front() else { break };
            kept.bytes -= oldest.len();
        }
        // An error means that no page is open.
        self.news.send(message).ok();
    }
}

impl Default for History {
    fn default() -> Self {
        Self::new()
    }
}
