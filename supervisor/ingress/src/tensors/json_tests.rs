use bytes::{Buf, Bytes};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::super::shared_memory::SharedTensor;
use super::*;
use crate::admission::unlimited;

fn model() -> Metadata {
    let spec =
        |name: &str, datatype, shape: &[i64]| TensorSpec { name: name.into(), datatype, shape: shape.into() };
    Metadata {
        name: "m".into(),
        version: "1".into(),
        platform: "emulated",
        max_batch: 8,
        streams: None,
        inputs: vec![spec("x", Datatype::Uint8, &[-1, 2])],
        optional: Vec::new(),
        outputs: vec![spec("y", Datatype::Uint8, &[-1, 2])],
    }
}

fn parsed(json: &str, binary: &[u8]) -> Result<InferRequest, String> {
    let body = [json.as_bytes(), binary].concat();
    parse_body(body.into(), Some(json.len()), &model(), &unlimited()).map_err(|why| match why {
        RequestError::Failed(RequestFailure::Invalid(why)) => why,
        other => panic!("{other:?}"),
    })
}

#[test]
fn json_and_binary_inputs_share_one_request() {
    let json = r#"{"id":"7","parameters":{"binary_data_output":true,"timeout":5,"priority":1},"inputs":[
        {"name":"a","datatype":"UINT8","shape":[1,2],"parameters":{"binary_data_size":2}},
        {"name":"b","datatype":"INT16","shape":[1,1],"data":[[-1]]},
        {"name":"c","datatype":"FP16","shape":[1],"parameters":{"binary_data_size":2}}],
        "outputs":[{"name":"z"},{"name":"y","parameters":{"binary_data":false}}], "unknown":[{}]}"#;
    let request = parsed(json, &[1, 2, 0, 60]).unwrap();
    let outputs: Vec<&str> = request.outputs.iter().map(|output| &output.name[..]).collect();
    assert_eq!((&request.id[..], &outputs[..]), ("7", &["z", "y"][..]));
    let data: Vec<Bytes> = request.inputs.iter().map(|input| input.data.clone().into_bytes()).collect();
    assert_eq!(data, [&[1, 2][..], &[0xff, 0xff], &[0, 60]]);
    assert_eq!(request.outputs[0].form, OutputForm::Binary);
    assert_eq!(request.outputs[1].form, OutputForm::Json);
}

#[test]
fn binary_inputs_are_slices_of_the_body() {
    let json =
        r#"{"inputs":[{"name":"x","datatype":"UINT8","shape":[2],"parameters":{"binary_data_size":2}}]}"#;
    let body = Bytes::from([json.as_bytes(), &[1, 2]].concat());
    let request = parse_body(body.clone().into(), Some(json.len()), &model(), &unlimited()).unwrap();
    assert_eq!(request.inputs[0].data.chunk().as_ptr(), body[json.len()..].as_ptr());
}

#[test]
fn false_sizes_are_refused() {
    let input = |size: &str| {
        format!(
            r#"{{"inputs":[{{"name":"x","datatype":"UINT8","shape":[1,2],"parameters":{{"binary_data_size":{size}}}}}]}}"#
        )
    };
    assert!(parsed(&input("2"), &[1, 2]).is_ok());
    for (size, binary) in [
        ("3", &[1, 2][..]),
        ("1", &[1, 2]),
        ("0", &[1]),
        ("18446744073709551615", &[1]),
        ("18446744073709551616", &[1]),
        ("-1", &[1]),
        ("\"2\"", &[1, 2]),
        ("2.0", &[1, 2]),
    ] {
        assert!(parsed(&input(size), binary).is_err(), "{size}");
    }
    assert!(parse_body(Pieces::from(b"{}".to_vec()), Some(3), &model(), &unlimited()).is_err());
    assert!(parse_body(Pieces::from(b"{}".to_vec()), Some(usize::MAX), &model(), &unlimited()).is_err());
}

