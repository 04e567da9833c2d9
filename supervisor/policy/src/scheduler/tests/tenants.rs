use super::*;
use crate::tenants::{BoardMember, TenantBoard};

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);

/// The weights of the default tenant, A and B.
const WEIGHTS: [f64; 3] = [1.0, 3.0, 1.0];

fn of(tenant: TenantId, number: u32, came: u64) -> QueuedRequest<(), Asked> {
    QueuedRequest { tenant, ..request(number, came) }
}

/// A model whose worker executes one batch after the other. Each batch takes the time that it should.
struct Served {
    model: Scheduler<(), Asked>,
    board: TenantBoard,
    now: u64,
    /// The rows of each tenant that were answered.
    rows: [u32; 3],
}

impl Served {
    fn new() -> Self {
        let mut model = serving();
        model.set_turns(TenantTurns::new(&WEIGHTS));
        Self { model, board: TenantBoard::new(WEIGHTS.to_vec(), 100.0), now: 0, rows: [0; 3] }
    }

    fn accept(&mut self, tenant: TenantId, count: u32) -> Vec<RefusedRequest<(), Asked>> {
        let requests = (0..count).map(|number| self.model.accept(of(tenant, number, self.now), at(self.now)));
        requests.filter_map(|accepted| accepted.unwrap_or_else(Some)).collect()
    }

    /// Executes batches for a time, and has `refill` queue requests before each.
    fn run(&mut self, ms: u64, mut refill: impl FnMut(&mut Self)) {
        let end = self.now + ms;
        while self.now < end {
            refill(self);
            let queued = self.model.queued_tenants();
            let active = queued.union(self.model.lane(WORKER).unwrap().tenants());
            let member = BoardMember {
                priority: 1,
                groups: Groups::WHOLE,
                sms: 100.0,
                executes: true,
                queued,
                active,
            };
            self.board.set(1, Some(member));
            self.model.set_turns(self.board.turns(1));
            go(&mut self.model, at(self.now));
            let Some(front) = self.model.lane(WORKER).and_then(|lane| lane.in_flight().next()) else {
                return;
            };
            let took = 10 + u64::from(front.rows);
            self.now += took;
            let row = took as f64 / 1e3 * 100.0 / f64::from(front.rows);
            for request in &front.requests {
                self.rows[request.tenant.index()] += request.rows;
                self.board.charge(1, request.tenant, row * f64::from(request.rows));
            }
            answer(&mut self.model, WORKER, ms_of(took), at(self.now));
        }
    }
}

fn ms_of(took: u64) -> Duration {
    Duration::from_millis(took)
}

/// Keeps requests of a tenant in the queue.
fn flood(served: &mut Served, tenant: TenantId) {
    let queued = served.model.queued_tenants();
    if !queued.contains(tenant) || served.model.queued() < 50 {
        served.accept(tenant, 8);
    }
}

#[test]
fn tenants_that_flood_get_sm_time_by_weight_and_one_alone_gets_all() {
    let mut served = Served::new();
    served.run(3_000, |served| flood(served, B));
    let [_, _, alone] = served.rows;
    assert!(alone > 800, "B alone got {alone} rows");
    let both = |served: &mut Served| [A, B].into_iter().for_each(|tenant| flood(served, tenant));
    // At first, A has an advantage of the batches in flight.
    served.run(1_000, both);
    served.rows = [0; 3];
    served.run(10_000, both);
    let [_, a, b] = served.rows;
    let ratio = f64::from(a) / f64::from(b);
    assert!((2.85..3.15).contains(&ratio), "A {a}, B {b}: {ratio}");
}

#[test]
fn the_batch_of_a_tenant_has_room_for_others() {
    let mut served = Served::new();
    served.accept(A, 1);
    go(&mut served.model, at(0));
    served.accept(A, 1);
    served.accept(B, 3);
    let sent = go(&mut served.model, at(11)).0;
    assert_eq!(sent[0].1.len(), 4, "{sent:?}");
}

#[test]
fn a_tenant_that_fills_the_queue_makes_room_for_one_with_less_than_its_part() {
    let mut served = Served::new();
    assert!(served.accept(B, 100).is_empty());
    let displaced = served.accept(A, 80);
    assert!(displaced[..75].iter().all(|refused| refused.request.tenant == B), "A has three quarters");
    assert!(displaced[75..].iter().all(|refused| refused.request.tenant == A), "A has no more");
    assert!(displaced.iter().all(|refused| refused.why == RefusalReason::QueueFull));
    assert_eq!(displaced[0].request.item.0, 99, "the last request goes first");
    assert_eq!(served.model.queued(), 100);
}

#[test]
fn nothing_is_displaced_if_that_makes_no_room() {
    let mut served = Served::new();
    served.accept(B, 100);
    assert!(served.model.displace(A, RefusalReason::MemoryFull, |item| item.0 > 99).is_none());
    let displaced = served.model.displace(A, RefusalReason::MemoryFull, |item| item.0 == 99).unwrap();
    assert_eq!((displaced.request.item.0, displaced.why), (99, RefusalReason::MemoryFull));
    served.model.put_back((100..104).map(|number| of(B, number, 0)).collect(), at(0));
    let refused = served.model.accept(of(A, 1, 0), at(0)).unwrap_err();
    assert_eq!((refused.request.tenant, served.model.queued()), (A, 103), "the queue exceeds its limit");
}

#[test]
fn a_request_is_admitted_by_the_rows_that_its_tenant_waits_for() {
    let mut served = Served::new();
    served.model.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) });
    served.accept(B, 4);
    go(&mut served.model, at(0));
    let late = served.accept(B, 96).len();
    assert!(late > 80, "B's own requests are too many: {late}");
    assert!(served.accept(A, 4).is_empty(), "A's requests overtake those of B");
}

#[test]
fn a_held_tenant_waits_and_others_run() {
    let mut served = Served::new();
    served.accept(A, 1);
    served.accept(B, 1);
    let held = [B].into_iter().collect();
    let turns = TenantTurns { held, held_for: ms(2), ..TenantTurns::new(&WEIGHTS) };
    served.model.set_turns(turns.clone());
    let (sent, _, rest) = go(&mut served.model, at(0));
    assert_eq!((sent.len(), rest), (1, SchedulerWait::Until(at(10) + Duration::from_micros(500))));
    answer(&mut served.model, WORKER, ms(11), at(11));
    assert_eq!(go(&mut served.model, at(11)).2, SchedulerWait::Until(at(13)));
    served.model.set_turns(TenantTurns::new(&WEIGHTS));
    assert_eq!(go(&mut served.model, at(13)).0.len(), 1);
}
