//! Reads arrays from files (`.npy`, `.npz` and JSON). The warm-up uses the arrays as values of
//! inputs.
//!
//! The supervisor reads these files together with the configuration. As soon as the supervisor
//! knows a model's inputs, it converts the arrays to the values of these inputs
//! ([`ArrayFile::fit`]).

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

use shadowslice_shared::tensor::{self, Datatype, elements};

/// The limit in bytes on each of three sizes: one array file, its decompressed arrays, and all
/// arrays of a model. The warm-up command ([`shadowslice_shared::boot::BootCommand`]) contains the
/// arrays, so their size must be limited.
pub const MAX_BYTES: usize = 16 << 20;

/// The largest JSON file, in bytes. In memory, a value takes up to 16 times the size of its text.
const MAX_JSON_BYTES: usize = 4 << 20;

/// An array in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct ArrayFile {
    /// The absolute path of the file.
    pub path: PathBuf,
    /// The array, or `None` if the file cannot be used. In that case the reader has already
    /// recorded a fault.
    pub array: Option<Arc<Array>>,
}

/// An array with its elements in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// The datatype, or `None` if the file does not give one.
    datatype: Option<Datatype>,
    /// The whole shape, including the batch axis.
    shape: Vec<i64>,
    elements: Elements,
}

#[derive(Debug, Clone, PartialEq)]
enum Elements {
    /// The tensor's bytes in the array's datatype.
    Bytes(Vec<u8>),
    Values(Vec<serde_json::Value>),
}

/// The arrays of a file by name. An array without a name has the name `""`.
pub(super) type Arrays = BTreeMap<String, Arc<Array>>;

#[derive(Debug, thiserror::Error)]
pub(super) enum ArrayError {
    #[error(transparent)]
    Read(io::Error),
    #[error("unknown extension; use .npy, .npz or .json")]
    UnknownKind,
    #[error("the arrays have more than {} MiB; keep fewer rows", .most >> 20)]
    TooLarge { most: usize },
    #[error("this is not a file in numpy's format; write the file with `numpy.save`")]
    NotNpy,
    #[error("the header is damaged; write the file with `numpy.save`")]
    Header,
    #[error("the array is in Fortran order; save `numpy.ascontiguousarray(array)`")]
    FortranOrder,
    #[error("the elements are big-endian (`{0}`); save `array.astype(array.dtype.newbyteorder('<'))`")]
    BigEndian(String),
    #[error("Python objects are not supported; save an array of numbers or texts")]
    Objects,
    #[error("unsupported dtype `{0}`; save booleans, integers, floats or texts")]
    UnknownType(String),
    #[error("the shape is {shape:?}, but the file has {bytes} bytes of elements; save the array again")]
    Length { shape: Vec<i64>, bytes: usize },
    #[error("the array of shape {0:?} is empty, or has too many elements; save another array")]
    Empty(Vec<i64>),
    #[error("a text of the array is not valid Unicode; replace it, and save the array again")]
    Text,
    #[error("this is not a valid ZIP archive; write the file with `numpy.savez`")]
    Zip(#[source] rawzip::Error),
    #[error("cannot decompress the array `{name}`; write the file with `numpy.savez`")]
    Decompress { name: String, source: io::Error },
    #[error("unsupported compression of the array `{0}`; write the file with `numpy.savez`")]
    Compression(String),
    #[error("cannot use the array `{name}`")]
    Array { name: String, source: Box<ArrayError> },
    #[error("this is neither an array nor an inference request in JSON; use for example `[[1, 2]]`")]
    Json(#[source] serde_json::Error),
    #[error("the lists have different lengths, or more than 32 axes; use for example `[[1, 2], [3, 4]]`")]
    Ragged,
    #[error("the input `{name}` has shape {shape:?}, but {values} values; correct one of them")]
    Count { name: String, shape: Vec<i64>, values: usize },
    #[error("the input `{0}` has no `data`, as in a request with binary data; write out the values")]
    NoData(String),
}

/// Reads the arrays of a file in the format that the file's extension names.
pub(super) fn read(path: &Path) -> Result<Arrays, ArrayError> {
    super::usable(path).map_err(ArrayError::Read)?;
    let kind = path.extension().map(OsStr::to_ascii_lowercase);
    let bytes = |most| read_up_to(File::open(path).map_err(ArrayError::Read)?, most);
    match kind.as_deref().and_then(OsStr::to_str) {
        Some("npy") => Ok(unnamed(npy::read(&bytes(MAX_BYTES)?)?)),
        Some("npz") => npz::read(&bytes(MAX_BYTES)?),
        Some("json") => json::read(&bytes(MAX_JSON_BYTES)?),
        _ => Err(ArrayError::UnknownKind),
    }
}

fn unnamed(array: Array) -> Arrays {
    BTreeMap::from([(String::new(), Arc::new(array))])
}

fn read_up_to(file: impl io::Read, most: usize) -> Result<Vec<u8>, ArrayError> {
    let mut bytes = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(ArrayError::Read)?;
    if bytes.len() > most { Err(ArrayError::TooLarge { most }) } else { Ok(bytes) }
}

/// Returns the number of elements of an array. Fails if the array has no elements, because it would
/// supply no values for the warm-up.
fn count(shape: &[i64]) -> Result<usize, ArrayError> {
    let count = elements(shape).filter(|count| (1..=MAX_BYTES).contains(count));
    count.ok_or_else(|| ArrayError::Empty(shape.to_vec()))
}

impl Array {
    pub(super) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Creates a BYTES array from these texts.
    fn of_texts(shape: Vec<i64>, texts: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut bytes = Vec::new();
        texts.for_each(|text| tensor::push_byte_string(&mut bytes, &text));
        Self { datatype: Some(Datatype::Bytes), shape, elements: Elements::Bytes(bytes) }
    }
}
