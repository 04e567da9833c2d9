use proptest::prelude::*;

use http::header::HeaderValue;

use super::*;

const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn parsed(text: &str) -> Option<TraceParent> {
    TraceParent::parse(text.as_bytes())
}

/// Returns the specification's example with one part replaced.
fn with(place: usize, part: &str) -> String {
    let mut text = GOOD.to_owned();
    text.replace_range(place..place + part.len(), part);
    text
}

fn headers(name: &'static str, values: &[&str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(name, HeaderValue::from_str(value).unwrap());
    }
    headers
}

#[test]
fn the_specifications_example_is_read() {
    let parent = TraceParent {
        trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c,
        span_id: 0xb7ad_6b71_6920_3331,
        sampled: true,
    };
    assert_eq!(parsed(GOOD), Some(parent.clone()));
    assert_eq!(parsed(&with(53, "00")), Some(TraceParent { sampled: false, ..parent.clone() }));
    for (flags, sampled) in [("ff", true), ("02", false), ("03", true), ("fe", false)] {
        assert_eq!(parsed(&with(53, flags)), Some(TraceParent { sampled, ..parent.clone() }), "{flags}");
    }
}

#[test]
fn a_malformed_header_counts_as_no_parent() {
    let zero = |digits| "0".repeat(digits);
    let malformed = [
        String::new(),
        "00".to_owned(),
        GOOD[..54].to_owned(),
        format!("{GOOD}-"),
        format!("{GOOD}-what-the-future-will-be-like"),
        format!("{GOOD}0"),
        format!(" {GOOD}"),
        with(3, &zero(32)),
        with(36, &zero(16)),
        with(3, "0AF7"),
        with(36, "B7"),
        with(53, "0A"),
        with(53, "0x"),
        with(3, "."),
        with(36, "."),
        with(53, "+1"),
        with(2, "_"),
        with(35, "_"),
        with(52, "_"),
        with(0, "ff"),
        with(0, "0G"),
        with(0, "FF"),
    ];
    for text in malformed {
        assert_eq!(parsed(&text), None, "{text}");
    }
}

#[test]
fn later_versions_are_read_as_far_as_they_are_known() {
    for later in ["01", "cc", "fe"] {
        let text = with(0, later);
        assert_eq!(parsed(&text), parsed(GOOD), "{later}");
        assert_eq!(parsed(&format!("{text}-what-the-future-will-be-like")), parsed(GOOD));
        assert_eq!(parsed(&format!("{text}-")), parsed(GOOD));
        assert_eq!(parsed(&format!("{text}.what-the-future-will-not-be-like")), None);
        assert_eq!(parsed(&text[..54]), None);
    }
}

#[test]
fn there_is_one_parent_or_none() {
    assert_eq!(TraceParent::of(&headers("traceparent", &[GOOD])), parsed(GOOD));
    assert_eq!(TraceParent::of(&headers("traceparent", &[])), None);
    assert_eq!(TraceParent::of(&headers("traceparent", &[GOOD, GOOD])), None);
}

#[test]
fn states_are_combined_and_cut_at_whole_members() {
    let of = |values: &[&str]| state(&headers("tracestate", values));
    assert_eq!(of(&["foo=1,bar=2"]), "foo=1,bar=2");
    assert_eq!(of(&["foo=1,bar=2", "rojo=00f067aa0ba902b7"]), "foo=1,bar=2,rojo=00f067aa0ba902b7");
    let long = format!("a={},b={},c={}", "x".repeat(200), "y".repeat(200), "z".repeat(200));
    assert_eq!(of(&[&long]), long[..405], "whole members are left out at the end");
    assert_eq!(of(&["x".repeat(513).as_str()]), "");
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        TraceParent::parse(&bytes);
    }

    #[test]
    fn no_change_to_a_valid_header_breaks_it(place in 0_usize..55, byte: u8, length in 0_usize..70) {
        let mut bytes = GOOD.as_bytes().to_vec();
        bytes[place] = byte;
        bytes.resize(length, b'-');
        if let Some(parent) = TraceParent::parse(&bytes) {
            prop_assert!(parent.trace_id != 0 && parent.span_id != 0 && length >= 55);
        }
    }

    #[test]
    fn what_is_written_is_read(version in 0_u8..=254, trace_id in 1_u128.., span_id in 1_u64.., flags: u8) {
        let text = format!("{version:02x}-{trace_id:032x}-{span_id:016x}-{flags:02x}");
        prop_assert_eq!(parsed(&text), Some(TraceParent { trace_id, span_id, sampled: flags & 1 == 1 }));
    }

    #[test]
    fn states_stay_short(texts in proptest::collection::vec("[ -~\t]{0,80}", 0..5)) {
        let mut headers = HeaderMap::new();
        texts.iter().for_each(|text| { headers.append("tracestate", HeaderValue::from_str(text).unwrap()); });
        prop_assert!(state(&headers).len() <= MAX_STATE_BYTES);
    }
}
