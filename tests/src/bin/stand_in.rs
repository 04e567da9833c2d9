//! A stand-in for `nvidia-cuda-mps-control`, for tests: the same command line, the same words, no GPU.
//!
//! `-f` is the daemon, which takes commands on a socket in CUDA_MPS_PIPE_DIRECTORY; without arguments it
//! is the client that sends its input there, a command a line. A process is a client of the server while
//! it lives and a file with its PID as name lies in `clients/` of the pipe directory. Files in the
//! folder STAND_IN_ORDERS make it misbehave:
//!
//! | file | |
//! |---|---|
//! | `hang-COMMAND` | no answer |
//! | `slow-COMMAND` | an answer after so many ms as the file says |
//! | `say-COMMAND` | the file's text instead of the answer |
//! | `fault` | the server is at fault, until all clients have gone, which removes the file |
//! | `stuck` | it stays at fault even then |
//! | `initializing` | a new server does not become active |
//! | `linger` | dead clients stay in the list |
//! | `terminated` | (written) a line a client that was terminated |

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use parking_lot::Mutex;
use shadowslice_tests::process::ProcessHandle;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::process::{Child, Command};
use tokio::sync::Notify;
use tokio::time::{interval, sleep};

/// How often `quit` looks whether the clients have gone.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let version = "CUDA MPS Control for Linux/Unix/QNX. Binary version: 13000\n";
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => client(),
        ["-v"] => print(&order("say--v").unwrap_or_else(|| version.to_owned())),
        ["-f"] => daemon().await,
        ["--server"] => std::future::pending().await,
        _ => return ExitCode::from(64),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(text: &str) -> io::Result<()> {
    io::stdout().write_all(text.as_bytes())
}

fn pipe() -> PathBuf {
    PathBuf::from(std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into()))
}

/// The text of an order to misbehave, if it is given.
fn order(name: &str) -> Option<String> {
    fs::read_to_string(PathBuf::from(std::env::var_os("STAND_IN_ORDERS")?).join(name)).ok()
}

fn client() -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let Ok(mut daemon) = UnixStream::connect(pipe().join("control")) else {
            print("Cannot find MPS control daemon process\n")?;
            return Err(io::ErrorKind::NotFound.into());
        };
        daemon.write_all(format!("{}\n", line?).as_bytes())?;
        let mut answer = String::new();
        daemon.read_to_string(&mut answer)?;
        print(&answer)?;
    }
    Ok(())
}

/// The daemon's state.
#[derive(Default)]
struct State {
    server: Mutex<Option<Child>>,
    /// As it was last set.
    percentage: Mutex<Option<f64>>,
    quit: Notify,
}

async fn daemon() -> io::Result<()> {
    let control = pipe().join("control");
    fs::create_dir_all(pipe().join("clients"))?;
    fs::remove_file(&control).ok();
    let listener = UnixListener::bind(&control)?;
    fs::write(pipe().join("nvidia-cuda-mps-control.pid"), std::process::id().to_string())?;
    log("control.log", "Starting control daemon");
    let state = Arc::new(State::default());
    loop {
        tokio::select! {
            caller = listener.accept() => {
                let state = Arc::clone(&state);
                let (caller, _) = caller?;
                // The caller may have been killed.
                tokio::spawn(async move { answer(caller, &state).await.ok() });
            }
            () = state.quit.notified() => break,
        }
    }
    let server = state.server.lock().take();
    if let Some(mut server) = server {
        let process = server.id().and_then(|pid| i32::try_from(pid).ok()).and_then(ProcessHandle::of);
        process.map(|process| process.signal(Signal::SIGTERM));
        server.wait().await?;
    }
    fs::remove_file(control)
}

fn log(file: &str, line: &str) {
    let Some(folder) = std::env::var_os("CUDA_MPS_LOG_DIRECTORY") else { return };
    let file = OpenOptions::new().create(true).append(true).open(PathBuf::from(folder).join(file));
    let line = format!("[2026-01-01 00:00:00.000 Control {}] {line}", std::process::id());
    // A log that cannot be written does not matter to the tests.
    file.and_then(|mut file| writeln!(file, "{line}")).ok();
}

