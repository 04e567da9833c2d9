//! Tests of the architecture that only read files. They check the dependencies between parts, the
//! files that may contain `unsafe`, the maximum length of a file, and the files and headings that
//! documents name. ARCHITECTURE.md explains the reasons.

#![allow(clippy::panic, clippy::unwrap_used, reason = "this crate contains only tests")]

mod check;
mod documents;
mod manifests;
mod negative;
mod prose;
mod source;
mod table;

use std::path::{Path, PathBuf};

use source::{Manifest, Source};

/// The crates of the workspace, whose sources are checked.
const CRATES: [&str; 14] = [
    "shared",
    "worker",
    "worker/python",
    "supervisor",
    "supervisor/config",
    "supervisor/control",
    "supervisor/datapath",
    "supervisor/ingress",
    "supervisor/operations",
    "supervisor/succession",
    "supervisor/policy",
    "benches/simulator",
    "tests",
    "benches",
];

#[test]
fn every_crate_of_the_workspace_is_checked() {
    let workspace = read("Cargo.toml");
    let members = workspace.split_once("members = [").and_then(|(_, rest)| rest.split_once(']')).unwrap().0;
    let members: Vec<&str> = members.split('"').skip(1).step_by(2).collect();
    let (mut members, mut checked) = (members, CRATES.to_vec());
    members.sort_unstable();
    checked.sort_unstable();
    assert_eq!(members, checked);
    let with_rule: Vec<&str> = manifests::MANIFESTS.iter().map(|&(name, _)| name).collect();
    assert!(CRATES.iter().all(|name| with_rule.contains(name)), "each crate has a rule: {with_rule:?}");
}

#[test]
fn every_row_of_the_dependency_table_holds() {
    let sources = sources();
    none(&check::uses(table::ROWS, &sources));
    none(&check::stale(table::ROWS, &sources));
}

#[test]
fn every_manifest_lists_only_what_the_table_permits() {
    let manifests = CRATES.map(|name| Manifest::parse(name, &read(&format!("{name}/Cargo.toml"))));
    none(&check::manifests(manifests::MANIFESTS, &manifests));
}

#[test]
fn only_listed_files_contain_unsafe_code() {
    none(&check::unsafe_code(table::UNSAFE, &sources()));
}

#[test]
fn no_file_is_too_long() {
    none(&check::lengths(&sources()));
}

#[test]
fn no_crate_is_larger_than_its_limit() {
    none(&check::sizes(table::MAX_CODE_LINES, &sources()));
}

#[test]
fn files_and_headings_that_documents_name_exist() {
    none(&documents::faults(&root()));
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Parses all Rust files of the workspace.
fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    let tops = CRATES.iter().filter(|name| !name.contains('/'));
    let mut folders: Vec<PathBuf> = tops.map(|name| root().join(name)).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
                found.push(Source::parse(name, &read(name)));
            }
        }
    }
    assert!(found.len() > 100, "found only {} files", found.len());
    found
}
