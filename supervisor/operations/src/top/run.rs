//! Asks the supervisor, reads keys, draws; and leaves the terminal as it was.

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
use super::facts::PollResult;
use super::view;
use crate::admin::{self, ControlReply, ControlRequest};
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};

const SHORTEST: Duration = Duration::from_millis(100);

/// The width of a page that no terminal asks for.
const PAGE: u16 = 80;

/// Keys and answers that wait to be shown.
const WAITING: usize = 64;

#[derive(Debug, clap::Args)]
pub struct TopOptions {
    /// How often the supervisor is asked, e.g. 500ms; at least 100ms.
    #[arg(long, default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print one page as text, over one interval; so it is without a terminal, too.
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = shadowslice_config::duration(text)?;
    if interval < SHORTEST { Err("the shortest is 100ms".to_owned()) } else { Ok(interval) }
}

enum TopEvent {
    Answer(Result<PollResult, String>),
    Key(KeyEvent),
    Resized,
    Signal(Signal),
    /// A thread failed, as when the terminal is gone, or panicked.
    Failed(TopError),
}

#[derive(Debug, thiserror::Error)]
enum TopError {
    #[error("the terminal cannot be used")]
    Terminal(#[from] io::Error),
    #[error("the thread {0} panicked: {1}")]
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
    let began = Instant::now();
    if options.once || !io::stdout().is_terminal() {
        return once(options.interval, run_dir, began);
    }
    match live(options.interval, run_dir, began) {
        Ok(code) => code,
        Err(broken) => fail(&errors::chain(&broken), broken.code()),
    }
}

fn once(interval: Duration, run_dir: &Path, began: Instant) -> u8 {
    let (heard, hears) = mpsc::sync_channel(WAITING);
    let _goes_on = match ask_on(run_dir, interval, &heard) {
        Ok(goes_on) => goes_on,
        Err(error) => return fail(&errors::chain(&error), exit::SOFTWARE),
    };
    let mut app = App::new(interval);
    for heard in hears.iter().take(2) {
        match heard {
            TopEvent::Answer(Ok(seen)) => app.hear(Ok(seen), began.elapsed()),
            TopEvent::Answer(Err(why)) => return fail(&why, exit::UNAVAILABLE),
            TopEvent::Failed(broken) => return fail(&errors::chain(&broken), broken.code()),
            TopEvent::Key(_) | TopEvent::Resized | TopEvent::Signal(_) => {}
        }
    }
    let lines = view::page(&app, PAGE);
    exit::print(&lines.iter().map(|line| format!("{}\n", line.to_string().trim_end())).collect::<String>())
}

fn look(run_dir: &Path) -> Result<PollResult, String> {
    let ask = |what| admin::ask(run_dir, &what).map_err(|error| errors::chain(&error));
    match (ask(ControlRequest::Status)?, ask(ControlRequest::Plan)?) {
        (ControlReply::Status(status), ControlReply::Plan(plan)) => Ok(PollResult { status, plan }),
        (ControlReply::Refused(why), _) | (_, ControlReply::Refused(why)) => Err(why),
        _ => Err("the supervisor answered another question; are both binaries from one build?".to_owned()),
    }
}

/// Takes the terminal, and gives it back however this ends.
struct Screen(DefaultTerminal);

impl Screen {
    fn take() -> io::Result<Self> {
        let screen = ratatui::try_init().map(Self).inspect_err(|_| ratatui::restore());
        // The hook gives the terminal back and prints. Other threads' panics are heard of here, and
        // printed when nothing is drawn any more.
        let gives_back = panic::take_hook();
        let drawing = thread::current().id();
        panic::set_hook(Box::new(move |info| {
            if thread::current().id() == drawing {
                gives_back(info);
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
        self.0.show_cursor().ok();
        ratatui::try_restore().ok();
    }
}

fn live(interval: Duration, run_dir: &Path, began: Instant) -> Result<u8, TopError> {
    let (heard, hears) = mpsc::sync_channel(WAITING);
    // Blocked before other threads begin, so that only the one that waits for them gets them.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT]);
    signals.thread_block().map_err(io::Error::from)?;
    let mut screen = Screen::take()?;
    start("signals", &heard, move |heard| {
        signals.wait().map(|signal| heard.send(TopEvent::Signal(signal)).is_ok()).map_err(io::Error::from)?;
        Ok(())
    })?;
    start("keys", &heard, keys)?;
    let _goes_on = ask_on(run_dir, interval, &heard)?;
    serve(&mut screen, App::new(interval), began, &hears)
}

fn serve(
    screen: &mut Screen,
    mut app: App,
    began: Instant,
    hears: &Receiver<TopEvent>,
) -> Result<u8, TopError> {
    screen.draw(&app)?;
    for heard in hears {
        match heard {
            TopEvent::Answer(answer) => app.hear(answer, began.elapsed()),
            TopEvent::Key(key) if app.press(key) == KeyAction::Quit => return Ok(0),
            TopEvent::Key(_) | TopEvent::Resized => {}
            TopEvent::Signal(signal) => return Ok(128 + u8::try_from(signal as i32).unwrap_or(0)),
            TopEvent::Failed(broken) => return Err(broken),
        }
        screen.draw(&app)?;
    }
    Ok(0)
}

/// A thread that tells if it ends otherwise than by having done its work.
fn start(
    name: &str,
    heard: &SyncSender<TopEvent>,
    work: impl FnOnce(&SyncSender<TopEvent>) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let heard = heard.clone();
    let named = name.to_owned();
    let body = move || {
        let broken = match panic::catch_unwind(AssertUnwindSafe(|| work(&heard))) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => TopError::Terminal(error),
            Err(panicked) => TopError::Panicked(named, said(&*panicked)),
        };
        heard.send(TopEvent::Failed(broken)).ok();
    };
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

fn said(panicked: &(dyn Any + Send)) -> String {
    let text = panicked.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panicked.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Until nobody hears.
fn keys(heard: &SyncSender<TopEvent>) -> io::Result<()> {
    loop {
        let next = match event::read()? {
            Event::Key(key) => TopEvent::Key(key),
            Event::Resize(..) => TopEvent::Resized,
            _ => continue,
        };
        if heard.send(next).is_err() {
            return Ok(());
        }
    }
}

/// Asks until the returned end is dropped.
fn ask_on(run_dir: &Path, interval: Duration, heard: &SyncSender<TopEvent>) -> io::Result<SyncSender<()>> {
    let (goes_on, ends) = mpsc::sync_channel(1);
    let run_dir = run_dir.to_owned();
    start("asks", heard, move |heard| {
        loop {
            let told = heard.send(TopEvent::Answer(look(&run_dir)));
            if told.is_err() || ends.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                return Ok(());
            }
        }
    })?;
    Ok(goes_on)
}
