//! Tests of the worker with the emulated engine: boot, proof, batches, and failures.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use nix::sys::socket::{Shutdown, shutdown};
use shadowslice_shared::batch::{Batch, MAX_MESSAGE_BYTES, RunFailure, UNREADABLE};
use shadowslice_shared::boot::{BootCommand, BootRefusal, PartitionSpec, WarmUp};
use shadowslice_shared::contention::{Occupant, SharedGpu};
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
};
use shadowslice_shared::units::Sms;
use support::{
    Setup, Worker, corrupt, echo, echo_warm_up, fp32, reference, reference_file, serving, strings,
};

/// Returns a profile in which a batch of one row takes `ms` milliseconds on `sms` SMs.
fn profile(sms: u32, ms: f64, start: StartTimes) -> Profile {
    let execution = Execution::new(vec![Sms(sms)], vec![ExecutionRow { batch: 1, ms: vec![ms] }]).unwrap();
    Profile {
        source: ProfileSource::Illustrative,
        memory: ProcessMemory::default(),
        start,
        bandwidth: 0.0,
        shapes: Default::default(),
        execution,
    }
}

#[test]
fn started_by_hand_it_names_the_program_to_run() {
    for arguments in [&[][..], &["serve", "x"], &["--boot", "x"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.starts_with("error: ") && stderr.contains("shadowslice serve"), "{stderr}");
    }
}

#[test]
fn without_a_supervisors_descriptors_it_fails() {
    let output = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker")).arg("--boot").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: cannot take over the supervisor's descriptors"), "{stderr}");
}

#[test]
fn batches_are_answered_until_the_socket_closes() {
    let worker = serving(Setup::new(echo()), &echo_warm_up());
    let (one, two) = (fp32(&[1.0, 2.0, 3.0, 4.0]), fp32(&[5.0; 8]));
    let (hello, pair) = (strings(&[b"hello"]), strings(&[b"\xff\x00", b""]));
    let requests = [(1, vec![one.clone(), hello.clone()]), (2, vec![two.clone(), pair.clone()])];
    let batch = worker.batch(&[&[4], &[1]], &requests);
    let answer = worker.run(&batch).unwrap();
    assert_eq!(answer, [(vec![4], vec![one, two]), (vec![1], vec![hello, pair])]);
    assert!(worker.stop().success());
}

#[test]
fn two_batches_in_flight_come_back_in_order_from_their_own_slots() {
    let worker = serving(Setup::new(echo()), &echo_warm_up());
    let mut first = worker.batch(&[&[4], &[1]], &[(1, vec![fp32(&[1.0; 4]), strings(&[b"first"])])]);
    first.id = 1;
    let mut second = first.clone();
    (second.id, second.slot) = (2, 1);
    worker.send(&first);
    worker.send(&second);
    let answers = [worker.receive(), worker.receive()];
    assert_eq!([answers[0].id, answers[1].id], [1, 2]);
    let [first, second] = answers.map(|answer| worker.read(answer).unwrap());
    assert_eq!(first, second);
    assert!(worker.stop().success());
}

#[test]
fn garbage_is_refused_and_harms_nothing() {
    let worker = serving(Setup::new(echo()), &echo_warm_up());
    let good = worker.batch(&[&[4], &[1]], &[(1, vec![fp32(&[1.0; 4]), strings(&[b"s"])])]);
    for garbage in [&b"\xff\xff\xff"[..], &[0; MAX_MESSAGE_BYTES], &vec![0; MAX_MESSAGE_BYTES + 100]] {
        worker.send_bytes(garbage);
        let answer = worker.receive();
        assert!(matches!(answer.result, Err(RunFailure::BadBatch(_))), "{answer:?}");
        assert!(answer.id == UNREADABLE || answer.id == 0);
    }
    let mut lying = good.clone();
    lying.requests[0].inputs[0].offset = u64::MAX - 3;
    assert!(matches!(worker.run(&lying), Err(RunFailure::BadBatch(_))));
    lying.slot = 200;
    assert!(matches!(worker.run(&lying), Err(RunFailure::BadBatch(_))));
    assert!(worker.run(&good).is_ok());
    assert!(worker.stop().success());
}

