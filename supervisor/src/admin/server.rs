//! The supervisor's side of the control socket.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::units::Percent;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::{Answer, Ask, MAX_REQUEST_BYTES, SOCKET};
use crate::config::Model;
use crate::control::{Order, ResizeRefused, Standing};
use crate::nvml::{Readings, Watched};
use crate::partition::Partition;
use crate::pipeline::Pipeline;
use crate::status::{self, ModelStatus, Status};

/// Conversations at a time.
const MAX_CONVERSATIONS: usize = 64;

/// How long a conversation may take to ask.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it may take to read its answer.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// A model, as the control socket reaches it.
#[derive(Debug)]
pub struct Administered {
    /// Its configuration.
    pub model: Arc<Model>,
    /// Its pipeline.
    pub pipeline: Arc<Pipeline>,
    /// How its controller sees it.
    pub standing: watch::Receiver<Standing>,
    /// Its controller.
    pub orders: mpsc::Sender<Order>,
}

impl Administered {
    /// How it stands on these GPUs.
    pub fn status(&self, gpus: &[Watched]) -> ModelStatus {
        status::of_model(&self.model, &self.pipeline, &self.standing.borrow(), gpus)
    }
}

/// What the control socket reaches.
#[derive(Debug)]
pub struct Reach {
    /// The models, as the configuration orders them.
    pub models: Arc<Vec<Administered>>,
    /// The GPUs, as the configuration orders them.
    pub gpus: Vec<Arc<dyn Partition>>,
    /// What NVML says of the GPUs.
    pub readings: Arc<Readings>,
}

impl Reach {
    /// How everything stands.
    pub fn status(&self) -> Status {
        let watched = self.readings.look();
        let gpus = self.gpus.iter().zip(&watched).enumerate();
        Status {
            models: self.models.iter().map(|model| model.status(&watched)).collect(),
            gpus: gpus.map(|(index, (gpu, watched))| status::of_gpu(index, &**gpu, watched)).collect(),
        }
    }
}

/// The control socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// No socket.
    #[error("the control socket {path} cannot be made")]
    Bind {
        /// Where.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Everybody could use it.
    #[error("the control socket {path} cannot be protected")]
    Protect {
        /// Where.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// The control socket, bound. Its file goes with it.
#[derive(Debug)]
pub struct Admin {
    listener: UnixListener,
    path: PathBuf,
}

impl Admin {
    /// Binds the socket in `run_dir`, whose lock the caller holds: what lies there is a dead one's.
    pub fn bind(run_dir: &Path) -> Result<Self, BindError> {
        let path = run_dir.join(SOCKET);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(BindError::Bind { path, source });
            }
            _ => {}
        }
        let listener =
            UnixListener::bind(&path).map_err(|source| BindError::Bind { path: path.clone(), source })?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
            .map_err(|source| BindError::Protect { path: path.clone(), source })?;
        Ok(Self { listener, path })
    }

    /// Answers for ever.
    pub async fn run(&self, reach: Arc<Reach>) {
        let places = Arc::new(Semaphore::new(MAX_CONVERSATIONS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let reach = Arc::clone(&reach);
                    tokio::spawn(async move {
                        if let Err(error) = converse(stream, &reach).await {
                            tracing::debug!(%error, "a control conversation broke");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the control socket cannot accept");
                    // Out of descriptors, most likely: some come back when a connection ends.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the control socket's file stays behind");
        }
    }
}

async fn converse(stream: UnixStream, reach: &Reach) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read.take(MAX_REQUEST_BYTES));
    let mut line = Vec::new();
    let asked = tokio::time::timeout(ASK_TIMEOUT, lines.read_until(b'\n', &mut line)).await;
    asked.map_err(|_| io::ErrorKind::TimedOut)??;
    let answer = match serde_json::from_slice::<Ask>(&line) {
        Ok(ask) => answer(ask, reach).await,
        Err(error) => Answer::Refused(format!("the request is not understood: {error}")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    tokio::time::timeout(READ_TIMEOUT, write.write_all(&text)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

async fn answer(ask: Ask, reach: &Reach) -> Answer {
    match ask {
        Ask::Status => Answer::Status(reach.status()),
        Ask::Resize { model, share_percent } => resize(&model, share_percent, &reach.models).await,
    }
}

async fn resize(name: &str, share_percent: u32, models: &[Administered]) -> Answer {
    let share = match Percent::new(share_percent) {
        Ok(share) => share,
        Err(error) => return Answer::Refused(error.to_string()),
    };
    let Some(model) = models.iter().find(|model| model.model.name == name) else {
        let names: Vec<_> = models.iter().map(|model| model.model.name.as_str()).collect();
        return Answer::Refused(format!("there is no model '{name}'; there are: {}", names.join(", ")));
    };
    let (reply, outcome) = oneshot::channel();
    if model.orders.try_send(Order::Resize { share, reply }).is_err() {
        return Answer::Refused(format!("too many orders wait for model '{name}'; ask again later"));
    }
    match outcome.await {
        Ok(Ok(report)) => Answer::Handover(report),
        Ok(Err(refused @ ResizeRefused::InForce { .. })) => Answer::Unchanged(refused.to_string()),
        Ok(Err(refused)) => Answer::Refused(refused.to_string()),
        Err(_) => Answer::Refused(ResizeRefused::Stopping.to_string()),
    }
}
