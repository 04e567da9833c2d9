//! Which GPUs have the models of which the configuration says `gpu: auto`.

use std::time::Duration;

use shadowslice_config::{Config, ModelConfig};
use shadowslice_policy::placement::{GpuAssignment, GpuCapacity, HostTenant, Share, assign_gpus};
use shadowslice_shared::units::Percent;
use tokio::time::Instant;

use super::needs::Needs;
use super::registry::{Registry, Waits};
use super::{ModelChange, plan};
use crate::controller::{ModelState, Served};

/// How often it is asked whether models should be on other GPUs.
const LOOK: Duration = Duration::from_secs(10);

/// After models have moved: what is seen of a model covers as long, and is then all from where it is.
const SEEN_ANEW: Duration = Duration::from_secs(120);

impl Registry {
    /// The same with a GPU for each model: a model stays `on` its GPU, if it has one.
    pub(super) fn placed(&self, mut config: Config, on: impl Fn(&str) -> Option<usize>) -> Config {
        if !config.models.iter().any(|model| model.gpu_auto) {
            return config;
        }
        let gpus = self.gpus();
        let home = |model: &ModelConfig| match model.gpu_auto {
            true => on(&model.name).filter(|&gpu| gpu < gpus.len()),
            false => Some(model.gpu),
        };
        let tenant = |model: &ModelConfig| match home(model) {
            Some(on) => HostTenant::Fixed { on, share: self.share_of(model) },
            None => HostTenant::Free { on: None, share: self.share_of(model), priority: model.priority },
        };
        let settled = assign_gpus(&gpus, &config.models.iter().map(tenant).collect::<Vec<_>>());
        for (model, GpuAssignment { gpu, shortage: lacks }) in config.models.iter().zip(&settled) {
            if let Some(lacks) = lacks {
                let model = &model.name;
                tracing::warn!(
                    model,
                    gpu,
                    why = %lacks,
                    "no GPU has enough free resources for the model's SLO; the model runs on this GPU, and may violate its SLO"
                );
            }
        }
        config.assign_gpus(&settled.iter().map(|settled| settled.gpu).collect::<Vec<_>>());
        config
    }

    /// Where the models should be with the requests of the last minutes.
    fn better(&self, models: &[ModelConfig]) -> Vec<usize> {
        let tenant = |model: &ModelConfig| {
            let (on, share) = (model.gpu, self.share_of(model));
            match model.gpu_auto {
                true => HostTenant::Free { on: Some(on), share, priority: model.priority },
                false => HostTenant::Fixed { on, share },
            }
        };
        let settled = assign_gpus(&self.gpus(), &models.iter().map(tenant).collect::<Vec<_>>());
        settled.into_iter().map(|settled| settled.gpu).collect()
    }

    /// What a model takes of its GPU.
    fn share_of(&self, model: &ModelConfig) -> Share {
        let gpu = &*self.factory.context.gpus[model.gpu];
        let watched = self.factory.context.readings.look();
        let served = self.served(&model.name);
        let needs = served.map_or_else(|| Needs::told(model, gpu), |served| Needs::of(served, &watched));
        needs.share(model, gpu)
    }

    fn gpus(&self) -> Vec<GpuCapacity> {
        let context = &self.factory.context;
        let watched = context.readings.look();
        let memory = |index: usize| {
            let usage = watched.get(index)?.reading.as_ref()?.usage.as_ref()?;
            Some(usage.memory.total)
        };
        // Where the memory is not known, as on an emulated GPU, it is no bound.
        let gpu = |index: usize| GpuCapacity {
            host: 0,
            sms: context.gpus[index].sms(Percent::WHOLE),
            memory: memory(index).unwrap_or(u64::MAX),
            taken: Share::NOTHING,
        };
        (0..context.gpus.len()).map(gpu).collect()
    }

    /// Returns whether the model was elsewhere.
    pub(super) async fn place_by_hand(&mut self, name: &str, gpu: usize) -> Result<bool, String> {
        let model = self.model(name).ok_or_else(|| format!("model '{name}' not found"))?;
        let gpus = self.factory.context.gpus.len();
        if gpu >= gpus {
            return Err(format!("GPU {gpu} not found; the configuration has GPUs 0 to {}", gpus - 1));
        }
        if !model.gpu_auto {
            let is = model.gpu;
            return Err(format!(
                "the configuration puts '{name}' on GPU {is}; change `gpu` there and reload, or set `gpu: auto`"
            ));
        }
        if model.gpu == gpu {
            return Ok(false);
        }
        let config = self.config();
        let to = |model: &ModelConfig| if model.name == name { gpu } else { model.gpu };
        let rows = self.go_to(config.models.iter().map(to).collect()).await;
        let why = rows.into_iter().find(|row| row.name == name).and_then(|row| row.why);
        why.map_or(Ok(true), |why| Err(format!("model '{name}' stays on GPU {}: {why}", model.gpu)))
    }

    /// Moves models where one misses its SLO, and with the requests of the last minutes more models
    /// would have the SMs that they need on other GPUs.
    pub(super) async fn move_for_slack(&mut self) {
        if Instant::now() < self.next_look {
            return;
        }
        self.next_look = Instant::now() + LOOK;
        if self.moved().next().is_some() {
            // Another supervisor takes over, and will look by itself.
            return;
        }
        let config = self.config();
        let is_auto = |model: &ModelConfig| model.gpu_auto;
        if !config.controller.act || config.gpus.len() == 1 || !config.models.iter().any(is_auto) {
            return;
        }
        let served = config.models.iter().filter_map(|model| self.served(&model.name));
        let Some(late) = served.clone().find(|served| misses(served)).map(|served| served.model.name.clone())
        else {
            return;
        };
        let settled = self.better(&config.models);
        let moves = config.models.iter().zip(&settled).filter(|(model, gpu)| model.gpu != **gpu);
        if moves.clone().count() == 0 {
            return;
        }
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
        self.go_to(settled).await;
        self.next_look = Instant::now() + SEEN_ANEW;
    }

    /// Has each model on its GPU of these: it starts there, proves itself, takes over, and ends where
    /// it was.
    async fn go_to(&mut self, gpus: Vec<usize>) -> Vec<ModelChange> {
        let old = self.config();
        let mut new = old.clone();
        new.assign_gpus(&gpus);
        let changes = old.models.iter().zip(&new.models).filter_map(|(old, new)| plan::change(old, new));
        let (mut rows, mut waits) = (Vec::new(), Waits::new());
        for change in changes {
            let (kind, begun) = self.change(&change, rows.len(), &mut waits).await;
            let keys = change.keys().into_iter().map(str::to_owned).collect();
            rows.push(ModelChange { name: change.model.name.clone(), change: kind, keys, why: begun.err() });
        }
        self.publish();
        self.settle_all(&mut rows, waits).await;
        rows
    }
}

/// Whether it serves and misses its objective, over the last minute or two.
fn misses(served: &Served) -> bool {
    let (slo, seen) = (&served.model.slo, served.pipeline.report().latencies);
    matches!(served.report.borrow().state, ModelState::Ready) && seen.attainment < slo.percentile / 100.0
}
