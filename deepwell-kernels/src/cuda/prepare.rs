//! From a call of a program to launches: operands become device addresses, attributes become
//! arguments, tables become constants in device memory. Nothing is left for the step but to
//! enqueue.

use std::collections::HashMap;

use deepwell_ir::{Call, DType, Instance, Program, storage_bytes};

use super::blas::{Blas, Matmul, MatmulPlan};
use super::comm::{DeviceComm, DeviceExchange, ExchangePlan};
use super::driver::{
    Argument, DevicePtr, Driver, DriverError, Function, Launch, Module, TensorMap, TensorMapSpec,
};
use super::images::KernelImages;
use crate::KernelError;

/// One thing that a prepared call puts into its stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A kernel of ours.
    Launch(Launch),
    /// A GEMM by the vendor's library.
    Matmul(MatmulPlan),
    /// An exchange with other ranks.
    Exchange(ExchangePlan),
    /// A copy within the device.
    Copy {
        /// To where.
        target: DevicePtr,
        /// From where.
        source: DevicePtr,
        /// How much.
        bytes: usize,
    },
    /// A fill with one byte.
    Fill {
        /// Where.
        target: DevicePtr,
        /// With what.
        byte: u8,
        /// How much.
        bytes: usize,
    },
}

/// An operand where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// First byte.
    pub pointer: DevicePtr,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl DeviceTensor {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        // The arena holds it, or the program's verifier had refused it.
        storage_bytes(self.dtype, &self.shape).unwrap_or(usize::MAX)
    }

    /// The address as an argument.
    pub fn argument(&self) -> Argument {
        Argument::Pointer(self.pointer)
    }
}

/// A call with its operands in an arena.
#[derive(Clone, Copy)]
pub struct CallView<'a> {
    /// The program that it belongs to.
    pub program: &'a Program,
    /// The call.
    pub call: &'a Call,
    /// Which run of it.
    pub instance: Instance,
    /// Where the arena begins.
    pub arena: DevicePtr,
}

impl CallView<'_> {
    /// Operand `index`, inputs first.
    pub fn operand(&self, index: usize) -> DeviceTensor {
        let value = self.program.value(self.call.operands[index].value);
        DeviceTensor {
            pointer: self.arena.offset(value.range_in(self.instance.slot).offset),
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

    /// Whether accumulators add to what is there.
    pub fn accumulate(&self) -> bool {
        self.call.accumulate.adds(self.instance)
    }

    /// The call's scratch and its length.
    pub fn workspace(&self) -> (DevicePtr, usize) {
        (self.arena.offset(self.call.workspace.offset), self.call.workspace.bytes)
    }

    /// The call refuses its operands.
    pub fn refuse(&self, what: impl Into<String>) -> KernelError {
        KernelError::Run { call: self.call.name.clone(), what: what.into() }
    }
}

/// Bytes of device memory that constants are allocated by.
const CONSTANT_CHUNK_BYTES: usize = 1 << 20;
/// Counters of the CTAs that have ended, zero between launches.
const ARRIVAL_COUNTERS: usize = 256 * 1024;
/// What constants and arrival counters hold on the device at least; a model of ordinary size needs
/// no more.
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
    /// Gives all memory back.
    ///
    /// # Errors
    /// What the driver refuses.
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

/// What preparing a call may use of the device.
pub struct Device<'a> {
    /// The driver.
    pub driver: &'a mut dyn Driver,
    /// The vendor's GEMMs, where they are there.
    pub blas: Option<&'a mut dyn Blas>,
    /// What exchanges data with other ranks, where there are some.
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

    /// Kernel `name` of `<file>.cu`, allowed `shared_bytes` of dynamic shared memory.
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

    /// CTAs of `threads` threads that the whole device holds at a time.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn resident_ctas(
        &mut self,
        function: Function,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32, KernelError> {
        let ctas = self.driver.ctas_per_sm(function, threads, shared_bytes)?;
        Ok(ctas.max(1) * self.sm_count())
    }

    /// A launch of one-dimensional grid and block, in no cluster.
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

    /// Puts bytes into device memory for as long as calls are prepared; equal bytes share a place
    /// that is 256-byte aligned.
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

    /// [`Device::constant`] for tables that take long to make: `make` is called for the first of
    /// the calls that give equal keys, which say all that a table is made of.
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

    /// Puts bytes into the last chunk, or into a new one; what is larger than a chunk gets its own
    /// and leaves the last one's rest for others.
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

    /// `count` counters (u32) of this call alone that are zero when it starts: the kernel leaves
    /// them zero.
    ///
    /// # Errors
    /// More counters than there are.
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

    /// A GEMM by the vendor's library.
    ///
    /// # Errors
    /// No library, or a GEMM that it does not take.
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

    /// An exchange of `rank` of a world of `world_size`.
    ///
    /// # Errors
    /// Nothing that exchanges data, or something for another rank.
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
        let own = (comm.rank(), comm.world_size());
        if own != (rank, world_size) {
            let reason = format!(
                "the program is for rank {rank} of {world_size}, the backend is rank {} of {}",
                own.0, own.1
            );
            return Err(DriverError::new("exchange", reason).into());
        }
        Ok(Step::Exchange(comm.plan(exchange)?))
    }

    /// Encodes a tensor map.
    ///
    /// # Errors
    /// What the hardware does not take.
    pub fn tensor_map(&mut self, spec: &TensorMapSpec) -> Result<TensorMap, KernelError> {
        Ok(self.driver.tensor_map(spec)?)
    }
}
