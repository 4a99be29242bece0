//! Turns a call of a program into launches: operands become device addresses, attributes become
//! arguments, tables become constants in device memory. A step then only enqueues.

use std::collections::HashMap;

use deepwell_ir::{Call, Instance, Program};

use super::blas::{Blas, Matmul, MatmulPlan};
use super::comm::{DeviceComm, DeviceExchange, ExchangePlan};
use super::device_tensor::DeviceTensor;
use super::driver::{
    Argument, DevicePtr, Driver, DriverError, Function, Launch, Module, TensorMap, TensorMapSpec,
};
use super::images::KernelImages;
use crate::KernelError;

/// An operation that a prepared call enqueues.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A kernel of ours.
    Launch(Launch),
    /// A GEMM by the vendor's library.
    Matmul(MatmulPlan),
    /// A collective, send or receive.
    Exchange(ExchangePlan),
    /// A copy within the device.
    Copy {
        /// Destination.
        target: DevicePtr,
        /// Source.
        source: DevicePtr,
        /// Length.
        bytes: usize,
    },
    /// A fill with one byte.
    Fill {
        /// Destination.
        target: DevicePtr,
        /// Value.
        byte: u8,
        /// Length.
        bytes: usize,
    },
}

/// Where an arena lies: its first bytes in host memory, the rest on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaAddress {
    device: DevicePtr,
    host: DevicePtr,
    host_bytes: usize,
}

impl ArenaAddress {
    /// An arena whose offsets are addresses.
    pub const OF_ADDRESSES: ArenaAddress = ArenaAddress::on_device(DevicePtr(0));

    /// An arena all on the device.
    pub const fn on_device(device: DevicePtr) -> ArenaAddress {
        ArenaAddress { device, host: DevicePtr(0), host_bytes: 0 }
    }

    /// An arena with the first `host_bytes` at `host`, the rest at `device`.
    pub const fn split(host: DevicePtr, host_bytes: usize, device: DevicePtr) -> ArenaAddress {
        ArenaAddress { device, host, host_bytes }
    }

    /// The address of a byte of the arena.
    pub fn at(self, offset: usize) -> DevicePtr {
        match offset.checked_sub(self.host_bytes) {
            Some(offset) => self.device.offset(offset),
            None => self.host.offset(offset),
        }
    }
}

/// A call with its operands in an arena.
#[derive(Clone, Copy)]
pub struct CallView<'a> {
    /// The program of the call.
    pub program: &'a Program,
    /// The call.
    pub call: &'a Call,
    /// The instance of the call.
    pub instance: Instance,
    /// Where the arena lies.
    pub arena: ArenaAddress,
}

impl CallView<'_> {
    /// Operand `index`, inputs first.
    pub fn operand(&self, index: usize) -> DeviceTensor {
        let value = self.program.value(self.call.operands[index].value);
        DeviceTensor {
            pointer: self.arena.at(value.range_in(self.instance.slot).offset),
            dtype: value.dtype,
            shape: value.shape.clone(),
        }
    }

    /// Input `index`.
    pub fn input(&self, index: usize) -> DeviceTensor {
        self.operand(index)
    }

    /// Output `index`.
    pub fn output(&self, index: usize) -> DeviceTensor {
        self.operand(self.call.input_count + index)
    }

    /// Number of outputs.
    pub fn output_count(&self) -> usize {
        self.call.operands.len() - self.call.input_count
    }

    /// Whether accumulators add to the existing contents.
    pub fn accumulate(&self) -> bool {
        self.call.accumulate.adds(self.instance)
    }

    /// The call's workspace and its length.
    pub fn workspace(&self) -> (DevicePtr, usize) {
        (self.arena.at(self.call.workspace.offset), self.call.workspace.bytes)
    }

    /// An error of this call.
    pub fn refuse(&self, what: impl Into<String>) -> KernelError {
        KernelError::Run { call: self.call.name.clone(), what: what.into() }
    }
}

/// Allocation granularity of constants, in bytes.
const CONSTANT_CHUNK_BYTES: usize = 1 << 20;
/// Number of arrival counters; a kernel counts its finished CTAs and leaves the counters zero.
const ARRIVAL_COUNTERS: usize = 256 * 1024;
/// Minimum device memory for constants and arrival counters; enough for a model of ordinary size.
pub const RESERVED_BYTES: usize = CONSTANT_CHUNK_BYTES + ARRIVAL_COUNTERS * size_of::<u32>();

