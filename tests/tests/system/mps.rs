//! Tests of supervisors on a simulated GPU under MPS. A stand-in replaces NVIDIA's control program.
//! The workers are clients of the stand-in's server, and use no GPU.
#![allow(clippy::unwrap_used, reason = "a failed set-up fails the test")]

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home, sibling_binary};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::GpuStatusJson;
use tokio::time::{interval, timeout};

use crate::fixtures::{echo, unwrapped};

const UUID: &str = "GPU-00000000-1111-2222-3333-444444444444";

/// Returns the script of a worker. The worker reports the properties of the GPU and computes
/// reference answers on the CPU. Instead of serving, it runs `then` as a client of the MPS server.
fn worker(then: &str) -> String {
    let real = sibling_binary("shadowslice-worker").unwrap();
    format!(
        "if [ \"$1\" = --probe ]; then\n\
           case $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in 1) sms=8;; *) sms=132;; esac\n\
           echo \"{{\\\"sms\\\": $sms, \\\"uuid\\\": \\\"{UUID}\\\", \\\"name\\\": \\\"x\\\", \\\"driver\\\": 13000, \
           \\\"memory_total\\\": 2, \\\"memory_free\\\": 1}}\"; exit\n\
         fi\n\
         [ -n \"$CUDA_VISIBLE_DEVICES\" ] || exec {} \"$@\"\n\
         : > \"$CUDA_MPS_PIPE_DIRECTORY/clients/$$\"\n\
         {then}",
        real.display()
    )
}

fn home(then: &str, partition: &str) -> Result<Home, HarnessError> {
    let mut home = Home::with_config(&format!(
        "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: []}}\n\
         gpus: [{{device: {UUID}, partition: {partition}}}]\n\
         timeouts: {{spawn: 300ms, stop: 1s}}\n\
         models:\n  - {}\n",
        echo("echo", "share: {initial: 30%}")
    ))?;
    home.set_worker(&worker(then))?;
    let orders = home.path().join("orders");
    std::fs::create_dir(&orders)
        .map_err(|source| HarnessError::Io { what: "create a folder".into(), source })?;
    home.set_env("STAND_IN_ORDERS", orders);
    home.set_env("SHADOWSLICE_MPS_CONTROL", sibling_binary("nvidia-cuda-mps-stand-in")?);
    Ok(home)
}

/// Waits until the GPU meets the condition `wanted`, and returns its status.
async fn gpu(server: &ServerUnderTest, wanted: impl Fn(&GpuStatusJson) -> bool) -> GpuStatusJson {
    let looking = async {
        let mut tick = interval(Duration::from_millis(20));
        loop {
            tick.tick().await;
            if let Ok(status) = server.status().await
                && wanted(&status.gpus[0])
            {
                return status.gpus[0].clone();
            }
        }
    };
    let found = timeout(Duration::from_secs(30), looking).await;
    found.map_err(|_| server.log()).unwrap()
}

async fn wait_gone(process: ProcessHandle) {
    let mut tick = interval(Duration::from_millis(20));
    let waiting = async {
        while process.is_alive() {
            tick.tick().await;
        }
    };
    timeout(Duration::from_secs(30), waiting).await.unwrap();
}

fn process_of(pid_file: &Path) -> ProcessHandle {
    ProcessHandle::of(std::fs::read_to_string(pid_file).unwrap().parse().unwrap()).unwrap()
}

