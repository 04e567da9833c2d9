//! Messages of a worker's boot on their socket: a length of four bytes, then that many bytes. A length
//! is looked at before room is made for it.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A message of one side.
pub trait Message: Serialize + DeserializeOwned {
    /// The most bytes of such a message, without its length.
    const MAX_BYTES: usize;
}

/// Of a message's length.
pub const HEAD: usize = 4;

/// A message with its length in front.
pub fn encode<M: Message>(message: &M) -> io::Result<Vec<u8>> {
    let mut frame = postcard::to_extend(message, vec![0; HEAD]).map_err(io::Error::other)?;
    let length = frame.len() - HEAD;
    if length > M::MAX_BYTES {
        return Err(too_long::<M>(length));
    }
    frame[..HEAD].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Returns how many bytes follow.
pub fn length<M: Message>(head: [u8; HEAD]) -> io::Result<usize> {
    let length = u32::from_le_bytes(head) as usize;
    if length > M::MAX_BYTES { Err(too_long::<M>(length)) } else { Ok(length) }
}

/// Reads a message without its length.
pub fn decode<M: Message>(bytes: &[u8]) -> io::Result<M> {
    postcard::from_bytes(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

pub fn send(mut socket: impl Write, message: &impl Message) -> io::Result<()> {
    socket.write_all(&encode(message)?)
}

/// Waits for a message; [`io::ErrorKind::UnexpectedEof`] if the peer is gone.
pub fn receive<M: Message>(mut socket: impl Read) -> io::Result<M> {
    let mut head = [0; HEAD];
    socket.read_exact(&mut head)?;
    let mut bytes = vec![0; length::<M>(head)?];
    socket.read_exact(&mut bytes)?;
    decode(&bytes)
}

fn too_long<M: Message>(length: usize) -> io::Error {
    let what = format!("a message of {length} bytes, of at most {}", M::MAX_BYTES);
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
    struct Said(Vec<u8>);

    impl Message for Said {
        const MAX_BYTES: usize = 1000;
    }

    #[test]
    fn what_is_sent_is_received() {
        let mut socket = Vec::new();
        send(&mut socket, &Said(vec![1])).unwrap();
        send(&mut socket, &Said(vec![2, 3])).unwrap();
        let mut socket = socket.as_slice();
        assert_eq!(receive::<Said>(&mut socket).unwrap(), Said(vec![1]));
        assert_eq!(receive::<Said>(&mut socket).unwrap(), Said(vec![2, 3]));
        let end = receive::<Said>(&mut socket).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn no_length_is_believed_and_no_nonsense_is_read() {
        for head in [u32::MAX, Said::MAX_BYTES as u32 + 1] {
            let error = receive::<Said>(&head.to_le_bytes()[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let nonsense = [&4_u32.to_le_bytes()[..], &[0xff; 4]].concat();
        assert_eq!(receive::<Said>(nonsense.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(encode(&Said(vec![7; Said::MAX_BYTES])).is_err());
    }
}
