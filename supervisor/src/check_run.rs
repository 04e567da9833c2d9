//! `shadowslice check --run`: starts each model once, as `serve` would start it, and says what was
//! found.

use std::path::Path;
use std::time::{Duration, Instant};

use shadowslice_config::{Choice, Config, ControllerConfig};
use shadowslice_control::controller::{Context, ReportedRole, Served, WorkerMemory};
use shadowslice_control::models::start_timeout;
use shadowslice_datapath::phase::Phase;
use shadowslice_operations::figures;
use shadowslice_policy::sharing::PolicyName;
use shadowslice_shared::exit::{self, fail};
use shadowslice_shared::rounding;
use shadowslice_shared::tensor::TensorSpec;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::lifecycle::Signals;
use crate::running::{run_models, settled};
use crate::serve::Failed;
use crate::temporary::{end_workers, with_host};

/// Returns the exit code for this configuration, in which `check` found no fault.
pub(crate) fn run(file: &Path) -> u8 {
    match all(file) {
        Ok(0) => 0,
        Ok(_) => exit::REFUSED,
        Err(Failed { why, code }) => fail(&why, code),
    }
}

/// Returns how many models cannot be served.
fn all(file: &Path) -> Result<usize, Failed> {
    let config = shadowslice_config::load_here(file)
        .map_err(|error| Failed { why: error.to_string(), code: exit::CONFIG })?;
    with_host(config, each)
}

async fn each(config: &Config, context: &Context) -> Result<usize, Failed> {
    let mut signals = Signals::new()?;
    let mut failed = 0;
    for model in &config.models {
        // No policy changes its share meanwhile.
        let controller = ControllerConfig { policy: Choice::of(PolicyName::Static), ..config.controller };
        let alone = Config { models: vec![model.clone()], controller, ..config.clone() };
        match one(&alone, context, &mut signals).await? {
            Ok(found) => {
                exit::print(&format!("{}: {found}\n", model.name));
            }
            Err(why) => {
                failed += 1;
                exit::print_error(&format!("{}: cannot be served: {why}", model.name));
            }
        }
    }
    let all = config.models.len();
    exit::print(&format!("{} of {all} models can be served\n", all - failed));
    Ok(failed)
}

/// Returns what was found of the only model of a configuration, or why it cannot be served.
async fn one(
    config: &Config,
    context: &Context,
    signals: &mut Signals,
) -> Result<Result<String, String>, Failed> {
    let (_phase, phase_rx) = watch::channel(Phase::Starting);
    // No state is persisted of a model that never ran.
    let nowhere = config.run_dir.join("none");
    let (running, mut control) = run_models((&nowhere, &nowhere), config, context, None, phase_rx).await?;
    let served = running.models.borrow().served.first().cloned();
    let Some(served) = served else {
        return Ok(Err("the supervisor created no workers for the model; please report this".to_owned()));
    };
    let (begun, limit) = (Instant::now(), start_timeout(&config.timeouts));
    let outcome = tokio::select! {
        outcome = timeout(limit, settled(&served)) => Some(outcome),
        _ = signals.next() => None,
    };
    let found = match outcome {
        Some(Ok(Ok(()))) => Ok(Ok(found(&served, begun.elapsed()))),
        Some(Ok(Err(why))) => Ok(Err(why)),
        Some(Err(_)) => {
            let died = served.report.borrow().last_death.clone();
            let died = died.map(|why| format!("; its last worker exited: {why}")).unwrap_or_default();
            Ok(Err(format!(
                "the model was not ready within {}; raise timeouts.spawn or timeouts.warm{died}",
                rounding::duration(limit)
            )))
        }
        None => {
            let why = "a signal stopped the check before all models were started".to_owned();
            Err(Failed { why, code: exit::REFUSED })
        }
    };
    end_workers(config, &mut control).await;
    found
}

/// Describes a model that serves.
fn found(served: &Served, took: Duration) -> String {
    let report = served.report.borrow();
    let seconds = figures::span(took.as_secs_f64());
    let (gpu, share, sms) = (served.model.gpu, report.share, report.sms);
    let mut lines = vec![format!("ready after {seconds}, on GPU {gpu} with {share} ({sms} SMs)")];
    if let Some(metadata) = served.pipeline.metadata() {
        let (inputs, outputs) = (tensors(&metadata.inputs), tensors(&metadata.outputs));
        lines.push(format!("inputs: {inputs}; outputs: {outputs}"));
        lines.push(match metadata.max_batch {
            0 => "no batching".to_owned(),
            most => format!("batches of at most {most} rows"),
        });
    }
    let times = served.pipeline.report().execution;
    let times: Vec<String> =
        times.iter().map(|(rows, took)| format!("{rows} in {}", figures::span(took.as_secs_f64()))).collect();
    if let Some(batches) = lines.last_mut().filter(|_| !times.is_empty()) {
        batches.push_str(&format!("; rows and times in warm-up: {}", times.join(", ")));
    }
    lines.extend(
        report.batch_limit.iter().map(|limit| format!("batches are smaller than the default: {}", limit.why)),
    );
    let worker = report.workers.iter().find(|worker| worker.role == ReportedRole::Incumbent);
    if let Some(WorkerMemory { weights_mib, scratch_mib, .. }) = worker.and_then(|worker| worker.memory) {
        lines.push(format!("memory: weights {weights_mib} MiB, scratch {scratch_mib} MiB"));
    }
    if let Some(error) = worker.and_then(|worker| worker.answer_error) {
        lines.push(format!("outputs differ from the reference by at most {error:.2e} of its largest value"));
    }
    lines.join("\n  ")
}

fn tensors(specs: &[TensorSpec]) -> String {
    let one = |spec: &TensorSpec| format!("{} {} {:?}", spec.name, spec.datatype, spec.shape);
    specs.iter().map(one).collect::<Vec<_>>().join(", ")
}
