//! The checks of wording and names. Documents, comments and messages must be in plain English, and
//! each name must belong to only one type.
//!
//! The rules find only the faults that single words reveal. Reviewers have to find all other
//! faults.

mod extract;
mod names;
mod negative;
mod rules;

use std::path::Path;

use crate::{none, read, root, sources};
use extract::Passage;

#[test]
fn documents_comments_and_messages_are_plain_english() {
    let fault = |passage: &Passage| Some(format!("{passage} has `{}`", rules::phrase(&passage.text)?));
    none(&passages().iter().filter_map(fault).collect::<Vec<_>>());
}

#[test]
fn comments_are_whole_sentences() {
    let fault = |passage: &Passage| Some(format!("{passage} {}", rules::fragment(passage)?));
    none(&passages().iter().filter_map(fault).collect::<Vec<_>>());
}

#[test]
fn each_type_name_means_one_type() {
    none(&names::duplicates(&sources()));
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
