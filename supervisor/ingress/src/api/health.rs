//! gRPC's standard health service, for load balancers, `grpc_health_probe` and Kubernetes. It
//! reports the same readiness as `ServerReady`.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::select_all;
use shadowslice_datapath::heartbeat::HEARTBEAT_TIMEOUT;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tonic::{Request, Response, Status};

use super::frontend::Frontend;
use super::grpc::Services;
use crate::admission::{Clipped, Stop};
use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_server::Health;
use crate::proto::health::{HealthCheckRequest, HealthCheckResponse};

/// The maximum number of concurrent watchers on all connections.
pub(crate) const MAX_WATCHERS: usize = 256;

/// The known names. The empty name means the whole server, and the other name is its only service.
const SERVICES: [&str; 2] = ["", "inference.GRPCInferenceService"];

#[tonic::async_trait]
impl Health for Services {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !SERVICES.contains(&service.as_str()) {
            return Err(Status::not_found(format!("service '{}' not found", Clipped(&service))));
        }
        Ok(Response::new(response(status(self.front.router.ready()))))
    }

    type WatchStream = ReceiverStream<Result<HealthCheckResponse, Status>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let place = Arc::clone(&self.front.watchers).try_acquire_owned();
        let place = place.map_err(|_| {
            Status::resource_exhausted(format!("{MAX_WATCHERS} clients already watch, which is the limit"))
        })?;
        let known = SERVICES.contains(&request.into_inner().service.as_str());
        let (status_tx, status_rx) = mpsc::channel(1);
        tokio::spawn(follow(Arc::clone(&self.front), known, status_tx, self.stop.clone(), place));
        Ok(Response::new(ReceiverStream::new(status_rx)))
    }
}

/// Sends each change of the status, until the watcher is gone or serving ends.
async fn follow(
    front: Arc<Frontend>,
    known: bool,
    status_tx: mpsc::Sender<Result<HealthCheckResponse, Status>>,
    stop: Stop,
    _place: OwnedSemaphorePermit,
) {
    let mut stop = std::pin::pin!(stop.begun());
    let mut last = None;
    let mut interval = tokio::time::interval(HEARTBEAT_TIMEOUT);
    loop {
        let mut models_rx = front.router.changes();
        // The receivers do not keep the models. The router announces models that are removed.
        let models = front.router.models().into_iter();
        let readiness = models.map(|(_, route)| WatchStream::from_changes(route.pipeline().readiness()));
        let mut readiness = select_all(readiness);
        // The status is read last, so that every later change wakes the select below.
        let ready = front.router.ready();
        let now = if known { status(ready) } else { ServingStatus::ServiceUnknown };
        if last != Some(now) {
            last = Some(now);
            if status_tx.send(Ok(response(now))).await.is_err() {
                return;
            }
        }
        tokio::select! {
            Some(()) = readiness.next() => {}
            // A control thread that hangs announces no change.
            _ = interval.tick() => {}
            Ok(()) = models_rx.changed() => {}
            () = status_tx.closed() => return,
            () = &mut stop => break,
        }
    }
    if known && last != Some(ServingStatus::NotServing) {
        // This fails if the watcher is gone.
        let _ = status_tx.send(Ok(response(ServingStatus::NotServing))).await;
    }
}

fn status(ready: bool) -> ServingStatus {
    if ready { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use tokio::sync::Semaphore;
    use tokio::task::yield_now;

    use super::*;
    use crate::tensors::SharedMemory;
    use shadowslice_datapath::clock::Clock;
    use shadowslice_datapath::heartbeat::Heartbeat;
    use shadowslice_datapath::peer::Guard;
    use shadowslice_datapath::phase::Phase;
    use shadowslice_datapath::pipeline::{LiveSettings, Pipeline, PipelineSettings, SloTarget};
    use shadowslice_datapath::repository::Repository;
    use shadowslice_datapath::router::{Route, Router};
    use shadowslice_datapath::tenants::TenantMembership;
    use tokio::sync::watch;

    fn front() -> Arc<Frontend> {
        Arc::new(Frontend {
            router: Arc::new(Router::new(Heartbeat::new(Clock::start()))),
            repository: Arc::new(Repository::new(
                Vec::new,
                Guard::nobody(),
                mpsc::channel(1).0,
                watch::channel(Phase::Serving).1,
            )),
            tracer: None,
            access: None,
            watchers: Arc::new(Semaphore::new(1)),
            regions: Arc::new(SharedMemory::new(Guard::nobody())),
            membership: TenantMembership::single(),
            request_bytes: 1,
        })
    }

    /// Replaces all models by one that is ready.
    fn serve(front: &Frontend) -> Arc<Pipeline> {
        let settings = PipelineSettings {
            tenant_weights: vec![1.0],
            step_timeout: Duration::from_secs(10),
            name: "m".to_owned(),
            version: 1,
            live: LiveSettings {
                slo: SloTarget { latency: Duration::from_secs(1), next: None, percentile: 99.0 },
                max_delay: Duration::ZERO,
                reject_late: false,
                priority: 1,
            },
            max_requests: 1,
            memory: 4096,
            cache: None,
            profile: None,
            content: Arc::default(),
            residency: Arc::default(),
        };
        let pipeline = Arc::new(Pipeline::new(settings, Clock::start(), mpsc::channel(1).0).unwrap());
        pipeline.open();
        front.router.set(HashMap::from([("m".to_owned(), Route::to(Arc::clone(&pipeline)).0.into())]));
        pipeline
    }

    #[tokio::test]
    async fn watchers_learn_that_the_control_thread_hangs() {
        let front = front();
        let _serving = serve(&front);
        let (_stop, stopped) = watch::channel(Phase::Serving);
        let (status_tx, mut status_rx) = mpsc::channel(1);
        let place = Arc::clone(&front.watchers).try_acquire_owned().unwrap();
        tokio::spawn(follow(
            front,
            true,
            status_tx,
            Stop::new(stopped, Duration::ZERO, Duration::ZERO),
            place,
        ));
        assert_eq!(status_rx.recv().await.unwrap().unwrap(), response(ServingStatus::Serving));
        // The test has no control thread to send heartbeats.
        let next = tokio::time::timeout(HEARTBEAT_TIMEOUT * 4, status_rx.recv()).await.unwrap();
        assert_eq!(next.unwrap().unwrap(), response(ServingStatus::NotServing));
    }

    #[tokio::test]
    async fn the_end_of_a_replaced_model_changes_nothing() {
        let front = front();
        let (stop, stopped) = watch::channel(Phase::Serving);
        let (status_tx, mut status_rx) = mpsc::channel(1);
        let place = Arc::clone(&front.watchers).try_acquire_owned().unwrap();
        let mut serving = serve(&front);
        tokio::spawn(follow(
            Arc::clone(&front),
            true,
            status_tx,
            Stop::new(stopped, Duration::ZERO, Duration::ZERO),
            place,
        ));
        assert_eq!(status_rx.recv().await.unwrap().unwrap(), response(ServingStatus::Serving));
        for round in 0..64 {
            let before = std::mem::replace(&mut serving, serve(&front));
            before.shut("it is replaced");
            // The watcher needs two turns, because it may see either change first.
            yield_now().await;
            yield_now().await;
            assert!(status_rx.try_recv().is_err(), "in round {round}");
        }
        serving.shut("it is broken");
        assert_eq!(status_rx.recv().await.unwrap().unwrap(), response(ServingStatus::NotServing));
        stop.send_replace(Phase::Stopping);
    }
}
