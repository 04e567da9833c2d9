//! What the supervisor's log says of the policy's orders.

use std::time::SystemTime;

use prost_types::Timestamp;
use serde::Deserialize;

/// How the log calls an order.
const MESSAGE: &str = "the policy changes a share";

/// An order to change a share.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Order {
    pub(super) at: SystemTime,
    pub(super) from_sms: u32,
    pub(super) to_sms: u32,
    pub(super) sign: Sign,
}

/// What showed that a share should change.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sign {
    /// A request, and so the log names it.
    Request(String),
    /// An interval was over.
    Interval,
}

/// A line of the log.
#[derive(Deserialize)]
struct Line {
    timestamp: String,
    fields: Fields,
}

#[derive(Deserialize)]
struct Fields {
    message: String,
    model: String,
    cause: String,
    verdict: String,
    from_sms: u32,
    to_sms: u32,
}

impl Order {
    /// Of a line, if it is about that model.
    fn read(line: &str, model: &str) -> Option<Self> {
        let Line { timestamp, fields } = serde_json::from_str(line).ok()?;
        if fields.message != MESSAGE || fields.model != model {
            return None;
        }
        let at = SystemTime::try_from(timestamp.parse::<Timestamp>().ok()?).ok()?;
        let sign = if fields.cause == "pressure" { Sign::Request(fields.verdict) } else { Sign::Interval };
        Some(Self { at, from_sms: fields.from_sms, to_sms: fields.to_sms, sign })
    }
}

/// The orders to give a model more, in a log of lines in JSON.
pub(super) fn to_grow(log: &str, model: &str) -> Vec<Order> {
    let orders = log.lines().filter_map(|line| Order::read(line, model));
    orders.filter(|order| order.to_sms > order.from_sms).collect()
}

impl std::fmt::Display for Sign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request(sign) => f.write_str(sign),
            Self::Interval => f.write_str("an interval's decision"),
        }
    }
}
