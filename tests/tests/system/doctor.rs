//! Tests of `shadowslice doctor` on this host, with and without a GPU.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;
use shadowslice_tests::home::{HarnessError, Home};

use crate::fixtures::{EMULATED, echo};

/// Runs `shadowslice doctor`, and returns its exit code and its checks.
async fn checks(home: &Home, arguments: &[&str]) -> Result<(Option<i32>, Checks), HarnessError> {
    let arguments = [&["doctor", "--json"], arguments].concat();
    let output = home.run(&arguments).await?;
    let report = serde_json::from_slice(&output.stdout).map_err(|source| {
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        HarnessError::UnexpectedOutput { command: arguments.join(" "), printed, source }
    })?;
    Ok((output.status.code(), report))
}

/// The JSON output of `shadowslice doctor`.
#[derive(Debug, Deserialize)]
struct Checks {
    checks: Vec<Check>,
}

#[derive(Debug, Deserialize)]
struct Check {
    name: String,
    level: String,
    finding: String,
    advice: Option<String>,
}

impl Checks {
    fn of(&self, name: &str) -> Option<&Check> {
        self.checks.iter().find(|check| check.name == name)
    }

    fn level(&self, name: &str) -> Option<&str> {
        Some(&self.of(name)?.level)
    }
}

#[tokio::test]
async fn an_emulated_configuration_needs_no_gpu() {
    let model = echo("echo", "share: {initial: 50%}");
    let home = Home::with_config(&format!("{EMULATED}models:\n  - {model}\n")).unwrap();
    let (code, checks) = checks(&home, &["config.yaml"]).await.unwrap();
    assert_eq!(code, Some(0), "{checks:?}");
    for name in ["driver", "mps", "worker", "run_dir", "emulated devices"] {
        assert_eq!(checks.level(name), Some("ok"), "{name}");
    }
    assert!(!home.run_dir().try_exists().unwrap(), "the doctor created the run directory");
}

#[tokio::test]
async fn without_a_gpu_the_doctor_reports_it_and_what_works() {
    if Path::new("/dev/nvidiactl").try_exists().unwrap() {
        return;
    }
    let home = Home::new().unwrap();
    let (code, found) = checks(&home, &[]).await.unwrap();
    assert_eq!((code, found.level("driver")), (Some(69), Some("fault")));
    assert_eq!(found.level("emulated devices"), Some("ok"));
    let needing = Home::with_config(&format!("models:\n  - {}\n", echo("echo", "gpu: 0"))).unwrap();
    let (code, found) = checks(&needing, &["config.yaml"]).await.unwrap();
    assert_eq!((code, found.level("driver")), (Some(69), Some("fault")));
    let lines = home.run(&["doctor"]).await.unwrap();
    let lines = String::from_utf8(lines.stdout).unwrap();
    let line = lines.lines().find(|line| line.starts_with("fault    driver: "));
    assert!(line.is_some_and(|line| line.contains("install the driver")), "{lines}");
}

#[tokio::test]
async fn missing_parts_are_reported_by_name() {
    let mut home = Home::new().unwrap();
    home.set_env("ORT_DYLIB_PATH", "/nowhere/libonnxruntime.so");
    home.set_env("CUDA_VISIBLE_DEVICES", "1");
    let (code, checks) = checks(&home, &[]).await.unwrap();
    assert_eq!((code, checks.level("onnxruntime")), (Some(69), Some("fault")));
    let environment = checks.of("environment").unwrap();
    assert_eq!(environment.level, "warning");
    assert!(environment.finding.contains("CUDA_VISIBLE_DEVICES=1"), "{environment:?}");
    assert!(environment.advice.as_ref().is_some_and(|advice| advice.contains("unset")), "{environment:?}");
}

#[tokio::test]
async fn the_version_of_onnx_runtime_and_an_invalid_library_are_reported() {
    let mut home = Home::new().unwrap();
    let (_, found) = checks(&home, &[]).await.unwrap();
    let library = found.of("onnxruntime").unwrap();
    assert!(library.level == "ok" && library.finding.starts_with("version 1."), "{library:?}");
    let none = home.write("libonnxruntime.so", "not a library").unwrap();
    home.set_env("ORT_DYLIB_PATH", &none);
    let (code, found) = checks(&home, &[]).await.unwrap();
    assert_eq!((code, found.level("onnxruntime")), (Some(69), Some("fault")));
    let library = found.of("onnxruntime").unwrap();
    assert!(library.finding.contains(none.to_str().unwrap()), "{library:?}");
}

