//! A router's projection and its backward on cuBLASLt: GEMMs of BF16 parts of the FP32 operands.
//! `router_parts.cu` splits the operands and sums the results.
//!
//! Logits and weight gradients are FP32, and are sums of GEMMs with all three parts. The gradient
//! of the inputs is rounded to BF16; it sums the three GEMMs of parts of at least 2^-16 of the
//! whole, as one GEMM whose contraction concatenates the parts.

use deepwell_ir::{DType, KernelRequest, Op, Target};

use super::cuda::sizes_of;
use crate::KernelError;
use crate::runtime::cuda::architecture::CUBLASLT;
use crate::runtime::cuda::blas::{Matmul, Matrix};
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, LIBRARY_SCRATCH_BYTES, align_for_library, extents_fit, matrix,
    not_empty,
};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{CUBLASLT_BF16, Rates};

const FILE: &str = "router_parts";
/// Threads of a CTA, and elements per thread, as in the source.
const THREADS: usize = 256;
const WIDTH: usize = 8;
/// Largest number of CTAs of a launch.
const CTAS_MAX: usize = 1024;
/// BF16 parts of an FP32 element, and GEMMs of parts per FP32 GEMM.
const PARTS: usize = 3;
/// Alignment of operands in scratch.
const ALIGNMENT: usize = 256;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    SPEC.name("cublaslt_router_logits")
        .ops(&["router_logits"])
        .prepare(prepare_forward)
        .reject(|request| reject(request, &[0])),
    SPEC.name("cublaslt_router_logits_backward")
        .ops(&["router_logits_backward"])
        .prepare(prepare_backward)
        .reject(|request| reject(request, &[1, 3])),
];

const SPEC: CudaKernelSpec = CudaKernelSpec::new("", &[], prepare_forward)
    .library(CUBLASLT)
    .reject(|_| None)
    .predict(predict)
    .workspace_bytes(|request, _| Layout::of(request).bytes);

/// Requires whole vectors, which also satisfies the library's alignment.
fn reject(request: &KernelRequest<'_>, activations: &[usize]) -> Option<String> {
    all_bf16(request, activations)
        .or_else(|| extents_fit(request, &[0, 1]))
        .or_else(|| not_empty(request, &[0, 1]))
        .or_else(|| {
            let [_, experts, width] = sizes_of(request);
            let whole = experts.is_multiple_of(WIDTH) && width.is_multiple_of(WIDTH);
            (!whole).then(|| format!("takes multiples of {WIDTH} experts and of {WIDTH} columns"))
        })
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let rates = Rates::of(target);
    let launches = match request.op {
        Op::RouterLogitsBackward(_) => 4.0,
        _ => 2.0,
    };
    rates.bf16_gemm_s(request, CUBLASLT_BF16 / PARTS as f64) + launches * rates.launch_s()
}

/// Layout of the scratch, in bytes from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// Parts of the weights, `[3 experts, width]`.
    w: usize,
    /// For the backward: parts of the logits' gradient, `[tokens, 4 experts]`.
    dlogits: usize,
    /// The library's results for the parts.
    made: usize,
    library: usize,
    bytes: usize,
}

impl Layout {
    fn of(request: &KernelRequest<'_>) -> Layout {
        Layout::new(sizes_of(request), matches!(request.op, Op::RouterLogitsBackward(_)))
    }

    fn new([tokens, experts, width]: [usize; 3], is_backward: bool) -> Layout {
        let behind = |begin: usize, bytes: usize| (begin + bytes).next_multiple_of(ALIGNMENT);
        let dlogits = behind(0, PARTS * experts * width * size_of::<u16>());
        let slots = if is_backward { tokens * SLOTS * experts } else { 0 };
        let made = behind(dlogits, slots * size_of::<u16>());
        let rows = if is_backward { width } else { tokens };
        let library = behind(made, PARTS * experts * rows * size_of::<f32>());
        let bytes = library + LIBRARY_SCRATCH_BYTES + LIBRARY_ALIGNMENT_BYTES;
        Layout { w: 0, dlogits, made, library, bytes }
    }
}

/// Slots of the logits' gradient, side by side: the weight gradient uses the first three, the
/// gradient of the inputs the last three.
const SLOTS: usize = 4;
const SLOTS_OF_DLOGITS: [u32; SLOTS] = [2, 1, 0, 0];
/// Parts of w by which the last three slots are multiplied, stacked along the contraction.
const FACTORS_OF_DLOGITS: [u32; PARTS] = [0, 0, 1];
/// Parts of w for the logits, smallest first, which is the order of addition.
const SLOTS_OF_W: [u32; PARTS] = [2, 1, 0];

/// A sequence of slots in memory, each a matrix `[rows, columns]`.
#[derive(Clone, Copy)]
struct Slots {
    pointer: DevicePtr,
    rows: usize,
    columns: usize,
    count: usize,
    /// Whether slots are side by side, instead of stacked.
    are_beside: bool,
}

impl Slots {
    /// Stacked slots.
    fn below(pointer: DevicePtr, rows: usize, columns: usize, count: usize) -> Slots {
        Slots { pointer, rows, columns, count, are_beside: false }
    }

    fn beside(pointer: DevicePtr, rows: usize, columns: usize, count: usize) -> Slots {
        Slots { pointer, rows, columns, count, are_beside: true }
    }

