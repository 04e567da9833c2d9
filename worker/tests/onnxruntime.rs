//! Tests of the worker with ONNX Runtime: all datatypes, real arithmetic, and models that cannot
//! serve.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::slice::from_ref;

use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::boot::{BootRefusal, EngineSpec, WarmUp, WorkerPurpose};
use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
};
use shadowslice_shared::tensor::{Datatype, TensorSpec};
use shadowslice_shared::units::Sms;
use support::onnx::{Node, Value, element, model, weights};
use support::{
    Setup, Worker, fp32, library, on_gpu, onnxruntime, reference, reference_file, serving, strings,
};
use tempfile::TempDir;

/// The file of a model in a temporary folder. Dropping this value removes the folder.
struct ModelFile {
    _folder: TempDir,
    path: PathBuf,
}

fn file(bytes: &[u8]) -> ModelFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, bytes).unwrap();
    ModelFile { _folder: folder, path }
}

fn warm_up(shapes: &[&[i64]]) -> WarmUp {
    WarmUp {
        batched: true,
        sizes: vec![1, 4],
        shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
        values: vec![None; shapes.len()],
        ..WarmUp::default()
    }
}

fn identity(element: u64, shape: &[i64]) -> Vec<u8> {
    let [x, y] = ["x", "y"].map(|name| Value::tensor(name, element, shape));
    model(&[Node("Identity", &["x"], &["y"])], &[], &[x], &[y])
}

/// Returns a model that multiplies rows of 2 values by a matrix and adds one.
fn linear(matrix: [f32; 4]) -> Vec<u8> {
    let [x, y] = ["x", "y"].map(|name| Value::tensor(name, element::FLOAT, &[-1, 2]));
    let constants = [weights("w", &[2, 2], &matrix), weights("b", &[2], &[1.0, 1.0])];
    let nodes = [Node("MatMul", &["x", "w"], &["xw"]), Node("Add", &["xw", "b"], &["y"])];
    model(&nodes, &constants, &[x], &[y])
}

fn refused(engine: EngineSpec) -> BootRefusal {
    let worker = Worker::start(Setup::new(engine), &reference_file());
    let refusal = worker.load().unwrap_err();
    assert_eq!(worker.end().0.code(), Some(1));
    refusal
}

#[test]
fn every_datatype_passes_alone_and_stacked() {
    let elements = [
        (Datatype::Bool, element::BOOL),
        (Datatype::Uint8, element::UINT8),
        (Datatype::Uint16, element::UINT16),
        (Datatype::Uint32, element::UINT32),
        (Datatype::Uint64, element::UINT64),
        (Datatype::Int8, element::INT8),
        (Datatype::Int16, element::INT16),
        (Datatype::Int32, element::INT32),
        (Datatype::Int64, element::INT64),
        (Datatype::Fp16, element::FLOAT16),
        (Datatype::Bf16, element::BFLOAT16),
        (Datatype::Fp32, element::FLOAT),
        (Datatype::Fp64, element::DOUBLE),
        (Datatype::Bytes, element::STRING),
    ];
    assert_eq!(elements.map(|(datatype, _)| datatype), Datatype::ALL);
    for (datatype, element) in elements {
        let model = file(&identity(element, &[-1, 3]));
        let engine = onnxruntime(model.path.clone());
        let answers = reference(&engine, &warm_up(&[&[3]]));
        let worker = Worker::start(Setup::new(engine), &answers);
        let loaded = worker.load().unwrap();
        let spec = |name: &str| TensorSpec { name: name.into(), datatype, shape: vec![-1, 3] };
        assert_eq!((loaded.inputs, loaded.outputs), (vec![spec("x")], vec![spec("y")]));
        worker.warm(warm_up(&[&[3]])).unwrap();
        let rows = |rows: u8| match datatype.size() {
            Some(_) if datatype == Datatype::Bool => (0..3 * rows).map(|index| index % 2).collect(),
            Some(size) => (0..3 * rows).flat_map(|index| vec![index; size]).collect(),
            None => strings(&(0..3 * rows).map(|_| &b"\xff\x00 any bytes"[..]).collect::<Vec<_>>()),
        };
        let requests = [(2, vec![rows(2)]), (1, vec![rows(1)]), (3, vec![rows(3)])];
        let stacked = worker.run(&worker.batch(&[&[3]], &requests)).unwrap();
        assert_eq!(stacked, [(vec![3], vec![rows(2), rows(1), rows(3)])], "{datatype}");
        let alone = worker.run(&worker.batch(&[&[3]], &requests[..1])).unwrap();
        assert_eq!(alone, [(vec![3], vec![rows(2)])], "{datatype}");
        assert!(worker.stop().success());
    }
}

