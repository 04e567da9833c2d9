//! A run of a mix. Its spans follow each other without a pause, and each span has its own tallies.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde_json::{Value, json};
use shadowslice_tests::load::{ArrivalPattern, LoadPlan, LoadTally};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::mix::{MixClients, MixModel, ModelMix};
use super::snapshot::CounterSnapshot;
use crate::error::StageError;
use crate::numbers::rounded;
use crate::python;
use crate::serving::RunningServer;
use crate::tools::{CheckSettings, CheckedDevice, query_gpu};
use crate::traffic::TestedModel;

/// The divisor of the span lengths in a quick run.
const QUICK_DIVISOR: u32 = 4;

/// The length of the first part of a span, in which a policy is still adapting. This part has its
/// own tally.
const SETTLE: Duration = Duration::from_secs(3);

/// The tallies of one model in one span.
#[derive(Debug)]
struct SpanTallies {
    /// The index of the span in the mix.
    part: usize,
    /// The index of the model in the mix.
    place: usize,
    /// The tally of the first seconds of the span.
    first: LoadTally,
    /// The tally of the rest of the span.
    then: LoadTally,
}

/// A mix, and the supervisor that serves it.
#[derive(Debug)]
pub(super) struct MixRun<'a> {
    pub(super) mix: &'a ModelMix,
    pub(super) settings: &'a CheckSettings,
    pub(super) serving: &'a RunningServer,
    /// The prefix of the file names for the policy's plans.
    pub(super) log: &'a str,
}

/// The figures of a mix.
#[derive(Debug)]
pub(super) struct MixResult {
    pub(super) spans: Vec<Value>,
    /// A description of wrong answers, if there are any.
    pub(super) wrong: Option<String>,
}

impl MixRun<'_> {
    /// Sends all requests of all spans, and returns the figures of the spans.
    pub(super) async fn run(&self) -> Result<MixResult, StageError> {
        let models = &self.mix.models;
        let learning =
            models.iter().map(|guest| TestedModel::learn_loosely(&self.serving.server, &guest.model));
        let subjects: Vec<Arc<TestedModel>> = try_join_all(learning).await?;
        let (mut clients, mut snapshots) = (JoinSet::new(), Vec::new());
        for part in 0..self.mix.spans_s.len() {
            let end = Instant::now() + self.span(part);
            self.start_clients(part, &subjects, &mut clients);
            snapshots.push(CounterSnapshot::take(self.mix, self.serving).await?);
            if let Some(before) = part.checked_sub(1) {
                self.write_plan(before).await?;
            }
            sleep_until(end).await;
        }
        self.write_plan(self.mix.spans_s.len() - 1).await?;
        let memory = self.gpu_memory().await;
        let mut tallies = Vec::new();
        while let Some(ended) = clients.join_next().await {
            let panicked = |_| StageError::Unusable("a client's task panicked".into());
            tallies.push(ended.map_err(panicked)??);
        }
        snapshots.push(CounterSnapshot::take(self.mix, self.serving).await?);
        Ok(self.result(&tallies, &snapshots, &memory))
    }

    fn span(&self, part: usize) -> Duration {
        let span = Duration::from_secs_f64(self.mix.spans_s[part]);
        if self.settings.quick { span / QUICK_DIVISOR } else { span }
    }

    fn settle(&self) -> Duration {
        if self.settings.quick { SETTLE / QUICK_DIVISOR } else { SETTLE }
    }

    /// Starts the clients of all models for one span.
    fn start_clients(
        &self,
        part: usize,
        subjects: &[Arc<TestedModel>],
        asking: &mut JoinSet<Result<SpanTallies, StageError>>,
    ) {
        for (place, (guest, subject)) in self.mix.models.iter().zip(subjects).enumerate() {
            let client = SpanClient {
                guest: guest.clone(),
                subject: Arc::clone(subject),
                socket: self.serving.server.home().run_dir().join("http.sock"),
                span: self.span(part),
                settle: self.settle(),
                // Different seeds make sure that models with the same rate get their requests at
                // different times.
                seed: (part * self.mix.models.len() + place) as u64 + 1,
            };
            asking.spawn(async move {
                let [first, then] = client.run(part).await?;
                Ok(SpanTallies { part, place, first, then })
            });
        }
    }

    /// Writes the policy's last decision, or the error that prevented it, into a file next to the
    /// logs.
    async fn write_plan(&self, part: usize) -> Result<(), StageError> {
        let text = match self.serving.server.plan().await {
            Ok(plan) => format!("{plan:#}\n"),
            Err(error) => format!("{}\n", crate::error::chain(&error)),
        };
        self.settings.write_beside_logs(&format!("{}-plan-{}.json", self.log, part + 1), &text)
    }

    /// Returns the used memory of the whole GPU in MiB, or null without a GPU.
    async fn gpu_memory(&self) -> Value {
        let CheckedDevice::Gpu(index) = &self.settings.device else { return Value::Null };
        match query_gpu(self.settings, index, "memory.used").await {
            Ok(used) => used.parse::<u64>().map_or(Value::String(used), Value::from),
            Err(error) => crate::error::chain(&error).into(),
        }
    }

    fn result(&self, tallies: &[SpanTallies], snapshots: &[CounterSnapshot], memory: &Value) -> MixResult {
        let (mut spans, mut wrong) = (Vec::new(), None);
        for (part, pair) in snapshots.windows(2).enumerate() {
            let (span, settle) = (self.span(part), self.settle());
            let mut models = serde_json::Map::new();
            for SpanTallies { place, first, then, .. } in tallies.iter().filter(|of| of.part == part) {
                let guest = &self.mix.models[*place];
                let mut all = first.clone();
                all.add(then);
                if let Some(how) = all.examples.first() {
                    wrong = Some(format!("{} answers of {} are wrong: {how}", all.wrong, guest.model));
                }
                let mut figures = guest.figures(&all, span);
                figures["first"] = guest.part(first);
                figures["then"] = guest.part(then);
                pair[1].models[*place].add_to(&mut figures, &pair[0].models[*place], all.offered);
                models.insert(guest.model.clone(), figures);
            }
            let mut figures = json!({
                "seconds": rounded(span.as_secs_f64()), "settle_s": rounded(settle.as_secs_f64()), "models": models,
            });
            pair[1].add_cores(&mut figures, &pair[0]);
            if part + 1 == self.mix.spans_s.len() {
                figures["gpu_memory_mib"] = memory.clone();
            }
            spans.push(figures);
        }
        MixResult { spans, wrong }
    }
}