#[tokio::test]
async fn a_broken_cudnn_is_found_where_workers_look_for_it() {
    let mut home = Home::new().unwrap();
    let none = home.write("libcudnn.so.9", "not a library").unwrap();
    home.set_env("LD_LIBRARY_PATH", none.parent().unwrap());
    let (_, found) = checks(&home, &[]).await.unwrap();
    let cudnn = found.of("cudnn").unwrap();
    assert_ne!(cudnn.level, "ok");
    assert!(cudnn.finding.contains(none.to_str().unwrap()), "{cudnn:?}");
    assert!(cudnn.advice.as_ref().is_some_and(|advice| advice.contains("LD_LIBRARY_PATH")), "{cudnn:?}");
}

#[tokio::test]
async fn a_worker_that_breaks_off_is_a_finding_and_so_is_an_absent_one() {
    let mut home = Home::new().unwrap();
    home.set_worker("kill -SEGV $$").unwrap();
    let (code, found) = checks(&home, &[]).await.unwrap();
    let libraries = found.of("libraries").unwrap();
    assert_eq!((code, libraries.level.as_str()), (Some(69), "fault"));
    assert!(libraries.finding.contains("signal: 11"), "{libraries:?}");
    assert_eq!(found.level("worker"), Some("ok"));
    fs::remove_file(home.path().join("bin/shadowslice-worker")).unwrap();
    let (code, found) = checks(&home, &[]).await.unwrap();
    assert_eq!((code, found.level("worker"), found.level("libraries")), (Some(69), Some("fault"), None));
}

/// Makes a folder that contains the MPS programs that the doctor checks, and puts it at the start
/// of PATH.
fn with_mps(script: &str) -> Result<Home, HarnessError> {
    let mut home = Home::new()?;
    let io = |source| HarnessError::Io { what: "create a program".into(), source };
    home.write("nvidia-cuda-mps-server", "")?;
    let control = home.write("nvidia-cuda-mps-control", format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(control, Permissions::from_mode(0o755)).map_err(io)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    home.set_env("PATH", format!("{}:{}", home.path().display(), path.to_string_lossy()));
    Ok(home)
}

#[tokio::test]
async fn the_version_of_mps_is_reported_and_its_query_has_a_time_limit() {
    let home = with_mps("echo \"CUDA MPS Control for Linux. Binary version: 13010\"").unwrap();
    let (_, found) = checks(&home, &[]).await.unwrap();
    let mps = found.of("mps").unwrap();
    assert!(mps.level == "ok" && mps.finding.contains("13010"), "{mps:?}");
    let home = with_mps("exec sleep 600").unwrap();
    let (_, found) = checks(&home, &[]).await.unwrap();
    let mps = found.of("mps").unwrap();
    assert!(mps.level == "warning" && mps.finding.contains("did not exit"), "{mps:?}");
}

#[tokio::test]
async fn a_foreign_daemon_and_the_directory_of_a_dead_one_are_found() {
    let mut home = Home::new().unwrap();
    let pipes = home.path().join("pipes");
    fs::create_dir(&pipes).unwrap();
    drop(UnixListener::bind(pipes.join("control")).unwrap());
    home.set_env("CUDA_MPS_PIPE_DIRECTORY", &pipes);
    let mut daemon = Command::new("sh")
        .arg0("nvidia-cuda-mps-control")
        .args(["-c", "read until_the_end"])
        .env("CUDA_MPS_PIPE_DIRECTORY", "/some/pipes")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let expected = format!("daemon {} in /some/pipes", daemon.id());
    let (_, found) = checks(&home, &[]).await.unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(found.of("mps daemons").is_some_and(|check| check.finding.contains(&expected)), "{found:?}");
    let left = found.of("mps pipes").unwrap();
    let path = pipes.display().to_string();
    assert!(left.level == "warning" && left.finding.starts_with(&path), "{left:?}");
}

#[tokio::test]
async fn a_faulty_configuration_is_refused_before_anything_is_checked() {
    let home = Home::with_config(&format!("{EMULATED}models: 7\n")).unwrap();
    let output = home.run(&["doctor", "config.yaml"]).await.unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(String::from_utf8_lossy(&output.stderr).contains("config.yaml:"), "{output:?}");
}
