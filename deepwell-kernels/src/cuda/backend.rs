//! A CUDA device as a [`Backend`].
//!
//! The main stream computes; the copy stream uploads the inputs of the next micro-batch while the
//! current micro-batch runs. Recordings may use side streams, forked from the main stream and
//! joined to it at the end. Ownership of the buffers:
//!
//! - Inputs have two slots. The host fills the pinned half of a slot once the previous copy from it
//!   is done (`uploaded`). The copy stream then fills the device half, once the main stream has
//!   consumed the previous contents (`taken`). The main stream copies the inputs to their values.
//! - Readbacks have [`READBACKS`] slots of pinned memory, used in turn. The main stream fills a
//!   slot (`filled`); the host reads the slot after that event.
#![allow(unsafe_code)]

mod arena;
mod issue;
mod wait;

use std::collections::HashMap;

use deepwell_ir::{ByteRange, Call, Instance, Program, StreamId};

use self::arena::Arena;
use crate::KernelError;
use crate::backend::{
    Backend, CallTime, HostBuffer, Issue, PreparedCall, READBACKS, Readback, ReadbackTime,
    Recording,
};
use crate::registry::cuda::cuda_kernels;
use crate::runtime::cuda::blas::Blas;
use crate::runtime::cuda::comm::DeviceComm;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    CapturedGraph, DevicePtr, Driver, DriverError, Event, Module, Priority, Stream,
};
use crate::runtime::cuda::images::KernelImages;
use crate::runtime::cuda::pinned::PinnedBuffer;
use crate::runtime::cuda::prepare::{CallView, Constants, Device, Step};

/// Number of input slots.
const INPUTS: usize = 2;

/// Timed events outlive their slot: the time of a step is read after the next step is enqueued.
const CLOCKS: usize = READBACKS + 1;

struct InputSlot {
    pinned: PinnedBuffer,
    staged: DevicePtr,
    uploaded: Event,
    taken: Event,
}

struct ReadbackSlot {
    pinned: PinnedBuffer,
    /// Offset in the pinned buffer and length of each range, in the order of the request.
    parts: Vec<(usize, usize)>,
}

/// Timed events around the work between two readbacks.
#[derive(Clone, Copy)]
struct Clock {
    /// Inputs are on the device. Not recorded if no inputs were staged.
    staged: Event,
    is_staged: bool,
    filled: Event,
}

struct Prepared {
    name: String,
    steps: Vec<Step>,
    outputs: Vec<DeviceTensor>,
}

/// Runs calls on one CUDA device.
pub struct CudaBackend {
    blas: Option<Box<dyn Blas>>,
    comm: Option<Box<dyn DeviceComm>>,
    images: KernelImages,
    modules: HashMap<&'static str, Module>,
    constants: Constants,
    arena: Option<Arena>,
    prepared: Vec<Prepared>,
    graphs: Vec<CapturedGraph>,
    compute: Stream,
    copies: Stream,
    /// Side streams of recordings.
    sides: HashMap<StreamId, Stream>,
    /// Events without timing, for the edges between the streams of a recording.
    edges: Vec<Event>,
    inputs: Vec<InputSlot>,
    inputs_staged: usize,
    readbacks: Vec<ReadbackSlot>,
    readbacks_made: usize,
    /// The clock of readback `i` is `clocks[i % CLOCKS]`.
    clocks: Vec<Clock>,
    /// Timed events: between the calls of a profile, around replays.
    marks: Vec<Event>,
    /// The last field, so that all users of the driver are dropped before it.
    driver: Box<dyn Driver>,
}

impl CudaBackend {
    /// Creates a backend on a driver, with the vendor's GEMM library if there is one.
    ///
    /// # Errors
    /// Streams that the driver cannot create.
    pub fn new(
        mut driver: Box<dyn Driver>,
        blas: Option<Box<dyn Blas>>,
        images: KernelImages,
    ) -> Result<CudaBackend, KernelError> {
        let compute = driver.stream(Priority::Middle)?;
        let copies = driver.stream(Priority::High)?;
        let mut clocks = Vec::with_capacity(CLOCKS);
        for _ in 0..CLOCKS {
            let (staged, filled) = (driver.event(true)?, driver.event(true)?);
            clocks.push(Clock { staged, is_staged: false, filled });
        }
        Ok(CudaBackend {
            blas,
            comm: None,
            images,
            modules: HashMap::new(),
            constants: Constants::default(),
            arena: None,
            prepared: Vec::new(),
            graphs: Vec::new(),
            compute,
            copies,
            sides: HashMap::new(),
            edges: Vec::new(),
            inputs: Vec::new(),
            inputs_staged: 0,
            readbacks: Vec::new(),
            readbacks_made: 0,
            clocks,
            marks: Vec::new(),
            driver,
        })
    }

