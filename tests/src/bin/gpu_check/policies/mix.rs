//! Mixes from YAML files: models, their clients, and the spans in which the models are measured.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::contestants;
use super::yaml;
use crate::error::StageError;

/// A set of models that receive requests at the same time.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelMix {
    pub(super) name: String,
    pub(super) models: Vec<MixModel>,
    /// The lengths of consecutive spans, in seconds.
    pub(super) spans_s: Vec<f64>,
    /// The maximum batch size, in rows.
    #[serde(default = "default_batch")]
    pub(super) batch: u32,
    /// The policies to compare. If the list is empty, the default policies are compared.
    #[serde(default)]
    pub(super) policies: Vec<String>,
}

/// A model and its clients.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MixModel {
    pub(super) model: String,
    pub(super) slo_ms: u64,
    pub(super) priority: u32,
    pub(super) clients: MixClients,
    /// True for a Python client over HTTP. False for a Rust client over gRPC, which checks all
    /// answers.
    #[serde(default)]
    pub(super) python: bool,
    /// The share under the policy `by hand+admission`, in percent.
    pub(super) share_percent: Option<u32>,
}

/// The clients of a model.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum MixClients {
    /// An open-loop load. The value is the rate in each span, in requests per second.
    PerS(Vec<f64>),
    /// A closed-loop load. The value is the number of clients.
    Closed(usize),
}

const fn default_batch() -> u32 {
    16
}

const SMALL: &str = include_str!("../../../../gpu/mixes/small.yaml");
const FIVE: &str = include_str!("../../../../gpu/mixes/five.yaml");

/// Returns the mixes of one to three models.
pub(super) fn small() -> Result<Vec<ModelMix>, StageError> {
    parse(SMALL, "tests/gpu/mixes/small.yaml")
}

/// Returns the mixes of five models.
pub(super) fn five() -> Result<Vec<ModelMix>, StageError> {
    parse(FIVE, "tests/gpu/mixes/five.yaml")
}

/// Reads a file that contains one mix or a list of mixes.
pub(super) fn read(path: &Path) -> Result<Vec<ModelMix>, StageError> {
    let text = std::fs::read_to_string(path).map_err(StageError::io("read", path))?;
    parse(&text, &path.display().to_string())
}

fn parse(text: &str, file: &str) -> Result<Vec<ModelMix>, StageError> {
    let unusable = |why: String| StageError::Unusable(format!("{file}: {why}"));
    let mixes = match yaml::parse(text).map_err(unusable)? {
        Value::Array(mixes) => mixes,
        mix => vec![mix],
    };
    mixes.into_iter().enumerate().map(|(n, mix)| parse_mix(mix, n).map_err(unusable)).collect()
}

/// Parses a mix. Parses its models one by one, so that an error can name the model.
fn parse_mix(mut mix: Value, n: usize) -> Result<ModelMix, String> {
    let name = mix["name"].as_str().map_or_else(|| format!("mix {}", n + 1), |name| format!("mix `{name}`"));
    let models = mix.get_mut("models").map(Value::take);
    let Some(Value::Array(models)) = models else { return Err(format!("{name} has no list `models`")) };
    mix["models"] = Value::Array(Vec::new());
    let mut mix: ModelMix = serde_json::from_value(mix).map_err(|error| format!("{name}: {error}"))?;
    for (n, model) in models.into_iter().enumerate() {
        let called = model["model"].as_str().map_or_else(|| format!("models[{n}]"), str::to_owned);
        let guest = serde_json::from_value(model).map_err(|error| format!("{name}: {called}: {error}"))?;
        mix.models.push(guest);
    }
    mix.check().map_err(|why| format!("{name}: {why}"))?;
    Ok(mix)
}

