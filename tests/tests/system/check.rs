//! `shadowslice check` finds what a start would find.
#![allow(clippy::unwrap_used, reason = "a helper of tests fails its test")]

use shadowslice_tests::cases::models_folder;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::Server;

async fn check(home: &Home, text: &str) -> (i32, String) {
    let file = home.write("checked.yaml", text).unwrap();
    let output = home.command(&["check", file.to_str().unwrap()]).unwrap().output().await.unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test]
async fn what_this_host_lacks_is_found_and_said_to_be_about_this_host() {
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
        ("2:66: listen.http[0].group", "there is no group `no-group`"),
        ("3:19: control.users[0]", "there is no user `no-user`"),
        ("4:26: model_control.groups[0]", "there is no group `no-group`"),
        ("5:34: limits.shared_memory.users[0]", "there is no user `no-user`"),
        ("5:53: limits.shared_memory.groups[0]", "there is no group `no-group`"),
        ("models[0].cpus[1]", "there is no core 1023; there are 0-"),
    ] {
        let told = said.lines().any(|line| line.contains(&format!("{place}: on this host {what}")));
        assert!(told, "no {place}: {what} in\n{said}");
    }
    assert_eq!(said.lines().count(), 6, "{said}");
    let fine = text("root", "root", 0).replace("[0, 0]", "[0]");
    assert_eq!(check(&home, &fine).await, (0, String::new()));
}

#[tokio::test]
async fn files_that_are_no_models_and_inputs_that_are_none_are_found() {
    let home = Home::new().unwrap();
    let whole = std::fs::read(models_folder().join("digits.onnx")).unwrap();
    home.write("whole.onnx", &whole).unwrap();
    home.write("cut.onnx", &whole[..whole.len() / 2]).unwrap();
    home.write("page.onnx", "<!DOCTYPE html>\n<html>404</html>\n").unwrap();
    home.write("pointer.onnx", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
        .unwrap();
    home.write("text.onnx", "this is no model").unwrap();
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
        "models[0].path: CUT cannot be used: it is truncated",
        "models[1].path: PAGE cannot be used: it is a web page",
        "models[2].path: POINTER cannot be used: it is a pointer of Git LFS; run `git lfs pull`",
        "models[3].path: TEXT cannot be used: it is no ONNX model",
        "models[4].path: EMPTY cannot be used: it is empty",
        "models[5].path: FOLDER cannot be used: it is a directory",
        "models[6].warmup.pixels: the model has no such input; its file has image",
    ];
    for (line, (wanted, name)) in said.lines().zip(wanted.iter().zip(names)) {
        let file = home.path().join(format!("{name}.onnx")).display().to_string();
        let wanted = wanted.replace(&name.to_uppercase(), &file);
        assert!(line.contains(&wanted), "{line}\ninstead of {wanted}");
    }
    assert_eq!(said.lines().count(), wanted.len(), "{said}");
}

#[tokio::test]
async fn a_file_that_says_the_same_in_another_form_changes_nothing_at_a_reload() {
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
    let server = Server::ready(home).await.unwrap();
    let workers = || server.children().into_iter().map(|child| child.pid).collect::<Vec<_>>();
    let before = workers();
    let printed = server.said(&["check", "--print", "config.yaml"]).await.unwrap();
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
        let said = server.said(&["reload"]).await.unwrap();
        assert!(said.contains("config.yaml: 0 changed, 2 unchanged"), "{said} for\n{form}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(workers(), before, "no worker was replaced");
    server.stop().await.unwrap();
}

fn home_write(server: &Server, name: &str, text: &str) {
    server.home().write(name, text).expect("the folder takes files");
}
