//! The CPU as a [`Backend`]: calls run at once, on rayon's global pool.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use deepwell_ir::{ByteRange, Call, Instance, Program};

use crate::backend::{
    Backend, CallTime, HostBuffer, Issue, PreparedCall, READBACKS, Readback, Recording,
};
use crate::registry::cpu::kernels;
use crate::runtime::cpu::arena::Arena;
use crate::runtime::cpu::operands::{CpuCall, SharedComm, prepare};
use crate::{Comm, KernelError};

/// Calls in order, and the copies that run after all calls.
struct Recorded {
    calls: Vec<PreparedCall>,
    copies: Vec<(ByteRange, ByteRange)>,
}

/// Runs calls on this machine's processor.
#[derive(Default)]
pub struct CpuBackend {
    arena: Option<Arena>,
    comm: Option<SharedComm>,
    calls: Vec<CpuCall>,
    recordings: Vec<Recorded>,
    /// The latest readbacks, indexed by readback number modulo [`READBACKS`].
    readbacks: [Vec<Vec<u8>>; READBACKS],
    readbacks_made: usize,
}

impl CpuBackend {
    /// Creates a backend that has no arena yet.
    pub fn new() -> CpuBackend {
        CpuBackend::default()
    }

    /// Turns the backend into one rank of several.
    pub fn with_comm(self, comm: Box<dyn Comm>) -> CpuBackend {
        CpuBackend { comm: Some(Arc::new(Mutex::new(comm))), ..self }
    }

    fn outside(range: ByteRange) -> KernelError {
        KernelError::Run {
            call: "copy".to_string(),
            what: format!("bytes {}..{} lie outside of the arena", range.offset, range.end()),
        }
    }

    /// Runs `work` on a thread of the rayon pool, so that kernels need not wake the pool and wait
    /// for it. Ranks that share the pool run on their own threads: a rank that waits for another
    /// rank must not occupy a pool thread. Without optimization, a step needs more stack than the
    /// 2 MiB of a pool thread, and runs on the caller's thread.
    fn on_worker<T: Send>(&mut self, work: impl FnOnce(&mut CpuBackend) -> T + Send) -> T {
        let is_own_thread = self.comm.is_some() || cfg!(debug_assertions);
        if is_own_thread { work(self) } else { rayon::scope(|_| work(self)) }
    }

