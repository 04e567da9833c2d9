//! `shadowslice-worker`: one model's process, started by shadowslice's supervisor.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use shadowslice_worker::boot::{Connected, Fault};

/// Wrong usage, as sysexits has it.
const EX_USAGE: u8 = 64;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let server = match (arguments.next(), arguments.next(), arguments.next()) {
        (Some(flag), Some(server), None) if flag == "--boot" => server,
        _ => {
            say(
                "this program is started by the supervisor, not by hand; run `shadowslice serve CONFIG.yaml`",
            );
            return ExitCode::from(EX_USAGE);
        }
    };
    match run(server) {
        // Who should hear of it is gone.
        Ok(()) | Err(Fault::SupervisorGone) => ExitCode::SUCCESS,
        // The supervisor was told why.
        Err(Fault::Refused(_)) => ExitCode::FAILURE,
        Err(fault) => {
            say(&with_causes(&fault));
            ExitCode::FAILURE
        }
    }
}

fn run(server: String) -> Result<(), Fault> {
    match Connected::to(server)?.load()?.warm()? {
        Some(warm) => Ok(warm.serve()?),
        None => Ok(()),
    }
}

/// Writes one line for the supervisor to forward.
fn say(fault: &str) {
    let _nobody_reads = writeln!(std::io::stderr(), "error: {fault}");
}

fn with_causes(fault: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(fault.source(), |&cause| cause.source());
    causes.fold(fault.to_string(), |said, cause| format!("{said}: {cause}"))
}
