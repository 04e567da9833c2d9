//! Which model has which groups of a GPU's SMs.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use shadowslice_policy::groups::{GroupTenant, place};
use shadowslice_shared::groups::Groups;
use tokio::sync::watch;

/// How many impossible partitions of a model are remembered: there are 136 runs of sixteen groups.
const CANNOT: usize = 136;

#[derive(Debug)]
pub struct GroupLedger {
    total: usize,
    tenants: Mutex<Tenants>,
    moved: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Tenants {
    next: u64,
    by_id: BTreeMap<u64, GroupTenant>,
}

/// A model's place in the ledger; dropping it takes the model out.
#[derive(Debug)]
pub(super) struct Tenancy {
    id: u64,
    ledger: Arc<GroupLedger>,
}

impl GroupLedger {
    /// For a GPU with `total` free groups; 0 where the GPU does not divide.
    pub fn new(total: usize) -> Self {
        Self { total, tenants: Mutex::default(), moved: watch::Sender::new(()) }
    }

    /// Changes whenever the groups of any model do.
    pub fn moves(&self) -> watch::Receiver<()> {
        self.moved.subscribe()
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
        self.moved.send_if_modified(|()| moved);
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

    /// It cannot have `cannot`. Returns the groups that it is to have.
    pub(super) fn ask(&self, count: usize, cannot: Option<Groups>) -> Groups {
        self.ledger.change(|tenants| {
            let Some(tenant) = tenants.by_id.get_mut(&self.id) else { return };
            tenant.count = count;
            let news = |groups: &Groups| tenant.cannot.len() < CANNOT && !tenant.cannot.contains(groups);
            tenant.cannot.extend(cannot.filter(news));
        });
        self.groups()
    }

    /// Sets the groups that the model has whenever it has as many; `None` where it does not matter
    /// which ones. They change at once if it has as many now.
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
        assert_eq!(first.ask(4, None).count(), 4);
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
        first.ask(16, None);
        assert_eq!(first.groups(), Groups::WHOLE);
        first.ask(10, None);
        assert_eq!(first.groups(), at_first);
        drop(second);
        let third = Tenancy::of(&ledger, 6, 1);
        assert_eq!(third.groups().common(first.groups()), Groups::NONE);
    }
}
