//! `sm90_attention_backward_wide.cu`: gradients of attention with wide heads on wgmma with five
//! GEMMs. A launch stores the gradients of scores, and the next launch sums dq from the stored
//! gradients.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{
    OperandHeads, Sizes, UNIT, documents_argument, is_extended, reject_sizes, scale_log2,
    window_argument,
};
use super::cuda_backward::sink_gradients;
use super::operand::backward;
use super::sm90_attention_backward::{
    COUNTERS, SHARED_BESIDE_TILES, STATISTICS, STATISTICS_THREADS, THREADS, TILE_ROWS, WAVE_ROWS,
    least_section, statistics_rows,
};
use super::sm90_attention_backward_stored::{
    Memory, STORED_BYTES_MAX, SUM_THREADS, numbers, statistics_bytes,
};
use super::stored_scores::Stored;
use super::tensor_map_launch::head_boxes;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

const FILE: &str = "sm90_attention_backward_wide";
/// Keys of a tile of `keys`, queries of its blocks, and keys of a stage of `queries`.
const ROWS: usize = 64;
/// Rows of statistics of a CTA.
const STATISTICS_ROWS: usize = 32;
/// Blocks of p in shared memory.
const WEIGHTS: usize = 2;
/// Most bytes of stored tiles of one key head: no other kernel takes heads of 256 elements.
const HEAD_BYTES_MAX: usize = 1 << 32;
/// Heads of at most this many elements have kernels of their own.
const NARROW: usize = 128;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_attention_backward_wide", &["attention_backward"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)
        .workspace_bytes(workspace_bytes)];

/// Sizes of `keys` and `queries` for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Largest number of elements of a key, and of a value.
    widths: [usize; 2],
    /// Of `keys`: number of stages in shared memory.
    stages: usize,
    /// Of `queries`: number of stages in shared memory.
    sum_stages: usize,
}

/// Kernels for narrower heads come first.
const SHAPES: [Shape; 3] = [
    Shape { widths: [192, 128], stages: 3, sum_stages: 5 },
    Shape { widths: [192, 192], stages: 3, sum_stages: 5 },
    Shape { widths: [256, 256], stages: 2, sum_stages: 4 },
];
/// Widest heads.
const WIDEST: usize = 256;

impl Shape {
    /// The first kernels that support the heads.
    fn of(heads: &AttentionHeads) -> Option<Shape> {
        let widths = [heads.head_dim, heads.value_dim()];
        let is_whole = |width: &usize| *width > 0 && width.is_multiple_of(UNIT);
        let is_taken = widths.iter().all(is_whole) && widths.iter().any(|&width| width > NARROW);
        let fits = |shape: &Shape| widths.iter().zip(shape.widths).all(|(of, most)| *of <= most);
        SHAPES.into_iter().find(|shape| is_taken && fits(shape))
    }

    /// Dynamic shared memory of `keys`: a tile of keys and values with room for dv and dk, stages
    /// of queries, dout and statistics, blocks of p.
    fn key_bytes(self) -> u32 {
        let [of_key, of_value] = self.widths.map(|width| ROWS * width * 2);
        let rows = 2 * of_key + self.stages * (of_key + of_value);
        let weights = WEIGHTS * ROWS * ROWS * size_of::<f32>();
        let statistics = self.stages * ROWS * STATISTICS * size_of::<f32>();
        (rows + weights + statistics + SHARED_BESIDE_TILES) as u32
    }

