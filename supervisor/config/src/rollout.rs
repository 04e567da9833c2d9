//! Reads the section `rollout` of models.

use std::path::Path;
use std::time::Duration;

use http::HeaderName;

use super::client_changes::MAX_BYTES;
use super::faults::FaultLog;
use super::keys::{COMPARISONS, ROLLOUT};
use super::reader::{Fields, Value};
use super::types::{AnswerComparison, RolloutBounds, RolloutConfig, RolloutRules};
use super::{units, yaml};

/// The word of `for` with which an operator ends each step.
const MANUAL: &str = "manual";

impl Default for RolloutConfig {
    fn default() -> Self {
        rollout_with(None, "{}").expect("the defaults in the table are valid")
    }
}

/// Returns a rollout with the changes in a text, which is JSON or YAML with the keys of the section
/// `rollout`. Other keys keep their values in `base`. Without `base`, they have their defaults.
///
/// # Errors
///
/// A text that lists the faults of the keys and values.
pub fn rollout_with(base: Option<&RolloutConfig>, json: &str) -> Result<RolloutConfig, String> {
    if json.len() > MAX_BYTES {
        return Err(format!("the rollout has {} bytes; at most {MAX_BYTES} are allowed", json.len()));
    }
    let log = FaultLog::new(Path::new("rollout"));
    let root = yaml::parse(json, "{\"mirror\": \"5%\"}", &log);
    let changed = root.map(|root| rollout(&Value::root(&root, &ROLLOUT, &log).fields(), base));
    log.into_text()?;
    changed.ok_or_else(|| "the text has no keys".to_owned())
}

/// Reads a rollout. Missing keys have their values in `base`, or their defaults without `base`.
pub(super) fn rollout(fields: &Fields<'_>, base: Option<&RolloutConfig>) -> RolloutConfig {
    let keys = Overlay { fields, base };
    let sticky = fields.optional("sticky", |value| value.parsed(header));
    RolloutConfig {
        rules: RolloutRules {
            mirror: keys.read("mirror", |base| base.rules.mirror, fraction),
            canary: keys.read("canary", |base| base.rules.canary.clone(), canary),
            step: keys.read("for", |base| StageEnd(base.rules.step), step).0,
            bounds: bounds(&Overlay { fields: &fields.section("abort_if"), base }),
        },
        share: keys.read("share", |base| base.share, |value| value.parsed(units::percent)),
        compare: keys.read("compare", |base| base.compare, compare),
        sticky: sticky.or_else(|| base?.sticky.clone()),
        keep: keys.read("keep", |base| base.keep, |value| value.duration()),
        replace: keys.read("replace", |base| base.replace, |value| value.flag()),
    }
}

fn bounds(keys: &Overlay<'_>) -> RolloutBounds {
    RolloutBounds {
        errors: keys.read("errors", |base| base.rules.bounds.errors, fraction),
        differences: keys.read("differences", |base| base.rules.bounds.differences, fraction),
        slowdown: keys.read("slowdown", |base| base.rules.bounds.slowdown, |value| value.number()),
    }
}

/// The keys of a rollout, over another rollout.
struct Overlay<'a> {
    fields: &'a Fields<'a>,
    base: Option<&'a RolloutConfig>,
}

impl Overlay<'_> {
    /// Returns the value of a key. If the key is missing or has a fault, returns the value in the
    /// base, or the table's default.
    fn read<T>(
        &self,
        name: &'static str,
        in_base: impl Fn(&RolloutConfig) -> T,
        read: impl Fn(&Value<'_>) -> Option<T>,
    ) -> T {
        match self.base {
            Some(base) => self.fields.optional(name, |value| read(value)).unwrap_or_else(|| in_base(base)),
            None => self.fields.read(name, read),
        }
    }
}

/// The time after which a stage ends. With `None`, an operator ends the stage.
struct StageEnd(Option<Duration>);

fn step(value: &Value<'_>) -> Option<StageEnd> {
    if value.word() == Some(MANUAL) {
        return Some(StageEnd(None));
    }
    if let Some(advice) = value.similar_word(&[MANUAL]) {
        value.fault(advice);
        return None;
    }
    value.duration().map(|step| StageEnd(Some(step)))
}

fn fraction(value: &Value<'_>) -> Option<f64> {
    value.parsed(units::fraction)
}

/// Reads a part of the requests, or a list of ascending parts.
fn canary(value: &Value<'_>) -> Option<Vec<f64>> {
    let part = |value: &Value<'_>| {
        let part = fraction(value)?;
        if part == 0.0 {
            value.fault("must be above 0%; remove the part");
        }
        Some(part)
    };
    if value.is_scalar() {
        return part(value).map(|part| vec![part]);
    }
    let parts: Vec<f64> = value.items().iter().map(part).collect::<Option<_>>()?;
    if !parts.is_sorted_by(|a, b| a < b) {
        value.fault("the parts must ascend, for example [1%, 10%, 50%]");
    }
    Some(parts)
}

fn compare(value: &Value<'_>) -> Option<AnswerComparison> {
    if value.is_scalar() {
        return value.one_of(&COMPARISONS);
    }
    let cosine = value.fields().required("cosine", "give the smallest cosine, for example {cosine: 0.99}");
    cosine?.number().map(AnswerComparison::Cosine)
}

/// Returns the name of a header in lower case.
fn header(text: &str) -> Result<String, String> {
    let name: Result<HeaderName, _> = text.parse();
    let name = name.map_err(|_| format!("`{text}` is not the name of a header; use for example x-user"))?;
    Ok(name.as_str().to_owned())
}

#[cfg(test)]
mod tests;
