use std::time::{Duration, Instant, SystemTime};

use shadowslice_tests::load::Arrivals;

use crate::step::case::{CASES, Case, SLO, SMS, Standby};
use crate::step::load::{Answer, Done, Request, Step};
use crate::step::orders::{Order, Sign, to_grow};
use crate::step::page;
use crate::step::round::{Clients, Grown, Outcome, Round, Trial};

const AUTO: Case = CASES[0];

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn grew(detect_ms: f64, effect_ms: f64, start_ms: f64) -> Round {
    let sign = Sign::Interval;
    let grown = Grown { sign, to_sms: 100, detect_ms, arrivals: 9, seen_ms: detect_ms, effect_ms, start_ms };
    Round { sms: 40, clients: Clients::default(), outcome: Outcome::Grew(grown) }
}

fn came_to(outcome: Outcome) -> Round {
    Round { sms: 40, clients: Clients::default(), outcome }
}

#[test]
fn steps_exceed_what_the_smallest_share_carries_and_one_what_all_of_a_gpu_does() {
    for case in CASES {
        // No share is less than two fifths of the level, and none more than carries its demand with all head-room.
        let least = case.carried_by(SMS * 2 / 5);
        assert!(case.step > 1.1 * least && case.base < 0.6 * least, "{case}: {least}");
        assert!(case.base * 2.5 * 2.0 < case.carried_by(SMS), "{case}: its share would not shrink");
    }
    assert_eq!(CASES.iter().filter(|case| case.step > case.carried_by(SMS)).count(), 2);
}

#[test]
fn what_a_share_carries_grows_with_it() {
    // Ten rows take 25.1 ms on 40 SMs.
    assert!((AUTO.carried_by(40) - 358.2).abs() < 1.0, "{}", AUTO.carried_by(40));
    assert!(AUTO.carried_by(80) > 2.0 * AUTO.carried_by(40));
    assert_eq!(AUTO.carried_by(2), 0.0, "not even one row is done in time");
}

#[test]
fn no_test_is_sure_at_once() {
    // 150 a second are e to the 16.4 in a day; 450 say 450 ln 3 - 300 = 194 a second.
    let least = CASES.iter().find(|case| (case.base, case.step) == (150.0, 450.0)).unwrap().least_ms();
    assert!(least.is_some_and(|least| (least - 84.4).abs() < 0.5), "{least:?}");
    assert!(CASES.iter().all(|case| case.least_ms().is_some() == (case.arrivals == Arrivals::Poisson)));
}

#[test]
fn orders_to_grow_are_read_from_the_log() {
    let line = |model: &str, cause: &str, from: u32, to: u32| {
        format!(
            r#"{{"timestamp":"2026-01-02T03:04:05.678900Z","level":"INFO","fields":{{"message":"the policy changes a share",
            "model":"{model}","from_sms":{from},"to_sms":{to},"cause":"{cause}","verdict":"slack runs out","busy":0.5}}}}"#
        )
        .replace('\n', " ")
    };
    let log = [
        "no JSON".to_owned(),
        r#"{"timestamp":"2026-01-02T03:04:05Z","fields":{"message":"hand-over completed"}}"#.to_owned(),
        line("m0", "policy", 100, 40),
        line("m1", "policy", 40, 100),
        line("m0", "pressure", 40, 100),
        line("m0", "policy", 40, 60),
    ]
    .join("\n");
    let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_767_323_045_678_900);
    let order = |to_sms, sign| Order { at, from_sms: 40, to_sms, sign };
    let request = Sign::Request("slack runs out".to_owned());
    assert_eq!(to_grow(&log, "m0"), [order(100, request), order(60, Sign::Interval)]);
}

#[test]
fn requests_count_in_the_second_after_the_step() {
    let step = Step { at: Instant::now() + ms(500), time: SystemTime::now() + ms(500) };
    let request = |after_ms: i64, answer| {
        let due = step.at + Duration::from_secs(1);
        let due = due - ms(u64::try_from(1_000 - after_ms).unwrap());
        Request { due, late: ms(3), answer }
    };
    let requests = vec![
        request(-1, Answer::Failed),
        request(0, Answer::After(SLO)),
        request(10, Answer::After(SLO + ms(1))),
        request(20, Answer::Refused),
        request(999, Answer::Failed),
        request(1_000, Answer::Refused),
    ];
    let order = |ago: u64| Order { at: step.time - ms(ago), from_sms: 40, to_sms: 100, sign: Sign::Interval };
    let done = Done { requests, step };
    let round = Round::of(40, &done, &[], None);
    let expected = Clients { offered: 4, late: 1, refused: 1, failed: 1, sent_late_ms: 3.0 };
    assert_eq!((round.clients, round.outcome), (expected, Outcome::Never));
    assert_eq!(Round::of(40, &done, &[order(1), order(0)], None).outcome, Outcome::Before);
}

