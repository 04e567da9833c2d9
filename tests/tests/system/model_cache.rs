//! Tests of the folder of optimised models: if it is unusable, models start all the same.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};

use shadowslice_tests::cases::models_folder;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{EMULATED, ask, echo, echo_case, home};

fn with_digits() -> Result<Home, HarnessError> {
    home(&[format!("{{path: {}, slo: 200ms}}", models_folder().join("digits.onnx").display())])
}

#[tokio::test]
async fn the_folder_that_the_host_gives_is_private() {
    let home = with_digits().unwrap();
    let folder = home.path().join("cache/private");
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    assert!(folder.join("digits/optimised").is_dir());
    assert!(server.log().contains("optimised models and engines are stored in this folder"));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_needs_no_folder_for_optimised_models() {
    let home = with_digits().unwrap();
    // Not even root can create folders in a file.
    home.write("cache", "").unwrap();
    let private = home.run_dir().join("private");
    DirBuilder::new().recursive(true).mode(0o700).create(&private).unwrap();
    fs::write(private.join("tensorrt"), "").unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let log = server.log();
    assert!(log.contains("cannot store optimised models in a folder"), "{log}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_folder_that_no_user_can_get_does_not_stop_its_model() {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("skipped: only root can run workers as other users");
        return;
    }
    let model = echo("a", "share: {initial: 50%}");
    let yaml = format!("{EMULATED}workers: {{users: 61000-61001}}\nmodels:\n  - {model}\n");
    let home = Home::with_config(&yaml).unwrap();
    fs::create_dir_all(home.path().join("cache/workers")).unwrap();
    home.write("cache/workers/a", "no folder").unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    assert_eq!(ask(server.client(), "a", &echo_case(3), 0.0).await, RequestOutcome::Right);
    let log = server.log();
    assert!(log.contains("cannot create the folder of the model's workers"), "{log}");
    server.stop().await.unwrap();
}
