//! A client for the metrics sockets, and a strict parser for the Prometheus text format.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::home::DEFAULT_TIMEOUT;

#[derive(Debug, Clone)]
pub struct MetricsResponse {
    /// The status line and the headers, in lower case.
    pub head: String,
    pub body: String,
}

/// Sends an HTTP request over a new connection to a Unix socket.
pub async fn ask(socket: &Path, method: &str, path: &str) -> io::Result<MetricsResponse> {
    let asking = async {
        let mut stream = UnixStream::connect(socket).await?;
        let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        let (head, body) = text.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
        Ok(MetricsResponse { head: head.to_lowercase(), body: body.to_owned() })
    };
    timeout(DEFAULT_TIMEOUT, asking).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// The metric values, by series such as `a_total{model="m"}`.
#[derive(Debug, Clone, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Parses the text format. An error names the malformed line. The parser is stricter than the
    /// format: HELP and TYPE must precede the values of their metric, in this order.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut metrics = Self::default();
        let (mut helped, mut typed) = (String::new(), String::new());
        for line in text.lines() {
            let wrong = || format!("malformed line `{line}`");
            if let Some(help) = line.strip_prefix("# HELP ") {
                helped = help.split_once(' ').ok_or_else(wrong)?.0.to_owned();
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').ok_or_else(wrong)?;
                if name != helped || !["counter", "gauge", "histogram", "summary"].contains(&kind) {
                    return Err(wrong());
                }
                typed = name.to_owned();
            } else {
                let (name, value) = sample(line).ok_or_else(wrong)?;
                let rest = name.strip_prefix(&typed).filter(|_| !typed.is_empty()).ok_or_else(wrong)?;
                let suffix = rest.split('{').next().unwrap_or_default();
                if !["", "_bucket", "_sum", "_count"].contains(&suffix) {
                    return Err(wrong());
                }
                if metrics.0.insert(name.to_owned(), value).is_some() {
                    return Err(format!("duplicate series: `{line}`"));
                }
            }
        }
        Ok(metrics)
    }

    /// Returns the value of a series. `series` is the name with its labels, as in the text format.
    pub fn named(&self, series: &str) -> Option<f64> {
        self.0.get(series).copied()
    }

    /// Returns the value of a model's metric. `more` contains further labels, for example
    /// `, le="1"`.
    pub fn of(&self, model: &str, metric: &str, more: &str) -> Option<f64> {
        self.named(&format!("shadowslice_{metric}{{model=\"{model}\",gpu=\"0\"{more}}}"))
    }
}

/// Parses a line, and returns the series and the value.
fn sample(line: &str) -> Option<(&str, f64)> {
    let (name, value) = line.rsplit_once(' ')?;
    let (metric, labels) = name.split_once('{').unwrap_or((name, "}"));
    let letters = |text: &str| {
        text.starts_with(|first: char| first.is_ascii_lowercase())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    let mut rest = labels.strip_suffix('}')?;
    while !rest.is_empty() {
        let (label, quoted) = rest.split_once("=\"")?;
        rest = after_quote(quoted)?;
        rest = rest.strip_prefix(',').unwrap_or(rest);
        if !letters(label) {
            return None;
        }
    }
    letters(metric).then_some(())?;
    Some((name, value.parse().ok()?))
}

/// Returns the text that follows the closing quote of a label's value.
fn after_quote(text: &str) -> Option<&str> {
    let mut escaped = false;
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return text.get(at + 1..),
            _ => {}
        }
    }
    None
}
