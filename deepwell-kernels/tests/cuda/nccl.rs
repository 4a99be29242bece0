//! Exchanges by NCCL: alone on one GPU, where a sum is what was given; and of two ranks on two
//! GPUs, beside the oracle. Each rank of these tests is a thread with a driver of its own, and none
//! is recorded there; ranks that are processes train in the trainer's tests.

use std::thread;
use std::time::Duration;

use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, ProcessGroup, Shape};
use deepwell_kernels::cuda::{
    CudarcDriver, DeviceComm, DeviceExchange, DevicePtr, Driver, DriverResult, NCCL_VARIABLE,
    NcclId, NcclLimits, NcclRank, Priority, Stream,
};
use deepwell_kernels::ops::collective::oracle;
use deepwell_kernels::{Comm, CommError, Exchange};
use deepwell_trials::skip;

use crate::device::need_gpus;

const LIMITS: NcclLimits =
    NcclLimits { connect: Duration::from_secs(120), exchange: Duration::from_secs(60) };
/// Elements of an operand of the smaller side.
const ELEMENTS: usize = 1000;

/// What joins the ranks of a test; skips the test where there is no library.
fn id() -> NcclId {
    NcclId::new().unwrap_or_else(|error| {
        let named = std::env::var_os(NCCL_VARIABLE).is_some();
        assert!(!named, "{NCCL_VARIABLE} is set: {error}");
        skip(error.to_string())
    })
}

fn group(ranks: u32) -> ProcessGroup {
    ProcessGroup { name: ProcessGroup::DATA.to_string(), ranks: (0..ranks).collect() }
}

/// A rank that has joined a group of all.
fn rank_of(driver: &CudarcDriver, id: NcclId, rank: u32, ranks: u32) -> DriverResult<NcclRank> {
    let joined = NcclRank::connect(driver, id, (rank, ranks), LIMITS, &|| None)?;
    joined.join(&[group(ranks)])?;
    Ok(joined)
}

/// Whole numbers, so that every order of sums gives the same.
fn numbers(rank: u32, elements: usize) -> Vec<f32> {
    (0..elements).map(|at| ((at * 7 + rank as usize * 13) % 64) as f32 - 20.0).collect()
}

fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn to_numbers(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect()
}

/// Elements of input and output of a rank among so many.
fn sizes(kind: &CollectiveKind, ranks: usize) -> (usize, usize) {
    match kind {
        CollectiveKind::AllReduce { .. }
        | CollectiveKind::Broadcast { .. }
        | CollectiveKind::Shift { .. } => (ELEMENTS, ELEMENTS),
        CollectiveKind::ReduceScatter { .. } => (ELEMENTS * ranks, ELEMENTS),
        CollectiveKind::AllGather => (ELEMENTS, ELEMENTS * ranks),
        CollectiveKind::AllToAll => (ELEMENTS * ranks, ELEMENTS * ranks),
        CollectiveKind::Send { .. } => (ELEMENTS, 0),
        CollectiveKind::Recv { .. } => (0, ELEMENTS),
    }
}

/// Kinds that every rank takes part in alike.
fn kinds(ranks: u32) -> Vec<CollectiveKind> {
    vec![
        CollectiveKind::AllReduce { reduction: Reduction::Sum },
        CollectiveKind::ReduceScatter { reduction: Reduction::Sum },
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
        CollectiveKind::Broadcast { root: ranks - 1 },
        CollectiveKind::Shift { by: 1 % ranks },
    ]
}

/// An exchange with operands on a device.
struct OnDevice {
    exchange: DeviceExchange,
    stream: Stream,
}

impl OnDevice {
    fn new(driver: &mut CudarcDriver, kind: CollectiveKind, ranks: u32) -> OnDevice {
        let (input, output) = sizes(&kind, ranks as usize);
        let bytes = |elements: usize| elements * size_of::<f32>();
        let exchange = DeviceExchange {
            exchange: Exchange { kind, group: group(ranks), dtype: DType::F32 },
            input: driver.allocate(bytes(input)).unwrap(),
            input_bytes: bytes(input),
            output: driver.allocate(bytes(output)).unwrap(),
            output_bytes: bytes(output),
        };
        OnDevice { exchange, stream: driver.stream(Priority::Middle).unwrap() }
    }