#[test]
fn aims_are_met_where_most_rounds_keep_them() {
    let trial = |case: Case, rounds: &[Round]| Trial { case, rounds: rounds.to_vec() };
    let (kept, missed) = (grew(30.0, 19.9, 0.0), grew(30.0, 20.0, 0.0));
    assert!(trial(AUTO, &[kept.clone(), kept.clone(), missed.clone()]).met());
    assert!(!trial(AUTO, &[kept.clone(), missed]).met());
    assert!(!trial(AUTO, &[kept.clone(), came_to(Outcome::Never)]).met(), "never is a miss");
    assert!(trial(AUTO, &[kept.clone(), came_to(Outcome::Before)]).met(), "one that did not count is none");
    assert!(!trial(AUTO, &[came_to(Outcome::Before)]).met());
    let off = CASES.into_iter().find(|case| case.standby == Standby::Off).unwrap();
    assert!(trial(off, &[grew(30.0, 1_669.9, 1_600.0)]).met());
    assert!(!trial(off, &[grew(30.0, 1_670.0, 1_600.0)]).met());
}

#[test]
fn the_page_says_what_was_met_and_bears_rounds_without_figures() {
    let trials = [
        Trial { case: AUTO, rounds: vec![grew(20.0, 10.0, 0.0)] },
        Trial { case: CASES[1], rounds: vec![came_to(Outcome::Never), came_to(Outcome::Before)] },
    ];
    let text = page::tables(&trials);
    assert!(
        text.contains("| 30 -> 420 | 40 -> 100 | 1.2 (1.2 .. 1.2) | 21 | 20.0 (20.0 .. 20.0) |"),
        "{text}"
    );
    assert!(text.contains("| 30.0 (30.0 .. 30.0) | 1 of 1 | met |"), "{text}");
    assert!(text.contains("| - | 0 of 1 | **not met** |"), "{text}");
    assert!(
        text.contains("| an interval's decision: 1 | 9 (9 .. 9) | 0 | 0 |")
            && text.contains("|  | - | 1 | 1 |"),
        "{text}"
    );
}

#[test]
fn what_log_and_status_say_comes_together() {
    let step = Step { at: Instant::now(), time: SystemTime::now() };
    let request =
        |after: u64| Request { due: step.at + ms(after), late: ms(0), answer: Answer::After(ms(1)) };
    let done = Done { requests: [0, 10, 29, 30, 40].map(request).to_vec(), step };
    let order = Order { at: step.time + ms(30), from_sms: 40, to_sms: 100, sign: Sign::Interval };
    let model = serde_json::json!({
        "name": "m0", "state": "ready", "share_percent": 100, "sms": 100, "slo": {"latency_ms": 40.0},
        "workers": [
            {"role": "standby", "pid": 2, "sms": 40, "boot_ms": {"spawn": 9.0}},
            {"role": "incumbent", "pid": 1, "sms": 100, "boot_ms": {"spawn": 200.5, "session": 1000.0}},
        ],
        "requests": {"accepted": 0, "succeeded": 0, "failed": 0, "rejected": 0, "retried": 0},
        "handovers": {
            "completed": 2, "aborted": 0,
            "last": {"from_sms": 40, "to_sms": 100, "detect_ms": 25.0, "effect_ms": 7.0},
        },
    });
    let model = serde_json::from_value(model).unwrap();
    let Outcome::Grew(grown) = Round::of(40, &done, &[order], Some(&model)).outcome else {
        panic!("it was given more");
    };
    assert_eq!((grown.detect_ms.round(), grown.arrivals, grown.sum_ms().round()), (30.0, 3, 37.0));
    assert_eq!((grown.seen_ms, grown.start_ms), (25.0, 1200.5));
}
