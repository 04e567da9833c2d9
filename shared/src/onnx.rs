//! The parts of ONNX models that the supervisor and the workers read. The field numbers are those of
//! `onnx.proto`.
//!
//! The tensors' data is never read: the messages do not declare it, and [`decode`] skips large
//! fields that no message declares. A file of several GB therefore takes little time and memory.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::PathBuf;

use prost::Message;
use prost::bytes::Buf;

use crate::tensor::Datatype;

/// A model without its operators.
#[derive(Clone, PartialEq, Message)]
pub struct ModelHeader {
    /// The main graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphHeader>,
}

/// The tensors and the inputs of a graph.
#[derive(Clone, PartialEq, Message)]
pub struct GraphHeader {
    /// The constants of the graph.
    #[prost(message, repeated, tag = "5")]
    pub initializers: Vec<TensorProto>,
    /// The inputs of the graph. In older versions of the format, every constant is also an input.
    #[prost(message, repeated, tag = "11")]
    pub inputs: Vec<ValueInfoProto>,
}

/// A model with its operators and tensors.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    /// The main graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// The model's own operators.
    #[prost(message, repeated, tag = "25")]
    pub functions: Vec<FunctionProto>,
}

/// An operator that consists of other operators.
#[derive(Clone, PartialEq, Message)]
pub struct FunctionProto {
    /// The operators of the function.
    #[prost(message, repeated, tag = "7")]
    pub nodes: Vec<NodeProto>,
}

/// The main graph of a model, a branch of an `If` operator, or the body of a loop.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    /// The operators of the graph.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NodeProto>,
    /// The constants of the graph.
    #[prost(message, repeated, tag = "5")]
    pub initializers: Vec<TensorProto>,
}

/// An operator in a graph.
#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    /// The names of the operator's inputs.
    #[prost(string, repeated, tag = "1")]
    pub inputs: Vec<String>,
    /// The type of the operator, for example `Conv`.
    #[prost(string, tag = "4")]
    pub operator: String,
    /// The settings of the operator.
    #[prost(message, repeated, tag = "5")]
    pub attributes: Vec<AttributeProto>,
    /// The domain of the operator's type. It is empty for ONNX's own operators.
    #[prost(string, tag = "7")]
    pub domain: String,
}

/// An attribute of an operator. Its graphs are the branches of an `If` operator or the body of a
/// loop.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    /// The name of the attribute.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The value of an attribute that is a whole number.
    #[prost(int64, tag = "3")]
    pub number: i64,
    /// The value of an attribute that is a graph.
    #[prost(message, optional, tag = "6")]
    pub graph: Option<GraphProto>,
    /// The value of an attribute that is a list of graphs.
    #[prost(message, repeated, tag = "11")]
    pub graphs: Vec<GraphProto>,
}

/// A constant, without its data.
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    /// The shape.
    #[prost(int64, repeated, tag = "1")]
    pub shape: Vec<i64>,
    /// ONNX's number for the datatype of the elements.
    #[prost(int32, tag = "2")]
    pub element: i32,
    /// The name of the constant.
    #[prost(string, tag = "8")]
    pub name: String,
    /// The properties that say where the data is, if another file contains the data.
    #[prost(message, repeated, tag = "13")]
    pub external: Vec<ExternalEntry>,
}

/// A property of a tensor whose data is in another file.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalEntry {
    /// `location` (the path of the file, relative to the model's folder), `offset` or `length`.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value of the property.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// An input of a graph.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    /// The name of the input.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The type of the input.
    #[prost(message, optional, tag = "2")]
    pub kind: Option<TypeProto>,
}

/// The type of an input.
#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    /// The tensor type, or `None` if the input is not a tensor.
    #[prost(message, optional, tag = "1")]
    pub tensor: Option<TensorTypeProto>,
}

/// The type of a tensor.
#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    /// ONNX's number for the datatype of the elements.
    #[prost(int32, tag = "1")]
    pub element: i32,
    /// The shape, or `None` if the number of axes is unknown.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<ShapeProto>,
}

/// The shape of an input.
#[derive(Clone, PartialEq, Message)]
pub struct ShapeProto {
    /// The axes.
    #[prost(message, repeated, tag = "1")]
    pub axes: Vec<AxisProto>,
}

/// An axis of a shape.
#[derive(Clone, PartialEq, Message)]
pub struct AxisProto {
    /// The length, or 0 if the axis has a name instead of a length.
    #[prost(int64, tag = "1")]
    pub length: i64,
}

impl ModelProto {
    /// Returns the operators of the main graph.
    pub fn nodes(&self) -> &[NodeProto] {
        self.graph.as_ref().map_or(&[], |graph| &graph.nodes)
    }

    /// Returns the constants of the main graph.
    pub fn tensors(&self) -> &[TensorProto] {
        self.graph.as_ref().map_or(&[], |graph| &graph.initializers)
    }
}

impl TensorProto {
    /// Returns a property of the tensor's data in another file.
    pub fn external(&self, key: &str) -> Option<&str> {
        self.external.iter().find(|property| property.key == key).map(|property| property.value.as_str())
    }
}

/// Returns the files that contain data of these tensors, as paths relative to the model's folder.
pub fn external_files(tensors: &[TensorProto]) -> BTreeSet<PathBuf> {
    tensors.iter().filter_map(|tensor| tensor.external("location")).map(PathBuf::from).collect()
}

