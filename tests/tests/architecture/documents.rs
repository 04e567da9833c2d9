//! The checks of documents. Each file and heading that documents name must exist, and the documents
//! must name each file that a newcomer needs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The checked documents in the root folder. All documents in `docs/` are checked as well.
const DOCUMENTS: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"];

/// The book's table of contents, which must name every document.
const SUMMARY: &str = "docs/SUMMARY.md";

/// The beginnings of the code spans that the checks treat as paths.
const TREE: [&str; 10] = [
    "shared/",
    "worker/",
    "supervisor/",
    "tests/",
    "benches/",
    "configs/",
    "docs/",
    "models/",
    "packaging/",
    "python/",
];

/// The path of a document relative to the root, and its text.
type Document = (String, String);

/// Returns the faults in all documents.
pub(crate) fn faults(root: &Path) -> Vec<String> {
    let names = DOCUMENTS.map(str::to_owned).into_iter();
    let names = names.chain(files(root, "docs", ".md"));
    let text = |name: String| {
        let text = fs::read_to_string(root.join(&name));
        let text = text.unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, text)
    };
    let documents: Vec<Document> = names.map(text).collect();
    let mut faults = missing_headings(&documents);
    faults.extend(missing_chapters(&documents));
    for (name, text) in &documents {
        faults.extend(missing_paths(name, text, root));
    }
    for name in ["README.md", "ARCHITECTURE.md"] {
        let text =
            &documents.iter().find(|(document, _)| document == name).expect("DOCUMENTS contains the name").1;
        let targets = ["make demo", "make test"].into_iter().filter(|target| !text.contains(target));
        faults.extend(targets.map(|target| format!("{name}: does not mention `{target}`")));
    }
    let all: String = documents.iter().map(|(_, text)| text.as_str()).collect();
    let configs = files(root, "configs", ".yaml").into_iter();
    for file in configs.filter(|file| file.matches('/').count() == 1) {
        if !all.contains(&file) {
            faults.push(format!("{file}: no document mentions this file"));
        }
    }
    faults
}

/// Returns the files in a folder and its subfolders, as paths relative to the root.
fn files(root: &Path, folder: &str, ending: &str) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(root.join(&folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
        for entry in entries.flatten() {
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                folders.push(name);
            } else if name.ends_with(ending) {
                files.push(name);
            }
        }
    }
    files
}

/// A link to a file in the tree, to a heading, or to both.
#[derive(Debug)]
struct Link<'t> {
    line: usize,
    /// The path relative to the document's folder, which is empty in a link to the document itself.
    path: &'t str,
    /// The anchor of the heading, which is empty in a link to the whole file.
    anchor: &'t str,
}

impl<'t> Link<'t> {
    fn all(text: &'t str) -> impl Iterator<Item = Self> {
        (1..).zip(text.lines()).flat_map(|(line, text)| {
            let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            let defined = text.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
            let targets = targets.chain(defined.map(|(_, target)| target));
            let targets = targets.filter(|target| !target.contains("://"));
            targets.map(move |target| {
                let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
                Self { line, path, anchor }
            })
        })
    }

    /// Returns the path relative to the root, for a link in the document `name`.
    fn target(&self, name: &str) -> String {
        let mut parts: Vec<&str> = name.split('/').collect();
        if !self.path.is_empty() {
            parts.pop();
        }
        for part in self.path.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(parts.pop()),
                part => parts.push(part),
            }
        }
        parts.join("/")
    }
}

/// Returns the paths in code spans and links that do not exist.
pub(crate) fn missing_paths(name: &str, text: &str, root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    let mut check = |line: usize, path: &str| {
        if fs::metadata(root.join(path)).is_err() {
            faults.push(format!("{name}:{line}: {path} does not exist"));
        }
    };
    for (line, text) in (1..).zip(text.lines()) {
        let spans = text.split('`').skip(1).step_by(2);
        let spans = spans.filter(|span| TREE.iter().any(|part| span.starts_with(part)));
        spans.filter(|span| !span.contains(['*', '{', '<', ' '])).for_each(|span| check(line, span));
    }
    Link::all(text).for_each(|link| check(link.line, &link.target(name)));
    faults
}

/// Returns the links to headings that do not exist.
pub(crate) fn missing_headings(documents: &[Document]) -> Vec<String> {
    let anchors: BTreeMap<&str, Vec<String>> =
        documents.iter().map(|(name, text)| (name.as_str(), anchors(text))).collect();
    let mut faults = Vec::new();
    for (name, text) in documents {
        for link in Link::all(text).filter(|link| !link.anchor.is_empty()) {
            let target = link.target(name);
            let known =
                anchors.get(target.as_str()).is_none_or(|known| known.iter().any(|a| a == link.anchor));
            if !known {
                faults.push(format!("{name}:{}: {target} has no heading #{}", link.line, link.anchor));
            }
        }
    }
    faults
}

/// Returns the documents that are missing from the book's table of contents.
pub(crate) fn missing_chapters(documents: &[Document]) -> Vec<String> {
    let summary = documents.iter().find(|(name, _)| name == SUMMARY).map_or("", |(_, text)| text.as_str());
    let chapters: Vec<String> = Link::all(summary).map(|link| link.target(SUMMARY)).collect();
    let left_out = documents.iter().filter(|(name, _)| name != SUMMARY && !chapters.contains(name));
    left_out.map(|(name, _)| format!("{SUMMARY}: does not list {name}")).collect()
}

/// Returns the anchors of a document's headings, in the form that GitHub generates.
fn anchors(text: &str) -> Vec<String> {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    let mut fenced = false;
    let mut anchors = Vec::new();
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let Some(title) = line.trim_start_matches('#').strip_prefix(' ') else { continue };
        if fenced || !line.starts_with('#') {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let anchor: String = title.trim().to_lowercase().chars().filter(kept).collect();
        let anchor = anchor.replace(' ', "-");
        let before = count.entry(anchor.clone()).or_default();
        anchors.push(if *before == 0 { anchor } else { format!("{anchor}-{before}") });
        *before += 1;
    }
    anchors
}