    /// Makes this backend one rank of several.
    pub fn with_comm(mut self, comm: Box<dyn DeviceComm>) -> CudaBackend {
        self.comm = Some(comm);
        self
    }

    /// The driver.
    pub fn driver(&mut self) -> &mut dyn Driver {
        self.driver.as_mut()
    }

    /// Steps of a prepared call.
    pub fn steps(&self, call: PreparedCall) -> &[Step] {
        self.prepared.get(call.0).map_or(&[], |prepared| &prepared.steps)
    }

    /// Prepares a call whose operands and workspace are anywhere on the device: the offsets of
    /// `program` are addresses. For callers that bring their own memory.
    /// # Errors
    /// As [`Backend::prepare`].
    ///
    /// # Safety
    /// Until the call has run, each operand and the workspace must have as many bytes at its
    /// address as the program says, and nothing else may access them.
    pub unsafe fn prepare_at_addresses(
        &mut self,
        program: &Program,
        call: &Call,
    ) -> Result<PreparedCall, KernelError> {
        let arena = self.arena.replace(Arena::OF_ADDRESSES);
        let prepared = self.prepare(program, call, Instance::ONLY);
        self.arena = arena;
        prepared
    }

    fn address(&self, range: ByteRange) -> Result<DevicePtr, KernelError> {
        let address = self.arena.as_ref().and_then(|arena| arena.at(range));
        address.ok_or_else(|| KernelError::Run {
            call: "copy".to_string(),
            what: format!("bytes {}..{} lie outside of the arena", range.offset, range.end()),
        })
    }

    /// Creates events with timing until there are `count`.
    fn reserve_marks(&mut self, count: usize) -> Result<(), DriverError> {
        while self.marks.len() < count {
            self.marks.push(self.driver.event(true)?);
        }
        Ok(())
    }

    fn new_input_slot(&mut self, bytes: usize) -> Result<InputSlot, KernelError> {
        Ok(InputSlot {
            pinned: self.driver.allocate_pinned(bytes)?,
            staged: self.driver.allocate(bytes)?,
            uploaded: self.driver.event(false)?,
            taken: self.driver.event(false)?,
        })
    }

