//! The supervisor's side of a worker's boot. Its waits have no timeout. When a timeout of the
//! controller expires, the controller kills the worker, which ends these waits.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use shadowslice_config::{MAX_ARRAY_BYTES, WarmupConfig, WarmupValues, check_values, shape_fits};
use shadowslice_datapath::pipeline::OccupancyGuard;
use shadowslice_shared::boot::{
    Assignment, BootCommand, BootRefusal, BootReply, EngineSpec, InputValues, LoadedModel, PROTOCOL, WarmUp,
    WarmUpReport,
};
use shadowslice_shared::errors;
use shadowslice_shared::frame;
use shadowslice_shared::tensor::TensorSpec;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use super::loaded_files::{FilesError, LoadedFiles};
use super::shared::SharedProcess;
use super::start_queue::StartPermit;
use super::worker::{WorkerEvent, WorkerSaid};
use crate::backend::Grant;
use shadowslice_shared::ids::WorkerId;

pub(super) struct Boot {
    pub(super) socket: UnixStream,
    pub(super) worker: WorkerId,
    pub(super) pid: i32,
    pub(super) grant: Arc<Grant>,
    /// The permit to start, which the boot gives back at the worker's hello. A member of a shared
    /// process keeps it until it is warm, because only loads take time there.
    pub(super) permit: Option<StartPermit>,
    /// The shared process in which the worker runs.
    pub(super) shared: Option<Arc<SharedProcess>>,
    /// A guard that counts the worker as executing until it is warm.
    pub(super) occupied: Option<OccupancyGuard>,
    /// The content to load, or `None` to load the files that are at the model's path.
    pub(super) files: Option<FilesToLoad>,
    pub(super) events: mpsc::Sender<WorkerEvent>,
}

/// The content that a worker must load.
#[derive(Debug)]
pub struct FilesToLoad {
    pub files: Arc<LoadedFiles>,
    /// The folder for a copy, which is needed if the files have changed.
    pub copies: PathBuf,
}

impl FilesToLoad {
    /// Sets the assignment's path to the content's current place. Returns true if that is the path
    /// in the configuration.
    async fn assign(&self, assignment: &mut Assignment) -> Result<bool, BootRefusal> {
        let refused = |error: FilesError| match error {
            FilesError::Lost(_) => BootRefusal::Model(errors::chain(&error)),
            FilesError::Copy { .. } => BootRefusal::Setup(errors::chain(&error)),
        };
        let found = self.files.path_to_load(&self.copies).await.map_err(refused)?;
        let is_original = found == self.files.path;
        if let Some(found) = found
            && let EngineSpec::OnnxRuntime { path, .. } | EngineSpec::Python { path, .. } =
                &mut assignment.engine
        {
            *path = found;
        }
        Ok(is_original)
    }
}

/// Returns the supervisor's end and the worker's end of a boot socket.
pub(super) fn pair() -> io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs.into()))
}

/// Guides a worker from its hello until it is warm, and reports each step. The worker loads the
/// assignment after the order. If the order's sender is dropped, the boot ends.
pub(super) async fn run(
    mut boot: Boot,
    assignment: Box<Assignment>,
    load_rx: oneshot::Receiver<()>,
    plan: impl FnOnce(&LoadedModel) -> Result<WarmUp, BootRefusal>,
) {
    let said = match boot.converse(assignment, load_rx, plan).await {
        Ok(warmed) => WorkerSaid::Warmed(warmed),
        Err(Ended::Refused(refusal)) => {
            if let Some(process) = boot.shared.as_ref().filter(|_| is_of_process(&refusal)) {
                process.close();
            }
            WorkerSaid::Refused(refusal)
        }
        Err(Ended::Lost(why)) => WorkerSaid::Lost(why),
    };
    boot.occupied = None;
    boot.permit = None;
    boot.grant.end_reservation();
    boot.tell(said).await;
}

/// Returns true if the process rather than the model may be the cause, so that another process may
/// succeed.
fn is_of_process(refusal: &BootRefusal) -> bool {
    matches!(refusal, BootRefusal::Library(_) | BootRefusal::Setup(_) | BootRefusal::NoClient(_))
}

/// The maximum length in bytes to which an unexpected message is cut in an error.
const MAX_SHOWN_BYTES: usize = 256;

enum Ended {
    Refused(BootRefusal),
    Lost(String),
}

