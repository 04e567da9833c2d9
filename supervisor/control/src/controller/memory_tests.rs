use super::*;

const GIB: u64 = 1 << 30;

fn owner(model: &str, gib: Option<u64>, has_shadows: bool) -> MemoryOwner {
    let profile = gib.map(|gib| gib * GIB);
    MemoryOwner { model: model.to_owned(), profile, has_shadows, ..MemoryOwner::default() }
}

/// Returns a ledger with a limit in GiB.
fn ledger(limit: Option<u64>) -> Arc<MemoryLedger> {
    Arc::new(MemoryLedger::new(limit.map(|gib| gib * GIB)))
}

/// Returns the accounts of models of 2, 3 and 9 GiB, and of a model whose memory is unknown. The model of
/// 9 GiB has no shadows.
fn accounts(ledger: &Arc<MemoryLedger>) -> [MemoryAccount; 4] {
    [owner("a", Some(2), true), owner("b", Some(3), true), owner("c", Some(9), false), owner("d", None, true)]
        .map(|owner| MemoryAccount::open(ledger, owner))
}

fn with_priority(ledger: &Arc<MemoryLedger>, model: &str, gib: u64, priority: u32) -> MemoryAccount {
    MemoryAccount::open(ledger, MemoryOwner { priority, ..owner(model, Some(gib), true) })
}

fn real(free: u64, total: u64) -> FreeMemory {
    FreeMemory::Real { free: free * GIB, total: total * GIB }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_secs(seconds))
}

#[test]
fn after_a_standby_the_largest_shadow_still_fits() {
    let [a, b, _c, _d] = accounts(&ledger(None));
    assert_eq!(a.may_stand(real(5, 20), false, at(0)), Ok(()));
    let kept = NoRoom::Kept { needed: 2 * GIB, kept: 3 * GIB, free: 4 * GIB };
    assert_eq!(a.may_stand(real(4, 20), false, at(0)), Err(kept));
    assert_eq!(a.may_stand(real(3, 20), true, at(0)), Ok(()), "it has its memory already");
    b.serves(Some(ServingWorker::Process { pid: 7, brought: GIB }));
    a.measure(|pid| (pid == 7).then_some(7 * GIB));
    let measured = NoRoom::Kept { needed: 2 * GIB, kept: 6 * GIB, free: 7 * GIB };
    assert_eq!(a.may_stand(real(7, 20), false, at(0)), Err(measured));
    b.serves(None);
    a.measure(|_| None);
    assert_eq!(b.need(), Some(6 * GIB), "a measurement stays known");
}

#[test]
fn standbys_have_a_bound_together() {
    let [a, b, ..] = accounts(&ledger(None));
    b.stands(true, at(0));
    let limit = NoRoom::Limit { needed: 2 * GIB, limit: 4 * GIB, taken: 3 * GIB };
    assert_eq!(a.may_stand(real(8, 8), false, at(0)), Err(limit));
    assert_eq!(b.may_stand(real(8, 8), false, at(0)), Ok(()), "its own is replaced");
    b.stands(false, at(0));
    assert_eq!(a.may_stand(real(8, 8), false, at(0)), Ok(()));
    let [a, b, ..] = accounts(&ledger(Some(4)));
    b.stands(true, at(0));
    assert!(a.may_stand(real(80, 80), false, at(0)).is_err());
    assert!(a.may_stand(FreeMemory::Emulated, false, at(0)).is_err());
}

#[test]
fn what_is_not_known_is_not_risked_on_a_real_gpu() {
    let [a, _b, _c, d] = accounts(&ledger(None));
    assert_eq!(d.may_stand(real(80, 80), false, at(0)), Err(NoRoom::NeedUnknown));
    assert_eq!(a.may_stand(FreeMemory::Unknown, false, at(0)), Err(NoRoom::FreeUnknown));
    assert_eq!(d.may_stand(FreeMemory::Emulated, false, at(0)), Ok(()));
    a.warmed(at(10));
    assert_eq!(a.may_stand(real(80, 80), true, at(11)), Ok(()), "it would only have to be started again");
    assert_eq!(a.may_stand(real(80, 80), false, at(11)), Err(NoRoom::Lag));
    assert_eq!(a.may_stand(real(80, 80), false, at(12)), Ok(()));
}

#[test]
fn room_is_kept_for_a_model_until_its_last_controller_ends() {
    let ledger = ledger(None);
    let [a, b, ..] = accounts(&ledger);
    b.serves(Some(ServingWorker::Process { pid: 7, brought: 0 }));
    b.measure(|pid| (pid == 7).then_some(4 * GIB));
    let successor = MemoryAccount::open(&ledger, owner("b", Some(3), true));
    drop(b);
    assert_eq!(successor.need(), Some(4 * GIB), "the measurement of the model stays known");
    assert!(a.may_stand(real(5, 20), false, at(0)).is_err(), "2 for it, and 4 for the largest shadow");
    drop(successor);
    assert_eq!(a.may_stand(real(4, 20), false, at(0)), Ok(()), "its own shadow is the largest now");
    assert_eq!(MemoryAccount::open(&ledger, owner("b", Some(3), true)).need(), Some(3 * GIB));
}