    fn check_age(&self, readback: Readback) -> Result<(), KernelError> {
        let age = self.readbacks_made.saturating_sub(readback.0);
        if age == 0 || age > READBACKS {
            return Err(KernelError::Run {
                call: "readback".to_string(),
                what: format!("expected one of the last {READBACKS} readbacks, got one {age} old"),
            });
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), DriverError> {
        let waited = self.wait_for_all();
        // Free graphs even after a rank has failed: communicators can be aborted only when no graph
        // holds their collectives.
        for graph in self.graphs.drain(..) {
            self.driver.free_graph(graph)?;
        }
        waited?;
        for slot in self.inputs.drain(..) {
            self.driver.free(slot.staged)?;
            self.driver.free_pinned(slot.pinned)?;
        }
        for slot in self.readbacks.drain(..) {
            self.driver.free_pinned(slot.pinned)?;
        }
        self.constants.free(self.driver.as_mut())?;
        self.free_arena()
    }

    fn free_arena(&mut self) -> Result<(), DriverError> {
        self.arena.take().map_or(Ok(()), |arena| arena.free(self.driver.as_mut()))
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // The device is lost if this fails; then there is nothing left to free.
        let _ = self.release();
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn allocate(&mut self, bytes: usize) -> Result<(), KernelError> {
        self.allocate_with_host(bytes, 0)
    }

    fn allocate_with_host(&mut self, bytes: usize, host_bytes: usize) -> Result<(), KernelError> {
        if self.arena.is_some() {
            self.wait_for_all()?;
            self.free_arena()?;
        }
        let arena = Arena::allocate(self.driver.as_mut(), bytes, host_bytes)?;
        self.arena = Some(arena);
        let (device, device_bytes) = arena.on_device();
        self.driver.fill(device, 0, device_bytes, self.compute)?;
        Ok(self.wait_for_all()?)
    }

    fn reserve_host_copies(
        &mut self,
        input_bytes: usize,
        readback_bytes: usize,
    ) -> Result<(), KernelError> {
        let small = self.inputs.first().is_none_or(|slot| slot.pinned.len() < input_bytes);
        if small {
            self.wait_for_all()?;
            for slot in self.inputs.drain(..) {
                self.driver.free(slot.staged)?;
                self.driver.free_pinned(slot.pinned)?;
            }
            for _ in 0..INPUTS {
                let slot = self.new_input_slot(input_bytes)?;
                self.inputs.push(slot);
            }
        }
        let small = self.readbacks.first().is_none_or(|slot| slot.pinned.len() < readback_bytes);
        if small {
            self.wait_for_all()?;
            for slot in self.readbacks.drain(..) {
                self.driver.free_pinned(slot.pinned)?;
            }
            for _ in 0..READBACKS {
                let pinned = self.driver.allocate_pinned(readback_bytes)?;
                self.readbacks.push(ReadbackSlot { pinned, parts: Vec::new() });
            }
        }
        Ok(())
    }

    fn prepare(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
    ) -> Result<PreparedCall, KernelError> {
        let spec =
            cuda_kernels().find(|spec| spec.name == call.choice.kernel).ok_or_else(|| {
                KernelError::UnknownKernel {
                    call: call.name.clone(),
                    backend: "cuda",
                    kernel: call.choice.kernel.clone(),
                }
            })?;
        self.address(ByteRange::default())?;
        let arena = self.arena.map(|arena| arena.address()).unwrap_or_default();
        let view = CallView { program, call, instance, arena };
        let mut device = Device {
            driver: self.driver.as_mut(),
            blas: self.blas.as_mut().map(|blas| blas.as_mut() as &mut dyn Blas),
            comm: self.comm.as_mut().map(|comm| comm.as_mut() as &mut dyn DeviceComm),
            images: &self.images,
            modules: &mut self.modules,
            constants: &mut self.constants,
        };
        let steps = (spec.prepare)(&view, &mut device)?;
        let outputs = (0..view.output_count()).map(|index| view.output(index)).collect();
        self.prepared.push(Prepared { name: call.name.clone(), steps, outputs });
        Ok(PreparedCall(self.prepared.len() - 1))
    }

    fn forget_prepared(&mut self) -> Result<(), KernelError> {
        self.wait_for_all()?;
        for graph in self.graphs.drain(..) {
            self.driver.free_graph(graph)?;
        }
        self.prepared.clear();
        if let Some(blas) = &mut self.blas {
            blas.forget_plans();
        }
        if let Some(comm) = &mut self.comm {
            comm.forget_plans();
        }
        Ok(self.constants.free(self.driver.as_mut())?)
    }

    fn enqueue(&mut self, call: PreparedCall) -> Result<(), KernelError> {
        self.issue(call.0, self.compute, false)
    }

    fn record(&mut self, calls: &[Issue]) -> Result<Recording, KernelError> {
        self.driver.begin_capture(self.compute)?;
        let issued = self.issue_all(calls);
        let graph = self.driver.end_capture(self.compute);
        issued?;
        self.keep(graph?)
    }

    fn record_exchanges(
        &mut self,
        calls: &[PreparedCall],
        copies: &[(ByteRange, ByteRange)],
    ) -> Result<Recording, KernelError> {
        let exchanges = self.exchanges_of(calls)?;
        let mut moves = Vec::with_capacity(copies.len());
        for &(from, to) in copies {
            moves.push((self.address(from)?, self.address(to)?, from.bytes.min(to.bytes)));
        }
        self.driver.begin_capture(self.compute)?;
        let issued = self.issue_exchanges(&exchanges, &moves);
        let graph = self.driver.end_capture(self.compute);
        issued?;
        self.keep(graph?)
    }

    fn replay(&mut self, recording: Recording) -> Result<(), KernelError> {
        match self.graphs.get(recording.0) {
            Some(&graph) => Ok(self.driver.launch_graph(graph, self.compute)?),
            None => Err(KernelError::Run {
                call: format!("recording {}", recording.0),
                what: "there is no such recording".to_string(),
            }),
        }
    }

    fn time_replays(&mut self, recording: Recording, times: usize) -> Result<f64, KernelError> {
        self.reserve_marks(2)?;
        self.driver.record(self.marks[0], self.compute)?;
        for _ in 0..times {
            self.replay(recording)?;
        }
        self.driver.record(self.marks[1], self.compute)?;
        self.wait_for_all()?;
        Ok(f64::from(self.driver.elapsed_ms(self.marks[0], self.marks[1])?) * 1e-3)
    }

    fn profile(
        &mut self,
        before: &[Recording],
        calls: &[PreparedCall],
    ) -> Result<Vec<CallTime>, KernelError> {
        self.reserve_marks(calls.len() + 1)?;
        for &recording in before {
            self.replay(recording)?;
        }
        self.driver.record(self.marks[0], self.compute)?;
        for (index, call) in calls.iter().enumerate() {
            self.issue(call.0, self.compute, false)?;
            self.driver.record(self.marks[index + 1], self.compute)?;
        }
        self.wait_for_all()?;
        let mut begin_s = 0.0;
        let mut times = Vec::with_capacity(calls.len());
        for (index, &call) in calls.iter().enumerate() {
            let (from, to) = (self.marks[index], self.marks[index + 1]);
            let end_s = begin_s + f64::from(self.driver.elapsed_ms(from, to)?) * 1e-3;
            times.push(CallTime { begin_s, end_s, grid_fill: self.grid_fill(call) });
            begin_s = end_s;
        }
        Ok(times)
    }

    fn synchronize(&mut self) -> Result<(), KernelError> {
        Ok(self.wait_for_all()?)
    }

    fn write(&mut self, range: ByteRange, bytes: &[u8]) -> Result<(), KernelError> {
        let target = self.address(range)?;
        self.wait_for_all()?;
        Ok(self.driver.upload(target, bytes)?)
    }

    fn clear(&mut self, range: ByteRange) -> Result<(), KernelError> {
        self.clear_range(range)
    }

    fn read(&mut self, range: ByteRange, bytes: &mut [u8]) -> Result<(), KernelError> {
        let source = self.address(range)?;
        self.wait_for_all()?;
        Ok(self.driver.download(bytes, source)?)
    }

    fn stage(&mut self, copies: &[(ByteRange, &[u8])]) -> Result<(), KernelError> {
        let total: usize = copies.iter().map(|(_, bytes)| bytes.len().next_multiple_of(64)).sum();
        if self.inputs.first().is_none_or(|slot| slot.pinned.len() < total) {
            self.reserve_host_copies(total, 0)?;
        }
        let addresses =
            copies.iter().map(|&(range, _)| self.address(range)).collect::<Result<Vec<_>, _>>()?;
        let (compute, side) = (self.compute, self.copies);
        let is_used = self.inputs_staged >= INPUTS;
        if is_used {
            let uploaded = self.inputs[self.inputs_staged % INPUTS].uploaded;
            self.wait(|driver| driver.synchronize_event(uploaded))?;
        }
        let driver = self.driver.as_mut();
        let slot = &mut self.inputs[self.inputs_staged % INPUTS];
        if is_used {
            driver.wait(side, slot.taken)?;
        }
        let mut offset = 0;
        for (_, bytes) in copies {
            slot.pinned.as_mut_slice()[offset..offset + bytes.len()].copy_from_slice(bytes);
            offset += bytes.len().next_multiple_of(64);
        }
        // SAFETY: the slot is filled again, or freed, only once `uploaded` is done or all streams
        // are empty.
        unsafe { driver.copy_from_pinned(slot.staged, &slot.pinned, 0, total, side)? };
        driver.record(slot.uploaded, side)?;
        driver.wait(compute, slot.uploaded)?;
        let mut offset = 0;
        for (&(_, bytes), &target) in copies.iter().zip(&addresses) {
            driver.copy(target, slot.staged.offset(offset), bytes.len(), compute)?;
            offset += bytes.len().next_multiple_of(64);
        }
        driver.record(slot.taken, compute)?;
        self.inputs_staged += 1;
        let clock = &mut self.clocks[self.readbacks_made % CLOCKS];
        if !clock.is_staged {
            driver.record(clock.staged, compute)?;
        }
        clock.is_staged = true;
        Ok(())
    }

    fn read_later(&mut self, ranges: &[ByteRange]) -> Result<Readback, KernelError> {
        let total: usize = ranges.iter().map(|range| range.bytes).sum();
        if self.readbacks.first().is_none_or(|slot| slot.pinned.len() < total) {
            self.reserve_host_copies(0, total)?;
        }
        let runs = coalesce(ranges);
        let addresses =
            runs.iter().map(|&(range, _)| self.address(range)).collect::<Result<Vec<_>, _>>()?;
        let slot = &mut self.readbacks[self.readbacks_made % READBACKS];
        slot.parts.clear();
        slot.parts.resize(ranges.len(), (0, 0));
        let mut offset = 0;
        for ((run, members), source) in runs.iter().zip(addresses) {
            // SAFETY: the slot is read only once `filled` is done, and freed when all streams are
            // empty.
            unsafe {
                self.driver.copy_to_pinned(
                    &slot.pinned,
                    offset,
                    source,
                    run.bytes,
                    self.compute,
                )?;
            }
            for &member in members {
                let range = ranges[member];
                slot.parts[member] = (offset + range.offset - run.offset, range.bytes);
            }
            offset += run.bytes;
        }
        self.driver.record(self.clocks[self.readbacks_made % CLOCKS].filled, self.compute)?;
        self.readbacks_made += 1;
        self.clocks[self.readbacks_made % CLOCKS].is_staged = false;
        Ok(Readback(self.readbacks_made - 1))
    }

    fn fetch(&mut self, readback: Readback, parts: &mut [&mut [u8]]) -> Result<(), KernelError> {
        self.check_age(readback)?;
        let filled = self.clocks[readback.0 % CLOCKS].filled;
        self.wait(|driver| driver.synchronize_event(filled))?;
        let slot = &self.readbacks[readback.0 % READBACKS];
        for (part, &(offset, bytes)) in parts.iter_mut().zip(&slot.parts) {
            part.copy_from_slice(&slot.pinned.as_slice()[offset..offset + bytes]);
        }
        Ok(())
    }

    fn time_of(&mut self, readback: Readback) -> Result<Option<ReadbackTime>, KernelError> {
        self.check_age(readback)?;
        let clock = self.clocks[readback.0 % CLOCKS];
        let mut since = |event| -> Result<f64, DriverError> {
            Ok(f64::from(self.driver.elapsed_ms(event, clock.filled)?) * 1e-3)
        };
        let before = readback.0.checked_sub(1).map(|index| self.clocks[index % CLOCKS].filled);
        Ok(Some(ReadbackTime {
            since_staged_s: clock.is_staged.then(|| since(clock.staged)).transpose()?,
            since_readback_s: before.map(since).transpose()?,
        }))
    }

    fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer, KernelError> {
        Ok(HostBuffer::Pinned(self.driver.allocate_pinned(bytes)?))
    }

    fn free_host_buffer(&mut self, buffer: HostBuffer) -> Result<(), KernelError> {
        match buffer {
            HostBuffer::Pinned(buffer) => Ok(self.driver.free_pinned(buffer)?),
            HostBuffer::Plain(_) => Err(KernelError::foreign_buffer("cuda")),
        }
    }

    fn read_all(
        &mut self,
        ranges: &[ByteRange],
        buffer: &mut HostBuffer,
    ) -> Result<(), KernelError> {
        let HostBuffer::Pinned(buffer) = buffer else {
            return Err(KernelError::foreign_buffer("cuda"));
        };
        self.wait_for_all()?;
        let mut offset = 0;
        let copied = ranges.iter().try_for_each(|&range| -> Result<(), KernelError> {
            let source = self.address(range)?;
            let (copies, bytes) = (self.copies, range.bytes);
            // SAFETY: this function has exclusive access to the buffer, and waits for every copy
            // below.
            unsafe { self.driver.copy_to_pinned(buffer, offset, source, bytes, copies)? };
            offset += bytes;
            Ok(())
        });
        self.wait_for_all()?;
        copied
    }

    fn host_view(&self, _range: ByteRange) -> Option<&[u8]> {
        None
    }
}

/// Merges ranges with gaps of at most the padding to 64 bytes; each result has the indices of its
/// members.
fn coalesce(ranges: &[ByteRange]) -> Vec<(ByteRange, Vec<usize>)> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_by_key(|&index| ranges[index].offset);
    let mut runs: Vec<(ByteRange, Vec<usize>)> = Vec::new();
    for index in order {
        let range = ranges[index];
        match runs.last_mut() {
            Some((run, members)) if range.offset <= run.end().next_multiple_of(64) => {
                run.bytes = run.bytes.max(range.end() - run.offset);
                members.push(index);
            }
            _ => runs.push((range, vec![index])),
        }
    }
    runs
}

#[cfg(test)]
mod tests;
