//! A stand-in for `nvidia-cuda-mps-control`, for tests without a GPU. It has the same command line
//! as the original and prints the same texts.
//!
//! With `-f`, the program is the daemon, which reads commands from a socket in
//! CUDA_MPS_PIPE_DIRECTORY. Without arguments, the program is a client, which sends its input to
//! the daemon, one command per line. A running process is a client of the MPS server if `clients/`
//! in the pipe directory contains a file named after its PID. Files in the folder STAND_IN_ORDERS
//! make the daemon misbehave:
//!
//! | file | effect |
//! |---|---|
//! | `hang-COMMAND` | the command gets no answer |
//! | `slow-COMMAND` | the answer is delayed by the number of ms in the file |
//! | `say-COMMAND` | the answer is the text of the file |
//! | `fault` | the server has a fault until all clients have exited; the daemon then removes the file |
//! | `stuck` | the fault remains after all clients have exited |
//! | `initializing` | a new server does not become active |
//! | `linger` | exited clients remain in the list |
//! | `terminated` | written by the daemon, with one line for each terminated client |

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

/// The interval at which `quit` checks whether all clients have exited.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let version = "CUDA MPS Control for Linux/Unix/QNX. Binary version: 13000\n";
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => client(),
        ["-v"] => print(&order("say--v").unwrap_or_else(|| version.to_owned())),
        ["-f"] => daemon().await,
        ["--server"] => std::future::pending().await,
        _ => return ExitCode::from(64),
    };
    match result {
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

/// Returns the content of an order file, if the file exists.
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
    /// The active-thread percentage that was set last.
    percentage: Mutex<Option<f64>>,
    quit: Notify,
}

async fn daemon() -> io::Result<()> {
    let control = pipe().join("control");
    fs::create_dir_all(pipe().join("clients"))?;
    // The socket exists only if an earlier daemon was killed, so the error is ignored.
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
                // A test may kill the caller, so the error is ignored.
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
    // The tests do not need the log, so the error is ignored.
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
        let mut tick = interval(POLL_INTERVAL);
        while !clients().is_empty() {
            tick.tick().await;
        }
        state.quit.notify_one();
    }
    let reply = order(&format!("say-{command}")).unwrap_or_else(|| obey(&words, state));
    caller.write_all(reply.as_bytes()).await
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
            // A test may have removed the file meanwhile, so the error is ignored.
            fs::remove_file(PathBuf::from(orders).join("fault")).ok();
        }
    }
    if order("initializing").is_some() { "INITIALIZING" } else { "ACTIVE" }
}

fn clients() -> Vec<i32> {
    let entries = fs::read_dir(pipe().join("clients")).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let lingers = order("linger").is_some();
    pids.filter(|pid| lingers || ProcessHandle::of(*pid).is_some_and(|process| process.is_alive())).collect()
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
        // The error is ignored here. A test that needs the line fails if the line is missing.
        file.and_then(|mut file| writeln!(file, "{client}")).ok();
    }
    "0\n".to_owned()
}
