//! The fields of a request for embeddings.

use serde_json::value::RawValue;
use shadowslice_datapath::pipeline::Metadata;
use shadowslice_shared::tensor::Datatype;

use super::embeddings::VectorEncoding;
use super::error::OpenAiError;
use super::mapping::is_string;
use super::required;
use crate::admission::MemoryPermit;
use crate::tensors::{BoundedList, FieldObject, NamedTensor, field_tensor};

/// The maximum number of texts of a request, as in OpenAI's API.
const MAX_TEXTS: usize = 2048;

/// The field that names the user of the client. It has no effect.
const IGNORED: &str = "user";

const INPUT: &str = "input";

/// A request for embeddings.
pub(super) struct EmbeddingCall {
    /// The tensor of each request to the model.
    pub(super) requests: Vec<NamedTensor>,
    pub(super) encoding: VectorEncoding,
    /// The size of the vectors that the client expects.
    pub(super) dimensions: Option<u64>,
}

impl EmbeddingCall {
    pub(super) fn read(
        mut fields: FieldObject<'_>,
        model: &Metadata,
        input: &str,
        permit: &MemoryPermit,
    ) -> Result<Self, OpenAiError> {
        let texts: &RawValue = required(&mut fields, INPUT, "a text")?;
        let encoding = match fields.take("encoding_format").map(RawValue::get) {
            None | Some("\"float\"") => VectorEncoding::Float,
            Some("\"base64\"") => VectorEncoding::Base64,
            Some(_) => return Err(OpenAiError::field("encoding_format", "must be float or base64")),
        };
        let dimensions = fields.take_as("dimensions", "a whole number");
        let dimensions = dimensions.map_err(|why| OpenAiError::of_field("dimensions", why.into()))?;
        if let Some((name, _)) = fields.iter().find(|(name, _)| *name != IGNORED) {
            return Err(OpenAiError::field(name, "is not a field of this request"));
        }
        let rows = rows(texts, model, input)?;
        let tensor = |row| field_tensor(model, input, row, permit);
        let wrong = |why| OpenAiError::of_field(INPUT, why);
        let rows = rows.into_iter().map(tensor).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
        Ok(Self { requests: join(rows, model.max_batch), encoding, dimensions })
    }
}

/// Returns the value of each row: a string, or an array of tokens.
fn rows<'a>(texts: &'a RawValue, model: &Metadata, input: &str) -> Result<Vec<&'a RawValue>, OpenAiError> {
    let is_text = model.inputs.iter().any(|spec| spec.name == input && spec.datatype == Datatype::Bytes);
    let wanted = if is_text { "a string or an array of strings" } else { "arrays of tokens" };
    let wrong = || OpenAiError::field(INPUT, &format!("must be {wanted} for this model, and not empty"));
    if is_string(texts) {
        return if is_text { Ok(vec![texts]) } else { Err(wrong()) };
    }
    let inner = texts.get().strip_prefix('[').ok_or_else(wrong)?.trim_start();
    if !is_text && inner.starts_with(|first: char| first.is_ascii_digit() || first == '-') {
        return Ok(vec![texts]);
    }
    let rows = serde_json::from_str::<BoundedList<&RawValue, MAX_TEXTS>>(texts.get());
    let BoundedList(rows) =
        rows.map_err(|_| OpenAiError::field(INPUT, &format!("must have at most {MAX_TEXTS} entries")))?;
    let fits = |row: &&RawValue| if is_text { is_string(row) } else { has_items(row) };
    if rows.is_empty() || !rows.iter().all(fits) {
        return Err(wrong());
    }
    Ok(rows)
}

/// Returns whether a value is an array that is not empty.
fn has_items(value: &RawValue) -> bool {
    value.get().strip_prefix('[').is_some_and(|inner| !inner.trim_start().starts_with(']'))
}

/// Returns true if another row fits into a batch. A tensor without axes has no batch axis.
fn has_room(batch: &NamedTensor, max_batch: u32) -> bool {
    batch.shape.first().is_some_and(|&rows| rows < max_batch.into())
}

/// Joins rows of equal shape to batches. A model without a batch axis (`max_batch` is 0) gets each
/// row alone.
fn join(rows: Vec<NamedTensor>, max_batch: u32) -> Vec<NamedTensor> {
    let mut batches: Vec<NamedTensor> = Vec::new();
    for row in rows {
        match batches.last_mut() {
            Some(batch) if has_room(batch, max_batch) && batch.shape[1..] == row.shape[1..] => {
                batch.shape[0] += row.shape[0];
                row.data.iter().for_each(|piece| batch.data.push(piece.clone()));
            }
            _ => batches.push(row),
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use shadowslice_shared::tensor::TensorSpec;

    use super::*;
    use crate::admission::unlimited;

    fn read(datatype: Datatype, max_batch: u32, body: &Value) -> Result<Vec<Vec<i64>>, String> {
        let model = Metadata {
            name: "m".into(),
            version: "1".into(),
            platform: "emulated",
            max_batch,
            streams: None,
            inputs: vec![TensorSpec { name: "x".into(), datatype, shape: vec![-1, -1] }],
            optional: Vec::new(),
            outputs: Vec::new(),
        };
        let (body, permit) = (body.to_string(), unlimited());
        let fields = FieldObject::parse(body.as_bytes(), &permit).unwrap();
        let call = EmbeddingCall::read(fields, &model, "x", &permit).map_err(|why| why.body().to_string())?;
        Ok(call.requests.into_iter().map(|tensor| tensor.shape).collect())
    }

    #[test]
    fn texts_and_tokens_become_batches() {
        for (input, datatype, max_batch, expected) in [
            (json!("a"), Datatype::Bytes, 8, vec![vec![1, 1]]),
            (json!(["a", "b", "c"]), Datatype::Bytes, 2, vec![vec![2, 1], vec![1, 1]]),
            (json!(["a", "b"]), Datatype::Bytes, 0, vec![vec![1, 1], vec![1, 1]]),
            (json!([5, 6, 7]), Datatype::Int64, 8, vec![vec![1, 3]]),
            (json!([[5, 6], [7, 8], [9]]), Datatype::Int64, 8, vec![vec![2, 2], vec![1, 1]]),
        ] {
            assert_eq!(read(datatype, max_batch, &json!({"input": input})), Ok(expected), "{input}");
        }
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        for (body, datatype, param) in [
            (json!({}), Datatype::Bytes, "input"),
            (json!({"input": []}), Datatype::Bytes, "input"),
            (json!({"input": []}), Datatype::Int64, "input"),
            (json!({"input": [1]}), Datatype::Bytes, "input"),
            (json!({"input": [[1], []]}), Datatype::Int64, "input"),
            (json!({"input": [[1], 2]}), Datatype::Int64, "input"),
            (json!({"input": [true]}), Datatype::Int64, "input"),
            (json!({"input": "a"}), Datatype::Int64, "input"),
            (json!({"input": ["a", 1]}), Datatype::Bytes, "input"),
            (json!({"input": vec!["a"; MAX_TEXTS + 1]}), Datatype::Bytes, "input"),
            (json!({"input": 7}), Datatype::Bytes, "input"),
            (json!({"input": "a", "encoding_format": "hex"}), Datatype::Bytes, "encoding_format"),
            (json!({"input": "a", "dimensions": -1}), Datatype::Bytes, "dimensions"),
            (json!({"input": "a", "truncate": true}), Datatype::Bytes, "truncate"),
        ] {
            let why = read(datatype, 8, &body).unwrap_err();
            assert!(why.contains(&format!("\"param\":\"{param}\"")), "{body}: {why}");
        }
    }
}
