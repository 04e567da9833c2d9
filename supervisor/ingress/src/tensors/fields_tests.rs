use std::time::Duration;

use super::*;
use crate::admission::unlimited;
use crate::tensors::OutputForm;

fn model(max_batch: u32) -> Metadata {
    let spec =
        |name: &str, datatype, shape: &[i64]| TensorSpec { name: name.into(), datatype, shape: shape.into() };
    Metadata {
        name: "m".into(),
        version: "1".into(),
        platform: "emulated",
        max_batch,
        streams: None,
        inputs: vec![spec("text", Datatype::Bytes, &[-1, -1]), spec("x", Datatype::Fp32, &[-1, 3])],
        optional: vec![spec("limit", Datatype::Int32, &[1]), spec("half", Datatype::Fp16, &[1])],
        outputs: vec![spec("y", Datatype::Fp32, &[-1, 3])],
    }
}

fn parse(body: &str) -> Result<InferRequest, String> {
    let permit = unlimited();
    parse_generate(body.to_owned().into(), &model(8), &permit).map_err(|why| why.to_string())
}

#[test]
fn scalars_and_arrays_get_the_axes_of_the_input() {
    let request =
        parse(r#"{"text": "hé", "x": [1, 2, 3], "limit": 7, "id": "42", "parameters": {"other": {}}}"#)
            .unwrap();
    assert_eq!(request.id, "42");
    let shapes: Vec<_> = request.inputs.iter().map(|input| (&*input.name, &input.shape[..])).collect();
    assert_eq!(shapes, [("text", &[1, 1][..]), ("x", &[1, 3]), ("limit", &[1])]);
    assert_eq!(request.inputs[0].data.clone().into_bytes(), &b"\x03\0\0\0h\xc3\xa9"[..]);
    assert_eq!(request.inputs[2].data.clone().into_bytes(), &7_i32.to_le_bytes()[..]);
    let rows = parse(r#"{"text": [["a"], ["b"]], "x": [[1, 2, 3], [4, 5, 6]]}"#).unwrap();
    assert!(rows.inputs.iter().all(|input| input.shape[0] == 2));
}

#[test]
fn parameters_may_contain_inputs_and_the_options_of_a_request() {
    let body =
        r#"{"text": "a", "parameters": {"limit": 3, "priority": 2, "timeout": 1000, "stream": false}}"#;
    let request = parse(body).unwrap();
    assert_eq!((request.options.priority, request.options.timeout), (2, Some(Duration::from_millis(1))));
    assert_eq!(request.inputs.iter().map(|input| &*input.name).collect::<Vec<_>>(), ["text", "limit"]);
}

#[test]
fn wrong_fields_are_refused() {
    for (body, why) in [
        ("[]", "the body must be an object"),
        ("{", "failed to parse"),
        (
            r#"{"txt": "a"}"#,
            "unexpected inference input 'txt' for model 'm', whose inputs are: text, x, limit, half",
        ),
        (r#"{"x": [1, 2]}"#, "input 'x' of shape [1,2]"),
        (r#"{"x": 1}"#, "expected 3 elements in data, got 1"),
        (r#"{"x": [[1, 2, 3], [4]]}"#, "equal lengths"),
        (r#"{"x": ["a", "b", "c"]}"#, "a string is not a valid FP32"),
        (r#"{"text": 7}"#, "7 is not a valid BYTES"),
        (r#"{"text": {"a": 1}}"#, "a value or an array of values"),
        (r#"{"half": 1}"#, "FP16 has no JSON form"),
        (r#"{"limit": 1, "limit": 2}"#, "field 'limit' is given twice"),
        (r#"{"id": 7}"#, "'id' must be a string"),
        (r#"{"parameters": 7}"#, "'parameters' must be an object"),
        (r#"{"parameters": {"timeout": "soon"}}"#, "timeout"),
    ] {
        let got = match parse(body) {
            Ok(request) if why.contains("of shape [1,2]") => {
                format!("input 'x' of shape {}", Shape(&request.inputs[0].shape))
            }
            Ok(_) => "accepted".to_owned(),
            Err(got) => got,
        };
        assert!(got.contains(why), "{body}: {got}");
    }
}

#[test]
fn a_model_without_a_batch_axis_has_rows_if_the_first_axis_is_open() {
    let permit = unlimited();
    let fields = |body: &str| {
        let request = parse_generate(body.to_owned().into(), &model(0), &permit).unwrap();
        request.inputs.into_iter().map(|input| input.shape).collect::<Vec<_>>()
    };
    assert_eq!(fields(r#"{"text": "a"}"#), [[1, 1]]);
    assert_eq!(fields(r#"{"text": ["a", "b"]}"#), [[1, 2]]);
    assert_eq!(fields(r#"{"text": [["a"], ["b"]]}"#), [[2, 1]]);
    let fixed = fields(r#"{"limit": [1]}"#);
    assert_eq!(fixed, [[1]]);
}

#[test]
fn outputs_are_fields() {
    let output = |name: &str, datatype, shape: &[i64], data: &[u8]| OutputTensor {
        name: name.into(),
        datatype,
        shape: shape.into(),
        data: data.to_vec().into(),
        form: OutputForm::Json,
    };
    let outputs = [
        output("n", Datatype::Int32, &[1, 1], &[9, 0, 0, 0]),
        output("y", Datatype::Uint8, &[1, 2], &[1, 2]),
    ];
    let mut json = Vec::new();
    write_fields(&model(8), "a", &outputs, &mut json).unwrap();
    assert_eq!(json, br#"{"id":"a","model_name":"m","model_version":"1","n":9,"y":[[1,2]]}"#.as_slice());
    assert!(json.len() <= field_bytes("a", &outputs));
    let binary = [output("s", Datatype::Bytes, &[1], &[1, 0, 0, 0, 0xff])];
    assert!(matches!(write_fields(&model(8), "", &binary, &mut json), Err(RequestFailure::Invalid(_))));
}

#[test]
fn fuzz_fields() {
    bolero::check!().for_each(|bytes: &[u8]| {
        for max_batch in [0, 8] {
            parse_generate(bytes.to_vec().into(), &model(max_batch), &unlimited()).ok();
        }
    });
}