#[test]
fn a_model_really_computes_and_each_request_gets_its_rows() {
    let model = file(&linear([1.0, 2.0, 3.0, 4.0]));
    let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up(&[&[2]]));
    let requests = [(1, vec![fp32(&[1.0, 0.0])]), (2, vec![fp32(&[0.0, 1.0, 1.0, 1.0])])];
    let answer = worker.run(&worker.batch(&[&[2]], &requests)).unwrap();
    assert_eq!(answer, [(vec![2], vec![fp32(&[2.0, 3.0]), fp32(&[4.0, 5.0, 5.0, 7.0])])]);
    assert!(worker.stop().success());
}

#[test]
fn several_inputs_and_outputs_keep_their_order() {
    let inputs = [Value::tensor("a", element::INT64, &[-1]), Value::tensor("b", element::STRING, &[-1, 2])];
    let outputs = [Value::tensor("q", element::STRING, &[-1, 2]), Value::tensor("p", element::INT64, &[-1])];
    let nodes = [Node("Identity", &["a"], &["p"]), Node("Identity", &["b"], &["q"])];
    let model = file(&model(&nodes, &[], &inputs, &outputs));
    let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up(&[&[], &[2]]));
    let number = |number: i64| number.to_le_bytes().to_vec();
    let [one, two] = [&[&b"a"[..], b""], &[&b"b"[..], b"c"]].map(|pair| strings(pair));
    let requests = [(1, vec![number(5), one.clone()]), (1, vec![number(6), two.clone()])];
    let answer = worker.run(&worker.batch(&[&[], &[2]], &requests)).unwrap();
    assert_eq!(answer, [(vec![2], vec![one, two]), (vec![], vec![number(5), number(6)])]);
    assert!(worker.stop().success());
}

#[test]
fn booleans_of_any_byte_are_true() {
    let model = file(&identity(element::BOOL, &[-1, 3]));
    let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up(&[&[3]]));
    let requests = [(1, vec![vec![0, 255, 2]]), (1, vec![vec![1, 0, 128]])];
    let stacked = worker.run(&worker.batch(&[&[3]], &requests)).unwrap();
    assert_eq!(stacked, [(vec![3], vec![vec![0, 1, 1], vec![1, 0, 1]])]);
    let alone = worker.run(&worker.batch(&[&[3]], &requests[..1])).unwrap();
    assert_eq!(alone, [(vec![3], vec![vec![0, 1, 1]])]);
    assert!(worker.stop().success());
}

#[test]
fn tensors_without_elements_pass() {
    for element in [element::FLOAT, element::STRING] {
        let model = file(&identity(element, &[-1, -1]));
        let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up(&[&[2]]));
        let empty = worker.run(&worker.batch(&[&[0]], &[(2, vec![vec![]]), (1, vec![vec![]])])).unwrap();
        assert_eq!(empty, [(vec![0], vec![vec![], vec![]])]);
        let no_rows = worker.run(&worker.batch(&[&[2]], &[(0, vec![vec![]])])).unwrap();
        assert_eq!(no_rows, [(vec![2], vec![vec![]])]);
        assert!(worker.stop().success());
    }
}

#[test]
fn a_model_without_a_batch_axis_answers_whole_tensors() {
    let model = file(&identity(element::FLOAT, &[-1, 2]));
    let warm_up = WarmUp {
        batched: false,
        sizes: vec![1],
        shapes: vec![vec![3, 2]],
        values: vec![None],
        ..WarmUp::default()
    };
    let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up);
    let values = fp32(&[1.0; 8]);
    let answer = worker.run(&worker.batch(&[&[4, 2]], &[(1, vec![values.clone()])])).unwrap();
    assert_eq!(answer, [(vec![4, 2], vec![values.clone()])]);
    let two = worker.batch(&[&[2, 2]], &[(1, vec![fp32(&[1.0; 4])]), (1, vec![fp32(&[1.0; 4])])]);
    assert!(matches!(worker.run(&two), Err(RunFailure::BadBatch(_))));
    assert!(worker.stop().success());
}

#[test]
fn an_output_whose_first_axis_is_not_the_batch_is_named() {
    let values =
        [Value::tensor("x", element::FLOAT, &[-1, 2]), Value::tensor("mean", element::FLOAT, &[1, 1])];
    let [x, mean] = values;
    let model = file(&model(&[Node("ReduceMean", &["x"], &["mean"])], &[], &[x], &[mean]));
    let setup = Setup { purpose: WorkerPurpose::Reference, ..Setup::new(onnxruntime(model.path.clone())) };
    let worker = Worker::start(setup, &reference_file());
    worker.load().unwrap();
    let refusal = worker.warm(warm_up(&[&[2]])).unwrap_err();
    let BootRefusal::RowsDepend(why) = refusal else { panic!("{refusal:?}") };
    assert!(why.contains("`mean`") && why.contains("first axis is not the batch"), "{why}");
}

