//! gRPC's standard health service, for load balancers, `grpc_health_probe` and Kubernetes. It says
//! what `ServerReady` says.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::select_all;
use shadowslice_datapath::heartbeat::HEARTBEAT_TIMEOUT;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::Frontend;
use crate::admission::stop::Stop;
use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_server::Health as HealthService;
use crate::proto::health::{HealthCheckRequest, HealthCheckResponse};
use crate::tensors::check::Clipped;

/// The most watchers at a time, over all connections.
pub(crate) const WATCHERS: usize = 256;

/// The names that may be asked for: the whole server, by its empty name, and its only service.
const SERVICES: [&str; 2] = ["", "inference.GRPCInferenceService"];

#[derive(Debug, Clone)]
pub(crate) struct Health {
    front: Arc<Frontend>,
    stop: Stop,
}

impl Health {
    pub(crate) fn new(front: Arc<Frontend>, stop: Stop) -> Self {
        Self { front, stop }
    }
}

#[tonic::async_trait]
impl HealthService for Health {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !SERVICES.contains(&service.as_str()) {
            return Err(Status::not_found(format!("service '{}' not found", Clipped(&service))));
        }
        Ok(Response::new(said(status(self.front.router.ready()))))
    }

    type WatchStream = ReceiverStream<Result<HealthCheckResponse, Status>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let room = Arc::clone(&self.front.watchers).try_acquire_owned();
        let room = room.map_err(|_| {
            Status::resource_exhausted(format!("{WATCHERS} clients already watch, which is the limit"))
        })?;
        let known = SERVICES.contains(&request.into_inner().service.as_str());
        let (tell, told) = mpsc::channel(1);
        tokio::spawn(follow(Arc::clone(&self.front), known, tell, self.stop.clone(), room));
        Ok(Response::new(ReceiverStream::new(told)))
    }
}

/// Ends when the watcher is gone or serving ends.
async fn follow(
    front: Arc<Frontend>,
    known: bool,
    tell: mpsc::Sender<Result<HealthCheckResponse, Status>>,
    stop: Stop,
    _room: OwnedSemaphorePermit,
) {
    let mut stop = std::pin::pin!(stop.begun());
    let mut last = None;
    let mut look = tokio::time::interval(HEARTBEAT_TIMEOUT);
    loop {
        let mut others = front.router.changes();
        let mut readiness = readinesses(&front);
        // After that: a change from now on is heard below.
        let ready = front.router.ready();
        let now = if known { status(ready) } else { ServingStatus::ServiceUnknown };
        if last != Some(now) {
            last = Some(now);
            if tell.send(Ok(said(now))).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = changed(&mut readiness) => {}
            // A control that stands still announces nothing.
            _ = look.tick() => {}
            Ok(()) = others.changed() => {}
            () = tell.closed() => return,
            () = &mut stop => break,
        }
    }
    if known && last != Some(ServingStatus::NotServing) {
        // It fails when the watcher is gone, which need not know then.
        let _ = tell.send(Ok(said(ServingStatus::NotServing))).await;
    }
}

/// No model is kept by being watched.
fn readinesses(front: &Frontend) -> Vec<watch::Receiver<()>> {
    front.router.models().into_iter().map(|(_, model)| model.readiness()).collect()
}

async fn changed(readiness: &mut [watch::Receiver<()>]) {
    let changes = readiness.iter_mut().map(|model| -> Pin<Box<dyn Future<Output = bool> + Send>> {
        Box::pin(async { model.changed().await.is_ok() })
    });
    let changes: Vec<_> = changes.collect();
    // Without models there is no change; a model that is gone is news of the router.
    if changes.is_empty() || !select_all(changes).await.0 {
        pending::<()>().await;
    }
}

fn status(ready: bool) -> ServingStatus {
    if ready { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn said(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use tokio::sync::Semaphore;
    use tokio::task::yield_now;

    use super::*;
    use crate::admission::stop::Course;
    use crate::tensors::shared_memory::Regions;
    use shadowslice_datapath::clock::Clock;
    use shadowslice_datapath::heartbeat::Heartbeat;
    use shadowslice_datapath::peer::Guard;
    use shadowslice_datapath::pipeline::{LiveSettings, Pipeline, PipelineSettings, SloTarget};
    use shadowslice_datapath::repository::Repository;
    use shadowslice_datapath::router::{Route, Router};

    fn front() -> Arc<Frontend> {
        Arc::new(Frontend {
            router: Arc::new(Router::new(Heartbeat::new(Clock::start()))),
            repository: Arc::new(Repository::new(
                Vec::new,
                Guard::nobody(),
                mpsc::channel(1).0,
                watch::channel(false).1,
            )),
            tracer: None,
            access: None,
            watchers: Arc::new(Semaphore::new(1)),
            regions: Arc::new(Regions::new(Guard::nobody())),
            request_bytes: 1,
        })
    }

    /// The only model from now on, ready.
    fn serve(front: &Frontend) -> Arc<Pipeline> {
        let settings = PipelineSettings {
            name: "m".to_owned(),
            live: LiveSettings {
                slo: SloTarget { latency: Duration::from_secs(1), percentile: 99.0 },
                max_delay: Duration::ZERO,
                reject_late: false,
            },
            max_requests: 1,
            memory: 4096,
            profile: None,
            content: Arc::default(),
        };
        let pipeline = Arc::new(Pipeline::new(settings, Clock::start(), mpsc::channel(1).0).unwrap());
        pipeline.open();
        front.router.set(HashMap::from([("m".to_owned(), Route::to(Arc::clone(&pipeline)).0)]));
        pipeline
    }

    #[tokio::test]
    async fn watchers_hear_that_control_stands_still() {
        let front = front();
        let _serving = serve(&front);
        let (_stop, stopped) = watch::channel(Course::Serve);
        let (tell, mut told) = mpsc::channel(1);
        let room = Arc::clone(&front.watchers).try_acquire_owned().unwrap();
        tokio::spawn(follow(front, true, tell, Stop::new(stopped, Duration::ZERO, Duration::ZERO), room));
        assert_eq!(told.recv().await.unwrap().unwrap(), said(ServingStatus::Serving));
        // No control thread is there to say that it moves.
        let next = tokio::time::timeout(HEARTBEAT_TIMEOUT * 4, told.recv()).await.unwrap();
        assert_eq!(next.unwrap().unwrap(), said(ServingStatus::NotServing));
    }

    #[tokio::test]
    async fn that_a_replaced_model_stops_is_no_news() {
        let front = front();
        let (stop, stopped) = watch::channel(Course::Serve);
        let (tell, mut told) = mpsc::channel(1);
        let room = Arc::clone(&front.watchers).try_acquire_owned().unwrap();
        let mut serving = serve(&front);
        tokio::spawn(follow(
            Arc::clone(&front),
            true,
            tell,
            Stop::new(stopped, Duration::ZERO, Duration::ZERO),
            room,
        ));
        assert_eq!(told.recv().await.unwrap().unwrap(), said(ServingStatus::Serving));
        for round in 0..64 {
            let before = std::mem::replace(&mut serving, serve(&front));
            before.shut("it is replaced");
            // The watcher's turn, twice: it may look at either first.
            yield_now().await;
            yield_now().await;
            assert!(told.try_recv().is_err(), "in round {round}");
        }
        serving.shut("it is broken");
        assert_eq!(told.recv().await.unwrap().unwrap(), said(ServingStatus::NotServing));
        stop.send_replace(Course::Stop);
    }
}
