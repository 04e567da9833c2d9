use super::*;

fn spec(name: &str, datatype: Datatype, shape: &[i64]) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, shape: shape.into() }
}

/// Returns a model of at most four rows with two inputs. The first input has a fixed width.
fn model() -> Metadata {
    Metadata {
        name: "m".into(),
        version: "1".into(),
        platform: "emulated",
        max_batch: 4,
        streams: None,
        inputs: vec![spec("x", Datatype::Fp32, &[-1, 2]), spec("n", Datatype::Uint8, &[-1, -1])],
        optional: Vec::new(),
        outputs: vec![spec("y", Datatype::Fp32, &[-1, 2]), spec("z", Datatype::Fp32, &[-1])],
    }
}

fn whole(datatype: Datatype, shape: &[i64]) -> Metadata {
    Metadata { max_batch: 0, inputs: vec![spec("x", datatype, shape)], ..model() }
}

#[test]
fn optional_inputs_follow_the_others_if_one_is_given() {
    let optional = ["b", "c"].map(|name| spec(name, Datatype::Uint8, &[2])).to_vec();
    let model = Metadata { optional, ..model() };
    assert_eq!(check_inputs(&model, vec![n(3), x(3)]).unwrap().len(), 2);
    let c = || tensor("c", Datatype::Uint8, &[2], &[5, 6]);
    let inputs = check_inputs(&model, vec![c(), x(3), n(3)]).unwrap();
    assert_eq!(
        inputs[2..],
        [RequestInput::left_out(), RequestInput { shape: vec![2], data: vec![5, 6].into() }]
    );
    assert!(refused(&model, vec![x(3), n(3), c(), c()]).contains("given twice"));
    let wrong = tensor("c", Datatype::Uint8, &[3], &[5, 6, 7]);
    let said = refused(&model, vec![x(3), n(3), wrong]);
    assert!(said.ends_with("expected [2], got [3]"), "{said}");
    assert!(refused(&model, vec![c(), x(3)]).contains("input 'n' is missing"));
    assert!(
        refused(&model, vec![tensor("z", Datatype::Uint8, &[1], &[1])])
            .ends_with("whose inputs are: x, n, b, c")
    );
}

fn tensor(name: &str, datatype: Datatype, shape: &[i64], data: &[u8]) -> NamedTensor {
    NamedTensor { name: name.into(), datatype, shape: shape.into(), data: data.to_vec().into(), region: None }
}

fn x(rows: i64) -> NamedTensor {
    tensor("x", Datatype::Fp32, &[rows, 2], &vec![0; usize::try_from(rows).unwrap() * 8])
}

fn n(rows: i64) -> NamedTensor {
    tensor("n", Datatype::Uint8, &[rows, 1], &vec![7; usize::try_from(rows).unwrap()])
}

