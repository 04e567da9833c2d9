//! The arguments of `shadowslice rollout`.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use shadowslice_operations::admin::{self, ControlReply, ControlRequest};
use shadowslice_operations::status::RolloutPhase;
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};

/// The options of a rollout. Those that are not given come from the configuration.
#[derive(Debug, clap::Args)]
pub(crate) struct RolloutOptions {
    /// The model's name.
    model: String,
    /// The new version: a file, or a folder with `model.py` or `model.onnx`.
    path: PathBuf,
    /// The part of requests that are copied to the new version, to compare the answers [default: 5%].
    #[arg(long, value_name = "PART")]
    mirror: Option<String>,
    /// The parts of requests that the new version answers, step by step, for example 1%,10%,50%.
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    canary: Vec<String>,
    /// The duration of the mirror and of each step, or `manual`: `shadowslice promote` ends a step
    /// [default: 5m].
    #[arg(long = "for", value_name = "TIME")]
    step: Option<String>,
    /// Bounds, for example errors=1%,differences=1%,slowdown=2.5.
    #[arg(long, value_name = "BOUNDS", value_delimiter = ',')]
    abort_if: Vec<String>,
    /// The comparison of answers: tolerance, argmax, cosine=0.99 or none [default: tolerance].
    #[arg(long, value_name = "RULE")]
    compare: Option<String>,
    /// The request header whose value decides which version answers.
    #[arg(long, value_name = "HEADER")]
    sticky: Option<String>,
    /// The new version's share while it only gets copies [default: 10%].
    #[arg(long)]
    share: Option<String>,
    /// The time for which the former version stays loaded for a rollback [default: 10m].
    #[arg(long, value_name = "TIME")]
    keep: Option<String>,
    /// Make the former version sleep as soon as the new one is released.
    #[arg(long)]
    replace: bool,
    /// Wait until the new version is released (exit code 0) or rolled back (exit code 1).
    #[arg(long)]
    wait: bool,
}

impl RolloutOptions {
    /// Returns the request to the supervisor.
    fn request(&self) -> Result<ControlRequest, String> {
        let path = std::path::absolute(&self.path)
            .map_err(|error| format!("cannot use {}: {error}", self.path.display()))?;
        Ok(ControlRequest::Rollout { model: self.model.clone(), path, changes: self.changes()? })
    }

    /// Returns the keys of `rollout` that the options give, as JSON.
    fn changes(&self) -> Result<Option<String>, String> {
        let mut keys = Map::new();
        let texts = [
            ("mirror", &self.mirror),
            ("for", &self.step),
            ("sticky", &self.sticky),
            ("share", &self.share),
            ("keep", &self.keep),
        ];
        for (key, text) in texts {
            keys.extend(text.iter().map(|text| (key.to_owned(), json!(text))));
        }
        if !self.canary.is_empty() {
            keys.insert("canary".to_owned(), json!(self.canary));
        }
        if let Some(rule) = &self.compare {
            let rule = match rule.split_once('=') {
                Some((name, bound)) => json!({name: number(bound)}),
                None => json!(rule),
            };
            keys.insert("compare".to_owned(), rule);
        }
        if self.replace {
            keys.insert("replace".to_owned(), json!(true));
        }
        if !self.abort_if.is_empty() {
            let bound = |bound: &String| {
                let (name, value) = bound.split_once('=').ok_or_else(|| {
                    format!("invalid bound `{bound}`; use for example --abort-if errors=1%,slowdown=2")
                })?;
                Ok((name.to_owned(), number(value)))
            };
            let bounds: Map<String, Value> =
                self.abort_if.iter().map(bound).collect::<Result<_, String>>()?;
            keys.insert("abort_if".to_owned(), Value::Object(bounds));
        }
        Ok((!keys.is_empty()).then(|| Value::Object(keys).to_string()))
    }
}

/// Returns a number if the text is one, and the text otherwise.
fn number(text: &str) -> Value {
    text.parse::<f64>().map_or_else(|_| json!(text), |number| json!(number))
}

/// Starts a rollout. Returns the exit code.
pub(crate) fn run(options: &RolloutOptions, run_dir: &Path) -> u8 {
    let request = match options.request() {
        Ok(request) => request,
        Err(why) => return fail(&why, exit::USAGE),
    };
    let reply = match admin::send(run_dir, &request) {
        Ok(reply) => reply,
        Err(error) => return fail(&errors::chain(&error), exit::UNAVAILABLE),
    };
    let begun = match reply {
        ControlReply::RolloutBegun { candidate, .. } => Some(candidate),
        _ => None,
    };
    let code = admin::show(&request, reply, false);
    match begun.filter(|_| options.wait && code == 0) {
        Some(candidate) => wait(&options.model, candidate, run_dir),
        None => code,
    }
}

/// Prints each phase of a rollout until it ends. Returns the exit code.
fn wait(model: &str, candidate: u32, run_dir: &Path) -> u8 {
    let mut seen = None;
    loop {
        let request = ControlRequest::FollowRollout { model: model.to_owned(), candidate, seen };
        let rollout = match admin::send(run_dir, &request) {
            Ok(ControlReply::Rollout(rollout)) => rollout,
            Ok(reply) => return admin::show(&request, reply, false),
            Err(error) => return fail(&errors::chain(&error), exit::UNAVAILABLE),
        };
        if seen.replace(rollout.seen()) != Some(rollout.seen()) {
            exit::print(&format!("{}\n", rollout.text()));
        }
        match rollout.phase {
            RolloutPhase::RolledBack => return exit::REFUSED,
            RolloutPhase::Released | RolloutPhase::Completed => return 0,
            RolloutPhase::Starting | RolloutPhase::Mirror | RolloutPhase::Timing | RolloutPhase::Canary => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: RolloutOptions,
    }

    fn changes(line: &str) -> Result<Option<String>, String> {
        let words = ["rollout", "m", "b.onnx"].into_iter().chain(line.split_whitespace());
        Line::try_parse_from(words).unwrap().options.changes()
    }

    #[test]
    fn options_become_the_keys_of_the_configuration() {
        assert_eq!(changes(""), Ok(None));
        let all = changes(
            "--mirror 2% --canary 1%,10% --for 30s --abort-if errors=2%,slowdown=3 --compare cosine=0.99 --keep 1m",
        );
        let keys: Value = serde_json::from_str(&all.unwrap().unwrap()).unwrap();
        assert_eq!(
            keys,
            json!({"mirror": "2%", "canary": ["1%", "10%"], "for": "30s", "keep": "1m",
                "compare": {"cosine": 0.99}, "abort_if": {"errors": "2%", "slowdown": 3.0}})
        );
        shadowslice_config::rollout_with(None, &keys.to_string()).unwrap();
        assert!(changes("--abort-if errors").unwrap_err().contains("errors=1%"));
    }
}
