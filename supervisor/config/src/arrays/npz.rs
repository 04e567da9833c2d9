//! Reads files of `numpy.savez`: ZIP archives of named arrays.

use std::sync::Arc;

use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ZipArchive};

use super::{ArrayError, Arrays, MAX_BYTES, npy, read_up_to};

/// Reads all arrays in an archive.
pub(super) fn read(file: &[u8]) -> Result<Arrays, ArrayError> {
    let archive = ZipArchive::from_slice(file).map_err(ArrayError::Zip)?;
    let mut entries = archive.entries();
    let (mut arrays, mut room) = (Arrays::new(), MAX_BYTES);
    while let Some(header) = entries.next_entry().map_err(ArrayError::Zip)? {
        let name = String::from_utf8_lossy(header.file_path().as_ref()).into_owned();
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_owned();
        let entry = archive.get_entry(header.wayfinder()).map_err(ArrayError::Zip)?;
        let decompressed = match header.compression_method() {
            CompressionMethod::STORE => read_up_to(entry.verifying_reader(entry.data()), room),
            CompressionMethod::DEFLATE => {
                read_up_to(entry.verifying_reader(DeflateDecoder::new(entry.data())), room)
            }
            _ => return Err(ArrayError::Compression(name)),
        };
        let bytes = decompressed.map_err(|error| match error {
            ArrayError::Read(source) => ArrayError::Decompress { name: name.clone(), source },
            ArrayError::TooLarge { .. } => ArrayError::TooLarge { most: MAX_BYTES },
            other => other,
        })?;
        room -= bytes.len();
        let array = npy::read(&bytes)
            .map_err(|source| ArrayError::Array { name: name.clone(), source: Box::new(source) })?;
        arrays.insert(name, Arc::new(array));
    }
    Ok(arrays)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::npy::tests::file;
    use super::*;

    fn archive(entries: &[(&str, Vec<u8>)], method: CompressionMethod) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut archive = rawzip::ZipArchiveWriter::new(&mut bytes);
        for (name, content) in entries {
            let (mut entry, config) = archive.new_file(name).compression_method(method).start().unwrap();
            let descriptor = if method == CompressionMethod::DEFLATE {
                let encoder = flate2::write::DeflateEncoder::new(&mut entry, flate2::Compression::fast());
                let mut writer = config.wrap(encoder);
                writer.write_all(content).unwrap();
                let (encoder, descriptor) = writer.finish().unwrap();
                encoder.finish().unwrap();
                descriptor
            } else {
                let mut writer = config.wrap(&mut entry);
                writer.write_all(content).unwrap();
                writer.finish().unwrap().1
            };
            entry.finish(descriptor).unwrap();
        }
        archive.finish().unwrap();
        bytes
    }

    fn array(elements: usize) -> Vec<u8> {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({elements},), }}");
        file(&header, &vec![1; elements])
    }

    #[test]
    fn arrays_keep_the_names_under_which_they_were_saved() {
        let entries = [("ids.npy", array(2)), ("a mask.npy", array(3))];
        for method in [CompressionMethod::STORE, CompressionMethod::DEFLATE] {
            let arrays = read(&archive(&entries, method)).unwrap();
            let shapes: Vec<_> = arrays.iter().map(|(name, array)| (&**name, array.shape())).collect();
            assert_eq!(shapes, [("a mask", &[3][..]), ("ids", &[2][..])]);
        }
    }

    #[test]
    fn damaged_archives_and_large_contents_are_refused() {
        let whole = archive(&[("x.npy", array(40))], CompressionMethod::DEFLATE);
        for end in 0..whole.len() {
            assert!(read(&whole[..end]).is_err(), "{end}");
            for flip in [1, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[end] ^= flip;
                let _any = read(&changed);
            }
        }
        let bomb =
            archive(&[("x", array(MAX_BYTES / 2)), ("y", array(MAX_BYTES / 2))], CompressionMethod::DEFLATE);
        assert!(bomb.len() < MAX_BYTES / 8);
        assert!(matches!(read(&bomb), Err(ArrayError::TooLarge { .. })));
        let text = archive(&[("readme", b"text".to_vec())], CompressionMethod::STORE);
        assert!(matches!(read(&text), Err(ArrayError::Array { name, .. }) if name == "readme"));
    }
}
