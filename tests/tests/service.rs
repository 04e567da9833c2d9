//! The unit for systemd that comes with shadowslice, and what packages bring besides programs.

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

/// SIGHUP, which is heard of in the log only, would have `systemctl reload` succeed whatever happens.
#[test]
fn a_reload_of_the_service_fails_where_the_command_fails() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    let reload = unit.lines().find_map(|line| line.strip_prefix("ExecReload="));
    assert_eq!(reload, Some("/usr/bin/shadowslice reload"));
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    assert!(start.is_some_and(|start| start.starts_with("/usr/bin/shadowslice serve ")), "{start:?}");
}

/// ONNX Runtime asks the C library for the locale that a model of text names.
#[test]
fn packages_bring_the_locale_that_models_of_text_name() {
    let packaging = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging");
    let image = std::fs::read_to_string(format!("{packaging}/Dockerfile")).unwrap();
    let last = image.rsplit("\nFROM ").next().unwrap();
    assert!(last.contains(" locales ") && last.contains("locale-gen en_US.UTF-8"), "{last}");
    let package = std::fs::read_to_string(format!("{packaging}/deb")).unwrap();
    assert!(package.contains("\nSuggests: locales\n"), "{package}");
}
