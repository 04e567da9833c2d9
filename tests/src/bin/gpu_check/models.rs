//! The models to measure, and the inputs for them.

use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use shadowslice_tests::cases::ClientTensor;
use shadowslice_tests::client::ModelInputSpec;
use shadowslice_tests::random::SplitMix64;

use crate::error::StageError;

/// The models that are measured first, in case the time runs out.
const FIRST: [&str; 5] = ["resnet50", "bert-base", "mobilenet-v2", "alexnet", "vgg19"];

/// The length that is used for a dynamic axis other than the batch axis.
const OPEN_AXIS: i64 = 16;

/// The exclusive upper bound of random INT64 inputs.
const TOKENS: f64 = 1000.0;

/// A model to measure.
#[derive(Debug, Clone)]
pub(crate) struct MeasuredModel {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The size of the model file in bytes, which is close to the size of the weights.
    pub(crate) size: u64,
}

impl MeasuredModel {
    /// Returns true if the name indicates that the model computes in half precision.
    pub(crate) fn is_half(&self) -> bool {
        ["-fp16", "-bf16"].iter().any(|end| self.name.ends_with(end))
    }
}

/// Returns the models in a folder. If `only` is not empty, returns only the models that it names.
pub(crate) fn find(folder: &Path, only: &[String]) -> Result<Vec<MeasuredModel>, StageError> {
    let entries = std::fs::read_dir(folder).map_err(StageError::io("read", folder))?;
    let mut models = BTreeMap::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some_and(|kind| kind == "onnx") && (only.is_empty() || only.contains(&name)) {
            let size = path.metadata().map_err(StageError::io("read", &path))?.len();
            let rank = FIRST.iter().position(|first| *first == name).unwrap_or(FIRST.len());
            models.insert((rank, name.clone()), MeasuredModel { name, path, size });
        }
    }
    if models.is_empty() {
        return Err(StageError::Unusable(format!(
            "no models in {}; create them with make_gpu_models.py",
            folder.display()
        )));
    }
    Ok(models.into_values().collect())
}

/// Makes the random inputs of one request. Each seed produces different inputs.
pub(crate) fn inputs(
    specs: &[ModelInputSpec],
    rows: u32,
    seed: u64,
) -> Result<Vec<ClientTensor>, StageError> {
    let tensor = |ModelInputSpec { name, datatype, shape }: &ModelInputSpec| {
        let mut shape: Vec<i64> = shape.iter().map(|&axis| if axis < 0 { OPEN_AXIS } else { axis }).collect();
        if let Some(batch) = shape.first_mut() {
            *batch = rows.into();
        }
        let data = match datatype.as_str() {
            "FP32" => floats(&shape, seed),
            "INT64" => integers(&shape, seed, name.ends_with("mask")),
            other => {
                return Err(StageError::Unusable(format!("cannot make an input of type {other} for {name}")));
            }
        };
        Ok(ClientTensor { name: name.clone(), datatype: datatype.clone(), shape, data })
    };
    specs.iter().map(tensor).collect()
}

/// Makes FP32 elements that are half noise and half a constant for each channel. Models that
/// average over an image would remove pure noise, so all answers would be equal.
fn floats(shape: &[i64], seed: u64) -> Bytes {
    let mut random = SplitMix64::new(seed);
    let mut normal = || (-2.0 * (1.0 - random.fraction()).ln()).sqrt() * (TAU * random.fraction()).cos();
    let planes: i64 = shape.iter().take(2).product();
    let plane: i64 = shape.iter().skip(2).product();
    let mut bytes = Vec::with_capacity((planes * plane) as usize * 4);
    for _ in 0..planes {
        let level = normal();
        bytes.extend((0..plane).flat_map(|_| ((level + 0.5 * normal()) as f32).to_le_bytes()));
    }
    bytes.into()
}

fn integers(shape: &[i64], seed: u64, mask: bool) -> Bytes {
    let mut random = SplitMix64::new(seed);
    let count: i64 = shape.iter().product();
    let next = |_| if mask { 1_i64 } else { (random.fraction() * TOKENS) as i64 };
    (0..count).map(next).flat_map(i64::to_le_bytes).collect::<Vec<u8>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_have_their_shapes_and_differ_by_seed() {
        let spec = |name: &str, datatype: &str, shape: &[i64]| ModelInputSpec {
            name: name.into(),
            datatype: datatype.into(),
            shape: shape.into(),
        };
        let specs = [
            spec("image", "FP32", &[-1, 3, 4, 4]),
            spec("ids", "INT64", &[-1, -1]),
            spec("attention_mask", "INT64", &[-1, 8]),
        ];
        let made = inputs(&specs, 2, 1).unwrap();
        assert_eq!(made[0].shape, [2, 3, 4, 4]);
        assert_eq!(made[0].data.len(), 2 * 3 * 4 * 4 * 4);
        assert!(made[0].as_fp32().unwrap().all(|value| value.is_finite() && value.abs() < 20.0));
        assert_eq!(made[1].shape, [2, OPEN_AXIS]);
        assert_eq!(made[2].data.as_chunks::<8>().0, [1_i64.to_le_bytes(); 16]);
        assert_ne!(made, inputs(&specs, 2, 2).unwrap());
        assert!(inputs(&[spec("x", "BYTES", &[1])], 1, 1).is_err());
    }
}
