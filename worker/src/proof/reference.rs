//! The reference answers, in the format in which the worker writes them to a memory file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use super::made_up::InputSettings;
use crate::engine::{ProofBasis, TensorData};

/// The reference answers, and the inputs that produce these answers.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Reference {
    pub(super) basis: ProofBasis,
    pub(super) settings: InputSettings,
    pub(super) sizes: Vec<SizeAnswers>,
}

/// The answers at one batch size, in the order of the model's outputs. Their shapes omit the batch
/// axis.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SizeAnswers {
    pub(super) size: u32,
    pub(super) answers: Vec<TensorData>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReferenceError {
    #[error("cannot encode the reference answers; please report this bug")]
    Encode(#[source] postcard::Error),
    #[error("cannot write the reference answers; free host memory")]
    Write(#[source] io::Error),
    #[error("cannot read the reference answers")]
    Read(#[source] io::Error),
    #[error("cannot decode the reference answers; install both programs from one build")]
    Decode(#[source] postcard::Error),
}

impl Reference {
    pub(super) fn write(&self, file: &File) -> Result<(), ReferenceError> {
        let bytes = postcard::to_stdvec(self).map_err(ReferenceError::Encode)?;
        file.write_all_at(&bytes, 0).map_err(ReferenceError::Write)
    }

    /// Reads the file from its start. Other workers have opened the same file and share its
    /// position, so this function neither uses nor changes the position.
    pub(super) fn read(file: &File) -> Result<Self, ReferenceError> {
        let len = file.metadata().map_err(ReferenceError::Read)?.len();
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        file.read_exact_at(&mut bytes, 0).map_err(ReferenceError::Read)?;
        postcard::from_bytes(&bytes).map_err(ReferenceError::Decode)
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::Fill;
    use super::*;

    fn reference() -> Reference {
        let answer = TensorData { shape: vec![2], bytes: vec![1, 2, 3, 250] };
        let input = TensorData { shape: vec![1, 2], bytes: vec![7, 8] };
        let basis = ProofBasis { deterministic: false, inputs: Some(vec![input]) };
        Reference {
            basis,
            settings: InputSettings { fill: Fill::Ones, open_axis: 1, values: vec![None] },
            sizes: vec![SizeAnswers { size: 4, answers: vec![answer] }],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let file = tempfile::tempfile().unwrap();
        reference().write(&file).unwrap();
        let read = Reference::read(&file).unwrap();
        assert_eq!(read, reference());
    }

    #[test]
    fn an_empty_or_cut_file_cannot_be_decoded() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(Reference::read(&file), Err(ReferenceError::Decode(_))));
        reference().write(&file).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        assert!(matches!(Reference::read(&file), Err(ReferenceError::Decode(_))));
    }
}
