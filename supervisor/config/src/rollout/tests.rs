//! Tests of the section `rollout`.

use super::*;

#[test]
fn the_defaults_are_those_of_the_table() {
    let bounds = RolloutBounds { errors: 0.01, differences: 0.01, slowdown: 2.5 };
    let step = Some(Duration::from_mins(5));
    let rollout = RolloutConfig {
        rules: RolloutRules { mirror: 0.05, canary: Vec::new(), step, bounds },
        share: units::percent("10%").unwrap(),
        compare: AnswerComparison::Tolerance,
        sticky: None,
        keep: Duration::from_mins(10),
        replace: false,
    };
    assert_eq!(RolloutConfig::default(), rollout);
    assert_eq!(rollout_with(None, "{}"), Ok(rollout.clone()));
    assert_eq!(rollout_with(Some(&rollout), "{}"), Ok(rollout));
}

#[test]
fn a_text_changes_only_the_keys_that_it_has() {
    let json = r#"{"mirror": "0%", "canary": ["1%", "10%"], "for": "manual", "share": "20%",
        "compare": {"cosine": 0.9}, "sticky": "X-User", "keep": "0s", "replace": true,
        "abort_if": {"errors": "0.5%", "differences": "100%", "slowdown": 1.5}}"#;
    let base = rollout_with(None, json).unwrap();
    let RolloutRules { mirror, canary, step, bounds } = &base.rules;
    assert_eq!((*mirror, &canary[..], *step), (0.0, &[0.01, 0.1][..], None));
    assert_eq!(*bounds, RolloutBounds { errors: 0.005, differences: 1.0, slowdown: 1.5 });
    assert_eq!((base.share.get(), base.compare), (20, AnswerComparison::Cosine(0.9)));
    assert_eq!((base.sticky.as_deref(), base.keep, base.replace), (Some("x-user"), Duration::ZERO, true));

    assert_eq!(rollout_with(Some(&base), "{}").as_ref(), Ok(&base));
    let changed = rollout_with(Some(&base), "{canary: 50%, for: 100ms, abort_if: {errors: 2%}}").unwrap();
    let bounds = RolloutBounds { errors: 0.02, ..*bounds };
    let rules =
        RolloutRules { mirror: 0.0, canary: vec![0.5], step: Some(Duration::from_millis(100)), bounds };
    assert_eq!(changed, RolloutConfig { rules, ..base });
}

#[test]
fn every_fault_of_a_text_is_reported() {
    for (json, words) in [
        (r#"{"mirror": "101%"}"#, "mirror: invalid part `101%`"),
        (r#"{"canary": ["10%", "1%"]}"#, "canary: the parts must ascend"),
        (r#"{"canary": ["0%"]}"#, "canary[0]: must be above 0%"),
        (r#"{"for": "99ms"}"#, "for: too short; use at least 100ms"),
        (r#"{"for": 5}"#, "for: duration `5` has no unit"),
        (r#"{"compare": "cosin"}"#, "compare: unknown value `cosin`"),
        (r#"{"abort_if": {"error": "1%"}}"#, "abort_if.error: unknown key; did you mean `errors`?"),
        (r#"{"abort_if": {"slowdown": 1.0}}"#, "abort_if.slowdown: must be a number above 1"),
        (r#"{"versions": "all"}"#, "versions: unknown key"),
        ("[]", "must be a map"),
        ("{", "not valid YAML"),
        ("", "the file is empty"),
    ] {
        for base in [None, Some(&RolloutConfig::default())] {
            let refused = rollout_with(base, json).unwrap_err();
            assert!(refused.contains(words), "{json}: {refused}");
        }
    }
    let both = rollout_with(None, r#"{"keep": "x", "replace": 1}"#).unwrap_err();
    assert!(both.contains("keep: ") && both.contains("\nreplace: "), "{both}");
    let long = format!("{{\"keep\": \"{}s\"}}", "0".repeat(MAX_BYTES));
    assert!(rollout_with(None, &long).unwrap_err().contains("at most 4096 are allowed"));
}