/// Returns the datatype for ONNX's number of an element type.
pub fn datatype_of(number: i32) -> Option<Datatype> {
    match number {
        1 => Some(Datatype::Fp32),
        2 => Some(Datatype::Uint8),
        3 => Some(Datatype::Int8),
        4 => Some(Datatype::Uint16),
        5 => Some(Datatype::Int16),
        6 => Some(Datatype::Int32),
        7 => Some(Datatype::Int64),
        8 => Some(Datatype::Bytes),
        9 => Some(Datatype::Bool),
        10 => Some(Datatype::Fp16),
        11 => Some(Datatype::Fp64),
        12 => Some(Datatype::Uint32),
        13 => Some(Datatype::Uint64),
        16 => Some(Datatype::Bf16),
        _ => None,
    }
}

/// Decodes a message, for example a [`ModelHeader`], from a file. Fails if the message is
/// incomplete ([`io::ErrorKind::UnexpectedEof`]) or invalid ([`io::ErrorKind::InvalidData`]), or if
/// it takes more than `max_read` bytes apart from skipped fields.
pub fn decode<M: Message + Default>(mut file: impl Read + Seek, max_read: u64) -> io::Result<M> {
    let length = file.seek(SeekFrom::End(0))?;
    file.rewind()?;
    let left = usize::try_from(length).map_err(io::Error::other)?;
    let mut buffer = FileBuffer { reader: BufReader::new(file), left, may_read: max_read, fault: None };
    buffer.skip(0);
    let decoded = M::decode(&mut buffer);
    match buffer.fault {
        Some(fault) => Err(fault),
        None => decoded.map_err(|error| {
            // prost tells the kind of an error only in its text.
            let is_cut_off = error.to_string().ends_with("buffer underflow");
            let kind = if is_cut_off { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::InvalidData };
            io::Error::new(kind, error)
        }),
    }
}

/// A file in the form in which prost reads it.
struct FileBuffer<R> {
    reader: BufReader<R>,
    /// The number of bytes from the current position to the end of the file.
    left: usize,
    /// The number of bytes that may still be read from the file.
    may_read: u64,
    /// The reason why the file cannot be read further. The buffer then appears to be at its end.
    fault: Option<io::Error>,
}

impl<R: Read + Seek> FileBuffer<R> {
    fn skip(&mut self, count: usize) {
        if let Err(fault) = self.try_skip(count) {
            self.left = 0;
            self.fault = Some(fault);
        }
    }

    fn try_skip(&mut self, count: usize) -> io::Result<()> {
        self.reader.seek_relative(i64::try_from(count).map_err(io::Error::other)?)?;
        self.left -= count;
        if self.left == 0 || !self.reader.buffer().is_empty() {
            return Ok(());
        }
        let read = self.reader.fill_buf()?.len() as u64;
        if read == 0 {
            return Err(io::Error::other("the file became shorter while it was read; copy it again"));
        }
        self.may_read = self.may_read.checked_sub(read).ok_or_else(|| {
            io::Error::other("the model has too many operators and names to read; store tensors as raw data")
        })?;
        Ok(())
    }
}

impl<R: Read + Seek> Buf for FileBuffer<R> {
    fn remaining(&self) -> usize {
        self.left
    }

    fn chunk(&self) -> &[u8] {
        let read = self.reader.buffer();
        &read[..read.len().min(self.left)]
    }

    fn advance(&mut self, count: usize) {
        self.skip(count);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A file that counts the bytes that are read from it.
    struct Counted {
        content: Cursor<Vec<u8>>,
        read: u64,
    }

    impl Read for Counted {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let read = self.content.read(into)?;
            self.read += read as u64;
            Ok(read)
        }
    }

    impl Seek for Counted {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.content.seek(to)
        }
    }

    fn field(number: u32, content: &[u8]) -> Vec<u8> {
        let mut field = Vec::new();
        prost::encoding::bytes::encode(number, &content.to_vec(), &mut field);
        field
    }

    /// Returns a model whose constants have data of these lengths in bytes.
    fn model(lengths: &[usize]) -> Vec<u8> {
        let tensor = |(index, &length): (usize, &usize)| {
            field(5, &[field(9, &vec![7; length]), field(8, format!("t{index}").as_bytes())].concat())
        };
        let graph = lengths.iter().enumerate().flat_map(tensor).collect::<Vec<u8>>();
        field(7, &[graph, field(11, &field(1, b"x"))].concat())
    }

    #[test]
    fn data_of_tensors_is_skipped_and_the_fields_after_it_are_read() {
        let content = model(&[10_000_000, 3, 8_192, 100_000, 0]);
        let mut file = Counted { content: Cursor::new(content), read: 0 };
        let graph = decode::<ModelHeader>(&mut file, 64 * 1024).unwrap().graph.unwrap();
        let names: Vec<_> = graph.initializers.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["t0", "t1", "t2", "t3", "t4"]);
        assert_eq!(graph.inputs[0].name, "x");
        assert!(file.read < 64 * 1024, "{} bytes read", file.read);
    }

    #[test]
    fn a_file_that_is_cut_off_anywhere_is_incomplete() {
        let whole = model(&[20_000, 5]);
        for end in (1..whole.len()).filter(|end| end % 997 == 1 || whole.len() - end < 40) {
            let error = decode::<ModelHeader>(Cursor::new(&whole[..end]), u64::MAX).unwrap_err();
            let kinds = [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidData];
            assert!(kinds.contains(&error.kind()), "{end}: {error}");
            assert_eq!(error.kind() == kinds[0], end > 3, "only a length may itself be cut off: {error}");
        }
    }

    #[test]
    fn a_file_with_too_much_content_is_refused() {
        let long = field(7, &field(11, &field(1, &[b'x'; 1_000_000])));
        assert!(decode::<ModelHeader>(Cursor::new(&long), 2_000_000).is_ok());
        let error = decode::<ModelHeader>(Cursor::new(&long), 500_000).unwrap_err();
        assert!(error.to_string().contains("too many"), "{error}");
    }
}
