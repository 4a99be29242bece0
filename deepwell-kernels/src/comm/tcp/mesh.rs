//! The connections of a rank to all others.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::{LOOK_EVERY, TcpDoor, failed};
use crate::comm::{CommError, ProcessLimits};

/// First bytes of a connection.
const MAGIC: [u8; 8] = *b"dw ranks";
/// Bytes of a greeting.
const HELLO_BYTES: usize = 22;
/// Time for a client to introduce itself.
const PROMPT: Duration = Duration::from_secs(2);
/// Longest wait for one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A rank that looks for the others.
pub(super) struct Mesh<'a> {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    /// When the ranks have to be connected.
    pub(super) end: Instant,
    pub(super) limits: ProcessLimits,
    pub(super) failure: &'a dyn Fn() -> Option<(u32, String)>,
}

/// The first message of a connection: who connects, and where that rank listens.
struct Hello {
    token: u64,
    rank: u32,
    port: u16,
}

impl Hello {
    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [&self.token.to_le_bytes()[..], &self.rank.to_le_bytes()];
        [&MAGIC[..], numbers[0], numbers[1], &self.port.to_le_bytes()].concat()
    }

    /// Reads a greeting; `None` if the connection sends anything else, or nothing.
    fn read(stream: &mut TcpStream) -> Option<Hello> {
        let mut bytes = [0; HELLO_BYTES];
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(PROMPT)).ok()?;
        stream.read_exact(&mut bytes).ok()?;
        (bytes[..8] == MAGIC).then(|| Hello {
            token: u64::from_le_bytes(bytes[8..16].try_into().unwrap_or_default()),
            rank: u32::from_le_bytes(bytes[16..20].try_into().unwrap_or_default()),
            port: u16::from_le_bytes([bytes[20], bytes[21]]),
        })
    }
}

/// Connections by rank; this rank has none to itself.
pub(super) type Streams = Vec<Option<TcpStream>>;