    fn write(&self, driver: &mut CudarcDriver, numbers: &[f32]) {
        let OnDevice { exchange, .. } = self;
        driver.fill(exchange.output, 0xff, exchange.output_bytes, self.stream).unwrap();
        driver.upload(exchange.input, &to_bytes(numbers)).unwrap();
    }

    fn read(&self, driver: &mut CudarcDriver) -> Vec<f64> {
        let mut bytes = vec![0; self.exchange.output_bytes];
        driver.download(&mut bytes, self.exchange.output).unwrap();
        to_numbers(&bytes)
    }
}

trial!(one_rank_keeps_what_it_has);
fn one_rank_keeps_what_it_has() {
    need_gpus(1);
    let mut driver = CudarcDriver::open(0).unwrap();
    let rank = rank_of(&driver, id(), 0, 1).unwrap();
    deepwell_trials::note(|| rank.version());
    let mut device = rank.device();
    for kind in kinds(1) {
        let of = OnDevice::new(&mut driver, kind.clone(), 1);
        let plan = device.plan(&of.exchange).unwrap();
        let expected: Vec<f64> =
            numbers(0, ELEMENTS).iter().map(|&number| f64::from(number)).collect();
        of.write(&mut driver, &numbers(0, ELEMENTS));
        device.run(plan, of.stream).unwrap();
        assert_eq!(of.read(&mut driver), expected, "{kind:?}");

        // The same as a graph, which is launched with other numbers than it was recorded with.
        driver.begin_capture(of.stream).unwrap();
        driver.begin_group(of.stream).unwrap();
        device.run(plan, of.stream).unwrap();
        driver.end_group(of.stream).unwrap();
        let graph = driver.end_capture(of.stream).unwrap();
        for round in 1..4 {
            of.write(&mut driver, &numbers(round, ELEMENTS));
            driver.launch_graph(graph, of.stream).unwrap();
            device.wait(&mut || driver.synchronize()).unwrap();
            let expected: Vec<f64> =
                numbers(round, ELEMENTS).iter().map(|&number| f64::from(number)).collect();
            assert_eq!(of.read(&mut driver), expected, "{kind:?} as a graph, round {round}");
        }
        driver.free_graph(graph).unwrap();
    }
}

trial!(one_host_gathers_what_it_tells);
fn one_host_gathers_what_it_tells() {
    need_gpus(1);
    let driver = CudarcDriver::open(0).unwrap();
    let rank = rank_of(&driver, id(), 0, 1).unwrap();
    let mut host = rank.host().unwrap();
    let ranks = group(1).ranks;
    let group = ProcessGroup { name: ProcessGroup::HOST.to_string(), ranks };
    let exchange = Exchange { kind: CollectiveKind::AllGather, group, dtype: DType::U64 };
    // Less than the buffers hold, as much, and more.
    for bytes in [8, 4 << 20, (9 << 20) + 8] {
        let own: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let mut all = vec![0; own.len()];
        host.exchange(&exchange, &own, &mut all).unwrap();
        assert!(all == own, "{bytes} bytes");
    }
}

