//! Tests of the worker on a real GPU. They run with or without MPS, depending on the environment.
//! The tests in `onnxruntime.rs` can also run on a GPU: `SHADOWSLICE_TEST_DEVICE=cuda cargo test
//! --package shadowslice-worker -- --include-ignored`.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use shadowslice_shared::batch::{Batch, BatchRequest, Extent, RunFailure};
use shadowslice_shared::boot::{PartitionSpec, WarmUp};
use shadowslice_shared::groups::{Division, Groups};
use support::onnx::{Node, Value, element, model, weights};
use support::{Setup, fp32, on_gpu, onnxruntime, serving};

/// Writes a model that multiplies rows of 256 values by the same matrix 40 times. Each
/// multiplication rotates the values by one position.
fn rotator(folder: &tempfile::TempDir) -> std::path::PathBuf {
    let mut matrix = vec![0.0_f32; 256 * 256];
    (0..256).for_each(|row| matrix[row * 256 + (row + 1) % 256] = 1.0);
    let [x, y] = ["x", "y40"].map(|name| Value::tensor(name, element::FLOAT, &[-1, 256]));
    let name = |step: usize| -> &'static str { if step == 0 { "x" } else { format!("y{step}").leak() } };
    let node = |step| Node("MatMul", vec![name(step), "w"].leak(), vec![name(step + 1)].leak());
    let nodes: Vec<Node> = (0..40).map(node).collect();
    let path = folder.path().join("rotator.onnx");
    std::fs::write(&path, model(&nodes, &[weights("w", &[256, 256], &matrix)], &[x], &[y])).unwrap();
    path
}

fn row(number: u32) -> Vec<f32> {
    (0..256).map(|place| (number * 7 + place) as f32 % 61.0).collect()
}

fn rotated(row: &[f32]) -> Vec<f32> {
    (0..256).map(|place| row[(place + 256 - 40) % 256]).collect()
}

fn warm_up(sizes: &[u32]) -> WarmUp {
    let (sizes, shapes, values) = (sizes.to_vec(), vec![vec![256]], vec![None]);
    WarmUp { batched: true, sizes, shapes, values, ..WarmUp::default() }
}

#[test]
#[ignore = "needs a GPU"]
fn two_batches_in_flight_get_their_own_answers_for_a_thousand_rounds() {
    assert!(on_gpu(), "set SHADOWSLICE_TEST_DEVICE=cuda");
    let folder = tempfile::tempdir().unwrap();
    let warm_up = warm_up(&[1, 2, 4, 8]);
    let worker = serving(Setup::new(onnxruntime(rotator(&folder))), &warm_up);
    let rows = |number: u32| 1 + number % 3;
    let values = |number: u32| row(number).repeat(rows(number) as usize);
    let send = |number: u32| {
        // Each slot has its own part of the slab, so a new batch does not overwrite data that the
        // previous batch still reads.
        let slot = (number % 2) as u8;
        let (offset, bytes) = (u64::from(slot) << 16, fp32(&values(number)));
        worker.requests.write(offset, &bytes).unwrap();
        let inputs = vec![Extent { offset, len: bytes.len() as u64 }];
        let requests = vec![BatchRequest { rows: rows(number), inputs }];
        let (id, groups) = (u64::from(number), Groups::WHOLE);
        let (shapes, optional) = (vec![vec![256]], Vec::new());
        worker.send(&Batch { id, slot, sent_ns: 0, groups, shapes, requests, optional });
    };
    send(0);
    send(1);
    for number in 0..1000_u32 {
        let answer = worker.receive();
        assert_eq!(answer.id, u64::from(number));
        assert!(answer.execution_us > 0);
        let outputs = worker.read(answer).unwrap();
        send(number + 2);
        let wanted = row(number);
        assert_eq!(outputs[0].1, [fp32(&rotated(&wanted).repeat(rows(number) as usize))], "batch {number}");
    }
    worker.receive();
    worker.receive();
    assert!(worker.stop().success());
}

fn probe() -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker")).arg("--probe").output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the partition with which a worker starts on this host's GPU.
fn partitioned(groups: Groups) -> PartitionSpec {
    let division: Division = serde_json::from_value(probe()["division"].clone()).unwrap();
    PartitionSpec { division, groups }
}

