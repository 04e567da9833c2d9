//! The state of `top`: the last reply, the selected model, and the effects of keys.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::snapshot::{TopReply, TopSnapshot};

#[derive(Debug, Default)]
pub(super) struct App {
    pub(super) interval: Duration,
    pub(super) snapshot: Option<TopSnapshot>,
    /// The outage, or `None` if the supervisor replies.
    pub(super) away: Option<Unreachable>,
    /// The name of the selected model. Unlike an index, the name stays valid when models are added
    /// or removed.
    selected: Option<String>,
}

#[derive(Debug)]
pub(super) struct Unreachable {
    pub(super) why: String,
    since: Duration,
    now: Duration,
}

impl Unreachable {
    pub(super) fn lasts(&self) -> Duration {
        self.now.saturating_sub(self.since)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyAction {
    Redraw,
    Quit,
}

impl App {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, ..Self::default() }
    }

    /// Processes the supervisor's reply, or the reason why no reply arrived.
    pub(super) fn update(&mut self, reply: Result<TopReply, String>, now: Duration) {
        match reply {
            Ok(reply) => {
                self.snapshot = Some(TopSnapshot::of(reply));
                self.away = None;
            }
            Err(why) => {
                let since = self.away.as_ref().map_or(now, |away| away.since);
                self.away = Some(Unreachable { why, since, now });
            }
        }
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> KeyAction {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return KeyAction::Quit,
            KeyCode::Char('q') | KeyCode::Esc => return KeyAction::Quit,
            KeyCode::Char('j') | KeyCode::Down => self.select(|place| place.saturating_add(1)),
            KeyCode::Char('k') | KeyCode::Up => self.select(|place| place.saturating_sub(1)),
            KeyCode::Home => self.select(|_| 0),
            KeyCode::End => self.select(|_| usize::MAX),
            _ => {}
        }
        KeyAction::Redraw
    }

    /// Returns the index of the selected model, or 0 if that model no longer exists.
    pub(super) fn selected(&self) -> usize {
        let models = self.snapshot.iter().flat_map(|snapshot| &snapshot.models);
        let chosen = |name: &String| models.clone().position(|model| model.status.name == *name);
        self.selected.as_ref().and_then(chosen).unwrap_or(0)
    }

    fn select(&mut self, to: impl Fn(usize) -> usize) {
        let Some(snapshot) = &self.snapshot else { return };
        let place = to(self.selected()).min(snapshot.models.len().saturating_sub(1));
        self.selected = snapshot.models.get(place).map(|model| model.status.name.clone());
    }
}
