//! Writes the state that the configuration does not contain to a file, for the next supervisor.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use shadowslice_control::models::{ModelSet, PersistedState};
use shadowslice_datapath::phase::{Phase, PhaseReceiver};
use shadowslice_datapath::router::Router;

/// The minimum time between two writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);

/// Writes the state at each change, forever, except during an upgrade.
pub async fn persist(
    path: PathBuf,
    mut models: watch::Receiver<Arc<ModelSet>>,
    router: Arc<Router>,
    mut phase_rx: PhaseReceiver,
) {
    let (mut written, mut hosted, mut told) = (None, router.changes(), false);
    loop {
        // From the beginning of an upgrade on, the state belongs to the next supervisor. An error means that
        // this supervisor ends.
        phase_rx.wait_for(|phase| !phase.is_upgrading() && *phase != Phase::Leaving).await.ok();
        hosted.mark_unchanged();
        let set = Arc::clone(&models.borrow_and_update());
        let mut reports: Vec<_> = set.served.iter().map(|served| served.report.clone()).collect();
        reports.iter_mut().for_each(watch::Receiver::mark_unchanged);
        let state = PersistedState::of(&set, &router);
        if written.as_ref() != Some(&state) {
            let (to, new) = (path.clone(), state.clone());
            let outcome = spawn_blocking(move || new.write(&to)).await;
            if let Ok(Err(error)) = outcome
                && !std::mem::replace(&mut told, true)
            {
                let file = path.display();
                tracing::warn!(
                    %error,
                    %file,
                    "cannot save the models' state; after a restart, shares, drains, holds, unloaded models and clients' changes are lost; free disk space; the next change is saved again"
                );
            }
            written = Some(state);
        }
        let changes = reports.iter_mut().map(|report| -> Pin<Box<dyn Future<Output = bool> + Send>> {
            Box::pin(async { report.changed().await.is_ok() })
        });
        let changes: Vec<_> = changes.collect();
        let any = async {
            // Without models, nothing changes. If a controller has ended, the models change too.
            if changes.is_empty() || !select_all(changes).await.0 {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = any => {}
            Ok(()) = models.changed() => {}
            Ok(()) = hosted.changed() => {}
        }
        sleep(WRITE_INTERVAL).await;
    }
}