impl Boot {
    async fn converse(
        &mut self,
        mut assignment: Box<Assignment>,
        load_rx: oneshot::Receiver<()>,
        plan: impl FnOnce(&LoadedModel) -> Result<WarmUp, BootRefusal>,
    ) -> Result<WarmUpReport, Ended> {
        let thread = match self.next("before its first message").await? {
            BootReply::Hello { protocol: PROTOCOL, thread } => thread,
            BootReply::Hello { protocol, .. } => {
                let why = format!(
                    "the worker speaks protocol {protocol}, not {PROTOCOL}; install both programs from one build"
                );
                return Err(Ended::Refused(BootRefusal::Setup(why)));
            }
            other => return Err(out_of_turn(&other)),
        };
        if self.shared.is_none() {
            self.permit = None;
        }
        self.tell(WorkerSaid::Connected { thread }).await;
        let wait = "before it got its order to load";
        let ordered = tokio::select! {
            biased;
            ordered = load_rx => ordered,
            // A worker that exits closes its socket.
            early = self.next(wait) => return Err(early.map_or_else(|ended| ended, |said| out_of_turn(&said))),
        };
        ordered.map_err(|_| Ended::Lost("the worker is no longer needed".to_owned()))?;
        let mut originals = None;
        if let Some(to_load) = &self.files {
            let is_original = to_load.assign(&mut assignment).await.map_err(Ended::Refused)?;
            originals = is_original.then(|| Arc::clone(&to_load.files));
        }
        self.order(&BootCommand::Load(assignment), wait).await?;
        let loaded = match self.next("while loading the model").await? {
            BootReply::Loaded(loaded) => loaded,
            other => return Err(out_of_turn(&other)),
        };
        if originals.is_some_and(|files| !files.are_in_place()) {
            let why = "the model's files changed while the worker loaded them".to_owned();
            return Err(Ended::Refused(BootRefusal::Setup(why)));
        }
        let (grant, pid, sms) = (Arc::clone(&self.grant), self.pid, loaded.sms);
        let checked = tokio::task::spawn_blocking(move || grant.check(pid, sms)).await;
        let checked = checked.unwrap_or_else(|panic| Err(panic.to_string()));
        checked.map_err(|why| Ended::Refused(BootRefusal::Setup(why)))?;
        let warm_up = plan(&loaded).map_err(Ended::Refused)?;
        self.tell(WorkerSaid::Loaded(loaded)).await;
        self.order(&BootCommand::Warm(warm_up), "before it got its order to warm up").await?;
        loop {
            match self.next("while warming up").await? {
                BootReply::Warming { rows } => self.tell(WorkerSaid::Warming { rows }).await,
                BootReply::Warmed(warmed) => return Ok(warmed),
                other => return Err(out_of_turn(&other)),
            }
        }
    }

    async fn order(&mut self, order: &BootCommand, when: &str) -> Result<(), Ended> {
        let frame = frame::encode(order).map_err(|error| Ended::Lost(error.to_string()))?;
        self.socket.write_all(&frame).await.map_err(|_| lost(when))
    }

    async fn next(&mut self, when: &str) -> Result<BootReply, Ended> {
        match self.receive().await {
            Ok(BootReply::Refused(refusal)) => Err(Ended::Refused(refusal)),
            Ok(said) => Ok(said),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(Ended::Refused(BootRefusal::Setup(format!("invalid message from the worker: {error}"))))
            }
            Err(_) => Err(lost(when)),
        }
    }

    async fn receive(&mut self) -> io::Result<BootReply> {
        let mut head = [0; frame::HEAD];
        self.socket.read_exact(&mut head).await?;
        let mut bytes = vec![0; frame::length::<BootReply>(head)?];
        self.socket.read_exact(&mut bytes).await?;
        frame::decode(&bytes)
    }

    async fn tell(&self, said: WorkerSaid) {
        // An error means that the controller has ended.
        self.events.send(WorkerEvent { worker: self.worker, said }).await.ok();
    }
}

fn lost(when: &str) -> Ended {
    Ended::Lost(format!("the worker exited {when}"))
}

fn out_of_turn(said: &BootReply) -> Ended {
    let mut said = format!("{said:?}");
    said.truncate(said.floor_char_boundary(MAX_SHOWN_BYTES));
    Ended::Refused(BootRefusal::Setup(format!("unexpected message from the worker: {said}")))
}

