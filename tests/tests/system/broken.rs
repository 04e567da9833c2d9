//! Tests with broken models, files and configurations. The other models must still serve, and the
//! operator must get the reason.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::Signal;
use shadowslice_tests::cases::{NO_OPERATORS, models_folder};
use shadowslice_tests::home::{HarnessError, Home, sibling_binary};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{EMULATED, ask, echo, echo_case, home, one_echo, unwrapped};

/// Runs `serve` with the configuration of a folder until it exits. Returns the exit code and
/// stderr.
async fn refused(home: &Home) -> Result<(Option<i32>, String), HarnessError> {
    let output = home.run(&["serve", "config.yaml"]).await?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn with_a_broken_one() -> Result<Home, HarnessError> {
    let models = [
        echo("echo", "share: {initial: 50%}"),
        "{name: nonsense, path: nonsense.onnx, slo: 50ms}".into(),
        "{name: missing, path: missing.onnx, slo: 50ms}".into(),
    ];
    let home = home(&models)?;
    home.write("nonsense.onnx", NO_OPERATORS)?;
    Ok(home)
}

#[tokio::test]
async fn other_models_serve_beside_broken_ones_and_status_gives_the_reason() {
    let mut server = ServerUnderTest::start(with_a_broken_one().unwrap(), None).unwrap();
    server.wait_model_ready("echo").await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    for name in ["nonsense", "missing"] {
        let why = |model: &shadowslice_tests::status::ModelStatusJson| {
            model.state != "ready" && model.more.values().any(|value| value.to_string().contains(name))
        };
        server.wait_status(name, "unready, with the file in the reason", why).await.unwrap();
        let refused = ask(server.client(), name, &echo_case(1), 0.0).await;
        assert!(
            matches!(&refused, RequestOutcome::Failed(why) if why.starts_with("Unavailable")),
            "{refused:?}"
        );
    }
    // The host counts as ready shortly after its last model has settled.
    server.wait_ready().await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_reload_reads_a_repaired_file_and_reports_a_broken_one_again() {
    let broken = "{name: m, path: m.onnx, slo: 50ms, share: {initial: 50%}}".to_owned();
    let home = home(&[echo("echo", "share: {initial: 50%}"), broken]).unwrap();
    home.write("m.onnx", NO_OPERATORS).unwrap();
    let mut server = ServerUnderTest::start(home, None).unwrap();
    server.wait_model_ready("echo").await.unwrap();
    server.wait_status("m", "unready", |model| model.state == "unready").await.unwrap();
    let output = server.home().run(&["reload"]).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("m: replaced (its files), but not applied"), "{said}");
    server.wait_line(&["action=\"reload\"", "outcome=\"failed\"", "why="]).await.unwrap();
    std::fs::copy(models_folder().join("digits.onnx"), server.home().path().join("m.onnx")).unwrap();
    assert_eq!(server.reload().await.unwrap().changes(), [("m", "replaced")]);
    assert_eq!(server.model("m").await.unwrap().state, "ready");
    assert_eq!(server.reload().await.unwrap().changes(), []);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_loads_as_soon_as_its_broken_file_is_repaired() {
    let broken = "{name: m, path: m.onnx, slo: 50ms, share: {initial: 50%}}".to_owned();
    let home = home(&[echo("echo", "share: {initial: 50%}"), broken]).unwrap();
    home.write("m.onnx", NO_OPERATORS).unwrap();
    let mut server = ServerUnderTest::start(home, None).unwrap();
    server.wait_model_ready("echo").await.unwrap();
    let unready = |model: &shadowslice_tests::status::ModelStatusJson| model.state == "unready";
    server.wait_status("m", "unready", unready).await.unwrap();
    let said = server.home().run(&["status"]).await.unwrap();
    let said = unwrapped(&String::from_utf8_lossy(&said.stdout));
    assert!(said.contains("when its files or its configuration change"), "{said}");
    // The supervisor could read an incomplete file during a copy, so the test renames a complete
    // copy.
    let folder = server.home().path();
    std::fs::copy(models_folder().join("digits.onnx"), folder.join("new")).unwrap();
    std::fs::rename(folder.join("new"), folder.join("m.onnx")).unwrap();
    server.wait_status("m", "ready", |model| model.state == "ready").await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn strict_start_refuses_broken_models() {
    let home = with_a_broken_one().unwrap();
    let yaml = std::fs::read_to_string(home.path().join("config.yaml")).unwrap();
    home.write("config.yaml", format!("start: strict\n{yaml}")).unwrap();
    let (code, said) = refused(&home).await.unwrap();
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("missing.onnx"), "{said}");
}

#[tokio::test]
async fn without_onnx_runtime_the_error_names_the_path() {
    let digits = models_folder().join("digits.onnx");
    let mut home = home(&[format!("{{path: {}, slo: 50ms}}", digits.display())]).unwrap();
    home.set_env("ORT_DYLIB_PATH", "/nowhere/libonnxruntime.so");
    let (code, said) = refused(&home).await.unwrap();
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("/nowhere/libonnxruntime.so"), "{said}");
}

#[tokio::test]
async fn without_a_gpu_the_error_suggests_an_emulated_one() {
    if Path::new("/dev/nvidiactl").try_exists().unwrap() {
        return;
    }
    let home =
        Home::with_config(&format!("models:\n  - {}\n", echo("echo", "share: {initial: 50%}"))).unwrap();
    let (code, said) = refused(&home).await.unwrap();
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("emulated"), "{said}");
}

