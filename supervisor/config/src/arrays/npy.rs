//! Reads files of `numpy.save`: a header that is a Python literal, followed by the elements.
//!
//! After its parentheses are replaced with brackets, the header is YAML. The parser for YAML limits the
//! nesting of values, which the existing crates for this format do not.

use std::path::Path;

use shadowslice_shared::tensor::Datatype;

use super::{Array, ArrayError, Elements, count};
use crate::faults::FaultLog;
use crate::yaml::{self, YamlContent};

const MAGIC: &[u8] = b"\x93NUMPY";

/// The largest header in bytes. numpy has the same limit for untrusted files.
const MAX_HEADER_BYTES: usize = 10_000;

/// Reads the array of a file.
pub(super) fn read(file: &[u8]) -> Result<Array, ArrayError> {
    let rest = file.strip_prefix(MAGIC).ok_or(ArrayError::NotNpy)?;
    let ([major, _minor], rest) = rest.split_first_chunk().ok_or(ArrayError::Header)?;
    let (length, rest) = match major {
        1 => rest.split_first_chunk().map(|(length, rest)| (u16::from_le_bytes(*length).into(), rest)),
        _ => rest.split_first_chunk().map(|(length, rest)| (u32::from_le_bytes(*length) as usize, rest)),
    }
    .ok_or(ArrayError::Header)?;
    let (header, bytes) =
        rest.split_at_checked(length).filter(|_| length <= MAX_HEADER_BYTES).ok_or(ArrayError::Header)?;
    let header = std::str::from_utf8(header).map_err(|_| ArrayError::Header)?;
    let Header { descr, fortran_order, shape } = Header::parse(header).ok_or(ArrayError::Header)?;
    let kind = Kind::of(&descr)?;
    if fortran_order {
        return Err(ArrayError::FortranOrder);
    }
    let expected = count(&shape)?.checked_mul(kind.size());
    if expected != Some(bytes.len()) {
        return Err(ArrayError::Length { shape, bytes: bytes.len() });
    }
    kind.array(shape, bytes)
}

/// The type of the elements.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Numbers(Datatype, usize),
    /// Byte strings of this length in bytes, padded with zero bytes.
    Bytes(usize),
    /// Texts of this length in characters, padded with zeros. A character takes 4 bytes.
    Characters(usize),
}

impl Kind {
    /// Parses numpy's name of a dtype, such as `<f4`.
    fn of(descr: &str) -> Result<Self, ArrayError> {
        let unknown = || ArrayError::UnknownType(descr.chars().take(40).collect());
        let (order, rest) = descr.split_at_checked(1).ok_or_else(unknown)?;
        if rest.starts_with('O') {
            return Err(ArrayError::Objects);
        }
        let (kind, size) = rest.split_at_checked(1).ok_or_else(unknown)?;
        let size: usize = size.parse().map_err(|_| unknown())?;
        // The elements may have any byte order if each has only one byte.
        if order == ">" && size > 1 && kind != "S" {
            return Err(ArrayError::BigEndian(descr.to_owned()));
        }
        let datatype = match (kind, size) {
            ("b", 1) => Datatype::Bool,
            ("u", 1) => Datatype::Uint8,
            ("u", 2) => Datatype::Uint16,
            ("u", 4) => Datatype::Uint32,
            ("u", 8) => Datatype::Uint64,
            ("i", 1) => Datatype::Int8,
            ("i", 2) => Datatype::Int16,
            ("i", 4) => Datatype::Int32,
            ("i", 8) => Datatype::Int64,
            ("f", 2) => Datatype::Fp16,
            ("f", 4) => Datatype::Fp32,
            ("f", 8) => Datatype::Fp64,
            ("S", 1..) => return Ok(Self::Bytes(size)),
            ("U", 1..) => return Ok(Self::Characters(size)),
            _ => return Err(unknown()),
        };
        Ok(Self::Numbers(datatype, size))
    }

    /// Returns the number of bytes of an element.
    fn size(self) -> usize {
        match self {
            Self::Numbers(_, size) | Self::Bytes(size) => size,
            Self::Characters(characters) => characters.saturating_mul(4),
        }
    }

    fn array(self, shape: Vec<i64>, bytes: &[u8]) -> Result<Array, ArrayError> {
        let elements = bytes.chunks_exact(self.size());
        match self {
            Self::Numbers(Datatype::Bool, _) if bytes.iter().any(|&byte| byte > 1) => {
                Err(ArrayError::UnknownType("bool with bytes other than 0 and 1".to_owned()))
            }
            Self::Numbers(datatype, _) => {
                Ok(Array { datatype: Some(datatype), shape, elements: Elements::Bytes(bytes.to_vec()) })
            }
            Self::Bytes(_) => Ok(Array::of_texts(shape, elements.map(|text| without_zeros(text).to_vec()))),
            Self::Characters(_) => {
                let texts: Vec<_> = elements.map(utf8).collect::<Option<_>>().ok_or(ArrayError::Text)?;
                Ok(Array::of_texts(shape, texts.into_iter()))
            }
        }
    }
}

fn without_zeros(text: &[u8]) -> &[u8] {
    let end = text.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    &text[..end]
}

/// Converts a text with 4 bytes per character to UTF-8.
fn utf8(text: &[u8]) -> Option<Vec<u8>> {
    let (characters, _) = text.as_chunks();
    let text: Option<String> =
        characters.iter().map(|&bytes| char::from_u32(u32::from_le_bytes(bytes))).collect();
    Some(text?.trim_end_matches('\0').as_bytes().to_vec())
}

