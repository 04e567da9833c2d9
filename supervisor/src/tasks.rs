//! The tasks that run in the background while the supervisor lives.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use shadowslice_control::model_cache::keep_trimmed;
use shadowslice_control::models::Registry;
use shadowslice_datapath::phase::{Phase, PhaseReceiver, reached};
use shadowslice_datapath::relay::RelayServer;
use shadowslice_ingress::{MetricsListeners, Shown};
use shadowslice_operations::admin::Admin;
use shadowslice_shared::exit;
use shadowslice_succession::persist;
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::lifecycle::signal;
use crate::running::Running;
use crate::serve::{Failed, Place, Shared};
use crate::systemd;

/// The background tasks.
pub(crate) struct Tasks {
    tracker: TaskTracker,
    cancelled: CancellationToken,
    /// Cancelled when everything else has ended, because metrics are served until then.
    metrics_cancelled: CancellationToken,
    /// Cancelled if a task panics.
    panicked: CancellationToken,
}

/// The listeners that background tasks serve.
pub(crate) struct BackgroundListeners {
    pub(crate) metrics: MetricsListeners,
    pub(crate) admin: Admin,
    /// The server for requests that the previous supervisor relays.
    pub(crate) relays: Option<RelayServer>,
}

impl Tasks {
    pub(crate) fn new() -> Self {
        Self {
            tracker: TaskTracker::new(),
            cancelled: CancellationToken::new(),
            metrics_cancelled: CancellationToken::new(),
            panicked: CancellationToken::new(),
        }
    }

    pub(crate) fn spawn_all(
        &self,
        place: &Place<'_>,
        shared: &Shared,
        running: &mut Running,
        BackgroundListeners { metrics, admin, relays }: BackgroundListeners,
        shown: Shown,
    ) -> Result<(), Failed> {
        let phase_rx = || shared.phase.subscribe();
        self.spawn_metrics(metrics, shown, shared);
        let (admin_context, leaving) = (Arc::clone(&shared.admin), phase_rx());
        self.spawn("control socket", async move {
            reached(leaving.clone(), |phase| phase.is_in_charge()).await;
            tokio::select! {
                () = admin.run(admin_context) => {}
                () = reached(leaving, |phase| *phase == Phase::Leaving) => {}
            }
        });
        let (models, router, leaving) = (running.models.clone(), Arc::clone(&running.router), phase_rx());
        let file = place.run_dir.state();
        self.spawn("persisted state", async move {
            reached(leaving.clone(), |phase| phase.is_in_charge()).await;
            tokio::select! {
                () = persist(file, models, router, leaving.clone()) => {}
                () = reached(leaving, |phase| *phase == Phase::Leaving) => {}
            }
        });
        if let Some(relays) = relays {
            let (router, gone) = (Arc::clone(&running.router), shared.predecessor_gone.clone());
            self.spawn("relayed requests", async move {
                gone.run_until_cancelled(relays.run(router)).await;
            });
        }
        let registry = shared.admin.registry.clone();
        self.spawn("file watch", async move { registry.watch().await });
        if let Some(commands_rx) = running.client_commands_rx.take() {
            let registry = shared.admin.registry.clone();
            self.spawn("client commands", async move { registry.serve_clients(commands_rx).await });
        }
        if let Some(residency) = running.residency.take() {
            self.spawn("residency", residency.run());
        }
        self.spawn("model cache", keep_trimmed(running.model_cache.clone(), running.models.clone()));
        let hangup = signal(SignalKind::hangup())?;
        let reopen = shared.reopen_access_log.clone();
        self.spawn("reloads", reload_on(hangup, shared.admin.registry.clone(), phase_rx(), reopen));
        self.spawn("watchdog", systemd::feed_watchdog(running.pulse.clone()));
        Ok(())
    }

    /// Serves metrics until everything else has ended, unless another supervisor serves them.
    fn spawn_metrics(&self, metrics: MetricsListeners, shown: Shown, shared: &Shared) {
        let (phase_rx, cancelled) = (shared.phase.subscribe(), self.metrics_cancelled.clone());
        let (history, context) = (Arc::clone(&shared.admin.history), Arc::clone(&shared.admin));
        let (metrics_phase, metrics_phase_rx) = watch::channel(Phase::Serving);
        let task = async move {
            let serves = reached(phase_rx.clone(), |phase| phase.is_in_charge());
            if cancelled.run_until_cancelled(serves).await.is_none() {
                return;
            }
            let end = async {
                let leaves = reached(phase_rx, |phase| *phase == Phase::Leaving);
                cancelled.run_until_cancelled(leaves).await;
                metrics_phase.send_replace(Phase::Stopping);
            };
            // Without metrics listeners, the history is still written for `shadowslice top`.
            let serves = async { tokio::join!(metrics.run(shown, metrics_phase_rx), end) };
            tokio::select! {
                ((), ()) = serves => {}
                () = history.write(context) => {}
            }
        };
        self.tracker.spawn(guarded("metrics", self.panicked.clone(), task));
    }

    /// Spawns a task that ends when the tasks are cancelled.
    fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let cancelled = self.cancelled.clone();
        let task = async move {
            cancelled.run_until_cancelled(task).await;
        };
        self.tracker.spawn(guarded(name, self.panicked.clone(), task));
    }

    /// Waits until a task has panicked, which is a bug.
    pub(crate) async fn failure(&self) -> Failed {
        self.panicked.cancelled().await;
        let why = "a task of the supervisor panicked because of a bug; please report it with the log above";
        Failed { why: why.to_owned(), code: exit::SOFTWARE }
    }

    /// Ends all tasks but those for metrics.
    pub(crate) fn cancel(&self) {
        self.cancelled.cancel();
    }

    /// Ends all tasks and waits for their end.
    pub(crate) async fn end(self) {
        self.cancel();
        self.metrics_cancelled.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

/// Runs a task, and reports a panic.
async fn guarded(task: &'static str, panicked: CancellationToken, future: impl Future<Output = ()>) {
    if AssertUnwindSafe(future).catch_unwind().await.is_err() {
        tracing::error!(task, "a task of the supervisor panicked, which is a bug in shadowslice");
        panicked.cancel();
    }
}

/// Reopens the access log and reloads the configuration at each SIGHUP, forever.
async fn reload_on(
    mut hangup: Signal,
    registry: Registry,
    phase_rx: PhaseReceiver,
    reopen_access_log: Option<Arc<dyn Fn() + Send + Sync>>,
) {
    while hangup.recv().await.is_some() {
        if let Some(reopen) = &reopen_access_log {
            reopen();
        }
        if phase_rx.borrow().is_upgrading() {
            tracing::warn!(
                "skipping the reload, because an upgrade is in progress; if the configuration has changed since the upgrade began, run `shadowslice reload` when the upgrade has ended"
            );
            continue;
        }
        let registry = registry.clone();
        // The log contains the outcome.
        tokio::spawn(async move { registry.reload().await.ok() });
    }
}
