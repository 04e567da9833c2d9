//! The checks of wording and names. Documents, comments and messages must be in plain English, and
//! each name must belong to only one type.
//!
//! The rules find only the faults that single words reveal. Reviewers have to find all other
//! faults.

mod exceptions;
mod extract;
mod names;
mod negative;
mod rules;

use std::collections::BTreeSet;
use std::path::Path;

use crate::{none, read, root, sources};
use exceptions::{Exception, FRAGMENTS, NAMES, PHRASES};
use extract::Passage;

#[test]
fn documents_comments_and_messages_are_plain_english() {
    let passages = passages();
    let faults = passages.iter().filter_map(|passage| {
        let phrase = rules::phrase(&passage.text)?;
        Some((passage.file.as_str(), format!("{passage} has `{phrase}`")))
    });
    none(&without_exceptions(PHRASES, faults.collect()));
}

#[test]
fn comments_are_whole_sentences() {
    let passages = passages();
    let faults = passages.iter().filter_map(|passage| {
        let fault = rules::fragment(passage)?;
        Some((passage.file.as_str(), format!("{passage} {fault}")))
    });
    none(&without_exceptions(FRAGMENTS, faults.collect()));
}

#[test]
fn each_type_name_means_one_type() {
    let sources = sources();
    let is_exempt = |name: &str| NAMES.iter().any(|exception| exception.covers(name));
    let counted: Vec<_> = sources.iter().filter(|source| !is_exempt(&source.name)).collect();
    let faults = names::duplicates(&counted);
    none(&faults.iter().map(|(_, fault)| fault.clone()).collect::<Vec<_>>());
}

fn without_exceptions(exceptions: &[Exception], faults: Vec<(&str, String)>) -> Vec<String> {
    let mut used = BTreeSet::new();
    let mut left = Vec::new();
    for (file, fault) in faults {
        match exceptions.iter().find(|exception| exception.covers(file)) {
            Some(exception) => drop(used.insert(exception.place)),
            None => left.push(fault),
        }
    }
    let unused = exceptions.iter().filter(|exception| !used.contains(exception.place));
    left.extend(unused.map(|exception| format!("{}: the exception is no longer needed", exception.place)));
    left
}

/// Returns the passages in all documents, Rust files and Python files.
fn passages() -> Vec<Passage> {
    let mut files = Vec::new();
    for top in
        ["docs", "python", "shared", "worker", "supervisor", "benches", "tests", "configs", "packaging"]
    {
        collect(&root().join(top), &mut files);
    }
    let roots = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"];
    files.extend(
        roots.iter().filter(|name| root().join(name).try_exists().unwrap()).map(|name| (*name).to_owned()),
    );
    files.sort();
    files.iter().flat_map(|name| extract::passages(name, &read(name))).collect()
}

fn collect(folder: &Path, files: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
            files.extend(extract::is_read(&name).then_some(name));
        }
    }
}
