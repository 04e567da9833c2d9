//! The reports of benchmarks: pages in Markdown with tables, and files with the same figures.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::MeasureError;
use crate::machine::HostInfo;
use crate::spread::Spread;

/// A page in Markdown. The page describes the benchmark and the host, and ends with the results.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) title: &'static str,
    /// The paragraph before the description of the host.
    pub(crate) about: String,
    /// The measured processes, which share the cores of the host.
    pub(crate) processes: &'static str,
    /// The paragraphs about the method, after the description of the host. Can be empty.
    pub(crate) method: String,
    pub(crate) results: String,
}

impl Report {
    /// Prints the results, and writes the page to the file `page` if there is one.
    pub(crate) fn publish(&self, page: Option<&Path>) -> Result<(), MeasureError> {
        println!("{}", self.results);
        page.map_or(Ok(()), |path| save(path, self.page(&HostInfo::here())))
    }

    fn page(&self, host: &HostInfo) -> String {
        let Self { title, about, processes, method, results } = self;
        let HostInfo { cpu, cores, kernel, date, commit, .. } = host;
        let host = format!(
            "{cpu}, {cores} cores shared by {processes}, Linux {kernel}, no GPU. {date}, commit {commit}."
        );
        let parts = [&format!("# {title}"), about, &host, method, results];
        let parts = parts.into_iter().map(|part| part.trim_end()).filter(|part| !part.is_empty());
        parts.collect::<Vec<_>>().join("\n\n") + "\n"
    }
}

/// Writes a file, and prints its path.
pub(crate) fn save(path: &Path, content: impl AsRef<[u8]>) -> Result<(), MeasureError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, content))
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Writes figures to a file as JSON, and prints its path.
pub(crate) fn save_json(path: &Path, figures: &impl Serialize) -> Result<(), MeasureError> {
    save(path, serde_json::to_string_pretty(figures)? + "\n")
}

/// Returns a table in Markdown.
pub(crate) fn table(heads: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    let rule = vec!["---".to_owned(); heads.len()];
    let body: String = rows.into_iter().map(|cells| line(&cells)).collect();
    line(&heads) + &line(&rule) + &body
}

/// Returns the word for a target that is met or missed.
pub(crate) fn verdict(is_met: bool) -> &'static str {
    if is_met { "met" } else { "**missed**" }
}

/// Formats a number as text with these decimals.
pub(crate) fn number(value: f64, decimals: usize) -> String {
    format!("{value:.decimals$}")
}

/// Formats a spread as its median, with the range in brackets unless all values are equal.
pub(crate) fn spread(Spread { median, min, max }: Spread, decimals: usize) -> String {
    if min == max {
        return number(median, decimals);
    }
    format!("{median:.decimals$} ({min:.decimals$} .. {max:.decimals$})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_all_parts_that_are_not_empty() {
        let host = HostInfo {
            cpu: "CPU".to_owned(),
            cores: 2,
            kernel: "6.1".to_owned(),
            device: "emulated",
            date: "today".to_owned(),
            commit: "1234".to_owned(),
        };
        let results = table(&["a", "b"], [vec!["1".to_owned(), verdict(false).to_owned()]]);
        let report = Report {
            title: "Title",
            about: "About.".to_owned(),
            processes: "both servers",
            method: String::new(),
            results,
        };
        assert_eq!(
            report.page(&host),
            "# Title\n\nAbout.\n\nCPU, 2 cores shared by both servers, Linux 6.1, no GPU. today, commit 1234.\n\n\
             | a | b |\n| --- | --- |\n| 1 | **missed** |\n"
        );
    }

    #[test]
    fn a_range_is_shown_only_if_values_differ() {
        let text = |values: &[f64]| spread(Spread::of(values.iter().copied()), 1);
        assert_eq!(
            (text(&[2.0, 2.0]).as_str(), text(&[1.0, 2.0, 4.0]).as_str()),
            ("2.0", "2.0 (1.0 .. 4.0)")
        );
    }
}
