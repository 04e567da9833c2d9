//! Tests of a worker whose model sleeps, on an emulated GPU.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use shadowslice_shared::batch::{Command, RunFailure, WorkerMessage};
use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
};
use shadowslice_shared::units::Sms;
use support::{Setup, Worker, echo, echo_warm_up, fp32, serving, strings};

const WEIGHTS: u64 = 470 << 20;

/// Starts a worker whose weights come back in about 10 ms.
fn sleeper() -> Worker {
    let memory = ProcessMemory { context: 0, weights: WEIGHTS, activations: 0 };
    let rows = vec![ExecutionRow { batch: 1, ms: vec![0.1] }];
    let profile = Profile {
        source: ProfileSource::Illustrative,
        memory,
        start: StartTimes::default(),
        bandwidth: 0.0,
        shapes: Default::default(),
        execution: Execution::new(vec![Sms(1)], rows).unwrap(),
    };
    let mut setup = Setup::new(echo());
    setup.profile = Some(profile);
    serving(setup, &echo_warm_up())
}

#[test]
fn batches_that_follow_the_order_to_wake_run_when_the_weights_are_back() {
    let worker = sleeper();
    let batch = worker.batch(&[&[4], &[1]], &[(1, vec![fp32(&[1.0; 4]), strings(&[b"s"])])]);
    let awake = worker.run(&batch).unwrap();
    for pin in [true, false] {
        worker.command(&Command::Sleep { pin });
        let WorkerMessage::Asleep(Ok(slept)) = worker.report() else { panic!("it does not sleep") };
        assert_eq!((slept.released, slept.pinned), (WEIGHTS, if pin { WEIGHTS } else { 0 }));
        worker.command(&Command::Wake);
        worker.send(&batch);
        let WorkerMessage::Awake(Ok(took_us)) = worker.report() else { panic!("it does not wake") };
        assert!((10_000..10_000_000).contains(&took_us), "{took_us} us for {WEIGHTS} bytes");
        assert_eq!(worker.read(worker.receive()).unwrap(), awake);
    }
    assert!(worker.stop().success());
}

#[test]
fn a_batch_without_an_order_to_wake_does_not_run() {
    let worker = sleeper();
    let batch = worker.batch(&[&[4], &[1]], &[(1, vec![fp32(&[1.0; 4]), strings(&[b"s"])])]);
    worker.command(&Command::Sleep { pin: false });
    assert!(matches!(worker.report(), WorkerMessage::Asleep(Ok(_))));
    assert_eq!(worker.run(&batch), Err(RunFailure::Asleep));
    worker.command(&Command::Wake);
    assert!(matches!(worker.report(), WorkerMessage::Awake(Ok(_))));
    assert!(worker.run(&batch).is_ok());
    assert!(worker.stop().success());
}

#[test]
fn the_program_exports_the_functions_that_it_replaces() {
    let program = env!("CARGO_BIN_EXE_shadowslice-worker");
    let listed = std::process::Command::new("nm").args(["-D", "--defined-only", program]).output().unwrap();
    let symbols = String::from_utf8(listed.stdout).unwrap();
    for name in ["cudaMalloc", "cudaFree", "cublasCreate_v2", "cublasDestroy_v2"] {
        assert!(symbols.lines().any(|line| line.ends_with(&format!(" T {name}"))), "{name} is not exported");
    }
}
