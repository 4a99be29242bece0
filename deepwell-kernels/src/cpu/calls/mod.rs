//! From a call of a program to a kernel on slices: operands become typed views, attributes
//! become arguments. Each op's own `prepare` is in its folder.

pub(crate) mod fused;
pub(crate) mod gemm_output;

use bytemuck::Pod;
use deepwell_ir::{ALIGNMENT_BYTES, ByteRange, Call, DType, Instance, Op, Program, Value};

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::arena::{Arena, In, Out};
use super::gemm::Tier;
use super::specs::cpu_kernels;
use crate::{Comm, KernelError};

/// One rank's exchanges, which the calls of a backend share.
pub(crate) type SharedComm = Arc<Mutex<Box<dyn Comm>>>;

/// What a prepared call does.
pub(crate) type Run = Box<dyn Fn(&Arena) -> Result<(), String> + Send>;

/// A kernel with its operands.
pub(crate) struct CpuCall {
    name: String,
    run: Run,
}

impl CpuCall {
    pub(crate) fn run(&self, arena: &Arena) -> Result<(), KernelError> {
        (self.run)(arena).map_err(|what| KernelError::Run { call: self.name.clone(), what })
    }
}

/// Resolves a call.
pub(crate) fn prepare(
    program: &Program,
    call: &Call,
    instance: Instance,
    comm: Option<&SharedComm>,
) -> Result<CpuCall, KernelError> {
    let values = call.operands.iter().map(|operand| program.value(operand.value)).collect();
    let (input_count, workspace) = (call.input_count, call.workspace);
    let mut operands = Operands::new((program, call, instance), values, input_count, workspace);
    operands.comm = comm;
    let run = run_of(&call.op, &operands)?;
    Ok(CpuCall { name: call.name.clone(), run })
}

/// The kernel of `op`, which is the call's or a part of it, with views that can live beside each
/// other.
fn run_of(op: &Op, operands: &Operands<'_>) -> Result<Run, KernelError> {
    let run = kernel_of(op, operands)?;
    operands.check_views()?;
    Ok(run)
}

fn kernel_of(op: &Op, operands: &Operands<'_>) -> Result<Run, KernelError> {
    if let Op::Fused(op) = op {
        return fused::fused(operands, op);
    }
    let name = op.rule().name();
    let spec = cpu_kernels().iter().find(|spec| spec.op == name);
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

/// Operands of the call at hand, or of one of the ops that it is made of.
pub(crate) struct Operands<'a> {
    pub(crate) program: &'a Program,
    pub(crate) call: &'a Call,
    instance: Instance,
    /// Inputs, then outputs.
    pub(crate) values: Vec<&'a Value>,
    pub(crate) input_count: usize,
    /// Scratch.
    pub(crate) workspace: ByteRange,
    /// What exchanges data with other ranks.
    pub(crate) comm: Option<&'a SharedComm>,
    /// Views that were made, each with whether it is written.
    views: RefCell<Vec<(ByteRange, bool)>>,
}

/// The element types that stand for a [`DType`].
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
    const DTYPES: &'static [DType] = &[DType::E4m3, DType::E8m0, DType::E2m1, DType::Ue4m3];
}

impl<'a> Operands<'a> {
    fn new(
        (program, call, instance): (&'a Program, &'a Call, Instance),
        values: Vec<&'a Value>,
        input_count: usize,
        workspace: ByteRange,
    ) -> Operands<'a> {
        let (comm, views) = (None, RefCell::default());
        Operands { program, call, instance, values, input_count, workspace, comm, views }
    }

    /// The call, for a part of it.
    fn site(&self) -> (&'a Program, &'a Call, Instance) {
        (self.program, self.call, self.instance)
    }

    /// What an op does that is a part of the call and has no scratch: of some of the operands, to
    /// others.
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

    /// Whether accumulators add to what is there.
    pub(crate) fn adds(&self) -> bool {
        self.call.accumulate.adds(self.instance)
    }

    /// Keeps views apart: what is written shares no byte with anything else. Those of the arena are
    /// sound only so, and a program may be anybody's.
    fn check_views(&self) -> Result<(), KernelError> {
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

    /// Remembers a view, whose range is aligned for its elements or refused.
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

    /// Operand `index` as something that is read.
    pub(crate) fn input<T: Stored>(&self, index: usize) -> Result<In<T>, KernelError> {
        let range = self.check::<T>(index)?;
        self.view(range, In::new(range), false)
    }

    /// Operand `index` as something that is written or updated.
    pub(crate) fn target<T: Stored>(&self, index: usize) -> Result<Out<T>, KernelError> {
        let range = self.check::<T>(index)?;
        self.view(range, Out::new(range), true)
    }

    /// The bytes of operand `index`, of whatever type, which are read.
    pub(crate) fn input_bytes(&self, index: usize) -> Result<In<u8>, KernelError> {
        let range = self.value(index).range_in(self.instance.slot);
        self.view(range, In::new(range), false)
    }

    /// The bytes of operand `index`, of whatever type, which are written.
    pub(crate) fn target_bytes(&self, index: usize) -> Result<Out<u8>, KernelError> {
        let range = self.value(index).range_in(self.instance.slot);
        self.view(range, Out::new(range), true)
    }

    /// The bytes of operands that lie one behind the other: a bucket, padded to `whole` bytes where
    /// that is given.
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

    /// A range of operands that are read.
    pub(crate) fn input_range(&self, range: ByteRange) -> Result<In<u8>, KernelError> {
        self.view(range, In::new(range), false)
    }

    /// A range of operands that are written.
    pub(crate) fn target_range(&self, range: ByteRange) -> Result<Out<u8>, KernelError> {
        self.view(range, Out::new(range), true)
    }

    /// The matrix instructions that the chosen kernel runs on.
    pub(crate) fn tier(&self) -> Result<Tier, KernelError> {
        let kernel = &self.call.choice.kernel;
        let spec = cpu_kernels().iter().find(|spec| spec.name == *kernel);
        spec.and_then(|spec| spec.tier)
            .filter(|tier| tier.is_available())
            .ok_or_else(|| self.unknown_kernel())
    }

    /// The call names a kernel that is not there, or not for its op.
    pub(crate) fn unknown_kernel(&self) -> KernelError {
        KernelError::UnknownKernel {
            call: self.call.name.clone(),
            backend: "cpu",
            kernel: self.call.choice.kernel.clone(),
        }
    }

    /// The scratch.
    pub(crate) fn workspace<T: Pod>(&self) -> Result<Out<T>, KernelError> {
        self.view(self.workspace, Out::new(self.workspace), true)
    }
}
