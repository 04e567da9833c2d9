//! The comparison of two answers. It tolerates the differences that also occur between two correct
//! devices.

use half::{bf16, f16};

use crate::tensor::Datatype;

/// An output of an answer.
#[derive(Debug, Clone, Copy)]
pub struct ComparedTensor<'a> {
    /// The shape, with the batch axis.
    pub shape: &'a [i64],
    /// The elements in the encoding of the protocol.
    pub bytes: &'a [u8],
}

/// The way in which an answer differs from the reference. Each variant has the found and the wanted value.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields say what the messages say")]
pub enum AnswerMismatch {
    /// The shapes differ.
    #[error("has the shape {got:?} instead of {want:?}")]
    Shape { got: Vec<i64>, want: Vec<i64> },
    /// Values other than floats differ.
    #[error("differs from the reference")]
    Differs,
    /// One of two floats is not a finite number.
    #[error("is {got} at element {index} instead of {want}")]
    NotANumber { index: usize, got: f64, want: f64 },
    /// Two floats differ by more than the tolerance, relative to the largest value of the output.
    #[error(
        "is {got} at element {index} instead of {want}, off by {off:.3} of its largest value; {allowed} is allowed"
    )]
    Far { index: usize, got: f64, want: f64, off: f64, allowed: f64 },
    /// The largest value of a row is at another position.
    #[error("has its largest value at {got} instead of {want} in row {row}")]
    Argmax { row: usize, got: usize, want: usize },
    /// A row has another direction.
    #[error("has the cosine {cosine:.4} with the reference in row {row}; at least {allowed} is required")]
    Cosine { row: usize, cosine: f64, allowed: f64 },
}

/// The comparison of answers of two versions of a model. It applies only to floats. All other
/// values must be equal, unless nothing is compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AnswerComparison {
    /// The proof's tolerance, as [`compare`] applies it.
    Tolerance,
    /// The position of the largest value along the last axis.
    Argmax,
    /// The smallest cosine of the angle between two vectors along the last axis.
    Cosine(f64),
    /// No comparison.
    Off,
}

impl AnswerComparison {
    /// Compares an output with the reference.
    ///
    /// # Errors
    ///
    /// Returns the way in which the output differs.
    pub fn check(
        self,
        datatype: Datatype,
        want: ComparedTensor<'_>,
        got: ComparedTensor<'_>,
    ) -> Result<(), AnswerMismatch> {
        let rows = match self {
            Self::Off => return Ok(()),
            Self::Tolerance => return compare(datatype, want, got, 1.0).map(drop),
            Self::Argmax | Self::Cosine(_) => Rows::of(datatype, want, got)?,
        };
        let Some(rows) = rows else { return compare(datatype, want, got, 1.0).map(drop) };
        for (row, (want, got)) in rows.pairs().enumerate() {
            match self {
                Self::Argmax => check_argmax(row, want, got)?,
                Self::Cosine(allowed) => check_cosine(row, want, got, allowed)?,
                Self::Tolerance | Self::Off => {}
            }
        }
        Ok(())
    }
}

/// The floats of two outputs with the same shape, in vectors along the last axis.
struct Rows {
    want: Vec<f64>,
    got: Vec<f64>,
    length: usize,
}