/// Tables and counters in device memory that prepared calls point to.
#[derive(Debug, Default)]
pub struct Constants {
    chunks: Vec<(DevicePtr, usize)>,
    used_bytes: usize,
    known: HashMap<Vec<u8>, DevicePtr>,
    made: HashMap<Vec<u8>, DevicePtr>,
    arrival_counters: Option<DevicePtr>,
    arrival_counters_used: usize,
}

impl Constants {
    /// Places the arrival counters of the next calls in memory of the caller, who fills it with
    /// zeros before each run of these calls. For calls that may run concurrently.
    pub fn lend_arrival_counters(&mut self, memory: DevicePtr) {
        (self.arrival_counters, self.arrival_counters_used) = (Some(memory), 0);
    }

    /// Ends [`Constants::lend_arrival_counters`]. Returns the number of counters in use.
    pub fn take_arrival_counters(&mut self) -> usize {
        self.arrival_counters = None;
        std::mem::take(&mut self.arrival_counters_used)
    }

    /// Frees all memory.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn free(&mut self, driver: &mut dyn Driver) -> Result<(), DriverError> {
        for (pointer, _) in self.chunks.drain(..) {
            driver.free(pointer)?;
        }
        if let Some(arrival_counters) = self.arrival_counters.take() {
            driver.free(arrival_counters)?;
        }
        *self = Constants::default();
        Ok(())
    }
}

/// The parts of the device available to launchers.
pub struct Device<'a> {
    /// The driver.
    pub driver: &'a mut dyn Driver,
    /// The vendor's GEMM library, if available.
    pub blas: Option<&'a mut dyn Blas>,
    /// The collective library, with several ranks.
    pub comm: Option<&'a mut dyn DeviceComm>,
    /// Compiled kernels.
    pub images: &'a KernelImages,
    /// Modules loaded so far, by the name of their `.cu` file.
    pub modules: &'a mut HashMap<&'static str, Module>,
    /// Tables and counters.
    pub constants: &'a mut Constants,
}

