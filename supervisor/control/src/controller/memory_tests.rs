use super::*;

const GIB: u64 = 1 << 30;

/// The only controller of a model.
fn of(model: &str) -> (&str, EntryId) {
    (model, EntryId(model.bytes().map(u64::from).sum()))
}

fn row(need: Option<u64>, has_shadows: bool) -> Row {
    Row { told: need.map(|gib| gib * GIB), has_shadows, ..Row::default() }
}

/// Models of 2, 3 and 9 GiB, the last of which has no shadows, and one of which nothing is known.
fn ledger(limit: Option<u64>) -> MemoryLedger {
    let rows = [
        ("a", row(Some(2), true)),
        ("b", row(Some(3), true)),
        ("c", row(Some(9), false)),
        ("d", row(None, true)),
    ];
    let rows = rows.into_iter().map(|(name, row)| (name.to_owned(), row)).collect();
    let book = Mutex::new(Book { rows, ..Book::default() });
    MemoryLedger { limit: limit.map(|gib| gib * GIB), book, called: watch::Sender::new(()) }
}

fn real(free: u64, total: u64) -> Memory {
    Memory::Real { free: free * GIB, total: total * GIB }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_secs(seconds))
}

#[test]
fn after_a_standing_worker_the_largest_shadow_still_fits() {
    let ledger = ledger(None);
    assert_eq!(ledger.may_stand(of("a"), real(5, 20), false, at(0)), Ok(()));
    let kept = NoRoom::Kept { needed: 2 * GIB, kept: 3 * GIB, free: 4 * GIB };
    assert_eq!(ledger.may_stand(of("a"), real(4, 20), false, at(0)), Err(kept));
    assert_eq!(ledger.may_stand(of("a"), real(3, 20), true, at(0)), Ok(()), "it has its memory already");
    ledger.serves("b", Some(Serving { pid: 7, brought: GIB }));
    ledger.see(|pid| (pid == 7).then_some(7 * GIB));
    let seen = NoRoom::Kept { needed: 2 * GIB, kept: 6 * GIB, free: 7 * GIB };
    assert_eq!(ledger.may_stand(of("a"), real(7, 20), false, at(0)), Err(seen));
    ledger.serves("b", None);
    ledger.see(|_| None);
    assert_eq!(ledger.need("b"), Some(6 * GIB), "what was seen is remembered");
}

#[test]
fn standing_workers_have_a_bound_together() {
    let half = ledger(None);
    half.stands(of("b"), true, at(0));
    let limit = NoRoom::Limit { needed: 2 * GIB, limit: 4 * GIB, taken: 3 * GIB };
    assert_eq!(half.may_stand(of("a"), real(8, 8), false, at(0)), Err(limit));
    assert_eq!(half.may_stand(of("b"), real(8, 8), false, at(0)), Ok(()), "its own is replaced");
    half.stands(of("b"), false, at(0));
    assert_eq!(half.may_stand(of("a"), real(8, 8), false, at(0)), Ok(()));
    let set = ledger(Some(4));
    set.stands(of("b"), true, at(0));
    assert!(set.may_stand(of("a"), real(80, 80), false, at(0)).is_err());
    assert!(set.may_stand(of("a"), Memory::Emulated, false, at(0)).is_err());
}

#[test]
fn what_is_not_known_is_not_risked_on_a_real_gpu() {
    let ledger = ledger(None);
    assert_eq!(ledger.may_stand(of("d"), real(80, 80), false, at(0)), Err(NoRoom::NeedUnknown));
    assert_eq!(ledger.may_stand(of("a"), Memory::Unknown, false, at(0)), Err(NoRoom::FreeUnknown));
    assert_eq!(ledger.may_stand(of("d"), Memory::Emulated, false, at(0)), Ok(()));
    ledger.warmed(at(10));
    assert_eq!(
        ledger.may_stand(of("a"), real(80, 80), true, at(11)),
        Ok(()),
        "it would only have to be started again"
    );
    assert_eq!(ledger.may_stand(of("a"), real(80, 80), false, at(11)), Err(NoRoom::Lag));
    assert_eq!(ledger.may_stand(of("a"), real(80, 80), false, at(12)), Ok(()));
}

#[test]
fn a_model_is_kept_room_for_until_its_last_controller_ends() {
    let ledger = ledger(None);
    let room = || ledger.may_stand(of("a"), real(5, 20), false, at(0));
    ledger.book.lock().rows.get_mut("b").unwrap().controllers = 2;
    ledger.leave("b");
    assert_eq!(ledger.need("b"), Some(3 * GIB));
    assert_eq!(room(), Ok(()), "2 for it, and 3 for the largest shadow");
    ledger.leave("b");
    ledger.leave("b");
    assert_eq!(ledger.need("b"), None);
    assert_eq!(
        ledger.may_stand(of("a"), real(4, 20), false, at(0)),
        Ok(()),
        "its own shadow is the largest now"
    );
}