impl Rows {
    /// Reads the outputs. Returns `None` if they contain no floats.
    fn of(
        datatype: Datatype,
        want: ComparedTensor<'_>,
        got: ComparedTensor<'_>,
    ) -> Result<Option<Self>, AnswerMismatch> {
        check_shape(want, got)?;
        let length = want.shape.last().and_then(|&axis| usize::try_from(axis).ok()).unwrap_or(1).max(1);
        match (floats(datatype, want.bytes), floats(datatype, got.bytes)) {
            (Some(want), Some(got)) if want.len() == got.len() => Ok(Some(Self { want, got, length })),
            (None, None) => Ok(None),
            _ => Err(AnswerMismatch::Differs),
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (&[f64], &[f64])> {
        self.want.chunks(self.length).zip(self.got.chunks(self.length))
    }
}

/// Returns the position of the largest value. Equal values count as the first one.
fn argmax(values: &[f64]) -> usize {
    let largest = |best: usize, index: usize| if values[index] > values[best] { index } else { best };
    (0..values.len()).fold(0, largest)
}

fn check_argmax(row: usize, want: &[f64], got: &[f64]) -> Result<(), AnswerMismatch> {
    if let Some(index) = got.iter().position(|value| value.is_nan()).filter(|index| !want[*index].is_nan()) {
        return Err(AnswerMismatch::NotANumber { index, got: got[index], want: want[index] });
    }
    let (want, got) = (argmax(want), argmax(got));
    if want == got { Ok(()) } else { Err(AnswerMismatch::Argmax { row, got, want }) }
}

fn check_cosine(row: usize, want: &[f64], got: &[f64], allowed: f64) -> Result<(), AnswerMismatch> {
    let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(one, other)| one * other).sum::<f64>();
    if want == got {
        return Ok(());
    }
    let cosine = dot(want, got) / (dot(want, want).sqrt() * dot(got, got).sqrt());
    // A vector of zeros, an infinity or NaN gives a cosine that is not a number.
    if cosine >= allowed { Ok(()) } else { Err(AnswerMismatch::Cosine { row, cosine, allowed }) }
}

fn check_shape(want: ComparedTensor<'_>, got: ComparedTensor<'_>) -> Result<(), AnswerMismatch> {
    if want.shape == got.shape {
        return Ok(());
    }
    Err(AnswerMismatch::Shape { got: got.shape.to_vec(), want: want.shape.to_vec() })
}

/// Returns the values as floats, or `None` if the datatype is not a floating-point type.
pub fn floats(datatype: Datatype, bytes: &[u8]) -> Option<Vec<f64>> {
    fn all<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|&chunk| value(chunk)).collect()
    }
    match datatype {
        Datatype::Fp16 => Some(all(bytes, |chunk| f16::from_le_bytes(chunk).to_f64())),
        Datatype::Bf16 => Some(all(bytes, |chunk| bf16::from_le_bytes(chunk).to_f64())),
        Datatype::Fp32 => Some(all(bytes, |chunk| f64::from(f32::from_le_bytes(chunk)))),
        Datatype::Fp64 => Some(all(bytes, f64::from_le_bytes)),
        _ => None,
    }
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
pub fn compare(
    datatype: Datatype,
    want: ComparedTensor<'_>,
    got: ComparedTensor<'_>,
    slack: f64,
) -> Result<f64, AnswerMismatch> {
    check_shape(want, got)?;
    match (floats(datatype, want.bytes), floats(datatype, got.bytes)) {
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
    use super::*;

    struct Answer {
        shape: Vec<i64>,
        bytes: Vec<u8>,
    }

    impl Answer {
        fn view(&self) -> ComparedTensor<'_> {
            ComparedTensor { shape: &self.shape, bytes: &self.bytes }
        }
    }

    fn fp32(values: &[f32]) -> Answer {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Answer { shape: vec![i64::try_from(values.len()).unwrap()], bytes }
    }

    fn compare(datatype: Datatype, want: &Answer, got: &Answer, slack: f64) -> Result<f64, AnswerMismatch> {
        super::compare(datatype, want.view(), got.view(), slack)
    }

    fn compared(want: &[f32], got: &[f32]) -> Result<f64, AnswerMismatch> {
        compare(Datatype::Fp32, &fp32(want), &fp32(got), 1.0)
    }

    /// Compares two answers with rows of two values.
    fn checked(rule: AnswerComparison, want: &[f32], got: &[f32]) -> Result<(), AnswerMismatch> {
        let [want, got] = [want, got].map(|values| {
            let rows = i64::try_from(values.len() / 2).unwrap();
            Answer { shape: vec![rows, 2], ..fp32(values) }
        });
        rule.check(Datatype::Fp32, want.view(), got.view())
    }

    #[test]
    fn versions_may_agree_in_the_largest_value_of_each_row_or_in_the_direction() {
        let (want, scaled) = (&[1.0, 2.0, 9.0, 3.0], &[2.0, 4.0, 4.5, 1.5]);
        assert!(checked(AnswerComparison::Tolerance, want, scaled).is_err());
        assert_eq!(checked(AnswerComparison::Argmax, want, scaled), Ok(()));
        assert_eq!(checked(AnswerComparison::Cosine(0.999), want, scaled), Ok(()));
        let swapped = &[1.0, 2.0, 3.0, 9.0];
        let other = AnswerMismatch::Argmax { row: 1, got: 1, want: 0 };
        assert_eq!(checked(AnswerComparison::Argmax, want, swapped), Err(other));
        let turned = checked(AnswerComparison::Cosine(0.9), want, swapped);
        assert!(matches!(turned, Err(AnswerMismatch::Cosine { row: 1, .. })), "{turned:?}");
        assert_eq!(checked(AnswerComparison::Off, want, swapped), Ok(()));
        let broken = &[f32::NAN, 2.0, 9.0, 3.0];
        for rule in [AnswerComparison::Argmax, AnswerComparison::Cosine(0.0)] {
            assert!(checked(rule, want, broken).is_err(), "{rule:?}");
            assert!(checked(rule, want, &want[..2]).is_err(), "{rule:?}: another shape");
        }
        let labels = Answer { shape: vec![1], bytes: vec![1, 0, 0, 0] };
        let others = Answer { shape: vec![1], bytes: vec![2, 0, 0, 0] };
        let check = |got: &Answer| AnswerComparison::Argmax.check(Datatype::Int32, labels.view(), got.view());
        assert!(check(&labels).is_ok() && check(&others).is_err(), "integers must be equal");
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
        let answer = |bytes: &[u8]| Answer { shape: vec![1], bytes: bytes.to_vec() };
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
            |value: f32| Answer { shape: vec![1], bytes: f16::from_f32(value).to_le_bytes().to_vec() };
        assert!(compare(Datatype::Fp16, &halves(1.0), &halves(1.01), 1.0).is_ok());
        assert!(compare(Datatype::Fp16, &halves(1.0), &halves(1.1), 1.0).is_err());
        let brains =
            |value: f32| Answer { shape: vec![1], bytes: bf16::from_f32(value).to_le_bytes().to_vec() };
        assert!(compare(Datatype::Bf16, &brains(1.0), &brains(1.04), 1.0).is_ok());
        assert!(compare(Datatype::Bf16, &brains(1.0), &brains(1.1), 1.0).is_err());
    }
}
