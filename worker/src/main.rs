//! `shadowslice-worker`: one model's process, started by shadowslice's supervisor.

use std::io::Write;
use std::process::ExitCode;

use shadowslice_shared::errors::chain;
use shadowslice_worker::boot::{ConnectedWorker, WorkerError};
use shadowslice_worker::probe::Probe;
use shadowslice_worker::{sandbox, say};

/// As sysexits has it.
const EX_USAGE: u8 = 64;

/// Something that is needed is not there, as sysexits has it.
const EX_UNAVAILABLE: u8 = 69;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((flag, [])) if flag == "--boot" => serve(None),
        Some((flag, [user])) if flag == "--boot" => {
            user.parse().map_or_else(|_| misused(), |user| serve(Some(user)))
        }
        Some((flag, rest)) if flag == "--probe" => Probe::read(rest).map_or_else(misused, find_out),
        _ => misused(),
    }
}

fn misused() -> ExitCode {
    complain("this program is started by the supervisor, not by hand; run `shadowslice serve CONFIG.yaml`");
    ExitCode::from(EX_USAGE)
}

fn find_out(probe: Probe) -> ExitCode {
    match probe.run() {
        Ok(findings) => match writeln!(std::io::stdout(), "{findings}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            complain(&chain(&error));
            ExitCode::from(EX_UNAVAILABLE)
        }
    }
}

fn serve(user: Option<u32>) -> ExitCode {
    match run(user) {
        // The supervisor is gone, so there is nothing to report.
        Ok(()) | Err(WorkerError::SupervisorGone) => ExitCode::SUCCESS,
        // The supervisor was told why.
        Err(WorkerError::Refused(_)) => ExitCode::FAILURE,
        Err(fault) => {
            complain(&chain(&fault));
            ExitCode::FAILURE
        }
    }
}

fn run(user: Option<u32>) -> Result<(), WorkerError> {
    if let Err(error) = sandbox::harden_process() {
        say(&format!("other processes of its user can read it: {error}"));
    }
    if let Some(user) = user {
        sandbox::become_user(user).map_err(WorkerError::User)?;
    }
    match ConnectedWorker::new(None)?.load()?.warm()? {
        Some(warm) => Ok(warm.serve()?),
        None => Ok(()),
    }
}

fn complain(fault: &str) {
    say(&format!("error: {fault}"));
}
