//! `shadowslice place`: JSON around [`shadowslice_policy::placement`].

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_config::{ConfigError, profile};
use shadowslice_policy::placement::{self, CopyLoad, Objective, Placement, Share, SmRequirement};
use shadowslice_shared::units::Sms;

/// The maximum length of a specification, in bytes.
const MAX_SPEC: u64 = 16 << 20;
/// The maximum number of copies of all models.
const MAX_COPIES: u32 = 4096;
const MAX_BATCH: u32 = 32;
const MIB: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlaceError {
    #[error("cannot read {}; give a file, or - for standard input", .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("the specification exceeds {} MiB; place fewer models at a time", MAX_SPEC >> 20)]
    TooLarge,
    #[error("invalid specification; see `shadowslice place --help` for its JSON format")]
    Json(#[source] serde_json::Error),
    #[error("cannot use the profile of model '{0}'")]
    Profile(String, #[source] ConfigError),
    #[error("model '{model}': {why}")]
    Model { model: String, why: String },
    #[error("GPU {gpu} of host '{host}' is listed twice; remove one of the entries")]
    Twice { host: String, gpu: u32 },
    #[error("cannot place {0} copies, because the maximum is {MAX_COPIES}; place fewer models at a time")]
    TooMany(u64),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacementSpec {
    gpus: Vec<GpuSpec>,
    models: Vec<PlacedModelSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuSpec {
    host: String,
    gpu: u32,
    sms: u32,
    memory_mib: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    host: String,
    gpu: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacedModelSpec {
    name: String,
    #[serde(default = "one")]
    copies: u32,
    #[serde(default = "one")]
    priority: u32,
    #[serde(default)]
    on: Vec<Place>,
    sms: Option<u32>,
    memory_mib: Option<u64>,
    shadow_mib: Option<u64>,
    bandwidth: Option<f64>,
    profile: Option<PathBuf>,
    slo_ms: Option<f64>,
    rate: Option<f64>,
    max_batch: Option<u32>,
    /// True if the copies sleep until their next requests.
    #[serde(default)]
    asleep: bool,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Serialize)]
struct Answer {
    models: Vec<Placed>,
    gpus_used: usize,
    /// The number of new copies that replace others.
    moves: usize,
    /// True if no placement is better.
    best: bool,
}

#[derive(Debug, Serialize)]
struct Placed {
    name: String,
    /// The needs of a copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    need: Option<Needed>,
    on: Vec<Place>,
    /// The GPUs of `on` that have no copy now.
    new: Vec<Place>,
    /// The GPUs that have a copy now, and should not.
    gone: Vec<Place>,
    missing: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Needed {
    sms: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<u32>,
    /// 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    busy: Option<f64>,
}

pub(crate) fn run(wish: &Path) -> Result<String, PlaceError> {
    let text = read(wish).map_err(|error| PlaceError::Read(wish.to_owned(), error))?;
    if text.len() as u64 > MAX_SPEC {
        return Err(PlaceError::TooLarge);
    }
    let wish: PlacementSpec = serde_json::from_str(&text).map_err(PlaceError::Json)?;
    let answer = place(&wish)?;
    Ok(serde_json::to_string_pretty(&answer).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}")))
}

fn read(wish: &Path) -> io::Result<String> {
    let mut text = String::new();
    match wish == Path::new("-") {
        true => io::stdin().lock().take(MAX_SPEC + 1).read_to_string(&mut text),
        false => File::open(wish)?.take(MAX_SPEC + 1).read_to_string(&mut text),
    }?;
    Ok(text)
}

fn place(wish: &PlacementSpec) -> Result<Answer, PlaceError> {
    let copies = wish.models.iter().map(|model| u64::from(model.copies)).sum();
    if copies > u64::from(MAX_COPIES) {
        return Err(PlaceError::TooMany(copies));
    }
    let places = places(&wish.gpus)?;
    let gpus = gpus(&wish.gpus);
    let largest = gpus.iter().map(|gpu| gpu.sms).max().unwrap_or(Sms(1));
    let needs: Vec<_> = wish.models.iter().map(|model| model.needs(largest)).collect::<Result<_, _>>()?;
    let model =
        |(model, need): (&PlacedModelSpec, &Result<(Share, Needed), String>)| placement::ModelCopies {
            // A copy that cannot keep its SLO anywhere is not placed.
            copies: if need.is_ok() { model.copies } else { 0 },
            each: need.as_ref().map_or(Share::NOTHING, |(share, _)| *share),
            priority: model.priority,
            on: model.on.iter().filter_map(|place| places.get(place).copied()).collect(),
        };
    let models: Vec<_> = wish.models.iter().zip(&needs).map(model).collect();
    let found = placement::place(&gpus, &models, Objective::FewGpus);
    let placed = wish.models.iter().zip(needs).enumerate();
    let models: Vec<_> =
        placed.map(|(index, (model, need))| model.placed(&wish.gpus, need, (index, &found))).collect();
    let moves = models.iter().map(|model| model.new.len().min(model.gone.len())).sum();
    Ok(Answer { models, gpus_used: found.gpus_used(), moves, best: found.is_best })
}

fn places(gpus: &[GpuSpec]) -> Result<HashMap<Place, usize>, PlaceError> {
    let mut places = HashMap::new();
    for (index, wish) in gpus.iter().enumerate() {
        if places.insert(wish.place(), index).is_some() {
            return Err(PlaceError::Twice { host: wish.host.clone(), gpu: wish.gpu });
        }
    }
    Ok(places)
}

fn gpus(wish: &[GpuSpec]) -> Vec<placement::GpuCapacity> {
    let hosts: BTreeSet<&str> = wish.iter().map(|gpu| gpu.host.as_str()).collect();
    let gpu = |gpu: &GpuSpec| placement::GpuCapacity {
        host: hosts.range(..gpu.host.as_str()).count(),
        sms: Sms(gpu.sms),
        memory: gpu.memory_mib.saturating_mul(MIB),
        taken: Share::NOTHING,
    };
    wish.iter().map(gpu).collect()
}

impl GpuSpec {
    fn place(&self) -> Place {
        Place { host: self.host.clone(), gpu: self.gpu }
    }
}

impl PlacedModelSpec {
    fn placed(
        &self,
        gpus: &[GpuSpec],
        need: Result<(Share, Needed), String>,
        (index, found): (usize, &Placement),
    ) -> Placed {
        let on: Vec<Place> = found.models[index].iter().map(|&gpu| gpus[gpu].place()).collect();
        let lacks = found.missing.iter().find(|missing| missing.model == index);
        let why = need.as_ref().err().cloned().or_else(|| lacks.map(|missing| missing.shortage.to_string()));
        Placed {
            name: self.name.clone(),
            need: need.ok().map(|(_, needed)| needed),
            new: on.iter().filter(|place| !self.on.contains(place)).cloned().collect(),
            gone: self.on.iter().filter(|place| !on.contains(place)).cloned().collect(),
            missing: self.copies.saturating_sub(u32::try_from(on.len()).unwrap_or(u32::MAX)),
            on,
            why,
        }
    }

    /// Returns the needs of a copy, or the reason why it cannot meet its SLO.
    fn needs(&self, gpu: Sms) -> Result<Result<(Share, Needed), String>, PlaceError> {
        let given = self.sms.is_some() || self.memory_mib.is_some() || self.shadow_mib.is_some();
        let given = given || self.bandwidth.is_some();
        let asked = self.slo_ms.is_some() || self.rate.is_some() || self.max_batch.is_some();
        match &self.profile {
            Some(_) if given => {
                Err(self.wrong("a `profile` replaces `sms`, memory and `bandwidth`; give one or the other"))
            }
            Some(path) => self.measured(path, gpu),
            None if self.asleep => Err(self.wrong(
                "`asleep` requires a `profile`; give one, or the copy's memory in its sleep as `memory_mib` and the memory for a wake as `shadow_mib`",
            )),
            None if asked => {
                Err(self.wrong("`slo_ms`, `rate` and `max_batch` require a `profile`; give one"))
            }
            None => self.given().map(Ok),
        }
    }

    fn given(&self) -> Result<(Share, Needed), PlaceError> {
        let (Some(sms), Some(memory)) = (self.sms.filter(|&sms| sms > 0), self.memory_mib) else {
            return Err(self.wrong("give `sms` (from 1) and `memory_mib`, or `profile`, `slo_ms` and `rate`"));
        };
        let bandwidth = self.bandwidth.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&bandwidth) {
            return Err(self.wrong("`bandwidth` is a fraction of the GPU's bandwidth, from 0 to 1"));
        }
        let shadow = self.shadow_mib.unwrap_or(0).saturating_mul(MIB);
        let share = Share { sms: Sms(sms), memory: memory.saturating_mul(MIB), shadow, bandwidth };
        Ok((share, Needed { sms, batch: None, busy: None }))
    }

    fn measured(&self, path: &Path, gpu: Sms) -> Result<Result<(Share, Needed), String>, PlaceError> {
        let (Some(slo), Some(rate)) = (self.slo_ms, self.rate) else {
            return Err(self.wrong("a `profile` requires `slo_ms` and `rate`; give both"));
        };
        let slo = Duration::try_from_secs_f64(slo / 1e3).ok().filter(|slo| !slo.is_zero());
        let slo = slo.ok_or_else(|| self.wrong("`slo_ms` must be a time in milliseconds, above 0"))?;
        if !(rate.is_finite() && rate >= 0.0) {
            return Err(self.wrong("`rate` must be a number of requests per second, 0 or more"));
        }
        let profile = profile::read(path).map_err(|error| PlaceError::Profile(self.name.clone(), error))?;
        let rate = rate / f64::from(self.copies.max(1));
        let load = CopyLoad { slo, rate, max_batch: self.max_batch.unwrap_or(MAX_BATCH) };
        let need =
            placement::sm_requirement(&profile.execution, gpu, &load).map_err(|unmet| unmet.to_string());
        Ok(need.map(|SmRequirement { sms, batch, busy }| {
            let (kept, weights) = (profile.memory.without_weights(), profile.memory.weights);
            // The GPU keeps enough free memory for the largest shadow, so also for the largest wake.
            let (memory, shadow) =
                if self.asleep { (kept, weights) } else { (kept.saturating_add(weights), kept) };
            let share = Share { sms, memory, shadow, bandwidth: profile.bandwidth * busy };
            (share, Needed { sms: sms.0, batch: Some(batch), busy: Some(busy) })
        }))
    }

    fn wrong(&self, why: &str) -> PlaceError {
        PlaceError::Model { model: self.name.clone(), why: why.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::errors;

    use super::*;

    const GPUS: &str = r#"[{"host": "a", "gpu": 0, "sms": 132, "memory_mib": 81920},
                           {"host": "b", "gpu": 0, "sms": 132, "memory_mib": 81920}]"#;

    fn answer(models: &str) -> Result<serde_json::Value, PlaceError> {
        let wish = serde_json::from_str(&format!(r#"{{"gpus": {GPUS}, "models": {models}}}"#));
        place(&wish.map_err(PlaceError::Json)?).map(|answer| serde_json::to_value(answer).unwrap())
    }

    #[test]
    fn models_are_placed_and_what_cannot_be_is_told() {
        let placed = answer(
            r#"[{"name": "m", "copies": 2, "sms": 100, "memory_mib": 4000, "on": [{"host": "b", "gpu": 0}, {"host": "z", "gpu": 7}]},
                {"name": "n", "sms": 64, "memory_mib": 1}]"#,
        );
        let placed = placed.unwrap();
        let [m, n] = &placed["models"].as_array().unwrap()[..] else { panic!("{placed}") };
        assert_eq!(
            m["on"],
            serde_json::json!([{"host": "b", "gpu": 0}]),
            "first copies come first: {placed}"
        );
        assert_eq!(m["gone"], serde_json::json!([{"host": "z", "gpu": 7}]));
        assert_eq!((&m["missing"], &n["missing"]), (&1.into(), &0.into()));
        assert_eq!(m["why"], "a copy needs 100 SMs, and no GPU has more than 68 free");
        assert_eq!(n["on"], serde_json::json!([{"host": "a", "gpu": 0}]));
        assert_eq!((&placed["gpus_used"], &placed["best"]), (&2.into(), &true.into()));
    }

    #[test]
    fn a_profile_says_how_many_sms_a_copy_needs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.yaml");
        let profile = "{source: {kind: illustrative}, memory: {weights: 4Gi}, execution_ms: {sms: [16, 132], 1: [8.0, 4.0]}}";
        std::fs::write(&path, profile).unwrap();
        let with = |keys: &str| {
            let placed = answer(&format!(r#"[{{"name": "m", "profile": {path:?}, {keys}}}]"#));
            placed.map(|mut placed| placed["models"][0].take())
        };
        let in_time = with(r#""slo_ms": 16, "rate": 10"#).unwrap();
        assert_eq!((&in_time["need"]["sms"], &in_time["need"]["batch"]), (&16.into(), &1.into()));
        let late = with(r#""slo_ms": 7, "rate": 10"#).unwrap();
        let expected = "the SLO cannot be met: a request may wait for one batch and run in the next, which takes \
                        8.0 ms on the whole GPU; raise the SLO";
        assert_eq!(late["why"], expected);
        assert_eq!((&late["missing"], &late["on"]), (&1.into(), &serde_json::json!([])));
        assert!(matches!(with(r#""slo_ms": 7"#), Err(PlaceError::Model { .. })));
        std::fs::write(&path, "{source: {kind: illustrative}}").unwrap();
        assert!(matches!(with(r#""slo_ms": 7, "rate": 1"#), Err(PlaceError::Profile(..))));
    }

    #[test]
    fn copies_that_sleep_share_the_memory_for_a_wake() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.yaml");
        let profile = "{source: {kind: illustrative}, memory: {context: 1Gi, weights: 50Gi}, execution_ms: {sms: [8, 132], 1: [1.0, 1.0]}}";
        std::fs::write(&path, profile).unwrap();
        let used = |asleep: [bool; 3]| {
            let model = |(name, asleep)| {
                format!(
                    r#"{{"name": "{name}", "profile": {path:?}, "slo_ms": 50, "rate": 1, "asleep": {asleep}}}"#
                )
            };
            let models: Vec<String> = ["a", "b", "c"].into_iter().zip(asleep).map(model).collect();
            let placed = answer(&format!("[{}]", models.join(","))).unwrap();
            let missing = placed["models"].as_array().unwrap().iter().filter(|model| model["missing"] != 0);
            (placed["gpus_used"].as_u64().unwrap(), missing.count())
        };
        assert_eq!(used([false; 3]), (2, 1), "80 GiB take one awake copy");
        assert_eq!(used([true; 3]), (1, 0), "3 GiB, and 50 GiB for the wake of one");
        assert_eq!(used([false, true, true]), (2, 0), "no wake is possible beside an awake copy");
        let given = answer(r#"[{"name": "m", "sms": 8, "memory_mib": 1, "asleep": true}]"#).unwrap_err();
        assert!(errors::chain(&given).contains("`asleep` requires a `profile`"));
    }

    #[test]
    fn wishes_that_are_none_are_refused() {
        let refused = |models: &str| errors::chain(&answer(models).unwrap_err());
        assert!(refused(r#"[{"name": "m", "smss": 1}]"#).contains("unknown field `smss`"));
        assert!(refused(r#"[{"name": "m"}]"#).contains("model 'm': give `sms`"));
        assert!(
            refused(r#"[{"name": "m", "sms": 8, "memory_mib": 1, "bandwidth": 2}]"#).contains("from 0 to 1")
        );
        assert!(
            refused(r#"[{"name": "m", "sms": 8, "memory_mib": 1, "copies": 5000}]"#).contains("5000 copies")
        );
        let twice = r#"{"gpus": [{"host": "a", "gpu": 0, "sms": 1, "memory_mib": 1}, {"host": "a", "gpu": 0, "sms": 1, "memory_mib": 1}], "models": []}"#;
        assert!(matches!(place(&serde_json::from_str(twice).unwrap()), Err(PlaceError::Twice { .. })));
    }
}