impl ModelMix {
    fn check(&self) -> Result<(), String> {
        if self.models.is_empty() {
            return Err("`models` is empty".into());
        }
        if self.spans_s.is_empty() || self.spans_s.iter().any(|span| !(0.1..=600.0).contains(span)) {
            return Err("`spans_s` needs one length or more, each from 0.1 to 600 seconds".into());
        }
        for (n, guest) in self.models.iter().enumerate() {
            let model = &guest.model;
            if self.models[..n].iter().any(|other| other.model == *model) {
                return Err(format!("duplicate model {model}"));
            }
            guest.check(self.spans_s.len()).map_err(|why| format!("{model}: {why}"))?;
        }
        let known = |name: &String| contestants::names().any(|known| known == name);
        match self.policies.iter().find(|name| !known(name)) {
            Some(name) => {
                let all: Vec<&str> = contestants::names().collect();
                Err(format!("unknown policy `{name}`; use some of: {}", all.join("; ")))
            }
            None => Ok(()),
        }
    }

    /// Returns true if every model has a share for `by hand+admission`.
    pub(super) fn has_shares(&self) -> bool {
        self.models.iter().all(|guest| guest.share_percent.is_some())
    }

    /// Multiplies all rates, and appends the factor to the name.
    pub(super) fn scale(&mut self, factor: f64) {
        if factor == 1.0 {
            return;
        }
        self.name += &format!(" x{factor}");
        for guest in &mut self.models {
            if let MixClients::PerS(rates) = &mut guest.clients {
                rates.iter_mut().for_each(|rate| *rate *= factor);
            }
        }
    }
}

impl MixModel {
    fn check(&self, spans: usize) -> Result<(), String> {
        match &self.clients {
            MixClients::PerS(rates) if rates.len() != spans => {
                Err(format!("`per_s` has {} rates for {spans} spans; give one for each span", rates.len()))
            }
            MixClients::PerS(rates) if rates.iter().any(|rate| !(0.0..=1e6).contains(rate)) => {
                Err("a rate in `per_s` is not between 0 and 1000000".into())
            }
            MixClients::Closed(0) => Err("`closed` needs one client or more".into()),
            MixClients::Closed(_) if self.python => Err("a client in Python needs `per_s`".into()),
            _ if self.slo_ms == 0 => Err("`slo_ms` is 0; use 1 or more".into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINE: &str = "name: a\nspans_s: [1, 2]\nmodels:\n  - {model: m, slo_ms: 5, priority: 1, clients: {per_s: [10, 20]}}\n  \
                        - {model: n, slo_ms: 5, priority: 2, clients: {closed: 3}}\n";

    fn fault(text: &str) -> String {
        parse(text, "f.yaml").unwrap_err().to_string()
    }

    #[test]
    fn the_mixes_in_the_tree_are_valid() {
        assert_eq!(small().unwrap().len(), 7);
        assert_eq!(five().unwrap().len(), 5);
        assert!(small().unwrap().iter().any(ModelMix::has_shares));
    }

    #[test]
    fn rates_are_scaled_and_closed_loops_are_not() {
        let mut mix = parse(FINE, "f.yaml").unwrap().remove(0);
        assert_eq!((mix.batch, mix.has_shares()), (16, false));
        mix.scale(1.5);
        assert_eq!(mix.name, "a x1.5");
        assert!(matches!(&mix.models[0].clients, MixClients::PerS(rates) if *rates == [15.0, 30.0]));
        assert!(matches!(mix.models[1].clients, MixClients::Closed(3)));
    }

    #[test]
    fn errors_name_file_mix_and_model() {
        for (from, to, wanted) in [
            ("per_s: [10, 20]", "per_s: [10]", "f.yaml: mix `a`: m: `per_s` has 1 rates for 2 spans"),
            ("slo_ms: 5, priority: 1", "slo: 5, priority: 1", "f.yaml: mix `a`: m: unknown field `slo`"),
            ("closed: 3", "closed: 0", "f.yaml: mix `a`: n: `closed` needs one client"),
            ("closed: 3", "often: 3", "f.yaml: mix `a`: n: unknown variant `often`"),
            (
                "name: a",
                "name: a\npolicies: [best]",
                "f.yaml: mix `a`: unknown policy `best`; use some of: unpar",
            ),
            ("model: n", "model: m", "f.yaml: mix `a`: duplicate model m"),
            ("models:", "model:", "f.yaml: mix `a` has no list `models`"),
            ("[1, 2]", "[]", "f.yaml: mix `a`: `spans_s` needs"),
        ] {
            let fault = fault(&FINE.replace(from, to));
            assert!(fault.starts_with(wanted), "{fault}");
        }
    }
}
