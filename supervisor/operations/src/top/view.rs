//! Formats the whole screen as styled lines.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;

use super::app::App;
use super::room::{LineBudget, LineNeeds, distribute};
use super::snapshot::{TopModel, TopSnapshot};
use super::{details, gpus, models};
use crate::figures::span;
use crate::history::ModelSample;
use crate::status::supervisor;
use crate::status::table::{cut, wrapped};
use shadowslice_datapath::readiness::HostState;

const KEYS: &str = "q quits, j/k or arrows select a model";

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const PLAIN: Style = Style::new();

/// Returns the content of the screen for a terminal of this size.
pub(super) fn screen(app: &App, width: u16, height: u16) -> Vec<Line<'static>> {
    let (width, height) = (usize::from(width), usize::from(height));
    if width == 0 {
        return Vec::new();
    }
    let last = last_line(app, width);
    let Some(snapshot) = &app.snapshot else {
        let mut lines = vec![Line::styled(cut("shadowslice top", width), BOLD)];
        let text = app.away.as_ref().map_or("connecting to the supervisor", |away| away.why.as_str());
        lines.extend(wrapped(text, width, 2).into_iter().map(Line::from));
        lines.truncate(height.saturating_sub(1));
        return filled(lines, last, height);
    };
    let selected = app.selected();
    let details = snapshot.models.get(selected).map(|model| details::lines(model, width)).unwrap_or_default();
    let full: Vec<_> = snapshot.gpus.iter().map(|gpu| gpus::full(snapshot, gpu, width)).collect();
    let needs = LineNeeds {
        models: snapshot.models.len(),
        full_gpus: full.iter().map(Vec::len).sum(),
        short_gpus: snapshot.gpus.len(),
        details: details.len(),
    };
    let room = distribute(height.saturating_sub(3), needs);
    let (first, shown) = window(snapshot, selected, room.models, width);
    let mut lines = vec![title(app, snapshot, (first, room.models), width)];
    lines.extend(shown);
    lines.extend(gpu_lines(snapshot, full, room, selected, width));
    lines.extend(shortened(details, room.details, width));
    lines.truncate(height.saturating_sub(1));
    filled(lines, last, height)
}

/// Returns the whole content without a limit on the number of lines, for output without a terminal.
pub(super) fn page(app: &App, width: u16) -> Vec<Line<'static>> {
    let width = usize::from(width);
    let Some(snapshot) = &app.snapshot else { return Vec::new() };
    let mut lines = vec![title(app, snapshot, (0, snapshot.models.len()), width)];
    let own = snapshot.supervisor.iter().flat_map(|own| wrapped(&supervisor(own), width, 2));
    lines.extend(own.map(Line::from));
    lines.extend(models::table(&snapshot.models, width).into_iter().map(Line::from));
    lines.extend(snapshot.gpus.iter().flat_map(|gpu| gpus::full(snapshot, gpu, width)).map(Line::from));
    lines.extend(snapshot.models.iter().flat_map(|model| details::lines(model, width)).map(Line::from));
    lines
}

fn filled(mut lines: Vec<Line<'static>>, last: Line<'static>, height: usize) -> Vec<Line<'static>> {
    if height > 0 {
        lines.resize(height - 1, Line::default());
        lines.push(last);
    }
    lines
}

fn title(app: &App, snapshot: &TopSnapshot, (first, shown): (usize, usize), width: usize) -> Line<'static> {
    let host = match snapshot.host {
        HostState::Serving if snapshot.ready => "ready",
        HostState::Serving => "not ready",
        HostState::Drained => "drained",
        HostState::Stopping => "stopping",
    };
    let act = if snapshot.act || snapshot.policy == "static" { "" } else { ", act: false" };
    let all = snapshot.models.len();
    let models = if shown < all {
        format!("models {}-{} of {all}", first + 1, first + shown)
    } else {
        format!("{all} {}", if all == 1 { "model" } else { "models" })
    };
    let every = span(app.interval.as_secs_f64());
    let text =
        format!("shadowslice top: host {host}, {models}, policy {}{act}, every {every}", snapshot.policy);
    let own = snapshot.supervisor.iter().map(|own| format!("{text}; {}", supervisor(own)));
    let text = own.into_iter().find(|text| text.chars().count() <= width).unwrap_or(text);
    Line::styled(cut(&text, width), BOLD)
}