    fn sizes(&self) -> [Argument; 5] {
        let Slots { rows, columns, count, are_beside, .. } = *self;
        let (slot, row) =
            if are_beside { (columns, count * columns) } else { (rows * columns, columns) };
        [
            Argument::U32(rows as u32),
            Argument::U32(columns as u32),
            Argument::U64(slot as u64),
            Argument::U64(row as u64),
            Argument::U32(count as u32),
        ]
    }

    /// All slots as one matrix or, if side by side, `count` slots from slot `first` on.
    fn matrix(&self, dtype: DType, first: usize, count: usize) -> Matrix {
        let Slots { rows, columns, .. } = *self;
        let (rows, columns, leading) = match self.are_beside {
            true => (rows, count * columns, self.count * columns),
            false => (count * rows, columns, columns),
        };
        let element_bytes = if dtype == DType::F32 { size_of::<f32>() } else { size_of::<u16>() };
        let before = if self.are_beside { first * self.columns * element_bytes } else { 0 };
        Matrix { pointer: self.pointer.offset(before), dtype, rows, columns, leading }
    }

    fn launch(
        &self,
        device: &mut Device<'_>,
        entry: &str,
        arguments: Vec<Argument>,
    ) -> Result<Step, KernelError> {
        let function = device.function(FILE, entry, 0)?;
        let ctas = (self.rows * self.columns / WIDTH).div_ceil(THREADS).clamp(1, CTAS_MAX);
        Ok(Device::launch(function, ctas as u32, THREADS as u32, 0, arguments))
    }

    /// Fills the slots with parts of `x`, one slot for each of `parts`.
    fn split(
        &self,
        device: &mut Device<'_>,
        x: &DeviceTensor,
        parts: &[u32],
    ) -> Result<Step, KernelError> {
        let packed = parts.iter().rev().fold(0, |packed, part| packed << 4 | part);
        let mut arguments = vec![x.argument(), Argument::Pointer(self.pointer)];
        arguments.extend(self.sizes());
        arguments.push(Argument::U32(packed));
        self.launch(device, "router_parts_split", arguments)
    }

    /// Sums the slots.
    fn sum(
        &self,
        device: &mut Device<'_>,
        bias: DevicePtr,
        out: &DeviceTensor,
        accumulate: bool,
    ) -> Result<Step, KernelError> {
        let mut arguments =
            vec![Argument::Pointer(self.pointer), Argument::Pointer(bias), out.argument()];
        arguments.extend(self.sizes());
        arguments.push(Argument::U32(accumulate.into()));
        self.launch(device, "router_parts_sum", arguments)
    }
}

/// A GEMM, with the library's scratch from `library` on.
fn gemm(
    device: &mut Device<'_>,
    library: DevicePtr,
    (a, a_transposed): (Matrix, bool),
    (b, b_transposed): (Matrix, bool),
    out: Matrix,
) -> Result<Step, KernelError> {
    device.matmul(&Matmul {
        a,
        a_transposed,
        b,
        b_transposed,
        out,
        added: None,
        bias: None,
        scales: None,
        workspace: align_for_library(library),
        workspace_bytes: LIBRARY_SCRATCH_BYTES,
    })
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::RouterLogits(op) = &call.call.op else {
        return Err(call.refuse("expected `router_logits`"));
    };
    let (x, w) = (call.input(0), call.input(1));
    let bias = if op.bias { call.input(2).pointer } else { DevicePtr(0) };
    let (tokens, experts, width) = (x.shape[0], w.shape[0], w.shape[1]);
    let layout = Layout::new([tokens, experts, width], false);
    let scratch = call.workspace().0;
    let at = |offset: usize| scratch.offset(offset);
    let of_w = Slots::below(at(layout.w), experts, width, PARTS);
    let made = Slots::beside(at(layout.made), tokens, experts, PARTS);
    Ok(vec![
        of_w.split(device, &w, &SLOTS_OF_W)?,
        gemm(
            device,
            at(layout.library),
            (matrix(&x), false),
            (of_w.matrix(DType::Bf16, 0, PARTS), true),
            made.matrix(DType::F32, 0, PARTS),
        )?,
        made.sum(device, bias, &call.output(0), false)?,
    ])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let [dlogits, x, w] = [0, 1, 2].map(|index| call.input(index));
    let [dx, dw] = [0, 1].map(|index| call.output(index));
    let (tokens, experts, width) = (x.shape[0], w.shape[0], w.shape[1]);
    let layout = Layout::new([tokens, experts, width], true);
    let scratch = call.workspace().0;
    let at = |offset: usize| scratch.offset(offset);
    let of_w = Slots::below(at(layout.w), experts, width, PARTS);
    let of_dlogits = Slots::beside(at(layout.dlogits), tokens, experts, SLOTS);
    let made = Slots::below(at(layout.made), experts, width, PARTS);
    let library = at(layout.library);
    Ok(vec![
        of_w.split(device, &w, &FACTORS_OF_DLOGITS)?,
        of_dlogits.split(device, &dlogits, &SLOTS_OF_DLOGITS)?,
        gemm(
            device,
            library,
            (of_dlogits.matrix(DType::Bf16, SLOTS - PARTS, PARTS), false),
            (of_w.matrix(DType::Bf16, 0, PARTS), false),
            matrix(&dx),
        )?,
        gemm(
            device,
            library,
            (of_dlogits.matrix(DType::Bf16, 0, PARTS), true),
            (matrix(&x), false),
            made.matrix(DType::F32, 0, PARTS),
        )?,
        made.sum(device, DevicePtr(0), &dw, call.accumulate())?,
    ])
}
