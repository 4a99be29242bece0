//! Programs with collectives, run on several ranks: by the processor, and by the CUDA backend over
//! drivers whose memory is the host's.

use std::thread;
use std::time::Duration;

use deepwell_ir::ops::{Add, Collective, CollectiveKind, Reduction};
use deepwell_ir::{
    Access, ByteRange, DType, GroupId, KernelCatalog, MemoryKind, OperandType, ProcessGroup,
    Program, Ranks, Shape, Target, ValueId,
};
use deepwell_kernels::cuda::{
    Architecture, COLLECTIVES, CudaBackend, CudaCatalog, FakeDriver, HostDriver, KernelImages,
    Machine, cuda_target,
};
use deepwell_kernels::ops::collective::oracle;
use deepwell_kernels::{
    Backend, CpuBackend, CpuCatalog, Executor, InProcess, SingleCall, cpu_target,
};

const PATIENCE: Duration = Duration::from_secs(60);
const SUM: Reduction = Reduction::Sum;

/// What a rank's program runs on.
#[derive(Clone, Copy, Debug)]
enum Device {
    Cpu,
    Cuda,
    #[cfg(feature = "emulated")]
    Emulated,
}

#[cfg(not(feature = "emulated"))]
const DEVICES: [Device; 2] = [Device::Cpu, Device::Cuda];
#[cfg(feature = "emulated")]
const DEVICES: [Device; 3] = [Device::Cpu, Device::Cuda, Device::Emulated];

impl Device {
    fn target(self, ranks: Ranks) -> Target {
        match self {
            Device::Cpu => cpu_target(1).as_rank(ranks),
            _ => cuda_target(Architecture::Sm90a, 4, &[COLLECTIVES]).as_rank(ranks),
        }
    }

    fn catalog(self) -> &'static dyn KernelCatalog {
        match self {
            Device::Cpu => &CpuCatalog,
            _ => &CudaCatalog,
        }
    }

    fn backend(self, comm: Option<InProcess>) -> Box<dyn Backend> {
        match (self, comm) {
            (Device::Cpu, None) => Box::new(CpuBackend::new()),
            (Device::Cpu, Some(comm)) => Box::new(CpuBackend::new().with_comm(Box::new(comm))),
            (Device::Cuda, comm) => cuda_backend(FakeDriver::h200(), comm),
            #[cfg(feature = "emulated")]
            (Device::Emulated, comm) => {
                use deepwell_kernels::cuda::EmulatedDriver;
                use deepwell_kernels::cuda::emulator::launch::Settings;
                cuda_backend(EmulatedDriver::new(Architecture::Sm90a, Settings::default()), comm)
            }
        }
    }
}

fn cuda_backend<M: Machine + 'static>(
    driver: HostDriver<M>,
    comm: Option<InProcess>,
) -> Box<dyn Backend> {
    let comm = comm.map(|comm| driver.comm(Box::new(comm)));
    let backend = CudaBackend::new(Box::new(driver), None, KernelImages::empty()).unwrap();
    match comm {
        None => Box::new(backend),
        Some(comm) => Box::new(backend.with_comm(Box::new(comm))),
    }
}

/// Rank `rank` of `size`, all of them in one group, in this order.
fn ranks(rank: u32, order: &[u32]) -> Ranks {
    let group = ProcessGroup { name: "all".to_string(), ranks: order.to_vec() };
    Ranks { rank, world_size: order.len() as u32, groups: vec![group] }
}

fn call(kind: &CollectiveKind, size: u32, elements: usize) -> SingleCall {
    let op = Collective::new(kind.clone(), GroupId(0), size);
    let x = |elements| (DType::F32, vec![elements]);
    let size = size as usize;
    match kind {
        CollectiveKind::Send { .. } => SingleCall::new(op, &[x(elements)], &[]),
        CollectiveKind::Recv { .. } => SingleCall::new(op, &[], &[x(elements)]),
        CollectiveKind::AllGather => SingleCall::new(op, &[x(elements)], &[x(elements * size)]),
        CollectiveKind::ReduceScatter { .. } => {
            SingleCall::new(op, &[x(elements)], &[x(elements / size)])
        }
        _ => SingleCall::new(op, &[x(elements)], &[x(elements)]),
    }
}

fn program(device: Device, call: &SingleCall, ranks: Ranks) -> Program {
    let target = device.target(ranks);
    let choice = call.select(device.catalog(), &target).unwrap().choice;
    let mut program = call.program(choice, target, 1);
    // What the host writes stays.
    program.values.iter_mut().for_each(|value| value.memory = MemoryKind::Gradients);
    program.arena.transient_offset = program.arena.bytes;
    program
}

