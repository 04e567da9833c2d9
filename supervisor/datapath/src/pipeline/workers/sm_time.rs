//! The SM time that the batches of each model and tenant use on a GPU, and the energy in proportion. A batch
//! has the SMs that [`divide`] gives it. Each tenant has the part that its rows have in the batch. Warm-ups
//! do not count, and a batch that pauses counts as executing.

use std::iter::Sum;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowslice_policy::sm_time::{BatchSms, divide};
use shadowslice_policy::tenants::{BoardMember, TenantBoard, TenantId, TenantTurns};
use shadowslice_shared::units::{Sms, Timestamp};

use crate::tenants::Tenants;

/// The use of one GPU since the supervisor started.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct SmUse {
    /// The SM time in SM·s.
    pub sm_seconds: f64,
    /// The energy in J, or `None` if the GPU's energy is unknown.
    pub energy_j: Option<f64>,
}

impl Sum for SmUse {
    fn sum<I: Iterator<Item = Self>>(uses: I) -> Self {
        uses.fold(Self::default(), |sum, used| Self {
            sm_seconds: sum.sm_seconds + used.sm_seconds,
            energy_j: match (sum.energy_j, used.energy_j) {
                (Some(one), Some(other)) => Some(one + other),
                (one, other) => one.or(other),
            },
        })
    }
}

/// The use of a GPU by one model or one tenant.
#[derive(Debug, Default)]
pub struct SmAccount(Mutex<AccountUse>);

#[derive(Debug, Default)]
struct AccountUse {
    total: SmUse,
    /// The SM time since the last reading of the GPU's energy, in SM·s.
    since_reading: f64,
    /// True if the account is in the list of those with SM time since the last reading.
    is_listed: bool,
}

impl SmAccount {
    pub(crate) fn total(&self) -> SmUse {
        self.0.lock().total
    }

    fn add(&self, sm_seconds: f64) {
        let mut used = self.0.lock();
        used.total.sm_seconds += sm_seconds;
        used.since_reading += sm_seconds;
    }

    /// Returns true if the account was not in the list of those with SM time since the last reading.
    fn list(&self) -> bool {
        !std::mem::replace(&mut self.0.lock().is_listed, true)
    }

    /// Adds the energy of the SM time since the last reading, at `joules` for each SM·s.
    fn charge(&self, joules: f64) {
        let mut used = self.0.lock();
        let charged = std::mem::take(&mut used.since_reading) * joules;
        used.total.energy_j = Some(used.total.energy_j.unwrap_or_default() + charged);
        used.is_listed = false;
    }
}

/// The SM time of one GPU.
#[derive(Debug)]
pub struct GpuSmTime {
    /// The number of SMs of each group, or of the GPU if it does not divide.
    sizes: Vec<Sms>,
    /// The accounts of the tenants on this GPU, if there are several.
    tenants: OnceLock<Vec<Arc<SmAccount>>>,
    state: Mutex<SmTimeState>,
}

#[derive(Debug, Default)]
struct SmTimeState {
    executing: Vec<ExecutingWorker>,
    /// The time up to which the SM time is counted.
    at: Timestamp,
    /// The accounts with SM time since the last reading of the GPU's energy.
    uncharged: Vec<Arc<SmAccount>>,
    reading: Option<EnergyReading>,
    joined: u64,
    /// The virtual times of the tenants, if there are several.
    board: Option<TenantBoard>,
}

/// The batch that a worker executes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ExecutingSms {
    pub(crate) batch: BatchSms,
    /// The parts of the tenants. The list is empty if there is only one tenant.
    pub(crate) tenants: Vec<TenantPart>,
}

/// The part that a tenant has in a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TenantPart {
    pub(crate) tenant: TenantId,
    /// The fraction of the rows.
    pub(crate) fraction: f64,
}

#[derive(Debug)]
struct ExecutingWorker {
    id: u64,
    batch: BatchSms,
    /// The number of SMs that the batch has.
    sms: f64,
    model: Arc<SmAccount>,
    tenants: Vec<TenantAccount>,
}

#[derive(Debug)]
struct TenantAccount {
    part: TenantPart,
    account: Arc<SmAccount>,
}