#[tokio::test]
async fn a_worker_is_terminated_in_mps_before_it_is_killed() {
    let server = ServerUnderTest::start(home("exec sleep 3600", "mps").unwrap(), None).unwrap();
    let status = gpu(&server, |gpu| gpu.mps_server_pid.is_some()).await;
    assert_eq!((status.backend.as_str(), status.sms, status.why), ("mps", 132, None));
    // The worker never sends its first message, so its start times out.
    let died = |model: &shadowslice_tests::status::ModelStatusJson| {
        model.more["worker_deaths"].as_u64().is_some_and(|deaths| deaths > 0)
    };
    let model = server.wait_status("echo", "a worker that died", died).await.unwrap();
    assert_eq!(model.sms, 38);
    let terminated = std::fs::read_to_string(server.home().path().join("orders/terminated")).unwrap();
    assert!(terminated.lines().all(|line| line.parse::<i32>().is_ok()), "{terminated}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_daemon_exits_with_a_killed_supervisor() {
    let mut server = ServerUnderTest::start(home("exec sleep 3600", "mps").unwrap(), None).unwrap();
    gpu(&server, |gpu| gpu.mps_server_pid.is_some()).await;
    let daemon = process_of(&server.home().run_dir().join("private/mps0/pipe/nvidia-cuda-mps-control.pid"));
    // The supervisor is stopped first, so that it starts no child after the test has read the list.
    server.signal(Signal::SIGSTOP).unwrap();
    let children = server.children();
    server.signal(Signal::SIGKILL).unwrap();
    server.wait_exit().await.unwrap();
    // Real workers exit when the supervisor dies. These workers are shell scripts that run `sleep`,
    // so the test has to kill them.
    let workers_end = async {
        let mut tick = interval(Duration::from_millis(20));
        loop {
            tick.tick().await;
            for child in children.iter().filter(|child| **child != daemon && name(child.pid) == "sleep") {
                child.signal(Signal::SIGKILL).ok();
            }
        }
    };
    tokio::select! {
        () = wait_gone(daemon) => {}
        () = workers_end => {}
    }
}

fn name(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

#[tokio::test]
async fn the_next_supervisor_takes_over_the_daemon_and_a_failing_one_leaves_it() {
    // The daemon waits for its clients, and this worker does not notice the end of its supervisor.
    let mut server = ServerUnderTest::start(home("exec sleep 9", "mps").unwrap(), None).unwrap();
    let first = gpu(&server, |gpu| gpu.mps_server_pid.is_some()).await;
    let daemon = process_of(&server.home().run_dir().join("private/mps0/pipe/nvidia-cuda-mps-control.pid"));
    let before = server.upgrade().await.unwrap();
    server.wait_gone(before).await.unwrap();
    assert!(daemon.is_alive());
    let now = gpu(&server, |gpu| gpu.mps_server_pid.is_some()).await;
    assert_eq!((now.mps_server_pid, now.sms), (first.mps_server_pid, first.sms));

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    let address = format!("http: [\"{}\"]", taken.local_addr().unwrap());
    server.home().write("config.yaml", config.replace("http: []", &address)).unwrap();
    let refused = server.home().run(&["upgrade"]).await.unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("cannot listen on") && refused.status.code() == Some(1), "{said}");
    assert!(daemon.is_alive());
    gpu(&server, |gpu| gpu.mps_server_pid == first.mps_server_pid).await;
    server.signal(Signal::SIGKILL).unwrap();
    wait_gone(daemon).await;
}

#[tokio::test]
async fn models_survive_a_long_outage_of_mps() {
    let server = ServerUnderTest::start(home("exec sleep 3600", "mps").unwrap(), None).unwrap();
    gpu(&server, |gpu| gpu.mps_server_pid.is_some()).await;
    let run_dir = server.home().run_dir();
    let daemon = process_of(&run_dir.join("private/mps0/pipe/nvidia-cuda-mps-control.pid"));
    server.home().write("orders/initializing", "").unwrap();
    daemon.signal(Signal::SIGKILL).unwrap();
    let down = gpu(&server, |gpu| gpu.why.is_some()).await;
    assert!(down.why.unwrap().contains("daemon"), "{}", server.log());
    let before = server.model("echo").await.unwrap();
    // Eight worker deaths would make the model unready, and would take less time than this wait.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let after = server.model("echo").await.unwrap();
    assert_ne!(after.state, "unready", "{}", server.log());
    let deaths =
        |model: &shadowslice_tests::status::ModelStatusJson| model.more["worker_deaths"].as_u64().unwrap();
    assert!(
        deaths(&after) <= deaths(&before) + 1,
        "an outage does not count as a death of the model's worker"
    );
    std::fs::remove_file(server.home().path().join("orders/initializing")).unwrap();
    gpu(&server, |gpu| gpu.why.is_none()).await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_foreign_daemon_is_left_alone_and_reported() {
    let mut home = home("exec sleep 3600", "mps").unwrap();
    let theirs = home.path().join("theirs");
    let mut daemon = tokio::process::Command::new(sibling_binary("nvidia-cuda-mps-stand-in").unwrap());
    daemon.arg("-f").env("CUDA_MPS_PIPE_DIRECTORY", &theirs).kill_on_drop(true);
    let mut daemon = daemon.spawn().unwrap();
    let pid_file = theirs.join("nvidia-cuda-mps-control.pid");
    let mut tick = interval(Duration::from_millis(20));
    while !pid_file.is_file() {
        tick.tick().await;
    }
    home.set_env("CUDA_MPS_PIPE_DIRECTORY", &theirs);
    home.set_env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "1");
    let server = ServerUnderTest::start(home, None).unwrap();
    let gpu = gpu(&server, |gpu| gpu.mps_server_pid.is_some()).await;
    assert_eq!(gpu.sms, 132, "daemons and workers do not inherit the supervisor's MPS variables");
    server.wait_line(&["another MPS control daemon runs on this host"]).await.unwrap();
    server.stop().await.unwrap();
    assert!(matches!(daemon.try_wait(), Ok(None)), "the daemon still runs");
}

#[tokio::test]
async fn without_mps_no_share_is_enforced_and_status_reports_it() {
    let server = ServerUnderTest::start(home("exec sleep 3600", "none").unwrap(), None).unwrap();
    let status = gpu(&server, |_| true).await;
    assert_eq!((status.backend.as_str(), status.sms, status.mps_server_pid), ("none", 132, None));
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.share_percent, model.sms), (30, 132));
    let shown = server.home().run(&["status"]).await.unwrap();
    assert!(unwrapped(&String::from_utf8_lossy(&shown.stdout)).contains("no share is enforced"));
    server.wait_line(&["no share is enforced"]).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn missing_parts_are_reported_with_advice() {
    for (program, partition, says) in
        [("/nowhere/control", "mps", "partition: none"), ("/nowhere/control", "none", "cannot use GPU")]
    {
        let mut home = home("exit 1", partition).unwrap();
        home.set_env("SHADOWSLICE_MPS_CONTROL", program);
        if partition == "none" {
            home.set_worker("echo 'error: libcuda.so.1 cannot be loaded' >&2; exit 69").unwrap();
        }
        let output = home.run(&["serve", "config.yaml"]).await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{said}");
        assert!(said.contains(says), "{said}");
    }
}