fn bytes(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|&number| (number as f32).to_le_bytes()).collect()
}

/// Runs a program twice and gives what its last value holds.
fn run(
    device: Device,
    comm: InProcess,
    program: Program,
    input: Option<&[f64]>,
) -> Result<Vec<f64>, String> {
    let mut executor = Executor::new(device.backend(Some(comm)), program.arena.bytes)
        .map_err(|error| error.to_string())?;
    let loaded = executor.load(program.clone()).map_err(|error| error.to_string())?;
    if let Some(input) = input {
        executor.write(&program, ValueId(0), &bytes(input)).map_err(|error| error.to_string())?;
    }
    let last = ValueId(program.values.len() as u32 - 1);
    let mut out = vec![0; program.value(last).range.bytes];
    for _ in 0..2 {
        executor.run(&loaded).map_err(|error| error.to_string())?;
        executor.read(&program, last, &mut out).map_err(|error| error.to_string())?;
    }
    Ok(out.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes).into()).collect())
}

/// Numbers that FP32 adds without rounding.
fn numbers(rank: u32, elements: usize) -> Vec<f64> {
    (0..elements).map(|index| (rank as usize * 100 + index) as f64).collect()
}

#[test]
fn programs_of_all_ranks_give_what_the_collective_is_defined_as() {
    for device in DEVICES {
        for order in [&[0][..], &[1, 0], &[2, 0, 1]] {
            let size = order.len() as u32;
            for kind in [
                CollectiveKind::AllReduce { reduction: SUM },
                CollectiveKind::AllReduce { reduction: Reduction::Max },
                CollectiveKind::ReduceScatter { reduction: SUM },
                CollectiveKind::AllGather,
                CollectiveKind::AllToAll,
                CollectiveKind::Broadcast { root: size - 1 },
                CollectiveKind::Shift { by: size - 1 },
            ] {
                let call = call(&kind, size, 6);
                let inputs: Vec<_> = order.iter().map(|&rank| numbers(rank, 6)).collect();
                let expected = oracle::exchange(&kind, &inputs);
                let outputs = thread::scope(|scope| {
                    let call = &call;
                    let threads: Vec<_> = InProcess::world(size, PATIENCE)
                        .into_iter()
                        .zip(0..)
                        .map(|(comm, rank)| {
                            let program = program(device, call, ranks(rank, order));
                            scope.spawn(move || run(device, comm, program, Some(&numbers(rank, 6))))
                        })
                        .collect();
                    let joined = threads.into_iter().map(|thread| thread.join().unwrap());
                    joined.collect::<Vec<_>>()
                });
                for (place, &rank) in order.iter().enumerate() {
                    let got = outputs[rank as usize].as_ref();
                    let what = format!("{device:?}, {kind:?} among {order:?}, rank {rank}");
                    assert_eq!(got, Ok(&expected[place]), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_program_sends_and_another_receives() {
    for device in DEVICES {
        let shape = Shape::new([5usize]);
        let recv = CollectiveKind::Recv { from: 0, shape, dtype: DType::F32 };
        let received = thread::scope(|scope| {
            let mut world = InProcess::world(2, PATIENCE).into_iter();
            let (first, second) = (world.next().unwrap(), world.next().unwrap());
            let send = call(&CollectiveKind::Send { to: 1 }, 2, 5);
            let send = program(device, &send, ranks(0, &[0, 1]));
            let recv = program(device, &call(&recv, 2, 5), ranks(1, &[0, 1]));
            let sender = scope.spawn(move || run(device, first, send, Some(&numbers(7, 5))));
            let receiver = scope.spawn(move || run(device, second, recv, None));
            sender.join().unwrap().unwrap();
            receiver.join().unwrap().unwrap()
        });
        assert_eq!(received, numbers(7, 5), "{device:?}");
    }
}

/// Ranks whose programs differ, and one whose program cannot be loaded: each fails on all ranks.
#[test]
fn programs_that_disagree_fail_on_all_ranks() {
    for device in DEVICES {
        for (kind, elements, expected) in [
            (CollectiveKind::AllGather, 6, "all_gather of 6 f32"),
            (CollectiveKind::AllReduce { reduction: SUM }, 4, "all_reduce sum of 4 f32"),
        ] {
            let outcomes = thread::scope(|scope| {
                let kind = &kind;
                let threads: Vec<_> = InProcess::world(3, PATIENCE)
                    .into_iter()
                    .zip(0..)
                    .map(|(comm, rank)| {
                        let usual = CollectiveKind::AllReduce { reduction: SUM };
                        let (kind, elements) =
                            if rank == 1 { (kind, elements) } else { (&usual, 6) };
                        let call = call(kind, 3, elements);
                        let program = program(device, &call, ranks(rank, &[0, 1, 2]));
                        let input = numbers(rank, elements);
                        scope.spawn(move || run(device, comm, program, Some(&input)))
                    })
                    .collect();
                let joined = threads.into_iter().map(|thread| thread.join().unwrap());
                joined.collect::<Vec<_>>()
            });
            for outcome in outcomes {
                let error = outcome.unwrap_err();
                assert!(error.contains(expected), "{device:?}: {error}");
            }
        }
    }
}

#[test]
fn backends_that_cannot_exchange_say_so() {
    let gather = call(&CollectiveKind::AllGather, 2, 6);
    for device in DEVICES {
        let program = program(device, &gather, ranks(1, &[0, 1]));
        let load = |comm| {
            let mut executor = Executor::new(device.backend(comm), program.arena.bytes).unwrap();
            executor.load(program.clone()).unwrap_err().to_string()
        };
        let error = load(None);
        assert!(error.contains("hint: give it a `"), "{error}");
        let first = InProcess::world(2, PATIENCE).into_iter().next();
        let error = load(first);
        let expected = "the program is for rank 1 of 2, the backend is rank 0 of 2";
        assert!(error.contains(expected), "{error}");
    }
    // Nothing exchanges data: no kernel.
    let target = cuda_target(Architecture::Sm90a, 4, &[]).as_rank(ranks(1, &[0, 1]));
    let error = gather.select(&CudaCatalog, &target).unwrap_err().to_string();
    assert!(error.contains("needs the library `collectives`"), "{error}");
    // Slices that are not whole, once the sizes are known.
    let scatter = CollectiveKind::ReduceScatter { reduction: SUM };
    for device in DEVICES {
        let error =
            call(&scatter, 3, 4).select(device.catalog(), &device.target(ranks(0, &[0, 1, 2])));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("divisible by 3 ranks, got 4"), "{error}");
    }
}

/// The kernels of other ops do not see that there are ranks.
#[test]
fn other_ops_are_served_as_ever() {
    let x = || (DType::F32, vec![4, 8]);
    let add = SingleCall::new(Add {}, &[x(), x()], &[x()]);
    let alone = add.select(&CpuCatalog, &cpu_target(1)).unwrap();
    let among = add.select(&CpuCatalog, &cpu_target(1).as_rank(ranks(1, &[0, 1]))).unwrap();
    assert_eq!(alone, among);
    assert_eq!(add.operands[0], OperandType { dtype: DType::F32, shape: vec![4, 8] });
}

/// Runs a program once on values that are given, and gives what all its values hold.
fn run_once(
    device: Device,
    comm: InProcess,
    program: &Program,
    given: &[(ValueId, Vec<f64>)],
) -> Vec<Vec<f64>> {
    let mut executor = Executor::new(device.backend(Some(comm)), program.arena.bytes).unwrap();
    let loaded = executor.load(program.clone()).unwrap();
    // What lies between tensors is of values that were there before.
    let whole = ByteRange { offset: 0, bytes: program.arena.bytes };
    let stale = bytes(&vec![1e30; program.arena.bytes / size_of::<f32>()]);
    executor.backend_mut().write(whole, &stale).unwrap();
    for (id, numbers) in given {
        executor.write(program, *id, &bytes(numbers)).unwrap();
    }
    executor.run(&loaded).unwrap();
    let read = |id: u32| -> Vec<f64> {
        let id = ValueId(id);
        let mut out = vec![0; program.value(id).range.bytes];
        executor.read(program, id, &mut out).unwrap();
        out.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes).into()).collect()
    };
    (0..program.values.len() as u32).map(read).collect()
}

/// A bucket is one tensor to those that exchange it: with what lies between its tensors.
#[test]
fn buckets_are_exchanged_as_one() {
    // Where tensors begin in a bucket of slices of 16 elements, and how long they are.
    let tensors: &[(usize, usize)] = &[(0, 5), (16, 16), (32, 1)];
    for device in DEVICES {
        for size in [1, 2, 3] {
            let tensors = &tensors[..size as usize];
            let types: Vec<_> =
                tensors.iter().map(|&(_, elements)| (DType::F32, vec![elements])).collect();
            let slice = [(DType::F32, vec![16])];
            let group: Vec<u32> = (0..size).collect();
            for kind in [
                CollectiveKind::AllReduce { reduction: SUM },
                CollectiveKind::ReduceScatter { reduction: SUM },
                CollectiveKind::AllGather,
            ] {
                let op = Collective::of_bucket(kind.clone(), GroupId(0), size, tensors.len());
                let call = match kind {
                    CollectiveKind::AllReduce { .. } => SingleCall::new(op, &types, &[]),
                    CollectiveKind::AllGather => SingleCall::new(op, &slice, &types),
                    _ => SingleCall::new(op, &types, &slice),
                };
                let is_gather = kind == CollectiveKind::AllGather;
                // The bucket of each rank with zeros between its tensors, or its slice.
                let input = |rank: u32| -> Vec<f64> {
                    let mut whole = vec![0.0; if is_gather { 16 } else { 16 * size as usize }];
                    let pieces = if is_gather { &[(0, 16)][..] } else { tensors };
                    for &(begin, elements) in pieces {
                        let own = &numbers(rank + 1, 48)[begin..begin + elements];
                        whole[begin..begin + elements].copy_from_slice(own);
                    }
                    whole
                };
                let inputs: Vec<_> = group.iter().map(|&rank| input(rank)).collect();
                let expected = oracle::exchange(&kind, &inputs);
                let outputs = thread::scope(|scope| {
                    let (call, inputs, group) = (&call, &inputs, &group);
                    let threads: Vec<_> = InProcess::world(size, PATIENCE)
                        .into_iter()
                        .zip(0..)
                        .map(|(comm, rank)| {
                            scope.spawn(move || {
                                let mut program = program(device, call, ranks(rank, group));
                                if call.op.rule().name() == "all_reduce" {
                                    for operand in &mut program.calls[0].operands {
                                        operand.access = Access::Update;
                                    }
                                }
                                let input = &inputs[rank as usize];
                                let given: Vec<_> = match is_gather {
                                    true => vec![(ValueId(0), input.clone())],
                                    false => tensors
                                        .iter()
                                        .zip(0..)
                                        .map(|(&(begin, elements), id)| {
                                            let own = input[begin..begin + elements].to_vec();
                                            (ValueId(id), own)
                                        })
                                        .collect(),
                                };
                                run_once(device, comm, &program, &given)
                            })
                        })
                        .collect();
                    let joined = threads.into_iter().map(|thread| thread.join().unwrap());
                    joined.collect::<Vec<_>>()
                });
                for (rank, values) in outputs.iter().enumerate() {
                    let what = format!("{device:?}, {kind:?}, rank {rank} of {size}");
                    let expected = &expected[rank];
                    if matches!(kind, CollectiveKind::ReduceScatter { .. }) {
                        assert_eq!(values.last(), Some(expected), "{what}");
                        continue;
                    }
                    let first = usize::from(is_gather);
                    for (value, &(begin, elements)) in values[first..].iter().zip(tensors) {
                        assert_eq!(value[..], expected[begin..begin + elements], "{what}");
                    }
                }
            }
        }
    }
}

/// Tensors that are gathered at the same time are each in the order of the ranks.
#[test]
fn tensors_are_gathered_each_by_itself() {
    // Elements of the slices.
    let slices = [5, 64, 1];
    for device in DEVICES {
        for size in [1, 2, 3] {
            let types = |ranks: usize| slices.map(|elements| (DType::F32, vec![ranks * elements]));
            let op = Collective::gathers(GroupId(0), size, slices.len());
            let call = SingleCall::new(op, &types(1), &types(size as usize));
            let group: Vec<u32> = (0..size).collect();
            let own = |rank: u32, at: usize| numbers(rank * 3 + at as u32 + 1, slices[at]);
            let outputs: Vec<Vec<Vec<f64>>> = thread::scope(|scope| {
                let (call, group, own) = (&call, &group, &own);
                let run = |(comm, rank): (InProcess, u32)| {
                    scope.spawn(move || {
                        let program = program(device, call, ranks(rank, group));
                        let given: Vec<_> = (0..slices.len())
                            .map(|at| (ValueId(at as u32), own(rank, at)))
                            .collect();
                        run_once(device, comm, &program, &given)
                    })
                };
                let threads: Vec<_> =
                    InProcess::world(size, PATIENCE).into_iter().zip(0..).map(run).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for (rank, values) in outputs.iter().enumerate() {
                for at in 0..slices.len() {
                    let expected: Vec<f64> = group.iter().flat_map(|&rank| own(rank, at)).collect();
                    let what = format!("{device:?}, tensor {at}, rank {rank} of {size}");
                    assert_eq!(values[slices.len() + at], expected, "{what}");
                }
            }
        }
    }
}