    /// Dynamic shared memory of `queries`: stages of score gradients and of keys.
    fn sum_bytes(self) -> u32 {
        let stage = TILE_ROWS * ROWS * 2 + ROWS * self.widths[0] * 2;
        (self.sum_stages * stage + SHARED_BESIDE_TILES) as u32
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionBackward(op) = request.op else {
        return Some("takes `attention_backward`".to_string());
    };
    let lse = &request.operands[backward::LSE].shape;
    let dq = request.input_count;
    all_bf16(request, &[0, 1, 2, 3, 4, dq, dq + 1, dq + 2])
        .or_else(|| reject_widths(&op.heads))
        .or_else(|| reject_sizes(&op.heads, lse))
        .or_else(|| reject_bytes(Stored::of(&op.heads, lse).head_bytes()))
}

fn reject_widths(heads: &AttentionHeads) -> Option<String> {
    Shape::of(heads).is_none().then(|| {
        format!(
            "takes keys or values of {} to {WIDEST} elements, each a multiple of {UNIT}, not of {} \
             and {}",
            NARROW + UNIT,
            heads.head_dim,
            heads.value_dim()
        )
    })
}

/// Reason for refusing long sequences.
fn reject_bytes(bytes: usize) -> Option<String> {
    (bytes > HEAD_BYTES_MAX).then(|| {
        format!(
            "stores at most {HEAD_BYTES_MAX} bytes of score gradients per key head, not {bytes}"
        )
    })
}

/// Share of the BF16 peak, assumed: between those of `sm90_attention_backward_stored` and of
/// `sm90_attention_backward` on an H200, until a GPU has timed this kernel.
const SHARE: f64 = 0.42;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let Op::AttentionBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let lse = &request.operands[backward::LSE].shape;
    let stored = Stored::of(&op.heads, lse);
    statistics_bytes(lse)
        + stored.heads_of_launch(target.workers, STORED_BYTES_MAX) * stored.head_bytes()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_backward`"));
    };
    let lse = call.input(backward::LSE);
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let Some(shape) = Shape::of(&op.heads) else {
        let (keys, values) = (op.heads.head_dim, op.heads.value_dim());
        return Err(call.refuse(format!("expected no heads of {keys} and {values}")));
    };
    let stored = Stored::of(&op.heads, &lse.shape);
    let (lse_log2, bytes) = call.workspace();
    let before = statistics_bytes(&lse.shape);
    // As many heads as the plan has memory for.
    let of_launch = bytes.saturating_sub(before) / stored.head_bytes();
    if of_launch == 0 {
        let expected = before + stored.head_bytes();
        return Err(call
            .refuse(format!("expected a workspace of {expected} bytes, got {bytes}; plan again")));
    }
    let delta = lse_log2.offset(statistics_rows(&lse.shape) * size_of::<f32>());
    let memory = Memory { lse_log2, delta, tiles: lse_log2.offset(before) };
    let wide = Wide { heads: &op.heads, shape, memory, band: stored.band };
    let mut steps = vec![wide.launch_rows(call, device)?];
    for first in (0..stored.key_heads).step_by(of_launch) {
        let heads = [first, of_launch.min(stored.key_heads - first)];
        steps.push(wide.launch_keys(call, device, heads)?);
        steps.push(wide.launch_queries(call, device, heads)?);
    }
    if op.heads.sinks {
        let padded = lse.shape[2].next_multiple_of(TILE_ROWS);
        steps.push(sink_gradients(call, device, delta, padded, 1)?);
    }
    Ok(steps)
}

/// What the launches of a call share.
struct Wide<'a> {
    heads: &'a AttentionHeads,
    shape: Shape,
    memory: Memory,
    /// See [`Stored::band`].
    band: usize,
}

impl Wide<'_> {
    /// The suffix of the names of kernels for windows and documents.
    fn ends(&self) -> &'static str {
        if is_extended(self.heads) { "_extended" } else { "" }
    }

    /// The window and the documents.
    fn seen(&self, call: &CallView<'_>, seq: usize) -> [Argument; 2] {
        [window_argument(self.heads, seq), documents_argument(call, self.heads, 6)]
    }

    /// lse in powers of two and delta of each row.
    fn launch_rows(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
    ) -> Result<Step, KernelError> {
        let [dout, out, lse] = [0, 4, backward::LSE].map(|index| call.input(index));
        let function = device.function(FILE, &format!("{FILE}_rows"), 0)?;
        let mut arguments = [&dout, &out, &lse].map(DeviceTensor::argument).to_vec();
        arguments.extend([self.memory.lse_log2, self.memory.delta].map(Argument::Pointer));
        let [.., of_out] = OperandHeads::of(self.heads);
        arguments.extend(numbers([lse.shape[2], of_out.of_token(), self.heads.value_dim()]));
        let ctas = (statistics_rows(&lse.shape) / STATISTICS_ROWS) as u32;
        Ok(Device::launch(function, ctas, STATISTICS_THREADS, 0, arguments))
    }

    /// dk, dv and score gradients of `heads`: the first key head and their number.
    fn launch_keys(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        heads: [usize; 2],
    ) -> Result<Step, KernelError> {
        let [dout, q, k, v, lse] = [0, 1, 2, 3, backward::LSE].map(|index| call.input(index));
        let [dk, dv] = [1, 2].map(|index| call.output(index));
        let sizes = Sizes::new(self.heads, &lse.shape);
        let of_values = Sizes { head_dim: self.heads.value_dim(), ..sizes };
        let [of_key, of_value] = self.shape.widths;
        let name = format!("{FILE}_keys_d{of_key}_{of_value}{}", self.ends());
        let shared = self.shape.key_bytes();
        let function = device.function(FILE, &name, shared)?;
        let mut arguments = Vec::with_capacity(23);
        let [of_q, of_k, of_v, of_out] = OperandHeads::of(self.heads);
        for (tensor, sizes, of_tensor) in [
            (&dout, &of_values, of_out),
            (&q, &sizes, of_q),
            (&k, &sizes, of_k),
            (&v, &of_values, of_v),
            (&dk, &sizes, of_k),
            (&dv, &of_values, of_v),
        ] {
            let map = device.tensor_map(&head_boxes(tensor, sizes, of_tensor, ROWS))?;
            arguments.push(Argument::TensorMap(map));
        }
        let Memory { lse_log2, delta, tiles } = &self.memory;
        arguments.extend([*lse_log2, *delta, *tiles].map(Argument::Pointer));
        arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
        arguments.extend(numbers([sizes.seq, sizes.heads, sizes.kv_heads, lse.shape[0]]));
        let (tiles, sms) = (sizes.seq.div_ceil(ROWS), device.sm_count() as usize);
        let [_, count] = heads;
        // The group's queries and dout are streamed.
        let streamed = 2 * (sizes.heads / sizes.kv_heads);
        let l2_bytes = device.driver.properties().l2_bytes;
        let section =
            sizes.section(count, streamed, l2_bytes).max(least_section(tiles, sms, count));
        arguments.extend(numbers(heads));
        // Sections of equal size: the longest tiles of a small last one would delay the end.
        arguments.extend(numbers([count.div_ceil(count.div_ceil(section)), self.band]));
        arguments.push(Argument::U32(self.heads.causal.into()));
        arguments.push(Argument::F32(self.heads.scale as f32));
        arguments.push(Argument::F32(scale_log2(self.heads)));
        arguments.extend(self.seen(call, sizes.seq));
        // Persistent CTAs loop over tiles.
        let ctas = (tiles * count).min(sms) as u32;
        Ok(Device::launch(function, ctas, THREADS, shared, arguments))
    }

    /// dq of the query heads of `heads`.
    fn launch_queries(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        heads: [usize; 2],
    ) -> Result<Step, KernelError> {
        let (k, lse, dq) = (call.input(2), call.input(backward::LSE), call.output(0));
        let sizes = Sizes::new(self.heads, &lse.shape);
        let name = format!("{FILE}_queries_d{}{}", self.shape.widths[0], self.ends());
        let shared = self.shape.sum_bytes();
        let function = device.function(FILE, &name, shared)?;
        let mut arguments = Vec::with_capacity(13);
        let [of_q, of_k, ..] = OperandHeads::of(self.heads);
        for (tensor, of_tensor, rows) in [(&k, of_k, ROWS), (&dq, of_q, WAVE_ROWS)] {
            let map = device.tensor_map(&head_boxes(tensor, &sizes, of_tensor, rows))?;
            arguments.push(Argument::TensorMap(map));
        }
        arguments.push(Argument::Pointer(self.memory.tiles));
        arguments.extend(numbers([sizes.seq, sizes.heads, sizes.kv_heads]));
        arguments.extend(numbers(heads));
        arguments.extend(numbers([self.band]));
        arguments.push(Argument::U32(self.heads.causal.into()));
        arguments.push(Argument::F32(self.heads.scale as f32));
        arguments.extend(self.seen(call, sizes.seq));
        let tiles = sizes.seq.div_ceil(TILE_ROWS) * heads[1] * (sizes.heads / sizes.kv_heads);
        Ok(Device::launch(function, tiles as u32, SUM_THREADS, shared, arguments))
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::AttentionBackward;
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    fn heads(head_dim: usize, value_dim: usize) -> AttentionHeads {
        AttentionHeads {
            heads: 16,
            kv_heads: 16,
            head_dim,
            value_dim: Some(value_dim),
            causal: true,
            scale: 0.1,
            ..AttentionHeads::default()
        }
    }

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_backward_wide.cu");
        for (head_dim, value_dim, widths, key_bytes, sum_bytes) in [
            (192, 128, [192, 128], 207_616, 206_080),
            (136, 8, [192, 128], 207_616, 206_080),
            (136, 136, [192, 192], 232_192, 206_080),
            (200, 200, [256, 256], 231_680, 197_888),
            (64, 200, [256, 256], 231_680, 197_888),
            (256, 256, [256, 256], 231_680, 197_888),
        ] {
            let shape = Shape::of(&heads(head_dim, value_dim)).unwrap();
            let got = (shape.widths, shape.key_bytes(), shape.sum_bytes());
            assert_eq!(got, (widths, key_bytes, sum_bytes), "{head_dim} {value_dim}");
            assert!(shape.key_bytes().max(shape.sum_bytes()) <= 227 << 10);
            let [of_key, of_value] = widths;
            for line in [
                format!("KEYS(d{of_key}_{of_value}, {of_key}, {of_value}, {})", shape.stages),
                format!("QUERIES(d{of_key}, {of_key}, {})", shape.sum_stages),
            ] {
                assert!(source.contains(&line), "{line}");
            }
        }
    }

    #[test]
    fn other_widths_are_refused_with_a_reason() {
        for (head_dim, value_dim) in
            [(128, 128), (128, 64), (264, 264), (192, 264), (188, 128), (192, 0), (192, 100)]
        {
            let expected = format!(
                "takes keys or values of 136 to 256 elements, each a multiple of 8, not of \
                 {head_dim} and {value_dim}"
            );
            assert_eq!(reject_widths(&heads(head_dim, value_dim)), Some(expected));
        }
    }

    #[test]
    fn it_is_taken_for_wide_heads() {
        let wide = Some("cuda_sm90_attention_backward_wide");
        for (head_dim, value_dim, seq, window, expected) in [
            (256, 256, 4096, None, wide),
            (192, 128, 4096, None, wide),
            (256, 256, 65536, Some(4096), wide),
            (256, 256, 65024, None, wide),
            (256, 256, 65536, None, None),
            (192, 128, 65536, None, Some("cuda_attention_backward")),
            (128, 128, 4096, None, Some("cuda_sm90_attention_backward_stored")),
        ] {
            let heads = AttentionHeads { window, ..heads(head_dim, value_dim) };
            let op = AttentionBackward { heads }.into();
            let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
            let bf16 = |width| of(DType::Bf16, &[seq, 16 * width]);
            let (key, value) = (bf16(head_dim), bf16(value_dim));
            let lse = of(DType::F32, &[1, 16, seq]);
            let operands =
                [&value, &key, &key, &value, &value, &lse, &key, &key, &value].map(Clone::clone);
            let request = KernelRequest { op: &op, operands: &operands, input_count: 6 };
            let target = cuda_target(Architecture::Sm90a, 132, &[]);
            let chosen = CudaCatalog.select(&request, &target).ok();
            let chosen = chosen.map(|selection| selection.choice.kernel);
            assert_eq!(chosen.as_deref(), expected, "{head_dim} {value_dim}, {seq} {window:?}");
        }
    }
}
