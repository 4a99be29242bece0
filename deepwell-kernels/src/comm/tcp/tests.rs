//! Ranks that are threads here, over connections of this machine: the bits of ranks in one process,
//! strangers at the door, and ranks that do not come.

use std::io::Write;
use std::net::TcpStream;
use std::thread;

use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, ProcessGroup, Shape};

use super::*;
use crate::{Comm, Exchange, InProcess};

const PATIENCE: Duration = Duration::from_secs(30);

fn limits(connect: Duration) -> ProcessLimits {
    ProcessLimits { connect, exchange: PATIENCE }
}

/// Runs a function on each of the ranks, and ends them.
fn ranks<T: Send>(size: u32, run: impl Fn(&mut dyn Comm) -> T + Sync) -> Vec<T> {
    let door = TcpDoor::open().unwrap();
    let id = door.id();
    thread::scope(|scope| {
        let (run, id) = (&run, &id);
        let mut door = Some(door);
        let start = |rank: u32| {
            let door = door.take();
            scope.spawn(move || {
                let peer = match door {
                    Some(door) => TcpPeer::First(door),
                    None => TcpPeer::Other { address: "127.0.0.1", id },
                };
                let mut comm = connect_tcp(peer, (rank, size), limits(PATIENCE), &|| None).unwrap();
                let done = run(&mut comm);
                comm.monitor().finish(PATIENCE).unwrap();
                done
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn exchange(kind: CollectiveKind, size: u32) -> Exchange {
    let group = ProcessGroup { name: "all".to_string(), ranks: (0..size).collect() };
    Exchange { kind, group, dtype: DType::F32 }
}

/// Every kind of collective, small and large, and messages around a ring.
fn take_part(comm: &mut dyn Comm) -> Vec<Vec<u8>> {
    let (rank, size) = (comm.rank(), comm.world_size());
    let mut all = Vec::new();
    for elements in [0, 60, 600_000] {
        let floats = (0..elements).map(|at| (rank * 31 + at * 7) as f32 / 3.0);
        let input: Vec<u8> = floats.flat_map(f32::to_le_bytes).collect();
        let sum = Reduction::Sum;
        for (kind, bytes) in [
            (CollectiveKind::AllReduce { reduction: sum }, input.len()),
            (CollectiveKind::ReduceScatter { reduction: sum }, input.len() / size as usize),
            (CollectiveKind::AllGather, input.len() * size as usize),
            (CollectiveKind::AllToAll, input.len()),
            (CollectiveKind::Broadcast { root: size - 1 }, input.len()),
            (CollectiveKind::Shift { by: 1 }, input.len()),
        ] {
            let mut output = vec![0xee; bytes];
            comm.exchange(&exchange(kind, size), &input, &mut output).unwrap();
            all.push(output);
        }
        let send = CollectiveKind::Send { to: (rank + 1) % size };
        let from = (rank + size - 1) % size;
        let shape = Shape::new([elements as usize]);
        let recv = CollectiveKind::Recv { from, shape, dtype: DType::F32 };
        let mut output = vec![0xee; input.len()];
        comm.exchange(&exchange(send, size), &input, &mut []).unwrap();
        comm.exchange(&exchange(recv, size), &[], &mut output).unwrap();
        all.push(output);
    }
    all
}

#[test]
fn bits_are_those_of_ranks_in_one_process() {
    for size in [2, 3, 5] {
        let expected: Vec<_> = thread::scope(|scope| {
            let comms = InProcess::world(size, PATIENCE);
            let start = |mut comm: InProcess| scope.spawn(move || take_part(&mut comm));
            let threads: Vec<_> = comms.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ranks(size, take_part) == expected, "{size} ranks");
    }
}

/// A client without the token, one that says nothing, and one that sends another protocol.
#[test]
fn strangers_are_turned_away() {
    let door = TcpDoor::open().unwrap();
    let (id, port) = (door.id(), door.port);
    let strangers: Vec<TcpStream> =
        [&b"GET / HTTP/1.1\r\n\r\n and more"[..], b"", b"dw ranks00000000\x01\0\0\0\0\0"]
            .into_iter()
            .map(|words| {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                stream.write_all(words).unwrap();
                stream
            })
            .collect();
    let connect = |peer, rank| connect_tcp(peer, (rank, 2), limits(PATIENCE), &|| None);
    thread::scope(|scope| {
        let other = scope.spawn(|| connect(TcpPeer::Other { address: "127.0.0.1", id: &id }, 1));
        let first = connect(TcpPeer::First(door), 0).unwrap();
        let other = other.join().unwrap().unwrap();
        let end = |comm: &ProcessComm| comm.monitor().finish(PATIENCE);
        let ended = scope.spawn(move || end(&other));
        end(&first).unwrap();
        ended.join().unwrap().unwrap();
    });
    drop(strangers);
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let short = Duration::from_millis(200);
    let door = TcpDoor::open().unwrap();
    let id = door.id();
    let error = connect_tcp(TcpPeer::First(door), (0, 3), limits(short), &|| None).err();
    let CommError::Timeout { missing, .. } = error.expect("no rank comes") else {
        panic!("not a timeout");
    };
    assert_eq!(missing, [1, 2]);
    // The door is closed by now.
    let other = || TcpPeer::Other { address: "127.0.0.1", id: &id };
    let error = connect_tcp(other(), (1, 3), limits(short), &|| None).err().expect("closed");
    assert!(matches!(error, CommError::Timeout { ref missing, .. } if missing == &[0]), "{error}");
    let failure = || Some((2, "no memory".to_string()));
    let error = connect_tcp(other(), (1, 3), limits(PATIENCE), &failure).err().expect("failed");
    assert_eq!(error, CommError::Failed { rank: 2, reason: "no memory".to_string() });
    let other = TcpPeer::Other { address: "127.0.0.1", id: b"MPI" };
    let error = connect_tcp(other, (1, 3), limits(short), &|| None).err().expect("an id of MPI");
    assert!(error.to_string().contains("expected the id of rank 0's door, got `MPI`"), "{error}");
}

/// After a rank ends without a goodbye, the others wait until their limit, or until the heartbeat
/// of the run reports a failure; nothing panics.
#[test]
fn a_connection_that_closes_is_no_frame() {
    let door = TcpDoor::open().unwrap();
    let id = door.id();
    thread::scope(|scope| {
        let token = port_and_token(&id).unwrap();
        let stranger = scope.spawn(move || {
            let short = limits(PATIENCE);
            let end = Instant::now() + PATIENCE;
            let mesh = Mesh { rank: 1, world_size: 2, end, limits: short, failure: &|| None };
            let mut streams = mesh.of_other("127.0.0.1", token).unwrap();
            // Half of a length, then the end.
            streams[0].as_mut().unwrap().write_all(&[40, 0, 0]).unwrap();
        });
        let limits = ProcessLimits { connect: PATIENCE, exchange: Duration::from_millis(300) };
        let mut comm = connect_tcp(TcpPeer::First(door), (0, 2), limits, &|| None).unwrap();
        stranger.join().unwrap();
        let sum = CollectiveKind::AllReduce { reduction: Reduction::Sum };
        let error = comm.exchange(&exchange(sum, 2), &[0; 8], &mut [0; 8]).unwrap_err();
        assert!(matches!(error, CommError::Timeout { .. }), "{error}");
    });
}
