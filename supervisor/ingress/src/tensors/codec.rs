//! The codec of gRPC messages, which bounds their memory. An empty tensor takes two bytes in a
//! message and some hundred bytes in memory, so a message within its limit could need gigabytes.
//! The decoder takes the memory first. Messages that take long to decode are decoded one at a time,
//! while the thread serves no connections.

use std::marker::PhantomData;

use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tokio::task::block_in_place;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use crate::admission::{CALL_PERMIT, one_at_a_time, try_allocate};

/// The maximum number of fields of a message: tensors, their raw contents, and all parameters.
const MAX_FIELDS: usize = 8192;

/// The maximum number of values other than packed numbers, such as strings. Each takes at least 24
/// bytes.
const MAX_VALUES: usize = 4 << 20;

/// The number of values above which decoding takes milliseconds.
const QUICK_VALUES: usize = 16_384;

/// The size of the values in bytes above which decoding takes milliseconds.
const QUICK_BYTES: usize = 1 << 20;

/// The field numbers of a request's inputs, outputs and raw contents, and of an input's values.
const INPUT: u32 = 5;
const OUTPUT: u32 = 6;
const RAW: u32 = 7;
const VALUES: u32 = 5;

/// The maximum size of a field in memory besides its content, in bytes.
const FIELD_BYTES: usize = 1024;

/// The maximum size in memory of a value other than a packed number, besides its content, in bytes.
const VALUE_BYTES: usize = 128;

/// The maximum number of bytes in memory for each byte of texts and shapes. A number takes eight
/// bytes, and a list that has just grown has twice the capacity.
const TIMES: usize = 16;

/// Returns small buffers for the time before a message arrives. The message then gets the buffer
/// that it needs.
fn buffer() -> BufferSettings {
    const FIRST: usize = 512;
    const SENT_FROM: usize = 32 << 10;
    BufferSettings::new(FIRST, SENT_FROM)
}

/// A codec of prost's messages with bounded memory. It encodes, and decodes, too.
#[derive(Debug)]
pub(crate) struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<T: Message, U> Encoder for BoundedCodec<T, U> {
    type Item = T;
    type Error = Status;

    /// Takes all memory of a message at once.
    fn encode(&mut self, message: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let bytes = message.encoded_len();
        try_allocate(bytes)?;
        buffer.reserve(bytes);
        message.encode(buffer).map_err(|why| Status::internal(why.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffer()
    }
}

impl<T, U: Message + Default> Decoder for BoundedCodec<T, U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // tonic has collected the message in one piece.
        let count = Count::of(bytes::Buf::chunk(buffer), QUICK_VALUES);
        let is_quick = count.values <= QUICK_VALUES && count.bytes <= QUICK_BYTES;
        if is_quick || count.fields > MAX_FIELDS {
            return decode_counted(buffer, &count);
        }
        let decode_large = || {
            let count = Count::of(bytes::Buf::chunk(buffer), MAX_VALUES);
            decode_counted(buffer, &count)
        };
        block_in_place(|| one_at_a_time(decode_large))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffer()
    }
}

fn decode_counted<U: Message + Default>(
    buffer: &mut DecodeBuf<'_>,
    count: &Count,
) -> Result<Option<U>, Status> {
    if count.fields > MAX_FIELDS {
        return too_many(MAX_FIELDS, "tensors and parameters");
    }
    if count.values > MAX_VALUES {
        return too_many(MAX_VALUES, "values; give them as raw_input_contents");
    }
    CALL_PERMIT.get().grow(count.memory)?;
    let malformed = |why| Status::invalid_argument(format!("the message is malformed: {why}"));
    U::decode(buffer).map(Some).map_err(malformed)
}

fn too_many<T>(most: usize, what: &str) -> Result<T, Status> {
    Err(Status::invalid_argument(format!("the message has more than {most} {what}")))
}

/// The content of a message. The count ends soon after it exceeds a bound, and at malformed fields.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    fields: usize,
    values: usize,
    /// The size of the values in bytes.
    bytes: usize,
    /// The maximum number of bytes that the decoded message takes besides the message itself.
    memory: usize,
}

impl Count {
    /// Counts the content of a message, and at most about `max_values` values.
    fn of(message: &[u8], max_values: usize) -> Self {
        let mut count = Self::default();
        each_field(message, |tag, tensor| {
            count.fields += 1;
            match tag {
                INPUT | OUTPUT => each_field(tensor, |tag, inner| {
                    if tag == VALUES {
                        count.bytes += inner.len();
                        each_field(inner, |kind, content| {
                            count.values += 1;
                            count.memory += content.len() * times(kind);
                            count.values <= max_values
                        });
                    } else {
                        count.fields += 1;
                        count.memory += inner.len() * TIMES;
                    }
                    count.fields <= MAX_FIELDS && count.values <= max_values
                }),
                // Raw contents stay parts of the message.
                RAW => {}
                _ => count.memory += tensor.len() * TIMES,
            }
            count.fields <= MAX_FIELDS && count.values <= max_values
        });
        count.memory += count.fields * FIELD_BYTES + count.values * VALUE_BYTES;
        count
    }
}

