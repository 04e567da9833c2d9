//! Loads from files that have one arrival per line, in the form `seconds,model`.

use std::collections::HashMap;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use crate::scenario::SimulatedArrival;

/// The maximum duration of a load, in seconds. It is about eleven days.
pub const MAX_SECONDS: f64 = 1e6;

/// The maximum number of arrivals of a load.
pub const MAX_ARRIVALS: usize = 50_000_000;

/// An error in one line of a file of arrivals.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("line {line}: {wrong}")]
pub struct BadLine {
    /// The number of the line, counted from 1.
    pub line: usize,
    /// The reason. It is part of this error's text, so it is not returned as the error's source.
    pub wrong: BadLineReason,
}

/// The reason why a line is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadLineReason {
    #[error("invalid arrival {0:?}; write `seconds,model`, for example `0.25,digits`")]
    NoArrival(String),
    #[error("invalid number of seconds {0:?}; write for example `0.25,digits`")]
    NotANumber(String),
    #[error("an arrival at {0} s is before the start; write 0 or more seconds")]
    Negative(f64),
    #[error("an arrival at {0} s is too late; the maximum is {MAX_SECONDS} s")]
    TooLate(f64),
    #[error("time goes back from {before} s to {seconds} s; sort the lines by time")]
    Backwards { seconds: f64, before: f64 },
    #[error("unknown model {0:?}; use the name of a model in the configuration")]
    UnknownModel(String),
    #[error("the load has too many arrivals; the maximum is {MAX_ARRIVALS}")]
    TooLong,
}

/// The byte order mark, which spreadsheet programs write at the start of a file.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Parses the text of a file. Skips empty lines and a header line `seconds,model`. Lines may end with a
/// carriage return.
pub fn read<'n>(
    text: &str,
    names: impl IntoIterator<Item = &'n str>,
) -> Result<Vec<SimulatedArrival>, BadLine> {
    let models: HashMap<&str, usize> =
        names.into_iter().enumerate().map(|(model, name)| (name, model)).collect();
    let (mut arrivals, mut before) = (Vec::new(), 0.0);
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || (index == 0 && line == "seconds,model") {
            continue;
        }
        let bad = |wrong| BadLine { line: index + 1, wrong };
        if arrivals.len() == MAX_ARRIVALS {
            return Err(bad(BadLineReason::TooLong));
        }
        let (seconds, model) = arrival(line, &models).map_err(bad)?;
        if seconds < before {
            return Err(bad(BadLineReason::Backwards { seconds, before }));
        }
        before = seconds;
        arrivals
            .push(SimulatedArrival { at: Timestamp::after_origin(Duration::from_secs_f64(seconds)), model });
    }
    Ok(arrivals)
}

/// Returns the line of a file for an arrival. [`read`] parses the same arrival from this line.
/// `name` is the name of the arrival's model.
pub fn line(arrival: &SimulatedArrival, name: &str) -> String {
    let at = arrival.at.since_origin();
    format!("{}.{:09},{name}", at.as_secs(), at.subsec_nanos())
}

fn arrival(line: &str, models: &HashMap<&str, usize>) -> Result<(f64, usize), BadLineReason> {
    let (seconds, model) = line.split_once(',').ok_or_else(|| BadLineReason::NoArrival(shortened(line)))?;
    let (seconds, model) = (seconds.trim(), model.trim());
    let number: f64 = seconds.parse().map_err(|_| BadLineReason::NotANumber(shortened(seconds)))?;
    if number.is_nan() {
        return Err(BadLineReason::NotANumber(shortened(seconds)));
    }
    if number < 0.0 {
        return Err(BadLineReason::Negative(number));
    }
    if number > MAX_SECONDS {
        return Err(BadLineReason::TooLate(number));
    }
    let model = models.get(model).ok_or_else(|| BadLineReason::UnknownModel(shortened(model)))?;
    Ok((number, *model))
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}
