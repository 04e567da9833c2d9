//! The ledger of a GPU's groups of SMs, which assigns groups to models.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use shadowslice_policy::groups::{GroupTenant, place};
use shadowslice_shared::groups::Groups;
use tokio::sync::watch;

/// The largest number of impossible partitions that the ledger stores for a model. Sixteen groups have 136
/// runs.
const MAX_IMPOSSIBLE: usize = 136;

/// The groups of all models on a GPU.
#[derive(Debug)]
pub struct GroupLedger {
    /// The number of groups.
    total: usize,
    tenants: Mutex<Tenants>,
    moved_tx: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Tenants {
    next: u64,
    by_id: BTreeMap<u64, GroupTenant>,
}

/// A model's entry in the ledger. When it is dropped, the model leaves the ledger.
#[derive(Debug)]
pub(super) struct Tenancy {
    id: u64,
    ledger: Arc<GroupLedger>,
}

impl GroupLedger {
    /// Creates the ledger of a GPU with `total` groups. `total` is 0 if the GPU cannot be divided.
    pub fn new(total: usize) -> Self {
        Self { total, tenants: Mutex::default(), moved_tx: watch::Sender::new(()) }
    }

    /// Returns a receiver that reports whenever the groups of a model change.
    pub fn moves(&self) -> watch::Receiver<()> {
        self.moved_tx.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut Tenants)) {
        let mut tenants = self.tenants.lock();
        change(&mut tenants);
        let (ids, all): (Vec<u64>, Vec<GroupTenant>) =
            tenants.by_id.iter().map(|(id, tenant)| (*id, tenant.clone())).unzip();
        let mut moved = false;
        for (id, groups) in ids.into_iter().zip(place(&all, self.total)) {
            if let Some(tenant) = tenants.by_id.get_mut(&id) {
                moved |= std::mem::replace(&mut tenant.now, groups) != groups;
            }
        }
        self.moved_tx.send_if_modified(|()| moved);
    }
}

impl Tenancy {
    pub(super) fn of(ledger: &Arc<GroupLedger>, count: usize, priority: u32) -> Self {
        let mut id = 0;
        ledger.change(|tenants| {
            id = tenants.next;
            tenants.next += 1;
            let (now, preferred, cannot) = (Groups::WHOLE, None, Vec::new());
            tenants.by_id.insert(id, GroupTenant { count, priority, now, preferred, cannot });
        });
        Self { id, ledger: Arc::clone(ledger) }
    }

    /// Requests `count` groups. The model cannot have the partition `cannot`. Returns the model's groups.
    pub(super) fn request(&self, count: usize, cannot: Option<Groups>) -> Groups {
        self.ledger.change(|tenants| {
            let Some(tenant) = tenants.by_id.get_mut(&self.id) else { return };
            tenant.count = count;
            let is_new =
                |groups: &Groups| tenant.cannot.len() < MAX_IMPOSSIBLE && !tenant.cannot.contains(groups);
            tenant.cannot.extend(cannot.filter(is_new));
        });
        self.groups()
    }

    /// Sets the groups that the model gets whenever it has this number of groups. `None` means that the
    /// model accepts any groups. If the model has this number of groups now, its groups change immediately.
    pub(super) fn prefer(&self, groups: Option<Groups>) {
        self.ledger.change(|tenants| {
            if let Some(tenant) = tenants.by_id.get_mut(&self.id) {
                tenant.preferred = groups;
            }
        });
    }

    pub(super) fn groups(&self) -> Groups {
        self.ledger.tenants.lock().by_id.get(&self.id).map_or(Groups::WHOLE, |tenant| tenant.now)
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        self.ledger.change(|tenants| {
            tenants.by_id.remove(&self.id);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_moves_models_at_once_and_is_forgotten_with_the_next() {
        let ledger = Arc::new(GroupLedger::new(16));
        let (first, second) = (Tenancy::of(&ledger, 8, 1), Tenancy::of(&ledger, 8, 1));
        let (low, high): (Groups, Groups) = ((0..8).collect(), (8..16).collect());
        first.prefer(Some(high));
        second.prefer(Some(high));
        assert_eq!([first.groups(), second.groups()], [high; 2]);
        second.prefer(Some(low));
        assert_eq!([first.groups(), second.groups()], [high, low]);
        assert_eq!(first.request(4, None).count(), 4);
    }

    #[test]
    fn who_comes_and_goes_is_told_to_the_others() {
        let ledger = Arc::new(GroupLedger::new(16));
        let moves = ledger.moves();
        let first = Tenancy::of(&ledger, 10, 1);
        let second = Tenancy::of(&ledger, 6, 1);
        assert_eq!(first.groups().common(second.groups()), Groups::NONE);
        assert!(moves.has_changed().unwrap());
        let at_first = first.groups();
        first.request(16, None);
        assert_eq!(first.groups(), Groups::WHOLE);
        first.request(10, None);
        assert_eq!(first.groups(), at_first);
        drop(second);
        let third = Tenancy::of(&ledger, 6, 1);
        assert_eq!(third.groups().common(first.groups()), Groups::NONE);
    }
}
