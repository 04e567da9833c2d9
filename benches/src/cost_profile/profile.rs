//! The profile of a supervisor that runs under Callgrind while it answers a known number of
//! requests. The supervisor's worker runs without Callgrind, because the profile is about the
//! supervisor.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use shadowslice_tests::home::Home;
use tokio::process::Command;

use crate::MeasureError;
use crate::closed_loop::send;
use crate::cost_profile::callgrind::CallgrindProfile;
use crate::plan::EchoSetting;
use crate::system::{RunningSupervisor, home};

/// The number of requests that are sent before the profile begins.
const WARM_UP: u64 = 200;

/// The name of Callgrind's output file in the supervisor's folder. Callgrind appends the number of
/// the dump to this name.
const OUTPUT: &str = "callgrind";

/// Returns the reason why Callgrind cannot run on this host, or `None` if it can.
pub(crate) async fn missing() -> Option<String> {
    let mut trial = Command::new("valgrind");
    trial.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let works = trial.status().await.is_ok_and(|status| status.success());
    (!works).then(|| "`valgrind` is not installed (Debian package valgrind)".into())
}

/// Profiles the supervisor while it answers `requests` requests of a setting.
pub(crate) async fn profile(
    binaries: &Path,
    setting: &EchoSetting,
    requests: u64,
) -> Result<CallgrindProfile, MeasureError> {
    let mut home = home(binaries, &[setting.bytes], setting.connections)?;
    let script = wrapper(&home, &binaries.canonicalize()?.join("shadowslice"))?;
    home.set_binary(script);
    let system = RunningSupervisor::start(home).await?;
    let clients = send(system.clients(setting).await?, WARM_UP.min(requests)).await?;
    control(&system, &["instrumentation", "on"]).await?;
    let clients = send(clients, requests).await?;
    control(&system, &["instrumentation", "off"]).await?;
    control(&system, &["dump"]).await?;
    let profile = fs::read(system.folder().join(format!("{OUTPUT}.1")))?;
    drop(clients);
    system.stop().await?;
    Ok(CallgrindProfile::parse(&String::from_utf8_lossy(&profile)))
}

/// Writes a script that runs the binary under Callgrind. The script makes Callgrind schedule the
/// binary's threads fairly.
fn wrapper(home: &Home, binary: &Path) -> Result<PathBuf, MeasureError> {
    let folder = home.path().display();
    let script = home.write(
        "callgrind.sh",
        format!(
            "#!/bin/sh\nexec valgrind --quiet --tool=callgrind --instr-atstart=no --fair-sched=try \
             --vgdb-prefix={folder}/vgdb --callgrind-out-file={folder}/{OUTPUT} {} \"$@\"\n",
            binary.display()
        ),
    )?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok(script)
}

/// Sends a command to Callgrind, and waits until Callgrind has executed it.
async fn control(system: &RunningSupervisor, words: &[&str]) -> Result<(), MeasureError> {
    let prefix = system.folder().join("vgdb");
    let output = Command::new("vgdb")
        .arg(format!("--vgdb-prefix={}", prefix.display()))
        .arg(format!("--pid={}", system.supervisor()))
        .args(words)
        .stdin(Stdio::null())
        .output()
        .await?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("vgdb failed to send {words:?} to the supervisor: {stderr}").into());
    }
    Ok(())
}
