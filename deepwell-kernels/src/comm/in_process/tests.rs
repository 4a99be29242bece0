//! Every collective against the definition, and every way in which ranks can fail each other.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, ProcessGroup, Shape};
use half::bf16;

use super::*;
use crate::ops::collective::oracle;
use crate::runtime::cpu::test_support::Random;

/// Longer than any test runs that does not wait in vain.
const PATIENCE: Duration = Duration::from_secs(60);

const SUM: Reduction = Reduction::Sum;

type Outcome = Result<Vec<u8>, CommError>;

/// Runs a function on each rank of a world; a rank that panics gives none.
fn ranks<T: Send>(
    size: u32,
    timeout: Duration,
    run: impl Fn(InProcess) -> T + Sync,
) -> Vec<Option<T>> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = InProcess::world(size, timeout)
            .into_iter()
            .map(|comm| scope.spawn(move || run(comm)))
            .collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

fn all(size: u32) -> ProcessGroup {
    ProcessGroup { name: "all".to_string(), ranks: (0..size).collect() }
}

fn of(kind: CollectiveKind, group: ProcessGroup, dtype: DType) -> Exchange {
    Exchange { kind, group, dtype }
}

/// One exchange of this rank with as many bytes as its kind gives.
fn take_part(comm: &mut InProcess, exchange: &Exchange, input: &[u8]) -> Outcome {
    let size = exchange.group.ranks.len();
    let bytes = match exchange.kind {
        CollectiveKind::ReduceScatter { .. } => input.len() / size,
        CollectiveKind::AllGather => input.len() * size,
        CollectiveKind::Send { .. } => 0,
        _ => input.len(),
    };
    let mut output = vec![0xee; bytes];
    comm.exchange(exchange, input, &mut output)?;
    Ok(output)
}

fn stored(dtype: DType, numbers: &[f64]) -> Vec<u8> {
    let number = |&number: &f64| match dtype {
        DType::Bf16 => bf16::from_f64(number).to_le_bytes().to_vec(),
        DType::F32 => (number as f32).to_le_bytes().to_vec(),
        DType::I32 => (number as i32).to_le_bytes().to_vec(),
        DType::U64 => (number as u64).to_le_bytes().to_vec(),
        _ => vec![number as u8],
    };
    numbers.iter().flat_map(number).collect()
}

fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let parts = bytes.chunks_exact(dtype.bits() as usize / 8);
    let number = |part: &[u8]| match dtype {
        DType::Bf16 => bf16::from_le_bytes([part[0], part[1]]).to_f64(),
        DType::F32 => f32::from_le_bytes([part[0], part[1], part[2], part[3]]).into(),
        DType::I32 => i32::from_le_bytes([part[0], part[1], part[2], part[3]]).into(),
        DType::U64 => u64::from_le_bytes(part.try_into().unwrap()) as f64,
        _ => part[0].into(),
    };
    parts.map(number).collect()
}

/// Each rank's numbers, which `dtype` holds exactly.
fn inputs(dtype: DType, size: u32, elements: usize) -> Vec<Vec<f64>> {
    let mut random = Random::new(u64::from(size) * 1000 + elements as u64);
    let mut number = || match dtype {
        DType::F32 | DType::Bf16 => random.normal(),
        _ => random.below(100) as f64,
    };
    (0..size)
        .map(|_| {
            numbers(dtype, &stored(dtype, &(0..elements).map(|_| number()).collect::<Vec<_>>()))
        })
        .collect()
}

fn check(kind: &CollectiveKind, dtype: DType, size: u32, elements: usize) {
    let what = format!("{kind:?} of {elements} {dtype} among {size}");
    let inputs = inputs(dtype, size, elements);
    let expected = oracle::exchange(kind, &inputs);
    let exchange = of(kind.clone(), all(size), dtype);
    let run = || {
        ranks(size, PATIENCE, |mut comm| {
            let input = stored(dtype, &inputs[comm.rank() as usize]);
            take_part(&mut comm, &exchange, &input)
        })
    };
    let outputs = run();
    assert_eq!(outputs, run(), "{what}: the bits differ when it is repeated");
    // Of a sum: a rounding of FP32 for each addition, and one of the type.
    let is_sum = matches!(
        exchange.kind,
        CollectiveKind::AllReduce { reduction: SUM }
            | CollectiveKind::ReduceScatter { reduction: SUM }
    );
    let rounding = if dtype == DType::Bf16 { 2f64.powi(-8) } else { 0.0 };
    let largest = inputs.iter().flatten().fold(0.0, |most: f64, x| most.max(x.abs()));
    let additions = f64::from(size - 1) * f64::from(size) * largest * 2f64.powi(-24);
    for (rank, (output, expected)) in outputs.into_iter().zip(&expected).enumerate() {
        let output = output.expect("no rank panics").unwrap();
        let output = numbers(dtype, &output);
        assert_eq!(output.len(), expected.len(), "{what}: rank {rank}");
        for (got, expected) in output.iter().zip(expected) {
            let is_float = matches!(dtype, DType::F32 | DType::Bf16);
            let tolerance =
                if is_sum && is_float { rounding * expected.abs() + additions } else { 0.0 };
            let error = (got - expected).abs();
            assert!(error <= tolerance, "{what}: rank {rank} has {got}, expected {expected}");
        }
    }
}

