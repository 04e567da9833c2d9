//! Shares that change inside the workers: which groups of a GPU's SMs each model has. They change
//! from one batch to the next, with nothing started and nothing waited for.

use shadowslice_policy::groups::{GroupTenant, place};
use shadowslice_policy::sharing::ShareChange;
use shadowslice_shared::contention::Gpu;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::units::Sms;

use super::Stage;
use super::model::{Model, id};

#[derive(Debug, Clone, Copy)]
pub(super) struct Inside {
    /// The number of groups that the model is to have, and those that it has.
    count: usize,
    groups: Groups,
    /// The groups that a layout gives the model.
    preferred: Option<Groups>,
}

impl Inside {
    /// As many groups as so many SMs need, if the GPU divides.
    pub(super) fn of(gpu: &Gpu, sms: Sms) -> Option<Self> {
        let division = gpu.division.as_ref()?;
        Some(Self { count: count_of(division, sms), groups: Groups::WHOLE, preferred: None })
    }

    pub(super) fn groups(&self) -> Groups {
        self.groups
    }
}

/// The least number of groups that has so many SMs.
fn count_of(division: &Division, sms: Sms) -> usize {
    let fits = |&count: &usize| division.sms(Groups::first(count)) >= sms;
    (1..division.count()).find(fits).unwrap_or(division.count())
}

impl Model<'_> {
    /// With the next batch, as soon as the groups are [placed](place_all).
    pub(super) fn resize_inside(&mut self, change: &ShareChange, gpu: &Gpu, now: u64) {
        let (Some(inside), Some(division)) = (&mut self.inside, &gpu.division) else { return };
        let count = count_of(division, change.to);
        inside.preferred = change.groups;
        if count != inside.count {
            inside.count = count;
            self.share_changed(now);
        }
    }

    /// Not the SMs of its groups: with the left-over group among them these differ from the share's.
    pub(super) fn share_inside(&self, gpu: &Gpu) -> Option<Sms> {
        let (inside, division) = (self.inside?, gpu.division.as_ref()?);
        let whole = inside.count >= division.count();
        Some(if whole { division.total() } else { division.sms(Groups::first(inside.count)) })
    }

    fn move_to(&mut self, groups: Groups, gpu: &Gpu) {
        let sms = gpu.occupant(groups).sms;
        self.workers[self.serving].sms = sms;
        let slice = self.slice(groups, sms);
        self.scheduler.move_to(id(self.serving), &slice);
    }
}

pub(super) fn place_all(models: &mut [Model<'_>], gpu: usize, stage: &Stage<'_>) {
    let gpu_of = stage.gpus.gpu(gpu);
    let total = gpu_of.division.as_ref().map_or(0, Division::count);
    let here = |model: &&mut Model<'_>| model.served.terms.gpu == gpu && model.inside.is_some();
    let mut inside: Vec<&mut Model<'_>> = models.iter_mut().filter(here).collect();
    let tenant = |model: &&mut Model<'_>| {
        let Inside { count, groups, preferred } = model.inside?;
        let priority = model.served.terms.priority;
        Some(GroupTenant { count, priority, now: groups, preferred, cannot: Vec::new() })
    };
    let tenants: Vec<GroupTenant> = inside.iter().filter_map(tenant).collect();
    for (model, groups) in inside.iter_mut().zip(place(&tenants, total)) {
        let before = model.inside.as_mut().map(|inside| std::mem::replace(&mut inside.groups, groups));
        if before != Some(groups) {
            model.move_to(groups, gpu_of);
        }
    }
}
