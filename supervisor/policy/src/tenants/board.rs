//! The tenants of all models on a GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::groups::Groups;

use super::clock::FairClock;
use super::{TenantId, TenantSet, TenantTurns};

/// The maximum lead of a tenant over a tenant with requests for another model on the same SMs, in GPU time. It
/// is about one short batch, so that models whose tenants are even do not alternate.
const MAX_LEAD: Duration = Duration::from_millis(2);

/// The maximum arrears of a tenant, in GPU time. They are several long batches: if tenants are behind
/// only because batches end at different times, all of it is made up for. A tenant that asks for more after
/// a while with few requests has an advantage of at most this time.
const MAX_CREDIT: Duration = Duration::from_millis(200);

/// The longest time for which requests wait for another tenant before the turns are computed again.
const MAX_HELD: Duration = Duration::from_millis(5);

/// The shortest such time. It is a fraction of a batch.
const MIN_HELD: Duration = Duration::from_micros(500);

/// The state of a worker that its GPU's board needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoardMember {
    /// The priority of the model. SM time of different priorities is not compared.
    pub priority: u32,
    /// The groups of SMs that the worker uses.
    pub groups: Groups,
    /// The number of SMs of the worker's share.
    pub sms: f64,
    /// True if the worker executes a batch.
    pub executes: bool,
    /// The tenants with requests in the model's queue.
    pub queued: TenantSet,
    /// The tenants with requests in the model's queue or in batches.
    pub active: TenantSet,
}

/// The virtual times of the tenants on one GPU.
#[derive(Debug)]
pub struct TenantBoard {
    weights: Vec<f64>,
    /// The number of SMs of the GPU.
    sms: f64,
    clocks: BTreeMap<u32, FairClock>,
    members: BTreeMap<u64, BoardMember>,
}

impl TenantBoard {
    /// Creates the board of a GPU with `sms` SMs. `weights` contains the weight of each tenant.
    pub fn new(weights: Vec<f64>, sms: f64) -> Self {
        Self { weights, sms, clocks: BTreeMap::new(), members: BTreeMap::new() }
    }

    /// Adds SM time that a worker used for a tenant.
    pub fn charge(&mut self, worker: u64, tenant: TenantId, sm_seconds: f64) {
        let Some(member) = self.members.get(&worker) else { return };
        let weight = self.weights.get(tenant.index()).copied().unwrap_or(1.0);
        if let Some(clock) = self.clocks.get_mut(&member.priority) {
            clock.add(tenant, sm_seconds / weight);
        }
    }

    /// Updates or removes a worker.
    pub fn set(&mut self, worker: u64, member: Option<BoardMember>) {
        let before = match member {
            Some(member) => self.members.insert(worker, member),
            None => self.members.remove(&worker),
        };
        for priority in [before, member].into_iter().flatten().map(|member| member.priority) {
            let same = self.members.values().filter(|member| member.priority == priority);
            let active = same.fold(TenantSet::default(), |active, member| active.union(member.active));
            let credits = self.weights.iter().map(|weight| MAX_CREDIT.as_secs_f64() * self.sms / weight);
            let clock = self.clocks.entry(priority).or_insert_with(|| FairClock::new(credits.collect()));
            clock.set_active(active);
        }
    }

    /// Returns the turns of the tenants in the queue of a worker's model.
    pub fn turns(&self, worker: u64) -> TenantTurns {
        let mut turns = TenantTurns::new(&self.weights);
        let Some(own) = self.members.get(&worker) else { return turns };
        if let Some(clock) = self.clocks.get(&own.priority) {
            turns.used = clock.used().to_vec();
        }
        let behind = self.waiting_elsewhere(worker, own);
        let lead = |tenant: TenantId| {
            let ahead_of = |other: TenantId| {
                let time = (turns.used(tenant) - turns.used(other)) * turns.weight(other) / self.sms;
                Duration::try_from_secs_f64(time).unwrap_or_default()
            };
            behind.iter().map(ahead_of).max().unwrap_or_default()
        };
        let held = own.queued.iter().map(|tenant| (tenant, lead(tenant)));
        let held: Vec<_> = held.filter(|&(_, lead)| lead > MAX_LEAD).collect();
        turns.held = held.iter().map(|&(tenant, _)| tenant).collect();
        let shortest = held.iter().map(|&(_, lead)| lead - MAX_LEAD).min();
        turns.held_for = shortest.unwrap_or_default().clamp(MIN_HELD, MAX_HELD);
        turns
    }

