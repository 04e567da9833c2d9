//! Tests with blocked files, sockets and logs. Only operations that use a blocked file, socket or
//! log may wait.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::{mkfifo, pipe};
use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;
use tokio::time::timeout;

use crate::fixtures::{ask, echo, echo_case, one_echo};
use crate::metrics::scrape;

#[tokio::test]
async fn a_reload_of_an_unreadable_configuration_times_out_and_a_later_one_works() {
    let mut server = one_echo(1.0, "share: {initial: 50%}").await.unwrap();
    let config = server.home().path().join("config.yaml");
    let text = std::fs::read(&config).unwrap();
    std::fs::remove_file(&config).unwrap();
    mkfifo(&config, Mode::S_IRWXU).unwrap();
    let reload = async || {
        let output = server.home().run(&["reload"]).await.unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, why) = reload().await;
    assert!(code == Some(1) && why.contains("reading the files timed out after 10 s"), "{why}");
    let (code, why) = reload().await;
    assert!(code == Some(1) && why.contains("earlier read"), "{why}");
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    // Closing the write end of the pipe ends the blocked read.
    drop(File::options().write(true).open(&config).unwrap());
    std::fs::remove_file(&config).unwrap();
    std::fs::write(&config, text).unwrap();
    let ended = async { while reload().await.0 != Some(0) {} };
    timeout(server.home().timeout(), ended).await.unwrap();
    server.wait_ready().await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn systemd_is_notified_of_start_watchdog_and_stop() {
    let mut home = Home::with_config(&format!(
        "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: []}}\n\
         gpus: [{{device: emulated, sms: 132}}]\nmodels:\n  - {}\n",
        echo("echo", "share: {initial: 50%}")
    ))
    .unwrap();
    let path = home.path().join("notify.sock");
    let socket = tokio::net::UnixDatagram::bind(&path).unwrap();
    home.set_env("NOTIFY_SOCKET", &path);
    home.set_env("WATCHDOG_USEC", "300000");
    let mut server = ServerUnderTest::start(home, None).unwrap();
    server.wait_ready().await.unwrap();
    let receive = async |wanted: &str| {
        let mut message = [0; 256];
        loop {
            let length = timeout(Duration::from_secs(10), socket.recv(&mut message)).await.unwrap().unwrap();
            if std::str::from_utf8(&message[..length]).unwrap().contains(wanted) {
                break;
            }
        }
    };
    receive("READY=1").await;
    receive("WATCHDOG=1").await;
    receive("WATCHDOG=1").await;
    let stopped = tokio::spawn(server.stop());
    receive("STOPPING=1").await;
    stopped.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_status_without_a_reply_times_out() {
    let home = Home::with_config("models: 7").unwrap();
    std::fs::create_dir_all(home.run_dir()).unwrap();
    let _listens = UnixListener::bind(home.run_dir().join("control.sock")).unwrap();
    let output = timeout(Duration::from_secs(30), home.run(&["status"])).await.unwrap().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(69) && why.contains("did not answer within 10 s"), "{why}");
}

/// Makes a pipe whose buffer is full, and returns both ends.
fn full_pipe() -> io::Result<(OwnedFd, File)> {
    let (unread, full) = pipe()?;
    let mut full = File::from(full);
    fcntl(&full, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    while full.write(&[b'-'; 4096]).is_ok() {}
    while full.write(b"-").is_ok() {}
    fcntl(&full, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok((unread, full))
}

#[tokio::test]
async fn an_unread_log_blocks_nothing_else() {
    let (_unread, full) = full_pipe().unwrap();
    let mut home = Home::with_config(&format!(
        "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\nmodels:\n  - {}\n",
        echo("echo", "share: {initial: 50%}")
    ))
    .unwrap();
    home.set_env("RUST_LOG", "trace");
    let mut server = ServerUnderTest::start_with_stderr(home, None, full.into()).unwrap();
    server.wait_ready().await.unwrap();
    let mut dropped = 0.0;
    for round in 0..4 {
        let worker = server.model("echo").await.unwrap().workers[0].pid;
        let [killed] = server.children()[..] else { panic!("one worker") };
        assert_eq!(killed.pid, worker);
        killed.signal(Signal::SIGKILL).unwrap();
        let replaced = |model: &shadowslice_tests::status::ModelStatusJson| {
            model.state == "ready" && model.workers.iter().all(|other| other.pid != worker)
        };
        server.wait_status("echo", "another worker", replaced).await.unwrap();
        for _ in 0..400 {
            assert_eq!(
                ask(server.client(), "echo", &echo_case(1), 0.0).await,
                RequestOutcome::Right,
                "{round}"
            );
        }
        dropped = scrape(&server, "metrics.sock")
            .await
            .unwrap()
            .named("shadowslice_log_lines_dropped_total")
            .unwrap();
    }
    assert!(dropped > 0.0, "the queue of log lines overflowed");
    timeout(Duration::from_secs(20), server.stop()).await.unwrap().unwrap();
}
