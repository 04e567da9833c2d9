//! The thread that exports traces.

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
use super::outage::{Outage, OutageNotice};
use super::spans::{WallClock, spans};
use shadowslice_config::TracingConfig;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::trace::{TracedRequest, Tracer};
use shadowslice_shared::errors;

/// The time within which the last traces must be sent when the exporter stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for which the first request of a message waits for further requests.
const GATHER_TIME: Duration = Duration::from_millis(200);

/// The largest number of requests in a message.
const MAX_BATCH: usize = 256;

/// The shortest time between two log messages about dropped spans.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The time within which a connection to the collector must be established.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// The time within which the collector must answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

const NAME: &str = env!("CARGO_PKG_NAME");
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("invalid address `tracing.otlp: {0}`; use for example `http://127.0.0.1:4317`")]
    Address(String, #[source] tonic::transport::Error),
    #[error("cannot start the thread that exports traces; raise the limit on processes")]
    Thread(#[source] io::Error),
}

/// The exporter and its thread.
#[derive(Debug)]
pub struct Exporter {
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<()>,
}

impl Exporter {
    /// Starts the thread. The collector need not be reachable.
    pub fn start(tracing: &TracingConfig, clock: Clock) -> Result<(Arc<Tracer>, Self), ExporterError> {
        let endpoint = Endpoint::from_shared(tracing.otlp.clone())
            .map_err(|error| ExporterError::Address(tracing.otlp.clone(), error))?
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REPLY_TIMEOUT);
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
                let (gathered, outage, dropped) = (Vec::new(), Outage::new(REPORT_INTERVAL), 0);
                let tracer = counted;
                let sender = Sender { endpoint, client, clock, tracer, resource, gathered, outage, dropped };
                sender.run(traced, stopped).await;
            });
            // An error only means that the exporter was dropped and no task waits for the end of
            // the thread.
            end.send(()).ok();
        };
        thread::Builder::new().name("traces".to_owned()).spawn(run).map_err(ExporterError::Thread)?;
        Ok((tracer, Self { stop, ended }))
    }

    /// Stops the thread when it has sent the last traces, or after `FLUSH_TIMEOUT`.
    pub async fn finish(self) {
        drop(self.stop);
        if timeout(FLUSH_TIMEOUT, self.ended).await.is_err() {
            tracing::warn!(
                limit = %rounding::duration(FLUSH_TIMEOUT),
                "the trace collector did not accept the last spans before the stop, so these spans are lost"
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
    gathered: Vec<TracedRequest>,
    outage: Outage,
    /// The number of dropped spans that have already been passed to `outage`.
    dropped: u64,
}

impl Sender {
    async fn run(mut self, mut traced: mpsc::Receiver<TracedRequest>, stopped: oneshot::Receiver<()>) {
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

    /// Collects the requests of one message: waits for the first request, and then for further
    /// requests. This function is cancel-safe.
    async fn gather(&mut self, traced: &mut mpsc::Receiver<TracedRequest>) {
        let first = traced.recv().await;
        self.gathered.extend(first);
        sleep(GATHER_TIME).await;
    }

    async fn send_all(&mut self, traced: &mut mpsc::Receiver<TracedRequest>) {
        loop {
            while self.gathered.len() < MAX_BATCH
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
        let wall = WallClock { since_epoch, at: self.clock.now() };
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
                // A new connection is needed, because a dead connection would remain unnoticed for
                // minutes. Keep-alive pings would detect it, but some servers reject them.
                self.client = TraceServiceClient::new(self.endpoint.connect_lazy());
                errors::chain(&status)
            }
        };
        self.report(&why);
    }

    /// Logs the number of dropped spans, and the end of an outage.
    fn report(&mut self, why: &str) {
        let dropped = self.tracer.counts().dropped();
        let now = dropped - std::mem::replace(&mut self.dropped, dropped);
        match self.outage.exported(now) {
            Some(OutageNotice::Dropped(spans)) => {
                tracing::warn!(
                    dropped = spans,
                    why,
                    "trace spans were dropped, because the collector did not accept them; check the collector and `tracing.otlp`"
                );
            }
            Some(OutageNotice::Over(spans)) => {
                tracing::info!(dropped = spans, "the collector accepts spans again")
            }
            None => {}
        }
    }
}
