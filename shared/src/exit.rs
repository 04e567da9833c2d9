//! Exit codes of the programs, and functions that write to stdout and stderr. Most of the codes come
//! from `sysexits.h`.

use std::io::{self, ErrorKind, Write};

/// The exit code for an invalid command line (`EX_USAGE`).
pub const USAGE: u8 = 64;
/// The exit code if the command needs a file, process or service that is not available
/// (`EX_UNAVAILABLE`).
pub const UNAVAILABLE: u8 = 69;
/// The exit code for a bug in this program (`EX_SOFTWARE`).
pub const SOFTWARE: u8 = 70;
/// The exit code for a faulty configuration (`EX_CONFIG`).
pub const CONFIG: u8 = 78;
/// The exit code if the supervisor refused a command, or if the command failed.
pub const REFUSED: u8 = 1;
/// The exit code after a second signal, which ends the program immediately. It is 128 plus 15, the
/// number of SIGTERM.
pub const FORCED: u8 = 143;

/// Writes an error to stderr and returns `code`.
pub fn fail(why: &str, code: u8) -> u8 {
    print_error(&format!("error: {why}"));
    code
}

/// Writes a line to stderr. Ignores a failed write, because the error cannot be reported anywhere else.
pub fn print_error(line: &str) {
    writeln!(io::stderr(), "{line}").ok();
}

/// Writes text to stdout and returns the exit code.
pub fn print(lines: &str) -> u8 {
    let mut out = io::stdout().lock();
    code_of_output(out.write_all(lines.as_bytes()).and_then(|()| out.flush()))
}

/// Returns the exit code for the result of a write to stdout, and reports a failed write. A closed pipe
/// counts as success, because readers such as `head` close the pipe when they have read enough.
pub fn code_of_output(written: io::Result<()>) -> u8 {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(&format!("cannot write the output: {error}"), UNAVAILABLE)
        }
        _ => 0,
    }
}