    fn bytes(&mut self, range: ByteRange) -> Result<&mut [u8], KernelError> {
        self.arena
            .as_mut()
            .and_then(|arena| arena.bytes(range))
            .ok_or_else(|| CpuBackend::outside(range))
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn allocate(&mut self, bytes: usize) -> Result<(), KernelError> {
        self.arena = None;
        self.arena = Some(Arena::new(bytes)?);
        Ok(())
    }

    fn prepare(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
    ) -> Result<PreparedCall, KernelError> {
        self.calls.push(prepare(program, call, instance, self.comm.as_ref(), kernels())?);
        Ok(PreparedCall(self.calls.len() - 1))
    }

    fn forget_prepared(&mut self) -> Result<(), KernelError> {
        self.calls.clear();
        self.recordings.clear();
        Ok(())
    }

    /// Keeps the given order, which satisfies every stream and event.
    fn record(&mut self, calls: &[Issue]) -> Result<Recording, KernelError> {
        let calls = calls.iter().filter_map(|issue| issue.call).collect();
        self.recordings.push(Recorded { calls, copies: Vec::new() });
        Ok(Recording(self.recordings.len() - 1))
    }

    /// Keeps the given order. A send buffers its bytes and returns, so this order cannot deadlock.
    fn record_exchanges(
        &mut self,
        calls: &[PreparedCall],
        copies: &[(ByteRange, ByteRange)],
    ) -> Result<Recording, KernelError> {
        for &(from, to) in copies {
            let lengths = [self.bytes(from)?.len(), self.bytes(to)?.len()];
            if lengths[0] != lengths[1] {
                return Err(CpuBackend::outside(to));
            }
        }
        self.recordings.push(Recorded { calls: calls.to_vec(), copies: copies.to_vec() });
        Ok(Recording(self.recordings.len() - 1))
    }

    fn replay(&mut self, recording: Recording) -> Result<(), KernelError> {
        let calls = self.recordings.get(recording.0).map_or(0, |it| it.calls.len());
        self.on_worker(|backend| {
            (0..calls)
                .try_for_each(|index| backend.enqueue(backend.recordings[recording.0].calls[index]))
        })?;
        let copies = self.recordings.get(recording.0).map_or(0, |it| it.copies.len());
        for index in 0..copies {
            let (from, to) = self.recordings[recording.0].copies[index];
            let bytes = self.bytes(from)?.to_vec();
            self.bytes(to)?.copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn profile(
        &mut self,
        _before: &[Recording],
        calls: &[PreparedCall],
    ) -> Result<Vec<CallTime>, KernelError> {
        let start = Instant::now();
        self.on_worker(|backend| {
            let timed = |&call: &PreparedCall| {
                let begin_s = start.elapsed().as_secs_f64();
                backend.enqueue(call)?;
                Ok(CallTime { begin_s, end_s: start.elapsed().as_secs_f64(), grid_fill: None })
            };
            calls.iter().map(timed).collect()
        })
    }

    fn reserve_host_copies(&mut self, _: usize, _: usize) -> Result<(), KernelError> {
        Ok(())
    }

    fn stage(&mut self, copies: &[(ByteRange, &[u8])]) -> Result<(), KernelError> {
        copies.iter().try_for_each(|&(range, bytes)| self.write(range, bytes))
    }

    fn read_later(&mut self, ranges: &[ByteRange]) -> Result<Readback, KernelError> {
        let parts = ranges
            .iter()
            .map(|&range| self.bytes(range).map(|bytes| bytes.to_vec()))
            .collect::<Result<Vec<_>, _>>()?;
        self.readbacks[self.readbacks_made % READBACKS] = parts;
        self.readbacks_made += 1;
        Ok(Readback(self.readbacks_made - 1))
    }

    fn fetch(&mut self, readback: Readback, targets: &mut [&mut [u8]]) -> Result<(), KernelError> {
        let age = self.readbacks_made.saturating_sub(readback.0);
        if age == 0 || age > READBACKS {
            return Err(KernelError::Run {
                call: "readback".to_string(),
                what: format!("expected one of the last {READBACKS} readbacks, got one {age} old"),
            });
        }
        for (target, bytes) in targets.iter_mut().zip(&self.readbacks[readback.0 % READBACKS]) {
            target.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn enqueue(&mut self, call: PreparedCall) -> Result<(), KernelError> {
        let (Some(arena), Some(call)) = (&self.arena, self.calls.get(call.0)) else {
            return Err(KernelError::Run {
                call: format!("prepared call {}", call.0),
                what: "there is no such call, or no arena".to_string(),
            });
        };
        call.run(arena)
    }

    fn synchronize(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    fn write(&mut self, range: ByteRange, bytes: &[u8]) -> Result<(), KernelError> {
        let target = self.bytes(range)?;
        if target.len() != bytes.len() {
            return Err(CpuBackend::outside(range));
        }
        target.copy_from_slice(bytes);
        Ok(())
    }

    fn clear(&mut self, range: ByteRange) -> Result<(), KernelError> {
        self.bytes(range)?.fill(0);
        Ok(())
    }

    fn read(&mut self, range: ByteRange, bytes: &mut [u8]) -> Result<(), KernelError> {
        let source = self.bytes(range)?;
        if source.len() != bytes.len() {
            return Err(CpuBackend::outside(range));
        }
        bytes.copy_from_slice(source);
        Ok(())
    }

    fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer, KernelError> {
        Ok(HostBuffer::Plain(vec![0; bytes]))
    }

    fn free_host_buffer(&mut self, _buffer: HostBuffer) -> Result<(), KernelError> {
        Ok(())
    }

    fn read_all(
        &mut self,
        ranges: &[ByteRange],
        buffer: &mut HostBuffer,
    ) -> Result<(), KernelError> {
        let HostBuffer::Plain(bytes) = buffer else {
            return Err(KernelError::foreign_buffer("cpu"));
        };
        bytes.clear();
        for &range in ranges {
            bytes.extend_from_slice(self.bytes(range)?);
        }
        Ok(())
    }

    fn host_view(&self, range: ByteRange) -> Option<&[u8]> {
        self.arena.as_ref()?.view(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepwell_ir::ops::Add;
    use deepwell_ir::{
        Access, Accumulate, Body, BodyId, Cost, DType, HostInterface, Invocation, KernelChoice,
        MathUnit, MemoryKind, Mode, NodeId, Operand, Phase, Tag, Target, Value, ValueId,
    };

    /// `c = a + b` of 16 numbers each, at these byte offsets of a 256-byte arena.
    fn sum_at(offsets: [usize; 3]) -> Program {
        let value = |(name, offset): (&str, usize)| {
            let range = ByteRange { offset, bytes: 64 };
            Value::new(name, DType::F32, vec![4, 4], MemoryKind::Activations, range)
        };
        let operand = |id, access| Operand { value: ValueId(id), access };
        let read = Access::Read;
        let call = Call {
            name: "sum".to_string(),
            op: Add {}.into(),
            choice: KernelChoice { kernel: "add".to_string(), tile: None, workspace_bytes: 0 },
            input_count: 2,
            operands: vec![operand(0, read), operand(1, read), operand(2, Access::Write)],
            accumulate: Accumulate::Never,
            last_only: false,
            alone_only: false,
            accumulator_bytes: 0,
            workspace: ByteRange::default(),
            phase: Phase::Forward,
            tag: Tag::Mlp,
            layer: None,
            source: NodeId(0),
            recomputes: false,
            unit: MathUnit::F32,
            peak_share: 1.0,
            cost: Cost { flops: 16, bytes_read: 128, bytes_written: 64, ..Cost::default() },
            stream: 0,
            waits: Vec::new(),
            records: None,
            rejected: Vec::new(),
        };
        Program {
            name: "sum".to_string(),
            mode: Mode::Train,
            rank: 0,
            target: Target::cpu(1, Vec::new()),
            batch: 1,
            seq: 4,
            micro_batches: 1,
            slots: 1,
            bodies: vec![Body { phase: Phase::Forward, chunk: 0, calls: 0..1 }],
            schedule: vec![Invocation { body: BodyId(0), micro_batch: 0, slot: 0 }],
            values: ["a", "b", "c"].into_iter().zip(offsets).map(value).collect(),
            calls: vec![call],
            arena: deepwell_ir::Arena { bytes: 256, ..deepwell_ir::Arena::default() },
            host: HostInterface::default(),
            parameters: Vec::new(),
            precision: Vec::new(),
            shards: Vec::new(),
            unstored: Vec::new(),
            handover: None,
            fixed_overhead_bytes: 0,
        }
    }

    /// These programs were not verified: overlapping views of which one is written, and misaligned
    /// numbers, would be undefined behaviour.
    #[test]
    fn operands_that_overlap_or_lie_between_elements_are_refused() {
        for (offsets, expected) in [
            ([0, 64, 128], Ok(())),
            ([0, 0, 128], Ok(())),
            ([0, 64, 64], Err("overlap")),
            ([0, 96, 32], Err("overlap")),
            ([0, 64, 129], Err("aligned")),
            ([2, 66, 128], Err("aligned")),
        ] {
            let program = sum_at(offsets);
            let mut backend = CpuBackend::new();
            backend.allocate(256).unwrap();
            match (backend.prepare(&program, &program.calls[0], Instance::ONLY), expected) {
                (Ok(call), Ok(())) => backend.enqueue(call).unwrap(),
                (Err(error), Err(words)) => {
                    assert!(error.to_string().contains(words), "{offsets:?}: {error}");
                }
                (got, _) => panic!("{offsets:?}: expected {expected:?}, got {got:?}"),
            }
        }
    }
}
