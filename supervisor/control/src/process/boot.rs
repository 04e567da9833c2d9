//! The supervisor's side of a worker's boot, on a thread of its own, because `ipc-channel` blocks.
//! Its waits have no time limit of their own: a controller that runs out of patience kills the
//! worker, which ends them.

use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;

use ipc_channel::ipc::{IpcOneShotServer, IpcReceiver};
use shadowslice_shared::boot::{
    Assignment, BootRefusal, Loaded, Order, PROTOCOL, WarmUp, Warmed, WorkerSays,
};
use shadowslice_shared::tensor::TensorSpec;
use tokio::sync::{mpsc, oneshot};

use super::worker::{WorkerEvent, WorkerSaid};
use crate::backend::Admission;
use shadowslice_shared::ids::WorkerId;

pub(super) struct Boot {
    pub(super) server: IpcOneShotServer<WorkerSays>,
    pub(super) worker: WorkerId,
    /// The assignment once it may load, or `None` when it never will.
    pub(super) orders: Receiver<Option<Box<Assignment>>>,
    /// Dropped when all has been reported.
    pub(super) done: oneshot::Sender<()>,
    /// What the worker must prove of its device; `None` for a worker that does not touch the GPU.
    pub(super) admission: Option<Admission>,
    pub(super) events: mpsc::Sender<WorkerEvent>,
}

/// Takes a worker from its hello to being warm, and reports each step.
pub(super) fn run(boot: Boot, plan: impl FnOnce(&Loaded) -> Result<WarmUp, BootRefusal>) {
    let Boot { server, worker, orders, admission, events, done } = boot;
    // An error means that there is no controller to tell any more.
    let tell = |said| events.blocking_send(WorkerEvent { worker, said }).unwrap_or(());
    let said = match converse(server, &orders, admission.as_ref(), plan, tell) {
        Ok(warmed) => WorkerSaid::Warmed(warmed),
        Err(Ended::Refused(refusal)) => WorkerSaid::Refused(refusal),
        Err(Ended::Lost(why)) => WorkerSaid::Lost(why),
    };
    tell(said);
    drop(done);
}

enum Ended {
    Refused(BootRefusal),
    Lost(String),
}

fn converse(
    server: IpcOneShotServer<WorkerSays>,
    orders: &Receiver<Option<Box<Assignment>>>,
    admission: Option<&Admission>,
    plan: impl FnOnce(&Loaded) -> Result<WarmUp, BootRefusal>,
    tell: impl Fn(WorkerSaid),
) -> Result<Warmed, Ended> {
    let lost = |what: &str| Ended::Lost(format!("the worker ended {what}"));
    let (words, hello) = server.accept().map_err(|_| lost("before it said hello"))?;
    let sender = match hello {
        WorkerSays::Hello { protocol: PROTOCOL, orders } => orders,
        WorkerSays::Hello { protocol, .. } => {
            let why = format!(
                "it speaks protocol {protocol}, not {PROTOCOL}: install both binaries from one build"
            );
            return Err(Ended::Refused(BootRefusal::Setup(why)));
        }
        WorkerSays::Refused(refusal) => return Err(Ended::Refused(refusal)),
        other => return Err(out_of_turn(&other)),
    };
    tell(WorkerSaid::Connected);
    let unwanted = || Ended::Lost("the worker was not wanted any more".to_owned());
    let assignment = orders.recv().ok().flatten().ok_or_else(unwanted)?;
    sender.send(Order::Load(assignment)).map_err(|_| lost("when it was told to load"))?;
    let loaded = match next(&words)? {
        WorkerSays::Loaded(loaded) => loaded,
        other => return Err(out_of_turn(&other)),
    };
    if let Some(admission) = admission {
        admission.check(loaded.sms).map_err(|why| Ended::Refused(BootRefusal::Setup(why)))?;
    }
    let warm_up = plan(&loaded).map_err(Ended::Refused)?;
    tell(WorkerSaid::Loaded(loaded));
    sender.send(Order::Warm(warm_up)).map_err(|_| lost("when it was told to warm up"))?;
    match next(&words)? {
        WorkerSays::Warmed(warmed) => Ok(warmed),
        other => Err(out_of_turn(&other)),
    }
}

fn next(words: &IpcReceiver<WorkerSays>) -> Result<WorkerSays, Ended> {
    match words.recv() {
        Ok(WorkerSays::Refused(refusal)) => Err(Ended::Refused(refusal)),
        Ok(said) => Ok(said),
        Err(_) => Err(Ended::Lost("the worker ended while it loaded or warmed up".to_owned())),
    }
}

fn out_of_turn(said: &WorkerSays) -> Ended {
    Ended::Refused(BootRefusal::Setup(format!("it spoke out of turn: {said:?}")))
}

/// What to warm up: `sizes` of a model with these inputs. An axis that the model leaves open is as
/// long as the configuration says, or 1.
pub fn plan_warm_up(
    inputs: &[TensorSpec],
    batched: bool,
    sizes: Vec<u32>,
    given: &BTreeMap<String, Vec<i64>>,
) -> Result<WarmUp, BootRefusal> {
    if let Some(name) = given.keys().find(|name| inputs.iter().all(|input| input.name != **name)) {
        return Err(BootRefusal::Model(format!("warmup.{name}: the model has no such input")));
    }
    let shapes = inputs.iter().map(|input| {
        let open = if batched { &input.shape[1..] } else { &input.shape[..] };
        match given.get(&input.name) {
            None => Ok(open.iter().map(|&axis| if axis < 0 { 1 } else { axis }).collect()),
            Some(shape) if fits(shape, open) => Ok(shape.clone()),
            Some(shape) => {
                let name = &input.name;
                Err(BootRefusal::Model(format!(
                    "warmup.{name}: {shape:?} does not fit the model's {open:?} (without the batch axis)"
                )))
            }
        }
    });
    Ok(WarmUp { batched, sizes, shapes: shapes.collect::<Result<_, _>>()? })
}

fn fits(shape: &[i64], open: &[i64]) -> bool {
    shape.len() == open.len()
        && shape.iter().zip(open).all(|(&axis, &open)| axis > 0 && (open < 0 || axis == open))
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::tensor::Datatype;

    use super::*;

    fn input() -> TensorSpec {
        TensorSpec { name: "ids".to_owned(), datatype: Datatype::Int64, shape: vec![-1, -1, 3] }
    }

    #[test]
    fn open_axes_come_from_the_configuration_or_are_one() {
        let plan = |given: &[(&str, Vec<i64>)]| {
            let given = given.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone())).collect();
            plan_warm_up(&[input()], true, vec![1, 2], &given).map(|plan| plan.shapes)
        };
        assert_eq!(plan(&[]).unwrap(), [vec![1, 3]]);
        assert_eq!(plan(&[("ids", vec![16, 3])]).unwrap(), [vec![16, 3]]);
        assert!(plan(&[("ids", vec![16, 4])]).is_err(), "a fixed axis");
        assert!(plan(&[("ids", vec![16])]).is_err(), "too few axes");
        assert!(plan(&[("mask", vec![16, 3])]).is_err(), "no such input");
    }
}
