//! A driver without a GPU.

mod memory;
#[cfg(test)]
#[allow(unsafe_code, reason = "copies of pinned memory")]
mod tests;

use std::sync::{Arc, Mutex};

use self::memory::Memory;
use super::host_driver::{HostDriver, Machine, State, Work, lock, no_such};
use crate::runtime::cuda::blas::{Blas, Matmul, MatmulPlan};
use crate::runtime::cuda::driver::{
    DeviceProperties, DevicePtr, DriverResult, Function, Launch, Module, Stream, TensorMap,
    TensorMapSpec,
};

/// Maximum threads per SM.
const THREADS_PER_SM: u32 = 2048;

/// A driver without a GPU, for tests and planning: memory is on the host, copies and fills work,
/// kernels and GEMMs are counted but compute nothing.
///
/// Memory takes room on the host only where it was written; unwritten memory reads as `0xFF`. Work
/// runs when it is enqueued, or when its graph is launched. Modules may have any contents and
/// contain kernels of every name. The clock is simulated: every operation takes a millisecond.
///
/// ```
/// use deepwell_kernels::cuda::{Driver, FakeDriver};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut driver = FakeDriver::h200();
/// let counts = driver.counts();
/// let pointer = driver.allocate(4)?;
/// driver.upload(pointer, &[1, 2, 3, 4])?;
/// let mut bytes = [0; 2];
/// driver.download(&mut bytes, pointer.offset(1))?;
/// assert_eq!(bytes, [2, 3]);
/// assert_eq!((counts.read().allocations, counts.read().uploads), (1, 1));
/// # Ok(())
/// # }
/// ```
pub type FakeDriver = HostDriver<FakeMachine>;

impl FakeDriver {
    /// Creates a driver for a device with these properties.
    pub fn new(properties: DeviceProperties) -> FakeDriver {
        let memory = Memory::new(properties.memory_bytes);
        let machine = FakeMachine { memory, modules: 0, kernels: Vec::new() };
        HostDriver::with_machine(properties, machine)
    }

    /// Creates a driver for an H200, with the properties that its driver reports.
    pub fn h200() -> FakeDriver {
        FakeDriver::new(DeviceProperties {
            name: "NVIDIA H200 (fake)".to_string(),
            capability: (9, 0),
            sm_count: 132,
            memory_bytes: 143_771 << 20,
            l2_bytes: 60 << 20,
            shared_bytes_per_cta: 227 << 10,
            cuda_version: 13_000,
        })
    }

    /// Creates GEMMs for this driver's streams.
    pub fn blas(&self) -> FakeBlas {
        FakeBlas { plans: Vec::new(), shared: Arc::clone(self.shared()) }
    }
}

/// The machine of a [`FakeDriver`]: memory, and launches without effect.
pub struct FakeMachine {
    memory: Memory,
    modules: u64,
    kernels: Vec<String>,
}

impl Machine for FakeMachine {
    fn memory(&self) -> (u64, u64) {
        self.memory.free_and_total()
    }

    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        self.memory.allocate(bytes)
    }

    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()> {
        self.memory.free(pointer)
    }

    fn check(&self, at: DevicePtr, bytes: usize) -> DriverResult<()> {
        self.memory.check(at, bytes)
    }

    fn read(&mut self, target: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        self.memory.read(target, source)
    }

    fn write(&mut self, target: DevicePtr, source: &[u8]) -> DriverResult<()> {
        self.memory.write(target, source)
    }

    fn fill(&mut self, target: DevicePtr, byte: u8, bytes: usize) -> DriverResult<()> {
        self.memory.fill(target, byte, bytes)
    }

    fn copy(&mut self, target: DevicePtr, source: DevicePtr, bytes: usize) -> DriverResult<()> {
        self.memory.copy(target, source, bytes)
    }

    fn load_module(&mut self, _image: &[u8]) -> DriverResult<Module> {
        self.modules += 1;
        Ok(Module(self.modules - 1))
    }

    fn function(&mut self, module: Module, name: &str) -> DriverResult<Function> {
        if module.0 >= self.modules {
            return Err(no_such("module", module.0));
        }
        self.kernels.push(name.to_string());
        Ok(Function(self.kernels.len() as u64 - 1))
    }

    fn kernel_name(&self, function: Function) -> DriverResult<&str> {
        let kernel = self.kernels.get(function.0 as usize);
        kernel.map(String::as_str).ok_or_else(|| no_such("function", function.0))
    }

    fn ctas_per_sm(
        &self,
        _function: Function,
        threads: u32,
        _shared_bytes: u32,
    ) -> DriverResult<u32> {
        Ok(THREADS_PER_SM / threads.max(1))
    }

    fn tensor_map(&self, spec: &TensorMapSpec) -> DriverResult<TensorMap> {
        let mut map = TensorMap([0; 16]);
        map.0[0] = spec.base.0;
        Ok(map)
    }

    fn launch(&mut self, _launch: &Launch) -> DriverResult<()> {
        Ok(())
    }
}

/// GEMMs that are checked and counted but compute nothing; created by [`FakeDriver::blas`].
pub struct FakeBlas {
    plans: Vec<Matmul>,
    shared: Arc<Mutex<State<FakeMachine>>>,
}

impl Blas for FakeBlas {
    fn version(&self) -> String {
        "no library".to_string()
    }

    fn plan(&mut self, matmul: &Matmul) -> DriverResult<MatmulPlan> {
        matmul.check()?;
        self.plans.push(*matmul);
        Ok(MatmulPlan(self.plans.len() - 1))
    }

    fn run(&mut self, plan: MatmulPlan, stream: Stream) -> DriverResult<()> {
        if plan.0 >= self.plans.len() {
            return Err(no_such("matmul plan", plan.0 as u64));
        }
        lock(&self.shared).put(stream, Work::Matmul)
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
    }
}