/// Returns the table's head, the rows around the selected row, and the index of the first of these
/// rows.
fn window(snapshot: &TopSnapshot, selected: usize, rows: usize, width: usize) -> (usize, Vec<Line<'static>>) {
    let first = selected.saturating_sub(rows / 2).min(snapshot.models.len().saturating_sub(rows));
    let mut table = models::table(&snapshot.models, width).into_iter();
    let head = table.next().unwrap_or_default();
    let mut lines = vec![Line::styled(cut(&head, width), BOLD)];
    for (place, row) in table.enumerate().skip(first).take(rows) {
        let style = snapshot.models.get(place).map_or(PLAIN, style);
        let style = if place == selected { style.add_modifier(Modifier::REVERSED) } else { style };
        lines.push(Line::styled(format!("{:<width$}", cut(&row, width)), style));
    }
    (first, lines)
}

fn style(model: &TopModel) -> Style {
    match model {
        model if !model.is_ready() => PLAIN.fg(Color::Red),
        model if model.sample.as_ref().is_some_and(ModelSample::violates_slo) => PLAIN.fg(Color::Yellow),
        model if model.is_idle() => PLAIN.add_modifier(Modifier::DIM),
        _ => PLAIN,
    }
}

/// Returns the lines of the GPUs. If there are too few lines for all GPUs, starts with the selected
/// model's GPU.
fn gpu_lines(
    snapshot: &TopSnapshot,
    full: Vec<Vec<String>>,
    room: LineBudget,
    selected: usize,
    width: usize,
) -> Vec<Line<'static>> {
    let lines: Vec<String> = if room.full_gpus {
        full.into_iter().flatten().collect()
    } else {
        let gpu = snapshot.models.get(selected).map_or(0, |model| model.status.gpu);
        let first = gpu.min(snapshot.gpus.len().saturating_sub(room.gpus));
        snapshot.gpus.iter().skip(first).map(|gpu| gpus::short(snapshot, gpu, width)).collect()
    };
    let style = |line: &String| if line.starts_with("GPU") && room.full_gpus { BOLD } else { PLAIN };
    lines.into_iter().take(room.gpus).map(|line| Line::styled(cut(&line, width), style(&line))).collect()
}

/// Cuts the lines to the available room. If lines are cut, the last line tells the reader that
/// there are more.
fn shortened(mut lines: Vec<String>, room: usize, width: usize) -> Vec<Line<'static>> {
    if lines.len() > room && room > 1 {
        lines.truncate(room - 1);
        lines.push(cut("  (a taller terminal shows more)", width));
    }
    let style = |place: usize| if place == 0 { BOLD } else { PLAIN };
    lines.into_iter().take(room).enumerate().map(|(place, line)| Line::styled(line, style(place))).collect()
}

fn last_line(app: &App, width: usize) -> Line<'static> {
    match &app.away {
        None => Line::styled(cut(KEYS, width), PLAIN.add_modifier(Modifier::DIM)),
        Some(away) => {
            let lasts = away.lasts().as_secs_f64();
            let lasts = if lasts > 0.0 { format!(" for {}", span(lasts)) } else { String::new() };
            let every = span(app.interval.as_secs_f64());
            let text = format!("no supervisor{lasts}; retrying every {every}: {}", away.why);
            Line::styled(cut(&text, width), PLAIN.fg(Color::Red).add_modifier(Modifier::REVERSED))
        }
    }
}
