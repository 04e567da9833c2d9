//! Tests that run the checks on artificial files. Each file contains a fault, which its check must
//! find.

use std::path::Path;

use crate::check;
use crate::documents;
use crate::manifests::MANIFESTS;
use crate::source::{Manifest, Source};
use crate::table::{MAX_LINES, MAX_SPARE_LINES, ROWS, UNSAFE};

/// Returns the faults in an artificial file.
fn faults(name: &str, text: &str) -> Vec<String> {
    check::uses(ROWS, &[Source::parse(name, text)])
}

#[test]
fn forbidden_uses_are_found_in_every_notation() {
    let offenders = [
        ("shared/src/batch.rs", "use std::time::{Duration, Instant};"),
        ("shared/src/batch.rs", "fn now() { std::time::SystemTime::now(); }"),
        ("shared/src/batch.rs", "use std::time;"),
        ("shared/src/batch.rs", "use std::time::*;"),
        ("supervisor/policy/src/queue.rs", "use shadowslice_shared::{slab::WritableSlab, units::Timestamp};"),
        ("supervisor/policy/src/workers/mod.rs", "use std::{fmt, fs::{self}};"),
        ("supervisor/policy/src/queue.rs", "fn f() { std::thread::spawn(|| ()); }"),
        ("supervisor/policy/src/queue.rs", "use shadowslice_config::Model;"),
        ("benches/simulator/src/world/mod.rs", "fn f() { std::fs::read(\"a\"); }"),
        ("worker/src/serve.rs", "use ort::session::Session;"),
        ("worker/src/proof/mod.rs", "use cudarc::driver as cuda;"),
        ("worker/src/boot/mod.rs", "use shadowslice_policy::scheduler::SchedulingRules;"),
        ("worker/src/device/emulated.rs", "use crate::engine::Engine;"),
        ("worker/src/engine/echo.rs", "use super::super::device::Device;"),
        ("supervisor/ingress/src/api/http.rs", "use tokio::net::TcpStream;"),
        ("supervisor/ingress/src/tensors/json.rs", "use crate::transport::HttpAnswer;"),
        ("supervisor/ingress/src/transport/accept.rs", "use crate::api::Frontend;"),
        ("supervisor/ingress/src/admission/client.rs", "use super::super::transport::Encoding;"),
        ("supervisor/control/src/controller/planner/mod.rs", "use crate::process::Worker;"),
        ("supervisor/control/src/controller/planner/mod.rs", "use crate::*;"),
        ("supervisor/control/src/controller/planner/mod.rs", "use crate::{controller::Order, process};"),
        ("supervisor/control/src/controller/planner/mod.rs", "use shadowslice_policy::workers::Workers;"),
        ("supervisor/control/src/models/config_diff.rs", "tokio::select! { _ = std::env::vars() => {} }"),
        ("supervisor/operations/src/doctor/judge/mps.rs", "fn f() { std::fs::read(\"/proc/stat\"); }"),
        ("tests/src/server.rs", "use shadowslice_shared::boot::BootCommand;"),
    ];
    for (name, text) in offenders {
        assert_eq!(faults(name, text).len(), 1, "{name}: {text}: {:?}", faults(name, text));
    }
}

#[test]
fn permitted_uses_are_accepted() {
    let innocents = [
        ("shared/src/batch.rs", "use std::time::Duration; use crate::units::Timestamp;"),
        (
            "supervisor/policy/src/queue.rs",
            "// std::fs\nconst A: &str = \"use std::fs\"; use super::late::Lateness;",
        ),
        (
            "supervisor/policy/src/late.rs",
            "#[cfg(test)]\nmod tests { use std::time::Instant; fn f() { std::fs::read(\"\"); } }",
        ),
        ("supervisor/policy/src/batcher_tests.rs", "use std::fs;"),
        (
            "worker/src/engine/onnxruntime/mod.rs",
            "use ort::{ortsys, session::Session}; use super::super::inputs::Inputs;",
        ),
        (
            "supervisor/control/src/controller/planner/mod.rs",
            "use crate::backend::GpuBackend; use super::standing; use self::a::B;",
        ),
        (
            "supervisor/ingress/src/transport/accept.rs",
            "use crate::admission::Client; use super::tls::Encryption;",
        ),
        ("supervisor/src/serve.rs", "use nvml_wrapper::Nvml;"),
    ];
    for (name, text) in innocents {
        assert_eq!(faults(name, text), [""; 0], "{name}: {text}");
    }
}

#[test]
fn only_the_tests_of_a_file_are_ignored() {
    let text = "#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests;\nuse std::fs;\n#[cfg(test)]\nmod more { }\nuse std::env;";
    let lines: Vec<String> = faults("supervisor/policy/src/queue.rs", text);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("supervisor/policy/src/queue.rs:4: `std::fs`"), "{lines:?}");
}

#[test]
fn the_visibility_of_an_item_does_not_count_as_a_use() {
    let name = "supervisor/operations/src/doctor/judge/mod.rs";
    assert_eq!(faults(name, "pub(super) fn f() {} pub(in crate::doctor) struct S;"), [""; 0]);
    assert_eq!(faults(name, "pub(super) fn f() { super::gather::facts(); }").len(), 1);
    assert_eq!(faults(name, "struct S(pub (crate::serve::Run));").len(), 1);
}

