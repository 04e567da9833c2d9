//! How policies share the GPU: the same loads under each of them, mix by mix.

mod asking;
mod contestants;
mod look;
mod mix;
mod yaml;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::time::Instant;

pub(crate) use self::contestants::{ROUND, names};

use self::asking::{MixResult, MixRun};
use self::contestants::{Contestant, rounds};
use self::mix::ModelMix;
use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::report;
use crate::serving::{RunningServer, gpu, threads};
use crate::stages::CheckStage;
use crate::tools::CheckSettings;

/// Measures the mixes of one to three models.
pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    run_all(CheckStage::Policies, mix::small()?, setting, figures).await
}

/// Measures the mixes of the files that the command line names, else those of five models.
pub(crate) async fn run_mixes(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let mixes = if setting.mixes.is_empty() { mix::five()? } else { from_files(setting)? };
    run_all(CheckStage::Mixes, mixes, setting, figures).await
}

fn from_files(setting: &CheckSettings) -> Result<Vec<ModelMix>, StageError> {
    let read = setting.mixes.iter().map(|path| mix::read(path));
    Ok(read.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

/// Returns the models that the mixes in these files ask for, once each.
pub(crate) fn models_of(files: &[PathBuf]) -> Result<Vec<String>, StageError> {
    let mut names = Vec::new();
    for path in files {
        for guest in mix::read(path)?.into_iter().flat_map(|mix| mix.models) {
            if !names.contains(&guest.model) {
                names.push(guest.model);
            }
        }
    }
    Ok(names)
}

/// Runs the mixes that the command line means. A policy that fails is named at the end; the others
/// still run.
async fn run_all(
    stage: CheckStage,
    mixes: Vec<ModelMix>,
    setting: &CheckSettings,
    figures: &mut FigureStore,
) -> Result<(), StageError> {
    let is_meant = |mix: &ModelMix| setting.scenarios.is_empty() || setting.scenarios.contains(&mix.name);
    let mut faults = Vec::new();
    let mixes: Vec<ModelMix> = mixes.into_iter().filter(is_meant).collect();
    if mixes.is_empty() {
        println!("{}: no mix has a name given by --scenario", stage.name());
    }
    for mut mix in mixes {
        let models = found(&mut mix, stage, setting);
        if models.len() < mix.models.len() || models.is_empty() {
            continue;
        }
        mix.scale(setting.scale);
        let under_test = UnderTest { stage, mix: &mix, models, setting };
        under_test.run(figures, &mut faults).await?;
        println!("{}", report::brief(&mix.name, figures.get(&[stage.name(), &mix.name])));
    }
    if faults.is_empty() { Ok(()) } else { Err(StageError::Unusable(faults.join("; "))) }
}

/// Returns the files of a mix's models. A mix from a file runs without the models that are missing,
/// and its name then says so.
fn found<'a>(mix: &mut ModelMix, stage: CheckStage, setting: &'a CheckSettings) -> Vec<&'a MeasuredModel> {
    let from_file = stage == CheckStage::Mixes && !setting.mixes.is_empty();
    let all = || setting.models.iter().chain(&setting.halves).chain(&setting.others);
    let usable =
        |model: &&MeasuredModel| from_file || !setting.others.iter().any(|other| other.name == model.name);
    let file = |name: &str| all().filter(usable).find(|model| model.name == name);
    let missing: Vec<String> =
        mix.models.iter().map(|guest| guest.model.clone()).filter(|name| file(name).is_none()).collect();
    if !missing.is_empty() {
        let way = if from_file { "runs without" } else { "is left out: there is no" };
        println!("{}: {} {way} {}", stage.name(), mix.name, missing.join(", "));
    }
    if from_file && !missing.is_empty() {
        mix.models.retain(|guest| !missing.contains(&guest.model));
        mix.name += &format!(" without {}", missing.join(" and "));
    }
    mix.models.iter().filter_map(|guest| file(&guest.model)).collect()
}

/// Returns an error without the middle of the supervisor's log, which lies beside the figures.
fn in_short(error: &StageError) -> String {
    let text = chain(error);
    let (first, last) = (text.lines().next().unwrap_or_default(), text.lines().last().unwrap_or_default());
    if first == last { text } else { format!("{first} … {last}") }
}

