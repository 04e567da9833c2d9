//! The placement of models with `gpu: auto` on GPUs.

use std::time::Duration;

use shadowslice_config::{Config, ModelConfig};
use shadowslice_policy::placement::{GpuAssignment, GpuCapacity, HostTenant, Share, assign_gpus};
use shadowslice_shared::units::Percent;
use tokio::time::Instant;

use super::config_diff;
use super::needs::Needs;
use super::registry::{ModelTable, Registry};
use super::reload::{PendingChange, outcomes};
use crate::controller::{ModelState, Served};

/// The time between two checks whether models should be on other GPUs.
const PLACEMENT_INTERVAL: Duration = Duration::from_secs(10);

/// The time between two moves of models. The statistics of a model cover this time, and must all come
/// from the GPU on which the model is.
const MOVE_COOLDOWN: Duration = Duration::from_secs(120);

impl Registry {
    /// Returns the configuration with a GPU for each model with `gpu: auto`. Such a model stays `on` its
    /// GPU, if it has one.
    pub(super) fn placed(
        &self,
        table: &ModelTable,
        mut config: Config,
        on: impl Fn(&str) -> Option<usize>,
    ) -> Config {
        if !config.models.iter().any(|model| model.gpu_auto) {
            return config;
        }
        let gpus = self.gpu_capacities();
        let home = |model: &ModelConfig| match model.gpu_auto {
            true => on(&model.name).filter(|&gpu| gpu < gpus.len()),
            false => Some(model.gpu),
        };
        let tenant = |model: &ModelConfig| {
            let share = self.requirement(table, model);
            match home(model) {
                Some(on) => HostTenant::Fixed { on, share },
                None => HostTenant::Free { on: None, share, priority: model.priority },
            }
        };
        let assigned = assign_gpus(&gpus, &config.models.iter().map(tenant).collect::<Vec<_>>());
        for (model, GpuAssignment { gpu, shortage }) in config.models.iter().zip(&assigned) {
            if let Some(shortage) = shortage {
                let model = &model.name;
                tracing::warn!(
                    model,
                    gpu,
                    why = %shortage,
                    "no GPU has enough free resources for the model's SLO; the model runs on this GPU, and may violate its SLO"
                );
            }
        }
        config.assign_gpus(&assigned.iter().map(|assigned| assigned.gpu).collect::<Vec<_>>());
        config
    }

    /// Returns the GPU on which each model should be, according to the requests of the last minutes.
    fn better_gpus(&self, table: &ModelTable, models: &[ModelConfig]) -> Vec<usize> {
        let tenant = |model: &ModelConfig| {
            let (on, share) = (model.gpu, self.requirement(table, model));
            match model.gpu_auto {
                true => HostTenant::Free { on: Some(on), share, priority: model.priority },
                false => HostTenant::Fixed { on, share },
            }
        };
        let assigned = assign_gpus(&self.gpu_capacities(), &models.iter().map(tenant).collect::<Vec<_>>());
        assigned.into_iter().map(|assigned| assigned.gpu).collect()
    }

    /// Returns the part of a GPU that a model needs.
    fn requirement(&self, table: &ModelTable, model: &ModelConfig) -> Share {
        let context = &self.0.factory.context;
        let gpu = &*context.gpus[model.gpu];
        let served = table.instance(&model.name).and_then(|entry| entry.row.served());
        let needs = match served {
            Some(served) => Needs::of(served, &context.readings.look()),
            None => Needs::from_profile(model, gpu),
        };
        needs.share(model, gpu)
    }

    fn gpu_capacities(&self) -> Vec<GpuCapacity> {
        let context = &self.0.factory.context;
        let watched = context.readings.look();
        let memory = |index: usize| {
            let usage = watched.get(index)?.as_ref()?.usage.as_ref()?;
            Some(usage.memory.total)
        };
        // The memory of an emulated GPU is not known, and therefore no limit.
        let gpu = |index: usize| GpuCapacity {
            host: 0,
            sms: context.gpus[index].sms(Percent::WHOLE),
            memory: memory(index).unwrap_or(u64::MAX),
            taken: Share::NOTHING,
        };
        (0..context.gpus.len()).map(gpu).collect()
    }