fn refused(model: &Metadata, tensors: Vec<NamedTensor>) -> String {
    match check_inputs(model, tensors) {
        Err(RequestFailure::Invalid(why)) => why,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn inputs_come_in_the_models_order() {
    let inputs = check_inputs(&model(), vec![n(3), x(3)]).unwrap();
    assert_eq!(inputs.iter().map(|input| input.shape.clone()).collect::<Vec<_>>(), [[3, 2], [3, 1]]);
    assert_eq!(inputs[1].data, vec![7; 3].into());
}

#[test]
fn names_must_be_the_models_and_occur_once() {
    let model = model();
    let why = refused(&model, vec![x(1)]);
    assert_eq!(why, "expected 2 inputs but got 1 inputs for model 'm': input 'n' is missing");
    let why = refused(&model, vec![x(1), n(1), n(1)]);
    assert_eq!(why, "input 'n' is given twice for model 'm'");
    let stranger = tensor(&"s".repeat(100_000), Datatype::Fp32, &[1], &[]);
    let why = refused(&model, vec![stranger]);
    assert!(why.contains("..' for model 'm', whose inputs are: x, n"), "{why}");
    assert!(why.len() < 400);
}

#[test]
fn datatypes_must_be_the_models() {
    let why = refused(&model(), vec![tensor("x", Datatype::Int32, &[1, 2], &[0; 8]), n(1)]);
    assert_eq!(why, "input 'x' has datatype INT32, but model 'm' expects FP32");
}

#[test]
fn shapes_must_fit_the_models() {
    for shape in [&[1, 3][..], &[1], &[1, 2, 1], &[], &[1, -2], &[2, i64::MAX]] {
        let why = refused(&model(), vec![tensor("x", Datatype::Fp32, shape, &[0; 8]), n(1)]);
        assert!(
            why.contains("unexpected shape for input 'x' for model 'm': expected [-1,2], got ["),
            "{why}"
        );
    }
    let why = refused(&model(), vec![tensor("x", Datatype::Fp32, &[1; 1_000_000], &[0; 8])]);
    assert!(why.contains("1000000 axes") && why.len() < 400);
}

#[test]
fn negative_and_huge_dimensions_are_refused_with_any_bytes() {
    for shape in [&[-1, 2][..], &[i64::MIN, 2]] {
        let why = refused(&model(), vec![tensor("x", Datatype::Fp32, shape, &[]), n(1)]);
        assert!(why.contains("negative dimension"), "{why}");
    }
    let open = whole(Datatype::Uint8, &[-1, -1, -1]);
    for shape in [[i64::MAX, i64::MAX, i64::MAX], [1 << 32, 1 << 32, 1], [0, i64::MAX, 1], [1 << 31, 0, 0]] {
        let why = refused(&open, vec![tensor("x", Datatype::Uint8, &shape, &[])]);
        assert!(why.contains("too large"), "{why}");
    }
    assert!(check_inputs(&open, vec![tensor("x", Datatype::Uint8, &[0, 5, 1], &[])]).is_ok());
}

#[test]
fn the_number_of_bytes_must_fit_the_shape() {
    for bytes in [0, 7, 9, 16] {
        let why = refused(&model(), vec![tensor("x", Datatype::Fp32, &[1, 2], &vec![0; bytes]), n(1)]);
        let expected = format!("expected 8 bytes for FP32 of shape [1,2], got {bytes} bytes");
        assert!(why.ends_with(&expected), "{why}");
    }
}

#[test]
fn strings_must_have_the_announced_number_and_lengths() {
    let model = whole(Datatype::Bytes, &[-1]);
    let check = |count, data: &[u8]| check_inputs(&model, vec![tensor("x", Datatype::Bytes, &[count], data)]);
    assert!(check(2, &[1, 0, 0, 0, b'a', 0, 0, 0, 0]).is_ok());
    assert!(check(0, &[]).is_ok());
    for (count, lie) in [
        (1, &[][..]),
        (1, &[1, 0, 0, 0]),
        (1, &[1, 0, 0]),
        (1, &[255, 255, 255, 255, b'a']),
        (1, &[0, 0, 0, 0, 0, 0, 0, 0]),
        (3, &[0, 0, 0, 0, 0, 0, 0, 0]),
        (0, &[0, 0, 0, 0]),
    ] {
        assert!(matches!(check(count, lie), Err(RequestFailure::Invalid(_))), "{count} {lie:?}");
    }
}

#[test]
fn a_bool_is_0_or_1() {
    let model = whole(Datatype::Bool, &[3]);
    assert!(check_inputs(&model, vec![tensor("x", Datatype::Bool, &[3], &[0, 1, 1])]).is_ok());
    let why = refused(&model, vec![tensor("x", Datatype::Bool, &[3], &[0, 1, 2])]);
    assert!(why.ends_with("expected 0 or 1 for each BOOL, got the byte 2"), "{why}");
}

#[test]
fn rows_are_equal_and_fit_into_a_batch() {
    let model = model();
    assert!(check_inputs(&model, vec![x(4), n(4)]).is_ok());
    let why = refused(&model, vec![x(2), n(3)]);
    assert!(why.contains("'n' has batch size 3, but input 'x' of the same request has 2"), "{why}");
    for rows in [0, 5] {
        let why = refused(&model, vec![x(rows), n(rows)]);
        assert!(why.contains("between 1 and 4") && why.contains(&format!("got {rows}")), "{why}");
        assert_eq!(why.contains("set batch.max to 0"), rows == 5, "{why}");
    }
}
