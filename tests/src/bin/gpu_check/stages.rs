//! The stages: their order, their bounds, and the treatment of a failed stage.

use std::time::Duration;

use clap::ValueEnum;
use tokio::time::{Instant, timeout};

use crate::error::{Error, chain};
use crate::figures::Figures;
use crate::tools::Setting;
use crate::{
    contention, gpus, handover, host, lossless, memory, neighbours, pairs, partitions, policies, profiles,
    sms, sweep,
};

/// One part of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
    /// Device, driver, MPS, the output of `shadowslice doctor`.
    Host,
    /// The SMs of each percentage, and the cost of a context.
    Sms,
    /// The time of each part of a hand-over, model by model.
    Handover,
    /// The GPU memory with one worker, with two, and after the death of all.
    Memory,
    /// Many hand-overs of all models under load, every answer checked.
    Lossless,
    /// Shares that change inside the workers, half precision included.
    Partitions,
    /// The slowdown of one model's batches by another model, by the shares of both.
    Contention,
    /// The slowdown of other models by a shadow worker that warms up.
    Neighbours,
    /// Each model at each share: execution times, memory, errors of the answers.
    Sweep,
    /// Every pair of models side by side.
    Pairs,
    /// `shadowslice profile` of each model.
    Profiles,
    /// Policies side by side, by the profiles that were measured.
    Policies,
    /// The same with five models at once, and more policies.
    Mixes,
    /// Two GPUs of one host, if the host has two.
    Gpus,
}

impl Stage {
    /// The most valuable first.
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

    /// Its name on the command line and in the figures.
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

    /// Whether each run adds the mixes and policies that it names, and keeps the others' figures.
    pub(crate) fn accumulates(self) -> bool {
        matches!(self, Self::Policies | Self::Mixes)
    }

    /// The most that it may take.
    fn bound(self) -> Duration {
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

/// Below this nothing is begun any more.
const TOO_LITTLE: Duration = Duration::from_secs(5);

/// The time that a stage with a planned end reserves for stopping its processes.
pub(crate) const STOPPING: Duration = Duration::from_secs(20);

/// Runs the stages one after the other, at most until `end`; returns whether no stage failed.
pub(crate) async fn run_all(
    stages: &[Stage],
    setting: &Setting,
    figures: &mut Figures,
    end: Instant,
) -> Result<bool, Error> {
    let mut well = true;
    for &stage in stages {
        if figures.has(stage, setting.quick) && !setting.again && !stage.accumulates() {
            println!("{}: its figures are there", stage.name());
            continue;
        }
        let begun = Instant::now();
        let bound = stage.bound().min(end.saturating_duration_since(begun));
        if bound < TOO_LITTLE {
            println!("{}: no time is left", stage.name());
            well = false;
            continue;
        }
        println!("{} ...", stage.name());
        if setting.again && !stage.accumulates() {
            figures.start_over(stage);
        }
        let ran = timeout(bound, run(stage, setting, figures, begun + bound)).await;
        let failed = match ran {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(chain(&error)),
            Err(_) => Some(format!("not done within {} s; what was measured is kept", bound.as_secs())),
        };
        let seconds = begun.elapsed().as_secs();
        match &failed {
            None => println!("{}: done in {seconds} s", stage.name()),
            Some(why) => println!("{}: FAILED after {seconds} s: {why}", stage.name()),
        }
        well &= failed.is_none();
        figures.ran(stage, setting, seconds, failed);
        figures.save()?;
    }
    Ok(well)
}

async fn run(stage: Stage, setting: &Setting, figures: &mut Figures, end: Instant) -> Result<(), Error> {
    match stage {
        Stage::Host => host::run(setting, figures).await,
        Stage::Sms => sms::run(setting, figures).await,
        Stage::Handover => handover::run(setting, figures).await,
        Stage::Memory => memory::run(setting, figures).await,
        Stage::Lossless => lossless::run(setting, figures, end).await,
        Stage::Partitions => partitions::run(setting, figures, end).await,
        Stage::Contention => contention::run(setting, figures).await,
        Stage::Neighbours => neighbours::run(setting, figures).await,
        Stage::Sweep => sweep::run(setting, figures).await,
        Stage::Pairs => pairs::run(setting, figures).await,
        Stage::Profiles => profiles::run(setting, figures).await,
        Stage::Policies => policies::run(setting, figures).await,
        Stage::Mixes => policies::run_mixes(setting, figures).await,
        Stage::Gpus => gpus::run(setting, figures).await,
    }
}
