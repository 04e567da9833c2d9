//! Exit codes, after sysexits, and the writing of output and errors for the operator.

use std::io::{self, ErrorKind, Write};

pub const USAGE: u8 = 64;
/// Something that is needed is not there.
pub const UNAVAILABLE: u8 = 69;
/// A fault of this program.
pub const SOFTWARE: u8 = 70;
pub const CONFIG: u8 = 78;
/// A command was refused, or did not achieve what was asked.
pub const REFUSED: u8 = 1;
/// Ended at once, by a second signal.
pub const FORCED: u8 = 143;

pub fn fail(why: &str, code: u8) -> u8 {
    say(&format!("error: {why}"));
    code
}

/// A failure is ignored, as there is no other place to report it.
pub fn say(line: &str) {
    writeln!(io::stderr(), "{line}").ok();
}

/// Writes whole lines to stdout; returns the code.
pub fn print(lines: &str) -> u8 {
    let mut out = io::stdout().lock();
    printed(out.write_all(lines.as_bytes()).and_then(|()| out.flush()))
}

/// A reader that went away, such as `head`, has read what it wanted.
pub fn printed(written: io::Result<()>) -> u8 {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(&format!("the output cannot be written: {error}"), UNAVAILABLE)
        }
        _ => 0,
    }
}