/// A mix with the files of its models.
struct UnderTest<'a> {
    stage: CheckStage,
    mix: &'a ModelMix,
    models: Vec<&'a MeasuredModel>,
    setting: &'a CheckSettings,
}

impl UnderTest<'_> {
    /// Runs all policies, each with a supervisor of its own. They share the optimised models, which
    /// are removed at the end: they are as large as the models.
    async fn run(&self, figures: &mut FigureStore, faults: &mut Vec<String>) -> Result<(), StageError> {
        let Self { stage, mix, setting, .. } = *self;
        let kept = tempfile::Builder::new().prefix("ss-kept-").tempdir_in("/tmp");
        let kept = kept.map_err(StageError::io("make a folder in", Path::new("/tmp")))?;
        let contestants = Contestant::chosen(&setting.policies, &mix.policies, mix.has_shares());
        for (name, contestant) in rounds(&contestants, setting.rounds) {
            let done = format!("{}, {name}", mix.name);
            if !setting.again && figures.has_model(stage, &done, setting.quick) {
                println!("  {done}: its figures are there; --again takes them again");
                continue;
            }
            match self.one(figures, &name, contestant, kept.path()).await {
                Ok(wrong) => {
                    let brief = report::brief_rows(&name, figures.get(&[stage.name(), &mix.name, &name]));
                    print!("{brief}");
                    faults.extend(wrong.map(|wrong| format!("{done}: {wrong}")));
                    figures.has_now(stage, &done, setting.quick)?;
                }
                Err(error) => {
                    let fault = format!("{done}: {}", in_short(&error));
                    println!("  FAILED: {fault}");
                    faults.push(fault);
                }
            }
        }
        Ok(())
    }

    /// Runs one policy; returns an example of wrong answers, if there are any.
    async fn one(
        &self,
        figures: &mut FigureStore,
        name: &str,
        contestant: Contestant,
        kept: &Path,
    ) -> Result<Option<String>, StageError> {
        let Self { stage, mix, setting, .. } = *self;
        let log = format!("{}-{}, {name}", stage.name(), mix.name).replace(", ", "-").replace(' ', "-");
        let config = self.config(figures, contestant)?;
        setting.keep(&format!("{log}.yaml"), &config)?;
        let begun = Instant::now();
        let serving = RunningServer::start_keeping(setting, &log, &config, kept).await?;
        println!("  {}, {name}: ready after {:.1} s", mix.name, begun.elapsed().as_secs_f64());
        let asked = MixRun { mix, setting, serving: &serving, log: &log }.run().await;
        let MixResult { spans, wrong } = asked?;
        figures.set(&[stage.name(), &mix.name, name], spans);
        serving.stop(figures).await?;
        Ok(wrong)
    }

    fn config(&self, figures: &FigureStore, contestant: Contestant) -> Result<String, StageError> {
        let Contestant { policy, handover, mps, .. } = contestant;
        let gpu = gpu(self.setting);
        let gpu = if mps { gpu } else { gpu.replace('}', ", partition: none}") };
        let (batch, threads) = (self.mix.batch, threads());
        let mut text = format!(
            "listen: {{http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\ngpus: [{gpu}]\n\
             controller: {{policy: {policy}}}\ntimeouts: {{spawn: 30s, warm: 3m}}\nmodels:\n"
        );
        let mut add = |part: String| write!(text, "{part}").expect("a string takes everything");
        for (guest, model) in self.mix.models.iter().zip(&self.models) {
            let (name, path) = (&guest.model, model.path.to_string_lossy());
            add(format!(
                "  - {{name: {name}, path: {path:?}, slo: {}ms, priority: {}, batch: {{max: {batch}}}, \
                 handover: {handover}, queue: {{memory: 1Gi}}, threads: {threads}",
                guest.slo_ms, guest.priority
            ));
            if let Some(profile) = figures.get(&["profiles", name]).and_then(Value::as_str) {
                let path = self.setting.out.join("profiles").join(format!("{name}.yaml"));
                std::fs::write(&path, profile).map_err(StageError::io("write", &path))?;
                add(format!(", profile: {:?}", path.to_string_lossy()));
            }
            if let Some(share) = guest.share_percent.filter(|_| contestant.is_by_hand()) {
                add(format!(", share: {{initial: {share}%}}"));
            }
            add("}\n".into());
        }
        Ok(text)
    }
}
