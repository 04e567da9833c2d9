//! The changes of a model's configuration by clients, which the next supervisor applies too.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use shadowslice_config::{self as config, Config, ModelConfig};

/// The changes as JSON, in the order in which clients loaded the model with them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct ClientOverrides(Vec<String>);

impl ClientOverrides {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a change. It replaces earlier changes of the same keys.
    pub(super) fn add(&mut self, json: &str) {
        let new = keys(json);
        self.0.retain(|earlier| !keys(earlier).is_subset(&new));
        self.0.push(json.to_owned());
    }

    /// Returns the model with the changes that are still possible, and these changes. Reads files.
    pub(super) fn applied(&self, config: &Config, written: &ModelConfig) -> (ModelConfig, Self) {
        let (mut config, mut applied) = (config.clone(), Self::default());
        for json in &self.0 {
            let changed = config::apply_client_changes(&config, written, json);
            let changed = changed.and_then(|model| model.broken.clone().map_or(Ok(model), Err));
            match changed {
                Ok(model) => {
                    config.models.iter_mut().filter(|other| other.name == model.name).for_each(|other| {
                        *other = model.clone();
                    });
                    applied.0.push(json.clone());
                }
                Err(why) => {
                    let model = &written.name;
                    tracing::warn!(
                        model,
                        why,
                        json,
                        "a client's earlier change of the model's configuration is no longer valid; undoing the change"
                    );
                }
            }
        }
        let model = config.models.into_iter().find(|model| model.name == written.name);
        (model.unwrap_or_else(|| written.clone()), applied)
    }
}

/// Returns the places of all values in a document.
fn keys(json: &str) -> BTreeSet<String> {
    fn collect(value: &Value, place: &str, keys: &mut BTreeSet<String>) {
        match value {
            Value::Object(entries) => {
                entries.iter().for_each(|(key, value)| collect(value, &format!("{place}/{key}"), keys));
            }
            _ => {
                keys.insert(place.to_owned());
            }
        }
    }
    let mut all = BTreeSet::new();
    // A document that cannot be parsed was refused, and has no keys.
    collect(&serde_json::from_str(json).unwrap_or(Value::Object(Default::default())), "", &mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_change_of_the_same_keys_is_the_one_that_counts() {
        let mut changes = ClientOverrides::default();
        for json in [r#"{"slo": "5ms"}"#, r#"{"share": {"max": "4%"}}"#, r#"{"slo": "9ms", "share": "2%"}"#] {
            changes.add(json);
        }
        assert_eq!(changes.0, [r#"{"share": {"max": "4%"}}"#, r#"{"slo": "9ms", "share": "2%"}"#]);
        changes.add(r#"{"share": {"initial": "1%"}}"#);
        assert_eq!(changes.0.len(), 3, "another key of the same group");
    }
}
