//! Inference answers as HTTP carries them.

use std::fmt::Write as _;

use shadowslice_shared::tensor::Datatype;

use super::json::Form;
use super::model::{Answered, VERSION};
use super::tensors::WantedOutput;
use super::values;
use crate::pipeline::{Failure, Metadata, Pieces};

/// A body, and the length of the JSON at its start where binary tensors follow.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Body {
    /// All of it.
    pub(super) bytes: Pieces,
    /// For the header `Inference-Header-Content-Length`.
    pub(super) header_length: Option<usize>,
}

/// Refuses, before the model has run, outputs that cannot be written in the form asked for.
pub(super) fn check_form(
    model: &Metadata,
    wanted: &[usize],
    named: &[WantedOutput],
    form: &Form,
) -> Result<(), Failure> {
    for (place, &index) in wanted.iter().enumerate() {
        let spec = &model.outputs[index];
        let shared = named.get(place).is_some_and(|output| output.place.is_some());
        if !shared && !form.binary(place) {
            values::no_json_form(spec.datatype)
                .map_err(|why| Failure::Invalid(format!("output '{}': {why}", spec.name)))?;
        }
    }
    Ok(())
}

/// The whole answer.
pub(super) fn write(model: &str, id: &str, outputs: &[Answered], form: &Form) -> Result<Body, Failure> {
    let mut json = format!("{{\"model_name\":{},\"model_version\":\"{VERSION}\"", values::quoted(model));
    if !id.is_empty() {
        push(&mut json, format_args!(",\"id\":{}", values::quoted(id)));
    }
    json.push_str(",\"outputs\":[");
    let mut binary = Vec::new();
    for (place, output) in outputs.iter().enumerate() {
        let comma = if place > 0 { "," } else { "" };
        push(&mut json, format_args!("{comma}{}", head(output)));
        if output.placed {
            json.push('}');
        } else if form.binary(place) {
            push(&mut json, format_args!(",\"parameters\":{{\"binary_data_size\":{}}}}}", output.data.len()));
            binary.push(output.data.clone());
        } else {
            json.push_str(",\"data\":");
            values::decode(output.datatype, &output.data, &mut json)
                .map_err(|why| unwritable(output, &why))?;
            json.push('}');
        }
    }
    json.push_str("]}");
    if binary.is_empty() {
        return Ok(Body { bytes: json.into(), header_length: None });
    }
    let header_length = json.len();
    let mut bytes = Pieces::from(json);
    binary.into_iter().for_each(|data| bytes.push(data));
    Ok(Body { bytes, header_length: Some(header_length) })
}

fn head(output: &Answered) -> String {
    let Answered { name, datatype, shape, .. } = output;
    format!("{{\"name\":{},\"datatype\":\"{datatype}\",\"shape\":{shape:?}", values::quoted(name))
}

/// Strings that are not UTF-8 are the client's to ask for as binary; other faults are the model's.
fn unwritable(output: &Answered, why: &str) -> Failure {
    let message = format!("output '{}' cannot be written as JSON: {why}", output.name);
    match output.datatype {
        Datatype::Bytes => Failure::Invalid(message),
        _ => Failure::Internal(message),
    }
}

fn push(json: &mut String, text: std::fmt::Arguments<'_>) {
    json.write_fmt(text).expect("writing to a string cannot fail");
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::tensor::TensorSpec;

    use super::*;

    fn output(name: &str, datatype: Datatype, shape: &[i64], data: &[u8]) -> Answered {
        Answered {
            name: name.into(),
            datatype,
            shape: shape.into(),
            data: data.to_vec().into(),
            placed: false,
        }
    }

    #[test]
    fn binary_and_json_outputs_stand_in_one_answer() {
        let outputs = [
            output("a", Datatype::Uint8, &[1, 2], &[7, 9]),
            output("b", Datatype::Bool, &[2], &[1, 0]),
            output("c", Datatype::Fp16, &[1], &[0, 60]),
        ];
        let body = write("m\"", "42", &outputs, &Form::Each(vec![true, false, true])).unwrap();
        let header = body.header_length.unwrap();
        let bytes = body.bytes.into_bytes();
        let json: serde_json::Value = serde_json::from_slice(&bytes[..header]).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "model_name": "m\"", "model_version": "1", "id": "42", "outputs": [
                    {"name": "a", "datatype": "UINT8", "shape": [1, 2], "parameters": {"binary_data_size": 2}},
                    {"name": "b", "datatype": "BOOL", "shape": [2], "data": [true, false]},
                    {"name": "c", "datatype": "FP16", "shape": [1], "parameters": {"binary_data_size": 2}},
                ]
            })
        );
        assert_eq!(&bytes[header..], &[7, 9, 0, 60]);
    }

    #[test]
    fn an_output_in_shared_memory_has_neither_data_nor_parameters() {
        let placed = Answered { placed: true, ..output("y", Datatype::Fp32, &[1, 16], &[]) };
        for binary in [true, false] {
            let body = write("m", "", std::slice::from_ref(&placed), &Form::All(binary)).unwrap();
            assert_eq!(
                &body.bytes.into_bytes()[..],
                br#"{"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1, 16]}]}"#
            );
            assert_eq!(body.header_length, None);
        }
    }

    #[test]
    fn without_an_id_or_binary_outputs_there_is_no_word_of_them() {
        let body = write("m", "", &[], &Form::All(true)).unwrap();
        assert_eq!(&body.bytes.into_bytes()[..], br#"{"model_name":"m","model_version":"1","outputs":[]}"#);
        assert_eq!(body.header_length, None);
    }

    #[test]
    fn strings_that_are_not_utf8_must_be_asked_for_as_binary() {
        let outputs = [output("s", Datatype::Bytes, &[1], &[1, 0, 0, 0, 0xff])];
        let Err(Failure::Invalid(why)) = write("m", "", &outputs, &Form::All(false)) else { panic!() };
        assert!(why.contains("binary_data"), "{why}");
        assert!(write("m", "", &outputs, &Form::All(true)).is_ok());
    }

    #[test]
    fn half_precision_as_json_is_refused_before_the_model_runs() {
        let spec = TensorSpec { name: "h".into(), datatype: Datatype::Fp16, shape: vec![1] };
        let model = Metadata {
            name: "m".into(),
            platform: "emulated",
            max_batch: 0,
            inputs: Vec::new(),
            outputs: vec![spec],
        };
        assert!(check_form(&model, &[0], &[], &Form::All(true)).is_ok());
        assert!(matches!(check_form(&model, &[0], &[], &Form::All(false)), Err(Failure::Invalid(_))));
    }
}
