//! The main loop of `top`. It polls the supervisor, reads keys and draws, and restores the terminal
//! at the end.

use std::future::poll_fn;
use std::io::{self, IsTerminal};
use std::panic;
use std::path::Path;
use std::pin::pin;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use ratatui::text::Text;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::sleep;

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

/// The capacity of the channel for the terminal's events.
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

#[derive(Debug, thiserror::Error)]
enum TopError {
    #[error("cannot use the terminal; run `shadowslice top --once` instead")]
    Terminal(#[from] io::Error),
    #[error("a poll of the supervisor panicked, which is a bug in shadowslice")]
    Panicked(#[from] JoinError),
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
    match live(options.interval, run_dir) {
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
        // panic in another thread becomes an error, which is printed after the terminal has been
        // restored.
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

fn live(interval: Duration, run_dir: &Path) -> Result<u8, TopError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(watch(interval, run_dir));
    // A supervisor that does not reply must not delay the exit.
    runtime.shutdown_background();
    code
}

/// Polls the supervisor and draws until a key or a signal ends the program. Returns the exit code.
async fn watch(interval: Duration, run_dir: &Path) -> Result<u8, TopError> {
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
    let signals = kinds.into_iter().map(|kind| Ok((kind, signal(kind)?)));
    let mut signals = signals.collect::<io::Result<Vec<_>>>()?;
    let mut screen = Screen::take()?;
    let (event_tx, mut event_rx) = mpsc::channel(EVENT_CAPACITY);
    thread::Builder::new().name("keys".to_owned()).spawn(move || send_events(&event_tx))?;
    let poll_after = |delay: Duration| {
        let run_dir = run_dir.to_owned();
        async move {
            sleep(delay).await;
            spawn_blocking(move || poll(&run_dir)).await
        }
    };
    let mut reply = pin!(poll_after(Duration::ZERO));
    let (mut app, began) = (App::new(interval), Instant::now());
    loop {
        screen.draw(&app)?;
        tokio::select! {
            code = exit_signal(&mut signals) => return Ok(code),
            Some(event) = event_rx.recv() => {
                if let Event::Key(key) = event? && app.press(key) == KeyAction::Quit {
                    return Ok(0);
                }
            }
            replied = reply.as_mut() => {
                app.update(replied?, began.elapsed());
                reply.set(poll_after(interval));
            }
        }
    }
}

/// Waits for a signal. Returns the exit code of a program that the signal ended.
async fn exit_signal(signals: &mut [(SignalKind, Signal)]) -> u8 {
    poll_fn(|context| {
        let mut signals = signals.iter_mut();
        let arrived = signals.find_map(|(kind, signal)| signal.poll_recv(context).is_ready().then_some(kind));
        arrived
            .map_or(Poll::Pending, |kind| Poll::Ready(128 + u8::try_from(kind.as_raw_value()).unwrap_or(0)))
    })
    .await
}

/// Sends keys and changes of the terminal's size until the receiver is dropped or the terminal fails.
fn send_events(event_tx: &mpsc::Sender<io::Result<Event>>) {
    loop {
        let event = event::read();
        let failed = event.is_err();
        if event_tx.blocking_send(event).is_err() || failed {
            return;
        }
    }
}