trial!(what_cannot_be_exchanged_is_refused);
fn what_cannot_be_exchanged_is_refused() {
    need_gpus(1);
    let driver = CudarcDriver::open(0).unwrap();
    let rank = rank_of(&driver, id(), 0, 1).unwrap();
    let mut device = rank.device();
    let sum = CollectiveKind::AllReduce { reduction: Reduction::Sum };
    let max = CollectiveKind::AllReduce { reduction: Reduction::Max };
    let mut check = |kind: &CollectiveKind, group: ProcessGroup, dtype, bytes: usize, expected| {
        let exchange = DeviceExchange {
            exchange: Exchange { kind: kind.clone(), group, dtype },
            input: DevicePtr(0),
            input_bytes: bytes,
            output: DevicePtr(0),
            output_bytes: bytes,
        };
        let error = device.plan(&exchange).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(&max, group(1), DType::F32, 8, "that of NCCL loses NaN");
    check(&sum, group(1), DType::E4m3, 8, "expected f32, bf16, i32 or u64 to reduce");
    check(&sum, group(1), DType::F32, 6, "expected bytes in units of 4");
    check(&sum, group(2), DType::F32, 8, "expected ranks below 1, got 1");
}

trial!(a_rank_that_has_failed_exchanges_nothing);
fn a_rank_that_has_failed_exchanges_nothing() {
    need_gpus(1);
    let mut driver = CudarcDriver::open(0).unwrap();
    let rank = rank_of(&driver, id(), 0, 1).unwrap();
    let (mut device, mut host) = (rank.device(), rank.host().unwrap());
    let sum = CollectiveKind::AllReduce { reduction: Reduction::Sum };
    let of = OnDevice::new(&mut driver, sum.clone(), 1);
    let plan = device.plan(&of.exchange).unwrap();
    rank.monitor().abort(7, "out of data");
    rank.monitor().abort(8, "because of that");
    assert_eq!(rank.monitor().failure(), Some((7, "out of data".to_string())));
    let expected = "rank 7 failed: out of data";
    for error in [
        device.run(plan, of.stream).unwrap_err().to_string(),
        device.wait(&mut || driver.synchronize()).unwrap_err().to_string(),
    ] {
        assert!(error.contains(expected), "{error}");
    }
    let exchange = Exchange { kind: sum, group: group(1), dtype: DType::F32 };
    let error = host.exchange(&exchange, &[0; 4], &mut [0; 4]).unwrap_err();
    assert_eq!(error, CommError::Failed { rank: 7, reason: "out of data".to_string() });
}

/// Does the same on as many ranks as threads, rank `r` on GPU `r % gpus`.
fn on_ranks<T: Send>(
    ranks: u32,
    gpus: usize,
    work: impl Fn(CudarcDriver, DriverResult<NcclRank>, u32) -> T + Sync,
) -> Vec<T> {
    let id = id();
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let driver = CudarcDriver::open(rank as usize % gpus).unwrap();
                    let joined = rank_of(&driver, id, rank, ranks);
                    work(driver, joined, rank)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

trial!(two_ranks_on_one_gpu_are_refused);
fn two_ranks_on_one_gpu_are_refused() {
    need_gpus(1);
    for error in on_ranks(2, 1, |_, joined, _| joined.map(drop).unwrap_err().to_string()) {
        assert!(error.contains("hint: each rank needs a GPU of its own"), "{error}");
    }
}

trial!(two_ranks_exchange_as_the_oracle_does);
fn two_ranks_exchange_as_the_oracle_does() {
    const RANKS: u32 = 2;
    need_gpus(RANKS as usize);
    for kind in kinds(RANKS) {
        let (elements, _) = sizes(&kind, RANKS as usize);
        let inputs: Vec<Vec<f64>> = (0..RANKS)
            .map(|rank| numbers(rank, elements).iter().map(|&number| f64::from(number)).collect())
            .collect();
        let expected = oracle::exchange(&kind, &inputs);
        let got = on_ranks(RANKS, RANKS as usize, |mut driver, joined, rank| {
            let joined = joined.unwrap();
            let mut device = joined.device();
            let of = OnDevice::new(&mut driver, kind.clone(), RANKS);
            of.write(&mut driver, &numbers(rank, elements));
            let plan = device.plan(&of.exchange).unwrap();
            device.run(plan, of.stream).unwrap();
            device.wait(&mut || driver.synchronize()).unwrap();
            of.read(&mut driver)
        });
        assert_eq!(got, expected, "{kind:?}");
    }
}

trial!(two_ranks_send_and_receive);
fn two_ranks_send_and_receive() {
    need_gpus(2);
    let got = on_ranks(2, 2, |mut driver, joined, rank| {
        let joined = joined.unwrap();
        let mut device = joined.device();
        let recv =
            CollectiveKind::Recv { from: 0, shape: Shape::new([ELEMENTS]), dtype: DType::F32 };
        let kind = if rank == 0 { CollectiveKind::Send { to: 1 } } else { recv };
        let of = OnDevice::new(&mut driver, kind, 2);
        let (elements, _) = sizes(&of.exchange.exchange.kind, 2);
        of.write(&mut driver, &numbers(5, elements));
        let plan = device.plan(&of.exchange).unwrap();
        device.run(plan, of.stream).unwrap();
        device.wait(&mut || driver.synchronize()).unwrap();
        of.read(&mut driver)
    });
    let expected: Vec<f64> = numbers(5, ELEMENTS).iter().map(|&it| f64::from(it)).collect();
    assert_eq!(got, [Vec::new(), expected]);
}

trial!(two_ranks_send_each_other_more_than_is_buffered);
/// As two stages of 1F1B do between their bodies: neither send ends before the other rank receives.
fn two_ranks_send_each_other_more_than_is_buffered() {
    const SENT: usize = 128 << 20;
    need_gpus(2);
    let got = on_ranks(2, 2, |mut driver, joined, rank| {
        let joined = joined.unwrap();
        let mut device = joined.device();
        let (other, shape) = (1 - rank, Shape::new([SENT]));
        let recv = CollectiveKind::Recv { from: other, shape, dtype: DType::E8m0 };
        let [input, output] = [(); 2].map(|()| driver.allocate(SENT).unwrap());
        let plans = [CollectiveKind::Send { to: other }, recv].map(|kind| {
            let sends = matches!(kind, CollectiveKind::Send { .. });
            let of = DeviceExchange {
                exchange: Exchange { kind, group: group(2), dtype: DType::E8m0 },
                input,
                input_bytes: if sends { SENT } else { 0 },
                output,
                output_bytes: if sends { 0 } else { SENT },
            };
            device.plan(&of).unwrap()
        });
        let stream = driver.stream(Priority::Middle).unwrap();
        driver.begin_capture(stream).unwrap();
        driver.begin_group(stream).unwrap();
        device.run_together(&plans, stream).unwrap();
        driver.end_group(stream).unwrap();
        let graph = driver.end_capture(stream).unwrap();
        driver.synchronize_device().unwrap();
        for round in 0..3u8 {
            driver.fill(input, 10 * round + rank as u8, SENT, stream).unwrap();
            driver.launch_graph(graph, stream).unwrap();
            device.wait(&mut || driver.synchronize()).unwrap();
            let mut bytes = vec![0; SENT];
            driver.download(&mut bytes, output).unwrap();
            let expected = 10 * round + other as u8;
            assert!(bytes.iter().all(|&byte| byte == expected), "rank {rank}, round {round}");
        }
        driver.free_graph(graph).unwrap();
        rank
    });
    assert_eq!(got, [0, 1]);
}

trial!(a_rank_that_does_not_come_is_not_waited_for_without_limit);
/// Rank 1 takes no part in the second sum; rank 0 learns why, or gives up.
fn a_rank_that_does_not_come_is_not_waited_for_without_limit() {
    need_gpus(2);
    let sum = CollectiveKind::AllReduce { reduction: Reduction::Sum };
    let got = on_ranks(2, 2, |mut driver, joined, rank| {
        let joined = joined.unwrap();
        let mut device = joined.device();
        let of = OnDevice::new(&mut driver, sum.clone(), 2);
        of.write(&mut driver, &numbers(rank, ELEMENTS));
        let plan = device.plan(&of.exchange).unwrap();
        device.run(plan, of.stream).unwrap();
        device.wait(&mut || driver.synchronize()).unwrap();
        let monitor = joined.monitor();
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(3));
            monitor.abort(1, "out of data");
        });
        if rank == 1 {
            return String::new();
        }
        device.run(plan, of.stream).unwrap();
        device.wait(&mut || driver.synchronize()).unwrap_err().to_string()
    });
    assert!(got[0].contains("rank 1 failed: out of data"), "{}", got[0]);
}