#[test]
fn collectives_are_what_they_are_defined_as() {
    for size in [1, 2, 3, 8] {
        let reductions = [SUM, Reduction::Max];
        let all_reduces = reductions.map(|reduction| CollectiveKind::AllReduce { reduction });
        let scatters = reductions.map(|reduction| CollectiveKind::ReduceScatter { reduction });
        let moves = [
            CollectiveKind::AllGather,
            CollectiveKind::AllToAll,
            CollectiveKind::Broadcast { root: size - 1 },
            CollectiveKind::Shift { by: 1 % size },
            CollectiveKind::Shift { by: size - 1 },
        ];
        for kind in all_reduces.iter().chain(&scatters).chain(&moves) {
            let is_cut =
                matches!(kind, CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllToAll);
            for elements in [0, 1, 7, 33] {
                let elements = if is_cut { elements * size as usize } else { elements };
                for dtype in [DType::F32, DType::Bf16, DType::I32, DType::U64] {
                    check(kind, dtype, size, elements);
                }
            }
        }
        for kind in &moves {
            check(kind, DType::E4m3, size, 8 * size as usize);
        }
    }
}

/// Round a ring, both ways at once, twice: what one sent first comes first.
#[test]
fn messages_arrive_in_order() {
    for size in [2u32, 3, 8] {
        let outcomes = ranks(size, PATIENCE, |mut comm| {
            let rank = comm.rank();
            let next = (rank + 1) % size;
            let before = (rank + size - 1) % size;
            let mut got = Vec::new();
            for round in 0..2u8 {
                let send = of(CollectiveKind::Send { to: next }, all(size), DType::E4m3);
                comm.exchange(&send, &[rank as u8, round], &mut [])?;
            }
            for _ in 0..2 {
                let (shape, dtype) = (Shape::new([2usize]), DType::E4m3);
                let kind = CollectiveKind::Recv { from: before, shape, dtype };
                let mut message = [0; 2];
                comm.exchange(&of(kind, all(size), dtype), &[], &mut message)?;
                got.push(message);
            }
            Ok::<_, CommError>(got)
        });
        for (rank, got) in (0..size).zip(outcomes) {
            let before = ((rank + size - 1) % size) as u8;
            assert_eq!(got.unwrap().unwrap(), [[before, 0], [before, 1]]);
        }
    }
}

/// Groups that share ranks, in one order on all: rank 1 is in both.
#[test]
fn groups_have_an_order_of_their_own() {
    let group =
        |name: &str, ranks: &[u32]| ProcessGroup { name: name.to_string(), ranks: ranks.to_vec() };
    let groups = [group("left", &[1, 0]), group("right", &[1, 2])];
    let outcomes = ranks(3, PATIENCE, |mut comm| {
        let (rank, mut got) = (comm.rank(), Vec::new());
        for group in groups.iter().filter(|group| group.position_of(rank).is_some()) {
            let exchange = of(CollectiveKind::AllGather, group.clone(), DType::E4m3);
            got.extend(take_part(&mut comm, &exchange, &[rank as u8])?);
        }
        Ok::<_, CommError>(got)
    });
    let expected: [&[u8]; 3] = [&[1, 0], &[1, 0, 1, 2], &[1, 2]];
    for (got, expected) in outcomes.into_iter().zip(expected) {
        assert_eq!(got.unwrap().unwrap(), expected);
    }
}

