//! Inference answers in HTTP.

use std::io::Write as _;

use bytes::Bytes;
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure};
use shadowslice_shared::tensor::Datatype;

use super::outputs::{OutputForm, OutputTensor};
use super::values;

/// The initial capacity of an answer in bytes. It fits one or two outputs and a small tensor.
pub(super) const JSON_BYTES: usize = 512;

/// The total size in bytes below which tensors are appended to the JSON. Copying them is cheaper
/// than another piece.
const SMALL: usize = 4096;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JsonAnswer {
    pub(crate) bytes: Pieces,
    /// The length of the JSON if tensors follow, for the header `Inference-Header-Content-Length`.
    pub(crate) header_length: Option<usize>,
}

/// Returns the maximum size in bytes of the tensors that are written as text.
pub(crate) fn text_bytes(outputs: &[OutputTensor]) -> usize {
    let texts = outputs.iter().filter(|output| output.form == OutputForm::Json);
    texts.map(|output| values::text_bytes(output.datatype, output.data.len())).sum()
}

/// Writes an answer of this model.
pub(crate) fn write_answer(
    model: &Metadata,
    id: &str,
    outputs: &[OutputTensor],
) -> Result<JsonAnswer, RequestFailure> {
    let (mut json, bytes) = (Vec::new(), JSON_BYTES + text_bytes(outputs));
    json.try_reserve_exact(bytes).map_err(|_| RequestFailure::no_memory(bytes))?;
    json.extend_from_slice(b"{\"model_name\":");
    values::write(&mut json, &model.name);
    push(&mut json, format_args!(",\"model_version\":\"{}\"", model.version));
    if !id.is_empty() {
        json.extend_from_slice(b",\"id\":");
        values::write(&mut json, id);
    }
    json.extend_from_slice(b",\"outputs\":[");
    for (position, output) in outputs.iter().enumerate() {
        write_head(output, position > 0, &mut json);
        match output.form {
            OutputForm::Shared(()) => {}
            OutputForm::Binary => {
                push(
                    &mut json,
                    format_args!(",\"parameters\":{{\"binary_data_size\":{}}}", output.data.len()),
                );
            }
            OutputForm::Json => {
                json.extend_from_slice(b",\"data\":");
                values::decode(output.datatype, &output.data, &mut json)
                    .map_err(|why| unwritable(output, &why))?;
            }
        }
        json.push(b'}');
    }
    json.extend_from_slice(b"]}");
    let binary = outputs.iter().filter(|output| output.form == OutputForm::Binary);
    if binary.clone().next().is_none() {
        return Ok(JsonAnswer { bytes: json.into(), header_length: None });
    }
    let header_length = Some(json.len());
    let binary = binary.map(|output| &output.data);
    Ok(JsonAnswer { bytes: append(json, binary), header_length })
}

/// Appends binary tensors to the JSON.
fn append<'d>(mut json: Vec<u8>, binary: impl Iterator<Item = &'d Bytes> + Clone) -> Pieces {
    if binary.clone().map(Bytes::len).sum::<usize>() < SMALL {
        binary.for_each(|data| json.extend_from_slice(data));
        return json.into();
    }
    let mut bytes = Pieces::from(json);
    binary.for_each(|data| bytes.push(data.clone()));
    bytes
}

fn write_head(output: &OutputTensor, follows: bool, json: &mut Vec<u8>) {
    let OutputTensor { name, datatype, shape, .. } = output;
    json.extend_from_slice(if follows { b",{\"name\":" } else { b"{\"name\":" });
    values::write(json, name);
    push(json, format_args!(",\"datatype\":\"{datatype}\",\"shape\":{shape:?}"));
}

/// Returns the failure of an output that JSON cannot represent. The client must request strings
/// that are not UTF-8 as binary data. All other faults are the model's.
pub(super) fn unwritable(output: &OutputTensor, why: &str) -> RequestFailure {
    let message = format!("output '{}' cannot be written as JSON: {why}", output.name);
    match output.datatype {
        Datatype::Bytes => RequestFailure::Invalid(message),
        _ => RequestFailure::Internal(message),
    }
}

fn push(json: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    json.write_fmt(text).expect("writing to memory cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(name: &str, datatype: Datatype, shape: &[i64], data: &[u8]) -> OutputTensor {
        OutputTensor {
            name: name.into(),
            datatype,
            shape: shape.into(),
            data: data.to_vec().into(),
            form: OutputForm::Binary,
        }
    }

    fn model(name: &str) -> Metadata {
        Metadata {
            name: name.into(),
            version: "7".into(),
            platform: "emulated",
            max_batch: 0,
            streams: None,
            inputs: Vec::new(),
            optional: Vec::new(),
            outputs: Vec::new(),
        }
    }

    #[test]
    fn binary_and_json_outputs_share_one_answer() {
        let outputs = [
            output("a", Datatype::Uint8, &[1, 2], &[7, 9]),
            OutputTensor { form: OutputForm::Json, ..output("b", Datatype::Bool, &[2], &[1, 0]) },
            output("c", Datatype::Fp16, &[1], &[0, 60]),
        ];
        let body = write_answer(&model("m\""), "42", &outputs).unwrap();
        let header = body.header_length.unwrap();
        let bytes = body.bytes.into_bytes();
        let json: serde_json::Value = serde_json::from_slice(&bytes[..header]).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "model_name": "m\"", "model_version": "7", "id": "42", "outputs": [
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
        let shared =
            OutputTensor { form: OutputForm::Shared(()), ..output("y", Datatype::Fp32, &[1, 16], &[]) };
        let body = write_answer(&model("m"), "", &[shared]).unwrap();
        assert_eq!(
            &body.bytes.into_bytes()[..],
            br#"{"model_name":"m","model_version":"7","outputs":[{"name":"y","datatype":"FP32","shape":[1, 16]}]}"#
        );
        assert_eq!(body.header_length, None);
    }

    #[test]
    fn large_tensors_are_not_copied_after_the_json() {
        let outputs =
            [SMALL - 1, SMALL].map(|len| output("y", Datatype::Uint8, &[len as i64], &vec![3; len]));
        for (output, pieces) in outputs.iter().zip([1, 2]) {
            let body = write_answer(&model("m"), "", std::slice::from_ref(output)).unwrap();
            assert_eq!(body.bytes.iter().count(), pieces);
            assert_eq!(body.bytes.into_bytes()[body.header_length.unwrap()..], output.data);
        }
    }

    #[test]
    fn an_absent_id_and_absent_binary_outputs_are_not_mentioned() {
        let body = write_answer(&model("m"), "", &[]).unwrap();
        assert_eq!(&body.bytes.into_bytes()[..], br#"{"model_name":"m","model_version":"7","outputs":[]}"#);
        assert_eq!(body.header_length, None);
    }

    #[test]
    fn strings_that_are_not_utf8_must_be_requested_as_binary() {
        let binary = output("s", Datatype::Bytes, &[1], &[1, 0, 0, 0, 0xff]);
        let json = OutputTensor { form: OutputForm::Json, ..binary.clone() };
        let Err(RequestFailure::Invalid(why)) = write_answer(&model("m"), "", &[json]) else { panic!() };
        assert!(why.contains("binary_data"), "{why}");
        assert!(write_answer(&model("m"), "", &[binary]).is_ok());
    }
}
