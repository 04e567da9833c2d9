//! The real program on a real GPU, by itself or under MPS as the environment says. The tests of ONNX Runtime run there
//! too: `SHADOWSLICE_TEST_DEVICE=cuda cargo test --package shadowslice-worker -- --include-ignored`.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use shadowslice_shared::batch::{Batch, BatchRequest, Extent};
use shadowslice_shared::boot::WarmUp;
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
        worker.send(&Batch { id: u64::from(number), slot, sent_ns: 0, shapes: vec![vec![256]], requests });
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
