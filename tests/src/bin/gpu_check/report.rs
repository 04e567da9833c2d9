//! The page.
use serde_json::Value;

pub(crate) fn page(figures: &Value) -> String {
    figures.to_string()
}
