//! `cross_entropy.cu` and the three GEMMs of an output head, by chunks of tokens: logits, then
//! losses and the logits' gradient, then the gradients of x and w.
//!
//! The GEMMs are cuBLASLt's or those of `cross_entropy_gemm.cu`.

use deepwell_ir::{DType, KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::architecture::CUBLASLT;
use crate::runtime::cuda::blas::{Matmul, Matrix};
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, LIBRARY_SCRATCH_BYTES, align_for_library, extents_fit, not_empty,
    tile_ctas,
};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{CUBLASLT_BF16, MMA_SYNC_BF16, Rates};

/// Threads of a CTA of `cross_entropy.cu`.
const THREADS: u32 = 512;
/// Logits that a CTA of `cross_entropy.cu` processes at a time.
const TILE_LOGITS: usize = 4096;
/// Tiles of a row that stay in shared memory: two CTAs fit an SM of Hopper, one fits the smallest
/// GPU.
const CACHED_TILES_MAX: usize = 6;
/// Threads of a CTA of `cross_entropy_gemm.cu`, and its shared memory.
const GEMM_THREADS: u32 = 128;
const GEMM_SHARED_BYTES: u32 = 3 * 2 * 16 * 1024;
/// Elements of a 16-byte access.
const WIDTH: usize = 8;

/// Tokens per chunk: enough for efficient GEMMs and for a cheap gradient of w, which is read and
/// written once per chunk.
const CHUNK_TOKENS_MAX: usize = 4096;
/// Largest number of bytes of a chunk's logits.
const LOGITS_BYTES_MAX: usize = 512 << 20;
/// Chunks are multiples of the rows of the GEMMs' tiles if possible.
const CHUNK_TOKENS_STEP: usize = 128;
/// Alignment of the losses in the workspace.
const ALIGNMENT: usize = 256;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new(
        "cublaslt_linear_cross_entropy",
        &["linear_cross_entropy", "linear_cross_entropy_grad"],
        |call, device| prepare(call, device, Gemms::Library),
    )
    .library(CUBLASLT)
    .reject(reject)
    .predict(|request, target| Rates::of(target).roofline_s(request, CUBLASLT_BF16))
    .workspace_bytes(|request, _| layout_of(request).with_library),
    CudaKernelSpec::new(
        "cuda_linear_cross_entropy",
        &["linear_cross_entropy", "linear_cross_entropy_grad"],
        |call, device| prepare(call, device, Gemms::Own),
    )
    .reject(reject)
    .predict(|request, target| Rates::of(target).roofline_s(request, MMA_SYNC_BF16))
    .workspace_bytes(workspace_bytes_of_own),
];

fn workspace_bytes_of_own(request: &KernelRequest<'_>, _: &Target) -> usize {
    layout_of(request).without_library
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let activations: &[usize] = match request.op {
        Op::LinearCrossEntropyGrad(_) => &[0, 1, 5],
        _ => &[0, 1],
    };
    all_bf16(request, activations)
        .or_else(|| not_empty(request, &[1]))
        .or_else(|| extents_fit(request, &[0, 1]))
}

/// The source of the GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gemms {
    Library,
    Own,
}

/// Chunks of tokens, and the layout of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Tokens of every chunk except the last.
    pub(crate) chunk_tokens: usize,
    /// Elements between rows of logits.
    pub(crate) leading: usize,
    /// Offset of the losses of all tokens, after the logits of a chunk.
    pub(crate) losses_offset: usize,
    /// Offset of the library's scratch, and the length without this scratch.
    pub(crate) without_library: usize,
    /// Length including the library's scratch.
    pub(crate) with_library: usize,
}

