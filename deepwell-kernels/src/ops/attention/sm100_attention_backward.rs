//! `sm100_attention_backward.cu`: gradients of attention on tcgen05 with five GEMMs. A launch
//! stores the gradients of scores, and the next launch sums dq from the stored gradients.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{
    OperandHeads, Sizes, UNIT, documents_argument, reject_sizes, reject_values, scale_log2,
    window_argument,
};
use super::cuda_backward::sink_gradients;
use super::operand::backward;
use super::stored_scores::{Stored, TILE_BYTES, TILE_ROWS};
use super::tensor_map_launch::{BOX_ELEMENTS, head_boxes};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

const FILE: &str = "sm100_attention_backward";
/// Threads of a CTA of `rows`, of `keys` and of `queries`, as in the source.
const STATISTICS_THREADS: u32 = 256;
const KEY_THREADS: u32 = 384;
const SUM_THREADS: u32 = 320;
/// Rows of results that a warp stores.
const RESULT_ROWS: usize = 32;
/// Keys of a stage of `queries`.
const STAGE_KEYS: usize = 64;
/// Tiles of queries of a CTA of `queries`.
const QUERY_TILES: usize = 2;
/// FP32 statistics per row: lse and delta.
const STATISTICS: usize = 2;
/// Stages of statistics in shared memory.
const STATISTICS_STAGES: usize = 2;
/// Alignment of the parts of a workspace in bytes.
const PART_BYTES: usize = 256;
/// Most bytes of stored tiles of a pair of launches for several key heads, 0.7 % of a B200's
/// memory. If all heads have more, each pair of launches is for some of the heads.
const LAUNCH_BYTES_MAX: usize = 5 << 28;
/// Most bytes of stored tiles of a key head, 2 % of a B200's memory.
const HEAD_BYTES_MAX: usize = 1 << 32;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_attention_backward", &["attention_backward"], prepare)
        .architectures(&[Architecture::Sm100a, Architecture::Sm103a])
        .reject(reject)
        .predict(predict)
        .workspace_bytes(workspace_bytes)];

/// Sizes of the kernels for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Largest number of elements of a head.
    head_dim: usize,
    /// Of `keys`: stages of queries and of dout in shared memory.
    key_stages: [usize; 2],
    /// Of `queries`: stages in shared memory.
    sum_stages: usize,
}

/// Kernels for narrower heads come first.
const SHAPES: [Shape; 3] = [
    Shape { head_dim: 64, key_stages: [4, 4], sum_stages: 5 },
    Shape { head_dim: 96, key_stages: [3, 2], sum_stages: 4 },
    Shape { head_dim: 128, key_stages: [3, 2], sum_stages: 4 },
];

impl Shape {
    /// The first kernels that support heads of `head_dim` elements.
    fn of(head_dim: usize) -> Option<Shape> {
        SHAPES.into_iter().find(|shape| head_dim <= shape.head_dim)
    }

    fn row_bytes(self) -> usize {
        self.head_dim.next_multiple_of(BOX_ELEMENTS) * 2
    }

    /// Dynamic shared memory of `keys`: keys, values, stages of queries, dout and statistics, and
    /// barriers.
    fn key_bytes(self) -> u32 {
        let [queries, dout] = self.key_stages;
        let rows = (2 + queries + dout) * TILE_ROWS;
        let statistics = STATISTICS_STAGES * STATISTICS * TILE_ROWS * size_of::<f32>();
        let barriers = 2 + 2 * (queries + dout + STATISTICS_STAGES) + 8;
        (rows * self.row_bytes() + statistics + barriers * 8 + 8) as u32
    }

    /// Dynamic shared memory of `queries`: stages of score gradients and of keys, and barriers.
    fn sum_bytes(self) -> u32 {
        let scores = QUERY_TILES * TILE_BYTES * STAGE_KEYS / TILE_ROWS;
        let stage = scores + STAGE_KEYS * self.row_bytes();
        (self.sum_stages * stage + (2 * self.sum_stages + 1) * 8 + 8) as u32
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionBackward(op) = request.op else {
        return Some("takes `attention_backward`".to_string());
    };
    let dq = request.input_count;
    let lse = &request.operands[backward::LSE].shape;
    reject_values(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4, dq, dq + 1, dq + 2]))
        .or_else(|| reject_width(op.heads.head_dim))
        .or_else(|| reject_sizes(&op.heads, lse))
        .or_else(|| reject_bytes(Stored::of(&op.heads, lse).head_bytes()))
}

