//! The comparison of two answers. It tolerates the differences that also occur between two correct
//! devices.

use shadowslice_shared::tensor::Datatype;

use super::floats::floats;
use crate::engine::TensorData;

/// The way in which an answer differs from the reference.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum AnswerMismatch {
    #[error("has the shape {got:?} instead of {want:?}")]
    Shape { got: Vec<i64>, want: Vec<i64> },
    #[error("differs from the reference")]
    Differs,
    #[error("is {got} at element {index} instead of {want}")]
    NotANumber { index: usize, got: f64, want: f64 },
    #[error(
        "is {got} at element {index} instead of {want}, off by {off:.3} of its largest value; {allowed} is allowed"
    )]
    Far { index: usize, got: f64, want: f64, off: f64, allowed: f64 },
}

/// Returns the allowed difference of a float from the reference, relative to the output's largest
/// magnitude.
///
/// Two correct kernels may add numbers in a different order. On a GPU, they may also use TF32,
/// which keeps ten bits of each factor. In a deep network, these differences add up to some
/// thousandths. Rounding to half precision already causes an error of that size. Rounding to
/// bfloat16, which has eight bits, causes ten times that error. A defective kernel gives answers
/// that are off by about 0.9.
fn tolerance(datatype: Datatype) -> f64 {
    match datatype {
        Datatype::Bf16 => 0.05,
        Datatype::Fp16 => 0.02,
        _ => 0.01,
    }
}

/// Returns the difference of the answer from the reference, relative to the output's largest
/// magnitude. Floats can differ by `slack` times the usual tolerance. All other values must be
/// equal.
pub(super) fn compare(
    datatype: Datatype,
    want: &TensorData,
    got: &TensorData,
    slack: f64,
) -> Result<f64, AnswerMismatch> {
    if want.shape != got.shape {
        return Err(AnswerMismatch::Shape { got: got.shape.clone(), want: want.shape.clone() });
    }
    match (floats(datatype, &want.bytes), floats(datatype, &got.bytes)) {
        (Some(want), Some(got)) if want.len() == got.len() => {
            compare_floats(&want, &got, tolerance(datatype) * slack)
        }
        _ if want.bytes == got.bytes => Ok(0.0),
        _ => Err(AnswerMismatch::Differs),
    }
}

fn compare_floats(want: &[f64], got: &[f64], allowed: f64) -> Result<f64, AnswerMismatch> {
    let finite = want.iter().filter(|value| value.is_finite());
    let largest = finite.fold(0.0_f64, |largest, value| largest.max(value.abs()));
    // If the reference is all zeros, 1 is the scale, because the magnitude of the inputs is 1.
    let scale = if largest > 0.0 { largest } else { 1.0 };
    let mut farthest = 0.0_f64;
    for (index, (&want, &got)) in want.iter().zip(got).enumerate() {
        let same = want == got || (want.is_nan() && got.is_nan());
        if same {
            continue;
        }
        if !want.is_finite() || !got.is_finite() {
            return Err(AnswerMismatch::NotANumber { index, got, want });
        }
        let off = (want - got).abs() / scale;
        if off > allowed {
            return Err(AnswerMismatch::Far { index, got, want, off, allowed });
        }
        farthest = farthest.max(off);
    }
    Ok(farthest)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn fp32(values: &[f32]) -> TensorData {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        TensorData { shape: vec![i64::try_from(values.len()).unwrap()], bytes }
    }

    fn compared(want: &[f32], got: &[f32]) -> Result<f64, AnswerMismatch> {
        compare(Datatype::Fp32, &fp32(want), &fp32(got), 1.0)
    }

    #[test]
    fn floats_are_held_against_the_largest_of_them() {
        assert!(compared(&[100.0, 0.0], &[100.5, 0.9]).is_ok());
        assert!(matches!(compared(&[100.0, 0.0], &[100.0, 1.1]), Err(AnswerMismatch::Far { index: 1, .. })));
        assert!(
            matches!(compared(&[1e-6, 0.0], &[1e-6, 1e-7]), Err(AnswerMismatch::Far { .. })),
            "small outputs too"
        );
        assert!(compared(&[0.0], &[1e-4]).is_ok());
        assert!(matches!(compared(&[0.0], &[0.5]), Err(AnswerMismatch::Far { .. })));
    }

    #[test]
    fn infinities_and_nan_must_be_the_same() {
        let (nan, infinity) = (f32::NAN, f32::INFINITY);
        assert!(compared(&[nan, infinity], &[nan, infinity]).is_ok());
        for (want, got) in [(nan, 0.0), (0.0, nan), (infinity, -infinity), (1.0, infinity), (infinity, 1.0)] {
            assert!(
                matches!(compared(&[want], &[got]), Err(AnswerMismatch::NotANumber { .. })),
                "{want} {got}"
            );
        }
    }

    #[test]
    fn all_else_must_be_equal_and_of_one_shape() {
        let answer = |bytes: &[u8]| TensorData { shape: vec![1], bytes: bytes.to_vec() };
        assert!(compare(Datatype::Int32, &answer(&[1, 0, 0, 0]), &answer(&[1, 0, 0, 0]), 1.0).is_ok());
        let off = compare(Datatype::Int32, &answer(&[1, 0, 0, 0]), &answer(&[2, 0, 0, 0]), 1.0);
        assert_eq!(off, Err(AnswerMismatch::Differs));
        assert_eq!(
            compare(Datatype::Fp32, &answer(&[0; 8]), &answer(&[0; 4]), 1.0),
            Err(AnswerMismatch::Differs)
        );
        assert!(matches!(compared(&[1.0], &[1.0, 1.0]), Err(AnswerMismatch::Shape { .. })));
    }

    #[test]
    fn halves_are_read_as_halves() {
        let halves =
            |value: f32| TensorData { shape: vec![1], bytes: f16::from_f32(value).to_le_bytes().to_vec() };
        assert!(compare(Datatype::Fp16, &halves(1.0), &halves(1.01), 1.0).is_ok());
        assert!(compare(Datatype::Fp16, &halves(1.0), &halves(1.1), 1.0).is_err());
        let brains =
            |value: f32| TensorData { shape: vec![1], bytes: bf16::from_f32(value).to_le_bytes().to_vec() };
        assert!(compare(Datatype::Bf16, &brains(1.0), &brains(1.04), 1.0).is_ok());
        assert!(compare(Datatype::Bf16, &brains(1.0), &brains(1.1), 1.0).is_err());
    }
}