#[test]
fn standbys_yield_until_there_is_enough() {
    let ledger = ledger(None);
    let [high, low, young, other] = [("a", 2, 1), ("b", 3, 2), ("c", 9, 2), ("d", 1, 1)]
        .map(|(model, gib, priority)| with_priority(&ledger, model, gib, priority));
    assert!(!other.make_room(GIB, Beneficiary::Worker), "the model has no standby");
    let mut yields = other.yields();
    [&high, &low, &young].into_iter().for_each(|account| account.stands(true, at(0)));
    let yielding = || [&high, &low, &young].map(MemoryAccount::must_yield);
    assert!(other.make_room(9 * GIB, Beneficiary::Worker) && yields.has_changed().unwrap());
    assert_eq!(yielding(), [false, false, true], "the youngest of the lowest priority");
    yields.mark_unchanged();
    assert!(
        other.make_room(GIB, Beneficiary::Worker) && !yields.has_changed().unwrap(),
        "its memory is awaited"
    );
    assert!(other.make_room(11 * GIB, Beneficiary::Worker));
    assert_eq!(yielding(), [false, true, true]);
    low.stands(false, at(0));
    low.stands(true, at(0));
    assert_eq!(yielding(), [false, false, true], "the next standby need not yield");
    young.stands(true, at(0));
    assert!(young.must_yield(), "it is the same standby");
}

#[test]
fn higher_priorities_get_standbys_first() {
    let ledger = ledger(Some(5));
    let [a, b, large, d] = [("a", 2, 2), ("b", 3, 3), ("c", 9, 1), ("d", 2, 1)]
        .map(|(model, gib, priority)| with_priority(&ledger, model, gib, priority));
    [&a, &b].into_iter().for_each(|account| account.stands(true, at(0)));
    let asks = |account: &MemoryAccount| {
        let no_room = account.may_stand(FreeMemory::Emulated, false, at(0)).unwrap_err();
        let priority = account.ledger.book.lock().owners[&account.id].priority;
        account.make_room(no_room.excess(), Beneficiary::Standby { priority });
        [&a, &b].map(MemoryAccount::must_yield)
    };
    assert_eq!(asks(&large), [false; 2], "9 GiB are more than the limit");
    let mut yields = a.yields();
    assert_eq!(asks(&d), [false, true], "the lowest priority yields");
    assert!(yields.has_changed().unwrap());
    yields.mark_unchanged();
    assert_eq!(asks(&d), [false, true]);
    assert!(!yields.has_changed().unwrap(), "its memory is awaited");
    b.stands(false, at(0));
    assert_eq!(d.may_stand(FreeMemory::Emulated, false, at(0)), Ok(()));
    d.stands(true, at(0));
    assert_eq!(asks(&b), [false; 2], "a lower priority replaces nothing");
    assert_eq!(a.may_stand(real(80, 80), false, at(1)), Err(NoRoom::Lag), "the reading is outdated");
}

#[test]
fn a_controller_and_its_successor_each_have_a_standby() {
    let ledger = ledger(Some(5));
    let [old, new] = [(); 2].map(|()| MemoryAccount::open(&ledger, owner("a", Some(2), true)));
    let other = MemoryAccount::open(&ledger, owner("b", Some(3), true));
    old.stands(true, at(0));
    assert_eq!(old.may_stand(FreeMemory::Emulated, false, at(0)), Ok(()), "its own is replaced");
    assert_eq!(new.may_stand(FreeMemory::Emulated, false, at(0)), Ok(()));
    new.stands(true, at(0));
    let both = NoRoom::Limit { needed: 3 * GIB, limit: 5 * GIB, taken: 4 * GIB };
    assert_eq!(other.may_stand(FreeMemory::Emulated, false, at(0)), Err(both));
    assert!(other.make_room(4 * GIB, Beneficiary::Worker));
    assert!(old.must_yield() && new.must_yield());
    drop(old);
    assert!(new.must_yield(), "the other one has gone");
    assert_eq!(other.may_stand(FreeMemory::Emulated, false, at(0)), Ok(()));
}

#[test]
fn a_standby_has_the_priority_of_the_latest_configuration() {
    let ledger = ledger(None);
    let [a, b] = [("a", 1), ("b", 2)].map(|(model, priority)| with_priority(&ledger, model, 2, priority));
    [&a, &b].into_iter().for_each(|account| account.stands(true, at(0)));
    a.update(MemoryOwner { priority: 3, ..owner("a", Some(2), true) });
    assert!(a.make_room(GIB, Beneficiary::Worker) && a.must_yield() && !b.must_yield());
}
