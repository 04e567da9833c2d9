//! In-process share changes: the groups of SMs that each model uses. Groups change between two
//! batches, without a process start or a delay.

use shadowslice_policy::groups::{GroupTenant, place};
use shadowslice_policy::sharing::ShareChange;
use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::units::Sms;

use super::SharedState;
use super::model::{WorldModel, id};

/// The share of a model that changes its share in-process.
#[derive(Debug, Clone, Copy)]
pub(super) struct InWorkerShare {
    /// The desired number of groups.
    count: usize,
    /// The current groups.
    groups: Groups,
    /// The groups that a layout assigns to the model, or `None` if no layout assigns groups.
    preferred: Option<Groups>,
}

impl InWorkerShare {
    /// Returns a share that has enough groups for `sms` SMs, or `None` if the GPU cannot be
    /// divided.
    pub(super) fn of(gpu: &SharedGpu, sms: Sms) -> Option<Self> {
        let division = gpu.division.as_ref()?;
        Some(Self { count: count_of(division, sms), groups: Groups::WHOLE, preferred: None })
    }

    pub(super) fn groups(&self) -> Groups {
        self.groups
    }
}

/// Returns the minimum number of groups that together have at least `sms` SMs.
fn count_of(division: &Division, sms: Sms) -> usize {
    let fits = |&count: &usize| division.sms(Groups::first(count)) >= sms;
    (1..division.count()).find(fits).unwrap_or(division.count())
}

impl WorldModel<'_> {
    /// Changes the desired number of groups. [`place_all`] then chooses the groups, and the model's
    /// next batch uses them.
    pub(super) fn resize_in_process(&mut self, change: &ShareChange, gpu: &SharedGpu, now: u64) {
        let (Some(inside), Some(division)) = (&mut self.in_process, &gpu.division) else { return };
        let count = count_of(division, change.to);
        inside.preferred = change.groups;
        if count != inside.count {
            inside.count = count;
            self.share_changed(now);
        }
    }

    /// Returns the number of SMs in the desired number of groups. The actual number of SMs may
    /// differ if one of the model's groups is the group of left-over SMs.
    pub(super) fn in_process_share(&self, gpu: &SharedGpu) -> Option<Sms> {
        let (inside, division) = (self.in_process?, gpu.division.as_ref()?);
        let whole = inside.count >= division.count();
        Some(if whole { division.total() } else { division.sms(Groups::first(inside.count)) })
    }

    fn move_to(&mut self, groups: Groups, gpu: &SharedGpu) {
        let sms = gpu.occupant(groups).sms;
        self.workers[self.serving].sms = sms;
        let slice = self.slice(groups, sms);
        self.scheduler.move_to(id(self.serving), &slice);
    }
}

/// Assigns groups to all models on a GPU.
pub(super) fn place_all(models: &mut [WorldModel<'_>], gpu: usize, shared: &SharedState<'_>) {
    let gpu_of = shared.gpus.gpu(gpu);
    let total = gpu_of.division.as_ref().map_or(0, Division::count);
    let here = |model: &&mut WorldModel<'_>| model.spec.terms.gpu == gpu && model.in_process.is_some();
    let mut in_process: Vec<&mut WorldModel<'_>> = models.iter_mut().filter(here).collect();
    let tenant = |model: &&mut WorldModel<'_>| {
        let InWorkerShare { count, groups, preferred } = model.in_process?;
        let priority = model.spec.terms.priority;
        Some(GroupTenant { count, priority, now: groups, preferred, cannot: Vec::new() })
    };
    let tenants: Vec<GroupTenant> = in_process.iter().filter_map(tenant).collect();
    for (model, groups) in in_process.iter_mut().zip(place(&tenants, total)) {
        let before = model.in_process.as_mut().map(|inside| std::mem::replace(&mut inside.groups, groups));
        if before != Some(groups) {
            model.move_to(groups, gpu_of);
        }
    }
}