/// Whatever the ranks' delays, the sum has the bits that the order of the ranks gives.
#[test]
fn delays_do_not_change_bits() {
    let size = 4;
    let input = |rank: u32| {
        let mut random = Random::new(u64::from(rank));
        stored(DType::F32, &(0..257).map(|_| random.normal()).collect::<Vec<_>>())
    };
    let exchange = of(CollectiveKind::AllReduce { reduction: SUM }, all(size), DType::F32);
    let mut first: Option<Vec<u8>> = None;
    for round in 0..8u64 {
        let outcomes = ranks(size, PATIENCE, |mut comm| {
            let mut random = Random::new(round * 10 + u64::from(comm.rank()));
            thread::sleep(Duration::from_micros(random.below(2000) as u64));
            let input = input(comm.rank());
            take_part(&mut comm, &exchange, &input)
        });
        for outcome in outcomes {
            let got = outcome.unwrap().unwrap();
            assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "round {round}");
        }
    }
}

/// Every rank fails, each message that is no echo of another's is one of `expected`, and none
/// waits for the timeout unless that is what is tested.
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
    type Wish = (CollectiveKind, DType, usize);
    let same = || (reduce(SUM), DType::F32, 8);
    let cases: [(Wish, &str); 7] = [
        ((CollectiveKind::AllGather, DType::F32, 8), "all_gather of 2 f32 in group `all`"),
        ((reduce(Reduction::Max), DType::F32, 8), "all_reduce max of 2 f32"),
        ((reduce(SUM), DType::I32, 8), "all_reduce sum of 2 i32"),
        ((reduce(SUM), DType::F32, 12), "all_reduce sum of 3 f32"),
        ((reduce(SUM), DType::F32, 0), "all_reduce sum of 0 f32"),
        ((CollectiveKind::Broadcast { root: 1 }, DType::F32, 8), "broadcast from place 1"),
        ((CollectiveKind::Shift { by: 1 }, DType::F32, 8), "shift by 1"),
    ];
    for (other, expected) in &cases {
        for odd_one in 0..3 {
            let outcomes = ranks(3, PATIENCE, |mut comm| {
                let is_odd = comm.rank() == odd_one;
                let (kind, dtype, bytes) = if is_odd { other.clone() } else { same() };
                take_part(&mut comm, &of(kind, all(3), dtype), &vec![0; bytes])
            });
            all_fail(outcomes, &[expected]);
        }
    }
    assert!(begin.elapsed() < PATIENCE, "somebody waited for the timeout");
}

/// Two groups of the same ranks, met in another order by one of them: nobody would ever come.
#[test]
fn ranks_that_wait_for_each_other_all_fail() {
    let named = |name: &str| ProcessGroup { name: name.to_string(), ..all(3) };
    let begin = Instant::now();
    let outcomes = ranks(3, PATIENCE, |mut comm| {
        let mut groups = [named("data"), named("model")];
        if comm.rank() == 1 {
            groups.reverse();
        }
        groups.into_iter().try_for_each(|group| {
            let exchange = of(CollectiveKind::AllGather, group, DType::E4m3);
            take_part(&mut comm, &exchange, &[1]).map(drop)
        })
    });
    all_fail(outcomes, &["the ranks wait for each other: rank"]);
    assert!(begin.elapsed() < PATIENCE, "somebody waited for the timeout");
}

/// Each exchange with what the ranks that are left do in it: of a message the one that receives.
fn every_exchange() -> Vec<CollectiveKind> {
    let reduce = |reduction| CollectiveKind::AllReduce { reduction };
    let scatter = |reduction| CollectiveKind::ReduceScatter { reduction };
    let recv = CollectiveKind::Recv { from: 2, shape: Shape::new([3usize]), dtype: DType::F32 };
    vec![
        reduce(SUM),
        reduce(Reduction::Max),
        scatter(SUM),
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
        CollectiveKind::Broadcast { root: 2 },
        CollectiveKind::Broadcast { root: 0 },
        recv,
    ]
}

/// One exchange of three numbers a rank.
fn take_part_in(comm: &mut InProcess, kind: &CollectiveKind) -> Outcome {
    let exchange = of(kind.clone(), all(3), DType::F32);
    match kind {
        CollectiveKind::Recv { .. } => {
            let mut output = vec![0; 12];
            comm.exchange(&exchange, &[], &mut output)?;
            Ok(output)
        }
        _ => take_part(comm, &exchange, &[0; 12]),
    }
}

