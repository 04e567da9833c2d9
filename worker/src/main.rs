//! `shadowslice-worker`, the process that runs one model. The supervisor of shadowslice starts it.

mod cuda_runtime;

use std::io::Write;
use std::process::ExitCode;

use shadowslice_shared::errors::chain;
use shadowslice_worker::probe::Probe;
use shadowslice_worker::{boot, log_line, shared};

/// The exit code for invalid arguments, as in sysexits.h.
const EX_USAGE: u8 = 64;

/// The exit code for an unavailable resource, as in sysexits.h.
const EX_UNAVAILABLE: u8 = 69;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((flag, user)) if flag == "--boot" => with_user(user, |user| boot::run(user, None)),
        Some((flag, user)) if flag == "--shared" => with_user(user, shared::run),
        Some((flag, rest)) if flag == "--probe" => Probe::read(rest).map_or_else(usage_error, run_probe),
        _ => usage_error(),
    }
}

fn with_user(user: &[String], run: impl FnOnce(Option<u32>) -> u8) -> ExitCode {
    match user {
        [] => ExitCode::from(run(None)),
        [user] => user.parse().map_or_else(|_| usage_error(), |user| ExitCode::from(run(Some(user)))),
        _ => usage_error(),
    }
}

fn usage_error() -> ExitCode {
    log_error("the supervisor starts this program; run `shadowslice serve CONFIG.yaml` instead");
    ExitCode::from(EX_USAGE)
}

fn run_probe(probe: Probe) -> ExitCode {
    match probe.run() {
        Ok(findings) => match writeln!(std::io::stdout(), "{findings}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            log_error(&chain(&error));
            ExitCode::from(EX_UNAVAILABLE)
        }
    }
}

fn log_error(fault: &str) {
    log_line(&format!("error: {fault}"));
}
