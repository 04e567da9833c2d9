//! The attacked servers. Each server has one model for the neighbour and one for the attacker.

use std::fs::{File, Permissions, set_permissions};
use std::io::{PipeReader, Read, Write, pipe};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;

use super::faults::liar;
use crate::fixtures::profile;
use crate::hostile::{AnyResult, confine};

pub(super) const NEIGHBOUR: &str = "neighbour";
pub(super) const OTHER: &str = "echo";

/// The maximum number of connections of a server that is attacked with connections.
pub(super) const CONNECTIONS: usize = 256;

/// The value of `limits.memory`, in MiB.
pub(super) const MEMORY: u64 = 2048;

/// The kind of server that an attack requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttackSetting {
    Plain,
    /// A server with a long log, which no process reads during the attack.
    Unread,
    /// A server whose attacker's model has string inputs.
    Strings,
    /// A server with at most [`CONNECTIONS`] connections.
    Crowded,
    /// A server with a limited address space, which accepts requests that exceed it.
    Confined,
    /// A server whose attacker's model is slow.
    Slow,
    /// A server whose workers send invalid messages on command.
    Lying,
    /// A server to which the attacker must not connect.
    Closed,
}

impl AttackSetting {
    fn home(self) -> AnyResult<Home> {
        let limits = match self {
            Self::Crowded => format!("memory: {MEMORY}Mi, connections: {CONNECTIONS}"),
            Self::Confined => "request_bytes: 2Gi, memory: 64Gi".to_owned(),
            _ => format!("memory: {MEMORY}Mi"),
        };
        let queue = if self == Self::Confined { "2Gi" } else { "64Mi" };
        let listed = if self == Self::Closed { ", users: [70002]" } else { "" };
        let model = |name, more, datatype, shape| {
            format!(
                "  - {{name: {name}, engine: emulated, slo: 20s, profile: {name}.yaml, {more}, handover: shadow, \
                 share: {{initial: 50%}}, queue: {{memory: {queue}, on_late: serve}}, \
                 tensors: [{{input: x, output: y, datatype: {datatype}, shape: [{shape}]}}]}}\n"
            )
        };
        let datatype = if self == Self::Strings { "BYTES" } else { "FP32" };
        let models = model(NEIGHBOUR, "standby: always", "FP32", "16")
            + &model(OTHER, "batch: {max: 1}", datatype, "-1");
        let mut home = Home::with_config(&format!(
            "listen: {{http: [{{address: \"unix:http.sock\", mode: \"0666\"{listed}}}, \"127.0.0.1:0\"], \
             grpc: [\"unix:grpc.sock\"], metrics: []}}\n\
             gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\n\
             limits: {{{limits}}}\ntimeouts: {{stop: 500ms}}\nmodels:\n{models}"
        ))?;
        home.write("neighbour.yaml", profile(3.0))?;
        home.write("echo.yaml", profile(if self == Self::Slow { 200.0 } else { 2.0 }))?;
        match self {
            Self::Lying => home.set_worker(&liar()?)?,
            Self::Confined => confine(&mut home, 6144)?,
            Self::Closed => set_permissions(home.path(), Permissions::from_mode(0o755))?,
            Self::Unread => home.set_env("RUST_LOG", "trace"),
            _ => {}
        }
        Ok(home)
    }

    /// Starts a server, and waits until it is ready. Reads its log until `unread` is set.
    pub(super) async fn server(self, unread: &Arc<AtomicBool>) -> AnyResult<ServerUnderTest> {
        let home = self.home()?;
        if self != Self::Unread {
            return Ok(ServerUnderTest::start_ready(home).await?);
        }
        let (log, stderr) = pipe()?;
        let (file, unread) = (File::create(home.log_path())?, Arc::clone(unread));
        thread::spawn(move || copy_log(log, file, &unread));
        let mut server = ServerUnderTest::start_with_stderr(home, None, stderr.into())?;
        server.wait_ready().await?;
        Ok(server)
    }
}

/// Copies a log to a file until `unread` is set. Returns the reader, which keeps the pipe open.
fn copy_log(mut log: PipeReader, mut file: File, unread: &AtomicBool) -> Option<PipeReader> {
    let mut piece = vec![0; 64 << 10];
    while !unread.load(Relaxed) {
        let read = log.read(&mut piece).ok().filter(|read| *read > 0)?;
        file.write_all(&piece[..read]).ok()?;
    }
    Some(log)
}
