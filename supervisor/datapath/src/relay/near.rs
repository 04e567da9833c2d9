//! The side of a relay that has the clients: the old supervisor.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::{AnswerHead, NEXT, RelayReply, RelayRequest, TensorHead, read_head, read_parts, write_head};
use crate::pipeline::{Answers, RequestArrival, RequestFailure, RequestInput, RequestOptions, RequestOutput};
use crate::router::Route;

/// Returns whether the supervisor at `socket` responds within the time `within`. Closing the
/// connection also counts as a response.
pub async fn is_responding(socket: &Path, within: Duration) -> bool {
    let exchange = async {
        let mut stream = UnixStream::connect(socket).await?;
        // No model has an empty name, so this request has no effect.
        let (model, options) = (String::new(), RequestOptions::default());
        write_head(
            &mut stream,
            &RelayRequest { model, elapsed: Duration::ZERO, options, inputs: Vec::new() },
        )
        .await?;
        read_head::<RelayReply>(&mut stream).await
    };
    let reply: Result<io::Result<RelayReply>, _> = tokio::time::timeout(within, exchange).await;
    reply.is_ok()
}

/// A relay to a model that another supervisor serves.
#[derive(Debug)]
pub struct Relay {
    model: String,
    socket: Arc<Path>,
    /// The connections that currently carry no request.
    idle: Mutex<Vec<UnixStream>>,
    /// The route to this supervisor's own workers. It is set if the model returns to this
    /// supervisor.
    returned_rx: watch::Receiver<Option<Route>>,
}

impl Relay {
    /// Creates a relay through the other supervisor's `socket`. If the other supervisor exits,
    /// requests wait for a route from `returned_rx`.
    pub fn new(model: String, socket: Arc<Path>, returned_rx: watch::Receiver<Option<Route>>) -> Self {
        Self { model, socket, idle: Mutex::default(), returned_rx }
    }

    /// Sends a request and returns its answers. `streams` is true if the model gives many answers
    /// to a request.
    pub(crate) async fn infer(
        self: &Arc<Self>,
        inputs: Vec<RequestInput>,
        options: RequestOptions,
        arrival: RequestArrival,
        streams: bool,
    ) -> Result<Answers, RequestFailure> {
        let sent_at = Instant::now();
        match self.send(&inputs, options, arrival.began.elapsed()).await {
            Ok(outcome) => outcome.map(|(first, further)| Answers::from_relay(first, further, streams)),
            Err(error) => {
                tracing::debug!(model = self.model, %error, "no reply from the other supervisor");
                let returned = self.wait_until_returned(options.timeout, arrival.began).await?;
                let arrival = RequestArrival { waited: arrival.waited + sent_at.elapsed(), ..arrival };
                Box::pin(returned.infer(inputs, options, arrival)).await
            }
        }
    }

    /// Sends a request to the other supervisor. An error means that the other supervisor does not
    /// run or has exited.
    async fn send(
        self: &Arc<Self>,
        inputs: &[RequestInput],
        options: RequestOptions,
        elapsed: Duration,
    ) -> io::Result<Result<(Vec<RequestOutput>, Option<RelayedStream>), RequestFailure>> {
        let idle = self.idle.lock().pop();
        // An idle connection has no answer in transit, because a cancelled request closes its
        // connection.
        let mut stream = match idle {
            Some(stream) => stream,
            None => UnixStream::connect(&self.socket).await?,
        };
        let part =
            |input: &RequestInput| TensorHead { shape: input.shape.clone(), bytes: input.data.len() as u64 };
        let inputs_described = inputs.iter().map(part).collect();
        let request = RelayRequest { model: self.model.clone(), elapsed, options, inputs: inputs_described };
        write_head(&mut stream, &request).await?;
        for input in inputs {
            stream.write_all_buf(&mut input.data.clone()).await?;
        }
        RelayedStream { relay: Arc::clone(self), stream }.answer().await
    }

    fn supervisor_ended(&self) -> RequestFailure {
        let why = format!("the supervisor that serves model '{}' has exited; reconnect", self.model);
        RequestFailure::Unavailable(why)
    }

    async fn wait_until_returned(
        &self,
        timeout: Option<Duration>,
        began: Instant,
    ) -> Result<Route, RequestFailure> {
        let mut returned_rx = self.returned_rx.clone();
        let back = async {
            // If the model does not return, the sender is dropped.
            returned_rx.wait_for(Option::is_some).await.ok().and_then(|route| route.clone())
        };
        let back = match timeout {
            None => back.await,
            Some(timeout) => {
                let left = timeout.saturating_sub(began.elapsed());
                tokio::time::timeout(left, back).await.map_err(|_| RequestFailure::timed_out(timeout))?
            }
        };
        back.ok_or_else(|| self.supervisor_ended())
    }
}

/// A connection whose request has more answers.
#[derive(Debug)]
pub(crate) struct RelayedStream {
    relay: Arc<Relay>,
    stream: UnixStream,
}

impl RelayedStream {
    /// Returns the next answer, or `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<RequestOutput>, RequestFailure>> {
        let next = async {
            self.stream.write_u8(NEXT).await?;
            read_answer(&mut self.stream).await
        };
        match next.await {
            Ok(Ok((outputs, true))) => Some(Ok(outputs)),
            Ok(Ok((_, false))) => None,
            Ok(Err(failure)) => Some(Err(failure)),
            Err(_) => Some(Err(self.relay.supervisor_ended())),
        }
    }

    /// Reads the first answer. If more answers follow, also returns the stream.
    async fn answer(mut self) -> io::Result<Result<(Vec<RequestOutput>, Option<Self>), RequestFailure>> {
        let answer = read_answer(&mut self.stream).await?;
        if let Ok((outputs, true)) = answer {
            return Ok(Ok((outputs, Some(self))));
        }
        self.relay.idle.lock().push(self.stream);
        Ok(answer.map(|(outputs, _)| (outputs, None)))
    }
}

/// Reads an answer. The returned flag is true if more answers follow.
async fn read_answer(
    stream: &mut UnixStream,
) -> io::Result<Result<(Vec<RequestOutput>, bool), RequestFailure>> {
    match read_head::<RelayReply>(stream).await? {
        Ok(AnswerHead { outputs, more }) => Ok(Ok((read_parts(stream, outputs, u64::MAX).await?, more))),
        Err(failure) => Ok(Err(failure)),
    }
}
