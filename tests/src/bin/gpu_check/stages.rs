//! The stages: their order, their time limits, and the way in which failures are handled.

use std::time::Duration;

use clap::ValueEnum;
use tokio::time::{Instant, timeout};

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::tools::CheckSettings;
use crate::{
    contention, gpus, handover, host, lossless, memory, neighbours, pairs, partitions, policies, profiles,
    sms, sweep,
};

/// A stage of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckStage {
    /// The device, the driver, MPS, and the output of `shadowslice doctor`.
    Host,
    /// The number of SMs at each percentage, and the cost of a context.
    Sms,
    /// The time of each phase of a hand-over, for each model.
    Handover,
    /// The GPU memory with one worker, with two workers, and after all workers have been killed.
    Memory,
    /// Many hand-overs of all models under load, with every answer checked.
    Lossless,
    /// Shares that change inside the workers, including half precision.
    Partitions,
    /// The slowdown of one model's batches by another model, depending on the shares of both.
    Contention,
    /// The slowdown of other models by a shadow that warms up.
    Neighbours,
    /// Execution times, memory and numerical errors of each model at each share.
    Sweep,
    /// The mutual slowdown of two models that run at the same time, for all pairs of models.
    Pairs,
    /// The profile of each model, measured with `shadowslice profile`.
    Profiles,
    /// A comparison of policies with the measured profiles.
    Policies,
    /// A comparison of more policies, with five models at the same time.
    Mixes,
    /// The throughput and the isolation of two GPUs, if the host has two GPUs.
    Gpus,
}

impl CheckStage {
    /// All stages in the order in which they run. The most valuable stages run first.
    pub(crate) const ALL: [Self; 14] = [
        Self::Host,
        Self::Sms,
        Self::Handover,
        Self::Memory,
        Self::Lossless,
        Self::Partitions,
        Self::Contention,
        Self::Neighbours,
        Self::Sweep,
        Self::Pairs,
        Self::Profiles,
        Self::Policies,
        Self::Mixes,
        Self::Gpus,
    ];

    /// Returns the name on the command line and in the figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Sms => "sms",
            Self::Handover => "handover",
            Self::Memory => "memory",
            Self::Lossless => "lossless",
            Self::Partitions => "partitions",
            Self::Contention => "contention",
            Self::Neighbours => "neighbours",
            Self::Sweep => "sweep",
            Self::Pairs => "pairs",
            Self::Profiles => "profiles",
            Self::Policies => "policies",
            Self::Mixes => "mixes",
            Self::Gpus => "gpus",
        }
    }

    /// Returns true if each run only adds the mixes and policies that it names, and keeps all other
    /// figures.
    pub(crate) fn accumulates(self) -> bool {
        matches!(self, Self::Policies | Self::Mixes)
    }

    /// Returns the time limit of the stage.
    fn time_limit(self) -> Duration {
        let minutes = match self {
            Self::Host => 1,
            Self::Sms => 4,
            Self::Handover | Self::Memory => 7,
            Self::Lossless | Self::Partitions | Self::Sweep | Self::Profiles => 9,
            Self::Neighbours => 6,
            Self::Contention | Self::Pairs | Self::Gpus => 4,
            Self::Policies | Self::Mixes => 25,
        };
        Duration::from_secs(60 * minutes)
    }
}

/// The minimum remaining time for the start of a stage.
const MIN_STAGE_TIME: Duration = Duration::from_secs(5);

/// The time that a stage with a deadline reserves to stop its processes.
pub(crate) const STOPPING: Duration = Duration::from_secs(20);

/// Runs the stages one by one, at most until `end`. Returns true if no stage failed.
pub(crate) async fn run_all(
    stages: &[CheckStage],
    settings: &CheckSettings,
    figures: &mut FigureStore,
    end: Instant,
) -> Result<bool, StageError> {
    let mut all_passed = true;
    for &stage in stages {
        if figures.has(stage, settings.quick) && !settings.again && !stage.accumulates() {
            println!("{}: skipped, has figures (use --again to repeat)", stage.name());
            continue;
        }
        let begun = Instant::now();
        let limit = stage.time_limit().min(end.saturating_duration_since(begun));
        if limit < MIN_STAGE_TIME {
            println!("{}: skipped, no time left", stage.name());
            all_passed = false;
            continue;
        }
        println!("{} ...", stage.name());
        if settings.again && !stage.accumulates() {
            figures.start_over(stage);
        }
        let ran = timeout(limit, run(stage, settings, figures, begun + limit)).await;
        let failed = match ran {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(chain(&error)),
            Err(_) => Some(format!("timed out after {} s; figures so far are kept", limit.as_secs())),
        };
        let seconds = begun.elapsed().as_secs();
        match &failed {
            None => println!("{}: done in {seconds} s", stage.name()),
            Some(why) => println!("{}: FAILED after {seconds} s: {why}", stage.name()),
        }
        all_passed &= failed.is_none();
        figures.record_stage(stage, settings, seconds, failed);
        figures.save()?;
    }
    Ok(all_passed)
}

async fn run(
    stage: CheckStage,
    settings: &CheckSettings,
    figures: &mut FigureStore,
    end: Instant,
) -> Result<(), StageError> {
    match stage {
        CheckStage::Host => host::run(settings, figures).await,
        CheckStage::Sms => sms::run(settings, figures).await,
        CheckStage::Handover => handover::run(settings, figures).await,
        CheckStage::Memory => memory::run(settings, figures).await,
        CheckStage::Lossless => lossless::run(settings, figures, end).await,
        CheckStage::Partitions => partitions::run(settings, figures, end).await,
        CheckStage::Contention => contention::run(settings, figures).await,
        CheckStage::Neighbours => neighbours::run(settings, figures).await,
        CheckStage::Sweep => sweep::run(settings, figures).await,
        CheckStage::Pairs => pairs::run(settings, figures).await,
        CheckStage::Profiles => profiles::run(settings, figures).await,
        CheckStage::Policies => policies::run(settings, figures).await,
        CheckStage::Mixes => policies::run_mixes(settings, figures).await,
        CheckStage::Gpus => gpus::run(settings, figures).await,
    }
}
