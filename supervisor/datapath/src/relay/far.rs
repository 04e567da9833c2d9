//! The side of a relay that has the workers: the new supervisor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{AnswerHead, NEXT, RelayReply, RelayRequest, TensorHead, read_head, read_parts, write_head};
use crate::pipeline::{RequestArrival, RequestFailure, RequestInput, RequestOutput};
use crate::router::Router;
use crate::sockets::SocketFile;

/// The pause after a failed accept. Without a pause, the server would retry in a busy loop, because
/// the cause (such as too many open files) may last for a while.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The server for requests that the previous supervisor relays. Dropping the server removes its
/// socket file.
#[derive(Debug)]
pub struct RelayServer {
    listener: UnixListener,
    _file: SocketFile,
}

impl RelayServer {
    /// Creates a server on a listening socket. The server does not authenticate clients, so the
    /// socket must be in a folder that no other user can enter.
    pub fn listen(socket: OwnedFd) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let file = SocketFile::new(address.as_pathname().ok_or(io::ErrorKind::InvalidInput)?)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, _file: file })
    }

    /// Answers requests. Never returns. Dropping the future abandons the requests in flight.
    pub async fn run(&self, router: Arc<Router>) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(serve(stream, Arc::clone(&router)));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "cannot accept a connection of the other supervisor");
                        sleep(ACCEPT_BACKOFF).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }
}

async fn serve(mut stream: UnixStream, router: Arc<Router>) {
    loop {
        if let Err(error) = answer(&mut stream, &router).await {
            // Connections normally end this way, so this is not a warning.
            return tracing::debug!(%error, "a connection of the other supervisor ended");
        }
    }
}

async fn answer(stream: &mut UnixStream, router: &Router) -> io::Result<()> {
    let RelayRequest { model, elapsed, options, inputs } = read_head(stream).await?;
    let Some(route) = router.instance(&model) else {
        let failure =
            RequestFailure::Unavailable(format!("the next supervisor does not serve model '{model}'"));
        write_head(stream, &RelayReply::Err(failure)).await?;
        return Err(io::ErrorKind::NotFound.into());
    };
    let inputs = read_parts(stream, inputs, route.request_bytes()).await?;
    let input = |RequestOutput { shape, data }| RequestInput { shape, data: data.into() };
    let inputs = inputs.into_iter().map(input).collect();
    let now = Instant::now();
    let arrival =
        RequestArrival { began: now.checked_sub(elapsed).unwrap_or(now), ..RequestArrival::now(None) };
    let mut answers = match unless_closed(stream, route.infer(inputs, options, arrival)).await? {
        Ok(answers) => answers,
        Err(failure) => return write_head(stream, &RelayReply::Err(failure)).await,
    };
    let streams = route.streams();
    // Dropping the route here ensures that a stream cannot delay the stop of a model.
    drop(route);
    loop {
        let (outputs, more) = match unless_closed(stream, answers.next()).await? {
            Some(Ok(outputs)) => (outputs, streams),
            None => (Vec::new(), false),
            Some(Err(failure)) => return write_head(stream, &RelayReply::Err(failure)).await,
        };
        let mut delivery = answers.delivery();
        write_answer(stream, &outputs, more).await?;
        delivery.mark_written();
        if !more {
            return Ok(());
        }
        if stream.read_u8().await? != NEXT {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Waits for an answer. Fails if the other side closes the connection first. The other side sends
/// nothing while it waits.
async fn unless_closed<T>(stream: &mut UnixStream, answer: impl Future<Output = T>) -> io::Result<T> {
    tokio::select! {
        answer = answer => Ok(answer),
        _ = stream.read_u8() => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

async fn write_answer(stream: &mut UnixStream, outputs: &[RequestOutput], more: bool) -> io::Result<()> {
    let part =
        |output: &RequestOutput| TensorHead { shape: output.shape.clone(), bytes: output.data.len() as u64 };
    let described = outputs.iter().map(part).collect();
    write_head(stream, &RelayReply::Ok(AnswerHead { outputs: described, more })).await?;
    for output in outputs {
        stream.write_all(&output.data).await?;
    }
    Ok(())
}
