//! Tables in Markdown.

use serde_json::Value;

/// A table that is built row by row.
pub(super) struct Table(String);

impl Table {
    /// Makes a table with these headings.
    pub(super) fn new(heads: &[&str]) -> Self {
        let rule = vec!["---"; heads.len()];
        Self(format!("| {} |\n|{}|\n", heads.join(" | "), rule.join("|")))
    }

    pub(super) fn row(&mut self, name: &str, cells: impl Iterator<Item = String>) {
        let cells: Vec<String> = std::iter::once(name.to_owned()).chain(cells).collect();
        self.0.push_str(&format!("| {} |\n", cells.join(" | ")));
    }

    pub(super) fn text(self) -> String {
        self.0
    }
}

/// Formats a value for a reader. Shows a dash for a missing value.
pub(super) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        Value::Number(number) => {
            number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string())
        }
        other => other.to_string(),
    }
}
