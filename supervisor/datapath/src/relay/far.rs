//! The side that has the workers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Ask, NEXT, Part, Reply, Told, read_head, read_parts, write_head};
use crate::pipeline::{Coming, Failure, Input, Output};
use crate::router::Router;
use crate::sockets::SocketFile;

/// A failure such as too many open files does not pass at once.
const REST: Duration = Duration::from_millis(100);

/// Where requests of the supervisor before this one arrive. Its file goes with it.
#[derive(Debug)]
pub struct Relays {
    listener: UnixListener,
    _file: SocketFile,
}

impl Relays {
    /// By a listening socket in a folder that nobody else may enter: clients are not asked who they
    /// are.
    pub fn listen(socket: OwnedFd) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let file = SocketFile::new(address.as_pathname().ok_or(io::ErrorKind::InvalidInput)?)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, _file: file })
    }

    /// Answers for ever. Dropping the future gives up what is under way.
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
                        sleep(REST).await;
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
            // The end of a connection is the usual one.
            return tracing::debug!(%error, "a connection of the other supervisor ended");
        }
    }
}

async fn answer(stream: &mut UnixStream, router: &Router) -> io::Result<()> {
    let Ask { model, coming, terms, inputs } = read_head(stream).await?;
    let Some(route) = router.model(&model) else {
        let failure = Failure::Unavailable(format!("the next supervisor does not serve model '{model}'"));
        write_head(stream, &Reply::Err(failure)).await?;
        return Err(io::ErrorKind::NotFound.into());
    };
    let inputs = read_parts(stream, inputs, route.request_bytes()).await?;
    let input = |Output { shape, data }| Input { shape, data: data.into() };
    let inputs = inputs.into_iter().map(input).collect();
    let now = Instant::now();
    let coming = Coming { began: now.checked_sub(coming).unwrap_or(now), ..Coming::now(None) };
    let mut answers = match before_the_end(stream, route.stream(inputs, terms, coming)).await? {
        Ok(answers) => answers,
        Err(failure) => return write_head(stream, &Reply::Err(failure)).await,
    };
    let streams = route.streams();
    // A stream does not keep a model that goes longer than it may.
    drop(route);
    loop {
        let (outputs, more) = match before_the_end(stream, answers.next()).await? {
            Some(Ok(outputs)) => (outputs, streams),
            None => (Vec::new(), false),
            Some(Err(failure)) => return write_head(stream, &Reply::Err(failure)).await,
        };
        let mut delivery = answers.delivery();
        tell(stream, &outputs, more).await?;
        delivery.written();
        if !more {
            return Ok(());
        }
        if stream.read_u8().await? != NEXT {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Nothing comes from the other side meanwhile, but its end.
async fn before_the_end<T>(stream: &mut UnixStream, answer: impl Future<Output = T>) -> io::Result<T> {
    tokio::select! {
        answer = answer => Ok(answer),
        _ = stream.read_u8() => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

async fn tell(stream: &mut UnixStream, outputs: &[Output], more: bool) -> io::Result<()> {
    let part = |output: &Output| Part { shape: output.shape.clone(), bytes: output.data.len() as u64 };
    let described = outputs.iter().map(part).collect();
    write_head(stream, &Reply::Ok(Told { outputs: described, more })).await?;
    for output in outputs {
        stream.write_all(&output.data).await?;
    }
    Ok(())
}