/// The clients of one model in one span.
struct SpanClient {
    guest: MixModel,
    subject: Arc<TestedModel>,
    /// The supervisor's HTTP socket, for Python clients.
    socket: PathBuf,
    span: Duration,
    settle: Duration,
    seed: u64,
}

impl SpanClient {
    async fn run(&self, part: usize) -> Result<[LoadTally; 2], StageError> {
        let (span, settle, socket): (_, _, &Path) = (self.span, self.settle, &self.socket);
        let rate = match &self.guest.clients {
            MixClients::Closed(clients) => {
                return Ok(self.subject.load_closed_loop(*clients, span, settle).await);
            }
            MixClients::PerS(rates) => rates[part],
        };
        if rate == 0.0 {
            return Ok([LoadTally::default(), LoadTally::default()]);
        }
        let plan = LoadPlan { rate, span, arrivals: ArrivalPattern::Poisson, seed: self.seed };
        if self.guest.python {
            return python::load_open_loop(socket, &self.guest.model, &plan, settle).await;
        }
        Ok(self.subject.load_open_loop(&plan, settle).await)
    }
}

impl MixModel {
    /// Returns the figures of a model in a span, as its clients measure them. Rates refer to the
    /// length of the span, so the wait for late answers does not reduce them.
    fn figures(&self, tally: &LoadTally, span: Duration) -> Value {
        let late = |quantile| rounded(tally.sent_late_ms(quantile));
        let mut figures = self.part(tally);
        let more = json!({
            "priority": self.priority,
            "slo_ms": self.slo_ms,
            "answered_per_s": rounded(tally.right as f64 / span.as_secs_f64()),
            "p90_ms": rounded(tally.latency_ms(0.9)),
            "failed": tally.failed,
            "wrong": tally.wrong,
            "sent_late_ms": {"p50": late(0.5), "p99": late(0.99), "max": late(1.0)},
        });
        if let (Some(figures), Value::Object(more)) = (figures.as_object_mut(), more) {
            figures.extend(more);
        }
        figures
    }

    /// Returns the figures of a whole span, or of a part of a span.
    fn part(&self, tally: &LoadTally) -> Value {
        let ms = |quantile| rounded(tally.latency_ms(quantile));
        json!({
            "offered": tally.offered,
            "p50_ms": ms(0.5),
            "p99_ms": ms(0.99),
            "within_slo": rounded(tally.attainment(Duration::from_millis(self.slo_ms))),
            "refused": tally.failures(),
        })
    }
}
