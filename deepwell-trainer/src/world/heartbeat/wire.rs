//! Messages between ranks.
//!
//! A message is its kind (one byte), the rank concerned (u32), the length of its text (u32), both
//! little-endian, and the text. A connection begins with a [`Hello`].

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;

/// First bytes of a connection, to recognize foreign clients.
const MAGIC: [u8; 8] = *b"deepwell";
/// Version of the messages below.
const VERSION: u32 = 2;
/// Longest text of a message.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// The kinds of messages.
pub(super) mod kind {
    /// A heartbeat.
    pub(in super::super) const BEAT: u8 = 0;
    /// The library's id, as the text's bytes.
    pub(in super::super) const ID: u8 = 1;
    /// The rank has failed; the reason is the text.
    pub(in super::super) const FAILED: u8 = 2;
    /// The rank has ended well.
    pub(in super::super) const DONE: u8 = 3;
    /// Versions of the rank, its first message; as the text.
    pub(in super::super) const VERSIONS: u8 = 4;
}

/// Identity of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    /// Restart count; other attempts are outdated.
    pub(super) attempt: u32,
}

impl Hello {
    const BYTES: usize = 24;

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let numbers = [VERSION, self.rank, self.world_size, self.attempt];
        MAGIC.into_iter().chain(numbers.into_iter().flat_map(u32::to_le_bytes)).collect()
    }

    /// Reads a greeting; `None` if the connection sends anything else.
    pub(super) fn read(stream: &mut TcpStream) -> Option<Hello> {
        let mut bytes = [0; Hello::BYTES];
        stream.read_exact(&mut bytes).ok()?;
        let numbers: Vec<u32> = bytes[8..]
            .chunks_exact(4)
            .filter_map(|it| Some(u32::from_le_bytes(it.try_into().ok()?)))
            .collect();
        match numbers[..] {
            [VERSION, rank, world_size, attempt] if bytes[..8] == MAGIC => {
                Some(Hello { rank, world_size, attempt })
            }
            _ => None,
        }
    }
}

/// The bytes of a message about a rank.
pub(super) fn message((kind, rank): (u8, u32), text: &[u8]) -> Vec<u8> {
    let text = &text[..text.len().min(TEXT_BYTES_MAX)];
    let mut message = vec![kind];
    message.extend(rank.to_le_bytes());
    message.extend((text.len() as u32).to_le_bytes());
    message.extend(text);
    message
}

/// The next message: kind, rank and text.
pub(super) fn read_message(stream: &mut TcpStream) -> io::Result<(u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let [kind, rank @ .., a, b, c, d] = head;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > TEXT_BYTES_MAX {
        return Err(io::Error::new(ErrorKind::InvalidData, "a message that is too long"));
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok((kind, u32::from_le_bytes(rank), text))
}