#[tokio::test]
async fn a_bad_configuration_is_refused_with_its_place() {
    let home = Home::with_config(&format!("{EMULATED}models: []\nnonsense: 1\n")).unwrap();
    let (code, said) = refused(&home).await.unwrap();
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("config.yaml:6:1") && said.contains("nonsense"), "{said}");
}

#[tokio::test]
async fn commands_fail_without_a_supervisor() {
    let home = Home::new().unwrap();
    for command in [vec!["status"], vec!["resize", "echo", "20%"]] {
        let output = home.run(&command).await.unwrap();
        assert_eq!(output.status.code(), Some(69), "{command:?}");
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "), "{command:?}");
    }
}

#[tokio::test]
async fn a_removed_temporary_directory_is_not_needed() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    std::fs::remove_dir_all(server.home().path().join("tmp")).unwrap();
    assert_eq!(server.resize("echo", 30).await.unwrap().outcome.as_deref(), Some("completed"));
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_run_directory_that_is_a_link_is_refused_and_its_target_stays_unchanged() {
    let home = home(&[echo("echo", "share: {initial: 50%}")]).unwrap();
    let elsewhere = home.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, home.run_dir()).unwrap();
    let (code, why) = refused(&home).await.unwrap();
    assert!(code == Some(69) && why.contains("is a link"), "{why}");
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}

#[tokio::test]
async fn workers_that_send_nonsense_at_their_start_harm_nothing() {
    let mut home = home(&[echo("echo", "share: {initial: 50%}")]).unwrap();
    let real = sibling_binary("shadowslice-worker").unwrap();
    let (count, real) = (home.path().join("count"), real.display().to_string());
    // The four workers send a length of 4 GiB, the maximum length with too few bytes, no message,
    // and an invalid message.
    let script = format!(
        "echo >> {count}\ncase $(wc -l < {count}) in\n\
         1) printf '\\377\\377\\377\\377nonsense' >&9; sleep 60 ;;\n\
         2) printf '\\000\\000\\100\\000nonsense' >&9 ;;\n\
         3) exec 9>&- ;;\n\
         4) printf '\\004\\000\\000\\000\\377\\377\\377\\377' >&9; sleep 60 ;;\n\
         *) exec {real} \"$@\" ;;\nesac",
        count = count.display()
    );
    home.set_worker(&script).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    let log = server.log();
    assert_eq!(log.matches("invalid message from the worker").count(), 2, "{log}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_log_that_cannot_be_written_stops_nothing() {
    let mut home = home(&[echo("echo", "share: {initial: 50%}")]).unwrap();
    home.set_log("/dev/full".into());
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    assert_eq!(server.resize("echo", 30).await.unwrap().outcome.as_deref(), Some("completed"));
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

/// Runs a command whose output goes to `out`. Returns its exit code and its stderr.
async fn into(home: &Home, arguments: &[&str], out: impl Into<Stdio>) -> (Option<i32>, String) {
    let mut command = home.command(arguments).expect("the binary exists");
    let child = command.stdout(out).stderr(Stdio::piped()).spawn().expect("the command starts");
    let ended = child.wait_with_output().await.expect("the command exits");
    (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
}

fn full() -> File {
    File::options().write(true).open("/dev/full").expect("a device that is always full")
}

#[tokio::test]
async fn output_that_cannot_be_written_is_an_error_unless_its_reader_has_exited() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let config = server.home().path().join("config.yaml").to_string_lossy().into_owned();
    let commands: [&[&str]; 5] = [
        &["status", "--json"],
        &["plan"],
        &["resize", "echo", "40%"],
        &["check", "--print", &config],
        &["doctor", &config],
    ];
    for arguments in commands {
        let (code, said) = into(server.home(), arguments, full()).await;
        assert!(said.contains("error: cannot write the output"), "{arguments:?}: {said}");
        assert_eq!(code, Some(69), "{arguments:?}: {said}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (code, said) = into(server.home(), arguments, writer).await;
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn errors_that_cannot_be_printed_still_set_the_exit_code() {
    let home = Home::with_config("models: 7\n").unwrap();
    for command in ["check", "serve"] {
        let mut command = home.command(&[command, "config.yaml"]).unwrap();
        let ended = command.stderr(full()).status().await.unwrap();
        assert_eq!(ended.code(), Some(78), "{command:?}");
    }
}

#[tokio::test]
async fn clients_cannot_use_up_the_descriptors_that_a_new_worker_needs() {
    let mut home = home(&[echo("echo", "share: {initial: 50%}")]).unwrap();
    let binary = home.command(&[]).unwrap().as_std().get_program().to_string_lossy().into_owned();
    let script = format!("#!/bin/sh\nulimit -n 140\nexec {binary} \"$@\"\n");
    let script = home.write("limited", script).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    home.set_binary(script);
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let socket = server.home().run_dir().join("http.sock");
    let peers: Vec<_> = (0..200).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let before = server.model("echo").await.unwrap().workers[0].pid;
    let worker = server.children().into_iter().find(|child| child.pid == before).unwrap();
    worker.signal(Signal::SIGKILL).unwrap();
    let another = |model: &shadowslice_tests::status::ModelStatusJson| {
        model.state == "ready" && model.workers.iter().any(|worker| worker.pid != before)
    };
    server.wait_status("echo", "another worker", another).await.unwrap();
    drop(peers);
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}