    /// Returns the tenants with requests for other models that execute on the same SMs. A model that
    /// executes nothing does not need the SMs now, for example because its worker starts. Percentages of MPS
    /// that fit next to each other do not compete.
    fn waiting_elsewhere(&self, worker: u64, own: &BoardMember) -> TenantSet {
        let competes = |member: &BoardMember| {
            member.executes
                && member.priority == own.priority
                && member.groups.common(own.groups) != Groups::NONE
        };
        let others = self.members.iter().filter(|&(&other, member)| other != worker && competes(member));
        let others: Vec<&BoardMember> = others.map(|(_, member)| member).collect();
        let are_whole = others.iter().all(|member| member.groups == Groups::WHOLE);
        let sms = own.sms + others.iter().map(|member| member.sms).sum::<f64>();
        if are_whole && own.groups == Groups::WHOLE && sms <= self.sms {
            return TenantSet::default();
        }
        others.iter().fold(TenantSet::default(), |queued, member| queued.union(member.queued))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn member(tenant: TenantId) -> BoardMember {
        let tenants: TenantSet = [tenant].into_iter().collect();
        BoardMember {
            priority: 1,
            groups: Groups::WHOLE,
            sms: 100.0,
            executes: true,
            queued: tenants,
            active: tenants,
        }
    }

    fn board() -> TenantBoard {
        let mut board = TenantBoard::new(vec![1.0, 3.0, 1.0], 100.0);
        board.set(1, Some(member(A)));
        board.set(2, Some(member(B)));
        board
    }

    #[test]
    fn a_tenant_that_is_ahead_waits_until_the_other_one_catches_up() {
        let mut board = board();
        board.charge(2, B, 0.5);
        board.charge(1, A, 1.5);
        assert_eq!(board.turns(2).held, TenantSet::default(), "A has three times as much");
        board.charge(2, B, 1.0);
        let turns = board.turns(2);
        assert!(turns.held.contains(B) && turns.held_for == MAX_HELD, "A needs 30 ms of the GPU");
        assert!(board.turns(1).held.is_empty());
    }

    #[test]
    fn nobody_waits_for_a_model_that_is_idle_has_other_sms_or_another_priority() {
        let others = [
            BoardMember { executes: false, ..member(A) },
            BoardMember { priority: 2, ..member(A) },
            BoardMember { queued: TenantSet::default(), ..member(A) },
            BoardMember { groups: [0].into_iter().collect(), ..member(A) },
        ];
        for other in others {
            let mut board = board();
            let own = BoardMember { groups: [1, 2].into_iter().collect(), ..member(B) };
            board.set(2, Some(own));
            board.charge(2, B, 9.0);
            assert!(!board.turns(2).held.is_empty());
            board.set(1, Some(other));
            assert!(board.turns(2).held.is_empty(), "{other:?}");
        }
        let mut board = board();
        for (worker, of) in [(1, A), (2, B)] {
            board.set(worker, Some(BoardMember { sms: 50.0, ..member(of) }));
        }
        board.charge(2, B, 9.0);
        assert!(board.turns(2).held.is_empty(), "the percentages fit next to each other");
        board.set(1, Some(member(A)));
        assert!(!board.turns(2).held.is_empty());
        board.set(1, None);
        assert!(board.turns(2).held.is_empty(), "the worker has ended");
    }
}
