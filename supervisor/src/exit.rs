//! Exit codes, after sysexits, and the way an error reaches the operator.

/// The command line was wrong.
pub const USAGE: u8 = 64;
/// Something that is needed is not there.
pub const UNAVAILABLE: u8 = 69;
/// A fault of this program.
pub const SOFTWARE: u8 = 70;
/// The configuration is wrong.
pub const CONFIG: u8 = 78;
/// Asked, and refused or not achieved.
pub const REFUSED: u8 = 1;
/// Ended at once by a second signal.
pub const FORCED: u8 = 143;

/// Says what went wrong on stderr; returns the code.
#[expect(clippy::print_stderr, reason = "the command line's own output")]
pub fn fail(why: &str, code: u8) -> u8 {
    eprintln!("error: {why}");
    code
}
