//! The real program on a real GPU, by itself or under MPS as the environment says. The tests of ONNX Runtime run there
//! too: `SHADOWSLICE_TEST_DEVICE=cuda cargo test --package shadowslice-worker -- --include-ignored`.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::process::Command;

use shadowslice_shared::batch::{Batch, BatchRequest, Extent, RunFailure, Unprepared};
use shadowslice_shared::boot::{Partitioned, WarmUp};
use shadowslice_shared::groups::{Division, Groups, MAX_PARTITIONS};
use support::onnx::{Node, Value, element, model, weights};
use support::{Setup, fp32, on_gpu, onnxruntime, serving};

/// Rows of 256, 40 times multiplied with a matrix that turns them by one place.
fn turner(folder: &tempfile::TempDir) -> std::path::PathBuf {
    let mut matrix = vec![0.0_f32; 256 * 256];
    (0..256).for_each(|row| matrix[row * 256 + (row + 1) % 256] = 1.0);
    let [x, y] = ["x", "y40"].map(|name| Value::tensor(name, element::FLOAT, &[-1, 256]));
    let name = |step: usize| -> &'static str { if step == 0 { "x" } else { format!("y{step}").leak() } };
    let node = |step| Node("MatMul", vec![name(step), "w"].leak(), vec![name(step + 1)].leak());
    let nodes: Vec<Node> = (0..40).map(node).collect();
    let path = folder.path().join("turner.onnx");
    std::fs::write(&path, model(&nodes, &[weights("w", &[256, 256], &matrix)], &[x], &[y])).unwrap();
    path
}

fn row(number: u32) -> Vec<f32> {
    (0..256).map(|place| (number * 7 + place) as f32 % 61.0).collect()
}

fn turned(row: &[f32]) -> Vec<f32> {
    (0..256).map(|place| row[(place + 256 - 40) % 256]).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn two_batches_in_flight_get_their_own_answers_for_a_thousand_rounds() {
    assert!(on_gpu(), "set SHADOWSLICE_TEST_DEVICE=cuda");
    let folder = tempfile::tempdir().unwrap();
    let warm_up = WarmUp { batched: true, sizes: vec![1, 2, 4, 8], shapes: vec![vec![256]] };
    let worker = serving(Setup::new(onnxruntime(turner(&folder))), &warm_up);
    let rows = |number: u32| 1 + number % 3;
    let values = |number: u32| row(number).repeat(rows(number) as usize);
    let send = |number: u32| {
        // Each slot has a place of its own in the slab, so that no batch writes where another is read.
        let slot = (number % 2) as u8;
        let (offset, bytes) = (u64::from(slot) << 16, fp32(&values(number)));
        worker.requests.write(offset, &bytes).unwrap();
        let inputs = vec![Extent { offset, len: bytes.len() as u64 }];
        let requests = vec![BatchRequest { rows: rows(number), inputs }];
        let (id, groups) = (u64::from(number), Groups::WHOLE);
        worker.send(&Batch { id, slot, sent_ns: 0, groups, shapes: vec![vec![256]], requests });
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
        assert_eq!(outputs[0].1, [fp32(&turned(&wanted).repeat(rows(number) as usize))], "batch {number}");
    }
    worker.receive();
    worker.receive();
    assert!(worker.stop().success());
}

fn probe() -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker")).arg("--probe").output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A partition to begin with, on whatever GPU this is.
fn partitioned(groups: Groups) -> Partitioned {
    let division: Division = serde_json::from_value(probe()["division"].clone()).unwrap();
    Partitioned { division, groups }
}

#[test]
#[ignore = "needs a GPU"]
fn a_thousand_batches_on_changing_partitions_are_answered_rightly_and_take_no_memory() {
    assert!(on_gpu(), "set SHADOWSLICE_TEST_DEVICE=cuda");
    let folder = tempfile::tempdir().unwrap();
    let warm_up = WarmUp { batched: true, sizes: vec![1, 2, 4, 8], shapes: vec![vec![256]] };
    let partition = partitioned(Groups::first(3));
    let count = partition.division.count();
    let setup = Setup { partition: Some(partition), ..Setup::new(onnxruntime(turner(&folder))) };
    let worker = serving(setup, &warm_up);
    let run = |number: u32, groups: Groups| {
        let bytes = fp32(&row(number).repeat(8));
        let batch = Batch { groups, ..worker.batch(&[&[256]], &[(8, vec![bytes])]) };
        let outputs = worker.run(&batch).unwrap();
        assert_eq!(outputs[0].1, [fp32(&turned(&row(number)).repeat(8))], "batch {number} on {groups}");
    };
    run(0, Groups::first(3));
    let free = || probe()["memory_free"].as_i64().unwrap();
    let mut free_early = 0;
    for number in 0..1000_u32 {
        if number == 100 {
            free_early = free();
        }
        // Those that were proven, and as many others.
        let (length, start) = (number as usize % (count - 1) + 1, number as usize % 2);
        let groups: Groups = (start..(start + length).min(count)).collect();
        worker.prepare(groups).unwrap();
        run(number, groups);
        run(number + 1, Groups::WHOLE);
        worker.command(&shadowslice_shared::batch::Command::Forget(groups));
    }
    let kept = free_early - free();
    assert!(kept <= 0, "nine hundred changes keep {kept} B of the GPU's memory");
    let scattered = (2..=MAX_PARTITIONS).map(|group| [0, group % count].into_iter().collect());
    let refused = scattered.map(|groups: Groups| {
        let prepared = worker.prepare(groups);
        worker.command(&shadowslice_shared::batch::Command::Forget(groups));
        prepared
    });
    assert_eq!(refused.filter_map(Result::err).next(), Some(Unprepared::Exhausted));
    let unready = Batch { groups: Groups::first(2), ..worker.batch(&[&[256]], &[(1, vec![fp32(&row(1))])]) };
    let refused = worker.run(&unready).unwrap_err();
    assert!(matches!(&refused, RunFailure::BadBatch(why) if why.contains("is not ready")), "{refused}");
    assert!(worker.stop().success());
}
