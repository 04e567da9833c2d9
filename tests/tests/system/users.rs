//! Tests of workers that run as separate users, which requires a supervisor that runs as root.

use std::os::unix::fs::MetadataExt;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, ask, echo, echo_case, profile};

fn with_users(users: &str) -> Result<Home, HarnessError> {
    let models = ["a", "b"].map(|name| format!("  - {}\n", echo(name, "profile: profile.yaml")));
    let yaml = format!("{EMULATED}workers: {{users: {users}}}\nmodels:\n{}", models.concat());
    let home = Home::with_config(&yaml)?;
    home.write("profile.yaml", profile(5.0))?;
    Ok(home)
}

/// Returns the user IDs and the group IDs of a process.
fn user_of(pid: i32) -> (String, String) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let of =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?").trim().to_owned();
    (of("Uid:"), of("Groups:"))
}

#[tokio::test]
async fn each_model_has_its_own_user() {
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("skipped: only root can run workers as other users");
        return;
    }
    let server = ServerUnderTest::start_ready(with_users("61000-61001").unwrap()).await.unwrap();
    let mut users = Vec::new();
    for name in ["a", "b"] {
        assert_eq!(ask(server.client(), name, &echo_case(3), 0.0).await, RequestOutcome::Right);
        server.resize(name, 20).await.unwrap();
        let model = server.wait_status(name, "one worker", |model| model.workers.len() == 1).await.unwrap();
        let (uids, groups) = user_of(model.workers[0].pid);
        let uids: Vec<_> = uids.split_whitespace().collect();
        assert!(uids.iter().all(|uid| *uid == uids[0]) && groups.is_empty(), "{uids:?} {groups}");
        users.push(uids[0].to_owned());
        // The supervisor must be able to kill a worker of another user.
        let worker = ProcessHandle::of(model.workers[0].pid).unwrap();
        worker.signal(Signal::SIGSTOP).unwrap();
        let gone = |model: &ModelStatusJson| {
            model.state == "ready"
                && model.workers.iter().all(|other| ProcessHandle::of(other.pid) != Some(worker))
        };
        server.wait_status(name, "another worker", gone).await.unwrap();
    }
    users.sort_unstable();
    assert_eq!(users, ["61000", "61001"]);
    server.stop().await.unwrap();
}
