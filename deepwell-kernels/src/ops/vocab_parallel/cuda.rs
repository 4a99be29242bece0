//! The vocabulary-parallel head of a rank: kernels of `cross_entropy.cu` and the GEMMs of an output
//! head, by chunks of tokens. The embedding is in `embedding.cu`.

use deepwell_ir::ops::{VocabParallelSums, VocabSlice};
use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::ops::linear_cross_entropy::cuda::{Chunk, Gemms, HeadGemms, Layout, layout_of};
use crate::runtime::cuda::architecture::CUBLASLT;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{extents_fit, not_empty};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{CUBLASLT_BF16, MMA_SYNC_BF16, Rates, roofline};

/// Threads of a CTA of `cross_entropy.cu`.
const THREADS: u32 = 512;

const OWN: CudaKernelSpec = CudaKernelSpec::new(
    "cuda_vocab_parallel_head",
    &["vocab_parallel_sums", "vocab_parallel_cross_entropy_grad"],
    |call, device| prepare(call, device, Gemms::Own),
)
.reject(reject)
.predict(|request, target| Rates::of(target).roofline_s(request, MMA_SYNC_BF16))
.workspace_bytes(|request, _| layout_of(request).without_library);

pub(super) const SPECS: &[CudaKernelSpec] = &[
    OWN.name("cublaslt_vocab_parallel_head")
        .prepare(|call, device| prepare(call, device, Gemms::Library))
        .library(CUBLASLT)
        .predict(|request, target| Rates::of(target).roofline_s(request, CUBLASLT_BF16))
        .workspace_bytes(|request, _| layout_of(request).with_library),
    OWN,
    OWN.name("cuda_vocab_parallel_loss")
        .ops(&["vocab_parallel_cross_entropy"])
        .prepare(prepare_loss)
        .predict(roofline)
        .workspace_bytes(losses_bytes),
];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let activations: &[usize] = match request.op {
        Op::VocabParallelCrossEntropyGrad(_) => &[0, 1, 6],
        _ => &[0, 1],
    };
    all_bf16(request, activations)
        .or_else(|| not_empty(request, &[0, 1]))
        .or_else(|| extents_fit(request, &[0, 1]))
}

/// One loss per token.
fn losses_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    request.operands[0].shape[0] * size_of::<f32>()
}

/// The losses of a call, computed from the sums of all ranks.
struct Losses {
    slice: VocabSlice,
    ranks: usize,
    targets: DeviceTensor,
    loss_scale: DeviceTensor,
    sums: DeviceTensor,
    loss: DeviceTensor,
    /// Buffer for the losses of all tokens.
    losses: DevicePtr,
    tokens: usize,
    accumulate: bool,
    arrival_counter: DevicePtr,
}

impl Losses {
    fn of(
        call: &CallView<'_>,
        device: &mut Device<'_>,
        losses: DevicePtr,
    ) -> Result<Losses, KernelError> {
        let (slice, ranks) = match &call.call.op {
            Op::VocabParallelCrossEntropy(op) => (op.slice, op.ranks),
            Op::VocabParallelCrossEntropyGrad(op) => (op.slice, op.ranks),
            _ => return Err(call.refuse("it has no loss")),
        };
        Ok(Losses {
            slice,
            ranks,
            targets: call.input(2),
            loss_scale: call.input(3),
            sums: call.input(4),
            loss: call.output(0),
            losses,
            tokens: call.input(2).elements(),
            accumulate: call.accumulate(),
            arrival_counter: device.arrival_counters(1)?,
        })
    }

    /// Computes the losses of a chunk and, if `logits` are given with their row length, the logits'
    /// gradient; the launch of the last chunk also sums the losses.
    fn step(
        &self,
        device: &mut Device<'_>,
        chunk: Chunk,
        logits: Option<(DevicePtr, usize)>,
    ) -> Result<Step, KernelError> {
        let entry = match logits {
            Some(_) => "vocab_parallel_gradient",
            None => "vocab_parallel_loss",
        };
        let (logits, leading) = logits.unwrap_or((DevicePtr(0), 0));
        let function = device.function("cross_entropy", entry, 0)?;
        let is_last = chunk.first + chunk.rows == self.tokens;
        let loss = if is_last { self.loss.pointer } else { DevicePtr(0) };
        let arguments = vec![
            Argument::Pointer(logits),
            Argument::Pointer(self.targets.pointer.offset(chunk.first * size_of::<i32>())),
            self.loss_scale.argument(),
            Argument::Pointer(self.losses.offset(chunk.first * size_of::<f32>())),
            Argument::U32(chunk.rows as u32),
            Argument::U32(self.slice.rows as u32),
            Argument::U64(leading as u64),
            Argument::Pointer(self.losses),
            Argument::U64(self.tokens as u64),
            Argument::Pointer(loss),
            Argument::U32(self.accumulate.into()),
            Argument::Pointer(self.arrival_counter),
            self.sums.argument(),
            Argument::U32(self.ranks as u32),
            Argument::U32(self.slice.first as u32),
            Argument::U32(self.slice.vocab as u32),
            Argument::U64(chunk.first as u64),
        ];
        Ok(Device::launch(function, chunk.rows as u32, THREADS, 0, arguments))
    }
}

fn prepare_loss(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let losses = Losses::of(call, device, call.workspace().0)?;
    let all = Chunk { first: 0, rows: losses.tokens };
    Ok(vec![losses.step(device, all, None)?])
}

fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    gemms: Gemms,
) -> Result<Vec<Step>, KernelError> {
    let x = call.input(0);
    let w = call.input(1);
    let workspace = call.workspace().0;
    let layout = Layout::new(x.shape[0], w.shape[0]);
    let head = HeadGemms { gemms, layout, workspace, x, w };
    let mut steps = Vec::new();
    if let Op::VocabParallelSums(op) = &call.call.op {
        for chunk in head.chunks() {
            steps.push(head.logits_step(device, chunk)?);
            steps.push(sums_step(call, device, &head, op.slice, chunk)?);
        }
        return Ok(steps);
    }
    let losses = Losses::of(call, device, workspace.offset(layout.losses_offset))?;
    let (dx, dw) = (call.output(1), call.output(2));
    for chunk in head.chunks() {
        steps.push(head.logits_step(device, chunk)?);
        steps.push(losses.step(device, chunk, Some((workspace, layout.leading)))?);
        steps.extend(head.gradient_steps(device, chunk, (&dx, &dw), losses.accumulate)?);
    }
    Ok(steps)
}

/// Computes a rank's values per token of a chunk.
fn sums_step(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    head: &HeadGemms,
    slice: VocabSlice,
    chunk: Chunk,
) -> Result<Step, KernelError> {
    let function = device.function("cross_entropy", "vocab_parallel_sums", 0)?;
    let before = chunk.first * VocabParallelSums::COUNT * size_of::<f32>();
    let arguments = vec![
        Argument::Pointer(head.workspace),
        Argument::Pointer(call.input(2).pointer.offset(chunk.first * size_of::<i32>())),
        Argument::Pointer(call.output(0).pointer.offset(before)),
        Argument::U32(slice.rows as u32),
        Argument::U64(head.layout.leading as u64),
        Argument::U32(slice.first as u32),
    ];
    Ok(Device::launch(function, chunk.rows as u32, THREADS, 0, arguments))
}
