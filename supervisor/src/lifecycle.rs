//! The end of the supervisor: by a signal, by an upgrade, or by a fault.

use std::time::Duration;

use shadowslice_control::controller::ControlThread;
use shadowslice_datapath::phase::Phase;
use shadowslice_operations::admin::Upgrade;
use shadowslice_shared::exit;
use shadowslice_shared::rounding;
use shadowslice_succession::Succession;
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::mpsc;

use crate::serve::{Failed, unavailable};
use crate::systemd::{self, NotifyState};

/// The parts that the end of the supervisor needs.
pub(crate) struct Ending<'a> {
    pub(crate) lame_duck: Duration,
    pub(crate) succession: Succession<'a>,
    pub(crate) upgrades_rx: mpsc::Receiver<Upgrade>,
}

/// Runs the service until it has ended. Returns `None` if another signal interrupts the end.
pub(crate) async fn run_until_ended(
    service: impl Future<Output = Result<(), Failed>>,
    signals: &mut Signals,
    Ending { lame_duck, succession, mut upgrades_rx }: Ending<'_>,
) -> Option<Result<(), Failed>> {
    let mut service = std::pin::pin!(service);
    // This future lives until the end, because a supervisor that is starting may already serve models of
    // this one.
    let mut next = std::pin::pin!(succession.next(&mut upgrades_rx));
    let received = tokio::select! {
        outcome = &mut service => return Some(outcome),
        received = signals.next() => received,
        (next, reply) = &mut next => {
            let pid = next.pid();
            tracing::info!(
                pid,
                "the next supervisor has taken over; finishing the requests that this supervisor has accepted"
            );
            systemd::notify(NotifyState::MainPid(pid));
            succession.phase.send_replace(Phase::Leaving);
            // The receiver may be gone.
            reply.send(Ok(pid)).ok();
            return tokio::select! {
                outcome = &mut service => Some(outcome),
                _ = signals.next() => None,
            };
        }
    };
    systemd::notify(NotifyState::Stopping);
    let was_serving = succession.phase.borrow().is_accepting();
    succession.admin.router.stop();
    succession.admin.registry.stay_moved();
    // An operator who stops the supervisor in a terminal does not wait for load balancers.
    if received == ReceivedSignal::Terminate && was_serving && !lame_duck.is_zero() {
        succession.phase.send_replace(Phase::LameDuck);
        tracing::info!(
            lame_duck = %rounding::duration(lame_duck),
            "stopping: reporting not ready, and accepting requests for the lame-duck time; a second signal ends this time"
        );
        tokio::select! {
            outcome = &mut service => return Some(outcome),
            () = tokio::time::sleep(lame_duck) => {}
            _ = signals.next() => {}
        }
    }
    tracing::info!("stopping: finishing accepted requests; another signal stops the supervisor immediately");
    succession.phase.send_replace(Phase::Stopping);
    tokio::select! {
        outcome = &mut service => Some(outcome),
        _ = signals.next() => None,
    }
}

/// Stops the workers, and returns the exit code. Without an `outcome`, kills them.
pub(crate) async fn stop_workers(
    outcome: Option<Result<(), Failed>>,
    control: &mut ControlThread,
    signals: &mut Signals,
    limit: Duration,
) -> Result<u8, Failed> {
    let Some(outcome) = outcome else { return Ok(kill_workers(control)) };
    control.stop();
    tokio::select! {
        () = control.ended() => {}
        () = tokio::time::sleep(limit) => tracing::error!(
            "workers did not exit after SIGKILL, probably because the GPU driver blocks them; exiting without them; look for Xid errors in `dmesg`, and reboot the host if `pgrep shadowslice-wor` still lists them"
        ),
        _ = signals.next() => return Ok(kill_workers(control)),
    }
    outcome.map(|()| {
        tracing::info!("the supervisor has stopped");
        0
    })
}

pub(crate) fn signal(kind: SignalKind) -> Result<Signal, Failed> {
    tokio::signal::unix::signal(kind).map_err(|error| unavailable("cannot handle signals", &error))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceivedSignal {
    Terminate,
    Interrupt,
}

pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Failed> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    pub(crate) async fn next(&mut self) -> ReceivedSignal {
        tokio::select! {
            _ = self.terminate.recv() => ReceivedSignal::Terminate,
            _ = self.interrupt.recv() => ReceivedSignal::Interrupt,
        }
    }
}

fn kill_workers(control: &mut ControlThread) -> u8 {
    tracing::warn!("received another signal; killing the workers and stopping immediately");
    control.cut();
    exit::FORCED
}