#[test]
fn garbage_is_refused_with_its_place() {
    let bomb = format!("{}{}", r#"{"inputs":[],"x":"#, "[".repeat(500_000));
    let wide = r#"{"inputs":[{"name":"x","datatype":"UINT8","shape":[9223372036854775808],"data":[]}]}"#;
    for json in ["{", "[]", "nul", "{}", r#"{"inputs":5}"#, r#"{"inputs":[{}]}"#, &bomb, wide] {
        let why = parsed(json, &[]).unwrap_err();
        assert!(why.starts_with("failed to parse the request JSON: "), "{json:.40}: {why}");
        assert!(why.len() < 300);
    }
    assert!(
        parse_body(Pieces::from(b"{\"inputs\":[],\"id\":\"\xff\"}".to_vec()), None, &model(), &unlimited())
            .is_err()
    );
    assert!(parse_body(Pieces::default(), None, &model(), &unlimited()).is_err());
    assert!(parse_body(Pieces::from(b"\xff\xfe\0\0".to_vec()), None, &model(), &unlimited()).is_err());
}

#[test]
fn lists_are_refused_as_requests_and_as_parts_of_them() {
    let input = r#"{"name":"x","datatype":"UINT8","shape":[1],"data":[1]}"#;
    for body in [format!("[\"id\",null,[{input}],null]"), format!("[{input}]"), "[]".into(), "\"x\"".into()] {
        let why = parsed(&body, &[]).unwrap_err();
        assert!(why.ends_with("the body must be an object with `inputs`"), "{body}: {why}");
    }
    let of = |inputs: &str, rest: &str| parsed(&format!(r#"{{"inputs":[{inputs}]{rest}}}"#), &[]).map(drop);
    assert_eq!(of(input, r#","parameters":null,"outputs":null"#), Ok(()));
    for (inputs, rest) in [
        (r#"["x","UINT8",[1],null,[1]]"#, ""),
        (r#""x""#, ""),
        (input, r#","parameters":[true,null,null]"#),
        (input, r#","outputs":[["y",null]]"#),
        (input, r#","outputs":[{"name":"y","parameters":[true]}]"#),
        (r#"{"name":"x","datatype":"UINT8","shape":[1],"parameters":[1],"data":[1]}"#, ""),
    ] {
        let why = of(inputs, rest).unwrap_err();
        assert!(why.contains("an object") && !why.contains("struct"), "{inputs} {rest}: {why}");
    }
}

#[test]
fn numbers_that_json_lacks_are_named_and_binary_data_advised() {
    for word in ["NaN", "Infinity", "-Infinity"] {
        let json =
            format!(r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,2],"data":[[1,{word}]]}}]}}"#);
        let why = parsed(&json, &[]).unwrap_err();
        assert!(why.contains("does not support NaN and Infinity; send the tensor as binary data"), "{why}");
    }
    let null = r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[null]}]}"#;
    let why = parsed(null, &[]).unwrap_err();
    assert!(why.contains("null is not a valid FP32") && why.contains("as binary data"), "{why}");
}

/// Checks that lists are bounded before they are parsed. A few bytes of text become some hundred
/// bytes in memory.
#[test]
fn there_are_few_tensors_of_few_axes_and_only_numbers_are_read_as_numbers() {
    let input = r#"{"name":"x","datatype":"UINT8","shape":[1],"data":[1]}"#;
    let request = |inputs: usize, outputs: usize| {
        let (inputs, outputs) = (vec![input; inputs].join(","), vec![r#"{"name":"y"}"#; outputs].join(","));
        parsed(&format!(r#"{{"inputs":[{inputs}],"outputs":[{outputs}]}}"#), &[])
    };
    assert_eq!(request(MAX_TENSORS, MAX_TENSORS).unwrap().inputs.len(), MAX_TENSORS);
    for (inputs, outputs) in [(MAX_TENSORS + 1, 0), (0, MAX_TENSORS + 1)] {
        let why = request(inputs, outputs).map(drop).unwrap_err();
        assert!(why.contains("a list of more than 8192 entries"), "{why}");
    }
    let axes = |axes: usize| {
        let ones = vec!["1"; axes].join(",");
        let input = format!(r#"{{"name":"x","datatype":"UINT8","shape":[{ones}],"data":[1]}}"#);
        parsed(&format!(r#"{{"inputs":[{input}]}}"#), &[])
    };
    assert_eq!(axes(MAX_AXES).unwrap().inputs[0].shape.len(), MAX_AXES);
    let why = axes(MAX_AXES + 1).map(drop).unwrap_err();
    assert!(why.contains("a list of more than 64 entries"), "{why}");
    let (deep, end) = ("[".repeat(1000), "]".repeat(1000));
    let why = parsed(&format!(r#"{{"parameters":{{"timeout":{deep}{end}}},"inputs":[]}}"#), &[]).unwrap_err();
    assert!(why.contains("whole number of microseconds") && why.len() < 300, "{why}");
}

#[test]
fn data_comes_once_and_in_a_known_form() {
    let input = |rest: &str| parsed(&format!(r#"{{"inputs":[{{"name":"x","shape":[1],{rest}}}]}}"#), &[1]);
    for (rest, why) in [
        (r#""datatype":"UINT8""#, "neither"),
        (r#""datatype":"UINT8","data":null"#, "neither"),
        (r#""datatype":"UINT8","data":[1],"parameters":{"binary_data_size":1}"#, "both"),
        (r#""datatype":"uint8","data":[1]"#, "unknown datatype"),
        (r#""datatype":"FP16","data":[1]"#, "no JSON form"),
        (r#""datatype":"UINT8","data":[300]"#, "out of range"),
        (r#""datatype":"UINT8","data":[1]"#, "left after the last tensor"),
        (
            r#""datatype":"UINT8","parameters":{"shared_memory_region":"r"}"#,
            "without shared_memory_byte_size",
        ),
        (
            r#""datatype":"UINT8","data":[1],"parameters":{"shared_memory_region":"r","shared_memory_byte_size":1}"#,
            "both",
        ),
    ] {
        let got = input(rest).unwrap_err();
        assert!(got.contains(why), "{rest}: {got}");
    }
}

#[test]
fn negative_and_huge_shapes_of_json_data_are_refused_before_anything_is_made_for_them() {
    for shape in ["-1", "9223372036854775807", "4294967296,4294967296", "0,9223372036854775807"] {
        let json = format!(r#"{{"inputs":[{{"name":"x","datatype":"FP64","shape":[{shape}],"data":[]}}]}}"#);
        assert!(parsed(&json, &[]).is_err(), "{shape}");
    }
}

#[test]
fn a_raw_body_is_the_only_input() {
    let raw = |model: &Metadata, body: &'static [u8]| {
        parse_body(Pieces::from(body.to_vec()), Some(0), model, &unlimited())
    };
    let request = raw(&model(), &[5, 6]).unwrap();
    assert_eq!(
        (&request.inputs[0].shape[..], &request.inputs[0].data.clone().into_bytes()[..]),
        (&[1, 2][..], &[5, 6][..])
    );
    assert!(request.is_binary);

    let mut open = model();
    open.inputs[0] = TensorSpec { name: "x".into(), datatype: Datatype::Int32, shape: vec![-1, 2, -1] };
    assert_eq!(raw(&open, &[0; 24]).unwrap().inputs[0].shape, [1, 2, 3]);
    open.inputs[0].shape = vec![-1, -1, -1];
    assert!(raw(&open, &[0; 24]).is_err());
    open.inputs[0] = TensorSpec { name: "x".into(), datatype: Datatype::Bytes, shape: vec![-1, -1] };
    let request = raw(&open, b"abc").unwrap();
    assert_eq!(
        (&request.inputs[0].shape[..], &request.inputs[0].data.clone().into_bytes()[..]),
        (&[1, 1][..], &b"\x03\0\0\0abc"[..])
    );

    let mut two = model();
    two.inputs.push(two.inputs[0].clone());
    assert!(raw(&two, &[5, 6]).is_err());
}

#[test]
fn classification_is_refused_and_shared_memory_read_not_ignored() {
    let read = |parameters: &str| {
        parsed(&format!(r#"{{"inputs":[],"outputs":[{{"name":"y","parameters":{parameters}}}]}}"#), &[])
    };
    assert!(read(r#"{"classification":3}"#).unwrap_err().contains("not supported"));
    assert!(read(r#"{"shared_memory_region":"r"}"#).unwrap_err().contains("shared_memory_byte_size"));
    let wanted = read(r#"{"shared_memory_region":"r","shared_memory_byte_size":8,"shared_memory_offset":4}"#);
    let region = SharedTensor { region: "r".into(), offset: 4, byte_size: 8 };
    assert_eq!(wanted.unwrap().outputs[0].form, OutputForm::Shared(region));
}

#[test]
fn priority_and_timeout_are_whole_numbers_and_nothing_else() {
    let read = |parameters: &str| {
        let body = format!(r#"{{"parameters":{parameters},"inputs":[]}}"#);
        parse_body(body.into(), None, &model(), &unlimited()).map(|read| read.options)
    };
    let ms = std::time::Duration::from_millis;
    assert_eq!(read("{}"), Ok(RequestOptions::default()));
    assert_eq!(read(r#"{"priority":0,"timeout":0}"#), Ok(RequestOptions::default()));
    assert_eq!(
        read(r#"{"priority":3,"timeout":2000}"#),
        Ok(RequestOptions { priority: 3, timeout: Some(ms(2)) })
    );
    assert_eq!(read(r#"{"priority":18446744073709551615}"#).unwrap().priority, u64::MAX);
    for bad in ["-1", "1.5", "\"1\"", "true", "[1]", "18446744073709551616", "1e3"] {
        for name in ["priority", "timeout"] {
            let Err(RequestError::Failed(RequestFailure::Invalid(why))) =
                read(&format!("{{\"{name}\":{bad}}}"))
            else {
                panic!("{bad}")
            };
            assert!(why.contains(name) && why.contains("whole number"), "{why}");
        }
    }
}

#[test]
fn fuzz_json() {
    bolero::check!().for_each(|bytes: &[u8]| {
        // The last byte says where the JSON ends.
        let length = bytes.last().map(|&length| usize::from(length).min(bytes.len()));
        for header in [None, length] {
            parse_body(bytes.to_vec().into(), header, &model(), &unlimited()).ok();
        }
    });
}