impl Layout {
    pub(crate) fn new(tokens: usize, vocab: usize) -> Layout {
        let leading = vocab.next_multiple_of(WIDTH);
        let row_bytes = leading * size_of::<f32>();
        let mut largest = (LOGITS_BYTES_MAX / row_bytes.max(1)).clamp(1, CHUNK_TOKENS_MAX);
        let step = if largest < CHUNK_TOKENS_STEP { 1 } else { CHUNK_TOKENS_STEP };
        largest -= largest % step;
        let chunks = tokens.div_ceil(largest).max(1);
        let even = tokens.div_ceil(chunks).next_multiple_of(step);
        let chunk_tokens = even.min(largest).min(tokens);
        let losses_offset = (chunk_tokens * row_bytes).next_multiple_of(ALIGNMENT);
        let losses_bytes = tokens * size_of::<f32>();
        let without_library = (losses_offset + losses_bytes).next_multiple_of(ALIGNMENT);
        let with_library = without_library + LIBRARY_SCRATCH_BYTES + LIBRARY_ALIGNMENT_BYTES;
        Layout { chunk_tokens, leading, losses_offset, without_library, with_library }
    }
}

pub(crate) fn layout_of(request: &KernelRequest<'_>) -> Layout {
    Layout::new(request.operands[0].shape[0], request.operands[1].shape[0])
}

/// The GEMMs of a head, chunk by chunk.
pub(crate) struct HeadGemms {
    pub(crate) gemms: Gemms,
    pub(crate) layout: Layout,
    pub(crate) workspace: DevicePtr,
    pub(crate) x: DeviceTensor,
    pub(crate) w: DeviceTensor,
}

/// The call's operands, and the execution of its chunks.
struct Head {
    of: HeadGemms,
    targets: DeviceTensor,
    loss_scale: DeviceTensor,
    loss: DeviceTensor,
    gradients: Option<(DeviceTensor, DeviceTensor)>,
    accumulate: bool,
    arrival_counter: DevicePtr,
}

/// Tokens `first .. first + rows`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) first: usize,
    pub(crate) rows: usize,
}

impl HeadGemms {
    fn hidden(&self) -> usize {
        self.x.shape[1]
    }

    pub(crate) fn vocab(&self) -> usize {
        self.w.shape[0]
    }

    pub(crate) fn tokens(&self) -> usize {
        self.x.shape[0]
    }

    /// Rows of a chunk of a BF16 tensor `[tokens, hidden]`.
    fn rows_of(&self, tensor: &DeviceTensor, chunk: Chunk) -> Matrix {
        let hidden = self.hidden();
        let before = DeviceTensor { shape: vec![chunk.first, hidden], ..tensor.clone() };
        let pointer = tensor.pointer.offset(before.bytes());
        let Chunk { rows, .. } = chunk;
        Matrix { pointer, dtype: tensor.dtype, rows, columns: hidden, leading: hidden }
    }

    /// A tensor `[vocab, hidden]`.
    fn by_vocab(&self, tensor: &DeviceTensor) -> Matrix {
        let (rows, columns) = (self.vocab(), self.hidden());
        Matrix { pointer: tensor.pointer, dtype: tensor.dtype, rows, columns, leading: columns }
    }

    fn logits(&self, chunk: Chunk) -> Matrix {
        Matrix {
            pointer: self.workspace,
            dtype: DType::F32,
            rows: chunk.rows,
            columns: self.vocab(),
            leading: self.layout.leading,
        }
    }

    /// The logits' gradient, in the first half of each row of the logits.
    fn dlogits(&self, chunk: Chunk) -> Matrix {
        Matrix { dtype: DType::Bf16, leading: 2 * self.layout.leading, ..self.logits(chunk) }
    }

    fn library_gemm(
        &self,
        device: &mut Device<'_>,
        (a, a_transposed): (Matrix, bool),
        (b, b_transposed): (Matrix, bool),
        out: Matrix,
        accumulate: bool,
    ) -> Result<Step, KernelError> {
        device.matmul(&Matmul {
            a,
            a_transposed,
            b,
            b_transposed,
            out,
            added: accumulate.then_some(out.pointer),
            bias: None,
            scales: None,
            workspace: align_for_library(self.workspace.offset(self.layout.without_library)),
            workspace_bytes: LIBRARY_SCRATCH_BYTES,
        })
    }

