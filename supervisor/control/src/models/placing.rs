//! Which GPUs have the models of which the configuration says `gpu: auto`.

use shadowslice_config::{Config, Model};
use shadowslice_policy::placement::{Gpu, Settled, Share, Tenant, settle};
use shadowslice_shared::units::Percent;

use super::needs::Needs;
use super::registry::Registry;

impl Registry {
    /// The same with a GPU for each model; `on` is where a model is, if it is anywhere.
    pub(super) fn placed(&self, mut config: Config, on: impl Fn(&str) -> Option<usize>) -> Config {
        if config.models.iter().any(|model| model.gpu_auto) {
            let settled = self.settled(&config.models, on);
            for (model, Settled { gpu, lacks }) in config.models.iter().zip(&settled) {
                if let Some(lacks) = lacks {
                    let model = &model.name;
                    tracing::warn!(model, gpu, "no GPU has all that it needs at its SLO: {lacks}");
                }
            }
            config.put(&settled.iter().map(|settled| settled.gpu).collect::<Vec<_>>());
        }
        config
    }

    pub(super) fn settled(&self, models: &[Model], on: impl Fn(&str) -> Option<usize>) -> Vec<Settled> {
        let gpus = self.gpus();
        let tenant = |model: &Model| {
            let share = self.share_of(model);
            if !model.gpu_auto {
                return Tenant::Fixed { on: model.gpu, share };
            }
            let on = on(&model.name).filter(|&gpu| gpu < gpus.len());
            Tenant::Free { on, share, priority: model.priority }
        };
        settle(&gpus, &models.iter().map(tenant).collect::<Vec<_>>())
    }

    /// What a model takes of its GPU.
    fn share_of(&self, model: &Model) -> Share {
        let gpu = &*self.factory.context.gpus[model.gpu];
        let needs = self.served(&model.name).map_or_else(|| Needs::told(model, gpu), Needs::of);
        needs.share(model, gpu)
    }

    fn gpus(&self) -> Vec<Gpu> {
        let context = &self.factory.context;
        let watched = context.readings.look();
        let memory = |index: usize| {
            let usage = watched.get(index)?.reading.as_ref()?.usage.as_ref()?;
            Some(usage.memory.total)
        };
        // Where the memory is not known, as on an emulated GPU, it is no bound.
        let gpu = |index: usize| Gpu {
            host: 0,
            sms: context.gpus[index].sms(Percent::WHOLE),
            memory: memory(index).unwrap_or(u64::MAX),
            taken: Share::NOTHING,
        };
        (0..context.gpus.len()).map(gpu).collect()
    }
}