#[test]
fn refusals_of_onnx_runtime_are_passed_on_and_harm_nothing() {
    let model = file(&linear([1.0; 4]));
    let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up(&[&[2]]));
    let wide = worker.batch(&[&[3]], &[(1, vec![fp32(&[1.0; 3])])]);
    let failure = worker.run(&wide).unwrap_err();
    assert!(matches!(&failure, RunFailure::Input(why) if why.contains("dimension")), "{failure:?}");
    let deep = worker.batch(&[&[2, 1, 1]], &[(1, vec![fp32(&[1.0; 2])])]);
    assert!(matches!(worker.run(&deep), Err(RunFailure::Input(_))));
    assert!(worker.run(&worker.batch(&[&[2]], &[(1, vec![fp32(&[1.0; 2])])])).is_ok());
    assert!(worker.stop().success());
}

#[test]
fn strings_that_lie_are_a_bad_batch() {
    let model = file(&identity(element::STRING, &[-1]));
    let worker = serving(Setup::new(onnxruntime(model.path.clone())), &warm_up(&[&[]]));
    let long = vec![200, 0, 0, 0, b'x'];
    for lie in [long, strings(&[b"one", b"two"]), vec![0, 0, 0, 0, 1]] {
        let failure = worker.run(&worker.batch(&[&[]], &[(1, vec![lie])])).unwrap_err();
        assert!(matches!(failure, RunFailure::BadBatch(_)), "{failure:?}");
    }
    assert!(worker.run(&worker.batch(&[&[]], &[(1, vec![strings(&[b"one"])])])).is_ok());
    assert!(worker.stop().success());
}

#[test]
fn a_model_that_computes_something_else_is_refused() {
    let [right, wrong] = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.5]].map(|matrix| file(&linear(matrix)));
    let answers = reference(&onnxruntime(right.path.clone()), &warm_up(&[&[2]]));
    let worker = Worker::start(Setup::new(onnxruntime(wrong.path.clone())), &answers);
    worker.load().unwrap();
    let refusal = worker.warm(warm_up(&[&[2]])).unwrap_err();
    assert!(matches!(&refusal, BootRefusal::Proof { size: 1, why } if why.contains("`y`")), "{refusal:?}");
    assert_eq!(worker.end().0.code(), Some(1));
}

#[test]
fn real_answers_take_as_long_as_the_profile_says() {
    // This test needs an emulated device. On a real GPU, the profile does not determine the
    // duration of a batch.
    if on_gpu() {
        return;
    }
    let model = file(&linear([1.0; 4]));
    let execution = Execution::new(vec![Sms(2)], vec![ExecutionRow { batch: 1, ms: vec![200.0] }]).unwrap();
    let (source, memory, start) =
        (ProfileSource::Illustrative, ProcessMemory::default(), StartTimes::default());
    let profile =
        Some(Profile { source, memory, start, bandwidth: 0.0, shapes: Default::default(), execution });
    let setup = Setup { profile, ..Setup::new(onnxruntime(model.path.clone())) };
    let worker = serving(setup, &warm_up(&[&[2]]));
    worker.send(&worker.batch(&[&[2]], &[(1, vec![fp32(&[1.0; 2])])]));
    assert_eq!(worker.receive().execution_us, 200_000);
    assert!(worker.stop().success());
}

#[test]
fn a_file_that_is_not_a_library_is_refused() {
    let model = file(&identity(element::FLOAT, &[-1, 3]));
    let with = |library: &str| EngineSpec::OnnxRuntime {
        library: library.into(),
        path: model.path.clone(),
        threads: 1,
        providers: vec![],
        optimised: None,
    };
    for library in ["/nowhere/libonnxruntime.so", model.path.to_str().unwrap(), "libc.so.6"] {
        let refusal = refused(with(library));
        assert!(matches!(&refusal, BootRefusal::Library(why) if why.contains(library)), "{refusal:?}");
    }
}