#[test]
fn a_rank_that_ends_or_panics_fails_the_others() {
    let begin = Instant::now();
    for kind in every_exchange() {
        for panics in [false, true] {
            for late in [false, true] {
                let outcomes = ranks(3, PATIENCE, |mut comm| {
                    if comm.rank() == 2 {
                        if late {
                            thread::sleep(Duration::from_millis(20));
                        }
                        assert!(!panics, "planted");
                        return None;
                    }
                    Some(take_part_in(&mut comm, &kind))
                });
                let outcomes: Vec<_> = outcomes.into_iter().map(Option::flatten).collect();
                assert_eq!(outcomes.iter().flatten().count(), 2, "{kind:?}");
                let expected = ["rank 2 has ended", "rank 2 failed: rank 2: its thread panicked"];
                all_fail(outcomes, &expected);
            }
        }
    }
    // A message to one that has ended.
    let outcomes = ranks(2, PATIENCE, |mut comm| {
        let send = of(CollectiveKind::Send { to: 1 }, all(2), DType::F32);
        let is_first = comm.rank() == 0;
        is_first.then(|| {
            loop {
                if let Err(error) = comm.exchange(&send, &[0; 4], &mut []) {
                    break Err::<(), _>(error);
                }
            }
        })
    });
    all_fail(outcomes.into_iter().map(Option::flatten).collect(), &["rank 1 has ended"]);
    assert!(begin.elapsed() < PATIENCE, "somebody waited for the timeout");
}

/// A rank that neither ends nor comes is named by whoever waits for it longest.
#[test]
fn a_rank_that_is_stuck_fails_the_others_in_time() {
    let limit = Duration::from_millis(60);
    for kind in every_exchange() {
        let gate = Barrier::new(3);
        let begin = Instant::now();
        let outcomes = ranks(3, limit, |mut comm| {
            let is_stuck = comm.rank() == 2;
            let outcome = (!is_stuck).then(|| (take_part_in(&mut comm, &kind), begin.elapsed()));
            gate.wait();
            outcome
        });
        let outcomes: Vec<_> = outcomes.into_iter().map(Option::flatten).collect();
        for (_, after) in outcomes.iter().flatten() {
            assert!(*after < 50 * limit, "{kind:?}: only after {after:?}");
        }
        let outcomes = outcomes.into_iter().map(|it| it.map(|(outcome, _)| outcome)).collect();
        all_fail(outcomes, &["waited 60ms; not there: rank 2"]);
    }
}

/// Ranks that wait for one that waits itself name the one that all of them wait for.
#[test]
fn who_keeps_a_chain_of_ranks_waiting_is_named() {
    let gate = Barrier::new(4);
    let recv = |from| CollectiveKind::Recv { from, shape: Shape::new([1usize]), dtype: DType::F32 };
    let outcomes = ranks(4, Duration::from_millis(60), |mut comm| {
        let rank = comm.rank();
        // The last one begins to wait first.
        thread::sleep(Duration::from_millis(5 * u64::from(3 - rank)));
        let outcome = (rank > 0).then(|| {
            let exchange = of(recv(rank - 1), all(4), DType::F32);
            comm.exchange(&exchange, &[], &mut [0; 4])
        });
        gate.wait();
        outcome
    });
    let outcomes = outcomes.into_iter().map(Option::flatten).collect();
    all_fail(outcomes, &["waited 60ms; not there: rank 0"]);
}

/// Time in exchanges is counted, on the rank that comes first most of all.
#[test]
fn waiting_is_counted() {
    let outcomes = ranks(2, PATIENCE, |mut comm| {
        assert_eq!(comm.waited(), Some(Duration::ZERO));
        thread::sleep(Duration::from_millis(60 * u64::from(comm.rank())));
        let exchange = of(CollectiveKind::AllGather, all(2), DType::F32);
        take_part(&mut comm, &exchange, &[0; 4]).map(|_| comm.waited().unwrap())
    });
    let waited: Vec<Duration> = outcomes.into_iter().map(|it| it.unwrap().unwrap()).collect();
    assert!(waited[0] > waited[1] + Duration::from_millis(20), "{waited:?}");
}

