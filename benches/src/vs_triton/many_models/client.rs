//! The client. It sends the requests at their planned times, and loads models where the server does not.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::MeasureError;
use crate::exchange::ClientStream;
use crate::http::HttpEchoClient;

use super::super::call::call;
use super::super::case::SMALL;
use super::plan::{MODELS, PlannedRequest};
use super::results::LoadFigures;
use super::slots::{ModelSlots, SlotReply};

/// The time within which a request must be answered. It includes all waits and loads.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The program that brings models onto the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelControl {
    /// The server wakes models. The client only computes which models should be awake.
    Server,
    /// The client loads and unloads models.
    Client,
}

/// A client of one server.
pub(super) struct ManyModelsClient {
    http: SocketAddr,
    control: ModelControl,
    slots: Mutex<ModelSlots>,
    /// Notifies requests that wait for a change of the slots.
    changed: Notify,
    /// The idle connections of each model.
    idle: Mutex<Vec<Vec<HttpEchoClient>>>,
    figures: Mutex<LoadFigures>,
}

impl ManyModelsClient {
    /// Returns a client of a server whose GPU takes `capacity` models.
    pub(super) fn new(http: SocketAddr, control: ModelControl, capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            http,
            control,
            slots: Mutex::new(ModelSlots::new(capacity)),
            changed: Notify::new(),
            idle: Mutex::new((0..MODELS).map(|_| Vec::new()).collect()),
            figures: Mutex::default(),
        })
    }

    /// Sends one request to each of the first `count` models, one after the other. Their answers do not
    /// count.
    pub(super) async fn warm_up(self: &Arc<Self>, count: usize) -> Result<(), MeasureError> {
        for model in (0..count).rev() {
            let mut was_present = true;
            self.ask(model, Instant::now() + 6 * REQUEST_TIMEOUT, &mut was_present).await?;
        }
        *self.figures.lock() = LoadFigures::default();
        Ok(())
    }

    /// Sends the requests at their planned times, and waits for all answers.
    pub(super) async fn send(
        self: &Arc<Self>,
        requests: &[PlannedRequest],
    ) -> Result<LoadFigures, MeasureError> {
        let start = Instant::now();
        let mut asking = JoinSet::new();
        for request in requests {
            sleep_until(start + request.at).await;
            let sent = Instant::now();
            self.figures.lock().late.record(sent - (start + request.at));
            asking.spawn(Arc::clone(self).count(request.model, sent));
        }
        while let Some(ended) = asking.join_next().await {
            ended?;
        }
        Ok(std::mem::take(&mut *self.figures.lock()))
    }

    async fn count(self: Arc<Self>, model: usize, sent: Instant) {
        let mut was_present = true;
        let answered = self.ask(model, sent + REQUEST_TIMEOUT, &mut was_present).await;
        let mut figures = self.figures.lock();
        match answered {
            Ok(()) if was_present => figures.present.record(sent.elapsed()),
            Ok(()) => figures.absent.record(sent.elapsed()),
            Err(failure) => figures.fail(&failure),
        }
    }

    /// Gets an answer of a model. Sets `was_present` to false if the model was not on the GPU when the
    /// request arrived.
    async fn ask(
        self: &Arc<Self>,
        model: usize,
        deadline: Instant,
        was_present: &mut bool,
    ) -> Result<(), MeasureError> {
        if self.control == ModelControl::Server {
            let reply = self.slots.lock().request(model);
            *was_present = reply == SlotReply::Loaded;
            let answered = self.infer(model, deadline).await;
            self.follow(model, reply);
            return answered;
        }
        loop {
            let change = self.changed.notified();
            let reply = self.slots.lock().request(model);
            *was_present &= reply == SlotReply::Loaded;
            match reply {
                SlotReply::Loaded => break,
                SlotReply::Wait => {
                    timeout_at(deadline, change).await.map_err(|_| "the model was not loaded in time")?;
                }
                // The load continues if this request times out.
                SlotReply::Load { evicted } => {
                    let loading = tokio::spawn(Arc::clone(self).replace(evicted, model));
                    timeout_at(deadline, loading).await.map_err(|_| "a load did not end in time")???;
                }
            }
        }
        let answered = self.infer(model, deadline).await;
        self.slots.lock().end(model);
        self.changed.notify_waiters();
        answered
    }

    /// Updates the slots after an answer of a server that wakes its models.
    fn follow(&self, model: usize, reply: SlotReply) {
        let mut slots = self.slots.lock();
        match reply {
            SlotReply::Loaded => slots.end(model),
            SlotReply::Load { evicted } => {
                evicted.into_iter().for_each(|evicted| slots.finish_unload(evicted));
                slots.finish_load(model, true);
            }
            SlotReply::Wait => {}
        }
    }

    /// Unloads `evicted`, and loads `model`.
    async fn replace(self: Arc<Self>, evicted: Option<usize>, model: usize) -> Result<(), MeasureError> {
        let replaced = async {
            if let Some(evicted) = evicted {
                self.control_model(evicted, "unload").await?;
                self.slots.lock().finish_unload(evicted);
                self.changed.notify_waiters();
            }
            let start = Instant::now();
            self.control_model(model, "load").await?;
            self.figures.lock().loads.record(start.elapsed());
            Ok(())
        };
        let replaced = replaced.await;
        self.slots.lock().finish_load(model, replaced.is_ok());
        self.changed.notify_waiters();
        replaced
    }

    /// Loads or unloads a model through the model repository extension.
    async fn control_model(&self, model: usize, action: &str) -> Result<(), MeasureError> {
        let path = format!("/v2/repository/models/{}/{action}", model_name(model));
        call(self.http, Method::POST, &path, "{}".to_owned()).await.map(drop)
    }

    /// Sends a request to a model on an idle or new connection, and checks the answer.
    async fn infer(&self, model: usize, deadline: Instant) -> Result<(), MeasureError> {
        let idle = self.idle.lock()[model].pop();
        let exchanged = async {
            let mut client = match idle {
                Some(client) => client,
                None => {
                    let stream = ClientStream::tcp(self.http).await?;
                    HttpEchoClient::for_model(&model_name(model), stream, SMALL, model as u16)
                }
            };
            client.exchange(0).await?;
            Ok::<_, MeasureError>(client)
        };
        let client = timeout_at(deadline, exchanged).await.map_err(|_| "no answer in time")??;
        self.idle.lock()[model].push(client);
        Ok(())
    }
}

