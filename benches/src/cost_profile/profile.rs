//! A supervisor under Callgrind, profiled while it serves a known number of requests. Its worker
//! runs without: the library by which it reads the clock does not find its way under Valgrind (it
//! looks for the vDSO, which Valgrind hides).

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

/// Requests before anything is profiled.
const WARM_UP: u64 = 200;

/// Where Callgrind writes, in the supervisor's folder; it numbers its dumps.
const OUTPUT: &str = "callgrind";

/// Why it cannot profile here, if it cannot.
pub(crate) async fn missing() -> Option<String> {
    let mut trial = Command::new("valgrind");
    trial.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let works = trial.status().await.is_ok_and(|status| status.success());
    (!works).then(|| "`valgrind` is not installed (Debian: valgrind)".into())
}

/// Profiles the supervisor over `requests` requests of a setting.
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
    tell(&system, &["instrumentation", "on"]).await?;
    let clients = send(clients, requests).await?;
    tell(&system, &["instrumentation", "off"]).await?;
    tell(&system, &["dump"]).await?;
    let profile = fs::read(system.folder().join(format!("{OUTPUT}.1")))?;
    drop(clients);
    system.stop().await?;
    Ok(CallgrindProfile::parse(&String::from_utf8_lossy(&profile)))
}

/// A script that runs the binary under Callgrind. Threads take turns there, fairly.
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

/// Tells Callgrind something, and waits until it was done.
async fn tell(system: &RunningSupervisor, words: &[&str]) -> Result<(), MeasureError> {
    let prefix = system.folder().join("vgdb");
    let output = Command::new("vgdb")
        .arg(format!("--vgdb-prefix={}", prefix.display()))
        .arg(format!("--pid={}", system.supervisor()))
        .args(words)
        .stdin(Stdio::null())
        .output()
        .await?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("vgdb could not say {words:?} to the supervisor: {said}").into());
    }
    Ok(())
}
