//! A test that the comparison of the simulator with the supervisor runs with one short case. The
//! test does not check how well the two agree.

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn a_short_case_is_simulated_replayed_and_written_down() {
    let folder = tempfile::tempdir().unwrap();
    let (keep, page) = (folder.path().join("keep"), folder.path().join("page.md"));
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("configs").join("sim-vs-real.yaml");
    let output = Command::new(env!("CARGO_BIN_EXE_shadowslice-bench"))
        .args([
            "sim-vs-real",
            "--seconds",
            "1",
            "--rounds",
            "1",
            "--utilisation",
            "0.2",
            "--only",
            "poisson, half+admission",
        ])
        .arg("--config")
        .arg(config)
        .arg("--keep")
        .arg(&keep)
        .arg("--page")
        .arg(&page)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let drawn = fs::read_to_string(keep.join("poisson.csv")).unwrap().lines().count();
    assert!(drawn > 50, "{drawn} arrivals");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains(&format!("| poisson | half+admission | shadow | {drawn} |")), "{page}");
    // Each request that was sent has exactly one outcome.
    let figures: serde_json::Value =
        serde_json::from_slice(&fs::read(keep.join("sim-vs-real.json")).unwrap()).unwrap();
    let sent = &figures[0]["rounds"][0]["figures"]["all"]["offered"];
    assert_eq!(sent.as_u64(), Some(drawn as u64));
}
