//! Ranks in separate processes, connected by TCP, without a library.
//!
//! Every two ranks have a connection. Rank 0 listens first ([`TcpDoor`]). Every other rank connects
//! to rank 0, and listens on the interface of this connection. Rank 0 answers with the addresses of
//! all ranks, and each rank connects to the ranks of lower numbers. Clients without the token of
//! the door are turned away. Bytes are not encrypted: run ranks in a network of your own.

mod mesh;
mod transport;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use self::mesh::Mesh;
use self::transport::TcpTransport;
use super::CommError;
use super::mailbox::{Shared, carry};
use super::process::{ProcessComm, ProcessLimits};

/// The end at which rank 0 waits for the other ranks.
#[derive(Debug)]
pub struct TcpDoor {
    listener: TcpListener,
    port: u16,
    token: u64,
}

impl TcpDoor {
    /// Listens on all interfaces of this machine, at a port of the system's choice.
    ///
    /// # Errors
    /// The system gives no port.
    pub fn open() -> Result<TcpDoor, CommError> {
        let listener = TcpListener::bind(("0.0.0.0", 0)).map_err(|error| failed(&error))?;
        let port = listener.local_addr().map_err(|error| failed(&error))?.port();
        // Not for secrecy: two runs on one machine must not take each other's ranks.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let token = now.unwrap_or_default().as_nanos() as u64 ^ u64::from(std::process::id()) << 32;
        Ok(TcpDoor { listener, port, token })
    }

    /// The port and the token of the door, for [`TcpPeer::Other`].
    pub fn id(&self) -> Vec<u8> {
        format!("tcp {} {}", self.port, self.token).into_bytes()
    }
}

/// How a rank finds the others.
#[derive(Debug)]
pub enum TcpPeer<'a> {
    /// Rank 0, with its door.
    First(TcpDoor),
    /// Another rank: the machine of rank 0, and the [id](TcpDoor::id) of its door.
    Other {
        /// Name or address of the machine of rank 0.
        address: &'a str,
        /// The id.
        id: &'a [u8],
    },
}

/// Connects with the other ranks; this rank is `rank` of `world_size`. `failure` returns the first
/// failure of another rank, if any.
///
/// # Errors
/// An id of another kind; ranks that have failed or do not arrive in time.
pub fn connect_tcp(
    peer: TcpPeer<'_>,
    (rank, world_size): (u32, u32),
    limits: ProcessLimits,
    failure: &dyn Fn() -> Option<(u32, String)>,
) -> Result<ProcessComm, CommError> {
    let mesh = Mesh { rank, world_size, end: Instant::now() + limits.connect, limits, failure };
    let streams = match peer {
        TcpPeer::First(door) => mesh.of_first(&door)?,
        TcpPeer::Other { address, id } => mesh.of_other(address, port_and_token(id)?)?,
    };
    let mut transport = TcpTransport::new(streams).map_err(|error| failed(&error))?;
    let shared = Shared::new(rank, world_size, limits.exchange);
    let run = {
        let shared = Arc::clone(&shared);
        move || {
            carry(&shared, &mut transport);
            shared.is_over();
        }
    };
    let thread = thread::Builder::new().name("tcp".to_string()).spawn(run);
    thread.map_err(|error| failed(&error))?;
    Ok(ProcessComm::new(shared))
}

/// Port and token of a door.
fn port_and_token(id: &[u8]) -> Result<(u16, u64), CommError> {
    let text = String::from_utf8_lossy(id);
    let parts: Vec<&str> = text.split(' ').collect();
    let numbers = match parts[..] {
        ["tcp", port, token] => port.parse().ok().zip(token.parse().ok()),
        _ => None,
    };
    numbers.ok_or_else(|| CommError::Request {
        what: "TCP".to_string(),
        reason: format!(
            "expected the id of rank 0's door, got `{text}`\n\
             hint: start every rank with the same version and features"
        ),
    })
}

fn failed(error: &io::Error) -> CommError {
    CommError::Request { what: "TCP".to_string(), reason: error.to_string() }
}

/// Time between two checks whether another rank has failed.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
