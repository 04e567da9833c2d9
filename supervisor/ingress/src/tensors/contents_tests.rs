use super::*;
use crate::proto::model_infer_request::InferRequestedOutputTensor;

fn input(datatype: &str, contents: Option<InferTensorContents>) -> InferInputTensor {
    InferInputTensor {
        name: "x".into(),
        datatype: datatype.into(),
        shape: vec![1],
        parameters: HashMap::new(),
        contents,
    }
}

fn infer(inputs: Vec<InferInputTensor>, raw: &[&'static [u8]]) -> Result<InferRequest, String> {
    let raw_input_contents = raw.iter().copied().map(Bytes::from_static).collect();
    let message = ModelInferRequest { id: "i".into(), inputs, raw_input_contents, ..Default::default() };
    parse_message(message).map_err(|why| why.to_string())
}

fn data(datatype: &str, contents: InferTensorContents) -> Result<Bytes, String> {
    infer(vec![input(datatype, Some(contents))], &[])
        .map(|mut request| request.inputs.remove(0).data.into_bytes())
}

#[test]
fn many_values_take_long_and_raw_contents_do_not() {
    let strings =
        |count| InferTensorContents { bytes_contents: vec![Bytes::new(); count], ..Default::default() };
    let quick = |contents| {
        let inputs = vec![InferInputTensor { contents, ..Default::default() }];
        let raw_input_contents = vec![Bytes::from(vec![0; QUICK_BYTES * 2])];
        is_quick(&ModelInferRequest { inputs, raw_input_contents, ..Default::default() })
    };
    assert!(quick(None) && quick(Some(strings(QUICK_BYTES / 2))));
    assert!(!quick(Some(strings(QUICK_BYTES / 2 + 1))));
}

#[test]
fn raw_contents_go_to_the_inputs_in_order() {
    let request = infer(vec![input("FP16", None), input("BYTES", None)], &[b"ab", b"\0\0\0\0"]).unwrap();
    assert_eq!(request.id, "i");
    assert_eq!(request.inputs[0].data, b"ab".to_vec().into());
    assert_eq!(request.inputs[1].data, vec![0; 4].into());
}

#[test]
fn raw_contents_are_for_all_inputs_or_none_and_never_beside_typed_ones() {
    let typed = || Some(InferTensorContents::default());
    assert!(infer(vec![input("FP32", None), input("FP32", None)], &[b"1234"]).unwrap_err().contains("all 2"));
    assert!(infer(vec![input("FP32", None)], &[b"1", b"2"]).unwrap_err().contains("got 2"));
    assert!(infer(vec![], &[b"1"]).is_err());
    assert!(infer(vec![input("FP32", typed())], &[b"1234"]).unwrap_err().contains("both"));
}

#[test]
fn typed_contents_become_bytes() {
    let contents = InferTensorContents { int_contents: vec![-1, 2], ..Default::default() };
    assert_eq!(&data("INT8", contents.clone()).unwrap()[..], [0xff, 2]);
    assert_eq!(&data("INT16", contents.clone()).unwrap()[..], [0xff, 0xff, 2, 0]);
    assert_eq!(data("INT32", contents).unwrap().len(), 8);
    let contents = InferTensorContents { bool_contents: vec![true, false], ..Default::default() };
    assert_eq!(&data("BOOL", contents).unwrap()[..], [1, 0]);
    let contents = InferTensorContents { fp64_contents: vec![1.0], ..Default::default() };
    assert_eq!(&data("FP64", contents).unwrap()[..], 1.0_f64.to_le_bytes());
    let contents =
        InferTensorContents { bytes_contents: vec![Bytes::from_static(b"ab")], ..Default::default() };
    assert_eq!(&data("BYTES", contents).unwrap()[..], b"\x02\0\0\0ab");
    assert_eq!(data("UINT64", InferTensorContents::default()).unwrap().len(), 0);
}

#[test]
fn typed_contents_of_another_kind_or_out_of_range_are_refused() {
    let ints = InferTensorContents { int_contents: vec![128], ..Default::default() };
    assert!(data("INT8", ints.clone()).unwrap_err().contains("128 is out of range for INT8"));
    assert!(
        data("FP32", ints.clone()).unwrap_err().contains("FP32 is sent in fp32_contents, got int_contents")
    );
    assert!(data("FP16", ints).unwrap_err().contains("raw_input_contents"));
    let unsigned = InferTensorContents { uint_contents: vec![70_000], ..Default::default() };
    assert!(data("UINT16", unsigned).is_err());
}

#[test]
fn unsupported_extensions_are_refused_and_not_ignored() {
    assert!(infer(vec![input("FLOAT", None)], &[]).unwrap_err().contains("unknown datatype 'FLOAT'"));
    let with = |key: &str| {
        HashMap::from([(
            key.to_owned(),
            InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(3)) },
        )])
    };
    let mut shared = input("FP32", None);
    shared.parameters = with("shared_memory_region");
    assert!(infer(vec![shared], &[]).unwrap_err().contains("must be a string"));
    let output = InferRequestedOutputTensor { name: "y".into(), parameters: with("classification") };
    let message = ModelInferRequest { outputs: vec![output], ..Default::default() };
    assert!(parse_message(message).unwrap_err().to_string().contains("classification"));
}

#[test]
fn priority_and_timeout_come_as_signed_or_unsigned_numbers() {
    let read = |name: &str, choice: Option<ParameterChoice>| {
        let parameters = HashMap::from([(name.to_owned(), InferParameter { parameter_choice: choice })]);
        parse_message(ModelInferRequest { parameters, ..Default::default() }).map(|request| request.options)
    };
    let ms = std::time::Duration::from_millis;
    assert_eq!(read("priority", Some(ParameterChoice::Uint64Param(u64::MAX))).unwrap().priority, u64::MAX);
    assert_eq!(read("priority", Some(ParameterChoice::Int64Param(2))).unwrap().priority, 2);
    assert_eq!(read("timeout", Some(ParameterChoice::Int64Param(3000))).unwrap().timeout, Some(ms(3)));
    assert_eq!(read("timeout", Some(ParameterChoice::Uint64Param(0))).unwrap().timeout, None);
    for bad in [
        None,
        Some(ParameterChoice::Int64Param(-1)),
        Some(ParameterChoice::StringParam("1".into())),
        Some(ParameterChoice::BoolParam(true)),
        Some(ParameterChoice::DoubleParam(1.0)),
    ] {
        for name in ["priority", "timeout"] {
            let Err(RequestFailure::Invalid(why)) = read(name, bad.clone()) else { panic!("{bad:?}") };
            assert!(why.contains(name) && why.contains("whole number"), "{why}");
        }
    }
}