impl Mesh<'_> {
    /// Accepts all other ranks, and tells each where the others listen.
    pub(super) fn of_first(&self, door: &TcpDoor) -> Result<Streams, CommError> {
        let mut streams = self.none();
        let mut ports = vec![0; streams.len()];
        self.accept(&door.listener, door.token, 1..self.world_size, &mut streams, &mut ports)?;
        let mut table = String::new();
        for (rank, stream) in streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            let host = stream.peer_addr().map_err(|error| failed(&error))?.ip();
            let address = SocketAddr::new(host, ports[rank]);
            table.push_str(&format!("{rank} {address}\n"));
        }
        let bytes = [&(table.len() as u64).to_le_bytes()[..], table.as_bytes()].concat();
        for stream in streams.iter_mut().flatten() {
            stream.write_all(&bytes).map_err(|error| failed(&error))?;
        }
        Ok(streams)
    }

    /// Connects to rank 0 and to ranks of a lower number, and accepts the others.
    pub(super) fn of_other(
        &self,
        address: &str,
        (port, token): (u16, u64),
    ) -> Result<Streams, CommError> {
        let mut first = self.connect(0, || {
            let found = (address, port).to_socket_addrs()?;
            // A name may have addresses of a kind on which rank 0 does not listen.
            let mut last = io::Error::other(format!("`{address}` has no address"));
            for at in found {
                match TcpStream::connect_timeout(&at, ATTEMPT) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        })?;
        let io = |error: io::Error| failed(&error);
        let own: IpAddr = first.local_addr().map_err(io)?.ip();
        let listener = TcpListener::bind((own, 0)).map_err(io)?;
        let hello =
            Hello { token, rank: self.rank, port: listener.local_addr().map_err(io)?.port() };
        first.write_all(&hello.to_bytes()).map_err(io)?;
        let table = self.read_table(&mut first)?;
        let mut streams = self.none();
        for (rank, at) in table.into_iter().filter(|(rank, _)| *rank < self.rank) {
            let mut stream = self.connect(rank, || TcpStream::connect_timeout(&at, ATTEMPT))?;
            stream.write_all(&hello.to_bytes()).map_err(io)?;
            streams[rank as usize] = Some(stream);
        }
        streams[0] = Some(first);
        let mut ports = vec![0; streams.len()];
        self.accept(&listener, token, self.rank + 1..self.world_size, &mut streams, &mut ports)?;
        Ok(streams)
    }

    fn none(&self) -> Streams {
        (0..self.world_size).map(|_| None).collect()
    }

    /// Whether the ranks may still arrive.
    fn check(&self, missing: impl FnOnce() -> Vec<u32>) -> Result<(), CommError> {
        if let Some((rank, reason)) = (self.failure)() {
            return Err(CommError::Failed { rank, reason });
        }
        if Instant::now() < self.end {
            return Ok(());
        }
        let (what, waited) = ("the connections of ranks".to_string(), self.limits.connect);
        Err(CommError::Timeout { what, waited, missing: missing() })
    }

    /// Accepts `ranks`, whose listeners' ports go to `ports`. Clients without the token are turned
    /// away.
    fn accept(
        &self,
        listener: &TcpListener,
        token: u64,
        ranks: std::ops::Range<u32>,
        streams: &mut Streams,
        ports: &mut [u16],
    ) -> Result<(), CommError> {
        listener.set_nonblocking(true).map_err(|error| failed(&error))?;
        let missing = |streams: &Streams| {
            ranks.clone().filter(|&rank| streams[rank as usize].is_none()).collect::<Vec<u32>>()
        };
        while !missing(streams).is_empty() {
            self.check(|| missing(streams))?;
            match listener.accept() {
                Ok((mut stream, _)) => {
                    let hello = Hello::read(&mut stream)
                        .filter(|hello| hello.token == token && ranks.contains(&hello.rank));
                    if let Some(Hello { rank, port, .. }) = hello {
                        ports[rank as usize] = port;
                        streams[rank as usize] = Some(stream);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(LOOK_EVERY),
                Err(error) => return Err(failed(&error)),
            }
        }
        Ok(())
    }

    /// Tries to connect to a rank until it listens.
    fn connect(
        &self,
        rank: u32,
        try_once: impl Fn() -> io::Result<TcpStream>,
    ) -> Result<TcpStream, CommError> {
        loop {
            if let Ok(stream) = try_once() {
                return Ok(stream);
            }
            self.check(|| vec![rank])?;
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Reads the addresses of all ranks but the first.
    fn read_table(&self, first: &mut TcpStream) -> Result<Vec<(u32, SocketAddr)>, CommError> {
        let mut length = [0; 8];
        self.read(first, &mut length)?;
        let length = u64::from_le_bytes(length);
        // An address has at most 64 bytes.
        let most = 64 * u64::from(self.world_size);
        let refused = |reason: String| CommError::Request { what: "TCP".to_string(), reason };
        if length > most {
            return Err(refused(format!(
                "expected at most {most} bytes of addresses, got {length}"
            )));
        }
        let mut bytes = vec![0; length as usize];
        self.read(first, &mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let line = |line: &str| {
            let (rank, address) = line.split_once(' ')?;
            let rank = rank.parse().ok().filter(|&rank: &u32| rank < self.world_size)?;
            Some((rank, address.parse().ok()?))
        };
        let table: Option<Vec<_>> = text.lines().map(line).collect();
        table.ok_or_else(|| refused(format!("expected addresses of ranks, got `{text}`")))
    }

    /// Reads bytes of rank 0, which may wait for other ranks first.
    fn read(&self, first: &mut TcpStream, bytes: &mut [u8]) -> Result<(), CommError> {
        first.set_read_timeout(Some(LOOK_EVERY)).map_err(|error| failed(&error))?;
        let mut at = 0;
        while at < bytes.len() {
            match first.read(&mut bytes[at..]) {
                Ok(0) => {
                    self.check(|| vec![0])?;
                    let reason = "rank 0 has closed the connection".to_string();
                    return Err(CommError::Failed { rank: 0, reason });
                }
                Ok(count) => at += count,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    self.check(|| vec![0])?;
                }
                Err(error) => return Err(failed(&error)),
            }
        }
        Ok(())
    }
}
