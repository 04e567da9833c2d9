use std::time::Duration;

use shadowslice_shared::units::{Sms, Timestamp};

use super::*;
use crate::scenario::SimulatedArrival;
use crate::scenario::fixtures::{model, on_one_gpu};

fn scenario(count: usize) -> Scenario {
    on_one_gpu(100, (0..count).map(|index| model(&format!("m{index}"), 10.0 + index as f64)).collect())
}

fn counts(named: NamedLoad, count: usize, seed: u64) -> Vec<usize> {
    let mut counts = vec![0; count];
    for arrival in named.arrivals(&scenario(count), seed, 200.0, 0.5) {
        counts[arrival.model] += 1;
    }
    counts
}

#[test]
fn every_load_is_in_order_and_depends_only_on_the_seed() {
    for (name, named) in NamedLoad::ALL {
        assert_eq!(name.parse(), Ok(named));
        assert_eq!(named.to_string(), name);
        let drawn = |seed| named.arrivals(&scenario(3), seed, 20.0, 0.5).collect::<Vec<_>>();
        let arrivals = drawn(1);
        assert!(arrivals.is_sorted_by_key(|arrival| arrival.at), "{name}");
        assert!(arrivals.last().unwrap().at < Timestamp::after_origin(Duration::from_secs(20)), "{name}");
        assert_eq!(arrivals, drawn(1), "{name}");
        assert_ne!(arrivals, drawn(2), "{name}");
    }
    "possion".parse::<NamedLoad>().unwrap_err();
}

#[test]
fn every_load_has_the_requested_utilisation() {
    // A request to the model with index i takes (10 + i) ms on 50 SMs at any batch size. Its cost
    // is therefore 0.5 to 0.6 SM·s.
    for (name, named) in NamedLoad::ALL {
        let runs = 10;
        let mut used = 0.0;
        for seed in 0..runs {
            let counts = counts(named, 3, seed);
            let cost = |index: usize| 0.05 * (10.0 + index as f64);
            used += (0..3).map(|index| counts[index] as f64 * cost(index)).sum::<f64>();
        }
        let utilisation = used / (200.0 * 100.0 * runs as f64);
        assert!((utilisation - 0.5).abs() < 0.05, "{name}: {utilisation}");
    }
}

#[test]
fn a_step_triples_the_rate_of_one_model_only() {
    let arrivals: Vec<_> = NamedLoad::Step.arrivals(&scenario(3), 4, 300.0, 2.0).collect();
    let stepped = Random::new(4, RandomPurpose::Choice, 0).order(3)[0];
    for model in 0..3 {
        let third = |n: u64| {
            let span = Timestamp::after_origin(Duration::from_secs(100 * n))
                ..Timestamp::after_origin(Duration::from_secs(100 * (n + 1)));
            arrivals.iter().filter(|a| a.model == model && span.contains(&a.at)).count() as f64
        };
        let factor = third(1) / (0.5 * (third(0) + third(2)));
        let expected = if model == stepped { 3.0 } else { 1.0 };
        assert!((factor / expected - 1.0).abs() < 0.1, "model {model}: {factor}");
    }
}

#[test]
fn loads_work_for_1_and_100_models_and_without_requests() {
    for (name, named) in NamedLoad::ALL {
        assert!(!counts(named, 1, 1).contains(&0), "{name}");
        assert_eq!(named.arrivals(&scenario(100), 1, 1.0, 0.0).count(), 0, "{name}");
    }
    let zipf = counts(NamedLoad::Zipf, 100, 1);
    assert!(zipf.iter().max() > zipf.iter().min().map(|least| least * 10).as_ref());
}

#[test]
fn the_cheapest_request_meets_the_slo_if_possible() {
    let slow = model("slow", 10.0);
    let cost = |slo_ms| cheapest(&slow.truth, Sms(100), Duration::from_millis(slo_ms), 8);
    assert!((cost(50) - 0.5).abs() < 1e-6);
    assert!((cost(10) - 0.5).abs() < 1e-6, "on 50 SMs, one by one");
    assert!((cost(1) - 0.5).abs() < 1e-6, "no batch meets the SLO: the minimum over all");
}

const NAMES: [&str; 2] = ["text", "vision"];

#[test]
fn a_file_is_read_line_by_line() {
    let arrivals = read("seconds,model\n0,text\r\n\n 0.5 , vision\n0.5,text\n", NAMES).unwrap();
    let at = |ms, model| SimulatedArrival { at: Timestamp::after_origin(Duration::from_millis(ms)), model };
    assert_eq!(arrivals, [at(0, 0), at(500, 1), at(500, 0)]);
    assert_eq!(read("", NAMES), Ok(vec![]));
    for marked in [
        "\u{feff}seconds,model\r\n0,text\r\n0.5,vision\r\n0.5,text\r\n",
        "\u{feff}0,text\n0.5,vision\n0.5,text",
    ] {
        assert_eq!(read(marked, NAMES).as_ref(), Ok(&arrivals), "with a byte order mark");
    }
}

#[test]
fn written_arrivals_are_read_to_the_nanosecond() {
    let arrivals: Vec<_> = NamedLoad::Gamma.arrivals(&scenario(2), 7, 300.0, 0.9).collect();
    let text: String = arrivals.iter().map(|arrival| line(arrival, NAMES[arrival.model]) + "\n").collect();
    assert!(arrivals.len() > 100);
    assert_eq!(read(&text, NAMES), Ok(arrivals));
}

#[test]
fn errors_in_a_file_name_the_line() {
    let wrong = |text: &str| read(text, NAMES).unwrap_err();
    let line = |line, wrong| BadLine { line, wrong };
    assert_eq!(wrong("0,text\n1"), line(2, BadLineReason::NoArrival("1".into())));
    assert_eq!(wrong("x,text"), line(1, BadLineReason::NotANumber("x".into())));
    assert!(matches!(wrong("nan,text").wrong, BadLineReason::NotANumber(_)));
    assert_eq!(wrong("\n-1,text"), line(2, BadLineReason::Negative(-1.0)));
    assert_eq!(wrong("inf,text"), line(1, BadLineReason::TooLate(f64::INFINITY)));
    assert_eq!(wrong("2,text\n1,text"), line(2, BadLineReason::Backwards { seconds: 1.0, before: 2.0 }));
    assert_eq!(
        wrong("1,texts").to_string(),
        "line 1: unknown model \"texts\"; use the name of a model in the configuration"
    );
    assert!(wrong(&"9".repeat(100_000)).to_string().len() < 200);
}
