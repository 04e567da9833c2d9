//! Arrays in files, with which inputs are warmed up: `.npy`, `.npz` and JSON.
//!
//! A file is read when the configuration is. An array becomes values of an input once the model's
//! inputs are known ([`ArrayFile::fit`]).

mod fit;
mod json;
mod npy;
mod npz;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shadowslice_shared::boot::ElementValue;
use shadowslice_shared::tensor::{self, Datatype, elements};

pub use fit::ArrayMismatch;

/// The most bytes of a file with arrays, of its arrays when they are decompressed, and of all arrays
/// of one model. The order to warm up carries them ([`shadowslice_shared::boot::BootCommand`]).
pub const MAX_BYTES: usize = 16 << 20;

/// The most bytes of a JSON file. In memory a value takes up to 16 times its text.
const MAX_JSON_BYTES: usize = 4 << 20;

/// An array of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct ArrayFile {
    /// Absolute.
    pub path: PathBuf,
    /// `None` if the file cannot be used; the model is broken then.
    pub array: Option<Arc<Array>>,
}

/// The elements lie row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// `None` if the file doesn't say which.
    datatype: Option<Datatype>,
    /// Whole: the batch axis is included.
    shape: Vec<i64>,
    elements: Elements,
}

#[derive(Debug, Clone, PartialEq)]
enum Elements {
    /// The tensor's bytes, of the array's datatype.
    Bytes(Vec<u8>),
    Values(Vec<ElementValue>),
}

/// The arrays of a file.
#[derive(Debug)]
pub(super) enum Arrays {
    One(Arc<Array>),
    Named(BTreeMap<String, Arc<Array>>),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ArrayError {
    #[error(transparent)]
    Read(io::Error),
    #[error("the end of its name is not .npy, .npz or .json; rename it")]
    UnknownKind,
    #[error("it has more than {} MiB; keep fewer rows", .most >> 20)]
    TooLarge { most: usize },
    #[error("it is not a file of numpy's format; write it with `numpy.save`")]
    NotNpy,
    #[error("its header is damaged; write it with `numpy.save`")]
    Header,
    #[error("its array is in Fortran order; save `numpy.ascontiguousarray(array)`")]
    FortranOrder,
    #[error("its elements are big-endian (`{0}`); save `array.astype(array.dtype.newbyteorder('<'))`")]
    BigEndian(String),
    #[error("it holds Python objects, which are not read; save an array of numbers or of texts")]
    Objects,
    #[error("its dtype `{0}` is not one of a tensor; save booleans, integers, floats or texts")]
    UnknownType(String),
    #[error("its shape is {shape:?}, and it has {bytes} bytes of elements; write it again")]
    Length { shape: Vec<i64>, bytes: usize },
    #[error("its array of shape {0:?} is empty, or has too many elements")]
    Empty(Vec<i64>),
    #[error("its texts are not Unicode; write it again")]
    Text,
    #[error("it is not a file of `numpy.savez`")]
    Zip(#[source] rawzip::Error),
    #[error("its array `{name}` cannot be decompressed")]
    Decompress { name: String, source: io::Error },
    #[error("its array `{0}` is compressed in a way that is not read; write it with `numpy.savez`")]
    Compression(String),
    #[error("its array `{name}` cannot be used")]
    Array { name: String, source: Box<ArrayError> },
    #[error("it is not an array or a request as JSON")]
    Json(#[source] serde_json::Error),
    #[error("its input `{name}` has the shape {shape:?} and {values} values")]
    Count { name: String, shape: Vec<i64>, values: usize },
    #[error("its input `{0}` has no `data`, as in a request with binary data; write the values out")]
    NoData(String),
}

/// Reads the arrays of a file, whose kind the end of its name says.
pub(super) fn read(path: &Path) -> Result<Arrays, ArrayError> {
    super::usable(path).map_err(ArrayError::Read)?;
    let kind = path.extension().map(OsStr::to_ascii_lowercase);
    let bytes = |most| read_up_to(File::open(path).map_err(ArrayError::Read)?, most);
    match kind.as_deref().and_then(OsStr::to_str) {
        Some("npy") => Ok(Arrays::One(Arc::new(npy::read(&bytes(MAX_BYTES)?)?))),
        Some("npz") => npz::read(&bytes(MAX_BYTES)?).map(Arrays::Named),
        Some("json") => json::read(&bytes(MAX_JSON_BYTES)?),
        _ => Err(ArrayError::UnknownKind),
    }
}

fn read_up_to(file: impl io::Read, most: usize) -> Result<Vec<u8>, ArrayError> {
    let mut bytes = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(ArrayError::Read)?;
    if bytes.len() > most { Err(ArrayError::TooLarge { most }) } else { Ok(bytes) }
}

/// Returns how many elements an array of that shape has. An array without elements warms nothing up.
fn count(shape: &[i64]) -> Result<usize, ArrayError> {
    let count = elements(shape).filter(|count| (1..=MAX_BYTES).contains(count));
    count.ok_or_else(|| ArrayError::Empty(shape.to_vec()))
}

impl Array {
    pub(super) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Puts texts into the bytes of a tensor.
    fn of_texts(shape: Vec<i64>, texts: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut bytes = Vec::new();
        texts.for_each(|text| tensor::push_byte_string(&mut bytes, &text));
        Self { datatype: Some(Datatype::Bytes), shape, elements: Elements::Bytes(bytes) }
    }
}
