//! The stages `policies` and `mixes`, which run each mix of models with the same load under each
//! policy.

mod contestants;
mod mix;
mod mix_run;
mod snapshot;
mod yaml;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::time::Instant;

pub(crate) use self::contestants::{ROUND, names};

use self::contestants::{Contestant, rounds};
use self::mix::ModelMix;
use self::mix_run::{MixResult, MixRun};
use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::report;
use crate::serving::{RunningServer, gpu, threads};
use crate::stages::CheckStage;
use crate::tools::CheckSettings;

/// Runs the stage `policies`, which uses the mixes of one to three models.
pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    run_all(CheckStage::Policies, mix::small()?, settings, figures).await
}

/// Runs the stage `mixes`. Uses the files that the command line names, or else the mixes of five
/// models.
pub(crate) async fn run_mixes(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let mixes = if settings.mixes.is_empty() { mix::five()? } else { from_files(settings)? };
    run_all(CheckStage::Mixes, mixes, settings, figures).await
}

fn from_files(settings: &CheckSettings) -> Result<Vec<ModelMix>, StageError> {
    let read = settings.mixes.iter().map(|path| mix::read(path));
    Ok(read.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

/// Returns the models that the mixes in these files use, without duplicates.
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

/// Runs the mixes that the command line selects. If a policy fails, the other policies still run.
/// The returned error then names the failed policies.
async fn run_all(
    stage: CheckStage,
    mixes: Vec<ModelMix>,
    settings: &CheckSettings,
    figures: &mut FigureStore,
) -> Result<(), StageError> {
    let is_selected =
        |mix: &ModelMix| settings.scenarios.is_empty() || settings.scenarios.contains(&mix.name);
    let mut failures = Vec::new();
    let mixes: Vec<ModelMix> = mixes.into_iter().filter(is_selected).collect();
    if mixes.is_empty() {
        println!("{}: skipped, --scenario names no mix of this stage", stage.name());
    }
    for mut mix in mixes {
        let models = available_models(&mut mix, stage, settings);
        if models.len() < mix.models.len() || models.is_empty() {
            continue;
        }
        mix.scale(settings.scale);
        let under_test = UnderTest { stage, mix: &mix, models, settings };
        under_test.run(figures, &mut failures).await?;
        println!("{}", report::brief(&mix.name, figures.get(&[stage.name(), &mix.name])));
    }
    if failures.is_empty() { Ok(()) } else { Err(StageError::Unusable(failures.join("; "))) }
}

/// Returns the files of a mix's models. A mix from a file runs without the models that are missing.
/// The name of the mix then lists the missing models.
fn available_models<'a>(
    mix: &mut ModelMix,
    stage: CheckStage,
    settings: &'a CheckSettings,
) -> Vec<&'a MeasuredModel> {
    let from_file = stage == CheckStage::Mixes && !settings.mixes.is_empty();
    let all = || settings.models.iter().chain(&settings.half_models).chain(&settings.mix_only_models);
    let usable = |model: &&MeasuredModel| {
        from_file || !settings.mix_only_models.iter().any(|other| other.name == model.name)
    };
    let file = |name: &str| all().filter(usable).find(|model| model.name == name);
    let missing: Vec<String> =
        mix.models.iter().map(|guest| guest.model.clone()).filter(|name| file(name).is_none()).collect();
    if !missing.is_empty() {
        let way = if from_file { "runs without" } else { "is skipped, missing:" };
        println!("{}: {} {way} {}", stage.name(), mix.name, missing.join(", "));
    }
    if from_file && !missing.is_empty() {
        mix.models.retain(|guest| !missing.contains(&guest.model));
        mix.name += &format!(" without {}", missing.join(" and "));
    }
    mix.models.iter().filter_map(|guest| file(&guest.model)).collect()
}

/// Formats an error without the middle part of the supervisor's log. The complete log is in a file
/// next to the figures.
fn abridged(error: &StageError) -> String {
    let text = chain(error);
    let (first, last) = (text.lines().next().unwrap_or_default(), text.lines().last().unwrap_or_default());
    if first == last { text } else { format!("{first} … {last}") }
}

/// A mix, and the files of its models.
struct UnderTest<'a> {
    stage: CheckStage,
    mix: &'a ModelMix,
    models: Vec<&'a MeasuredModel>,
    settings: &'a CheckSettings,
}

