//! Runs one op on the GPU as a program of one call.
//!
//! Every run starts from poisoned outputs and scratch and from guard bytes around each operand;
//! it is made twice with different poison, and both must give the same bits. On the emulator only
//! the first looks for hazards, which takes half of the time.
//!
//! `DEEPWELL_TEST_DEVICE=emulated:sm90` (or `sm100`, `sm103`, `sm120`) has the tests run on the
//! emulator, with fewer and smaller shapes. There, and for the table in `emulated.rs`, these say
//! how kernels are run; a value that is not one of those is refused:
//!
//! | variable | values |
//! |---|---|
//! | `DEEPWELL_EMULATOR_COMPLETION` | `eager` (default), `lazy`, `lazy:SEED`, `demand` |
//! | `DEEPWELL_EMULATOR_RESULTS` | `hw` (default), `exact`, `fuzz`, `fuzz:SEED` |
//! | `DEEPWELL_EMULATOR_TRACKER` | `on` (default), `off` |
//! | `DEEPWELL_EMULATOR_CTAS_PER_SM` | 1 to 32 (8 here, 1 in the table) |
//! | `DEEPWELL_EMULATOR_LOG` | a file: a line of JSON for each launch is added |
//! | `DEEPWELL_EMULATOR_RECORD` | a folder: each launch is written there as a file |

use deepwell_ir::{
    Access, Accumulate, ByteRange, DType, Instance, KernelCatalog, Op, Program, Target, Tile,
    storage_bytes,
};
use deepwell_kernels::cuda::{
    Architecture, Blas, CUBLASLT, CublasLt, CudaBackend, CudaCatalog, Driver, KernelImages,
    cuda_target,
};
use deepwell_kernels::{Backend, SingleCall};
use deepwell_precision::random::XorShift64;
use deepwell_trials::skip;
use half::bf16;

use crate::device::{emulated_architecture, find_driver, find_emulated};

/// Bytes of guard before and behind each operand.
const GUARD_BYTES: usize = 256;
const GUARD: u8 = 0xA5;

