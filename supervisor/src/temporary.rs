//! The host environment of a command that runs models without servers for clients. Nothing of it stays: its run
//! directory is a temporary folder, and its workers end.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use shadowslice_config::Config;
use shadowslice_control::controller::{Context, ControlThread};
use tokio::time::timeout;

use crate::ground::Ground;
use crate::serve::{Failed, unavailable};

/// The time that a worker may take to exit, in addition to twice `timeouts.stop`.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// The permissions of the folder, through which workers of other users pass.
const PASSABLE: u32 = 0o711;

/// Runs `work` with a temporary run directory. `work` must end the workers that it starts.
pub(crate) fn with_host<T>(
    config: Config,
    work: impl AsyncFnOnce(&Config, &Context) -> Result<T, Failed>,
) -> Result<T, Failed> {
    let passable = Permissions::from_mode(PASSABLE);
    let folder = tempfile::Builder::new().prefix("shadowslice-").permissions(passable).tempdir();
    let folder = folder.map_err(|error| {
        unavailable("cannot create a temporary folder; set TMPDIR to a writable folder", &error)
    })?;
    let config = Config { run_dir: folder.path().join("run"), ..config };
    let Ground { run_dir, gpus, runtime, context, watch } = Ground::prepare(&config, None, None)?;
    let outcome = runtime.block_on(work(&config, &context));
    gpus.iter().for_each(|gpu| gpu.stop(outcome.is_err()));
    runtime.shutdown_timeout(STOP_GRACE);
    drop((context, watch, gpus, run_dir));
    outcome
}

/// Ends the models' workers.
pub(crate) async fn end_workers(config: &Config, control: &mut ControlThread) {
    control.stop();
    if timeout(config.timeouts.stop * 2 + STOP_GRACE, control.ended()).await.is_err() {
        control.cut();
    }
}
