//! Attacks by faulty workers and files. An attack runs until it is dropped.

use std::fs::{File, remove_file};
use std::future::pending;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use shadowslice_tests::cases::ClientTensor;
use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::home::{HarnessError, sibling_binary};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::status::{ModelStatusJson, WorkerStatusJson};
use tokio::task::JoinSet;

use super::attacks::Target;
use super::setting::{NEIGHBOUR, OTHER};
use crate::hostile::AnyResult;

/// Returns the script of workers that send invalid messages when a line is written to their pipe.
pub(super) fn liar() -> Result<String, HarnessError> {
    let honest = sibling_binary("shadowslice-worker")?;
    Ok(format!(
        "pipe=$(dirname \"$0\")/lie.$$\nmkfifo \"$pipe\"\n{} \"$@\" &\n\
         while read -r line < \"$pipe\"; do printf nonsense >&3; done",
        honest.display()
    ))
}

/// Calls `act` for each worker of a model that meets the condition `wanted`.
async fn each_worker(
    target: &Target,
    model: &str,
    wanted: impl Fn(&ModelStatusJson, &WorkerStatusJson) -> bool,
    act: impl Fn(i32),
) -> AnyResult<()> {
    let mut last = 0;
    loop {
        let found = |model: &ModelStatusJson| {
            let found = model.workers.iter().find(|worker| worker.pid != last && wanted(model, worker));
            found.map(|worker| worker.pid)
        };
        let model =
            target.server.wait_status(model, "another worker", |model| found(model).is_some()).await?;
        last = found(&model).unwrap_or(last);
        act(last);
        target.done();
    }
}

/// Sends a signal to a worker. Ignores the error if the worker has exited.
fn signal(pid: i32, signal: Signal) {
    ProcessHandle::of(pid).map(|worker| worker.signal(signal));
}

fn is(worker: &WorkerStatusJson, role: &str, phase: &str) -> bool {
    worker.role == role && worker.more["phase"] == phase
}

pub(super) async fn standby(target: &Target, fault: Signal) -> AnyResult<()> {
    let stands = |_: &ModelStatusJson, worker: &WorkerStatusJson| is(worker, "standby", "standing");
    each_worker(target, NEIGHBOUR, stands, |pid| signal(pid, fault)).await
}

pub(super) async fn worker(target: &Target, fault: Signal) -> AnyResult<()> {
    let serves = |_: &ModelStatusJson, worker: &WorkerStatusJson| is(worker, "incumbent", "serving");
    each_worker(target, OTHER, serves, |pid| signal(pid, fault)).await
}

/// Sends requests of rising priority, so that each request overtakes the earlier ones.
async fn send_rising_priorities(client: InferGrpcClient) {
    let mut asking = JoinSet::new();
    for priority in (1..1_000_000).rev() {
        let mut client = client.clone();
        asking.spawn(async move {
            let input = ClientTensor::fp32("x", &[1, 1], &[priority as f32]);
            // After several deaths, requests that kill workers are refused. The result is therefore
            // ignored.
            drop(client.infer_with_priority(OTHER, &[input], priority).await);
        });
        if asking.len() > 16 {
            asking.join_next().await;
        }
    }
    pending().await
}

/// Kills or stops each worker that is executing a request.
pub(super) async fn bad_inputs(target: &Target, fault: Signal) -> AnyResult<()> {
    let executes = |model: &ModelStatusJson, worker: &WorkerStatusJson| {
        is(worker, "incumbent", "serving") && model.more["in_flight"].as_u64() >= Some(1)
    };
    tokio::select! {
        () = send_rising_priorities(target.server.client()) => Ok(()),
        struck = each_worker(target, OTHER, executes, |pid| signal(pid, fault)) => struck,
    }
}

/// Makes each serving worker send invalid messages.
pub(super) async fn lies(target: &Target) -> AnyResult<()> {
    let serves = |_: &ModelStatusJson, worker: &WorkerStatusJson| is(worker, "incumbent", "serving");
    let lie = |pid: i32| {
        let pipe = target.server.home().path().join(format!("bin/lie.{pid}"));
        // The worker may have exited, so the error is ignored.
        let written = File::options().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(pipe);
        drop(written.and_then(|mut pipe| pipe.write_all(b"lie\n")));
    };
    tokio::select! {
        () = send_rising_priorities(target.server.client()) => Ok(()),
        lied = each_worker(target, OTHER, serves, lie) => lied,
    }
}

/// Replaces the configuration file with a pipe to which no process writes, and reloads the
/// configuration.
pub(super) async fn fifo(target: &Target) -> AnyResult<()> {
    let home = target.server.home();
    let config = home.path().join("config.yaml");
    remove_file(&config)?;
    mkfifo(&config, Mode::S_IRWXU)?;
    loop {
        target.done();
        if home.run(&["reload"]).await?.status.success() {
            return Err("the reload of a pipe succeeded".into());
        }
    }
}
