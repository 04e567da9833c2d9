//! A pseudo-terminal that runs a `shadowslice` command, and the contents of its screen.

use std::fs::File;
use std::io::{self, Read, Write};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use parking_lot::Mutex;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use shadowslice_tests::home::Home;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Terminal {
    /// The user's end of the terminal, for reading the screen and typing keys.
    outer: File,
    /// The program's end of the terminal. It stays open so that the test can read the modes after
    /// the program has exited.
    inner: OwnedFd,
    before: String,
    parser: Arc<Mutex<vt100::Parser>>,
    shown_rx: watch::Receiver<Shown>,
    child: Child,
}

/// The contents of the screen.
#[derive(Default)]
struct Shown {
    text: String,
    /// True if a program is using the alternate screen or has hidden the cursor.
    taken: bool,
}

impl Shown {
    fn of(screen: &vt100::Screen) -> Self {
        let lines: Vec<String> = screen.contents().lines().map(|line| line.trim_end().to_owned()).collect();
        Self { text: lines.join("\n"), taken: screen.alternate_screen() || screen.hide_cursor() }
    }
}

impl Terminal {
    /// Runs a command in a session that this terminal controls.
    pub(crate) fn run(home: &Home, arguments: &[&str], size: (u16, u16)) -> io::Result<Self> {
        let outer = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&outer)?;
        unlockpt(&outer)?;
        let name = ptsname(&outer, Vec::new())?;
        let inner = nix::fcntl::open(name.as_c_str(), OFlag::O_RDWR | OFlag::O_NOCTTY, Mode::empty())?;
        tcsetwinsize(&inner, winsize(size))?;
        let before = modes(&tcgetattr(&inner)?);
        let parser = Arc::new(Mutex::new(vt100::Parser::new(cells(size.1), cells(size.0), 0)));
        let (shown_tx, shown_rx) = watch::channel(Shown::default());
        let outer = File::from(outer);
        let reader = outer.try_clone()?;
        let screen = Arc::clone(&parser);
        std::thread::spawn(move || read_on(reader, &screen, &shown_tx));
        let child = controlled(home, arguments, &inner)?.spawn()?;
        Ok(Self { outer, inner, before, parser, shown_rx, child })
    }

    /// Waits until the screen meets the condition `is`, and returns the screen's text.
    pub(crate) async fn shows(&mut self, what: &str, is: impl Fn(&str) -> bool) -> Result<String, String> {
        let shown = timeout(TIMEOUT, self.shown_rx.wait_for(|shown| is(&shown.text))).await;
        match shown {
            Ok(Ok(shown)) => Ok(shown.text.clone()),
            Ok(Err(_)) => Err(format!("the terminal closed before {what}")),
            Err(_) => Err(format!("no {what} on\n{}", self.parser.lock().screen().contents())),
        }
    }

    pub(crate) fn types(&mut self, keys: &str) -> io::Result<()> {
        self.outer.write_all(keys.as_bytes())
    }

    /// Resizes the terminal. The kernel notifies the program.
    pub(crate) fn resize(&mut self, size: (u16, u16)) -> io::Result<()> {
        self.parser.lock().screen_mut().set_size(cells(size.1), cells(size.0));
        Ok(tcsetwinsize(&self.inner, winsize(size))?)
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        Ok(kill(Pid::from_raw(pid.ok_or(io::ErrorKind::NotFound)?), signal)?)
    }

    /// Waits until the program exits. Returns its status, and the terminal settings that it did not
    /// restore.
    pub(crate) async fn wait_exit(mut self) -> Result<(ExitStatus, Vec<&'static str>), String> {
        let status = timeout(TIMEOUT, self.child.wait()).await;
        let status = status.map_err(|_| "the program does not exit")?.map_err(|error| error.to_string())?;
        let raw = tcgetattr(&self.inner).is_ok_and(|after| modes(&after) == self.before);
        // The test may not have read the last output of the program yet.
        let seen = timeout(TIMEOUT, self.shown_rx.wait_for(|shown| !shown.taken)).await;
        let seen = seen.is_ok_and(|seen| seen.is_ok());
        let faults = [(!raw, "modes"), (!seen, "screen or cursor")];
        Ok((status, faults.into_iter().filter(|fault| fault.0).map(|fault| fault.1).collect()))
    }
}

fn controlled(home: &Home, arguments: &[&str], inner: &OwnedFd) -> io::Result<Command> {
    let command = home.command(arguments).map_err(io::Error::other)?;
    let command = command.as_std();
    let mut session = Command::new("setsid");
    session.arg("--ctty").arg(command.get_program()).args(command.get_args()).env("TERM", "xterm-256color");
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => session.env(name, value),
            None => session.env_remove(name),
        };
    }
    let end = || inner.try_clone().map(Stdio::from);
    session.current_dir(home.path()).stdin(end()?).stdout(end()?).stderr(end()?).kill_on_drop(true);
    Ok(session)
}

fn read_on(mut from: File, parser: &Mutex<vt100::Parser>, shown_tx: &watch::Sender<Shown>) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        // The parser's lock must be released before the channel takes its own lock.
        let shown = {
            let mut parser = parser.lock();
            parser.process(&bytes[..count]);
            Shown::of(parser.screen())
        };
        if shown_tx.send(shown).is_err() {
            return;
        }
    }
}

fn cells(count: u16) -> NonZero<u16> {
    NonZero::new(count).unwrap_or(NonZero::<u16>::MIN)
}

fn winsize((columns, rows): (u16, u16)) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Formats all terminal modes that a program may change.
fn modes(termios: &Termios) -> String {
    let Termios { input_modes, output_modes, control_modes, local_modes, special_codes, .. } = termios;
    format!("{input_modes:?} {output_modes:?} {control_modes:?} {local_modes:?} {special_codes:?}")
}
