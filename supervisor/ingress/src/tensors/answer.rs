//! Inference answers as HTTP carries them.

use std::fmt::Write as _;

use bytes::Bytes;
use shadowslice_shared::tensor::Datatype;

use crate::api::model::{Answered, VERSION};
use crate::tensors::check::WantedOutput;
use crate::tensors::json::Form;
use crate::tensors::values;
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure};

/// Room for an answer with an output or two, and for a small tensor behind it.
const JSON_BYTES: usize = 512;

/// Tensors of fewer bytes together follow the JSON in its own piece: to copy them costs less than
/// another piece.
const SMALL: usize = 4096;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Body {
    pub(crate) bytes: Pieces,
    /// Of the JSON, where tensors follow: for the header `Inference-Header-Content-Length`.
    pub(crate) header_length: Option<usize>,
}

/// Refuses, before the model has run, outputs that cannot be written in the form asked for.
pub(crate) fn check_form(
    model: &Metadata,
    wanted: &[usize],
    named: &[WantedOutput],
    form: &Form,
) -> Result<(), RequestFailure> {
    for (place, &index) in wanted.iter().enumerate() {
        let spec = &model.outputs[index];
        let shared = named.get(place).is_some_and(|output| output.place.is_some());
        if !shared && !form.binary(place) {
            values::no_json_form(spec.datatype)
                .map_err(|why| RequestFailure::Invalid(format!("output '{}': {why}", spec.name)))?;
        }
    }
    Ok(())
}

/// The most bytes of the tensors that are written as text.
pub(crate) fn text_bytes(outputs: &[Answered], form: &Form) -> usize {
    let texts = outputs.iter().enumerate().filter(|(place, output)| !output.placed && !form.binary(*place));
    texts.map(|(_, output)| values::text_bytes(output.datatype, output.data.len())).sum()
}

pub(crate) fn write(
    model: &str,
    id: &str,
    outputs: &[Answered],
    form: &Form,
) -> Result<Body, RequestFailure> {
    let (mut json, bytes) = (String::new(), JSON_BYTES + text_bytes(outputs, form));
    json.try_reserve_exact(bytes).map_err(|_| RequestFailure::no_memory(bytes))?;
    json.push_str("{\"model_name\":");
    values::quote(model, &mut json);
    push(&mut json, format_args!(",\"model_version\":\"{VERSION}\""));
    if !id.is_empty() {
        json.push_str(",\"id\":");
        values::quote(id, &mut json);
    }
    json.push_str(",\"outputs\":[");
    let mut any_binary = false;
    for (place, output) in outputs.iter().enumerate() {
        head(output, place > 0, &mut json);
        if output.placed {
            json.push('}');
        } else if form.binary(place) {
            push(&mut json, format_args!(",\"parameters\":{{\"binary_data_size\":{}}}}}", output.data.len()));
            any_binary = true;
        } else {
            json.push_str(",\"data\":");
            values::decode(output.datatype, &output.data, &mut json)
                .map_err(|why| unwritable(output, &why))?;
            json.push('}');
        }
    }
    json.push_str("]}");
    if !any_binary {
        return Ok(Body { bytes: json.into(), header_length: None });
    }
    let header_length = Some(json.len());
    let binary = outputs.iter().enumerate().filter(|(place, output)| !output.placed && form.binary(*place));
    let binary = binary.map(|(_, output)| &output.data);
    Ok(Body { bytes: behind(json.into_bytes(), binary), header_length })
}

fn behind<'d>(mut json: Vec<u8>, binary: impl Iterator<Item = &'d Bytes> + Clone) -> Pieces {
    if binary.clone().map(Bytes::len).sum::<usize>() < SMALL {
        binary.for_each(|data| json.extend_from_slice(data));
        return json.into();
    }
    let mut bytes = Pieces::from(json);
    binary.for_each(|data| bytes.push(data.clone()));
    bytes
}

fn head(output: &Answered, follows: bool, json: &mut String) {
    let Answered { name, datatype, shape, .. } = output;
    json.push_str(if follows { ",{\"name\":" } else { "{\"name\":" });
    values::quote(name, json);
    push(json, format_args!(",\"datatype\":\"{datatype}\",\"shape\":{shape:?}"));
}

/// Strings that are not UTF-8 are the client's to ask for as binary; other faults are the model's.
fn unwritable(output: &Answered, why: &str) -> RequestFailure {
    let message = format!("output '{}' cannot be written as JSON: {why}", output.name);
    match output.datatype {
        Datatype::Bytes => RequestFailure::Invalid(message),
        _ => RequestFailure::Internal(message),
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
    fn large_tensors_are_not_copied_behind_the_json() {
        let outputs =
            [SMALL - 1, SMALL].map(|len| output("y", Datatype::Uint8, &[len as i64], &vec![3; len]));
        for (output, pieces) in outputs.iter().zip([1, 2]) {
            let body = write("m", "", std::slice::from_ref(output), &Form::All(true)).unwrap();
            assert_eq!(body.bytes.iter().count(), pieces);
            assert_eq!(body.bytes.into_bytes()[body.header_length.unwrap()..], output.data);
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
        let Err(RequestFailure::Invalid(why)) = write("m", "", &outputs, &Form::All(false)) else { panic!() };
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
            streams: None,
            inputs: Vec::new(),
            optional: Vec::new(),
            outputs: vec![spec],
        };
        assert!(check_form(&model, &[0], &[], &Form::All(true)).is_ok());
        assert!(matches!(check_form(&model, &[0], &[], &Form::All(false)), Err(RequestFailure::Invalid(_))));
    }
}