#[test]
fn forbidden_dependencies_are_found() {
    let offenders = [
        ("shared", "[dependencies]\ntokio.workspace = true\n"),
        ("supervisor/policy", "[dependencies]\nshadowslice-shared.workspace = true\nrand = \"0.9\"\n"),
        ("supervisor/policy", "[dependencies.tracing]\nversion = \"0.1\"\n"),
        ("worker", "[target.'cfg(unix)'.dependencies]\nshadowslice-policy = { path = \"../policy\" }\n"),
        ("supervisor", "[dependencies]\nshadowslice-worker.workspace = true\n"),
        ("tests", "[dependencies]\nshadowslice.workspace = true\n"),
        ("supervisor/ingress", "[dependencies]\nshadowslice-control.workspace = true\n"),
        ("supervisor/datapath", "[dependencies]\ntonic.workspace = true\n"),
        ("supervisor/control", "[dependencies]\nshadowslice-operations.workspace = true\n"),
        ("supervisor", "[dependencies]\nshadowslice-simulator.workspace = true\n"),
        ("benches/simulator", "[dependencies]\ntokio.workspace = true\n"),
        ("a-crate-without-a-row", ""),
    ];
    for (name, text) in offenders {
        let faults = check::manifests(MANIFESTS, &[Manifest::parse(name, text)]);
        assert_eq!(faults.len(), 1, "{name}: {text}: {faults:?}");
    }
    let innocent = "[dev-dependencies]\ntokio.workspace = true\n[build-dependencies]\ntokio = \"1\"\n[lints]\nworkspace = true\n";
    assert_eq!(check::manifests(MANIFESTS, &[Manifest::parse("supervisor/policy", innocent)]), [""; 0]);
}

#[test]
fn forbidden_unsafe_code_and_stale_entries_are_found() {
    let mut tree: Vec<Source> =
        UNSAFE.iter().map(|name| Source::parse(name, "fn f() { unsafe { g() } }")).collect();
    assert_eq!(check::unsafe_code(UNSAFE, &tree), [""; 0]);
    tree.push(Source::parse(
        "supervisor/policy/src/queue.rs",
        "#![allow(unsafe_code)]\n// unsafe\nunsafe impl Send for A {}",
    ));
    tree[0] = Source::parse(UNSAFE[0], "");
    tree.remove(1);
    let faults = check::unsafe_code(UNSAFE, &tree);
    assert_eq!(faults.len(), 3, "{faults:?}");
    assert!(
        faults
            .contains(&"supervisor/policy/src/queue.rs:3: this file must not contain unsafe code".to_owned()),
        "{faults:?}"
    );
}

#[test]
fn long_files_are_found() {
    let file = |lines| Source::parse("supervisor/policy/src/queue.rs", &"\n".repeat(lines));
    assert_eq!(check::lengths(&[file(MAX_LINES)]), [""; 0]);
    assert_eq!(check::lengths(&[file(MAX_LINES + 1)]).len(), 1);
}

#[test]
fn crates_above_or_far_below_their_limit_are_found() {
    let text = "//! A queue.\n\n/// The maximum.\npub const MAX: &str =\n    \"a\nb\"; // bytes\n\
                #[derive(Debug)]\nstruct A;\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n";
    let tree = [Source::parse("shared/src/a.rs", text), Source::parse("shared/src/a/tests.rs", text)];
    let sizes = |limit| check::sizes(&[("shared", limit)], &tree);
    assert_eq!((sizes(5), sizes(5 + MAX_SPARE_LINES)), (Vec::new(), Vec::new()));
    assert_eq!(sizes(4), ["shared: 5 lines of code; the limit is 4"]);
    assert_eq!(sizes(6 + MAX_SPARE_LINES).len(), 1);
}

#[test]
fn broken_paths_in_documents_are_found() {
    let missing = |text| documents::missing_paths("docs/quick-start.md", text, &crate::root()).len();
    assert_eq!(
        missing("see `supervisor/policy/src/groups.rs`, `configs/` and [that](configuration.md#limits)"),
        0
    );
    assert_eq!(missing("`supervisor/policy/src/tuner.rs`"), 1);
    assert_eq!(missing("[that](nowhere.md)"), 1);
    assert_eq!(missing("a pattern: `configs/*.yaml`, [out](https://example.org)"), 0);
    assert!(Path::new(&crate::root()).join("README.md").is_file());
}

#[test]
fn links_to_missing_headings_are_found() {
    let page = "# A page\n## `share` and *more*, 10 %\n```sh\n# no heading\n```\n## Twice\n## Twice\n";
    let missing = |name: &str, link: &str| {
        let documents =
            [("docs/deep/page.md".to_owned(), page.to_owned()), (name.to_owned(), link.to_owned())];
        documents::missing_headings(&documents).len()
    };
    assert_eq!(missing("README.md", "[a](docs/deep/page.md#a-page), [b](docs/deep/page.md)"), 0);
    assert_eq!(missing("docs/a.md", "[a](deep/page.md#share-and-more-10-)"), 0);
    assert_eq!(missing("docs/deep/a.md", "[a](../deep/page.md#twice-1)"), 0);
    assert_eq!(missing("docs/a.md", "# Here\n[a](#here)"), 0);
    assert_eq!(missing("docs/a.md", "# Here\n[a](#there)"), 1);
    assert_eq!(missing("docs/deep/a.md", "[a](page.md#twice-2)"), 1);
    assert_eq!(missing("docs/deep/a.md", "[a][b]\n[b]: page.md#thrice"), 1);
    assert_eq!(missing("README.md", "[a](docs/deep/page.md#no-heading)"), 1);
}

#[test]
fn documents_missing_in_the_book_are_found() {
    let missing = |summary: &str| {
        let names = ["README.md", "docs/deep/page.md"].map(|name| (name.to_owned(), String::new()));
        let summary = ("docs/SUMMARY.md".to_owned(), summary.to_owned());
        documents::missing_chapters(&[&names[..], &[summary]].concat()).len()
    };
    assert_eq!(missing("[a](../README.md)\n- [b](deep/page.md)"), 0);
    assert_eq!(missing("[a](../README.md)"), 1);
    assert_eq!(missing(""), 2);
}
