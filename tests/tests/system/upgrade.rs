//! One supervisor takes over from another, and what becomes of those that fail at it.
#![allow(clippy::unwrap_used, reason = "a test's set-up that fails has failed the test")]

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{Error, Home};
use shadowslice_tests::load::Outcome;
use shadowslice_tests::process::{Process, descendants};
use shadowslice_tests::server::Server;

use crate::scene::{EMULATED, ask, echo, echo_case};

const MODELS: &str = "model_control: explicit\nmodels:\n";

fn home() -> Result<Home, Error> {
    let models: String =
        ["a", "b"].map(|name| format!("  - {}\n", echo(name, "share: {initial: 40%}"))).concat();
    let adaptive = EMULATED.replace("static", "adaptive");
    Home::with_config(&format!("{adaptive}{MODELS}{models}"))
}

/// What the command says where no other supervisor takes over.
async fn refused(server: &Server) -> String {
    let output = server.home().run(&["upgrade"]).await.unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn what_is_known_goes_on_also_after_a_kill() {
    let mut server = Server::ready(home().unwrap()).await.unwrap();
    server.resize("a", 20).await.unwrap();
    server.said(&["drain", "b"]).await.unwrap();
    let known = server.home().run_dir().join("private/known.json");
    let before = server.upgrade().await.unwrap();
    server.wait_gone(before).await.unwrap();
    let a = server.model("a").await.unwrap();
    assert_eq!(a.share_percent, 20);
    let status = server.said(&["status"]).await.unwrap();
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
    server.ended().await.unwrap();
    server.again().unwrap();
    server.wait_model_ready("a").await.unwrap();
    assert_eq!(server.model("a").await.unwrap().share_percent, 20);
    server.wait_model_ready("b").await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn one_that_cannot_serve_changes_nothing() {
    let mut server = Server::ready(home().unwrap()).await.unwrap();
    let config = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    let first = server.process();
    let model = format!("  - {}\n", echo("c", "share: {initial: 10%}"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _taken = std::net::TcpListener::bind(taken).unwrap();
    for (written, why) in [
        ("models: nonsense".to_owned(), "must be a list"),
        (format!("run_dir: /tmp/elsewhere\n{config}"), "an upgrade cannot change run_dir"),
        (config.replace("[]}\n", "[], unknown: 1}\n"), "unknown key"),
        // By then it has the other sockets.
        (config.replace("metrics: []", &format!("metrics: [\"{taken}\"]")), "cannot listen on"),
    ] {
        server.home().write("config.yaml", &written).unwrap();
        let said = refused(&server).await;
        assert!(said.contains(why), "{said}");
        assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, Outcome::Right);
        assert_alone(&server, &config).await;
    }
    // One that is not there cannot serve; another one may come.
    let without: String =
        config.lines().filter(|line| !line.contains("name: b")).collect::<Vec<_>>().join("\n");
    server.home().write("config.yaml", format!("{without}\n{model}")).unwrap();
    assert_eq!(server.process(), first);
    let before = server.upgrade().await.unwrap();
    assert_eq!(before, first);
    server.wait_gone(before).await.unwrap();
    assert_eq!(ask(server.client(), "c", &echo_case(1), 0.0).await, Outcome::Right);
    assert_alone(&server, &config).await;
    assert!(server.model("b").await.is_err());
    server.stop().await.unwrap();
}

/// Another supervisor in the same run directory must not come up, nor touch the workers there.
async fn assert_alone(server: &Server, config: &str) {
    let before = server.model("a").await.unwrap().workers[0].pid;
    server.home().write("second.yaml", config).unwrap();
    let config = server.home().path().join("second.yaml");
    let second = server.home().run(&["serve", &config.to_string_lossy()]).await.unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("another supervisor runs in"), "{said}");
    assert_eq!(server.model("a").await.unwrap().workers[0].pid, before);
}

#[tokio::test]
async fn one_that_is_told_to_stop_before_it_serves_ends_and_changes_nothing() {
    let server = Server::ready(home().unwrap()).await.unwrap();
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
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, Outcome::Right);
    assert_alone(&server, &config).await;
    server.stop().await.unwrap();
}

/// The supervisor that this one has started.
async fn successor(server: &Server) -> Process {
    let first = server.process();
    let found = async {
        loop {
            let named = |process: &Process| {
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
async fn one_that_is_killed_before_it_serves_changes_nothing() {
    let server = Server::ready(home().unwrap()).await.unwrap();
    let (said, _) = tokio::join!(refused(&server), async {
        successor(&server).await.signal(Signal::SIGKILL).unwrap();
    });
    assert!(said.contains("the next supervisor exited"), "{said}");
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, Outcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_whose_predecessor_is_killed_serves_at_once() {
    let mut server = Server::ready(home().unwrap()).await.unwrap();
    let (_, next) = tokio::join!(server.home().run(&["upgrade"]), async {
        let next = successor(&server).await;
        // By the first of its workers it has what it needs.
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
    server.wait_ready().await.unwrap();
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, Outcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn what_clients_changed_goes_on_and_nothing_is_changed_while_the_next_one_rises() {
    let mut server = Server::ready(home().unwrap()).await.unwrap();
    server.client().load("a", Some(r#"{"slo": "77ms"}"#)).await.unwrap();
    server.client().load("a", Some(r#"{"batch": {"max": 3}, "slo": "88ms"}"#)).await.unwrap();
    let slo = async |server: &Server| server.model("a").await.unwrap().slo.latency_ms;
    assert_eq!(slo(&server).await, 88.0);

    // A model that starts slowly leaves time to give orders.
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
    assert!(
        refused.0.contains("about to take over") && refused.1.contains("about to take over"),
        "{refused:?}"
    );
    server.wait_gone(before).await.unwrap();
    assert_eq!(slo(&server).await, 88.0);
    let known = std::fs::read_to_string(server.home().run_dir().join("private/known.json")).unwrap();
    assert!(known.contains("batch"), "the other key, too: {known}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_load_that_is_under_way_is_waited_for_and_goes_on() {
    let slow = echo("a", "profile: slow.yaml, share: {initial: 40%}");
    let home = Home::with_config(&format!("{EMULATED}{MODELS}  - {slow}\n")).unwrap();
    let profile = "source: {kind: illustrative}\nstart: {process: 1s, load: 1ms, warm: 1ms}\n\
                   execution_ms: {sms: [132], 1: [1.0]}\n";
    home.write("slow.yaml", profile).unwrap();
    let mut server = Server::ready(home).await.unwrap();
    let mut client = server.client();
    let changes = Some(r#"{"batch": {"max": 3}, "slo": "66ms"}"#);
    let load = tokio::spawn(async move { client.load("a", changes).await });
    server.wait_line(&["a client loads it"]).await.unwrap();
    let before = server.upgrade().await.unwrap();
    load.await.unwrap().unwrap();
    server.wait_gone(before).await.unwrap();
    assert_eq!(server.model("a").await.unwrap().slo.latency_ms, 66.0);
    server.stop().await.unwrap();
}