/// Returns the name of the model with this index.
pub(super) fn model_name(model: usize) -> String {
    format!("model-{model:02}")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// The paths of all requests to the stand-in for a server, in their order.
    type Paths = Arc<Mutex<Vec<String>>>;

    /// Starts a server that answers requests as Triton does. It refuses to load model 9.
    async fn server() -> (SocketAddr, Paths) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, paths) = (listener.local_addr().unwrap(), Paths::default());
        let seen = Arc::clone(&paths);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&seen)));
            }
        });
        (address, paths)
    }

    async fn answer(mut stream: TcpStream, seen: Paths) {
        let mut bytes = vec![0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut bytes).await {
            let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
            let path = text.split(' ').nth(1).unwrap().rsplit("models/").next().unwrap().to_owned();
            let mut body = Vec::new();
            if path.ends_with("infer") {
                let name = &path[..path.len() - "/infer".len()];
                let json = serde_json::json!({"model_name": name, "model_version": "1", "outputs": [{
                    "name": "y", "datatype": "FP32", "shape": [1, SMALL / 4],
                    "parameters": {"binary_data_size": SMALL},
                }]});
                body = [json.to_string().as_bytes(), &bytes[length - SMALL..length]].concat();
            }
            let status = if path == "model-09/load" { 400 } else { 200 };
            seen.lock().push(path);
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
        }
    }

    fn requests(models: &[usize]) -> Vec<PlannedRequest> {
        models.iter().map(|&model| PlannedRequest { at: Duration::ZERO, model }).collect()
    }

    #[tokio::test]
    async fn a_client_of_triton_unloads_before_it_loads_and_shares_a_load() {
        let (address, paths) = server().await;
        let client = ManyModelsClient::new(address, ModelControl::Client, 2);
        client.warm_up(2).await.unwrap();
        paths.lock().clear();
        let figures = client.send(&requests(&[2, 2])).await.unwrap();
        let expected = ["model-01/unload", "model-02/load", "model-02/infer", "model-02/infer"];
        assert_eq!(*paths.lock(), expected);
        let result = figures.result(String::new(), 1.0, None);
        assert_eq!((result.absent.count, result.present.count, result.loads), (2, 0, 1), "{result:?}");
    }

    #[tokio::test]
    async fn a_failed_load_is_a_failure_and_the_next_model_gets_its_place() {
        let (address, _) = server().await;
        let client = ManyModelsClient::new(address, ModelControl::Client, 1);
        let result = client.send(&requests(&[9])).await.unwrap().result(String::new(), 1.0, None);
        assert_eq!((result.failed, result.absent.count, result.loads), (1, 0, 0), "{result:?}");
        let result = client.send(&requests(&[3])).await.unwrap().result(String::new(), 1.0, None);
        assert_eq!((result.failed, result.absent.count, result.loads), (0, 1, 1), "{result:?}");
    }

    #[tokio::test]
    async fn a_client_of_shadowslice_only_infers() {
        let (address, paths) = server().await;
        let client = ManyModelsClient::new(address, ModelControl::Server, 2);
        client.warm_up(2).await.unwrap();
        let result = client.send(&requests(&[0])).await.unwrap().result(String::new(), 1.0, None);
        assert_eq!((result.absent.count, result.present.count), (0, 1));
        let result = client.send(&requests(&[5])).await.unwrap().result(String::new(), 1.0, None);
        assert_eq!((result.absent.count, result.present.count), (1, 0));
        assert!(paths.lock().iter().all(|path| path.ends_with("/infer")), "{:?}", paths.lock());
    }
}