async fn answer(mut caller: tokio::net::UnixStream, state: &State) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(&mut caller).read_line(&mut line).await?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let command = words.first().copied().unwrap_or_default();
    if order(&format!("hang-{command}")).is_some() {
        std::future::pending::<()>().await;
    }
    if let Some(ms) = order(&format!("slow-{command}")).and_then(|ms| ms.trim().parse().ok()) {
        sleep(Duration::from_millis(ms)).await;
    }
    if command == "quit" {
        let mut look = interval(LOOK_EVERY);
        while !clients().is_empty() {
            look.tick().await;
        }
        state.quit.notify_one();
    }
    let said = order(&format!("say-{command}")).unwrap_or_else(|| obey(&words, state));
    caller.write_all(said.as_bytes()).await
}

fn obey(words: &[&str], state: &State) -> String {
    let mut server = state.server.lock();
    if server.as_mut().is_some_and(|server| server.try_wait().is_ok_and(|status| status.is_some())) {
        *server = None;
    }
    let pid = server.as_ref().and_then(Child::id);
    let is_server = |named: &str| pid.is_some() && named.parse().ok() == pid;
    let not_found = |named: &str| format!("Server {named} not found\n");
    let percentage = |percentage: Option<f64>| format!("{:?}\n", percentage.unwrap_or(100.0));
    match words {
        ["get_server_list"] => pid.map(|pid| format!("{pid}\n")).unwrap_or_default(),
        ["start_server", "-uid", _] => {
            if server.is_none() {
                *server = start_server().ok();
            }
            String::new()
        }
        ["get_server_status", named] if is_server(named) => format!("{}\n", status()),
        ["get_client_list", named] if is_server(named) => lines(&clients()),
        ["get_server_status" | "get_client_list", named] => not_found(named),
        ["terminate_client", named, client] if is_server(named) => terminate(client),
        ["terminate_client", named, _] => not_found(named),
        ["get_default_active_thread_percentage"] => percentage(*state.percentage.lock()),
        ["set_default_active_thread_percentage", set] => {
            *state.percentage.lock() = set.parse().ok();
            percentage(*state.percentage.lock())
        }
        ["quit"] | [] => String::new(),
        [unknown, ..] => format!("Unknown command \"{unknown}\"\n"),
    }
}

fn start_server() -> io::Result<Child> {
    log("server.log", "Startup");
    let mut server = Command::new(std::env::current_exe()?);
    server.arg("--server").process_group(0);
    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

fn status() -> &'static str {
    if order("fault").is_some() {
        if !clients().is_empty() || order("stuck").is_some() {
            return "FAULT";
        }
        if let Some(orders) = std::env::var_os("STAND_IN_ORDERS") {
            fs::remove_file(PathBuf::from(orders).join("fault")).ok();
        }
    }
    if order("initializing").is_some() { "INITIALIZING" } else { "ACTIVE" }
}

fn clients() -> Vec<i32> {
    let entries = fs::read_dir(pipe().join("clients")).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let lingers = order("linger").is_some();
    pids.filter(|pid| lingers || ProcessHandle::of(*pid).is_some_and(|process| process.alive())).collect()
}

fn lines(pids: &[i32]) -> String {
    pids.iter().map(|pid| format!("{pid}\n")).collect()
}

fn terminate(client: &str) -> String {
    if !clients().iter().any(|pid| pid.to_string() == client) {
        return format!("Invalid process {client}!\n1\n");
    }
    if let Some(orders) = std::env::var_os("STAND_IN_ORDERS") {
        let file =
            OpenOptions::new().create(true).append(true).open(PathBuf::from(orders).join("terminated"));
        file.and_then(|mut file| writeln!(file, "{client}")).ok();
    }
    "0\n".to_owned()
}
