//! Frames over TCP, without blocking.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

use super::mesh::Streams;
use crate::comm::mailbox::{Outgoing, Transport, frame_bytes};

/// Bytes at the begin of a frame that hold its length.
const LENGTH_BYTES: usize = 8;

/// Connections to all other ranks, by rank.
pub(super) struct TcpTransport {
    peers: Vec<Option<Peer>>,
}

struct Peer {
    /// `None` once the other end has closed the connection. The run's heartbeat decides whether the
    /// rank has failed: a rank that has said goodbye may close.
    stream: Option<TcpStream>,
    /// Frames to send, and the bytes of the first that are sent.
    going: VecDeque<Outgoing>,
    sent: usize,
    /// An incomplete incoming frame.
    frame: Vec<u8>,
}

impl TcpTransport {
    /// # Errors
    /// A connection that the system cannot set up.
    pub(super) fn new(streams: Streams) -> io::Result<TcpTransport> {
        let peer = |stream: TcpStream| {
            stream.set_read_timeout(None)?;
            stream.set_nonblocking(true)?;
            // A frame is written at once, and the other rank waits for its end.
            stream.set_nodelay(true)?;
            let stream = Some(stream);
            Ok(Peer { stream, going: VecDeque::new(), sent: 0, frame: Vec::new() })
        };
        let peers = streams.into_iter().map(|stream| stream.map(peer).transpose());
        Ok(TcpTransport { peers: peers.collect::<io::Result<_>>()? })
    }
}

impl Peer {
    /// Sends as much as the system takes. Returns whether any byte was sent.
    fn send(&mut self) -> bool {
        let mut has_moved = false;
        while let (Some(stream), Some(frame)) = (&mut self.stream, self.going.front()) {
            match stream.write(&frame[self.sent..]) {
                Ok(0) => break,
                Ok(count) => {
                    has_moved = true;
                    self.sent += count;
                    if self.sent == frame.len() {
                        self.going.pop_front();
                        self.sent = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.stream = None,
            }
        }
        if self.stream.is_none() {
            self.going.clear();
        }
        has_moved
    }

    /// Receives what has arrived of the next frame, and returns a complete frame.
    fn receive(&mut self) -> Result<Option<Vec<u8>>, String> {
        while let Some(stream) = &mut self.stream {
            let whole = match self.frame.len() {
                0..LENGTH_BYTES => LENGTH_BYTES,
                _ => frame_bytes(&self.frame[..LENGTH_BYTES])?,
            };
            let rest = whole - self.frame.len();
            if rest == 0 {
                return Ok(Some(std::mem::take(&mut self.frame)));
            }
            self.frame.reserve_exact(rest);
            match stream.take(rest as u64).read_to_end(&mut self.frame) {
                Ok(count) if count < rest => self.stream = None,
                Ok(_) => {}
                // The bytes before the error are in the frame.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(_) => self.stream = None,
            }
        }
        Ok(None)
    }
}

impl Transport for TcpTransport {
    fn post(&mut self, to: u32, frame: Outgoing) -> Result<(), String> {
        let peer = self.peers.get_mut(to as usize).and_then(Option::as_mut);
        let peer = peer.ok_or_else(|| format!("no connection to rank {to}"))?;
        peer.going.push_back(frame);
        Ok(())
    }

    fn poll(&mut self, arrived: &mut Vec<(u32, Vec<u8>)>) -> Result<bool, String> {
        let mut has_moved = false;
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            has_moved |= peer.send();
            let before = (arrived.len(), peer.frame.len());
            while let Some(frame) =
                peer.receive().map_err(|reason| format!("rank {rank} has sent {reason}"))?
            {
                arrived.push((rank as u32, frame));
            }
            has_moved |= before != (arrived.len(), peer.frame.len());
        }
        Ok(has_moved)
    }

    fn is_sent(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.going.is_empty())
    }
}
