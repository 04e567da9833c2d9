//! Tests that `shadowslice profile` measures the execution times and the memory of the emulated
//! device.

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::cases::{NO_OPERATORS, models_folder};
use shadowslice_tests::home::Home;
use shadowslice_tests::process::ProcessHandle;

/// The execution times of a device, additional arguments, and the rows that the profile must have.
struct ProfileCase {
    table: &'static str,
    arguments: [&'static str; 4],
    rows: [(&'static str, &'static [f64]); 3],
}

#[tokio::test]
async fn the_profile_of_an_emulated_device_is_measured_with_its_knee() {
    let cases = [
        // Batches are not faster on more than 40 SMs than on 40 SMs. The source tree does not
        // contain this profile, so the result cannot be a copy of it.
        ProfileCase {
            table: "{sms: [8, 40, 132], 1: [17.0, 5.5, 5.5], 4: [42.0, 12.25, 12.25]}",
            arguments: ["--shares", "10%,31,100%", "--sms", "132"],
            rows: [("sms:", &[8.0, 40.0, 132.0]), ("1:", &[17.0, 5.5, 5.5]), ("4:", &[42.0, 12.25, 12.25])],
        },
        // The device is too small to be divided into groups, so each share has its own worker.
        ProfileCase {
            table: "{sms: [4, 8], 1: [9.0, 4.5], 4: [21.0, 12.25]}",
            arguments: ["--shares", "50,100", "--sms", "8"],
            rows: [("sms:", &[4.0, 8.0]), ("1:", &[9.0, 4.5]), ("4:", &[21.0, 12.25])],
        },
    ];
    for ProfileCase { table, arguments, rows } in cases {
        let home = Home::new().unwrap();
        let given = format!("{{source: {{kind: illustrative}}, execution_ms: {table}}}");
        let given = home.write("given.yaml", given).unwrap();
        let (model, output) = (models_folder().join("digits.onnx"), home.path().join("found.yaml"));
        let paths = [&model, &given, &output].map(|path| path.to_str().unwrap());
        let files = ["profile", paths[0], "--emulate", paths[1], "--output", paths[2]];
        let sizes = ["--device", "emulated", "--max-batch", "4", "--runs", "5"];
        let arguments = [&files[..], &sizes, &arguments].concat();
        let profile = home.command(&arguments).unwrap().output().await.unwrap();
        assert!(profile.status.success(), "{}", String::from_utf8_lossy(&profile.stderr));
        let found = std::fs::read_to_string(&output).unwrap();
        let row = |key: &str| -> Vec<f64> {
            let line = found.lines().find_map(|line| line.trim().strip_prefix(key)).unwrap();
            let list = line.trim().trim_start_matches('[').trim_end_matches(']');
            list.split(',').map(|number| number.trim().parse().unwrap()).collect()
        };
        // The device takes exactly the time in the profile, unless the computation of the answer
        // takes longer. That may happen on a busy host.
        for (key, wanted) in rows {
            assert_eq!(row(key).len(), wanted.len());
            for (found, wanted) in row(key).iter().zip(wanted) {
                assert!((found / wanted - 1.0).abs() < 0.05, "{key} {found} instead of {wanted}");
            }
        }
    }
}

#[tokio::test]
async fn the_reason_is_reported_if_a_model_cannot_be_measured() {
    let home = Home::new().unwrap();
    let junk = home.write("junk.onnx", NO_OPERATORS).unwrap();
    let run = async |arguments: &[&str]| {
        let arguments = [&["profile"], arguments, &["--device", "emulated"]].concat();
        let output = home.command(&arguments).unwrap().output().await.unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let junk = junk.to_str().unwrap();
    let (code, why) = run(&[junk]).await;
    assert!(code == 1 && why.contains("error: cannot measure the model"), "{code} {why}");
    let (code, why) = run(&["/nowhere/model.onnx"]).await;
    assert!(code == 78 && why.contains("error: MODEL: cannot use /nowhere/model.onnx"), "{code} {why}");
    let (code, why) = run(&[junk, "--sms", "1"]).await;
    assert!(code == 78 && why.contains("error: --sms: must be"), "{code} {why}");
    let (code, why) = run(&[junk, "--shares", "0"]).await;
    assert!(code == 64 && why.contains("invalid share 0"), "{code} {why}");
}

#[tokio::test]
async fn dynamic_axes_need_a_shape_which_the_profile_records() {
    let home = Home::new().unwrap();
    let model = models_folder().join("encoder.onnx");
    let model = model.to_str().unwrap();
    let run = async |arguments: &[&str]| {
        let output = home.command(arguments).unwrap().output().await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), said)
    };
    let arguments = ["--device", "emulated", "--max-batch", "1", "--shares", "100", "--runs", "1"];
    let arguments = [&["profile", model], &arguments[..]].concat();
    let (code, _, why) = run(&arguments).await;
    assert_eq!(code, 78, "{why}");
    let example = format!(
        "input_ids [?], attention_mask [?]; give the shape of typical requests, without the batch axis, for example: \
         shadowslice profile {model} --device emulated --shape input_ids=128 --shape attention_mask=128"
    );
    assert!(why.contains(&example), "{why}");
    let shapes = ["--shape", "input_ids=16", "--shape", "attention_mask=16"];
    let (code, profile, why) = run(&[&arguments[..], &shapes].concat()).await;
    assert!(
        code == 0 && profile.contains(r#"shapes: {"attention_mask":[16],"input_ids":[16]}"#),
        "{profile}{why}"
    );
    home.write("profile.yaml", &profile).unwrap();
    let written = |warmup: &str| {
        let text = format!(
            "gpus: [{{device: emulated, sms: 132}}]\nmodels: [{{path: {model}, slo: 1s, profile: profile.yaml, warmup: {warmup}}}]\n"
        );
        home.write("other.yaml", text).unwrap()
    };
    let other = written("{input_ids: [32], attention_mask: [16]}");
    let (code, _, said) = run(&["check", other.to_str().unwrap()]).await;
    let note = "was measured with shape [16] of input input_ids, but `warmup` has [32]";
    assert!(code == 0 && said.contains(note) && !said.contains("input attention_mask"), "{said}");
    let other = written("{input_ids: [16], attention_mask: [16]}");
    let (code, _, said) = run(&["check", other.to_str().unwrap()]).await;
    assert!(code == 0 && !said.contains("was measured with"), "{said}");
}

#[tokio::test]
async fn a_signal_ends_profile_and_its_temporary_files_are_removed() {
    let home = Home::new().unwrap();
    let given = "{source: {kind: illustrative}, execution_ms: {sms: [132], 1: [100.0]}}";
    let given = home.write("given.yaml", given).unwrap();
    let old = home.write("found.yaml", "what was there").unwrap();
    let model = models_folder().join("digits.onnx");
    let [model, given, output] = [&model, &given, &old].map(|path| path.to_str().unwrap());
    let temporary = home.path().join("tmp");
    let left = || std::fs::read_dir(&temporary).unwrap().count();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let arguments = ["profile", model, "--device", "emulated", "--emulate", given, "--output", output];
        let mut command = home.command(&arguments).unwrap();
        let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let process = ProcessHandle::of(child.id().unwrap().try_into().unwrap()).unwrap();
        // The measurement has started once the temporary folders exist.
        let begun = async {
            while left() == 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(home.timeout(), begun).await.expect("profile creates a folder");
        tokio::time::sleep(Duration::from_millis(500)).await;
        process.signal(signal).unwrap();
        let ended = child.wait_with_output().await.unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(1) && said.contains("no profile is written"), "{said}");
        assert_eq!(left(), 0);
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "what was there");
    }
}