/// One that gave up makes the others give up at their next exchange, also in another group.
#[test]
fn a_failure_is_everybodys() {
    let pair = ProcessGroup { name: "pair".to_string(), ranks: vec![0, 1] };
    let gate = Barrier::new(3);
    let outcomes = ranks(3, PATIENCE, |mut comm| {
        if comm.rank() == 2 {
            comm.abort("out of memory");
        }
        gate.wait();
        let group = if comm.rank() == 2 { all(3) } else { pair.clone() };
        take_part(&mut comm, &of(CollectiveKind::AllGather, group, DType::E4m3), &[1])
    });
    all_fail(outcomes, &["rank 2 failed: rank 2: out of memory"]);
}

#[test]
fn a_timeout_names_who_did_not_come() {
    let gate = Barrier::new(4);
    let outcomes = ranks(4, Duration::from_millis(50), |mut comm| {
        let outcome = match comm.rank() {
            1 | 3 => None,
            _ => {
                let exchange = of(CollectiveKind::AllGather, all(4), DType::E4m3);
                Some(take_part(&mut comm, &exchange, &[1]))
            }
        };
        gate.wait();
        outcome
    });
    let outcomes = outcomes.into_iter().map(Option::flatten).collect();
    let expected = "all_gather of 1 e4m3 in group `all` waited 50ms; not there: rank 1, rank 3";
    all_fail(outcomes, &[expected]);
}

#[test]
fn exchanges_that_cannot_be_are_refused() {
    let recv = |from| CollectiveKind::Recv { from, shape: Shape::new([1usize]), dtype: DType::F32 };
    let other = |ranks: &[u32]| ProcessGroup { name: "other".to_string(), ranks: ranks.to_vec() };
    let cases: [(CollectiveKind, ProcessGroup, DType, usize, usize, &str); 9] = [
        (CollectiveKind::AllGather, other(&[1]), DType::F32, 4, 4, "expected a group with rank 0"),
        (CollectiveKind::AllGather, other(&[0, 7]), DType::F32, 4, 8, "ranks below 2, got 7"),
        (CollectiveKind::AllGather, all(2), DType::F32, 4, 4, "expected 8 bytes of results, got 4"),
        (CollectiveKind::AllToAll, all(2), DType::F32, 4, 4, "expected bytes in units of 8"),
        (CollectiveKind::AllToAll, all(2), DType::Bf16, 3, 3, "expected bytes in units of 4"),
        (CollectiveKind::Broadcast { root: 2 }, all(2), DType::F32, 4, 4, "another place among 2"),
        (CollectiveKind::Send { to: 0 }, all(2), DType::F32, 4, 0, "another place among 2, got 0"),
        (recv(2), all(2), DType::F32, 0, 4, "another place among 2, got 2"),
        (
            CollectiveKind::AllReduce { reduction: SUM },
            other(&[0]),
            DType::E4m3,
            4,
            4,
            "expected f32, bf16, i32 or u64 to reduce, got e4m3",
        ),
    ];
    for (kind, group, dtype, input, output, expected) in cases {
        let mut world = InProcess::world(2, PATIENCE);
        let exchange = of(kind, group, dtype);
        let error = world[0].exchange(&exchange, &vec![0; input], &mut vec![0; output]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "expected `{expected}` in `{error}`");
        // The other rank hears of it.
        let mut out = vec![0; 8];
        let later = of(CollectiveKind::AllGather, all(2), DType::F32);
        let error = world[1].exchange(&later, &[0; 4], &mut out).unwrap_err();
        assert!(matches!(error, CommError::Failed { rank: 0, .. }), "{error}");
    }
}

/// A message of another type or length than the receiver wants.
#[test]
fn messages_that_do_not_fit_fail_both() {
    let recv = |elements: usize, dtype| CollectiveKind::Recv {
        from: 0,
        shape: Shape::new([elements]),
        dtype,
    };
    let gate = Barrier::new(2);
    for (dtype, bytes, expected) in [
        (DType::F32, 8, "recv from place 0 of 2 f32"),
        (DType::I32, 4, "recv from place 0 of 1 i32"),
    ] {
        let outcomes = ranks(2, PATIENCE, |mut comm| {
            if comm.rank() == 0 {
                let send = of(CollectiveKind::Send { to: 1 }, all(2), DType::F32);
                comm.exchange(&send, &[0; 4], &mut [])?;
                gate.wait();
                return comm.exchange(&send, &[0; 4], &mut []);
            }
            let exchange = of(recv(bytes / 4, dtype), all(2), dtype);
            let outcome = comm.exchange(&exchange, &[], &mut vec![0; bytes]);
            gate.wait();
            outcome
        });
        all_fail(outcomes, &[expected]);
    }
}