impl Device<'_> {
    /// SMs.
    pub fn sm_count(&self) -> u32 {
        self.driver.properties().sm_count
    }

    /// Returns kernel `name` of `<file>.cu`, with `shared_bytes` of dynamic shared memory allowed.
    ///
    /// # Errors
    /// A kernel that was not compiled for this architecture.
    pub fn function(
        &mut self,
        file: &'static str,
        name: &str,
        shared_bytes: u32,
    ) -> Result<Function, KernelError> {
        let module = match self.modules.get(file) {
            Some(&module) => module,
            None => {
                let capability = self.driver.properties().capability;
                let image = self.images.image(file, capability)?;
                let module = self.driver.load_module(&image)?;
                self.modules.insert(file, module);
                module
            }
        };
        Ok(self.driver.function(module, name, shared_bytes)?)
    }

    /// Number of CTAs of `threads` threads that the whole device can hold at a time.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn resident_ctas(
        &mut self,
        function: Function,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32, KernelError> {
        let ctas = self.driver.ctas_per_sm(function, threads, shared_bytes)?;
        Ok(ctas.max(1) * self.sm_count())
    }

    /// Builds a launch with a one-dimensional grid and block, without clusters.
    pub fn launch(
        function: Function,
        ctas: u32,
        threads: u32,
        shared_bytes: u32,
        arguments: Vec<Argument>,
    ) -> Step {
        Step::Launch(Launch {
            function,
            grid: [ctas, 1, 1],
            block: [threads, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes,
            programmatic: false,
            arguments,
        })
    }

    /// Stores bytes in device memory for as long as calls are prepared, 256-byte aligned; equal
    /// bytes share an address.
    ///
    /// # Errors
    /// Out of memory.
    pub fn constant(&mut self, bytes: &[u8]) -> Result<DevicePtr, KernelError> {
        if let Some(&pointer) = self.constants.known.get(bytes) {
            return Ok(pointer);
        }
        let pointer = self.upload_constant(bytes)?;
        self.constants.known.insert(bytes.to_vec(), pointer);
        Ok(pointer)
    }

    /// [`Device::constant`] for tables that are slow to compute: `make` is called once per key, so
    /// the key must contain everything that the table depends on.
    ///
    /// # Errors
    /// Out of memory.
    pub fn constant_of(
        &mut self,
        key: &[u8],
        make: impl FnOnce() -> Vec<u8>,
    ) -> Result<DevicePtr, KernelError> {
        if let Some(&pointer) = self.constants.made.get(key) {
            return Ok(pointer);
        }
        let pointer = self.upload_constant(&make())?;
        self.constants.made.insert(key.to_vec(), pointer);
        Ok(pointer)
    }

    /// Stores bytes in the last chunk, or in a new chunk. Bytes larger than a chunk get an
    /// allocation of their own, and the rest of the last chunk stays available.
    fn upload_constant(&mut self, bytes: &[u8]) -> Result<DevicePtr, KernelError> {
        let aligned = bytes.len().max(1).next_multiple_of(256);
        if aligned > CONSTANT_CHUNK_BYTES {
            let pointer = self.driver.allocate(aligned)?;
            self.constants.chunks.insert(0, (pointer, aligned));
            if self.constants.chunks.len() == 1 {
                self.constants.used_bytes = aligned;
            }
            self.driver.upload(pointer, bytes)?;
            return Ok(pointer);
        }
        let fits = self
            .constants
            .chunks
            .last()
            .is_some_and(|&(_, size)| self.constants.used_bytes + aligned <= size);
        if !fits {
            let chunk = self.driver.allocate(CONSTANT_CHUNK_BYTES)?;
            self.constants.chunks.push((chunk, CONSTANT_CHUNK_BYTES));
            self.constants.used_bytes = 0;
        }
        let chunk = self.constants.chunks.last().map_or(DevicePtr(0), |&(pointer, _)| pointer);
        let pointer = chunk.offset(self.constants.used_bytes);
        self.constants.used_bytes += aligned;
        self.driver.upload(pointer, bytes)?;
        Ok(pointer)
    }

    /// Returns `count` counters (u32) for this call alone, zero when the kernel starts; the kernel
    /// must leave them zero.
    ///
    /// # Errors
    /// More counters than remain.
    pub fn arrival_counters(&mut self, count: usize) -> Result<DevicePtr, KernelError> {
        let base = match self.constants.arrival_counters {
            Some(base) => base,
            None => {
                let bytes = ARRIVAL_COUNTERS * size_of::<u32>();
                let base = self.driver.allocate(bytes)?;
                self.driver.upload(base, &vec![0; bytes])?;
                self.constants.arrival_counters = Some(base);
                base
            }
        };
        if self.constants.arrival_counters_used + count > ARRIVAL_COUNTERS {
            let asked = self.constants.arrival_counters_used + count;
            return Err(DriverError::new(
                "arrival counters",
                format!(
                    "expected at most {ARRIVAL_COUNTERS} counters in all programs, got {asked}"
                ),
            )
            .into());
        }
        let pointer = base.offset(self.constants.arrival_counters_used * size_of::<u32>());
        self.constants.arrival_counters_used += count;
        Ok(pointer)
    }

    /// Prepares a GEMM by the vendor's library.
    ///
    /// # Errors
    /// No library, or a GEMM that the library does not support.
    pub fn matmul(&mut self, matmul: &Matmul) -> Result<Step, KernelError> {
        match &mut self.blas {
            Some(blas) => Ok(Step::Matmul(blas.plan(matmul)?)),
            None => Err(DriverError::new(
                "cublasLt",
                "the library was not found\n\
                 hint: install the CUDA toolkit's libcublasLt, or plan for a target without it",
            )
            .into()),
        }
    }

    /// Prepares an exchange of `rank` of a world of `world_size`.
    ///
    /// # Errors
    /// No collective library, or a library opened for another rank.
    pub fn exchange(
        &mut self,
        exchange: &DeviceExchange,
        (rank, world_size): (u32, u32),
    ) -> Result<Step, KernelError> {
        let Some(comm) = &mut self.comm else {
            return Err(DriverError::new(
                "exchange",
                "expected a backend that exchanges data with other ranks, got one alone\n\
                 hint: give it a `DeviceComm` by `CudaBackend::with_comm`",
            )
            .into());
        };
        let backend_ranks = (comm.rank(), comm.world_size());
        if backend_ranks != (rank, world_size) {
            let reason = format!(
                "the program is for rank {rank} of {world_size}, the backend is rank {} of {}",
                backend_ranks.0, backend_ranks.1
            );
            return Err(DriverError::new("exchange", reason).into());
        }
        Ok(Step::Exchange(comm.plan(exchange)?))
    }

    /// Encodes a tensor map.
    ///
    /// # Errors
    /// A map that the hardware does not support.
    pub fn tensor_map(&mut self, spec: &TensorMapSpec) -> Result<TensorMap, KernelError> {
        Ok(self.driver.tensor_map(spec)?)
    }
}
