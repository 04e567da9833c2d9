//! Tests that each metric is declared once and documented.

use std::collections::BTreeSet;

use super::tests::{NOTHING, model, policy};
use super::text::Metric;
use super::*;

/// Returns the name and kind of every metric in the order of the output.
fn all() -> Vec<(&'static str, &'static str)> {
    fn of<S>(metrics: &[Metric<S>]) -> impl Iterator<Item = (&'static str, &'static str)> {
        metrics.iter().map(|metric| (metric.name, metric.kind))
    }
    let ours =
        of(table::MODELS).chain(of(versions::METRICS)).chain(of(table::POLICY)).chain(of(gpus::METRICS));
    let ours = ours.chain(of(table::TRACES)).chain(of(table::OWN)).chain(of(table::CERTIFICATES));
    let ours = ours
        .chain(of(tenants::METRICS))
        .chain(of(table::HOST))
        .chain(of(table::BUILD))
        .chain(of(table::PROCESS));
    ours.chain(of(triton::MODELS)).chain(of(triton::GPUS)).chain(of(triton::MACHINE)).collect()
}

#[test]
fn every_metric_is_introduced_once_and_in_front_of_its_values() {
    let text = render(&[model("a"), model("b")], Some(&policy()), None, &[], &NOTHING);
    let mut seen = BTreeSet::new();
    let mut current = "";
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            current = help.split(' ').next().unwrap();
            assert!(seen.insert(current), "{current} twice");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(name, current);
            let ours = name.starts_with("shadowslice_");
            assert!(!ours || (kind == "counter") == name.ends_with("_total"), "{name} is a {kind}");
        } else {
            let rest = line.strip_prefix(current).unwrap_or_default();
            assert!(rest.starts_with(['{', '_', ' ']), "{line}");
        }
    }
    assert_eq!(seen.len(), all().len());
}

#[test]
fn the_documentation_has_every_metric_and_no_other() {
    let page = include_str!("../../../../docs/metrics.md");
    let mut documented = Vec::new();
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let mut cells = row.split(" | ");
        let name = cells.next().unwrap().trim_end_matches('`');
        documented.push((name, cells.next().unwrap()));
    }
    assert_eq!(documented, all());
}
