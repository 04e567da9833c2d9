use super::*;

fn encoded(datatype: Datatype, json: &str, elements: usize) -> Result<Vec<u8>, String> {
    let raw = RawValue::from_string(json.to_owned()).unwrap();
    encode(datatype, &raw, elements, Vec::new()).map(Vec::from)
}

fn decoded(datatype: Datatype, data: &[u8]) -> String {
    let mut json = Vec::new();
    decode(datatype, data, &mut json).unwrap();
    String::from_utf8(json).unwrap()
}

#[test]
fn flat_and_nested_are_the_same() {
    let flat = encoded(Datatype::Int16, "[1, -2, 3, 4]", 4).unwrap();
    assert_eq!(flat, [1, 0, 0xfe, 0xff, 3, 0, 4, 0]);
    assert_eq!(encoded(Datatype::Int16, "[[1,-2],[3,4]]", 4).unwrap(), flat);
    assert_eq!(encoded(Datatype::Int16, "[[[[1]],[[-2]]],[3],[4]]", 4).unwrap(), flat);
}

#[test]
fn values_come_back_in_every_datatype() {
    for (datatype, json, elements) in [
        (Datatype::Bool, "[true,false]", 2),
        (Datatype::Uint8, "[0,255]", 2),
        (Datatype::Uint16, "[0,65535]", 2),
        (Datatype::Uint32, "[0,4294967295]", 2),
        (Datatype::Uint64, "[0,18446744073709551615]", 2),
        (Datatype::Int8, "[-128,127]", 2),
        (Datatype::Int16, "[-32768,32767]", 2),
        (Datatype::Int32, "[-2147483648,2147483647]", 2),
        (Datatype::Int64, "[-9223372036854775808,9223372036854775807]", 2),
        (Datatype::Fp32, "[0.1,-1e-40,3.4028235e+38,-0.0]", 4),
        (Datatype::Fp64, "[0.1,5e-324,1.7976931348623157e+308,0.30000000000000004]", 4),
        (Datatype::Bytes, r#"["","a\"\\\n","é\u0000"]"#, 3),
    ] {
        let bytes = encoded(datatype, json, elements).unwrap();
        assert_eq!(decoded(datatype, &bytes), json, "{datatype}");
    }
}

#[test]
fn what_does_not_fit_the_datatype_is_refused() {
    for (datatype, json) in [
        (Datatype::Uint8, "[256]"),
        (Datatype::Uint8, "[-1]"),
        (Datatype::Int8, "[128]"),
        (Datatype::Int64, "[9223372036854775808]"),
        (Datatype::Uint64, "[18446744073709551616]"),
        (Datatype::Int32, "[1.5]"),
        (Datatype::Int32, "[true]"),
        (Datatype::Int32, "[\"1\"]"),
        (Datatype::Int32, "[null]"),
        (Datatype::Int32, "[{}]"),
        (Datatype::Int32, "{\"a\":1}"),
        (Datatype::Int32, "5"),
        (Datatype::Bool, "[1]"),
        (Datatype::Fp32, "[1e39]"),
        (Datatype::Fp32, "[1e400]"),
        (Datatype::Fp32, "[\"NaN\"]"),
        (Datatype::Bytes, "[5]"),
        (Datatype::Fp16, "[1]"),
        (Datatype::Bf16, "[1]"),
    ] {
        assert!(encoded(datatype, json, 1).is_err(), "{datatype} {json}");
    }
}

#[test]
fn the_count_must_match() {
    for json in ["[]", "[1]", "[[1],[]]", "[1,2,3]", "[[1,2],[3]]"] {
        let why = encoded(Datatype::Uint8, json, 2).unwrap_err();
        assert!(why.contains("expected 2 elements"), "{json}: {why}");
    }
    assert!(encoded(Datatype::Fp64, "[1]", usize::MAX).is_err());
    assert_eq!(encoded(Datatype::Uint8, "[]", 0), Ok(Vec::new()));
}

#[test]
fn a_bomb_of_brackets_does_not_reach_the_stack() {
    let bomb = ["[".repeat(1_000_000), "]".repeat(1_000_000)].concat();
    assert!(encoded(Datatype::Uint8, &bomb, 1).is_err());
}

#[test]
fn numbers_that_json_lacks_are_written_as_triton_does() {
    let data: Vec<u8> =
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0].into_iter().flat_map(f32::to_le_bytes).collect();
    assert_eq!(decoded(Datatype::Fp32, &data), "[NaN,Infinity,-Infinity,1.0]");
}

#[test]
fn strings_are_json_whatever_is_in_them() {
    for text in ["", "plain text_1/2", "\"quoted\"", "back\\slash", "tab\t", "\u{7f}", "größe", "\u{1f600}"]
    {
        let mut json = b"x".to_vec();
        write(&mut json, text);
        assert_eq!(serde_json::from_slice::<String>(&json[1..]).unwrap(), text);
    }
}