#[test]
fn an_answer_that_does_not_fit_reports_the_needed_room() {
    let worker = serving(Setup::new(echo()), &echo_warm_up());
    let rows = u32::try_from(support::SLOT_BYTES / 16 + 1).unwrap();
    let large = vec![vec![0; rows as usize * 16], strings(&vec![&b""[..]; rows as usize])];
    let batch = worker.batch(&[&[4], &[1]], &[(rows, large)]);
    let failure = worker.run(&batch).unwrap_err();
    assert!(matches!(failure, RunFailure::AnswerTooLarge { room: support::SLOT_BYTES, .. }), "{failure:?}");
    assert!(worker.stop().success());
}

#[test]
fn the_share_is_read_from_the_environment() {
    for (share, sms) in [(None, 132), (Some("30"), 38), (Some("1"), 2)] {
        let worker = Worker::start(Setup { share, ..Setup::new(echo()) }, &reference_file());
        assert_eq!(worker.load().unwrap().sms, Sms(sms));
    }
    let worker = Worker::start(Setup { share: Some("much"), ..Setup::new(echo()) }, &reference_file());
    let refusal = worker.load().unwrap_err();
    assert!(matches!(&refusal, BootRefusal::Setup(why) if why.contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")));
    assert_eq!(worker.end().0.code(), Some(1));
}

#[test]
fn execution_takes_what_the_profile_says_and_the_seat_is_left_afterwards() {
    let profile = Some(profile(2, 3.0, StartTimes::default()));
    let worker = serving(Setup { profile, seat: 5, ..Setup::new(echo()) }, &echo_warm_up());
    let batch = worker.batch(&[&[4], &[1]], &[(2, vec![fp32(&[1.0; 8]), strings(&[b"", b""])])]);
    worker.send(&batch);
    let answer = worker.receive();
    assert_eq!(answer.execution_us, 6_000, "two rows, in proportion");
    // The worker leaves its seat only after it has found that no further batch is waiting.
    while worker.pool.sms_in_use() != 0 {
        std::thread::yield_now();
    }
    assert!(worker.stop().success());
}

#[test]
fn others_that_execute_slow_a_worker_down() {
    let profile = Some(profile(132, 5.0, StartTimes::default()));
    let worker = serving(Setup { profile, ..Setup::new(echo()) }, &echo_warm_up());
    let batch = worker.batch(&[&[4], &[1]], &[(1, vec![fp32(&[1.0; 4]), strings(&[b""])])]);
    worker.pool.occupy(9, Some(Occupant { turn: 5e-6, ..Occupant::anywhere(Sms(132)) }));
    worker.send(&batch);
    let took = worker.receive().execution_us;
    assert!(took.abs_diff(10_000) <= 1, "each kernel of 5 us waits for one as long: {took} us");
    worker.pool.occupy(9, None);
    worker.send(&batch);
    assert_eq!(worker.receive().execution_us, 5_000, "no other worker executes");
    assert!(worker.stop().success());
}

#[test]
fn starting_takes_at_least_what_the_profile_says() {
    let [process, load, warm] = [30, 50, 70].map(Duration::from_millis);
    let setup =
        Setup { profile: Some(profile(2, 0.1, StartTimes { process, load, warm })), ..Setup::new(echo()) };
    let reference = reference(&setup.engine, &echo_warm_up());
    let worker = Worker::start(setup, &reference);
    let begun = std::time::Instant::now();
    worker.load().unwrap();
    assert!(begun.elapsed() >= process + load);
    let begun = std::time::Instant::now();
    worker.warm(echo_warm_up()).unwrap();
    assert!(begun.elapsed() >= warm);
    assert!(worker.stop().success());
}

#[test]
fn a_supervisor_that_vanishes_ends_the_worker_quietly_in_every_phase() {
    let slow = || {
        let for_ever = Duration::from_secs(100_000);
        let start = StartTimes { process: for_ever, load: for_ever, warm: for_ever };
        Setup { profile: Some(profile(2, 1.0, start)), ..Setup::new(echo()) }
    };
    let phases: [fn(&Worker); 3] = [
        |_| {},
        Worker::order_load,
        |worker| {
            worker.load().unwrap();
        },
    ];
    for (phase, setup) in phases.into_iter().zip([slow(), slow(), Setup::new(echo())]) {
        let worker = Worker::start(setup, &reference_file());
        phase(&worker);
        let (status, stderr) = worker.abandon();
        assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
    }
}

#[test]
fn a_wrong_answer_is_refused() {
    let file = reference(&echo(), &echo_warm_up());
    corrupt(&file);
    let worker = Worker::start(Setup::new(echo()), &file);
    worker.load().unwrap();
    let refusal = worker.warm(echo_warm_up()).unwrap_err();
    assert!(matches!(&refusal, BootRefusal::Proof { size: 8, why } if why.contains("`t`")), "{refusal:?}");
    assert_eq!(worker.end().0.code(), Some(1));
}

#[test]
fn a_worker_that_nobody_waits_for_proves_nothing() {
    let file = reference(&echo(), &echo_warm_up());
    corrupt(&file);
    let worker = Worker::start(Setup::new(echo()), &file);
    worker.load().unwrap();
    shutdown(worker.socket.as_raw_fd(), Shutdown::Write).unwrap();
    worker.order(BootCommand::Warm(echo_warm_up()));
    assert!(worker.says().is_err(), "it has not come to what it would refuse");
    assert!(worker.end().0.success());
}

#[test]
fn missing_damaged_or_foreign_reference_answers_are_refused() {
    let missing = reference_file();
    let damaged = reference_file();
    damaged.write_all_at(&[0xff; 100], 0).unwrap();
    let fewer = WarmUp { sizes: vec![1], ..echo_warm_up() };
    let foreign = reference(&echo(), &fewer);
    for file in [missing, damaged, foreign] {
        let worker = Worker::start(Setup::new(echo()), &file);
        worker.load().unwrap();
        let refusal = worker.warm(echo_warm_up()).unwrap_err();
        assert!(matches!(refusal, BootRefusal::Setup(_)), "{refusal:?}");
        assert_eq!(worker.end().0.code(), Some(1));
    }
}

#[test]
fn a_warm_up_of_another_number_of_inputs_is_refused() {
    let file = reference(&echo(), &echo_warm_up());
    let worker = Worker::start(Setup::new(echo()), &file);
    worker.load().unwrap();
    let refusal = worker.warm(WarmUp { shapes: vec![vec![4]], ..echo_warm_up() }).unwrap_err();
    assert!(matches!(refusal, BootRefusal::Setup(_)), "{refusal:?}");
}

/// Starts a worker whose share is a partition of a GPU with 132 SMs. A batch of one row takes 10 ms
/// on 40 SMs.
fn partitioned() -> Worker {
    let division = Division::of(Sms(132)).unwrap();
    let partition = PartitionSpec { division, groups: Groups::first(5) };
    let profile = Some(profile(40, 10.0, StartTimes::default()));
    serving(Setup { profile, partition: Some(partition), ..Setup::new(echo()) }, &echo_warm_up())
}

#[test]
fn a_partition_is_in_force_with_the_batch_that_names_it() {
    let worker = partitioned();
    let request = (1, vec![fp32(&[1.0; 4]), strings(&[b"one"])]);
    let on = |groups| Batch { groups, ..worker.batch(&[&[4], &[1]], std::slice::from_ref(&request)) };
    let took = |groups| {
        worker.send(&on(groups));
        let answer = worker.receive();
        assert!(answer.result.is_ok());
        answer.execution_us
    };
    let far: Groups = [3, 9, 10, 11, 12].into_iter().collect();
    for (groups, us) in [(Groups::first(5), 10_000), (Groups::first(2), 25_000), (far, 10_000)] {
        assert_eq!(worker.prepare(groups), Ok(()));
        assert_eq!(took(groups), us, "{groups}");
    }
    // A neighbour on the first two groups slows down batches on these groups. It hardly affects
    // batches on other groups.
    let neighbour = SharedGpu::new(Sms(132)).occupant(Groups::first(2));
    worker.pool.occupy(9, Some(Occupant { turn: 5e-6, ..neighbour }));
    let (beside, apart) = (took(Groups::first(2)), took(far));
    // The first two groups: each of the 2,000 kernels waits 5 us for the neighbour. The other
    // groups: the neighbour keeps 16 of the 132 SMs busy, which slows down the batch only slightly.
    let elsewhere = (10_000.0 * (1.0 + 0.2 * 16.0 / 132.0)) as u64;
    assert!(beside.abs_diff(35_000) <= 1 && apart.abs_diff(elsewhere) <= 1, "{beside} and {apart} us");
    assert!(worker.stop().success());
}