#[test]
fn standing_workers_are_called_in_until_there_is_enough() {
    let ledger = ledger(None);
    assert!(!ledger.call_in("a", GIB), "no worker stands ready");
    let mut calls = ledger.calls();
    ["a", "b", "c"].into_iter().for_each(|model| ledger.stands(of(model), true, at(0)));
    let called = || ["a", "b", "c"].map(|model| ledger.is_called_in(of(model)));
    assert!(ledger.call_in("a", 2 * GIB) && calls.has_changed().unwrap());
    assert_eq!(called(), [true, false, false], "its own goes first");
    assert!(ledger.call_in("a", 3 * GIB));
    assert_eq!(called(), [true, false, true], "and then the largest");
    calls.mark_unchanged();
    ledger.stands(of("c"), false, at(0));
    ledger.stands(of("c"), true, at(0));
    assert_eq!(called(), [true, false, false], "the next one was not meant");
}

#[test]
fn higher_priorities_stand_ready_first() {
    let ledger = ledger(Some(5));
    let priorities = [("a", 2), ("b", 3), ("c", 1), ("d", 1)];
    for (model, priority) in priorities {
        ledger.book.lock().rows.get_mut(model).unwrap().priority = priority;
    }
    ["a", "b"].into_iter().for_each(|model| ledger.stands(of(model), true, at(0)));
    let asks = |model: &str| {
        let no_room = ledger.may_stand(of(model), Memory::Emulated, false, at(0)).unwrap_err();
        ledger.call_in_lower(model, &no_room);
        ["a", "b"].map(|model| ledger.is_called_in(of(model)))
    };
    assert_eq!(asks("c"), [false; 2], "9 GiB are more than the limit");
    ledger.book.lock().rows.get_mut("d").unwrap().told = Some(2 * GIB);
    let mut calls = ledger.calls();
    assert_eq!(asks("d"), [false, true], "the lowest goes");
    assert!(calls.has_changed().unwrap());
    calls.mark_unchanged();
    assert_eq!(asks("d"), [false, true], "its memory is awaited");
    assert!(!calls.has_changed().unwrap());
    ledger.stands(of("b"), false, at(0));
    assert_eq!(ledger.may_stand(of("d"), Memory::Emulated, false, at(0)), Ok(()));
    ledger.stands(of("d"), true, at(0));
    assert_eq!(asks("b"), [false; 2], "not for a lower one");
    ledger.book.lock().rows.get_mut("b").unwrap().priority = 2;
    assert_eq!(asks("b"), [false; 2], "nor for one of its own priority, which would do the same");
    assert_eq!(ledger.may_stand(of("a"), real(80, 80), false, at(1)), Err(NoRoom::Lag), "it is not read yet");
}

#[test]
fn who_stands_in_place_of_one_that_was_called_in_is_not() {
    let ledger = ledger(None);
    ledger.stands(of("a"), true, at(0));
    assert!(ledger.call_in("b", GIB) && ledger.is_called_in(of("a")));
    ledger.stands(of("a"), true, at(0));
    assert!(ledger.is_called_in(of("a")), "the same one");
    ledger.stands(of("a"), false, at(0));
    ledger.stands(of("a"), true, at(0));
    assert!(!ledger.is_called_in(of("a")));
}

#[test]
fn a_controller_and_its_successor_each_answer_for_their_own() {
    let ledger = ledger(Some(5));
    let (old, new) = (("a", EntryId(1)), ("a", EntryId(2)));
    ledger.stands(old, true, at(0));
    assert_eq!(ledger.may_stand(old, Memory::Emulated, false, at(0)), Ok(()), "its own is replaced");
    assert_eq!(ledger.may_stand(new, Memory::Emulated, false, at(0)), Ok(()));
    ledger.stands(new, true, at(0));
    let both = NoRoom::Limit { needed: 3 * GIB, limit: 5 * GIB, taken: 4 * GIB };
    assert_eq!(ledger.may_stand(of("b"), Memory::Emulated, false, at(0)), Err(both));
    assert!(ledger.call_in("b", 4 * GIB));
    assert!(ledger.is_called_in(old) && ledger.is_called_in(new));
    ledger.stands(old, false, at(0));
    assert!(ledger.is_called_in(new), "the other one has gone");
    assert_eq!(ledger.may_stand(of("b"), Memory::Emulated, false, at(0)), Ok(()));
    assert_eq!(ledger.may_stand(old, Memory::Emulated, false, at(0)), Ok(()));
    ledger.stands(of("b"), true, at(0));
    let other = NoRoom::Limit { needed: 2 * GIB, limit: 5 * GIB, taken: 5 * GIB };
    assert_eq!(ledger.may_stand(old, Memory::Emulated, false, at(0)), Err(other), "the new one's stays");
}
