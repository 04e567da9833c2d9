//! Tests that `shadowslice check` finds the errors that a start would find.
#![allow(clippy::unwrap_used, reason = "a failed helper fails the test")]

use std::fs::{Permissions, create_dir, set_permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use nix::unistd::geteuid;
use shadowslice_tests::cases::models_folder;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{EMULATED, echo};

async fn check(home: &Home, text: &str) -> (i32, String) {
    let file = home.write("checked.yaml", text).unwrap();
    let output = home.command(&["check", file.to_str().unwrap()]).unwrap().output().await.unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test]
async fn errors_that_depend_on_the_host_are_reported_as_such() {
    let home = Home::new().unwrap();
    let digits = models_folder().join("digits.onnx");
    let text = |user: &str, group: &str, core: usize| {
        format!(
            "gpus: [{{device: emulated, sms: 132}}]
listen: {{http: [{{address: \"unix:http.sock\", mode: \"0660\", group: {group}}}]}}
control: {{users: [{user}]}}
model_control: {{groups: [{group}, 4242]}}
limits: {{shared_memory: {{users: [{user}], groups: [{group}]}}}}
models: [{{path: {}, slo: 1s, cpus: [0, {core}]}}]
",
            digits.display()
        )
    };
    let (code, said) = check(&home, &text("no-user", "no-group", 1023)).await;
    assert_eq!(code, 78, "{said}");
    for (place, what) in [
        ("2:66: listen.http[0].group", "group `no-group` not found"),
        ("3:19: control.users[0]", "user `no-user` not found"),
        ("4:26: model_control.groups[0]", "group `no-group` not found"),
        ("5:34: limits.shared_memory.users[0]", "user `no-user` not found"),
        ("5:53: limits.shared_memory.groups[0]", "group `no-group` not found"),
        ("models[0].cpus[1]", "core 1023 not found; use cores of 0-"),
    ] {
        let told = said.lines().any(|line| line.contains(&format!("{place}: on this host {what}")));
        assert!(told, "no {place}: {what} in\n{said}");
    }
    assert_eq!(said.lines().count(), 6, "{said}");
    let fine = text("root", "root", 0).replace("[0, 0]", "[0]");
    assert_eq!(check(&home, &fine).await, (0, String::new()));
}

#[tokio::test]
async fn invalid_model_files_and_unknown_inputs_are_found() {
    let home = Home::new().unwrap();
    let whole = std::fs::read(models_folder().join("digits.onnx")).unwrap();
    home.write("whole.onnx", &whole).unwrap();
    home.write("cut.onnx", &whole[..whole.len() / 2]).unwrap();
    home.write("page.onnx", "<!DOCTYPE html>\n<html>404</html>\n").unwrap();
    home.write("pointer.onnx", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
        .unwrap();
    home.write("text.onnx", "this is not a model").unwrap();
    home.write("empty.onnx", "").unwrap();
    std::fs::create_dir(home.path().join("folder.onnx")).unwrap();
    let names = ["cut", "page", "pointer", "text", "empty", "folder", "whole"];
    let models: String = names
        .iter()
        .map(|name| format!("  - {{path: {name}.onnx, slo: 1s, warmup: {{pixels: [8]}}}}\n"))
        .collect();
    let (code, said) = check(&home, &format!("gpus: [{{device: emulated}}]\nmodels:\n{models}")).await;
    assert_eq!(code, 78, "{said}");
    let wanted = [
        "models[0].path: cannot use CUT: the file is truncated",
        "models[1].path: cannot use PAGE: this is a web page",
        "models[2].path: cannot use POINTER: this is a Git LFS pointer; run `git lfs pull`",
        "models[3].path: cannot use TEXT: this is not an ONNX model",
        "models[4].path: cannot use EMPTY: the file is empty",
        "models[5].path: cannot use FOLDER: this is a directory",
        "models[6].warmup.pixels: unknown input; the model has image",
    ];
    for (line, (wanted, name)) in said.lines().zip(wanted.iter().zip(names)) {
        let file = home.path().join(format!("{name}.onnx")).display().to_string();
        let wanted = wanted.replace(&name.to_uppercase(), &file);
        assert!(line.contains(&wanted), "{line}\ninstead of {wanted}");
    }
    assert_eq!(said.lines().count(), wanted.len(), "{said}");
}

#[tokio::test]
async fn an_error_about_an_invalid_profile_does_not_quote_it() {
    let home = Home::new().unwrap();
    for text in ["hunter2\n", "hunter2: {hunter2: hunter2}\nhunter2: 1\n", "hunter2: 1\n[hunter2]\n"] {
        home.write("secret", text).unwrap();
        let echo = echo("echo", "profile: secret, share: {initial: 50%}");
        let (code, said) = check(&home, &format!("{EMULATED}models: [{echo}]\n")).await;
        let is_told = said.contains("/secret:1:1: this is not a profile") || said.contains("not valid YAML");
        assert!(code == 78 && is_told, "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[tokio::test]
async fn an_equivalent_configuration_in_another_form_changes_nothing_at_a_reload() {
    let home = Home::new().unwrap();
    std::fs::create_dir(home.path().join("models")).unwrap();
    for name in ["digits", "encoder"] {
        let file = format!("{name}.onnx");
        std::fs::copy(models_folder().join(&file), home.path().join(file)).unwrap();
    }
    let row = "execution_ms: {sms: [66, 132], 1: [2.0, 1.5]}";
    home.write("profile.yaml", format!("source: {{kind: illustrative}}\n{row}\n")).unwrap();
    let written = "gpus: [{device: emulated}]
listen: {http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: []}
models:
  - {path: digits.onnx, slo: 20ms, profile: profile.yaml, batch: {max: 4}, cpus: [1, 0]}
  - {path: encoder.onnx, slo: 1s, warmup: {input_ids: [16], attention_mask: [16]}}
";
    home.write("config.yaml", written).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let workers = || server.children().into_iter().map(|child| child.pid).collect::<Vec<_>>();
    let before = workers();
    let printed = server.command_output(&["check", "--print", "config.yaml"]).await.unwrap();
    home_write(&server, "profile.yaml", &format!("# Touched.\n{row}\nsource:\n  kind: illustrative\n"));
    let reordered = "# Another form.
models:
- {slo: {percentile: 99, latency: 0.02s}, profile: ./models/../profile.yaml, cpus: [0, 1], path: ./models/../digits.onnx,
   batch: {sizes: [1, 2, 4]}, share: {initial: 50%}, name: digits, priority: 1}
- {warmup: {attention_mask: [16], input_ids: [16]}, slo: 1000ms, path: encoder.onnx}
listen: {metrics: [], grpc: [\"unix:grpc.sock\"], http: [{mode: \"0660\", address: \"unix:http.sock\"}]}
gpus: [{sms: 132, device: emulated}]
timeouts: {stop: 5000ms}
";
    for form in [written, &format!("# A comment.\n\n{written}\n"), &printed, reordered] {
        home_write(&server, "config.yaml", form);
        let said = server.command_output(&["reload"]).await.unwrap();
        assert!(said.contains("config.yaml: 0 changed, 2 unchanged"), "{said} for\n{form}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(workers(), before, "no worker was replaced");
    server.stop().await.unwrap();
}

fn home_write(server: &ServerUnderTest, name: &str, text: &str) {
    server.home().write(name, text).expect("the folder is writable");
}

/// Returns a configuration with an emulated GPU and this run directory.
fn serving_in(run_dir: &Path) -> String {
    let model = echo("echo", "share: {initial: 50%}");
    format!("run_dir: {}\n{EMULATED}models: [{model}]\n", run_dir.display())
}

#[tokio::test]
async fn check_and_serve_refuse_a_run_directory_with_the_same_text_and_create_nothing() {
    let home = Home::new().unwrap();
    let below = |name: &str| home.path().join(name);
    home.write("file", "").unwrap();
    symlink(home.path(), below("link")).unwrap();
    create_dir(below("open")).unwrap();
    set_permissions(below("open"), Permissions::from_mode(0o777)).unwrap();
    let mut names = vec!["file", "file/below", "link", "open"];
    if geteuid().is_root() {
        create_dir(below("foreign")).unwrap();
        chown(below("foreign"), Some(70_001), None).unwrap();
        names.push("foreign");
    }
    for name in names {
        let text = serving_in(&below(name));
        home.write("checked.yaml", &text).unwrap();
        let served = home.run(&["serve", "checked.yaml"]).await.unwrap();
        let served = String::from_utf8(served.stderr).unwrap();
        let why = served.trim_end().rsplit_once("error: cannot serve on this host: ").unwrap().1;
        let (code, said) = check(&home, &text).await;
        assert!(
            code == 78 && said.ends_with(&format!("checked.yaml:1:10: run_dir: on this host {why}\n")),
            "{said}"
        );
    }
    assert_eq!(check(&home, &serving_in(&below("new/below"))).await, (0, String::new()));
    assert!(!below("new").try_exists().unwrap());
    let (code, said) = check(&home, &serving_in(&below(&"long".repeat(30)))).await;
    assert!(code == 78 && said.contains("run_dir: the path is too long for Unix sockets"), "{said}");
}

#[tokio::test]
async fn the_run_directory_of_a_running_supervisor_is_accepted() {
    let home = Home::new().unwrap();
    let text = serving_in(&home.run_dir());
    home.write("config.yaml", &text).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    assert_eq!(check(server.home(), &text).await, (0, String::new()));
    // Other users can write to a directory with mode 0777, so a start would refuse it. `check`
    // accepts this directory, because a running supervisor already uses it.
    set_permissions(server.home().run_dir(), Permissions::from_mode(0o777)).unwrap();
    assert_eq!(check(server.home(), &text).await, (0, String::new()));
    server.stop().await.unwrap();
}

/// Runs `check` as a user without write permission for the folder, if the test runs as root. Any
/// other user owns the folder, so `check` must accept it.
#[tokio::test]
async fn a_run_directory_in_a_read_only_folder_is_refused() {
    let home = Home::new().unwrap();
    set_permissions(home.path(), Permissions::from_mode(0o755)).unwrap();
    let file = home.write("checked.yaml", serving_in(&home.path().join("run"))).unwrap();
    let mut command = home.command(&["check", file.to_str().unwrap()]).unwrap();
    let code = if geteuid().is_root() { Some(78) } else { Some(0) };
    if geteuid().is_root() {
        command.uid(70_005).gid(70_005);
    }
    let output = command.output().await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), code, "{said}");
    let why = "run; choose another run_dir: Permission denied";
    assert_eq!(said.contains(why), code == Some(78), "{said}");
}

#[tokio::test]
async fn a_low_limit_on_open_files_causes_a_note_with_numbers() {
    let home = Home::new().unwrap();
    let file = home
        .write("checked.yaml", format!("{EMULATED}models:\n  - {}\n", echo("echo", "priority: 1")))
        .unwrap();
    let program = home.command(&[]).unwrap().as_std().get_program().to_owned();
    let limited = |limit: u32| {
        let script = format!("ulimit -n {limit}; exec \"$0\" check \"$1\"");
        std::process::Command::new("sh")
            .args(["-c", &script])
            .arg(&program)
            .arg(&file)
            .env("RUNTIME_DIRECTORY", home.run_dir())
            .output()
            .unwrap()
    };
    let few = limited(400);
    let said = String::from_utf8(few.stderr).unwrap();
    assert_eq!(few.status.code(), Some(0), "{said}");
    let wanted = "note: the limit on open files, 400 (ulimit -Hn), leaves 240 of 16384 connections (limits.connections)";
    assert!(said.starts_with(wanted), "{said}");
    assert!(said.contains("raise it to 16544 (LimitNOFILE)"), "{said}");
    assert_eq!(String::from_utf8(limited(16544).stderr).unwrap(), "");
}
