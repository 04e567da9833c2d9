//! The main loop of `top`. It polls the supervisor, reads keys and draws, and restores the terminal
//! at the end.

use std::any::Any;
use std::io::{self, IsTerminal};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use ratatui::text::Text;

use super::app::{App, KeyAction};
use super::snapshot::TopReply;
use super::view;
use crate::admin::{self, ControlReply, ControlRequest};
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};

/// The shortest interval between two polls.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// The width of the output without a terminal, in columns.
const PAGE_WIDTH: u16 = 80;

/// The capacity of the channel for keys, replies and other events.
const EVENT_CAPACITY: usize = 64;

#[derive(Debug, clap::Args)]
pub struct TopOptions {
    /// The time between two polls of the supervisor, for example 500ms; at least 100ms.
    #[arg(long, default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print one page as text and exit. Without a terminal this is the default.
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = shadowslice_config::duration(text)?;
    if interval < MIN_INTERVAL { Err("the minimum is 100ms".to_owned()) } else { Ok(interval) }
}

enum TopEvent {
    Reply(Result<TopReply, String>),
    Key(KeyEvent),
    Resized,
    Signal(Signal),
    /// A thread failed or panicked, for example because the terminal was closed.
    Failed(TopError),
}

#[derive(Debug, thiserror::Error)]
enum TopError {
    #[error("cannot use the terminal; run `shadowslice top --once` instead")]
    Terminal(#[from] io::Error),
    #[error("the thread {0} panicked, which is a bug in shadowslice: {1}")]
    Panicked(String, String),
}

impl TopError {
    fn code(&self) -> u8 {
        match self {
            Self::Terminal(_) => exit::UNAVAILABLE,
            Self::Panicked(..) => exit::SOFTWARE,
        }
    }
}

pub fn run(options: &TopOptions, run_dir: &Path) -> u8 {
    if options.once || !io::stdout().is_terminal() {
        return once(options.interval, run_dir);
    }
    match live(options.interval, run_dir, Instant::now()) {
        Ok(code) => code,
        Err(broken) => fail(&errors::chain(&broken), broken.code()),
    }
}

fn once(interval: Duration, run_dir: &Path) -> u8 {
    let mut app = App::new(interval);
    match poll(run_dir) {
        Ok(reply) => app.update(Ok(reply), Duration::ZERO),
        Err(why) => return fail(&why, exit::UNAVAILABLE),
    }
    let lines = view::page(&app, PAGE_WIDTH);
    exit::print(&lines.iter().map(|line| format!("{}\n", line.to_string().trim_end())).collect::<String>())
}

fn poll(run_dir: &Path) -> Result<TopReply, String> {
    match admin::send(run_dir, &ControlRequest::Top).map_err(|error| errors::chain(&error))? {
        ControlReply::Top(reply) => Ok(reply),
        ControlReply::Refused(why) => Err(why),
        _ => Err(
            "the supervisor sent an unexpected reply; use the `shadowslice` program that the supervisor runs"
                .to_owned(),
        ),
    }
}

/// A terminal in raw mode. Dropping this value restores the terminal.
struct Screen(DefaultTerminal);

impl Screen {
    fn take() -> io::Result<Self> {
        let screen = ratatui::try_init().map(Self).inspect_err(|_| ratatui::restore());
        // If this thread panics, ratatui's hook restores the terminal and prints the message. A
        // panic in another thread arrives as an event, and its message is printed after the
        // terminal has been restored.
        let restoring_hook = panic::take_hook();
        let drawing = thread::current().id();
        panic::set_hook(Box::new(move |info| {
            if thread::current().id() == drawing {
                restoring_hook(info);
            }
        }));
        screen
    }

    fn draw(&mut self, app: &App) -> io::Result<()> {
        self.0.draw(|frame| {
            let area = frame.area();
            frame.render_widget(Text::from(view::screen(app, area.width, area.height)), area);
        })?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // An error may mean that the terminal is closed. In that case nothing can be restored.
        self.0.show_cursor().ok();
        ratatui::try_restore().ok();
    }
}

fn live(interval: Duration, run_dir: &Path, began: Instant) -> Result<u8, TopError> {
    let (event_tx, event_rx) = mpsc::sync_channel(EVENT_CAPACITY);
    // Signals are blocked before other threads start, so that only the thread that waits for
    // signals receives them.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT]);
    signals.thread_block().map_err(io::Error::from)?;
    let mut screen = Screen::take()?;
    start("signals", &event_tx, move |event_tx| {
        signals
            .wait()
            .map(|signal| event_tx.send(TopEvent::Signal(signal)).is_ok())
            .map_err(io::Error::from)?;
        Ok(())
    })?;
    start("keys", &event_tx, keys)?;
    let _polling = start_polling(run_dir, interval, &event_tx)?;
    serve(&mut screen, App::new(interval), began, &event_rx)
}

fn serve(
    screen: &mut Screen,
    mut app: App,
    began: Instant,
    event_rx: &Receiver<TopEvent>,
) -> Result<u8, TopError> {
    screen.draw(&app)?;
    for event in event_rx {
        match event {
            TopEvent::Reply(reply) => app.update(reply, began.elapsed()),
            TopEvent::Key(key) if app.press(key) == KeyAction::Quit => return Ok(0),
            TopEvent::Key(_) | TopEvent::Resized => {}
            TopEvent::Signal(signal) => return Ok(128 + u8::try_from(signal as i32).unwrap_or(0)),
            TopEvent::Failed(broken) => return Err(broken),
        }
        screen.draw(&app)?;
    }
    Ok(0)
}

/// Starts a thread. The thread sends an event if it fails or panics.
fn start(
    name: &str,
    event_tx: &SyncSender<TopEvent>,
    work: impl FnOnce(&SyncSender<TopEvent>) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let event_tx = event_tx.clone();
    let thread_name = name.to_owned();
    let body = move || {
        let broken = match panic::catch_unwind(AssertUnwindSafe(|| work(&event_tx))) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => TopError::Terminal(error),
            Err(panicked) => TopError::Panicked(thread_name, message(&*panicked)),
        };
        // An error means that `top` is already exiting.
        event_tx.send(TopEvent::Failed(broken)).ok();
    };
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

fn message(panicked: &(dyn Any + Send)) -> String {
    let text = panicked.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panicked.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Sends key presses and changes of the terminal's size until the receiver is dropped.
fn keys(event_tx: &SyncSender<TopEvent>) -> io::Result<()> {
    loop {
        let next = match event::read()? {
            Event::Key(key) => TopEvent::Key(key),
            Event::Resize(..) => TopEvent::Resized,
            _ => continue,
        };
        if event_tx.send(next).is_err() {
            return Ok(());
        }
    }
}

/// Polls the supervisor until the returned sender is dropped.
fn start_polling(
    run_dir: &Path,
    interval: Duration,
    event_tx: &SyncSender<TopEvent>,
) -> io::Result<SyncSender<()>> {
    let (polling, stop_rx) = mpsc::sync_channel(1);
    let run_dir = run_dir.to_owned();
    start("polls", event_tx, move |event_tx| {
        loop {
            let sent = event_tx.send(TopEvent::Reply(poll(&run_dir)));
            if sent.is_err() || stop_rx.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                return Ok(());
            }
        }
    })?;
    Ok(polling)
}