#[derive(Debug, Clone, Copy)]
struct EnergyReading {
    /// The energy since the driver was loaded, in mJ.
    energy_mj: u64,
    at: Timestamp,
}

impl GpuSmTime {
    /// Creates the SM time of an idle GPU.
    pub fn new(sizes: Vec<Sms>) -> Arc<Self> {
        Arc::new(Self { sizes, tenants: OnceLock::new(), state: Mutex::default() })
    }

    /// Divides the SM time among tenants from now on. Does nothing if there is only one tenant.
    pub fn divide_among(&self, tenants: &Tenants) {
        let weights = tenants.weights();
        if weights.len() > 1 && self.tenants.set(tenants.open_accounts()).is_ok() {
            let sms: u32 = self.sizes.iter().map(|size| size.0).sum();
            self.state.lock().board = Some(TenantBoard::new(weights, sms.into()));
        }
    }

    /// Counts the SM time of the executing batches up to `now`. Call this before you read totals.
    pub fn advance(&self, now: Timestamp) {
        self.state.lock().advance(now);
    }

    /// Divides the energy since the last reading among the models, and among the tenants, in proportion to
    /// their SM time. The part of idle SMs belongs to nobody.
    pub fn charge(&self, energy_mj: u64, now: Timestamp) {
        let mut state = self.state.lock();
        state.advance(now);
        let reading = EnergyReading { energy_mj, at: state.at };
        let last = *state.reading.get_or_insert(reading);
        if last.at == reading.at {
            return;
        }
        state.reading = Some(reading);
        let sms: u32 = self.sizes.iter().map(|size| size.0).sum();
        let capacity = f64::from(sms) * reading.at.since(last.at).as_secs_f64();
        // If the driver was loaded again, its counter started from zero.
        let used = energy_mj.saturating_sub(last.energy_mj) as f64 / 1e3;
        for account in std::mem::take(&mut state.uncharged) {
            account.charge(used / capacity);
        }
        state.list_executing();
    }
}

impl SmTimeState {
    fn advance(&mut self, now: Timestamp) {
        let passed = now.since(self.at).as_secs_f64();
        for worker in &self.executing {
            let used = worker.sms * passed;
            worker.model.add(used);
            for TenantAccount { part, account } in &worker.tenants {
                account.add(used * part.fraction);
                if let Some(board) = &mut self.board {
                    board.charge(worker.id, part.tenant, used * part.fraction);
                }
            }
        }
        self.at = self.at.max(now);
    }

    fn list_executing(&mut self) {
        let accounts = self.executing.iter().flat_map(|worker| {
            let tenants = worker.tenants.iter().map(|tenant| &tenant.account);
            std::iter::once(&worker.model).chain(tenants)
        });
        self.uncharged.extend(accounts.filter(|account| account.list()).cloned());
    }

    fn divide(&mut self, sizes: &[Sms]) {
        let batches: Vec<BatchSms> = self.executing.iter().map(|worker| worker.batch).collect();
        for (worker, sms) in self.executing.iter_mut().zip(divide(sizes, &batches)) {
            worker.sms = sms;
        }
        self.list_executing();
    }
}

/// A worker whose batches use SM time.
#[derive(Debug)]
pub(crate) struct SmTimeMember {
    gpu: Arc<GpuSmTime>,
    id: u64,
    model: Arc<SmAccount>,
    executing: Option<ExecutingSms>,
}

impl SmTimeMember {
    pub(crate) fn join(gpu: Arc<GpuSmTime>, model: Arc<SmAccount>) -> Self {
        let mut state = gpu.state.lock();
        state.joined += 1;
        let id = state.joined;
        drop(state);
        Self { gpu, id, model, executing: None }
    }

    /// Returns true if there are several tenants.
    pub(crate) fn has_tenants(&self) -> bool {
        self.gpu.tenants.get().is_some()
    }

    /// Records the SMs of the batch that the worker executes now, or `None` if it executes none.
    pub(crate) fn set_executing(&mut self, executing: Option<ExecutingSms>, now: Timestamp) {
        if self.executing == executing {
            return;
        }
        let worker = executing.clone().map(|executing| self.executing(executing));
        self.executing = executing;
        let mut state = self.gpu.state.lock();
        state.advance(now);
        state.executing.retain(|worker| worker.id != self.id);
        state.executing.extend(worker);
        state.divide(&self.gpu.sizes);
    }