#[test]
#[ignore = "needs a GPU"]
fn a_thousand_batches_on_changing_partitions_are_answered_rightly_and_take_no_memory() {
    assert!(on_gpu(), "set SHADOWSLICE_TEST_DEVICE=cuda");
    let folder = tempfile::tempdir().unwrap();
    let warm_up = warm_up(&[1, 2, 4, 8]);
    let partition = partitioned(Groups::first(3));
    let count = partition.division.count();
    let setup = Setup { partition: Some(partition), ..Setup::new(onnxruntime(rotator(&folder))) };
    let worker = serving(setup, &warm_up);
    let run = |number: u32, groups: Groups| {
        let bytes = fp32(&row(number).repeat(8));
        let batch = Batch { groups, ..worker.batch(&[&[256]], &[(8, vec![bytes])]) };
        let outputs = worker.run(&batch).unwrap();
        assert_eq!(outputs[0].1, [fp32(&rotated(&row(number)).repeat(8))], "batch {number} on {groups}");
    };
    run(0, Groups::first(3));
    let free = || probe()["memory_free"].as_i64().unwrap();
    let mut free_early = 0;
    for number in 0..1000_u32 {
        if number == 100 {
            free_early = free();
        }
        // Even numbers use partitions that start at the first group, on which the worker has passed
        // the proof. Odd numbers use partitions that start at the second group.
        let (length, start) = (number as usize % (count - 1) + 1, number as usize % 2);
        let groups: Groups = (start..(start + length).min(count)).collect();
        worker.prepare(groups).unwrap();
        run(number, groups);
        run(number + 1, Groups::WHOLE);
        worker.command(&shadowslice_shared::batch::Command::Forget(groups));
    }
    let kept = free_early - free();
    assert!(kept <= 0, "nine hundred changes keep {kept} B of the GPU's memory");
    let scattered = worker.prepare([0, 2].into_iter().collect()).unwrap_err();
    assert!(scattered.contains("not adjacent"), "{scattered}");
    let unready = Batch { groups: Groups::first(2), ..worker.batch(&[&[256]], &[(1, vec![fp32(&row(1))])]) };
    let refused = worker.run(&unready).unwrap_err();
    assert!(matches!(&refused, RunFailure::BadBatch(why) if why.contains("is not ready")), "{refused}");
    assert!(worker.stop().success());
}

/// The number of samples from which each time is computed.
const TIMES: usize = 21;

/// A process that keeps groups of the GPU busy with kernels that take 3 ms each.
struct Holding(Child);

impl Holding {
    fn of(groups: Groups) -> Self {
        let mut holder = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker"));
        holder.args(["--probe", "hold"]).arg(groups.bits().to_string());
        let mut child = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "holding");
        Self(child)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

/// Tests each kind of work that could run on SMs outside the partition: kernels, a single copy, and
/// a memory set next to a copy.
#[test]
#[ignore = "needs a GPU and MPS"]
fn nothing_of_a_batch_runs_on_sms_that_it_was_not_given() {
    assert!(on_gpu(), "set SHADOWSLICE_TEST_DEVICE=cuda");
    let folder = tempfile::tempdir().unwrap();
    let [x, y] = ["x", "y"].map(|name| Value::tensor(name, element::FLOAT, &[-1, 256]));
    let mask = Value::tensor("mask", element::BOOL, &[-1, 256]);
    let write = |name: &str, bytes: Vec<u8>| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let copies =
        model(&[Node("Identity", &["x"], &["y"])], &[], std::slice::from_ref(&x), std::slice::from_ref(&y));
    let fills = model(&[Node("Dropout", &["x"], &["y", "mask"])], &[], &[x], &[y, mask]);
    let models = [
        ("kernels", rotator(&folder)),
        ("copy", write("copy.onnx", copies)),
        ("fill", write("fill.onnx", fills)),
    ];
    let own = Groups::first(3);
    for (what, path) in models {
        let partition = partitioned(own);
        let all = Groups::first(partition.division.count());
        let others: Groups = all.iter().filter(|&group| !own.contains(group)).collect();
        let warm_up = warm_up(&[8]);
        let worker = serving(Setup { partition: Some(partition), ..Setup::new(onnxruntime(path)) }, &warm_up);
        worker.prepare(own).unwrap();
        let execution_us = || {
            let mut times: Vec<u64> = (0..TIMES as u32)
                .map(|number| {
                    let requests = [(8, vec![fp32(&row(number).repeat(8))])];
                    worker.send(&Batch { groups: own, ..worker.batch(&[&[256]], &requests) });
                    worker.receive().execution_us
                })
                .collect();
            times.sort_unstable();
            times[TIMES / 2]
        };
        execution_us();
        let alone = execution_us();
        let beside = |groups| {
            let _holding = Holding::of(groups);
            execution_us()
        };
        let [apart, together, everywhere] = [others, own, all].map(beside);
        let times =
            format!("{what}: {alone} us alone, {apart} apart, {together} together, {everywhere} all held");
        println!("{times}");
        let waits = |us: u64| us > alone + 1000;
        assert!(!waits(apart), "{times}: something of it waits for SMs of others");
        // The second condition allows for work that needs no SM and therefore never waits for an
        // SM.
        assert!(waits(together) || !waits(everywhere), "{times}: something of it runs elsewhere");
        assert!(worker.stop().success());
    }
}
