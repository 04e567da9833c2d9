//! Tests of upgrades. One supervisor must take over from another, and a failed upgrade must change
//! nothing.
#![allow(clippy::unwrap_used, reason = "a failed set-up fails the test")]

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::{ProcessHandle, descendants};
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{EMULATED, ask, echo, echo_case};

const MODELS: &str = "model_control: explicit\nmodels:\n";

fn home() -> Result<Home, HarnessError> {
    let models: String =
        ["a", "b"].map(|name| format!("  - {}\n", echo(name, "share: {initial: 40%}"))).concat();
    let adaptive = EMULATED.replace("static", "adaptive");
    Home::with_config(&format!("{adaptive}{MODELS}{models}"))
}

/// Runs an upgrade that must fail, and returns its error message.
async fn refused(server: &ServerUnderTest) -> String {
    let output = server.home().run(&["upgrade"]).await.unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn the_persisted_state_survives_upgrades_and_a_kill() {
    let mut server = ServerUnderTest::start_ready(home().unwrap()).await.unwrap();
    server.resize("a", 20).await.unwrap();
    server.command_output(&["drain", "b"]).await.unwrap();
    let known = server.home().run_dir().join("private/state.json");
    let before = server.upgrade().await.unwrap();
    server.wait_gone(before).await.unwrap();
    let a = server.model("a").await.unwrap();
    assert_eq!(a.share_percent, 20);
    let status = server.command_output(&["status"]).await.unwrap();
    assert!(status.contains("a is held at 20%"), "{status}");
    let own = server.status().await.unwrap().supervisor;
    assert_eq!((own.pid, own.config), (server.process().pid, server.home().path().join("config.yaml")));
    let b = server.model("b").await.unwrap();
    assert_eq!(b.more["drained"], true, "{b:?}");
    server.client().unload("b").await.unwrap();
    let before = server.upgrade().await.unwrap();
    server.wait_gone(before).await.unwrap();
    assert_eq!(server.model("b").await.unwrap().state, "unloaded");

    let written = async {
        while !std::fs::read_to_string(&known).is_ok_and(|text| text.contains("\"unloaded\":true")) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), written).await.unwrap();
    server.signal(Signal::SIGKILL).unwrap();
    server.wait_exit().await.unwrap();
    server.restart().unwrap();
    server.wait_model_ready("a").await.unwrap();
    assert_eq!(server.model("a").await.unwrap().share_percent, 20);
    server.wait_model_ready("b").await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_next_supervisor_that_cannot_serve_changes_nothing() {
    let mut server = ServerUnderTest::start_ready(home().unwrap()).await.unwrap();
    let config = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    let first = server.process();
    let model = format!("  - {}\n", echo("c", "share: {initial: 10%}"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _taken = std::net::TcpListener::bind(taken).unwrap();
    for (written, why) in [
        ("models: nonsense".to_owned(), "must be a list"),
        (format!("run_dir: /tmp/elsewhere\n{config}"), "an upgrade cannot change run_dir"),
        (config.replace("[]}\n", "[], unknown: 1}\n"), "unknown key"),
        // When this error occurs, the next supervisor already has the other sockets.
        (config.replace("metrics: []", &format!("metrics: [\"{taken}\"]")), "cannot listen on"),
    ] {
        server.home().write("config.yaml", &written).unwrap();
        let said = refused(&server).await;
        assert!(said.contains(why), "{said}");
        assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, RequestOutcome::Right);
        assert_alone(&server, &config).await;
    }
    // An upgrade may remove a model and add another one.
    let without: String =
        config.lines().filter(|line| !line.contains("name: b")).collect::<Vec<_>>().join("\n");
    server.home().write("config.yaml", format!("{without}\n{model}")).unwrap();
    assert_eq!(server.process(), first);
    let before = server.upgrade().await.unwrap();
    assert_eq!(before, first);
    server.wait_gone(before).await.unwrap();
    assert_eq!(ask(server.client(), "c", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_alone(&server, &config).await;
    assert!(server.model("b").await.is_err());
    server.stop().await.unwrap();
}

/// Checks that a second supervisor in the same run directory fails and does not affect the workers.
async fn assert_alone(server: &ServerUnderTest, config: &str) {
    let before = server.model("a").await.unwrap().workers[0].pid;
    server.home().write("second.yaml", config).unwrap();
    let config = server.home().path().join("second.yaml");
    let second = server.home().run(&["serve", &config.to_string_lossy()]).await.unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("another supervisor runs in"), "{said}");
    assert_eq!(server.model("a").await.unwrap().workers[0].pid, before);
}

#[tokio::test]
async fn a_next_supervisor_that_is_stopped_before_it_serves_changes_nothing() {
    let server = ServerUnderTest::start_ready(home().unwrap()).await.unwrap();
    let slow = "source: {kind: illustrative}\nstart: {process: 5s, load: 1ms, warm: 1ms}\n\
                execution_ms: {sms: [132], 1: [1.0]}\n";
    server.home().write("slow.yaml", slow).unwrap();
    let config = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    let model = echo("c", "profile: slow.yaml, share: {initial: 10%}");
    server.home().write("config.yaml", format!("{config}  - {model}\n")).unwrap();
    let (said, again) = tokio::join!(refused(&server), async {
        let next = successor(&server).await;
        while descendants(next.pid).is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let again = refused(&server).await;
        next.signal(Signal::SIGTERM).unwrap();
        again
    });
    assert!(again.contains("already in progress"), "{again}");
    assert!(said.contains("the next supervisor exited"), "{said}");
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_alone(&server, &config).await;
    server.stop().await.unwrap();
}

/// Waits for the supervisor that this supervisor starts, and returns it.
async fn successor(server: &ServerUnderTest) -> ProcessHandle {
    let first = server.process();
    let found = async {
        loop {
            let named = |process: &ProcessHandle| {
                std::fs::read_to_string(format!("/proc/{}/comm", process.pid))
                    .is_ok_and(|name| name == "shadowslice\n")
            };
            if let Some(found) =
                server.children().into_iter().find(|process| *process != first && named(process))
            {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_next_supervisor_that_is_killed_before_it_serves_changes_nothing() {
    let server = ServerUnderTest::start_ready(home().unwrap()).await.unwrap();
    let (said, _) = tokio::join!(refused(&server), async {
        successor(&server).await.signal(Signal::SIGKILL).unwrap();
    });
    assert!(said.contains("the next supervisor exited"), "{said}");
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_next_supervisor_whose_predecessor_is_killed_serves_at_once() {
    let mut server = ServerUnderTest::start_ready(home().unwrap()).await.unwrap();
    let (_, next) = tokio::join!(server.home().run(&["upgrade"]), async {
        let next = successor(&server).await;
        // The next supervisor starts its first worker after it has received everything from the
        // previous supervisor.
        let has_begun = async {
            while descendants(next.pid).is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), has_begun).await.unwrap();
        server.signal(Signal::SIGKILL).unwrap();
        next
    });
    server.follow(&next.pid.to_string()).unwrap();
    server.wait_line(&["exited without notice"]).await.unwrap();
    // The host may be ready before each of its models is.
    server.wait_model_ready("a").await.unwrap();
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn changes_by_clients_survive_an_upgrade_and_new_ones_are_refused_meanwhile() {
    let mut server = ServerUnderTest::start_ready(home().unwrap()).await.unwrap();
    server.client().load("a", Some(r#"{"slo": "77ms"}"#)).await.unwrap();
    server.client().load("a", Some(r#"{"share": {"max": "91%"}, "slo": "88ms"}"#)).await.unwrap();
    let slo = async |server: &ServerUnderTest| server.model("a").await.unwrap().slo.latency_ms;
    assert_eq!(slo(&server).await, 88.0);

    // The slow start leaves time to send commands.
    let config = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    let slow = echo("c", "profile: slow.yaml, share: {initial: 10%}");
    let profile = "source: {kind: illustrative}\nstart: {process: 3s, load: 1ms, warm: 1ms}\n\
                   execution_ms: {sms: [132], 1: [1.0]}\n";
    server.home().write("slow.yaml", profile).unwrap();
    server.home().write("config.yaml", format!("{config}  - {slow}\n")).unwrap();
    let before = server.process();
    let (upgraded, refused) = tokio::join!(server.home().run(&["upgrade"]), async {
        server.wait_line(&["starting the next supervisor"]).await.unwrap();
        let resized = server.home().run(&["resize", "a", "20%"]).await.unwrap();
        let loaded = server.client().load("a", None).await.unwrap_err();
        (String::from_utf8_lossy(&resized.stderr).into_owned(), loaded.message().to_owned())
    });
    let upgraded = upgraded.unwrap();
    assert!(upgraded.status.success(), "{upgraded:?}");
    server.follow(&String::from_utf8_lossy(&upgraded.stdout)).unwrap();
    assert!(refused.0.contains("is taking over") && refused.1.contains("is taking over"), "{refused:?}");
    server.wait_gone(before).await.unwrap();
    assert_eq!(slo(&server).await, 88.0);
    let known = std::fs::read_to_string(server.home().run_dir().join("private/state.json")).unwrap();
    assert!(known.contains("91%"), "the other key is kept as well: {known}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_upgrade_waits_for_a_running_load() {
    let slow = echo("a", "profile: slow.yaml, share: {initial: 40%}");
    let home = Home::with_config(&format!("{EMULATED}{MODELS}  - {slow}\n")).unwrap();
    let profile = "source: {kind: illustrative}\nstart: {process: 1s, load: 1ms, warm: 1ms}\n\
                   execution_ms: {sms: [132], 1: [1.0]}\n";
    home.write("slow.yaml", profile).unwrap();
    let mut server = ServerUnderTest::start_ready(home).await.unwrap();
    let mut client = server.client();
    let changes = Some(r#"{"share": "30%", "slo": "66ms"}"#);
    let load = tokio::spawn(async move { client.load("a", changes).await });
    server.wait_line(&["a client loads a model"]).await.unwrap();
    let before = server.upgrade().await.unwrap();
    load.await.unwrap().unwrap();
    server.wait_gone(before).await.unwrap();
    assert_eq!(server.model("a").await.unwrap().slo.latency_ms, 66.0);
    server.stop().await.unwrap();
}
