//! The side that has the client.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::{AnswerHead, NEXT, RelayReply, RelayRequest, TensorHead, read_head, read_parts, write_head};
use crate::pipeline::{
    Answers, Delivery, InputTensor, OutputTensor, RequestArrival, RequestFailure, RequestOptions,
};
use crate::router::Route;

/// Whether the supervisor at that socket says anything within that time, be it that it ends.
pub async fn is_responding(socket: &Path, within: Duration) -> bool {
    let exchange = async {
        let mut stream = UnixStream::connect(socket).await?;
        // No model has no name.
        let (model, options) = (String::new(), RequestOptions::default());
        write_head(
            &mut stream,
            &RelayRequest { model, arrival: Duration::ZERO, options, inputs: Vec::new() },
        )
        .await?;
        read_head::<RelayReply>(&mut stream).await
    };
    let reply: Result<io::Result<RelayReply>, _> = tokio::time::timeout(within, exchange).await;
    reply.is_ok()
}

/// The way to a model that another supervisor serves.
#[derive(Debug)]
pub struct Relay {
    model: String,
    socket: Arc<Path>,
    /// Connections without a request.
    idle: Mutex<Vec<UnixStream>>,
    /// The model's own workers, once they are back.
    returned_rx: watch::Receiver<Option<Route>>,
}

impl Relay {
    /// By the other supervisor's `socket`. If that ends, requests wait until the model is `returned`.
    pub fn new(model: String, socket: Arc<Path>, returned_rx: watch::Receiver<Option<Route>>) -> Self {
        Self { model, socket, idle: Mutex::default(), returned_rx }
    }

    pub(crate) async fn infer(
        self: &Arc<Self>,
        inputs: Vec<InputTensor>,
        options: RequestOptions,
        arrival: RequestArrival,
    ) -> Result<(Vec<OutputTensor>, Delivery), RequestFailure> {
        let mut answers = self.stream(inputs, options, arrival, false).await?;
        let outputs = answers.next().await.unwrap_or_else(|| Err(self.supervisor_ended()))?;
        Ok((outputs, answers.delivery()))
    }

    /// `streams`: whether the model gives many answers to a request.
    pub(crate) async fn stream(
        self: &Arc<Self>,
        inputs: Vec<InputTensor>,
        options: RequestOptions,
        arrival: RequestArrival,
        streams: bool,
    ) -> Result<Answers, RequestFailure> {
        let sent_at = Instant::now();
        match self.send(&inputs, options, arrival.began.elapsed()).await {
            Ok(outcome) => outcome.map(|(first, further)| Answers::relayed(first, further, streams)),
            Err(error) => {
                tracing::debug!(model = self.model, %error, "the other supervisor has not answered");
                let returned = self.wait_until_returned(options.timeout, arrival.began).await?;
                let arrival = RequestArrival { waited: arrival.waited + sent_at.elapsed(), ..arrival };
                Box::pin(returned.stream(inputs, options, arrival)).await
            }
        }
    }

    /// An error means that the other supervisor is not there, or not any more.
    async fn send(
        self: &Arc<Self>,
        inputs: &[InputTensor],
        options: RequestOptions,
        arrival: Duration,
    ) -> io::Result<Result<(Vec<OutputTensor>, Option<RelayedStream>), RequestFailure>> {
        let idle = self.idle.lock().pop();
        // Not kept if this is given up, as an answer may still come on it.
        let mut stream = match idle {
            Some(stream) => stream,
            None => UnixStream::connect(&self.socket).await?,
        };
        let part =
            |input: &InputTensor| TensorHead { shape: input.shape.clone(), bytes: input.data.len() as u64 };
        let inputs_described = inputs.iter().map(part).collect();
        let request = RelayRequest { model: self.model.clone(), arrival, options, inputs: inputs_described };
        write_head(&mut stream, &request).await?;
        for input in inputs {
            stream.write_all_buf(&mut input.data.clone()).await?;
        }
        RelayedStream { relay: Arc::clone(self), stream }.answer().await
    }

    fn supervisor_ended(&self) -> RequestFailure {
        let why = format!("the supervisor that serves model '{}' has ended; connect anew", self.model);
        RequestFailure::Unavailable(why)
    }

    async fn wait_until_returned(
        &self,
        timeout: Option<Duration>,
        began: Instant,
    ) -> Result<Route, RequestFailure> {
        let mut returned_rx = self.returned_rx.clone();
        let back = async {
            // An error means that it will not be.
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

/// A connection with a request that has not got its last answer.
#[derive(Debug)]
pub(crate) struct RelayedStream {
    relay: Arc<Relay>,
    stream: UnixStream,
}

impl RelayedStream {
    /// `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<OutputTensor>, RequestFailure>> {
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

    /// The first answer, and itself if there are more.
    async fn answer(mut self) -> io::Result<Result<(Vec<OutputTensor>, Option<Self>), RequestFailure>> {
        let answer = read_answer(&mut self.stream).await?;
        if let Ok((outputs, true)) = answer {
            return Ok(Ok((outputs, Some(self))));
        }
        self.relay.idle.lock().push(self.stream);
        Ok(answer.map(|(outputs, _)| (outputs, None)))
    }
}

/// And whether it is one of several.
async fn read_answer(
    stream: &mut UnixStream,
) -> io::Result<Result<(Vec<OutputTensor>, bool), RequestFailure>> {
    match read_head::<RelayReply>(stream).await? {
        Ok(AnswerHead { outputs, more }) => Ok(Ok((read_parts(stream, outputs, u64::MAX).await?, more))),
        Err(failure) => Ok(Err(failure)),
    }
}