#[derive(Debug, PartialEq)]
struct Header {
    descr: String,
    fortran_order: bool,
    shape: Vec<i64>,
}

impl Header {
    /// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`, with the keys in any
    /// order.
    fn parse(text: &str) -> Option<Self> {
        let log = FaultLog::new(Path::new(""));
        let header = yaml::parse(&text.replace('(', "[").replace(')', "]"), "", &log)?;
        let fortran_order = match header.get("fortran_order")?.text()? {
            "True" => true,
            "False" => false,
            _ => return None,
        };
        // A structured dtype is a list of fields. Tensors have no fields, so that the caller rejects
        // it.
        let descr = header.get("descr")?.text().unwrap_or("structured").to_owned();
        let YamlContent::List(axes) = &header.get("shape")?.content else { return None };
        // Python 2 wrote a long integer with the suffix `L`.
        let axis = |axis: &str| axis.trim_end_matches('L').parse().ok().filter(|&axis| axis >= 0);
        let shape = axes.iter().map(|node| node.text().and_then(axis)).collect::<Option<_>>()?;
        Some(Self { descr, fortran_order, shape }).filter(|_| log.into_sorted().is_empty())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn file(header: &str, bytes: &[u8]) -> Vec<u8> {
        let length = u16::try_from(header.len()).unwrap().to_le_bytes();
        [MAGIC, &[1, 0], &length, header.as_bytes(), bytes].concat()
    }

    fn of(descr: &str, shape: &str, bytes: &[u8]) -> Result<Array, String> {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}   \n");
        read(&file(&header, bytes)).map_err(|error| error.to_string())
    }

    #[test]
    fn an_array_has_the_type_and_the_shape_of_its_header() {
        let array = of("<i2", "(2, 2)", &[1, 0, 2, 0, 3, 0, 4, 0]).unwrap();
        assert_eq!((array.datatype, array.shape()), (Some(Datatype::Int16), &[2, 2][..]));
        assert_eq!(of("|u1", "()", &[7]).unwrap().shape(), [0_i64; 0]);
        assert_eq!(of("|b1", "(3L,)", &[0, 1, 1]).unwrap().shape(), [3]);
        let later = [MAGIC, &[2, 0], &54_u32.to_le_bytes()].concat();
        let header = "{\"shape\": (1,), 'fortran_order': False,'descr':'<f4'}  ";
        let later = [&later, &header.as_bytes()[..54], &1_f32.to_le_bytes()].concat();
        assert_eq!(read(&later).unwrap().datatype, Some(Datatype::Fp32));
    }

    #[test]
    fn texts_lose_the_zeros_at_their_ends() {
        let expected = Array::of_texts(vec![2], [b"Wien".to_vec(), "Köln".into()].into_iter());
        let wide: Vec<u8> = "Wien\0Köln\0".chars().flat_map(|c| u32::from(c).to_le_bytes()).collect();
        assert_eq!(of("<U5", "(2,)", &wide), Ok(expected));
        assert_eq!(of("|S3", "(1,)", b"a\0\0"), Ok(Array::of_texts(vec![1], std::iter::once(b"a".to_vec()))));
        assert!(of("<U1", "(1,)", &[0xff; 4]).unwrap_err().contains("Unicode"));
    }

    #[test]
    fn arrays_that_are_not_tensors_are_refused_with_the_reason() {
        for (descr, shape, bytes, why) in [
            (">f4", "(1,)", 4, "big-endian"),
            (">U4", "(1,)", 16, "big-endian"),
            ("|O", "(1,)", 8, "Python objects"),
            ("<c8", "(1,)", 8, "dtype `<c8`"),
            ("<M8[ns]", "(1,)", 8, "dtype `<M8[ns]`"),
            ("|V2", "(1,)", 2, "dtype `|V2`"),
            ("<f4", "(2,)", 4, "[2], but the file has 4 bytes"),
            ("<f4", "(0, 3)", 0, "is empty"),
            ("<f4", "(9223372036854775807, 3)", 0, "too many elements"),
            ("<U99999999999", "(1,)", 0, "0 bytes"),
            ("<f4", "(-1,)", 4, "damaged"),
            ("", "(1,)", 4, "dtype ``"),
            ("é", "(1,)", 4, "dtype `é`"),
        ] {
            let error = of(descr, shape, &vec![2; bytes]).unwrap_err();
            assert!(error.contains(why), "{descr} {shape}: {error}");
        }
        let fields = "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}";
        assert!(matches!(read(&file(fields, &[0; 4])), Err(ArrayError::UnknownType(_))));
        let fortran = "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1)}";
        assert!(matches!(read(&file(fortran, &[0; 4])), Err(ArrayError::FortranOrder)));
        assert!(of("|b1", "(1,)", &[2]).is_err());
    }

    #[test]
    fn a_truncated_or_changed_file_is_refused() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }";
        let whole = file(header, &[1, 2, 3, 4, 5, 6, 7, 8]);
        read(&whole).unwrap();
        for end in 0..whole.len() {
            assert!(read(&whole[..end]).is_err(), "{end}");
            let mut changed = whole.clone();
            changed[end] ^= 0x55;
            let _any = read(&changed);
        }
        let long = [MAGIC, &[2, 0], &u32::MAX.to_le_bytes(), &[b'('; 100]].concat();
        assert!(matches!(read(&long), Err(ArrayError::Header)));
    }
}