/// A tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostTensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl HostTensor {
    /// `values` rounded to `dtype` (F32 or BF16).
    pub(crate) fn from_f32(dtype: DType, shape: &[usize], values: &[f32]) -> HostTensor {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        let bytes = match dtype {
            DType::F32 => bytemuck::cast_slice(values).to_vec(),
            DType::Bf16 => {
                let rounded: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                bytemuck::cast_slice(&rounded).to_vec()
            }
            other => panic!("no float tensor of {other}"),
        };
        HostTensor { dtype, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn bf16(shape: &[usize], values: &[f32]) -> HostTensor {
        HostTensor::from_f32(DType::Bf16, shape, values)
    }

    pub(crate) fn f32(shape: &[usize], values: &[f32]) -> HostTensor {
        HostTensor::from_f32(DType::F32, shape, values)
    }

    pub(crate) fn i32(shape: &[usize], values: &[i32]) -> HostTensor {
        let bytes = bytemuck::cast_slice(values).to_vec();
        HostTensor { dtype: DType::I32, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn u64(shape: &[usize], values: &[u64]) -> HostTensor {
        let bytes = bytemuck::cast_slice(values).to_vec();
        HostTensor { dtype: DType::U64, shape: shape.to_vec(), bytes }
    }

    /// Data (E4M3) or scales (E8M0).
    pub(crate) fn bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> HostTensor {
        HostTensor { dtype, shape: shape.to_vec(), bytes: bytes.to_vec() }
    }

    /// A tensor to be written: what it holds before is poison.
    pub(crate) fn output(dtype: DType, shape: &[usize]) -> HostTensor {
        let bytes = vec![0; storage_bytes(dtype, shape).expect("a shape that fits")];
        HostTensor { dtype, shape: shape.to_vec(), bytes }
    }

    /// The numbers that a BF16 or F32 tensor holds.
    pub(crate) fn to_f64(&self) -> Vec<f64> {
        match self.dtype {
            DType::F32 => bytemuck::pod_collect_to_vec::<u8, f32>(&self.bytes)
                .iter()
                .map(|&x| x.into())
                .collect(),
            DType::Bf16 => bytemuck::pod_collect_to_vec::<u8, bf16>(&self.bytes)
                .iter()
                .map(|x| x.to_f64())
                .collect(),
            other => panic!("no float tensor: {other}"),
        }
    }

    pub(crate) fn to_u64(&self) -> Vec<u64> {
        assert_eq!(self.dtype, DType::U64);
        bytemuck::pod_collect_to_vec(&self.bytes)
    }
}

/// Type and shape of an operand.
pub(crate) type OperandSize = (DType, Vec<usize>);

/// Uniform numbers in `[-scale, scale)`, the same for the same seed.
pub(crate) fn uniform(len: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut random = XorShift64(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03);
    (0..len).map(|_| ((random.draw() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale).collect()
}

/// How a call is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunOptions<'a> {
    /// Outputs that are accumulators start from the given contents and are added to.
    pub(crate) accumulate: bool,
    /// Outputs start from the given contents though they do not accumulate: in-place updates.
    pub(crate) update: bool,
    /// Tokens per sequence of the program.
    pub(crate) seq: usize,
    /// Only this kernel.
    pub(crate) kernel: Option<&'a str>,
    /// Its tile, where it has several; the one that is selected otherwise.
    pub(crate) tile: Option<Tile>,
    /// Whether the vendor's library may be used.
    pub(crate) library: bool,
    /// Bytes of scratch of a named kernel, where they are not what its spec says.
    pub(crate) workspace_bytes: Option<usize>,
}

impl Default for RunOptions<'_> {
    fn default() -> Self {
        RunOptions {
            accumulate: false,
            update: false,
            seq: 1,
            kernel: None,
            tile: None,
            library: true,
            workspace_bytes: None,
        }
    }
}

/// A GPU under test.
pub(crate) struct Gpu {
    backend: CudaBackend,
    target: Target,
    /// Of the emulator: says whether the next launches look for hazards.
    watch: Option<Watch>,
}

/// Turns the emulator's hazard tracker on and off.
pub(crate) type Watch = Box<dyn Fn(bool)>;

impl Gpu {
    /// A device under test; only emulated ones, where work takes long, have a `watch`.
    pub(crate) fn new(backend: CudaBackend, target: Target, watch: Option<Watch>) -> Gpu {
        Gpu { backend, target, watch }
    }

    /// The emulated device that the environment names, or the first GPU; where there is none, the
    /// test is skipped.
    pub(crate) fn open() -> Gpu {
        Gpu::find().unwrap_or_else(|reason| skip(reason))
    }

    /// As [`Gpu::open`], or why there is none.
    pub(crate) fn find() -> Result<Gpu, String> {
        if let Some(architecture) = emulated_architecture() {
            return find_emulated(architecture);
        }
        let driver = find_driver()?;
        let properties = driver.properties().clone();
        let architecture = Architecture::of_capability(properties.capability)
            .unwrap_or_else(|| panic!("no kernels for {properties:?}"));
        let blas = CublasLt::open(&driver).unwrap_or_else(|error| panic!("{error}"));
        let blas: Box<dyn Blas> = Box::new(blas);
        let backend =
            CudaBackend::new(Box::new(driver), Some(blas), KernelImages::discover()).unwrap();
        let target = cuda_target(architecture, properties.sm_count as usize, &[CUBLASLT]);
        Ok(Gpu::new(backend, target, None))
    }

    /// Whether a case of so much work is run: on a GPU every one, on the emulator those of at most
    /// `most`.
    pub(crate) fn runs(&self, work: usize, most: usize) -> bool {
        self.watch.is_none() || work <= most
    }

    /// The first on a GPU, the second on the emulator, which takes long.
    pub(crate) fn pick<T>(&self, on_gpu: T, emulated: T) -> T {
        if self.watch.is_some() { emulated } else { on_gpu }
    }

    /// What kernels are chosen for.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Runs an op with its default kernel. `outputs` give type and shape, and for accumulators
    /// and updates the contents before.
    pub(crate) fn run(
        &mut self,
        op: impl Into<Op>,
        inputs: &[HostTensor],
        outputs: &[HostTensor],
        accumulate: bool,
        seq: usize,
    ) -> Vec<HostTensor> {
        let options = RunOptions { accumulate, seq, ..RunOptions::default() };
        self.run_with(op, inputs, outputs, options)
    }

    /// Runs an op once with its default kernel over operands too large for copies on the host. They
    /// are zero but for `parts`, each an operand, an element of it, and what stands from there on.
    /// Gives bytes of the first output, from an element on.
    pub(crate) fn run_far(
        &mut self,
        op: impl Into<Op>,
        (inputs, outputs): (&[OperandSize], &[OperandSize]),
        parts: &[(usize, usize, &HostTensor)],
        (from, bytes): (usize, usize),
    ) -> Vec<u8> {
        let single = SingleCall::new(op, inputs, outputs);
        let choice = CudaCatalog.select(&single.request(), &self.target).unwrap().choice;
        let program = single.program(choice, self.target.clone(), 1);
        self.backend.allocate(program.arena.bytes).unwrap();
        let range_of = |operand: usize, element: usize, bytes: usize| {
            let value = &program.values[operand];
            let before = storage_bytes(value.dtype, &[element]).expect("whole bytes");
            assert!(before + bytes <= value.range.bytes, "behind operand {operand}");
            ByteRange { offset: value.range.offset + before, bytes }
        };
        for &(operand, element, part) in parts {
            let range = range_of(operand, element, part.bytes.len());
            self.backend.write(range, &part.bytes).unwrap();
        }
        let call = &program.calls[0];
        let prepared = self.backend.prepare(&program, call, Instance::ONLY).unwrap();
        self.backend.enqueue(prepared).unwrap();
        self.backend
            .synchronize()
            .unwrap_or_else(|error| panic!("{}: {error}", call.choice.kernel));
        let mut result = vec![0; bytes];
        self.backend.read(range_of(inputs.len(), from, bytes), &mut result).unwrap();
        self.backend.forget_prepared().unwrap();
        result
    }

    /// [`Gpu::run`] with everything chosen.
    pub(crate) fn run_with(
        &mut self,
        op: impl Into<Op>,
        inputs: &[HostTensor],
        outputs: &[HostTensor],
        options: RunOptions<'_>,
    ) -> Vec<HostTensor> {
        let op = op.into();
        let first = self.run_once(&op, inputs, outputs, options, 0xFF);
        self.look_for_hazards(false);
        let second = self.run_once(&op, inputs, outputs, options, 0x7B);
        self.look_for_hazards(true);
        for (index, (a, b)) in first.iter().zip(&second).enumerate() {
            assert_eq!(a.bytes, b.bytes, "{}: output {index} depends on the run", op.name());
        }
        first
    }

    fn look_for_hazards(&self, on: bool) {
        if let Some(watch) = &self.watch {
            watch(on);
        }
    }

    fn run_once(
        &mut self,
        op: &Op,
        inputs: &[HostTensor],
        outputs: &[HostTensor],
        options: RunOptions<'_>,
        poison: u8,
    ) -> Vec<HostTensor> {
        let mut program = self.program(op, inputs, outputs, options);
        let arena_bytes = program.arena.bytes;
        self.backend.allocate(arena_bytes).unwrap();
        let mut image = vec![GUARD; arena_bytes];
        let keeps = options.accumulate || options.update;
        for (index, tensor) in inputs.iter().chain(outputs).enumerate() {
            let range = program.values[index].range;
            let place = &mut image[range.offset..range.end()];
            if index < inputs.len() || keeps {
                place.copy_from_slice(&tensor.bytes);
            } else {
                place.fill(poison);
            }
        }
        let workspace = program.calls[0].workspace;
        image[workspace.offset..workspace.end()].fill(poison);
        let everything = ByteRange { offset: 0, bytes: arena_bytes };
        self.backend.write(everything, &image).unwrap();

        let call = program.calls.remove(0);
        let prepared = self.backend.prepare(&program, &call, Instance::ONLY).unwrap();
        self.backend.enqueue(prepared).unwrap();
        self.backend
            .synchronize()
            .unwrap_or_else(|error| panic!("{}: {error}", call.choice.kernel));
        let mut after = vec![0; arena_bytes];
        self.backend.read(everything, &mut after).unwrap();
        self.backend.forget_prepared().unwrap();

        let results: Vec<HostTensor> = outputs
            .iter()
            .enumerate()
            .map(|(index, output)| {
                let range = program.values[inputs.len() + index].range;
                HostTensor { bytes: after[range.offset..range.end()].to_vec(), ..output.clone() }
            })
            .collect();
        // What is neither output nor scratch must be as it was.
        let outputs_at = program.values[inputs.len()..].iter().map(|value| value.range);
        for range in outputs_at.chain([call.workspace]) {
            let (offset, end) = (range.offset, range.end());
            after[offset..end].copy_from_slice(&image[offset..end]);
        }
        // Compared as a whole first, which is many times as fast.
        if after != image {
            let wrong = after.iter().zip(&image).position(|(a, b)| a != b);
            panic!("{} wrote outside of its outputs, at {wrong:?}", call.choice.kernel);
        }
        results
    }

    fn program(
        &self,
        op: &Op,
        inputs: &[HostTensor],
        outputs: &[HostTensor],
        options: RunOptions<'_>,
    ) -> Program {
        let types = |tensors: &[HostTensor]| -> Vec<(DType, Vec<usize>)> {
            tensors.iter().map(|tensor| (tensor.dtype, tensor.shape.clone())).collect()
        };
        let mut single = SingleCall::new(op.clone(), &types(inputs), &types(outputs));
        if options.accumulate {
            single.accumulate = Accumulate::Always;
        }
        single.seq = options.seq;
        single.gap_bytes = GUARD_BYTES;
        if options.accumulate || options.update {
            single.access[inputs.len()..].fill(Access::Update);
        }
        let request = single.request();
        let mut target = self.target.clone();
        if !options.library {
            target.libraries.clear();
        }
        // A kernel that is named may be the library's, and the only one.
        let mut asked = target.clone();
        if options.kernel.is_some() {
            asked.libraries = vec![CUBLASLT.to_string()];
        }
        let mut choice = CudaCatalog.select(&request, &asked).unwrap().choice;
        if let Some(kernel) = options.kernel {
            let spec = deepwell_kernels::cuda::cuda_kernels()
                .find(|spec| spec.name == kernel)
                .unwrap_or_else(|| panic!("no kernel {kernel}"));
            assert_eq!((spec.reject)(&request), None, "{kernel} does not take this");
            choice.kernel = kernel.to_string();
            choice.tile = spec
                .select_tile
                .map(|select| options.tile.unwrap_or(select(&request, &target).tile));
            let planned = (spec.workspace_bytes)(&request, &target);
            choice.workspace_bytes = options.workspace_bytes.unwrap_or(planned);
        }
        single.program(choice, target, 1)
    }
}
