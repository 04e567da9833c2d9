//! gRPC messages, read with a bound on their memory: an empty tensor takes two bytes on the wire
//! and some hundred bytes in memory, so a message within its limit could still need gigabytes.

use std::marker::PhantomData;

use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// The most fields of a message: tensors, their raw contents, parameters.
const MAX_FIELDS: usize = 8192;

/// `tonic-prost`'s codec with that bound.
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
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(ProstCodec::<T, U>::raw_decoder(BufferSettings::default()))
    }
}

#[derive(Debug)]
pub(crate) struct BoundedDecoder<U>(ProstDecoder<U>);

impl<U: Message + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // A message lies in one piece, as tonic has gathered it.
        if fields(bytes::Buf::chunk(buffer)) > MAX_FIELDS {
            return Err(Status::invalid_argument(format!(
                "the message has more than {MAX_FIELDS} tensors and parameters"
            )));
        }
        self.0.decode(buffer)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// Counts a message's fields, little further than the bound, and up to the first malformed one.
fn fields(mut message: &[u8]) -> usize {
    let mut fields = 0;
    while !message.is_empty() && fields <= MAX_FIELDS {
        let skipped = decode_key(&mut message)
            .and_then(|(tag, kind)| skip_field(kind, tag, &mut message, DecodeContext::default()));
        if skipped.is_err() {
            break;
        }
        fields += 1;
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ModelInferRequest;

    #[test]
    fn fields_are_counted_whatever_their_size() {
        let request = ModelInferRequest {
            model_name: "m".into(),
            inputs: vec![Default::default(); 3],
            raw_input_contents: vec![vec![7; 1000].into(), Default::default()],
            ..Default::default()
        };
        assert_eq!(fields(&request.encode_to_vec()), 6);
        assert_eq!(fields(b""), 0);
        assert_eq!(fields(b"\x2a\x05abc"), 0);
        assert_eq!(fields(&[0x2a, 0].repeat(100_000)), MAX_FIELDS + 1);
    }
}
