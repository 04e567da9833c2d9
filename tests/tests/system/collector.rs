//! A trace collector that uses the message definitions of OpenTelemetry.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use shadowslice_tests::home::DEFAULT_TIMEOUT;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A collector that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    received: Arc<Received>,
    running: AbortHandle,
}

#[derive(Debug, Default)]
struct Received {
    /// The number of spans that the collector rejects in each message.
    rejects: i64,
    spans: Mutex<Vec<Span>>,
    resources: Mutex<Vec<Resource>>,
    more: Notify,
}

/// The gRPC service of a collector.
struct CollectorService(Arc<Received>);

#[tonic::async_trait]
impl TraceService for CollectorService {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_resource in request.into_inner().resource_spans {
            self.0.resources.lock().extend(of_resource.resource);
            let spans = of_resource.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans);
            self.0.spans.lock().extend(spans);
        }
        self.0.more.notify_waiters();
        let rejected_spans = self.0.rejects;
        let error_message = "it is full".to_owned();
        let partial = ExportTracePartialSuccess { rejected_spans, error_message };
        let partial_success = (rejected_spans > 0).then_some(partial);
        Ok(Response::new(ExportTraceServiceResponse { partial_success }))
    }
}

impl Collector {
    /// Starts a collector on a free port.
    pub(crate) async fn start() -> io::Result<Self> {
        Self::listen(TcpListener::bind("127.0.0.1:0").await?, 0)
    }

    /// Starts a collector that rejects this number of spans in each message.
    pub(crate) async fn rejecting(rejects: i64) -> io::Result<Self> {
        Self::listen(TcpListener::bind("127.0.0.1:0").await?, rejects)
    }

    /// Starts a collector on this listener.
    pub(crate) fn listen(listener: TcpListener, rejects: i64) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let received = Arc::new(Received { rejects, ..Received::default() });
        let service = TraceServiceServer::new(CollectorService(Arc::clone(&received)));
        let server = tonic::transport::Server::builder().add_service(service);
        let running = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Ok(Self { address, received, running: running.abort_handle() })
    }

    /// Returns all spans that have been received so far.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.received.spans.lock().clone()
    }

    /// Waits until `found` returns a value.
    pub(crate) async fn wait<T>(
        &self,
        what: &str,
        found: impl Fn(&[Span]) -> Option<T>,
    ) -> Result<T, String> {
        let looking = async {
            loop {
                let more = self.received.more.notified();
                if let Some(found) = found(&self.received.spans.lock()) {
                    return found;
                }
                more.await;
            }
        };
        let waited = timeout(DEFAULT_TIMEOUT, looking).await;
        waited.map_err(|_| format!("no {what} among {:#?}", self.spans()))
    }

    /// Waits for the spans of a trace. All spans of a request arrive together.
    pub(crate) async fn trace(&self, id: &str) -> Result<Vec<Span>, String> {
        let of = |spans: &[Span]| -> Vec<Span> {
            spans.iter().filter(|span| hex(&span.trace_id) == id).cloned().collect()
        };
        self.wait(id, |spans| Some(of(spans)).filter(|spans| !spans.is_empty())).await
    }

    /// Returns a resource attribute of the sender of the spans.
    pub(crate) fn resource(&self, key: &str) -> Option<String> {
        let resources = self.received.resources.lock();
        resources.first().and_then(|resource| value(&resource.attributes, key))
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// Formats an identifier in hexadecimal, as in a `traceparent` header.
pub(crate) fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns an attribute of a span.
pub(crate) fn attribute(span: &Span, key: &str) -> Option<String> {
    value(&span.attributes, key)
}

fn value(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()? {
        AnyValue { value: Some(Value::StringValue(text)) } => Some(text.clone()),
        AnyValue { value: Some(Value::IntValue(number)) } => Some(number.to_string()),
        other => Some(format!("{other:?}")),
    }
}

/// Returns the spans that have this name.
pub(crate) fn named<'s>(spans: &'s [Span], name: &str) -> Vec<&'s Span> {
    spans.iter().filter(|span| span.name == name).collect()
}