impl UnderTest<'_> {
    /// Runs all policies, each with its own supervisor. The supervisors share the optimised models,
    /// which need as much disk space as the models. This function removes them at the end.
    async fn run(&self, figures: &mut FigureStore, failures: &mut Vec<String>) -> Result<(), StageError> {
        let Self { stage, mix, settings, .. } = *self;
        let optimised = tempfile::Builder::new().prefix("ss-kept-").tempdir_in("/tmp");
        let optimised = optimised.map_err(StageError::io("create a folder in", Path::new("/tmp")))?;
        let contestants = Contestant::chosen(&settings.policies, &mix.policies, mix.has_shares());
        for (name, contestant) in rounds(&contestants, settings.rounds) {
            let done = format!("{}, {name}", mix.name);
            if !settings.again && figures.has_model(stage, &done, settings.quick) {
                println!("  {done}: skipped, has figures (use --again to repeat)");
                continue;
            }
            match self.run_policy(figures, &name, contestant, optimised.path()).await {
                Ok(wrong) => {
                    let brief = report::brief_rows(&name, figures.get(&[stage.name(), &mix.name, &name]));
                    print!("{brief}");
                    failures.extend(wrong.map(|wrong| format!("{done}: {wrong}")));
                    figures.record_model(stage, &done, settings.quick)?;
                }
                Err(error) => {
                    let failure = format!("{done}: {}", abridged(&error));
                    println!("  FAILED: {failure}");
                    failures.push(failure);
                }
            }
        }
        Ok(())
    }

    /// Runs one policy. Returns an example of a wrong answer, if there is one.
    async fn run_policy(
        &self,
        figures: &mut FigureStore,
        name: &str,
        contestant: Contestant,
        optimised: &Path,
    ) -> Result<Option<String>, StageError> {
        let Self { stage, mix, settings, .. } = *self;
        let log = format!("{}-{}, {name}", stage.name(), mix.name).replace(", ", "-").replace(' ', "-");
        let config = self.config(figures, contestant)?;
        settings.write_beside_logs(&format!("{log}.yaml"), &config)?;
        let begun = Instant::now();
        let serving = RunningServer::start_keeping(settings, &log, &config, optimised).await?;
        println!("  {}, {name}: ready after {:.1} s", mix.name, begun.elapsed().as_secs_f64());
        let result = MixRun { mix, settings, serving: &serving, log: &log }.run().await;
        let MixResult { spans, wrong } = result?;
        figures.set(&[stage.name(), &mix.name, name], spans);
        serving.stop(figures).await?;
        Ok(wrong)
    }

    fn config(&self, figures: &FigureStore, contestant: Contestant) -> Result<String, StageError> {
        let Contestant { policy, handover, mps, preempt, .. } = contestant;
        let preempt = if preempt { "" } else { ", preempt: false" };
        let gpu = gpu(self.settings);
        let gpu = if mps { gpu } else { gpu.replace('}', ", partition: none}") };
        let (batch, threads) = (self.mix.batch, threads());
        let mut text = format!(
            "listen: {{http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\ngpus: [{gpu}]\n\
             controller: {{policy: {policy}{preempt}}}\ntimeouts: {{spawn: 30s, warm: 3m}}\nmodels:\n"
        );
        let mut add = |part: String| write!(text, "{part}").expect("writing to a string cannot fail");
        for (guest, model) in self.mix.models.iter().zip(&self.models) {
            let (name, path) = (&guest.model, model.path.to_string_lossy());
            add(format!(
                "  - {{name: {name}, path: {path:?}, slo: {}ms, priority: {}, batch: {{max: {batch}}}, \
                 handover: {handover}, queue: {{memory: 1Gi}}, threads: {threads}",
                guest.slo_ms, guest.priority
            ));
            if let Some(profile) = figures.get(&["profiles", name]).and_then(Value::as_str) {
                let path = self.settings.out.join("profiles").join(format!("{name}.yaml"));
                std::fs::write(&path, profile).map_err(StageError::io("write", &path))?;
                add(format!(", profile: {:?}", path.to_string_lossy()));
            }
            if let Some(share) = contestant.share_of(guest, &self.mix.models) {
                add(format!(", share: {{initial: {share}%}}"));
            }
            add("}\n".into());
        }
        Ok(text)
    }
}