/// Returns the maximum number of bytes in memory for each byte of values. Values are in a list,
/// which may have twice the needed capacity, and in a tensor. In a message, integers take as few
/// bytes as possible. Other values take as many as in memory.
fn times(kind: u32) -> usize {
    const INT: u32 = 2;
    const INT64: u32 = 3;
    const UINT: u32 = 4;
    const UINT64: u32 = 5;
    match kind {
        INT64 | UINT64 => 3 * 8,
        INT | UINT => 3 * 4,
        _ => 3,
    }
}

/// Calls `more` with the number and the content of each field, until it returns false. The content
/// of a number is empty.
fn each_field(mut message: &[u8], mut more: impl FnMut(u32, &[u8]) -> bool) {
    while !message.is_empty() {
        let Ok((tag, kind)) = decode_key(&mut message) else { return };
        let mut content: &[u8] = &[];
        if kind == WireType::LengthDelimited {
            let mut behind = message;
            let length = decode_varint(&mut behind).ok().and_then(|length| usize::try_from(length).ok());
            let Some(found) = length.and_then(|length| behind.get(..length)) else { return };
            content = found;
        }
        if skip_field(kind, tag, &mut message, DecodeContext::default()).is_err() || !more(tag, content) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::model_infer_request::InferInputTensor;
    use crate::proto::{InferParameter, InferTensorContents, ModelInferRequest};

    #[test]
    fn fields_of_every_size_are_counted() {
        let request = ModelInferRequest {
            model_name: "m".into(),
            inputs: vec![Default::default(); 3],
            raw_input_contents: vec![vec![7; 1000].into(), Default::default()],
            ..Default::default()
        };
        let count = |message: &[u8]| Count::of(message, MAX_VALUES);
        assert_eq!(
            count(&request.encode_to_vec()),
            Count { fields: 6, values: 0, bytes: 0, memory: 6 * FIELD_BYTES + TIMES }
        );
        assert_eq!(count(b""), Count::default());
        assert_eq!(count(b"\x2a\x05abc"), Count::default());
        assert_eq!(count(&[0x2a, 0].repeat(100_000)).fields, MAX_FIELDS + 1);
    }

    #[test]
    fn the_content_of_tensors_is_counted_too() {
        let named = |number: usize| (number.to_string(), InferParameter::default());
        let values = |bytes_contents| InferTensorContents { bytes_contents, ..Default::default() };
        let input = |parameters, contents| {
            let input = InferInputTensor { name: "x".into(), parameters, contents, ..Default::default() };
            ModelInferRequest { inputs: vec![input], ..Default::default() }.encode_to_vec()
        };
        let few = input((0..3).map(named).collect(), Some(values(vec![Default::default(); 5])));
        let Count { fields, values: found, bytes, .. } = Count::of(&few, QUICK_VALUES);
        assert_eq!((fields, found, bytes), (1 + 1 + 3, 5, 10));
        let many = input((0..MAX_FIELDS).map(named).collect(), None);
        assert_eq!(Count::of(&many, MAX_VALUES).fields, MAX_FIELDS + 1);
        let many = input(Default::default(), Some(values(vec![Default::default(); MAX_VALUES + 9])));
        assert_eq!(Count::of(&many, MAX_VALUES).values, MAX_VALUES + 1);
        let packed = InferTensorContents { fp32_contents: vec![1.0; 1000], ..Default::default() };
        let Count { values: found, bytes, .. } =
            Count::of(&input(Default::default(), Some(packed)), QUICK_VALUES);
        assert_eq!((found, bytes), (1, 4003));
        let small = InferTensorContents { int64_contents: vec![1; 1000], ..Default::default() };
        let Count { memory, .. } = Count::of(&input(Default::default(), Some(small)), QUICK_VALUES);
        assert!(memory > 1000 * (16 + 8), "{memory}");
    }

    #[test]
    fn fuzz_grpc() {
        bolero::check!().for_each(|bytes: &[u8]| {
            let Count { fields, .. } = Count::of(bytes, MAX_VALUES);
            let Ok(request) = ModelInferRequest::decode(bytes) else { return };
            let parameters: usize = request.inputs.iter().map(|input| input.parameters.len()).sum();
            let read = request.inputs.len() + request.raw_input_contents.len() + parameters;
            assert!(fields >= read.min(MAX_FIELDS), "everything that is decoded has been counted");
        });
    }
}
