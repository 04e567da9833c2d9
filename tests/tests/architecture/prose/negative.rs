//! Tests of the rules with artificial files. Each rule must find its own faults and no other
//! faults.

use super::extract::{self, Passage};
use super::{names, rules};
use crate::source::Source;

fn passages(file: &str, text: &str) -> Vec<Passage> {
    extract::passages(file, text)
}

#[test]
fn phrases_are_found_in_all_kinds_of_prose() {
    let offenders = [
        ("docs/a.md", "A worker that\nlacks memory waits."),
        ("docs/a.md", "* Give a unit, say `ms`, to each.\n* Give a unit (seconds, say)."),
        ("a/src/a.rs", "/// A count that\n/// goes by rows.\nfn f() {}"),
        ("a/src/a.rs", "//! The queue, of which\n//! each model has one."),
        ("a/src/a.rs", "fn f() {\n    // Tried in vain.\n}"),
        ("a/src/a.rs", "fn f() { warn!(\"{value} is no size\"); }"),
        ("a/src/a.rs", "#[error(\"the model \\\n    is told to stop\")]\nstruct A;"),
        ("a/src/a.rs", "/// Have the model be served.\nstruct A;"),
        ("a/a.py", "    \"\"\"Starts the worker anew.\"\"\""),
    ];
    for (file, text) in offenders {
        let found = passages(file, text).iter().any(|passage| rules::phrase(&passage.text).is_some());
        assert!(found, "{file}: {text}");
    }
    let innocents = [
        (
            "docs/a.md",
            "The worker is no longer needed.\n\n```sh\necho anew\n```\n\nThe key `of which` is code.",
        ),
        ("a/src/a.rs", "fn anew() { beforehand(\"anew\"); }"),
    ];
    for (file, text) in innocents {
        let found = passages(file, text);
        let phrases: Vec<_> = found.iter().filter_map(|passage| rules::phrase(&passage.text)).collect();
        let expected: &[&str] = &[];
        assert_eq!(phrases, expected, "{file}: {text}");
    }
}

#[test]
fn fragments_are_found_by_the_kind_of_item() {
    let offenders = [
        "/// Of the last second.\npub late: u64,",
        "/// `None` if the GPU measured nothing.\npub time: Option<u64>,",
        "/// The time in ns.\npub(crate) const fn time() -> u64 { 0 }",
        "/// Whether a worker serves.\n#[must_use]\npub fn is_served() -> bool { true }",
        "//! What runs a model.",
        "// Else the worker waits.",
    ];
    for text in offenders {
        let comments = extract::comments_of(text);
        let faults = comments.iter().filter(|passage| rules::fragment(passage).is_some()).count();
        assert_eq!(faults, 1, "{text}");
    }
    let innocents = [
        "/// The requests of the last second.\npub late: u64,",
        "/// Returns the time in ns, or\n/// `None` if the GPU measured nothing.\npub fn time() -> u64 { 0 }",
        "// If the worker is gone, its slot is free.",
        "/// Bounds the queue.\npub async fn bound() {}",
    ];
    for text in innocents {
        let comments = extract::comments_of(text);
        assert!(comments.iter().all(|passage| rules::fragment(passage).is_none()), "{text}");
    }
}

#[test]
fn a_name_of_two_visible_types_is_found() {
    let file = |name: &str, text: &str| Source::parse(name, text);
    let first = file("a/src/a.rs", "pub struct Queue;\nstruct Own;");
    let second = file("b/src/b.rs", "mod inner {\n    pub(crate) enum Queue {}\n}\npub struct Own;");
    let test = file("c/src/c.rs", "#[cfg(test)]\nmod tests { pub struct Queue; }");
    let faults = names::duplicates(&[first, second, test]);
    let expected = ["a/src/a.rs:1: `Queue` names 2 types", "b/src/b.rs:2: `Queue` names 2 types"];
    assert_eq!(faults, expected);
}
