//! Tests of the systemd unit and of the dependencies of the packages.

use std::process::Command;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/shadowslice.service");

/// Checks the exposure level that systemd-analyze reports, from 0 (the service has no privileges)
/// to 100.
#[test]
fn the_service_has_few_privileges() {
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).arg(UNIT).output();
    let Ok(report) = analyze(&["security", "--offline=true", "--threshold=40"]) else {
        println!("skipped: systemd-analyze not found");
        return;
    };
    if String::from_utf8_lossy(&report.stderr).contains("unrecognized option") {
        println!("skipped: this version of systemd-analyze checks only installed services");
        return;
    }
    let table = String::from_utf8_lossy(&report.stdout);
    assert!(report.status.success(), "{table}");
    // The command also reports that the unit's programs are missing. They are not installed here,
    // so the test ignores these reports.
    let faults = analyze(&["verify", "--man=no"]).unwrap().stderr;
    let faults = String::from_utf8_lossy(&faults).into_owned();
    let faults: Vec<_> = faults.lines().filter(|line| line.contains("shadowslice.service:")).collect();
    let faults: Vec<_> = faults.iter().filter(|line| !line.contains("is not executable")).collect();
    assert!(faults.is_empty(), "{faults:?}");
}

/// Checks that `systemctl reload` runs the reload command. If the unit sent SIGHUP instead,
/// `systemctl` would report success even after a failed reload.
#[test]
fn a_reload_of_the_service_fails_if_the_command_fails() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    let reload = unit.lines().find_map(|line| line.strip_prefix("ExecReload="));
    assert_eq!(reload, Some("/usr/bin/shadowslice reload"));
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    assert!(start.is_some_and(|start| start.starts_with("/usr/bin/shadowslice serve ")), "{start:?}");
}

/// Checks that the packages provide the locale en_US.UTF-8. Most text models name this locale, and
/// ONNX Runtime needs the locale that a model names.
#[test]
fn packages_provide_the_locale_of_text_models() {
    let packaging = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging");
    let image = std::fs::read_to_string(format!("{packaging}/Dockerfile")).unwrap();
    let last = image.rsplit("\nFROM ").next().unwrap();
    assert!(last.contains(" locales ") && last.contains("locale-gen en_US.UTF-8"), "{last}");
    let package = std::fs::read_to_string(format!("{packaging}/deb")).unwrap();
    assert!(package.contains("\nSuggests: locales\n"), "{package}");
}
