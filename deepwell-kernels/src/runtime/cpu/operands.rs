//! Turns a call of a program into a kernel on slices: operands become typed views, attributes
//! become arguments. Each op's `prepare` is in the op's folder.

use bytemuck::Pod;
use deepwell_ir::{ALIGNMENT_BYTES, ByteRange, Call, DType, Instance, Op, Program, Value};

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::arena::{Arena, In, Out};
use super::gemm::Tier;
use super::kernel::CpuKernels;
use crate::{Comm, KernelError};

/// Communicator of one rank, shared by the calls of a backend.
pub(crate) type SharedComm = Arc<Mutex<Box<dyn Comm>>>;

/// Executes a prepared call.
pub(crate) type Run = Box<dyn Fn(&Arena) -> Result<(), String> + Send>;

/// A kernel bound to its operands.
pub(crate) struct CpuCall {
    name: String,
    run: Run,
}

impl CpuCall {
    pub(crate) fn run(&self, arena: &Arena) -> Result<(), KernelError> {
        (self.run)(arena).map_err(|what| KernelError::Run { call: self.name.clone(), what })
    }
}

/// Resolves a call to a kernel and its views.
pub(crate) fn prepare(
    program: &Program,
    call: &Call,
    instance: Instance,
    comm: Option<&SharedComm>,
    kernels: &CpuKernels,
) -> Result<CpuCall, KernelError> {
    let values = call.operands.iter().map(|operand| program.value(operand.value)).collect();
    let (input_count, workspace) = (call.input_count, call.workspace);
    let mut operands =
        Operands::new((program, call, instance, kernels), values, input_count, workspace);
    operands.comm = comm;
    let run = run_of(&call.op, &operands)?;
    Ok(CpuCall { name: call.name.clone(), run })
}

/// Prepares the kernel of `op`, which is the call's op or a part of it, and checks that its views
/// may coexist.
pub(crate) fn run_of(op: &Op, operands: &Operands<'_>) -> Result<Run, KernelError> {
    let run = kernel_of(op, operands)?;
    operands.check_views()?;
    Ok(run)
}

fn kernel_of(op: &Op, operands: &Operands<'_>) -> Result<Run, KernelError> {
    if let Op::Fused(_) = op {
        return (operands.kernels.fused)(operands, op);
    }
    let name = op.rule().name();
    let spec = operands.kernels.specs.iter().find(|spec| spec.op == name);
    (spec.ok_or_else(|| operands.unknown_kernel())?.prepare)(operands, op)
}

/// Runs `$body` with `$float` as the element type that `$dtype` names.
macro_rules! by_float {
    ($operands:expr, $index:expr, $float:ident => $body:expr) => {
        match $operands.dtype($index) {
            deepwell_ir::DType::F32 => {
                type $float = f32;
                $body
            }
            deepwell_ir::DType::Bf16 => {
                type $float = half::bf16;
                $body
            }
            _ => Err($operands.unexpected($index, "f32 or bf16")),
        }
    };
}
pub(crate) use by_float;

/// A call of a program, and the kernels that serve the parts of its op.
type Site<'a> = (&'a Program, &'a Call, Instance, &'a CpuKernels);

/// Operands of a call, or of one of the ops that a call is composed of.
pub(crate) struct Operands<'a> {
    pub(crate) program: &'a Program,
    pub(crate) call: &'a Call,
    instance: Instance,
    /// Kernels of the parts of a composed op.
    kernels: &'a CpuKernels,
    /// Inputs, then outputs.
    pub(crate) values: Vec<&'a Value>,
    pub(crate) input_count: usize,
    /// Scratch.
    pub(crate) workspace: ByteRange,
    /// Communicator of this rank.
    pub(crate) comm: Option<&'a SharedComm>,
    /// Ranges of the views made so far, each with whether the view is written.
    views: RefCell<Vec<(ByteRange, bool)>>,
}

/// An element type that stores values of a [`DType`].
pub(crate) trait Stored: Pod {
    const DTYPES: &'static [DType];
}

impl Stored for f32 {
    const DTYPES: &'static [DType] = &[DType::F32];
}
impl Stored for half::bf16 {
    const DTYPES: &'static [DType] = &[DType::Bf16];
}
impl Stored for i32 {
    const DTYPES: &'static [DType] = &[DType::I32];
}
impl Stored for u64 {
    const DTYPES: &'static [DType] = &[DType::U64];
}
impl Stored for u8 {
    const DTYPES: &'static [DType] = &[
        DType::E4m3,
        DType::E5m2,
        DType::E2m3,
        DType::E3m2,
        DType::E2m1,
        DType::E8m0,
        DType::Ue4m3,
    ];
}