    /// Launches a kernel of `cross_entropy_gemm.cu`: `name` or its scalar variant.
    fn own_gemm(
        &self,
        device: &mut Device<'_>,
        name: &str,
        (a, b): (Matrix, Matrix),
        out: Matrix,
        chunk: Chunk,
        last: Option<Argument>,
    ) -> Result<Step, KernelError> {
        let is_vector = self.hidden().is_multiple_of(WIDTH);
        let name = if is_vector { name.to_string() } else { format!("{name}_scalar") };
        let function = device.function("cross_entropy_gemm", &name, GEMM_SHARED_BYTES)?;
        let mut arguments: Vec<_> =
            [a, b, out].iter().map(|matrix| Argument::Pointer(matrix.pointer)).collect();
        let sizes = [chunk.rows, self.vocab(), self.layout.leading, self.hidden()];
        arguments.extend(sizes.map(|size| Argument::I32(size as i32)));
        arguments.extend(last);
        // The padding of the logits is written, too.
        let columns = if out.dtype == DType::F32 { out.leading } else { out.columns };
        let ctas = tile_ctas(out.rows, columns);
        Ok(Device::launch(function, ctas, GEMM_THREADS, GEMM_SHARED_BYTES, arguments))
    }

    /// All chunks of the tokens.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Chunk> + use<> {
        let (tokens, most) = (self.tokens(), self.layout.chunk_tokens);
        let firsts = (0..tokens).step_by(most.max(1));
        firsts.map(move |first| Chunk { first, rows: most.min(tokens - first) })
    }

    pub(crate) fn logits_step(
        &self,
        device: &mut Device<'_>,
        chunk: Chunk,
    ) -> Result<Step, KernelError> {
        let x = self.rows_of(&self.x, chunk);
        let w = self.by_vocab(&self.w);
        let out = self.logits(chunk);
        match self.gemms {
            Gemms::Library => self.library_gemm(device, (x, false), (w, true), out, false),
            Gemms::Own => self.own_gemm(device, "cross_entropy_logits", (x, w), out, chunk, None),
        }
    }

    /// The gradients of x and w. The gradient of w is accumulated in all chunks after the first, or
    /// in all.
    pub(crate) fn gradient_steps(
        &self,
        device: &mut Device<'_>,
        chunk: Chunk,
        (dx, dw): (&DeviceTensor, &DeviceTensor),
        accumulate: bool,
    ) -> Result<[Step; 2], KernelError> {
        let dlogits = self.dlogits(chunk);
        let (x, w) = (self.rows_of(&self.x, chunk), self.by_vocab(&self.w));
        let (dx, dw) = (self.rows_of(dx, chunk), self.by_vocab(dw));
        let accumulate = accumulate || chunk.first > 0;
        match self.gemms {
            Gemms::Library => Ok([
                self.library_gemm(device, (dlogits, false), (w, false), dx, false)?,
                self.library_gemm(device, (dlogits, true), (x, false), dw, accumulate)?,
            ]),
            Gemms::Own => {
                let name = "cross_entropy_dgrad";
                let first = self.own_gemm(device, name, (dlogits, w), dx, chunk, None)?;
                let name = "cross_entropy_wgrad";
                let last = Some(Argument::U32(accumulate.into()));
                let second = self.own_gemm(device, name, (dlogits, x), dw, chunk, last)?;
                Ok([first, second])
            }
        }
    }
}