/// Returns the warm-up for `sizes` of a model with these inputs, with the shapes and values that
/// the configuration gives.
pub fn plan_warm_up(
    inputs: &[TensorSpec],
    batched: bool,
    sizes: Vec<u32>,
    given: &WarmupConfig,
) -> Result<WarmUp, BootRefusal> {
    if let Some(name) = given.inputs.keys().find(|name| inputs.iter().all(|input| input.name != **name)) {
        return Err(BootRefusal::Model(format!("warmup.{name}: the model has no such input")));
    }
    let (mut shapes, mut values) = (Vec::with_capacity(inputs.len()), Vec::with_capacity(inputs.len()));
    for input in inputs {
        let (shape, value) = plan_input(input, batched, given)?;
        shapes.push(shape);
        values.push(value);
    }
    let row_bytes = |values: &InputValues| match values {
        InputValues::Rows(rows) => rows.iter().map(|row| row.len()).sum(),
        InputValues::Listed(_) | InputValues::Range { .. } => 0,
    };
    let bytes: usize = values.iter().flatten().map(row_bytes).sum();
    if bytes > MAX_ARRAY_BYTES {
        let why = format!(
            "warmup: the arrays have {bytes} bytes in total; keep fewer rows, for at most {MAX_ARRAY_BYTES} bytes"
        );
        return Err(BootRefusal::Model(why));
    }
    Ok(WarmUp { batched, sizes, shapes, values, ..WarmUp::default() })
}

/// Returns the shape of an input in the warm-up, and the values that the configuration gives.
fn plan_input(
    input: &TensorSpec,
    batched: bool,
    given: &WarmupConfig,
) -> Result<(Vec<i64>, Option<InputValues>), BootRefusal> {
    let name = &input.name;
    let open = if batched { &input.shape[1..] } else { &input.shape[..] };
    let Some(given) = given.inputs.get(name) else { return Ok((open.to_vec(), None)) };
    let shape = match &given.shape {
        None => open.to_vec(),
        Some(shape) if shape_fits(shape, open) => shape.clone(),
        Some(shape) if !batched && is_row(shape, open) => [&[1], &shape[..]].concat(),
        Some(shape) => {
            return Err(BootRefusal::Model(format!(
                "warmup.{name}: shape {shape:?} does not fit the model's {open:?} (without the batch axis)"
            )));
        }
    };
    match &given.values {
        None => Ok((shape, None)),
        Some(WarmupValues::Written(values)) => {
            check_values(input.datatype, values)
                .map_err(|why| BootRefusal::Model(format!("warmup.{name}: {why}")))?;
            Ok((shape, Some(values.clone())))
        }
        Some(WarmupValues::File(file)) => {
            let fitted = file.fit(input, batched).map_err(|incompatibility| {
                BootRefusal::Model(format!("warmup.{name}: {}: {incompatibility}", file.path.display()))
            })?;
            Ok((fitted.0, Some(fitted.1)))
        }
    }
}

/// Returns true if this is the shape of a row. The open first axis of such a model is not a batch
/// axis.
fn is_row(shape: &[i64], open: &[i64]) -> bool {
    open.split_first().is_some_and(|(&first, row)| first < 0 && shape_fits(shape, row))
}

#[cfg(test)]
mod tests {
    use shadowslice_config::WarmupInput;
    use shadowslice_shared::tensor::Datatype;

    use super::*;

    fn input() -> TensorSpec {
        TensorSpec { name: "ids".to_owned(), datatype: Datatype::Int64, shape: vec![-1, -1, 3] }
    }

    #[test]
    fn open_axes_come_from_the_configuration_or_stay_open() {
        let planned = |given: &[(&str, Vec<i64>)], batched| {
            let of_shape = |shape: &Vec<i64>| WarmupInput { shape: Some(shape.clone()), values: None };
            let inputs = given.iter().map(|(name, shape)| ((*name).to_owned(), of_shape(shape))).collect();
            let given = WarmupConfig { file: None, inputs };
            plan_warm_up(&[input()], batched, vec![1, 2], &given).map(|plan| plan.shapes)
        };
        let plan = |given: &[(&str, Vec<i64>)]| planned(given, true);
        assert_eq!(plan(&[]).unwrap(), [vec![-1, 3]]);
        assert_eq!(plan(&[("ids", vec![16, 3])]).unwrap(), [vec![16, 3]]);
        assert!(plan(&[("ids", vec![16, 4])]).is_err(), "a fixed axis");
        assert!(plan(&[("ids", vec![16])]).is_err(), "too few axes");
        assert_eq!(planned(&[("ids", vec![16, 3])], false).unwrap(), [vec![1, 16, 3]], "a row");
        assert!(plan(&[("mask", vec![16, 3])]).is_err(), "no such input");
    }
}
