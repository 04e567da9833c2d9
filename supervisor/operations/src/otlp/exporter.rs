//! The thread that sends traces on.

use shadowslice_shared::rounding;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use super::attributes::text;
use super::outage::{Outage, Word};
use super::spans::{Wall, spans};
use shadowslice_config::TracingConfig;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::trace::{Traced, Tracer};
use shadowslice_shared::errors;

const FLUSH_WITHIN: Duration = Duration::from_secs(5);

/// How long the first request of a message waits for more.
const GATHER: Duration = Duration::from_millis(200);

const BATCH: usize = 256;

const CONNECT_WITHIN: Duration = Duration::from_secs(3);

const ANSWER_WITHIN: Duration = Duration::from_secs(10);

const NAME: &str = env!("CARGO_PKG_NAME");
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("`tracing.otlp: {0}` is no address that can be sent to; write `http://127.0.0.1:4317`, say")]
    Address(String, #[source] tonic::transport::Error),
    #[error("the thread that sends traces cannot be started; raise the limit on processes")]
    Thread(#[source] io::Error),
}

#[derive(Debug)]
pub struct Exporter {
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<()>,
}

impl Exporter {
    /// The collector need not be there.
    pub fn start(tracing: &TracingConfig, clock: Clock) -> Result<(Arc<Tracer>, Self), ExporterError> {
        let endpoint = Endpoint::from_shared(tracing.otlp.clone())
            .map_err(|error| ExporterError::Address(tracing.otlp.clone(), error))?
            .connect_timeout(CONNECT_WITHIN)
            .timeout(ANSWER_WITHIN);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(ExporterError::Thread)?;
        let (tracer, traced) = Tracer::new(tracing.sample, clock);
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let (tracer, resource) = (Arc::new(tracer), resource(&tracing.service));
        let counted = Arc::clone(&tracer);
        let run = move || {
            runtime.block_on(async {
                let client = TraceServiceClient::new(endpoint.connect_lazy());
                let (gathered, outage, dropped) = (Vec::new(), Outage::default(), 0);
                let tracer = counted;
                let sender = Sender { endpoint, client, clock, tracer, resource, gathered, outage, dropped };
                sender.run(traced, stopped).await;
            });
            // It fails if the exporter was dropped, and no task waits for the end.
            end.send(()).ok();
        };
        thread::Builder::new().name("traces".to_owned()).spawn(run).map_err(ExporterError::Thread)?;
        Ok((tracer, Self { stop, ended }))
    }

    pub async fn finish(self) {
        drop(self.stop);
        if timeout(FLUSH_WITHIN, self.ended).await.is_err() {
            tracing::warn!(
                "traces of the last requests could not be sent within {}",
                rounding::duration(FLUSH_WITHIN)
            );
        }
    }
}

fn resource(service: &str) -> Resource {
    let attributes = vec![
        text("service.name", service),
        text("service.version", VERSION),
        text("service.instance.id", format!("{:032x}", fastrand::u128(..))),
    ];
    Resource { attributes, ..Resource::default() }
}

struct Sender {
    endpoint: Endpoint,
    client: TraceServiceClient<Channel>,
    clock: Clock,
    tracer: Arc<Tracer>,
    resource: Resource,
    gathered: Vec<Traced>,
    outage: Outage,
    /// Spans that were dropped as far as the log was told.
    dropped: u64,
}

impl Sender {
    async fn run(mut self, mut traced: mpsc::Receiver<Traced>, stopped: oneshot::Receiver<()>) {
        let mut stopped = std::pin::pin!(stopped);
        loop {
            let stop = tokio::select! {
                () = self.gather(&mut traced) => false,
                _ = &mut stopped => true,
            };
            if stop {
                traced.close();
            }
            self.send_all(&mut traced).await;
            if stop {
                return;
            }
        }
    }

    /// Nothing is lost where this is cut short.
    async fn gather(&mut self, traced: &mut mpsc::Receiver<Traced>) {
        let first = traced.recv().await;
        self.gathered.extend(first);
        sleep(GATHER).await;
    }

    async fn send_all(&mut self, traced: &mut mpsc::Receiver<Traced>) {
        loop {
            while self.gathered.len() < BATCH
                && let Ok(next) = traced.try_recv()
            {
                self.gathered.push(next);
            }
            if self.gathered.is_empty() {
                return;
            }
            self.send().await;
        }
    }

    async fn send(&mut self) {
        let requests = std::mem::take(&mut self.gathered);
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let wall = Wall { since_epoch, at: self.clock.now() };
        let mut next_id = || fastrand::u64(1..);
        let spans: Vec<Span> = requests.iter().flat_map(|one| spans(one, wall, &mut next_id)).collect();
        let count = spans.len() as u64;
        let scope = InstrumentationScope {
            name: NAME.to_owned(),
            version: VERSION.to_owned(),
            ..InstrumentationScope::default()
        };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
        let resource_spans = vec![ResourceSpans {
            resource: Some(self.resource.clone()),
            scope_spans,
            ..ResourceSpans::default()
        }];
        let why = match self.client.export(ExportTraceServiceRequest { resource_spans }).await {
            Ok(answer) => {
                let partial = answer.into_inner().partial_success.unwrap_or_default();
                let rejected = u64::try_from(partial.rejected_spans).unwrap_or(0).min(count);
                self.tracer.count(|counts| {
                    counts.exported += count - rejected;
                    counts.rejected += rejected;
                });
                partial.error_message
            }
            Err(status) => {
                self.tracer.count(|counts| counts.unsent += count);
                // A connection that has gone silent would not be noticed for minutes, and some
                // servers hold pings against their clients.
                self.client = TraceServiceClient::new(self.endpoint.connect_lazy());
                errors::chain(&status)
            }
        };
        self.tell(&why);
    }

    fn tell(&mut self, why: &str) {
        let dropped = self.tracer.counts().dropped();
        let now = dropped - std::mem::replace(&mut self.dropped, dropped);
        let said = self.outage.dropped(now, self.clock.now());
        let word = if now == 0 && said.is_none() { self.outage.sent() } else { said };
        match word {
            Some(Word::Dropped(spans)) => {
                tracing::warn!(
                    dropped = spans,
                    why,
                    "spans were dropped: the collector of `tracing.otlp` did not take them in time"
                );
            }
            Some(Word::Over(spans)) => {
                tracing::info!(dropped = spans, "the collector takes spans again")
            }
            None => {}
        }
    }
}