    fn executing(&self, ExecutingSms { batch, tenants }: ExecutingSms) -> ExecutingWorker {
        let account = |part: TenantPart| {
            let account = Arc::clone(self.gpu.tenants.get()?.get(part.tenant.index())?);
            Some(TenantAccount { part, account })
        };
        let tenants = tenants.into_iter().filter_map(account).collect();
        ExecutingWorker { id: self.id, batch, sms: 0.0, model: Arc::clone(&self.model), tenants }
    }

    /// Records the tenants with requests for the worker's model.
    pub(crate) fn set_board(&self, member: BoardMember) {
        if let Some(board) = &mut self.gpu.state.lock().board {
            board.set(self.id, Some(member));
        }
    }

    /// Returns the turns of the tenants in the queue of the worker's model.
    pub(crate) fn turns(&self, now: Timestamp) -> Option<TenantTurns> {
        let mut state = self.gpu.state.lock();
        state.advance(now);
        state.board.as_ref().map(|board| board.turns(self.id))
    }
}

impl Drop for SmTimeMember {
    fn drop(&mut self) {
        let mut state = self.gpu.state.lock();
        state.executing.retain(|worker| worker.id != self.id);
        state.divide(&self.gpu.sizes);
        if let Some(board) = &mut state.board {
            board.set(self.id, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shadowslice_shared::groups::Groups;

    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_secs(seconds))
    }

    fn whole(tenants: &[(TenantId, f64)]) -> Option<ExecutingSms> {
        let tenants = tenants.iter().map(|&(tenant, fraction)| TenantPart { tenant, fraction }).collect();
        Some(ExecutingSms { batch: BatchSms { groups: Groups::WHOLE, share: 100.0 }, tenants })
    }

    #[test]
    fn models_divide_the_sm_time_and_the_energy_and_idle_time_belongs_to_nobody() {
        let gpu = GpuSmTime::new(vec![Sms(100)]);
        let models: [Arc<SmAccount>; 2] = Default::default();
        let mut workers = models.clone().map(|model| SmTimeMember::join(Arc::clone(&gpu), model));
        gpu.charge(5_000_000, at(0));
        workers[0].set_executing(whole(&[]), at(0));
        workers[1].set_executing(whole(&[]), at(10));
        workers[0].set_executing(None, at(20));
        workers[1].set_executing(None, at(30));
        // The GPU uses 400 J in 40 s. It is idle for 10 s.
        gpu.charge(5_400_000, at(40));
        let expected = SmUse { sm_seconds: 1_500.0, energy_j: Some(150.0) };
        assert_eq!(models.each_ref().map(|model| model.total()), [expected; 2]);
        gpu.charge(5_400_000, at(40));
        workers[0].set_executing(whole(&[]), at(40));
        gpu.advance(at(41));
        assert_eq!(models[0].total().sm_seconds, expected.sm_seconds + 100.0, "the batch still executes");
        let expected = SmUse { sm_seconds: expected.sm_seconds + 100.0, ..expected };
        workers[0].set_executing(None, at(41));
        gpu.charge(100, at(50));
        assert_eq!(models[0].total(), expected, "the driver was loaded again");
    }

    #[test]
    fn a_worker_that_dies_uses_nothing_more() {
        let gpu = GpuSmTime::new(vec![Sms(100)]);
        let models: [Arc<SmAccount>; 2] = Default::default();
        let mut workers = models.clone().map(|model| SmTimeMember::join(Arc::clone(&gpu), model));
        workers.iter_mut().for_each(|worker| worker.set_executing(whole(&[]), at(0)));
        let [dies, mut survives] = workers;
        survives.set_executing(None, at(10));
        survives.set_executing(whole(&[]), at(10));
        drop(dies);
        survives.set_executing(None, at(20));
        let used = models.map(|model| model.total());
        assert_eq!(used, [500.0, 1_500.0].map(|sm_seconds| SmUse { sm_seconds, energy_j: None }));
    }
}
