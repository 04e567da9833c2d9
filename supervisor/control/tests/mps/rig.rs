//! A host with one GPU under MPS, where only the processes are real.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shadowslice_control::backend::{GpuBackend, GrantRequest, Limits, MpsError, MpsGpu, MpsSetup};
use shadowslice_shared::units::Percent;
use tempfile::TempDir;

/// The maximum time of a step of a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shorter than the limits in use, so that a test need not wait for long.
pub(crate) const LIMITS: Limits = Limits {
    start: Duration::from_secs(4),
    command: Duration::from_secs(2),
    quit: Duration::from_secs(1),
    terminate: Duration::from_secs(1),
    departure: Duration::from_secs(20),
    fault: PATIENCE,
    lost: Duration::from_millis(100),
};

pub(crate) const UUID: &str = "GPU-00000000-1111-2222-3333-444444444444";

/// Folders, programs, and orders for the stand-in of the control program.
pub(crate) struct Rig {
    folder: TempDir,
}

impl Rig {
    /// Creates a GPU with 132 SMs. A process gets at least 8 of them, as on an H200.
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("ss-mps-").tempdir_in("/tmp").unwrap();
        let rig = Self { folder };
        fs::create_dir(rig.path("orders")).unwrap();
        let stand_in = stand_in();
        assert!(stand_in.is_file(), "no {}: `cargo build --workspace` first", stand_in.display());
        let orders = rig.path("orders");
        rig.script(
            "control",
            &format!("export STAND_IN_ORDERS={}; exec {} \"$@\"", orders.display(), stand_in.display()),
        );
        rig.probing(UUID);
        rig
    }

    /// Creates a GPU that the probe finds.
    pub(crate) fn probing(&self, uuid: &str) {
        self.script(
            "probe",
            &format!(
                "case $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in 100) sms=132;; 1) sms=8;; esac\n\
                 echo \"{{\\\"sms\\\": $sms, \\\"uuid\\\": \\\"{uuid}\\\", \\\"name\\\": \\\"x\\\", \\\"driver\\\": 13000, \
                 \\\"memory_total\\\": 2, \\\"memory_free\\\": 1}}\""
            ),
        );
    }

    pub(crate) fn script(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes the stand-in misbehave.
    pub(crate) fn order(&self, name: &str, text: &str) {
        fs::write(self.path("orders").join(name), text).unwrap();
    }

    pub(crate) fn behave(&self, name: &str) {
        fs::remove_file(self.path("orders").join(name)).unwrap();
    }

    /// Returns the clients that were terminated.
    pub(crate) fn terminated(&self) -> String {
        fs::read_to_string(self.path("orders").join("terminated")).unwrap_or_default()
    }

    pub(crate) fn setup(&self) -> MpsSetup {
        MpsSetup {
            device: "0".to_owned(),
            index: 0,
            uuid: UUID.to_owned(),
            program: self.path("control"),
            probe: self.path("probe"),
            private: self.folder.path().to_owned(),
            several_users: false,
            handover: None,
            limits: LIMITS,
        }
    }

    pub(crate) fn start(&self) -> Result<Arc<MpsGpu>, MpsError> {
        MpsGpu::start(self.setup()).map(Arc::new)
    }

    pub(crate) fn pipe(&self) -> PathBuf {
        self.path("mps0/pipe")
    }

    /// Returns the programs of MPS that run here.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let setting = format!("CUDA_MPS_PIPE_DIRECTORY={}", self.pipe().display());
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let is_ours = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == setting.as_bytes())
                && String::from_utf8_lossy(&line).contains("nvidia-cuda-mps-stand-in")
        };
        pids.filter(is_ours).collect()
    }

    /// Returns the daemon's process id.
    pub(crate) fn daemon(&self) -> i32 {
        self.daemon_if_any().unwrap()
    }

    /// Returns the daemon's process id, if the daemon has written it.
    pub(crate) fn daemon_if_any(&self) -> Option<i32> {
        let file = self.pipe().join("nvidia-cuda-mps-control.pid");
        fs::read_to_string(file).ok()?.parse().ok()
    }

    /// Starts a daemon with a server in the pipe directory, as another supervisor would.
    pub(crate) fn leave_daemon(&self, pipe: &Path) -> Client {
        let mut daemon = Command::new(self.path("control"));
        daemon.arg("-f").env("CUDA_MPS_PIPE_DIRECTORY", pipe).env_remove("CUDA_MPS_LOG_DIRECTORY");
        let daemon = Client(daemon.spawn().unwrap());
        until("it answers", || ask(pipe, "start_server -uid 0").is_empty());
        daemon
    }

    /// Starts a process that is a client of the server.
    pub(crate) fn client(&self) -> Client {
        let client = Client(Command::new("sleep").arg("3600").spawn().unwrap());
        fs::write(self.pipe().join("clients").join(client.pid().to_string()), "").unwrap();
        client
    }

    /// Sends a command to the daemon, and returns the reply.
    pub(crate) fn ask(&self, command: &str) -> String {
        ask(&self.pipe(), command)
    }
}

fn ask(pipe: &Path, command: &str) -> String {
    let mut child = Command::new(stand_in())
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{command}\n").as_bytes()).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

impl Drop for Rig {
    fn drop(&mut self) {
        for pid in self.processes() {
            kill(pid);
        }
    }
}

/// A process that is a client of the server; killed when dropped.
pub(crate) struct Client(pub(crate) Child);

impl Client {
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

pub(crate) fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).ok();
}

/// Returns the path of the stand-in for MPS, which is built next to the supervisor. Cargo puts tests into
/// `deps`, one folder below.
fn stand_in() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.ancestors().nth(2).unwrap_or(Path::new(".")).join("nvidia-cuda-mps-stand-in")
}

pub(crate) fn wanted(percent: u32) -> GrantRequest {
    GrantRequest {
        share: Percent::new(percent).unwrap(),
        priority: 1,
        memory_limit: None,
        room: None,
        joins: false,
    }
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let mut so = false;
    wait(async {
        let mut look = tokio::time::interval(Duration::from_millis(10));
        let begun = Instant::now();
        while !so && begun.elapsed() < PATIENCE {
            look.tick().await;
            so = is_so();
        }
    });
    assert!(so, "not in time: {what}");
}

/// Runs something that waits to its end.
pub(crate) fn wait(waiting: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE * 2, waiting).await.expect("in time") });
}

/// Returns true if a GPU takes workers.
pub(crate) fn takes_workers(gpu: &MpsGpu) -> bool {
    gpu.enter(false).is_ok()
}