fn reject_width(head_dim: usize) -> Option<String> {
    let is_whole = head_dim > 0 && head_dim.is_multiple_of(UNIT);
    let most = SHAPES[SHAPES.len() - 1].head_dim;
    (!is_whole || head_dim > most).then(|| {
        format!("takes heads of {UNIT} to {most} elements, a multiple of {UNIT}, not of {head_dim}")
    })
}

/// Reason for refusing long sequences.
fn reject_bytes(bytes: usize) -> Option<String> {
    (bytes > HEAD_BYTES_MAX).then(|| {
        let most = HEAD_BYTES_MAX;
        format!("stores at most {most} bytes of score gradients, not {bytes} per key head")
    })
}

/// Share of the BF16 peak. Not measured, for want of such a GPU.
const SHARE: f64 = 0.4;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

/// Rows of statistics, padded per sequence and head.
fn statistics_rows(lse: &[usize]) -> usize {
    let [batch, heads, seq] = [0, 1, 2].map(|axis| lse[axis]);
    batch * heads * seq.next_multiple_of(TILE_ROWS)
}

/// Bytes of a workspace before the stored tiles: lse in powers of two and delta of each row.
fn statistics_bytes(lse: &[usize]) -> usize {
    (statistics_rows(lse) * STATISTICS * size_of::<f32>()).next_multiple_of(PART_BYTES)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let Op::AttentionBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let lse = &request.operands[backward::LSE].shape;
    let stored = Stored::of(&op.heads, lse);
    statistics_bytes(lse)
        + stored.heads_of_launch(target.workers, LAUNCH_BYTES_MAX) * stored.head_bytes()
}