impl<'a> Operands<'a> {
    pub(crate) fn new(
        (program, call, instance, kernels): Site<'a>,
        values: Vec<&'a Value>,
        input_count: usize,
        workspace: ByteRange,
    ) -> Operands<'a> {
        let (comm, views) = (None, RefCell::default());
        Operands { program, call, instance, kernels, values, input_count, workspace, comm, views }
    }

    /// The call, for building the operands of a part of it.
    pub(crate) fn site(&self) -> Site<'a> {
        (self.program, self.call, self.instance, self.kernels)
    }

    /// Prepares `op`, a part of this call without scratch, on the operands at `inputs` and
    /// `outputs`.
    pub(crate) fn run_of_part(
        &self,
        op: &Op,
        inputs: &[usize],
        outputs: Range<usize>,
    ) -> Result<Run, KernelError> {
        let places = inputs.iter().copied().chain(outputs);
        let values = places.map(|place| self.values[place]).collect();
        let workspace = ByteRange::default();
        run_of(op, &Operands::new(self.site(), values, inputs.len(), workspace))
    }

    /// Whether the kernel adds to the previous content of accumulators.
    pub(crate) fn adds(&self) -> bool {
        self.call.accumulate.adds(self.instance)
    }

    /// Checks that a written range shares no byte with another view. Views of the arena are sound
    /// only then, and a program may come from anywhere.
    pub(crate) fn check_views(&self) -> Result<(), KernelError> {
        let views = self.views.borrow();
        for (index, (range, is_written)) in views.iter().enumerate() {
            let mut others = views[..index].iter();
            if others.any(|(other, other_written)| {
                (*is_written || *other_written) && range.overlaps(other)
            }) {
                let (begin, end) = (range.offset, range.end());
                return Err(self.refused(format!(
                    "bytes {begin}..{end} of the arena overlap another operand or the workspace"
                )));
            }
        }
        Ok(())
    }

    pub(crate) fn refused(&self, what: String) -> KernelError {
        KernelError::Run { call: self.call.name.clone(), what }
    }

    /// Records a view; refuses a misaligned range.
    fn view<V>(
        &self,
        range: ByteRange,
        view: Option<V>,
        is_written: bool,
    ) -> Result<V, KernelError> {
        self.views.borrow_mut().push((range, is_written));
        let begin = range.offset;
        view.ok_or_else(|| {
            self.refused(format!("expected an aligned range, got one from byte {begin} on"))
        })
    }

    pub(crate) fn value(&self, index: usize) -> &Value {
        self.values[index]
    }

    pub(crate) fn dtype(&self, index: usize) -> DType {
        self.value(index).dtype
    }

    pub(crate) fn shape(&self, index: usize) -> &[usize] {
        &self.value(index).shape
    }

    /// Position of output `index` among the operands.
    pub(crate) fn output(&self, index: usize) -> usize {
        self.input_count + index
    }

    pub(crate) fn unexpected(&self, index: usize, expected: &str) -> KernelError {
        KernelError::OperandType {
            call: self.call.name.clone(),
            operand: index,
            expected: expected.to_string(),
            got: self.dtype(index),
        }
    }

    fn check<T: Stored>(&self, index: usize) -> Result<ByteRange, KernelError> {
        let value = self.value(index);
        if T::DTYPES.contains(&value.dtype) {
            Ok(value.range_in(self.instance.slot))
        } else {
            Err(self.unexpected(index, T::DTYPES[0].name()))
        }
    }

    /// Operand `index` as a read-only view.
    pub(crate) fn input<T: Stored>(&self, index: usize) -> Result<In<T>, KernelError> {
        let range = self.check::<T>(index)?;
        self.view(range, In::new(range), false)
    }

    /// Operand `index` as a view that is written or updated.
    pub(crate) fn target<T: Stored>(&self, index: usize) -> Result<Out<T>, KernelError> {
        let range = self.check::<T>(index)?;
        self.view(range, Out::new(range), true)
    }

    /// Read-only view of the bytes of operand `index`, of any dtype.
    pub(crate) fn input_bytes(&self, index: usize) -> Result<In<u8>, KernelError> {
        let range = self.value(index).range_in(self.instance.slot);
        self.view(range, In::new(range), false)
    }

    /// Writable view of the bytes of operand `index`, of any dtype.
    pub(crate) fn target_bytes(&self, index: usize) -> Result<Out<u8>, KernelError> {
        let range = self.value(index).range_in(self.instance.slot);
        self.view(range, Out::new(range), true)
    }

    /// Range of a bucket: contiguous operands, padded to `whole` bytes if given.
    pub(crate) fn bucket_bytes(
        &self,
        places: std::ops::Range<usize>,
        whole: Option<usize>,
    ) -> Result<ByteRange, KernelError> {
        let ranges: Vec<ByteRange> =
            self.values[places].iter().map(|value| value.range_in(self.instance.slot)).collect();
        let Some(span) = ByteRange::spanning(&ranges) else {
            return Err(self.refused("expected a bucket of one operand behind the other".into()));
        };
        let bytes = whole.unwrap_or(span.bytes);
        if bytes < span.bytes || bytes - span.bytes >= ALIGNMENT_BYTES {
            let got = span.bytes;
            return Err(self.refused(format!("expected a bucket of {bytes} bytes, got {got}")));
        }
        Ok(ByteRange { bytes, ..span })
    }

    /// Read-only view of a range that spans operands.
    pub(crate) fn input_range(&self, range: ByteRange) -> Result<In<u8>, KernelError> {
        self.view(range, In::new(range), false)
    }

    /// Writable view of a range that spans operands.
    pub(crate) fn target_range(&self, range: ByteRange) -> Result<Out<u8>, KernelError> {
        self.view(range, Out::new(range), true)
    }

    /// Matrix instructions of the chosen kernel.
    pub(crate) fn tier(&self) -> Result<Tier, KernelError> {
        let kernel = &self.call.choice.kernel;
        let spec = self.kernels.specs.iter().find(|spec| spec.name == *kernel);
        spec.and_then(|spec| spec.tier)
            .filter(|tier| tier.is_available())
            .ok_or_else(|| self.unknown_kernel())
    }

    /// Error for a call whose kernel does not exist or is not for its op.
    pub(crate) fn unknown_kernel(&self) -> KernelError {
        KernelError::UnknownKernel {
            call: self.call.name.clone(),
            backend: "cpu",
            kernel: self.call.choice.kernel.clone(),
        }
    }

    /// Writable view of the scratch.
    pub(crate) fn workspace<T: Pod>(&self) -> Result<Out<T>, KernelError> {
        self.view(self.workspace, Out::new(self.workspace), true)
    }
}