    /// Moves a model to a GPU. Returns whether the model was on another one.
    ///
    /// # Errors
    ///
    /// Returns the reason why the model stays where it is.
    pub async fn move_to_gpu(&self, name: &str, gpu: usize) -> Result<bool, String> {
        let _permit = self.begin_command()?;
        let (pending, moved) = {
            let _turn = self.0.reading.lock().await;
            let table = self.table();
            if table.rollout(name).is_some() {
                return Err(format!(
                    "a rollout of model '{name}' is in progress; promote it or roll it back first"
                ));
            }
            let model = table.released(name).ok_or_else(|| format!("model '{name}' not found"))?.model();
            if !may_move(&model, gpu, self.0.factory.context.gpus.len())? {
                return Ok(false);
            }
            let config = table.desired_config();
            let to = |other: &ModelConfig| if other.name == model.name { gpu } else { other.gpu };
            let pending = self.assign(&table, &config.models.iter().map(to).collect::<Vec<_>>());
            (pending, model)
        };
        let changes = outcomes(pending).await;
        let why = changes.into_iter().find(|change| change.name == moved.name).and_then(|change| change.why);
        why.map_or(Ok(true), |why| Err(format!("model '{name}' stays on GPU {}: {why}", moved.gpu)))
    }

    /// Moves models if one violates its SLO, and if according to the requests of the last minutes more
    /// models would get the SMs that they need on other GPUs.
    pub(super) async fn move_for_slack(&self) {
        let pending = {
            let _turn = self.0.reading.lock().await;
            let mut table = self.table();
            if Instant::now() < table.next_placement {
                return;
            }
            table.next_placement = Instant::now() + PLACEMENT_INTERVAL;
            let Some(gpus) = self.gpus_with_slack(&table) else { return };
            table.next_placement = Instant::now() + MOVE_COOLDOWN;
            self.assign(&table, &gpus)
        };
        outcomes(pending).await;
        self.table().next_placement = Instant::now() + MOVE_COOLDOWN;
    }

    /// Returns the GPU for each model if models should move.
    fn gpus_with_slack(&self, table: &ModelTable) -> Option<Vec<usize>> {
        let config = table.desired_config();
        let can_move = config.controller.act
            && config.gpus.len() > 1
            && config.models.iter().any(|model| model.gpu_auto)
            // During a change, the statistics do not show what the model needs. During an upgrade, the
            // next supervisor decides.
            // A new version at its small share is slow on purpose.
            && table.versions.values().all(|versions| versions.rollout.is_none())
            && table.entries().iter().all(|entry| entry.goal.borrow().is_settled() && !entry.row.has_moved());
        if !can_move {
            return None;
        }
        let mut served = table.entries().iter().filter_map(|entry| entry.row.served());
        let late = served.find(|served| violates_slo(served))?.model.name.clone();
        let gpus = self.better_gpus(table, &config.models);
        let mut moves = config.models.iter().zip(&gpus).filter(|(model, gpu)| model.gpu != **gpu).peekable();
        moves.peek()?;
        for (model, to) in moves {
            let (model, from) = (&model.name, model.gpu);
            tracing::info!(
                model,
                from,
                to,
                late,
                "moving a model to a GPU with more room, because the model in `late` violates its SLO"
            );
        }
        Some(gpus)
    }

    /// Moves each model to its GPU of this list. It starts there, takes over, and ends where it was.
    fn assign(&self, table: &ModelTable, gpus: &[usize]) -> Vec<PendingChange> {
        let old = table.desired_config();
        let mut new = old.clone();
        new.assign_gpus(gpus);
        let diffs = old.models.iter().zip(&new.models).filter_map(|(old, new)| config_diff::change(old, new));
        diffs.filter_map(|diff| self.change(table, &diff)).collect()
    }
}

/// Returns whether a command can move the model to the GPU. Returns false if it is there already.
fn may_move(model: &ModelConfig, gpu: usize, gpus: usize) -> Result<bool, String> {
    if gpu >= gpus {
        return Err(format!("GPU {gpu} not found; the configuration has GPUs 0 to {}", gpus - 1));
    }
    if !model.gpu_auto {
        let (name, is) = (&model.name, model.gpu);
        return Err(format!(
            "the configuration puts '{name}' on GPU {is}; change `gpu` there and reload, or set `gpu: auto`"
        ));
    }
    Ok(model.gpu != gpu)
}

/// Returns whether the model serves and violates its SLO, over the last minute or two.
fn violates_slo(served: &Served) -> bool {
    let (slo, seen) = (&served.model.slo, served.pipeline.report().latencies);
    matches!(served.report.borrow().state, ModelState::Ready)
        && seen.traffic.counts.attainment().is_some_and(|met| met < slo.percentile / 100.0)
}
