//! The side that has the client.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::{Ask, NEXT, Part, Reply, Told, read_head, read_parts, write_head};
use crate::pipeline::{Answers, Coming, Delivery, Failure, Input, Output, RequestOptions};
use crate::router::Route;

/// Whether the supervisor at that socket says anything within that time, be it that it ends.
pub async fn answers(socket: &Path, within: Duration) -> bool {
    let asked = async {
        let mut stream = UnixStream::connect(socket).await?;
        // No model has no name.
        let (model, terms) = (String::new(), RequestOptions::default());
        write_head(&mut stream, &Ask { model, coming: Duration::ZERO, terms, inputs: Vec::new() }).await?;
        read_head::<Reply>(&mut stream).await
    };
    let answered: Result<io::Result<Reply>, _> = tokio::time::timeout(within, asked).await;
    answered.is_ok()
}

/// The way to a model that another supervisor serves.
#[derive(Debug)]
pub struct Relay {
    model: String,
    socket: Arc<Path>,
    /// Connections without a request.
    idle: Mutex<Vec<UnixStream>>,
    /// The model's own workers, once they are back.
    home: watch::Receiver<Option<Route>>,
}

impl Relay {
    /// By the other supervisor's `socket`. If that ends, requests wait until the model is `home`.
    pub fn new(model: String, socket: Arc<Path>, home: watch::Receiver<Option<Route>>) -> Self {
        Self { model, socket, idle: Mutex::default(), home }
    }

    pub(crate) async fn infer(
        self: &Arc<Self>,
        inputs: Vec<Input>,
        terms: RequestOptions,
        coming: Coming,
    ) -> Result<(Vec<Output>, Delivery), Failure> {
        let mut answers = self.stream(inputs, terms, coming, false).await?;
        let outputs = answers.next().await.unwrap_or_else(|| Err(self.gone()))?;
        Ok((outputs, answers.delivery()))
    }

    /// `streams`: whether the model gives many answers to a request.
    pub(crate) async fn stream(
        self: &Arc<Self>,
        inputs: Vec<Input>,
        terms: RequestOptions,
        coming: Coming,
        streams: bool,
    ) -> Result<Answers, Failure> {
        let asked = Instant::now();
        match self.ask(&inputs, terms, coming.began.elapsed()).await {
            Ok(outcome) => outcome.map(|(first, onward)| Answers::relayed(first, onward, streams)),
            Err(error) => {
                tracing::debug!(model = self.model, %error, "no reply from the other supervisor");
                let home = self.home(terms.timeout, coming.began).await?;
                let coming = Coming { waited: coming.waited + asked.elapsed(), ..coming };
                Box::pin(home.stream(inputs, terms, coming)).await
            }
        }
    }

    /// An error means that the other supervisor is not there, or not any more.
    async fn ask(
        self: &Arc<Self>,
        inputs: &[Input],
        terms: RequestOptions,
        coming: Duration,
    ) -> io::Result<Result<(Vec<Output>, Option<Onward>), Failure>> {
        let idle = self.idle.lock().pop();
        // Not kept if this is given up, as an answer may still come on it.
        let mut stream = match idle {
            Some(stream) => stream,
            None => UnixStream::connect(&self.socket).await?,
        };
        let part = |input: &Input| Part { shape: input.shape.clone(), bytes: input.data.len() as u64 };
        let inputs_described = inputs.iter().map(part).collect();
        let ask = Ask { model: self.model.clone(), coming, terms, inputs: inputs_described };
        write_head(&mut stream, &ask).await?;
        for input in inputs {
            stream.write_all_buf(&mut input.data.clone()).await?;
        }
        Onward { relay: Arc::clone(self), stream }.answer().await
    }

    fn gone(&self) -> Failure {
        let why = format!("the supervisor that serves model '{}' has exited; reconnect", self.model);
        Failure::Unavailable(why)
    }

    async fn home(&self, timeout: Option<Duration>, began: Instant) -> Result<Route, Failure> {
        let mut home = self.home.clone();
        let back = async {
            // An error means that it will not be.
            home.wait_for(Option::is_some).await.ok().and_then(|home| home.clone())
        };
        let back = match timeout {
            None => back.await,
            Some(timeout) => {
                let left = timeout.saturating_sub(began.elapsed());
                tokio::time::timeout(left, back).await.map_err(|_| Failure::timed_out(timeout))?
            }
        };
        back.ok_or_else(|| self.gone())
    }
}

/// A connection with a request that has not got its last answer.
#[derive(Debug)]
pub(crate) struct Onward {
    relay: Arc<Relay>,
    stream: UnixStream,
}

impl Onward {
    /// `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<Output>, Failure>> {
        let next = async {
            self.stream.write_u8(NEXT).await?;
            read_answer(&mut self.stream).await
        };
        match next.await {
            Ok(Ok((outputs, true))) => Some(Ok(outputs)),
            Ok(Ok((_, false))) => None,
            Ok(Err(failure)) => Some(Err(failure)),
            Err(_) => Some(Err(self.relay.gone())),
        }
    }

    /// The first answer, and itself if there are more.
    async fn answer(mut self) -> io::Result<Result<(Vec<Output>, Option<Self>), Failure>> {
        let answer = read_answer(&mut self.stream).await?;
        if let Ok((outputs, true)) = answer {
            return Ok(Ok((outputs, Some(self))));
        }
        self.relay.idle.lock().push(self.stream);
        Ok(answer.map(|(outputs, _)| (outputs, None)))
    }
}

/// And whether it is one of several.
async fn read_answer(stream: &mut UnixStream) -> io::Result<Result<(Vec<Output>, bool), Failure>> {
    match read_head::<Reply>(stream).await? {
        Ok(Told { outputs, more }) => Ok(Ok((read_parts(stream, outputs, u64::MAX).await?, more))),
        Err(failure) => Ok(Err(failure)),
    }
}