#[test]
fn a_model_that_cannot_be_served_is_refused_and_named() {
    let x = Value::tensor("x", element::FLOAT, &[-1, 3]);
    let sequence = model(
        &[Node("SequenceConstruct", &["x"], &["list"])],
        &[],
        from_ref(&x),
        &[Value::sequence("list", element::FLOAT, &[-1, 3])],
    );
    let unknown = model(&[Node("NoSuchOperator", &["x"], &["y"])], &[], from_ref(&x), from_ref(&x));
    let y = Value::tensor("y", element::FLOAT, &[-1, 3]);
    let any_rank = Value::of_any_rank("z", element::FLOAT);
    let any_rank = model(&[Node("Add", &["x", "z"], &["y"])], &[], &[x.clone(), any_rank], &[y]);
    let faults = [
        (any_rank, "input `z` has no known rank; export the model with a shape"),
        (b"not a model".to_vec(), "model.onnx"),
        (Vec::new(), "model.onnx"),
        (unknown, "NoSuchOperator"),
        (sequence, "output `list` has the unsupported type Sequence"),
        (identity(element::FLOAT8, &[-1, 3]), "input `x` has the unsupported type Tensor<f8_e4m3fn>"),
    ];
    for (bytes, named) in faults {
        let model = file(&bytes);
        let refusal = refused(onnxruntime(model.path.clone()));
        assert!(matches!(&refusal, BootRefusal::Model(why) if why.contains(named)), "{named}: {refusal:?}");
    }
    let missing = refused(onnxruntime("/nowhere/model.onnx".into()));
    assert!(
        matches!(&missing, BootRefusal::Model(why) if why.contains("/nowhere/model.onnx")),
        "{missing:?}"
    );
}

#[test]
fn an_input_without_axes_is_served() {
    let [x, y] = ["x", "y"].map(|name| Value::tensor(name, element::FLOAT, &[-1, 2]));
    let scale = Value::tensor("scale", element::FLOAT, &[]);
    let model = file(&model(&[Node("Mul", &["x", "scale"], &["y"])], &[], &[x, scale], &[y]));
    let engine = onnxruntime(model.path.clone());
    let worker = Worker::start(Setup::new(engine), &reference_file());
    assert_eq!(worker.load().unwrap().inputs[1].shape, Vec::<i64>::new());
}

#[test]
fn models_that_cannot_take_some_made_up_inputs_are_warmed_up_on_others() {
    // One model divides by its input. The other model uses its input as an index into a table of
    // one row.
    let [x, y] = ["x", "y"].map(|name| Value::tensor(name, element::INT32, &[-1, 2]));
    let divides = model(&[Node("Div", &["x", "x"], &["y"])], &[], from_ref(&x), from_ref(&y));
    let table = weights("table", &[1], &[7.0]);
    let floats = Value::tensor("y", element::FLOAT, &[-1, 2]);
    let looks_up = model(&[Node("Gather", &["table", "x"], &["y"])], &[table], from_ref(&x), &[floats]);
    for bytes in [divides, looks_up] {
        let model = file(&bytes);
        let engine = onnxruntime(model.path.clone());
        let answers = reference(&engine, &warm_up(&[&[2]]));
        let worker = Worker::start(Setup::new(engine), &answers);
        worker.load().unwrap();
        worker.warm(warm_up(&[&[2]])).unwrap();
        assert!(worker.stop().success());
    }
}

/// Returns the output of `shadowslice-worker --probe libraries`, with these fake files in the
/// `LD_LIBRARY_PATH`.
fn loadable(onnxruntime: &Path, fakes: &[&str]) -> serde_json::Value {
    let folder = tempfile::tempdir().unwrap();
    for name in fakes {
        std::fs::write(folder.path().join(name), "not a library").unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker"));
    command.args(["--probe", "libraries"]).arg(onnxruntime);
    command.env("LD_LIBRARY_PATH", folder.path()).env("ORT_DISABLE_TELEMETRY", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn libraries_are_tried_and_a_broken_one_is_named() {
    let found = loadable(&library(), &["libcuda.so.1", "libcudnn.so.9"]);
    for (part, name) in [("libcuda", "libcuda.so.1"), ("cudnn", "libcudnn.so.9")] {
        assert!(found[part]["Err"].as_str().is_some_and(|why| why.contains(name)), "{found}");
    }
    let onnxruntime = &found["onnxruntime"]["Ok"];
    assert!(onnxruntime["minor"].as_u64().is_some_and(|minor| minor >= 24), "{found}");
    let is_missing =
        |part: &str| onnxruntime[part]["Err"].as_str().is_some_and(|why| !why.contains("onnxruntime_src"));
    assert!(is_missing("cuda") && is_missing("tensorrt"), "{found}");
    let text = file(b"not a library");
    let found = loadable(&text.path, &[]);
    let why = found["onnxruntime"]["Err"].as_str();
    assert!(why.is_some_and(|why| why.contains(text.path.to_str().unwrap())), "{found}");
}
