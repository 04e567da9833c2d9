//! Requests with known answers from the files that `models/make_models.py` writes, and the
//! comparison of answers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::Deserialize;

/// An ONNX file whose graph has no operators. It parses as a model, but no engine can load it.
pub const NO_OPERATORS: &[u8] = b"\x08\x09\x3a\x07\x12\x05graph";

/// A tensor with row-major, little-endian elements, in the layout of the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTensor {
    /// The name of the input or output.
    pub name: String,
    /// The datatype in the protocol's notation, such as FP32.
    pub datatype: String,
    /// The shape, including the batch axis.
    pub shape: Vec<i64>,
    pub data: Bytes,
}

impl ClientTensor {
    /// Makes a tensor of FP32 elements.
    pub fn fp32(name: &str, shape: &[i64], elements: &[f32]) -> Self {
        let data = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        Self { name: name.into(), datatype: "FP32".into(), shape: shape.to_vec(), data }
    }

    /// Returns the elements, or `None` if they are not FP32.
    pub fn as_fp32(&self) -> Option<impl Iterator<Item = f32>> {
        let elements = self.data.as_chunks::<4>().0;
        (self.datatype == "FP32").then(|| elements.iter().map(|bytes| f32::from_le_bytes(*bytes)))
    }
}

/// A request, its expected answer, and the true label if it is known.
#[derive(Debug, Clone)]
pub struct RequestCase {
    pub inputs: Vec<ClientTensor>,
    /// The expected answer, which is computed without shadowslice.
    pub outputs: Vec<ClientTensor>,
    /// The true label of the input.
    pub truth: Option<i64>,
}

/// The errors that can occur while a file of cases is loaded.
#[derive(Debug, thiserror::Error)]
pub enum CasesError {
    #[error("cannot read {}; run `make models` to create it", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} does not contain valid cases; remove it and run `make models`", path.display())]
    Parse { path: PathBuf, source: serde_json::Error },
}

pub fn load(path: &Path) -> Result<Vec<RequestCase>, CasesError> {
    let text = fs::read(path).map_err(|source| CasesError::Read { path: path.into(), source })?;
    let file: File =
        serde_json::from_slice(&text).map_err(|source| CasesError::Parse { path: path.into(), source })?;
    Ok(file.cases)
}

/// Returns the absolute path of the folder with the models and their cases.
pub fn models_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("models")
}

#[derive(Deserialize)]
struct File {
    cases: Vec<RequestCase>,
}

#[derive(Deserialize)]
struct RawCase {
    inputs: Vec<RawTensor>,
    outputs: Vec<RawTensor>,
    truth: Option<i64>,
}

#[derive(Deserialize)]
struct RawTensor {
    name: String,
    shape: Vec<i64>,
    #[serde(flatten)]
    elements: Elements,
}

#[derive(Deserialize)]
#[serde(tag = "datatype", content = "data")]
enum Elements {
    #[serde(rename = "FP32")]
    Fp32(Vec<f32>),
    #[serde(rename = "INT64")]
    Int64(Vec<i64>),
}

impl<'de> Deserialize<'de> for RequestCase {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let RawCase { inputs, outputs, truth } = RawCase::deserialize(deserializer)?;
        let tensors = |raw: Vec<RawTensor>| raw.into_iter().map(ClientTensor::from).collect();
        Ok(Self { inputs: tensors(inputs), outputs: tensors(outputs), truth })
    }
}

impl From<RawTensor> for ClientTensor {
    fn from(RawTensor { name, shape, elements }: RawTensor) -> Self {
        match elements {
            Elements::Fp32(elements) => Self::fp32(&name, &shape, &elements),
            Elements::Int64(elements) => {
                let data = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
                Self { name, datatype: "INT64".into(), shape, data }
            }
        }
    }
}

/// Compares an answer with the expected answer. If `tolerance` is positive, FP32 elements may
/// differ by at most `tolerance`. All other elements must be equal byte for byte. The error
/// describes the difference.
pub fn compare(expected: &[ClientTensor], got: &[ClientTensor], tolerance: f32) -> Result<(), String> {
    if expected.len() != got.len() {
        return Err(format!("{} outputs instead of {}", got.len(), expected.len()));
    }
    expected.iter().zip(got).try_for_each(|(expected, got)| compare_tensor(expected, got, tolerance))
}

fn compare_tensor(expected: &ClientTensor, got: &ClientTensor, tolerance: f32) -> Result<(), String> {
    let head = |tensor: &ClientTensor| format!("{} {} {:?}", tensor.name, tensor.datatype, tensor.shape);
    if head(expected) != head(got) || expected.data.len() != got.data.len() {
        return Err(format!(
            "output {} of {} bytes instead of {} of {}",
            head(got),
            got.data.len(),
            head(expected),
            expected.data.len()
        ));
    }
    let close = |want: f32, got: f32| (want - got).abs() <= tolerance;
    match (expected.as_fp32(), got.as_fp32()) {
        _ if expected.data == got.data => Ok(()),
        (Some(wanted), Some(elements)) if tolerance > 0.0 => {
            match wanted.zip(elements).enumerate().find(|(_, (want, got))| !close(*want, *got)) {
                None => Ok(()),
                Some((at, (want, got))) => {
                    Err(format!("output {} element {at} is {got} instead of {want}", expected.name))
                }
            }
        }
        _ => Err(format!("output {} differs", expected.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_read_and_different_answers_are_recognised() {
        let text = r#"{"cases": [{"truth": 3,
            "inputs": [{"name": "a", "datatype": "INT64", "shape": [1, 2], "data": [1, -1]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [0.5, 2]}]}]}"#;
        let case = serde_json::from_str::<File>(text).unwrap().cases.remove(0);
        assert_eq!(case.inputs[0].data.len(), 16);
        assert_eq!(case.inputs[0].data[8..], [0xff; 8]);
        assert_eq!(case.truth, Some(3));

        let answer = |elements: &[f32]| vec![ClientTensor::fp32("y", &[2], elements)];
        assert_eq!(compare(&case.outputs, &answer(&[0.5, 2.00005]), 1e-4), Ok(()));
        assert!(compare(&case.outputs, &answer(&[0.5, 2.1]), 1e-4).unwrap_err().contains("element 1"));
        assert!(compare(&case.outputs, &answer(&[0.5, 2.00005]), 0.0).is_err());
        assert!(compare(&case.outputs, &answer(&[f32::NAN, 2.0]), 1e-4).is_err());
        assert!(compare(&case.outputs, &answer(&[0.5]), 1e-4).is_err());
        assert!(compare(&case.outputs, &[], 1e-4).is_err());
        assert!(compare(&case.inputs, &answer(&[0.5, 2.0]), 1e-4).is_err());
    }
}