/// A call, its sizes, and the parts of its workspace.
struct Backward<'a, 'b> {
    call: &'a CallView<'b>,
    heads: &'a AttentionHeads,
    sizes: Sizes,
    shape: Shape,
    stored: Stored,
    lse_log2: DevicePtr,
    delta: DevicePtr,
    tiles: DevicePtr,
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_backward`"));
    };
    let lse = call.input(backward::LSE);
    let sizes = Sizes::new(&op.heads, &lse.shape);
    let padded = sizes.seq.next_multiple_of(TILE_ROWS);
    let (lse_log2, bytes) = call.workspace();
    let delta = lse_log2.offset(statistics_rows(&lse.shape) * size_of::<f32>());
    let mut steps = Vec::new();
    if lse.elements() > 0 {
        let Some(shape) = Shape::of(sizes.head_dim) else {
            return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
        };
        let stored = Stored::of(&op.heads, &lse.shape);
        let before = statistics_bytes(&lse.shape);
        // As many heads as the plan has memory for.
        let of_launch = bytes.saturating_sub(before) / stored.head_bytes();
        if of_launch == 0 {
            let expected = before + stored.head_bytes();
            return Err(call.refuse(format!(
                "expected a workspace of {expected} bytes, got {bytes}; plan again"
            )));
        }
        let tiles = lse_log2.offset(before);
        let heads = &op.heads;
        let backward = Backward { call, heads, sizes, shape, stored, lse_log2, delta, tiles };
        steps.push(backward.launch_rows(device)?);
        for first in (0..stored.key_heads).step_by(of_launch) {
            let key_heads = [first, of_launch.min(stored.key_heads - first)];
            steps.push(backward.launch_keys(device, key_heads)?);
            steps.push(backward.launch_queries(device, key_heads)?);
        }
    }
    if op.heads.sinks && op.heads.heads > 0 {
        steps.push(sink_gradients(call, device, delta, padded, 1)?);
    }
    Ok(steps)
}

impl Backward<'_, '_> {
    /// The launch that computes lse in powers of two and delta of each row.
    fn launch_rows(&self, device: &mut Device<'_>) -> Result<Step, KernelError> {
        let [dout, out, lse] = [0, 4, backward::LSE].map(|index| self.call.input(index));
        let sizes = &self.sizes;
        let (lanes, rows_of_cta) = if sizes.head_dim <= 64 { ("d64", 64) } else { ("d128", 32) };
        let function = device.function(FILE, &format!("{FILE}_rows_{lanes}"), 0)?;
        let mut arguments = [&dout, &out, &lse].map(DeviceTensor::argument).to_vec();
        arguments.extend([self.lse_log2, self.delta].map(Argument::Pointer));
        let [.., of_out] = OperandHeads::of(self.heads);
        arguments.extend(
            [sizes.seq, of_out.of_token(), sizes.head_dim].map(|size| Argument::U32(size as u32)),
        );
        let ctas = (statistics_rows(&lse.shape) / rows_of_cta) as u32;
        Ok(Device::launch(function, ctas, STATISTICS_THREADS, 0, arguments))
    }

    /// The name of a kernel.
    fn name(&self, of: &str) -> String {
        let ends = if self.heads.extension().is_some() { "_extended" } else { "" };
        format!("{FILE}_{of}_d{}{ends}", self.shape.head_dim)
    }

    /// dk, dv and score gradients of key heads: the first, and their number.
    fn launch_keys(
        &self,
        device: &mut Device<'_>,
        key_heads: [usize; 2],
    ) -> Result<Step, KernelError> {
        let shared = self.shape.key_bytes();
        let function = device.function(FILE, &self.name("keys"), shared)?;
        let [dout, q, k, v] = [0, 1, 2, 3].map(|index| self.call.input(index));
        let [dk, dv] = [1, 2].map(|index| self.call.output(index));
        let mut arguments = Vec::with_capacity(22);
        let [of_q, of_k, of_v, of_out] = OperandHeads::of(self.heads);
        for (tensor, of_tensor, rows) in [
            (&dout, of_out, TILE_ROWS),
            (&q, of_q, TILE_ROWS),
            (&k, of_k, TILE_ROWS),
            (&v, of_v, TILE_ROWS),
            (&dk, of_k, RESULT_ROWS),
            (&dv, of_v, RESULT_ROWS),
        ] {
            let map = device.tensor_map(&head_boxes(tensor, &self.sizes, of_tensor, rows))?;
            arguments.push(Argument::TensorMap(map));
        }
        arguments.extend([self.lse_log2, self.delta].map(Argument::Pointer));
        // The group's queries and dout are streamed.
        arguments.extend(self.last_arguments(device, key_heads, 2 * self.stored.group));
        let ctas = (self.stored.tiles * key_heads[1]) as u32;
        Ok(Device::launch(function, ctas, KEY_THREADS, shared, arguments))
    }

    /// dq of the query heads of key heads.
    fn launch_queries(
        &self,
        device: &mut Device<'_>,
        key_heads: [usize; 2],
    ) -> Result<Step, KernelError> {
        let shared = self.shape.sum_bytes();
        let function = device.function(FILE, &self.name("queries"), shared)?;
        let (k, dq) = (self.call.input(2), self.call.output(0));
        let mut arguments = Vec::with_capacity(16);
        let [of_q, of_k, ..] = OperandHeads::of(self.heads);
        for (tensor, of_tensor, rows) in [(&k, of_k, STAGE_KEYS), (&dq, of_q, RESULT_ROWS)] {
            let map = device.tensor_map(&head_boxes(tensor, &self.sizes, of_tensor, rows))?;
            arguments.push(Argument::TensorMap(map));
        }
        arguments.extend(self.last_arguments(device, key_heads, 1));
        let pairs = self.stored.tiles.div_ceil(QUERY_TILES);
        let ctas = (pairs * key_heads[1] * self.stored.group) as u32;
        Ok(Device::launch(function, ctas, SUM_THREADS, shared, arguments))
    }

    /// `Arguments` of the source; a key head streams `streamed` tensors of the width of a head.
    fn last_arguments(
        &self,
        device: &Device<'_>,
        [first, count]: [usize; 2],
        streamed: usize,
    ) -> Vec<Argument> {
        let sizes = &self.sizes;
        let section = sizes.section(count, streamed, device.driver.properties().l2_bytes);
        // Sections of equal size: the longest tiles of a small last one would delay the end.
        let section = count.div_ceil(count.div_ceil(section));
        let numbers = [sizes.seq, sizes.heads, sizes.kv_heads, first, count, section];
        let mut arguments = vec![Argument::Pointer(self.tiles)];
        arguments.extend(numbers.map(|number| Argument::U32(number as u32)));
        arguments.push(Argument::U32(self.stored.band as u32));
        arguments.push(Argument::U32(self.heads.causal.into()));
        arguments.push(Argument::F32(self.heads.scale as f32));
        arguments.push(Argument::F32(scale_log2(self.heads)));
        arguments.push(window_argument(self.heads, sizes.seq));
        arguments.push(documents_argument(self.call, self.heads, backward::LSE + 1));
        arguments
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::AttentionBackward;
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm100_attention_backward.cu");
        for (head_dim, width, key_bytes, sum_bytes) in [
            (8, 64, 166_136, 204_896),
            (64, 64, 166_136, 204_896),
            (72, 96, 231_624, 196_688),
            (128, 128, 231_624, 196_688),
        ] {
            let shape = Shape::of(head_dim).unwrap();
            let got = (shape.head_dim, shape.key_bytes(), shape.sum_bytes());
            assert_eq!(got, (width, key_bytes, sum_bytes), "{head_dim}");
            assert!(key_bytes.max(sum_bytes) <= 227 << 10);
            let [queries, dout] = shape.key_stages;
            for line in [
                format!("KEYS(d{width}, {width}, {queries}, {dout})"),
                format!("QUERIES(d{width}, {width}, {})", shape.sum_stages),
            ] {
                assert!(source.contains(&line), "{line}");
            }
        }
        assert_eq!(Shape::of(136), None);
    }

    fn plain(head_dim: usize) -> AttentionHeads {
        AttentionHeads {
            heads: 8,
            kv_heads: 4,
            head_dim,
            scale: 0.1,
            causal: true,
            ..AttentionHeads::default()
        }
    }

    /// Operands of a batch of two sequences.
    fn operands(heads: &AttentionHeads, seq: usize) -> (Vec<OperandType>, usize) {
        let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let rows = |count, width| of(DType::Bf16, &[2 * seq, count * width]);
        let (width, values) = (heads.head_dim, heads.value_dim());
        let [q, out] = [rows(heads.heads, width), rows(heads.heads, values)];
        let [k, v] = [rows(heads.kv_heads, width), rows(heads.kv_heads, values)];
        let lse = of(DType::F32, &[2, heads.heads, seq]);
        let mut all = vec![out.clone(), q.clone(), k.clone(), v.clone(), out, lse];
        if heads.sinks {
            all.push(of(DType::F32, &[heads.heads]));
        }
        if heads.documents {
            all.push(of(DType::I32, &[2 * seq, 2]));
        }
        let input_count = all.len();
        all.extend([q, k, v]);
        if heads.sinks {
            all.push(of(DType::F32, &[heads.heads]));
        }
        (all, input_count)
    }

    #[test]
    fn what_the_kernel_does_not_take_is_said() {
        let widths = "takes heads of 8 to 128 elements, a multiple of 8, not of";
        let values = AttentionHeads { value_dim: Some(64), ..plain(128) };
        for (heads, seq, expected) in [
            (plain(64), 512, None),
            (plain(100), 512, Some(format!("{widths} 100"))),
            (plain(136), 512, Some(format!("{widths} 136"))),
            (values, 512, Some("takes values as wide as keys, not 64 beside 128".to_string())),
            (plain(128), 46208, None),
            (
                plain(128),
                65536,
                Some(
                    "stores at most 4294967296 bytes of score gradients, not 8606711808 per key \
                     head"
                        .to_string(),
                ),
            ),
            (AttentionHeads { window: Some(4096), ..plain(128) }, 65536, None),
        ] {
            let (operands, input_count) = operands(&heads, seq);
            let op = AttentionBackward { heads: heads.clone() }.into();
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request), expected, "{heads:?} {seq}");
        }
    }

    #[test]
    fn it_is_taken_for_what_it_takes() {
        const OWN: &str = "cuda_sm100_attention_backward";
        const PORTABLE: &str = "cuda_attention_backward";
        for (heads, seq, expected) in [
            (plain(64), 512, OWN),
            (plain(96), 512, OWN),
            (plain(128), 8192, OWN),
            (AttentionHeads { causal: false, ..plain(128) }, 512, OWN),
            (AttentionHeads { window: Some(128), ..plain(128) }, 512, OWN),
            (AttentionHeads { sinks: true, ..plain(128) }, 512, OWN),
            (AttentionHeads { documents: true, ..plain(64) }, 512, OWN),
            (AttentionHeads { value_dim: Some(128), ..plain(192) }, 512, PORTABLE),
            (plain(128), 65536, PORTABLE),
        ] {
            for architecture in [Architecture::Sm100a, Architecture::Sm103a, Architecture::Sm120a] {
                let (operands, input_count) = operands(&heads, seq);
                let op = AttentionBackward { heads: heads.clone() }.into();
                let request = KernelRequest { op: &op, operands: &operands, input_count };
                let target = cuda_target(architecture, 148, &[]);
                let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
                let is_own = architecture != Architecture::Sm120a;
                let expected = if is_own { expected } else { PORTABLE };
                assert_eq!(chosen, expected, "{heads:?} {seq} on {architecture:?}");
            }
        }
    }
}
