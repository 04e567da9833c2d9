//! Tests with many workers that start at the same time on a host with few cores.

use std::pin::pin;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use shadowslice_tests::home::{HarnessError, Home, sibling_binary};
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{ModelStatusJson, StatusJson};

use crate::fixtures::{EMULATED, echo};
use crate::standby::{incumbent, kill};

const MODELS: usize = 12;

/// A timeout that is much longer than one start, but shorter than the starts of all models
/// together.
const TIMEOUTS: &str = "timeouts: {spawn: 2s}\n";

/// A shell command that delays the start of a worker. It holds a lock for 0.25 s, as if the host
/// had only one core.
const SLOW_START: &str = "flock core sleep 0.25";

/// Restricts this thread, and the supervisor that it starts, to two cores.
fn leave_two_cores() -> nix::Result<()> {
    let this = Pid::from_raw(0);
    let all = sched_getaffinity(this)?;
    let mut two = CpuSet::new();
    let own = (0..CpuSet::count()).filter(|core| all.is_set(*core) == Ok(true));
    own.take(2).try_for_each(|core| two.set(core))?;
    sched_setaffinity(this, &two)
}

fn config(names: impl Iterator<Item = String>) -> String {
    let models: String = names.map(|name| format!("  - {}\n", echo(&name, "share: {initial: 5%}"))).collect();
    format!("{EMULATED}{TIMEOUTS}models:\n{models}")
}

fn many() -> impl Iterator<Item = String> {
    (0..MODELS).map(|number| format!("m{number}"))
}

/// Makes a folder with these models. Workers start slowly while the folder contains a file `slow`.
fn home(names: impl Iterator<Item = String>) -> Result<Home, HarnessError> {
    leave_two_cores().expect("a thread may restrict its cores");
    let mut home = Home::with_config(&config(names))?;
    let worker = sibling_binary("shadowslice-worker")?;
    let folder = home.path().display();
    home.set_worker(&format!("cd {folder}\ntest -e slow && {SLOW_START}\nexec {} \"$@\"", worker.display()))?;
    Ok(home)
}

fn waits(model: &ModelStatusJson) -> bool {
    model.more["why"].as_str().is_some_and(|why| why.contains("waits for its turn"))
}

#[tokio::test]
async fn models_that_start_at_once_wait_for_their_turn_and_none_is_killed() {
    let home = home(many()).unwrap();
    home.write("slow", "").unwrap();
    let mut server = ServerUnderTest::start(home, None).unwrap();
    server.wait_up().await.unwrap();
    let last = server.wait_status("m11", "the wait for its turn", waits).await.unwrap();
    assert_eq!((last.state.as_str(), last.workers.len()), ("loading", 0), "{last:?}");
    server.wait_ready().await.unwrap();
    let StatusJson { models, .. } = server.status().await.unwrap();
    for model in models {
        let deaths = model.more["worker_deaths"].as_u64();
        assert_eq!((model.state.as_str(), deaths), ("ready", Some(0)), "{model:?}\n{}", server.log());
    }
    assert!(!server.log().contains("killed"), "{}", server.log());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_restart_does_not_wait_for_models_that_start_for_the_first_time() {
    let first = || std::iter::once("first".to_owned());
    let server = ServerUnderTest::start_ready(home(first()).unwrap()).await.unwrap();
    server.home().write("slow", "").unwrap();
    server.home().write("config.yaml", config(first().chain(many()))).unwrap();
    let restart = async {
        server.wait_line(&["worker started", "model=\"m1\""]).await.unwrap();
        let before = incumbent(&server.model("first").await.unwrap()).unwrap().pid;
        kill(before);
        let next = |model: &ModelStatusJson| incumbent(model).is_some_and(|worker| worker.pid != before);
        server.wait_status("first", "the next worker", next).await.unwrap();
        before
    };
    let reload = async { assert!(server.reload().await.is_ok()) };
    let killed = {
        let (mut restart, mut reload) = (pin!(restart), pin!(reload));
        let killed = tokio::select! {
            killed = &mut restart => killed,
            () = &mut reload => panic!("the reload ended before the restart:\n{}", server.log()),
        };
        reload.await;
        killed
    };
    let log = std::fs::read_to_string(server.home().log_path()).unwrap();
    let (_, after) = log.split_once(&format!("pid={killed} status")).unwrap();
    let started: Vec<&str> = after.lines().filter(|line| line.contains("worker started")).collect();
    let own = started.iter().position(|line| line.contains("model=\"first\""));
    assert!(own.is_some_and(|others| others <= 2), "{own:?} other workers started first:\n{log}");
    server.stop().await.unwrap();
}
