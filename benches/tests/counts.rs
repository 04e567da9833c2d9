//! Tests that the benchmarks `compare`, `cost-profile` and `scaling` run and write their pages. The
//! tests do not check figures.

use std::fs;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_shadowslice-bench");

/// Runs a benchmark, and returns the page that it writes.
fn page(benchmark: &str, arguments: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("temporary files can be made");
    let page = folder.path().join("page.md");
    let mut command = Command::new(PROGRAM);
    let output = command.arg(benchmark).args(arguments).arg("--page").arg(&page).output();
    let output = output.expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(page).expect("there is a page")
}

#[test]
fn counts_of_two_builds_are_in_adjacent_rows() {
    let folder = Path::new(PROGRAM).parent().unwrap().display();
    let (one, other) = (format!("one={folder}"), format!("other={folder}"));
    let arguments = ["--only", "grpc unix 64 B x8", "--requests", "100", "--no-profile"];
    let page = page("cost-profile", &[&arguments[..], &["--binaries", &one, "--binaries", &other]].concat());
    for row in ["| supervisor | one |", "| supervisor | other |", "| worker | one |", "| worker | other |"] {
        assert!(page.contains(&format!("| grpc unix 64 B x8 {row}")), "{page}");
    }
    assert!(page.contains("Left out, because `--no-profile` is set"), "{page}");
}

#[test]
fn two_builds_take_turns_over_both_protocols() {
    let folder = Path::new(PROGRAM).parent().unwrap().display();
    let (before, after) = (format!("one={folder}"), format!("other={folder}"));
    let arguments = ["--only", "tcp 64 B x1", "--rounds", "2", "--seconds", "0.05"];
    let page = page("compare", &[&arguments[..], &["--before", &before, "--after", &after]].concat());
    for row in ["other over one:", "| http tcp 64 B x1 |", "| http tcp 64 B x128 |", "| grpc tcp 64 B x1 |"] {
        assert!(page.contains(row), "{page}");
    }
}

#[test]
fn memory_and_idle_cost_are_measured() {
    let arguments =
        ["--parts", "memory,idle", "--requests", "50,100", "--rest-seconds", "0", "--idle-seconds", "0.2"];
    let page = page("scaling", &arguments);
    for row in ["| 64 B x32 | 50 requests |", "| 64 B x32 | 100 requests |", "| all workers |"] {
        assert!(page.contains(row), "{page}");
    }
}
