//! Shares that change inside the workers: which groups of a GPU's SMs each model has. From one batch to the next they are others,
//! with nothing started and nothing waited for.

use shadowslice_policy::groups::{Tenant, place};
use shadowslice_policy::sharing::Change;
use shadowslice_shared::contention::Gpu;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::units::Sms;

use super::Stage;
use super::model::Model;

/// A model's part of a GPU that divides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inside {
    /// The number of groups that it is to have, and those that it has.
    count: usize,
    groups: Groups,
}

impl Inside {
    /// As many groups as so many SMs need, if the GPU divides.
    pub(super) fn of(gpu: &Gpu, sms: Sms) -> Option<Self> {
        let division = gpu.division.as_ref()?;
        Some(Self { count: count_of(division, sms), groups: Groups::WHOLE })
    }
}

/// The least number of groups that has so many SMs.
fn count_of(division: &Division, sms: Sms) -> usize {
    let fits = |&count: &usize| division.sms(Groups::first(count)) >= sms;
    (1..division.count()).find(fits).unwrap_or(division.count())
}

impl Model<'_> {
    /// The share becomes another one with the next batch, as soon as the groups are [placed](place_all).
    pub(super) fn resize_inside(&mut self, change: &Change, gpu: &Gpu, now: u64) {
        let (Some(inside), Some(division)) = (&mut self.inside, &gpu.division) else { return };
        let count = count_of(division, change.to);
        if count != inside.count {
            inside.count = count;
            self.lanes[self.serving].sms = division.sms(Groups::first(count));
            self.share_changed(now);
        }
    }
}

/// Gives all models of a GPU their groups anew, whose shares are partitions.
pub(super) fn place_all(models: &mut [Model<'_>], gpu: usize, stage: &mut Stage<'_>) {
    let total = stage.gpus.gpu(gpu).division.as_ref().map_or(0, Division::count);
    let on_it = |model: &&mut Model<'_>| model.served.terms.gpu == gpu;
    let inside = models.iter_mut().filter(on_it).filter_map(|model| {
        let priority = model.served.terms.priority;
        let lane = &mut model.lanes[model.serving];
        Some((model.inside.as_mut()?, priority, lane))
    });
    let inside: Vec<_> = inside.collect();
    let tenant = |(inside, priority, _): &(&mut Inside, u32, _)| Tenant {
        count: inside.count,
        priority: *priority,
        now: inside.groups,
        cannot: Vec::new(),
    };
    let tenants: Vec<Tenant> = inside.iter().map(tenant).collect();
    for ((inside, _, lane), groups) in inside.into_iter().zip(place(&tenants, total)) {
        inside.groups = groups;
        let granted = stage.gpus.gpu(gpu).occupant(groups);
        lane.sms = granted.sms;
        stage.gpus.grant(lane.seat, granted);
    }
}
