//! Ranks whose frames go through the memory of this process, late and one at a time: the same bits
//! as ranks that are threads, and every way in which ranks can fail each other.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use deepwell_ir::ops::Reduction;
use deepwell_ir::{DType, ProcessGroup, Shape};

use super::*;
use crate::InProcess;
use crate::runtime::cpu::test_support::Random;

/// Longer than any test runs that does not wait in vain.
const PATIENCE: Duration = Duration::from_secs(60);

const SUM: Reduction = Reduction::Sum;

type Outcome = Result<Vec<u8>, CommError>;

/// Frames in memory, each of which goes and comes after some looks.
struct Memory {
    own: u32,
    to: Vec<Sender<(u32, Vec<u8>)>>,
    from: Receiver<(u32, Vec<u8>)>,
    random: Random,
    going: VecDeque<(u32, Outgoing)>,
    /// After how many frames it fails.
    lasts: usize,
}

impl Memory {
    fn world(size: u32) -> Vec<Memory> {
        let (to, from): (Vec<_>, Vec<_>) = (0..size).map(|_| mpsc::channel()).unzip();
        let memory = |(own, from)| Memory {
            own,
            to: to.clone(),
            from,
            random: Random::new(u64::from(own)),
            going: VecDeque::new(),
            lasts: usize::MAX,
        };
        (0..size).zip(from).map(memory).collect()
    }
}

impl Transport for Memory {
    fn post(&mut self, to: u32, frame: Outgoing) -> Result<(), String> {
        self.going.push_back((to, frame));
        Ok(())
    }

    fn poll(&mut self, arrived: &mut Vec<(u32, Vec<u8>)>) -> Result<bool, String> {
        if self.random.below(3) > 0 {
            return Ok(false);
        }
        let gone = self.going.pop_front();
        if let Some((to, frame)) = &gone {
            self.lasts = self.lasts.checked_sub(1).ok_or("the cable is cut")?;
            // A rank that is gone takes none.
            let _ = self.to[*to as usize].send((self.own, frame.to_vec()));
        }
        let came = self.from.try_recv().ok();
        let has_moved = gone.is_some() || came.is_some();
        arrived.extend(came);
        Ok(has_moved)
    }

    fn is_sent(&self) -> bool {
        self.going.is_empty()
    }
}

