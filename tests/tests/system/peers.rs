//! Tests of access for the users and groups that the configuration lists. Only root can switch to
//! these users.

use std::fs::{Permissions, copy, set_permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use nix::unistd::geteuid;
use shadowslice_tests::home::{HarnessError, Home, sibling_binary};
use shadowslice_tests::server::ServerUnderTest;
use tokio::process::Command;
use tonic::Code;

use crate::fixtures::echo;

/// A user that the configuration lists. The IDs in these tests are not in use on any host.
const ALICE: User = User { uid: "70001", groups: "70009" };
const MEMBER: User = User { uid: "70002", groups: "70008,70005" };
const STRANGER: User = User { uid: "70005", groups: "70001" };

#[derive(Clone, Copy)]
struct User {
    uid: &'static str,
    /// The supplementary groups of the user. The primary group is 70003.
    groups: &'static str,
}

impl User {
    async fn run(self, program: &Path, arguments: &[&str]) -> io::Result<Output> {
        let (uid, groups) = (format!("--reuid={}", self.uid), format!("--groups={}", self.groups));
        let mut command = Command::new("setpriv");
        command.args([&uid, "--regid=70003", &groups]).arg(program).args(arguments).output().await
    }

    /// Sends an HTTP request. Returns the status of the answer, or `None` without an answer.
    async fn post(self, socket: &Path, path: &str, body: &str) -> io::Result<Option<u16>> {
        let (socket, url) = (socket.to_string_lossy(), format!("http://x{path}"));
        let arguments =
            ["-s", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket", &socket, "-d", body, &url];
        let output = self.run(Path::new("curl"), &arguments).await?;
        let code = String::from_utf8_lossy(&output.stdout).parse().ok();
        Ok(code.filter(|_| output.status.success()))
    }
}

/// Returns true if this host cannot run programs as other users.
#[allow(clippy::print_stdout, reason = "the user should know that the test is skipped")]
fn cannot_switch_users() -> bool {
    let cannot =
        !geteuid().is_root() || std::process::Command::new("curl").arg("--version").output().is_err();
    if cannot {
        println!("skipped: needs root and curl");
    }
    cannot
}

/// Starts a server whose folder, sockets and command are accessible to other users.
async fn server(http: &str, more: &str) -> Result<ServerUnderTest, HarnessError> {
    let yaml = format!(
        "listen: {{http: [{{address: \"unix:http.sock\", mode: \"0666\"{http}}}], \
         grpc: [\"unix:grpc.sock\", \"127.0.0.1:0\"], metrics: [\"unix:metrics.sock\"]}}\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\n{more}\n\
         models:\n  - {}\n",
        echo("m", "share: {initial: 40%}")
    );
    let home = Home::with_config(&yaml)?;
    let opened = set_permissions(home.path(), Permissions::from_mode(0o755));
    let opened = opened.and(copy(sibling_binary("shadowslice")?, home.path().join("shadowslice")));
    opened.map_err(|source| HarnessError::Io { what: "open the folder to other users".into(), source })?;
    ServerUnderTest::start_ready(home).await
}

const INDEX: &str = "/v2/repository/index";
const LOAD: &str = "/v2/repository/models/m/load";

#[tokio::test]
async fn a_socket_accepts_the_listed_users_and_groups_and_refuses_others() {
    if cannot_switch_users() {
        return;
    }
    let server = server(", users: [70001], groups: [70005]", "").await.unwrap();
    let socket = server.home().run_dir().join("http.sock");
    for user in [ALICE, MEMBER, User { uid: "0", groups: "70009" }] {
        assert_eq!(user.post(&socket, INDEX, "").await.unwrap(), Some(200), "{}", user.uid);
    }
    for _ in 0..3 {
        assert_eq!(STRANGER.post(&socket, INDEX, "").await.unwrap(), None);
    }
    let line = server.wait_line(&["audit", "http.sock"]).await.unwrap();
    assert!(line.contains("action=\"connect\"") && line.contains("uid=70005"), "{line}");
    assert!(line.contains("outcome=\"denied\""), "{line}");
    let metrics = server.home().run_dir().join("metrics.sock");
    let scraped = shadowslice_tests::metrics::ask(&metrics, "GET", "/metrics").await.unwrap();
    assert!(scraped.body.contains("\nshadowslice_peers_refused_total 3\n"), "{}", scraped.body);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_unknown_user_name_fails_the_start() {
    let Err(ended) = server(", users: [\"no such user\"]", "").await else { panic!("it serves") };
    assert!(ended.to_string().contains("the user \"no such user\""), "{ended}");
}

#[tokio::test]
async fn only_listed_users_load_models_and_each_load_is_logged() {
    if cannot_switch_users() {
        return;
    }
    let server = server("", "model_control: {users: [70001]}").await.unwrap();
    let socket = server.home().run_dir().join("http.sock");
    assert_eq!(
        STRANGER.post(&socket, INDEX, "").await.unwrap(),
        Some(200),
        "other requests are for all users"
    );
    assert_eq!(STRANGER.post(&socket, LOAD, "{}").await.unwrap(), Some(403));
    server.wait_line(&["audit", "\"load\"", "on=\"m\"", "uid=70005", "denied"]).await.unwrap();
    assert_eq!(ALICE.post(&socket, LOAD, "{}").await.unwrap(), Some(200));
    let line = server.wait_line(&["audit", "\"load\"", "on=\"m\"", "uid=70001", "done"]).await.unwrap();
    assert!(line.contains("pid="), "{line}");
    server.client().unload("m").await.unwrap();
    server.wait_line(&["audit", "\"unload\"", "on=\"m\"", "uid=0", "done"]).await.unwrap();
    assert_eq!(server.client().load("x", None).await.unwrap_err().code(), Code::NotFound);
    server.wait_line(&["audit", "\"load\"", "on=\"x\"", "failed"]).await.unwrap();
    let refused = server.tcp_client().await.unwrap().load("m", None).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn only_listed_users_register_shared_memory() {
    if cannot_switch_users() {
        return;
    }
    let server = server("", "limits: {shared_memory: {groups: [70005]}}").await.unwrap();
    let socket = server.home().run_dir().join("http.sock");
    let name = format!("shadowslice-test-{}-peers", std::process::id());
    let shared = Path::new("/dev/shm").join(&name);
    std::fs::write(&shared, [0; 64]).unwrap();
    let lets = |mode| set_permissions(&shared, Permissions::from_mode(mode)).unwrap();
    let region = "/v2/systemsharedmemory/region/r/register";
    let body = format!("{{\"key\": \"{name}\", \"byte_size\": 64}}");
    lets(0o600);
    assert_eq!(MEMBER.post(&socket, region, &body).await.unwrap(), Some(403), "a file of root is refused");
    lets(0o666);
    assert_eq!(STRANGER.post(&socket, region, &body).await.unwrap(), Some(403));
    assert_eq!(MEMBER.post(&socket, region, &body).await.unwrap(), Some(200));
    server
        .wait_line(&["audit", "\"register shared memory\"", "on=\"r\"", "uid=70002", "done"])
        .await
        .unwrap();
    let infer = r#"{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "parameters":
        {"shared_memory_region": "r", "shared_memory_byte_size": 64}}]}"#;
    assert_eq!(
        STRANGER.post(&socket, "/v2/models/m/infer", infer).await.unwrap(),
        Some(403),
        "nor reads others' memory"
    );
    assert_eq!(MEMBER.post(&socket, "/v2/models/m/infer", infer).await.unwrap(), Some(200));
    let all = "/v2/systemsharedmemory/unregister";
    assert_eq!(STRANGER.post(&socket, all, "").await.unwrap(), Some(403));
    assert_eq!(MEMBER.post(&socket, all, "").await.unwrap(), Some(200));
    server.wait_line(&["audit", "\"unregister shared memory\"", "on=\"*\"", "uid=70002"]).await.unwrap();
    std::fs::remove_file(shared).unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn commands_are_accepted_from_listed_users_and_are_logged() {
    if cannot_switch_users() {
        return;
    }
    let server = server("", "control: {groups: [70005]}").await.unwrap();
    let run_dir = server.home().run_dir();
    assert_eq!(run_dir.join("control.sock").metadata().unwrap().permissions().mode() & 0o777, 0o666);
    let (program, at) = (server.home().path().join("shadowslice"), run_dir.to_str().unwrap());
    let order = async |user: User, words: &[&str]| {
        let output = user.run(&program, &[words, &["--run-dir", at]].concat()).await.unwrap();
        output.status.code()
    };
    assert_eq!(order(MEMBER, &["drain"]).await, Some(0));
    assert_eq!(order(MEMBER, &["undrain", "m"]).await, Some(0));
    assert_eq!(order(MEMBER, &["resize", "m", "60%"]).await, Some(0));
    assert_ne!(order(STRANGER, &["undrain"]).await, Some(0));
    assert_ne!(order(STRANGER, &["status"]).await, Some(0));
    server.reload().await.unwrap();
    for words in [
        ["\"drain\"", "on=\"*\"", "uid=70002", "done"],
        ["\"undrain\"", "on=\"m\"", "uid=70002", "done"],
        ["\"resize\"", "on=\"m\"", "uid=70002", "done"],
        ["\"connect\"", "on=\"control.sock\"", "uid=70005", "denied"],
        ["\"reload\"", "on=\"*\"", "uid=0", "done"],
    ] {
        let line = server.wait_line(&[&["audit", "pid="], &words[..]].concat()).await.unwrap();
        assert!(!line.contains("pid=0 "), "{line}");
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn without_a_list_only_the_supervisors_user_may_send_commands() {
    let server = server("", "").await.unwrap();
    let socket = server.home().run_dir().join("control.sock");
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    server.stop().await.unwrap();
}
