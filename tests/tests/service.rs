//! The unit for systemd that comes with shadowslice.

use std::process::Command;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/shadowslice.service");

/// systemd counts what a service may do, from 0 (nothing) to 100.
#[test]
fn the_service_may_do_little_else_than_serve() {
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).arg(UNIT).output();
    let Ok(judged) = analyze(&["security", "--offline=true", "--threshold=40"]) else {
        println!("skipped: there is no systemd-analyze");
        return;
    };
    if String::from_utf8_lossy(&judged.stderr).contains("unrecognized option") {
        println!("skipped: this systemd-analyze only judges services that are installed");
        return;
    }
    let said = String::from_utf8_lossy(&judged.stdout);
    assert!(judged.status.success(), "{said}");
    // It looks for the programs, too, which are not installed here, nor is the manual.
    let faults = analyze(&["verify", "--man=no"]).unwrap().stderr;
    let faults = String::from_utf8_lossy(&faults).into_owned();
    let faults: Vec<_> = faults.lines().filter(|line| line.contains("shadowslice.service:")).collect();
    let faults: Vec<_> = faults.iter().filter(|line| !line.contains("is not executable")).collect();
    assert!(faults.is_empty(), "{faults:?}");
}
