//! Documents against the tree: every file that they name exists, and every file that a newcomer
//! needs is named.

use std::fs;
use std::path::Path;

/// The documents at the root; the documents in `docs/` are added to them.
const DOCUMENTS: [&str; 3] = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"];

/// Folders that a path in a document may start with.
const TREE: [&str; 8] =
    ["shared/", "worker/", "supervisor/", "tests/", "benches/", "configs/", "docs/", "packaging/"];

pub(crate) fn faults(root: &Path) -> Vec<String> {
    let names = DOCUMENTS.map(str::to_owned).into_iter();
    let names = names.chain(files(root, "docs", ".md"));
    let text = |name: String| {
        let text = fs::read_to_string(root.join(&name));
        let text = text.unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, text)
    };
    let texts: Vec<(String, String)> = names.map(text).collect();
    let mut faults = Vec::new();
    for (name, text) in &texts {
        faults.extend(missing_paths(name, text, root));
    }
    for name in ["README.md", "ARCHITECTURE.md"] {
        let text = &texts.iter().find(|(document, _)| document == name).expect("it is one of them").1;
        let targets = ["make demo", "make test"].into_iter().filter(|target| !text.contains(target));
        faults.extend(targets.map(|target| format!("{name}: does not name `{target}`")));
    }
    let all: String = texts.iter().map(|(_, text)| text.as_str()).collect();
    for file in files(root, "configs", ".yaml") {
        if !all.contains(&file) {
            faults.push(format!("{file}: no document names it"));
        }
    }
    faults
}

/// The files of one folder, as paths from the root.
fn files(root: &Path, folder: &str, ending: &str) -> Vec<String> {
    let entries = fs::read_dir(root.join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    let names = entries.flatten().map(|entry| format!("{folder}/{}", entry.file_name().to_string_lossy()));
    names.filter(|name| name.ends_with(ending)).collect()
}

/// Paths in code spans and links that lead nowhere.
pub(crate) fn missing_paths(name: &str, text: &str, root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    let folder = Path::new(name).parent().unwrap_or(Path::new(""));
    for (line, text) in (1..).zip(text.lines()) {
        let spans = text.split('`').skip(1).step_by(2);
        let spans = spans.filter(|span| TREE.iter().any(|part| span.starts_with(part)));
        let spans = spans.filter(|span| !span.contains(['*', '{', '<', ' '])).map(|span| root.join(span));
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let links = links.filter(|link| !link.is_empty() && !link.contains("://"));
        let links = links.map(|link| root.join(folder).join(link));
        let missing = spans.chain(links).filter(|path| fs::metadata(path).is_err());
        faults.extend(missing.map(|path| format!("{name}:{line}: there is no {}", path.display())));
    }
    faults
}
