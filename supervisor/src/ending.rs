//! How serving ends: by a signal, by a successor, or by a fault.

use shadowslice_shared::rounding;
use std::cell::Cell;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::serve::{Failed, unavailable};
use crate::systemd;
use crate::upgrade::Succession;
use shadowslice_control::controller::ControlThread;
use shadowslice_datapath::router::Router;
use shadowslice_ingress::Course;
use shadowslice_operations::admin::Upgrade;
use shadowslice_shared::exit;

/// What an orderly end takes.
pub(crate) struct Ending<'a> {
    pub(crate) router: &'a Router,
    /// Whether clients are served already.
    pub(crate) begun: &'a Cell<bool>,
    pub(crate) lame_duck: Duration,
    /// Of serving, and of metrics.
    pub(crate) courses: [&'a watch::Sender<Course>; 2],
    pub(crate) succession: Succession<'a>,
    pub(crate) upgrades: mpsc::Receiver<Upgrade>,
}

/// `None` if a signal cuts the answering short.
pub(crate) async fn until_ended(
    conversation: impl Future<Output = Result<(), Failed>>,
    signals: &mut Signals,
    Ending { router, begun, lame_duck, courses: [course, metrics], succession, mut upgrades }: Ending<'_>,
) -> Option<Result<(), Failed>> {
    let mut conversation = std::pin::pin!(conversation);
    // Kept to the end: one that is being started may serve models of this one already.
    let mut next = std::pin::pin!(succession.next(&mut upgrades));
    let told = tokio::select! {
        outcome = &mut conversation => return Some(outcome),
        told = signals.next() => told,
        (next, reply) = &mut next => {
            let pid = next.pid();
            tracing::info!(
                pid,
                "the next supervisor has taken over; finishing the requests that this supervisor has accepted"
            );
            systemd::succeeded_by(pid);
            course.send_replace(Course::Leave);
            metrics.send_replace(Course::Stop);
            // It may be gone.
            reply.send(Ok(pid)).ok();
            return tokio::select! {
                outcome = &mut conversation => Some(outcome),
                _ = signals.next() => None,
            };
        }
    };
    systemd::stopping();
    router.stop();
    succession.registry.stay_moved();
    // Who ends it at a terminal does not wait for load balancers.
    if told == Told::Terminate && begun.get() && !lame_duck.is_zero() {
        tracing::info!(
            lame_duck = %rounding::duration(lame_duck),
            "stopping: reporting not ready, and accepting requests for the lame-duck time; a second signal ends this time"
        );
        tokio::select! {
            outcome = &mut conversation => return Some(outcome),
            () = tokio::time::sleep(lame_duck) => {}
            _ = signals.next() => {}
        }
    }
    tracing::info!("stopping: finishing accepted requests; another signal stops the supervisor immediately");
    course.send_replace(Course::Stop);
    tokio::select! {
        outcome = &mut conversation => Some(outcome),
        _ = signals.next() => None,
    }
}

pub(crate) async fn finish(
    outcome: Option<Result<(), Failed>>,
    control: &mut ControlThread,
    signals: &mut Signals,
    limit: Duration,
) -> Result<u8, Failed> {
    let Some(outcome) = outcome else { return Ok(cut(control)) };
    control.stop();
    tokio::select! {
        () = control.ended() => {}
        () = tokio::time::sleep(limit) => tracing::error!(
            "workers did not exit after SIGKILL, probably because the GPU driver blocks them; exiting without them; look for Xid errors in `dmesg`, and reboot the host if `pgrep shadowslice-wor` still lists them"
        ),
        _ = signals.next() => return Ok(cut(control)),
    }
    outcome.map(|()| {
        tracing::info!("the supervisor has stopped");
        0
    })
}

pub(crate) fn hear(kind: SignalKind) -> Result<Signal, Failed> {
    signal(kind).map_err(|error| unavailable("cannot handle signals", &error))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Terminate,
    Interrupt,
}

pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Failed> {
        Ok(Self { terminate: hear(SignalKind::terminate())?, interrupt: hear(SignalKind::interrupt())? })
    }

    pub(crate) async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::Terminate,
            _ = self.interrupt.recv() => Told::Interrupt,
        }
    }
}

fn cut(control: &mut ControlThread) -> u8 {
    tracing::warn!("received another signal; killing the workers and stopping immediately");
    control.cut();
    exit::FORCED
}
