//! Messages of a worker's boot on their socket: a length of four bytes, then so many bytes. A length
//! is looked at before room is made for it.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most bytes of a message, without its length.
pub const MAX_BYTES: usize = 4 << 20;

/// Of a message's length.
pub const HEAD: usize = 4;

/// A message with its length in front.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = postcard::to_extend(message, vec![0; HEAD]).map_err(io::Error::other)?;
    let length = frame.len() - HEAD;
    if length > MAX_BYTES {
        return Err(too_long(length));
    }
    frame[..HEAD].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// How many bytes follow.
pub fn length(head: [u8; HEAD]) -> io::Result<usize> {
    let length = u32::from_le_bytes(head) as usize;
    if length > MAX_BYTES { Err(too_long(length)) } else { Ok(length) }
}

/// A message without its length.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

pub fn send(mut socket: impl Write, message: &impl Serialize) -> io::Result<()> {
    socket.write_all(&encode(message)?)
}

/// Waits for a message; [`io::ErrorKind::UnexpectedEof`] if the peer is gone.
pub fn receive<T: DeserializeOwned>(mut socket: impl Read) -> io::Result<T> {
    let mut head = [0; HEAD];
    socket.read_exact(&mut head)?;
    let mut bytes = vec![0; length(head)?];
    socket.read_exact(&mut bytes)?;
    decode(&bytes)
}

fn too_long(length: usize) -> io::Error {
    let what = format!("a message of {length} bytes, of at most {MAX_BYTES}");
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let mut socket = Vec::new();
        send(&mut socket, &("one", 1)).unwrap();
        send(&mut socket, &("two", 2)).unwrap();
        let mut socket = socket.as_slice();
        assert_eq!(receive::<(String, i32)>(&mut socket).unwrap(), ("one".to_owned(), 1));
        assert_eq!(receive::<(String, i32)>(&mut socket).unwrap(), ("two".to_owned(), 2));
        let end = receive::<(String, i32)>(&mut socket).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn no_length_is_believed_and_no_nonsense_is_read() {
        for head in [u32::MAX, MAX_BYTES as u32 + 1] {
            let error = receive::<u32>(&head.to_le_bytes()[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let nonsense = [&4_u32.to_le_bytes()[..], &[0xff; 4]].concat();
        assert_eq!(receive::<String>(nonsense.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(encode(&vec![7_u8; MAX_BYTES + 1]).is_err());
    }
}