/// Runs a function on each rank of a world; a rank that panics gives none. Whether each carrier
/// ended in order.
fn ranks_on<T: Send>(
    world: Vec<Memory>,
    timeout: Duration,
    run: impl Fn(Mailbox) -> T + Sync,
) -> Vec<(Option<T>, bool)> {
    let size = world.len() as u32;
    thread::scope(|scope| {
        let run = &run;
        let start = |mut memory: Memory| {
            let shared = Shared::new(memory.own, size, timeout);
            let mailbox = Mailbox::new(Arc::clone(&shared));
            let carrier = {
                let shared = Arc::clone(&shared);
                scope.spawn(move || {
                    let is_in_order = carry(&shared, &mut memory);
                    shared.is_over();
                    is_in_order
                })
            };
            let rank = scope.spawn(move || run(mailbox));
            scope.spawn(move || {
                let done = rank.join().ok();
                shared.lock().is_closed = true;
                shared.posted.notify_all();
                (done, carrier.join().expect("a carrier does not panic"))
            })
        };
        let threads: Vec<_> = world.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

fn ranks<T: Send>(
    size: u32,
    timeout: Duration,
    run: impl Fn(Mailbox) -> T + Sync,
) -> Vec<Option<T>> {
    ranks_on(Memory::world(size), timeout, run).into_iter().map(|(done, _)| done).collect()
}

fn all(size: u32) -> ProcessGroup {
    ProcessGroup { name: "all".to_string(), ranks: (0..size).collect() }
}

fn of(kind: CollectiveKind, group: ProcessGroup, dtype: DType) -> Exchange {
    Exchange { kind, group, dtype }
}

/// One exchange with as many bytes as its kind gives, of a message as many as `input` has.
fn take_part(comm: &mut dyn Comm, exchange: &Exchange, input: &[u8]) -> Outcome {
    let size = exchange.group.ranks.len();
    let bytes = match &exchange.kind {
        CollectiveKind::ReduceScatter { .. } => input.len() / size,
        CollectiveKind::AllGather => input.len() * size,
        CollectiveKind::Send { .. } => 0,
        _ => input.len(),
    };
    let input = if matches!(exchange.kind, CollectiveKind::Recv { .. }) { &[] } else { input };
    let mut output = vec![0xee; bytes];
    comm.exchange(exchange, input, &mut output)?;
    Ok(output)
}

/// Numbers of any kind, NaN and infinities among those of floats.
fn input(rank: u32, dtype: DType, elements: usize) -> Vec<u8> {
    let mut random = Random::new(u64::from(rank) * 7919 + elements as u64);
    (0..elements * dtype.bits() as usize / 8).map(|_| random.below(256) as u8).collect()
}

/// The bits of threads, whatever the order in which parts come, in groups of any order.
#[test]
fn bits_are_those_of_threads() {
    let reduce = |reduction| CollectiveKind::AllReduce { reduction };
    let scatter = |reduction| CollectiveKind::ReduceScatter { reduction };
    for size in [1, 2, 3, 5] {
        let mut exchanges = Vec::new();
        for kind in [
            reduce(SUM),
            reduce(Reduction::Max),
            scatter(SUM),
            scatter(Reduction::Max),
            CollectiveKind::AllGather,
            CollectiveKind::AllToAll,
            CollectiveKind::Broadcast { root: size - 1 },
            CollectiveKind::Broadcast { root: 0 },
            CollectiveKind::Shift { by: size - 1 },
            CollectiveKind::Shift { by: 1 % size },
        ] {
            let is_cut =
                matches!(kind, CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllToAll);
            // The last in slices, which are not equally long.
            for elements in [0, 1, 7, 33, SLICED_BYTES / 2 + 1] {
                let elements = if is_cut { elements * size as usize } else { elements };
                for dtype in [DType::F32, DType::Bf16, DType::U64] {
                    let mut group = all(size);
                    group.ranks.rotate_left(elements % size as usize);
                    exchanges.push((of(kind.clone(), group, dtype), elements));
                }
            }
        }
        let run = |comm: &mut dyn Comm| -> Result<Vec<Vec<u8>>, CommError> {
            let rank = comm.rank();
            let exchange = |(exchange, elements): &(Exchange, usize)| {
                take_part(comm, exchange, &input(rank, exchange.dtype, *elements))
            };
            exchanges.iter().map(exchange).collect()
        };
        let expected: Vec<_> = thread::scope(|scope| {
            let of_rank = |mut comm: InProcess| {
                let run = &run;
                scope.spawn(move || run(&mut comm).unwrap())
            };
            let threads: Vec<_> =
                InProcess::world(size, PATIENCE).into_iter().map(of_rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let got = ranks(size, PATIENCE, |mut comm| run(&mut comm).unwrap());
        for (rank, (got, expected)) in got.into_iter().zip(expected).enumerate() {
            for ((got, expected), (exchange, elements)) in
                got.unwrap().iter().zip(&expected).zip(&exchanges)
            {
                assert!(got == expected, "rank {rank} of {size}: {exchange:?}, {elements}");
            }
        }
    }
}

/// Round a ring, twice, with a collective between: what one sent first comes first, and is no
/// collective's.
#[test]
fn messages_arrive_in_order() {
    for size in [2u32, 3] {
        let outcomes = ranks(size, PATIENCE, |mut comm| {
            let (rank, dtype) = (comm.rank(), DType::E4m3);
            let next = (rank + 1) % size;
            let before = (rank + size - 1) % size;
            let send = of(CollectiveKind::Send { to: next }, all(size), dtype);
            let shape = Shape::new([2usize]);
            let recv = of(CollectiveKind::Recv { from: before, shape, dtype }, all(size), dtype);
            let gather = of(CollectiveKind::AllGather, all(size), dtype);
            take_part(&mut comm, &send, &[rank as u8, 0])?;
            take_part(&mut comm, &send, &[rank as u8, 1])?;
            take_part(&mut comm, &gather, &[9, 9])?;
            let first = take_part(&mut comm, &recv, &[0; 2])?;
            Ok::<_, CommError>([first, take_part(&mut comm, &recv, &[0; 2])?])
        });
        for (rank, got) in (0..size).zip(outcomes) {
            let before = ((rank + size - 1) % size) as u8;
            assert_eq!(got.unwrap().unwrap(), [[before, 0], [before, 1]]);
        }
    }
}

/// Every rank fails, and each message is one of `expected`.
#[track_caller]
fn all_fail<T: std::fmt::Debug>(outcomes: Vec<Option<Result<T, CommError>>>, expected: &[&str]) {
    let errors: Vec<String> =
        outcomes.into_iter().flatten().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(!errors.is_empty());
    for error in &errors {
        let fits = expected.iter().any(|words| error.contains(words));
        assert!(fits, "expected {expected:?} in `{error}`");
    }
}

#[test]
fn ranks_that_disagree_all_fail() {
    let begin = Instant::now();
    let reduce = |reduction| CollectiveKind::AllReduce { reduction };
    let root = |root| CollectiveKind::Broadcast { root };
    type Wish = (CollectiveKind, DType, usize);
    let cases: [(Wish, Wish, &str); 5] = [
        (
            (reduce(SUM), DType::F32, 8),
            (CollectiveKind::AllGather, DType::F32, 8),
            "all_gather of 2 f32 in group `all`",
        ),
        ((reduce(SUM), DType::F32, 8), (reduce(SUM), DType::I32, 8), "all_reduce sum of 2 i32"),
        ((reduce(SUM), DType::F32, 8), (reduce(SUM), DType::F32, 12), "sum of 3 f32"),
        ((reduce(SUM), DType::F32, 8), (reduce(SUM), DType::F32, 1 << 17), "sum of 32768 f32"),
        ((root(0), DType::F32, 8), (root(1), DType::F32, 8), "broadcast from place 1"),
    ];
    for (same, other, expected) in &cases {
        for odd_one in 0..3 {
            let outcomes = ranks(3, PATIENCE, |mut comm| {
                let (kind, dtype, bytes) = if comm.rank() == odd_one { other } else { same };
                let exchange = of(kind.clone(), all(3), *dtype);
                take_part(&mut comm, &exchange, &vec![0; *bytes])?;
                // A rank may have gone on before another has seen it.
                take_part(&mut comm, &of(reduce(SUM), all(3), DType::F32), &[0; 4])
            });
            all_fail(outcomes, &[expected]);
        }
    }
    // A message that is longer than the one that is waited for.
    let outcomes = ranks(2, PATIENCE, |mut comm| {
        let (dtype, shape) = (DType::F32, Shape::new([2usize]));
        let send = of(CollectiveKind::Send { to: 1 }, all(2), dtype);
        let recv = of(CollectiveKind::Recv { from: 0, shape, dtype }, all(2), dtype);
        match comm.rank() {
            0 => take_part(&mut comm, &send, &[0; 12])
                .and_then(|_| take_part(&mut comm, &of(reduce(SUM), all(2), dtype), &[0; 4])),
            _ => take_part(&mut comm, &recv, &[0; 8]),
        }
    });
    all_fail(outcomes, &["recv from place 0 of 2 f32"]);
    assert!(begin.elapsed() < PATIENCE, "somebody waited for the timeout");
}

/// A rank that fails, ends, panics or is stuck while the others wait for it.
#[test]
fn a_rank_that_does_not_come_fails_the_others() {
    let recv = CollectiveKind::Recv { from: 2, shape: Shape::new([1usize]), dtype: DType::F32 };
    let sum = CollectiveKind::AllReduce { reduction: SUM };
    let check = |how: &str, timeout: Duration, expected: &str| {
        for kind in [&sum, &CollectiveKind::AllToAll, &recv] {
            let outcomes = ranks(3, timeout, |mut comm| {
                if comm.rank() == 2 {
                    match how {
                        "aborts" => comm.abort("the disk is full"),
                        "panics" => panic!("planted"),
                        "sleeps" => thread::sleep(timeout * 3),
                        "is gone" => thread::sleep(Duration::from_millis(100)),
                        _ => {}
                    }
                    return None;
                }
                if how == "is gone" {
                    // Somebody else hears of it while this rank waits.
                    let shared = Arc::clone(comm.shared());
                    thread::spawn(move || {
                        thread::sleep(Duration::from_millis(20));
                        shared.abort(2, "its process ended");
                    });
                }
                Some(take_part(&mut comm, &of(kind.clone(), all(3), DType::F32), &[0; 12]))
            });
            let outcomes: Vec<_> = outcomes.into_iter().map(Option::flatten).collect();
            assert_eq!(outcomes.iter().flatten().count(), 2, "{how}: {kind:?}");
            all_fail(outcomes, &[expected]);
        }
    };
    let begin = Instant::now();
    check("ends", PATIENCE, "rank 2 has ended and will not come");
    check("aborts", PATIENCE, "rank 2 failed: rank 2: the disk is full");
    check("panics", PATIENCE, "rank 2 failed: rank 2: its thread panicked");
    check("is gone", PATIENCE, "rank 2 failed: its process ended");
    assert!(begin.elapsed() < PATIENCE, "somebody waited for the timeout");
    check("sleeps", Duration::from_millis(60), "waited 60ms; not there: rank 2");
}

/// A rank whose transport fails says so; the others, to whom nobody can say it, wait no longer than
/// the limit.
#[test]
fn a_transport_that_fails() {
    let mut world = Memory::world(2);
    world[1].lasts = 3;
    let outcomes = ranks_on(world, Duration::from_millis(200), |mut comm| {
        let gather = of(CollectiveKind::AllGather, all(2), DType::F32);
        for round in 0.. {
            if let Err(error) = take_part(&mut comm, &gather, &[0; 4]) {
                return (round, error.to_string());
            }
        }
        unreachable!("a loop without an end")
    });
    let (done, is_in_order): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    // The frame of the other rank may come before its own is to go, which ends its round.
    let (round, error) = done[1].as_ref().unwrap();
    assert!((3..=4).contains(round), "{round}");
    assert_eq!(error, "rank 1 failed: the cable is cut");
    let (round, error) = done[0].as_ref().unwrap();
    assert_eq!(*round, 3);
    assert!(error.ends_with("waited 200ms; not there: rank 1"), "{error}");
    assert!(!is_in_order[1]);
}

/// Where its goodbye came as well before anybody looked, a run that failed ended in order.
#[test]
fn a_rank_that_failed_and_left_has_failed() {
    let shared = Shared::new(0, 2, PATIENCE);
    {
        let mut state = shared.lock();
        state.failure = Some((1, "the disk is full".to_string()));
        state.ended.push(1);
        state.is_sent = true;
        state.is_over = true;
    }
    let error = shared.finish(PATIENCE).unwrap_err().to_string();
    assert_eq!(error, "rank 1 failed: the disk is full");
}

/// All end in order, or none does.
#[test]
fn how_runs_end() {
    let check = |how: &str, limit: Duration, expected: [Option<&str>; 3]| {
        let ends = ranks_on(Memory::world(3), PATIENCE, |mut comm| {
            let gather = of(CollectiveKind::AllGather, all(3), DType::F32);
            take_part(&mut comm, &gather, &[0; 4]).unwrap();
            if comm.rank() == 2 {
                match how {
                    "late" => thread::sleep(Duration::from_millis(20)),
                    "failed" => {
                        comm.abort("the disk is full");
                        return Ok(());
                    }
                    _ => {}
                }
            }
            let shared = Arc::clone(comm.shared());
            drop(comm);
            shared.finish(limit)
        });
        for (rank, ((end, is_in_order), expected)) in ends.into_iter().zip(expected).enumerate() {
            let end = end.unwrap().err().map(|error| error.to_string());
            assert_eq!(end.as_deref(), expected, "{how}: rank {rank}");
            assert_eq!(is_in_order, how != "failed", "{how}: rank {rank}");
        }
    };
    let in_order = [None; 3];
    check("at once", PATIENCE, in_order);
    check("late", PATIENCE, in_order);
    let failed = Some("rank 2 failed: rank 2: the disk is full");
    check("failed", PATIENCE, [failed, failed, None]);
    let limit = Duration::from_millis(50);
    let ends = ranks_on(Memory::world(2), PATIENCE, |comm| {
        if comm.rank() == 0 {
            return Some(comm.shared().finish(limit).unwrap_err().to_string());
        }
        thread::sleep(limit * 4);
        comm.shared().lock().has_left = true;
        None
    });
    let text = ends[0].0.clone().flatten().unwrap();
    assert_eq!(text, "the end of the run waited 50ms; not there: rank 1");
    assert!(ends.iter().all(|(_, is_in_order)| !is_in_order), "nobody may finalize");
}
