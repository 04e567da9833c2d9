//! Tests of `shadowslice top` with and without a terminal.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{echo, home, load, unwrapped};
use crate::terminal::Terminal;

const USUAL: (u16, u16) = (80, 24);
const SMALL: (u16, u16) = (40, 10);
const ARGUMENTS: [&str; 3] = ["top", "--interval", "200ms"];
const KEYS: &str = "q quits, j/k or arrows select a model";

/// Returns the row of the model `echo`.
fn row(screen: &str) -> Vec<&str> {
    let row = screen.lines().find(|line| line.starts_with("echo "));
    row.unwrap_or_default().split_whitespace().collect()
}

#[tokio::test]
async fn top_shows_the_load_follows_sizes_and_restarts_and_restores_the_terminal() {
    let home = home(&[echo("echo", "share: {initial: 50%}")]).unwrap();
    let run_dir = home.run_dir();
    let yaml = fs::read_to_string(home.path().join("config.yaml")).unwrap();
    let mut first = ServerUnderTest::start_ready(home).await.unwrap();
    let mut top = Terminal::run(first.home(), &ARGUMENTS, USUAL).unwrap();
    let idle = |screen: &str| {
        let whole = screen.lines().nth(23) == Some(KEYS) && screen.contains("memory unknown");
        whole && row(screen).starts_with(&["echo", "a", "ready", "50%", "66", "shadow", "idle"])
    };
    let screen = top.shows("an idle model", idle).await.unwrap();
    assert!(screen.contains("shares aaaa"), "{screen}");

    let asking = load(&first, "echo", 50.0, Duration::from_secs(600));
    let busy = |screen: &str| {
        let rate: Option<f64> = row(screen).get(6).and_then(|rate| rate.parse().ok());
        rate.is_some_and(|rate| rate > 1.0) && row(screen).get(9) != Some(&"-")
    };
    top.shows("a rate and latencies", busy).await.unwrap();
    top.resize(SMALL).unwrap();
    let small = |screen: &str| screen.lines().nth(9) == Some(KEYS) && row(screen).len() >= 5;
    top.shows("a small screen", small).await.unwrap();
    top.resize(USUAL).unwrap();
    let usual = |screen: &str| screen.lines().nth(23) == Some(KEYS) && busy(screen);
    top.shows("a usual screen", usual).await.unwrap();

    first.signal(Signal::SIGKILL).unwrap();
    asking.abort();
    first.wait_exit().await.unwrap();
    let gone = |screen: &str| screen.contains("no supervisor for") && row(screen).contains(&"50%");
    top.shows("the loss of the supervisor", gone).await.unwrap();
    let second = Home::with_config(&format!("run_dir: {}\n{yaml}", run_dir.display())).unwrap();
    let second = ServerUnderTest::start(second, None).unwrap();
    top.shows("the return of the supervisor", idle).await.unwrap();
    top.types("q").unwrap();
    let (status, left) = top.wait_exit().await.unwrap();
    assert_eq!((status.code(), left), (Some(0), vec![]));
    second.stop().await.unwrap();
}

#[tokio::test]
async fn top_restores_the_terminal_whatever_ends_it() {
    let home = Home::new().unwrap();
    let waits = |screen: &str| screen.contains("cannot reach a supervisor");
    for (keys, code) in [("\u{1b}", 0), ("\u{3}", 0)] {
        let mut top = Terminal::run(&home, &ARGUMENTS, USUAL).unwrap();
        top.shows("the reason for an empty screen", waits).await.unwrap();
        top.types(keys).unwrap();
        let (status, left) = top.wait_exit().await.unwrap();
        assert_eq!((status.code(), left), (Some(code), vec![]), "{keys:?}");
    }
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129)] {
        let mut top = Terminal::run(&home, &ARGUMENTS, USUAL).unwrap();
        top.shows("the reason for an empty screen", waits).await.unwrap();
        top.signal(signal).unwrap();
        let (status, left) = top.wait_exit().await.unwrap();
        assert_eq!((status.code(), left), (Some(code), vec![]), "{signal}");
    }
}

#[tokio::test]
async fn without_a_terminal_top_prints_a_page() {
    let home = home(&[echo("one", "share: {initial: 50%}"), echo("two", "share: {initial: 25%}")]).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let own = format!("supervisor {}, pid {}, up ", env!("CARGO_PKG_VERSION"), server.process().pid);
    for arguments in [&ARGUMENTS[..], &["top", "--once", "--interval", "100ms"]] {
        let page = server.command_output(arguments).await.unwrap();
        assert_eq!(page.lines().find(|line| line.chars().count() > 80), None, "{page}");
        let page = unwrapped(&page);
        for part in [
            own.as_str(),
            "one a ready 50% 66 shadow idle",
            "one (a) on GPU 0: ready",
            "two (b) on GPU 0: ready",
        ] {
            assert!(page.contains(part), "no {part} in {page}");
        }
    }
    for command in ["status", "plan"] {
        let table = server.command_output(&[command]).await.unwrap();
        assert_eq!(table.lines().find(|line| line.chars().count() > 80), None, "{table}");
    }
    server.stop().await.unwrap();
    let alone = Home::new().unwrap().run(&["top", "--once"]).await.unwrap();
    assert_eq!(alone.status.code(), Some(69));
    let wrong = Home::new().unwrap().run(&["top", "--interval", "5ms"]).await.unwrap();
    assert_eq!(wrong.status.code(), Some(64));
}