impl Head {
    /// Losses and the logits' gradient; the launch of the last chunk also sums the losses.
    fn loss_step(&self, device: &mut Device<'_>, chunk: Chunk) -> Result<Step, KernelError> {
        let with_gradient = self.gradients.is_some();
        let entry = if with_gradient { "cross_entropy_gradient" } else { "cross_entropy_loss" };
        let tiles = self.of.vocab().div_ceil(TILE_LOGITS);
        let cached_tiles = if with_gradient { tiles.min(CACHED_TILES_MAX) } else { 0 };
        let shared_bytes = (cached_tiles * TILE_LOGITS * size_of::<f32>()) as u32;
        let function = device.function("cross_entropy", entry, shared_bytes)?;
        let losses = self.of.workspace.offset(self.of.layout.losses_offset);
        let is_last = chunk.first + chunk.rows == self.of.tokens();
        let loss = if is_last { self.loss.pointer } else { DevicePtr(0) };
        let arguments = vec![
            Argument::Pointer(self.of.workspace),
            Argument::Pointer(self.targets.pointer.offset(chunk.first * size_of::<i32>())),
            self.loss_scale.argument(),
            Argument::Pointer(losses.offset(chunk.first * size_of::<f32>())),
            Argument::U32(chunk.rows as u32),
            Argument::U32(self.of.vocab() as u32),
            Argument::U64(self.of.layout.leading as u64),
            Argument::U32(cached_tiles as u32),
            Argument::Pointer(losses),
            Argument::U64(self.of.tokens() as u64),
            Argument::Pointer(loss),
            Argument::U32(self.accumulate.into()),
            Argument::Pointer(self.arrival_counter),
        ];
        let ctas = chunk.rows.max(1) as u32;
        Ok(Device::launch(function, ctas, THREADS, shared_bytes, arguments))
    }
}

fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    gemms: Gemms,
) -> Result<Vec<Step>, KernelError> {
    let (x, w) = (call.input(0), call.input(1));
    let gradients = match &call.call.op {
        Op::LinearCrossEntropyGrad(_) => Some((call.output(1), call.output(2))),
        _ => None,
    };
    let layout = Layout::new(x.shape[0], w.shape[0]);
    let head = Head {
        of: HeadGemms { gemms, layout, workspace: call.workspace().0, x, w },
        targets: call.input(2),
        loss_scale: call.input(3),
        loss: call.output(0),
        gradients,
        accumulate: call.accumulate(),
        arrival_counter: device.arrival_counters(1)?,
    };
    let mut steps = Vec::new();
    if head.of.tokens() == 0 {
        steps.push(head.loss_step(device, Chunk { first: 0, rows: 0 })?);
        if let (Some((_, dw)), false) = (&head.gradients, head.accumulate) {
            let bytes = dw.bytes();
            steps.push(Step::Fill { target: dw.pointer, byte: 0, bytes });
        }
    }
    for chunk in head.of.chunks() {
        steps.push(head.of.logits_step(device, chunk)?);
        steps.push(head.loss_step(device, chunk)?);
        if let Some((dx, dw)) = &head.gradients {
            steps.extend(head.of.gradient_steps(device, chunk, (dx, dw), head.accumulate)?);
        }
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_even_and_their_logits_bounded() {
        // Tokens, vocabulary, tokens per chunk, elements per row.
        for (tokens, vocab, chunk_tokens, leading) in [
            (16_384, 32_000, 4096, 32_000),
            (16_384, 32_768, 4096, 32_768),
            (16_384, 50_257, 2432, 50_264),
            (16_384, 128_256, 1024, 128_256),
            (5000, 256, 2560, 256),
            (4097, 8, 2176, 8),
            (300, 7, 300, 8),
            (1, 1, 1, 8),
            (0, 5, 0, 8),
            (10, 4 << 20, 10, 4 << 20),
            (100, 4 << 20, 25, 4 << 20),
        ] {
            let layout = Layout::new(tokens, vocab);
            assert_eq!((layout.chunk_tokens, layout.leading), (chunk_tokens, leading), "{vocab}");
            let logits_bytes = layout.chunk_tokens * layout.leading * 4;
            assert!(logits_bytes <= LOGITS_BYTES_MAX);
            assert!(layout.losses_offset >= logits_bytes);
            assert!(layout.without_library >= layout.losses_offset + tokens * 4);
            assert!(layout.with_library >= layout.without_library + LIBRARY_SCRATCH_BYTES);
        }
    }
}
