//! `sm90_attention_part_backward_stored.cu`: gradients of attention to a part of the keys, on wgmma
//! with five GEMMs, as `sm90_attention_backward_stored.rs`.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::scale_log2;
use super::operand::backward;
use super::part_tokens::{PartTokens, other_op, reject_part};
use super::sm90_attention_backward::{COUNTERS, STATISTICS, THREADS, TILE_ROWS, least_section};
use super::sm90_attention_backward_stored::{
    BLOCK, Memory, PART_BYTES, STORED_BYTES_MAX, SUM_THREADS, Shape, numbers, reject_bytes,
    reject_width,
};
use super::sm90_attention_part_backward::{WIDTH_MAX, hide, launch_rows, statistic_bytes};
use super::stored_scores::Stored;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_sm90_attention_part_backward_stored",
    &["attention_part_backward"],
    prepare,
)
.architectures(&[Architecture::Sm90a])
.reject(reject)
.predict(predict)
.workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionPartBackward(op) = request.op else {
        return Some("takes `attention_part_backward`".to_string());
    };
    let lse = &request.operands[backward::LSE].shape;
    let stored_bytes = || Stored::of_part(&PartTokens::of(op.keys, &op.heads, lse)).head_bytes();
    all_bf16(request, &[0, 1, 2, 3, 4])
        .or_else(|| reject_part(&op.heads, lse, WIDTH_MAX))
        .or_else(|| reject_width(op.heads.head_dim))
        .or_else(|| reject_bytes(stored_bytes()))
}

/// Share of the peak on an H200: 0.50 to 0.53 with heads of 128
/// (`benchmarks/sm90_attention_part_2026-11-30.md`).
const SHARE: f64 = 0.5;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

/// Bytes of a workspace before the stored tiles.
fn statistics_bytes(tokens: &PartTokens) -> usize {
    (statistic_bytes(tokens) * STATISTICS).next_multiple_of(PART_BYTES)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let Op::AttentionPartBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let tokens = PartTokens::of(op.keys, &op.heads, &request.operands[backward::LSE].shape);
    let stored = Stored::of_part(&tokens);
    statistics_bytes(&tokens)
        + stored.heads_of_launch(target.workers, STORED_BYTES_MAX) * stored.head_bytes()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionPartBackward(op) = &call.call.op else {
        return Err(other_op(call, "attention_part_backward"));
    };
    let lse = call.input(backward::LSE);
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let tokens = PartTokens::of(op.keys, &op.heads, &lse.shape);
    let mut steps = hide(call, device, &tokens)?;
    if tokens.queries() == 0 {
        return Ok(steps);
    }
    let Some(shape) = Shape::of(tokens.sizes.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", tokens.sizes.head_dim)));
    };
    let stored = Stored::of_part(&tokens);
    let (lse_log2, bytes) = call.workspace();
    let before = statistics_bytes(&tokens);
    // As many heads as the plan has memory for.
    let of_launch = bytes.saturating_sub(before) / stored.head_bytes();
    if of_launch == 0 {
        let expected = before + stored.head_bytes();
        return Err(call
            .refuse(format!("expected a workspace of {expected} bytes, got {bytes}; plan again")));
    }
    let delta = lse_log2.offset(statistic_bytes(&tokens));
    let memory = Memory { lse_log2, delta, tiles: lse_log2.offset(before) };
    steps.push(launch_rows(call, device, &tokens, [lse_log2, delta])?);
    let scales = [op.heads.scale as f32, scale_log2(&op.heads)];
    for first in (0..stored.key_heads).step_by(of_launch) {
        let heads = [first, of_launch.min(stored.key_heads - first)];
        let part = Part { tokens: &tokens, shape, memory: &memory, scales, heads };
        steps.push(part.launch_keys(call, device)?);
        steps.push(part.launch_queries(call, device)?);
    }
    Ok(steps)
}

/// A pair of launches.
struct Part<'a> {
    tokens: &'a PartTokens,
    shape: Shape,
    memory: &'a Memory,
    /// Scale of the scores, and the scale for exponentials in powers of two.
    scales: [f32; 2],
    /// The first key head, and their number.
    heads: [usize; 2],
}

impl Part<'_> {
    /// dk, dv and score gradients.
    fn launch_keys(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
    ) -> Result<Step, KernelError> {
        let (tokens, memory) = (self.tokens, self.memory);
        let [dout, q, k, v] = [0, 1, 2, 3].map(|index| call.input(index));
        let shared_bytes = self.shape.key_bytes();
        let name = format!("sm90_attention_part_backward_stored_keys_d{}", self.shape.head_dim);
        let function =
            device.function("sm90_attention_part_backward_stored", &name, shared_bytes)?;
        let mut arguments = Vec::with_capacity(24);
        for map in [
            tokens.query_boxes(&dout, BLOCK),
            tokens.query_boxes(&q, BLOCK),
            tokens.key_boxes(&k, TILE_ROWS),
            tokens.key_boxes(&v, TILE_ROWS),
        ] {
            arguments.push(Argument::TensorMap(device.tensor_map(&map)?));
        }
        arguments.extend([1, 2].map(|index| call.output(index).argument()));
        arguments.extend([memory.lse_log2, memory.delta, memory.tiles].map(Argument::Pointer));
        arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
        arguments.extend(tokens.arguments());
        let (tiles, sms) = (tokens.keys.div_ceil(TILE_ROWS), device.sm_count() as usize);
        let [first, count] = self.heads;
        let l2_bytes = device.driver.properties().l2_bytes;
        // The group's queries and dout are streamed.
        let streamed = tokens.sizes_of(tokens.queries());
        let section = streamed
            .section(count, 2 * tokens.group(), l2_bytes)
            .max(least_section(tiles, sms, count));
        // Sections of equal size: the longest tiles of a small last one would delay the end.
        let section = count.div_ceil(count.div_ceil(section));
        arguments.extend(numbers([tokens.batch, first, count, section]));
        arguments.push(Argument::U32(tokens.causal.into()));
        arguments.extend(self.scales.map(Argument::F32));
        // Persistent CTAs loop over tiles.
        let ctas = (tiles * count).min(sms) as u32;
        Ok(Device::launch(function, ctas, THREADS, shared_bytes, arguments))
    }

    /// dq of the query heads.
    fn launch_queries(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
    ) -> Result<Step, KernelError> {
        let tokens = self.tokens;
        let (k, dq) = (call.input(2), call.output(0));
        let shared_bytes = self.shape.sum_bytes();
        let name = format!("sm90_attention_part_backward_stored_queries_d{}", self.shape.head_dim);
        let function =
            device.function("sm90_attention_part_backward_stored", &name, shared_bytes)?;
        let map = device.tensor_map(&tokens.key_boxes(&k, BLOCK))?;
        let mut arguments = vec![Argument::TensorMap(map)];
        arguments.push(tokens.query_rows(&dq, size_of::<f32>()));
        arguments.push(Argument::Pointer(self.memory.tiles));
        arguments.extend(tokens.arguments());
        arguments.extend(numbers(self.heads));
        arguments.push(Argument::U32(tokens.causal.into()));
        arguments.push(Argument::F32(self.scales[0]));
        let tiles = tokens.queries().div_ceil(TILE_ROWS) * self.heads[1] * tokens.group();
        Ok(Device::launch(function, tiles as u32, SUM_THREADS, shared_bytes, arguments))
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{AttentionHeads, AttentionPartBackward, KeySource};
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_part_backward_stored.cu");
        for head_dim in [72, 128] {
            let shape = Shape::of(head_dim).unwrap();
            let (width, [slots, stages]) = (shape.head_dim, shape.keys);
            for line in [
                format!("KEYS(d{width}, {width}, {BLOCK}, {slots}, {stages})"),
                format!("QUERIES(d{width}, {width}, {})", shape.sum_stages),
            ] {
                assert!(source.contains(&line), "{line}");
            }
        }
    }

    #[test]
    fn it_is_taken_for_wide_heads() {
        let (split, stored) =
            ("cuda_sm90_attention_part_backward", "cuda_sm90_attention_part_backward_stored");
        let portable = "cuda_attention_part_backward";
        for (architecture, head_dim, seq, expected) in [
            (Architecture::Sm90a, 64, 4096, split),
            (Architecture::Sm90a, 96, 4096, stored),
            (Architecture::Sm90a, 128, 4096, stored),
            (Architecture::Sm90a, 128, 65536, split),
            (Architecture::Sm100a, 128, 4096, portable),
        ] {
            for keys in [KeySource::Own, KeySource::Earlier, KeySource::Later] {
                let heads = AttentionHeads {
                    heads: 4,
                    kv_heads: 2,
                    head_dim,
                    scale: 0.1,
                    causal: true,
                    ..AttentionHeads::default()
                };
                let op = AttentionPartBackward { heads, keys, places: None }.into();
                let of =
                    |dtype, heads: usize| OperandType { dtype, shape: vec![seq, heads * head_dim] };
                let [query, key] = [4, 2].map(|heads| of(DType::Bf16, heads));
                let [dq, dk] = [4, 2].map(|heads| of(DType::F32, heads));
                let lse = OperandType { dtype: DType::F32, shape: vec![1, 4, seq] };
                let operands = [&query, &query, &key, &key, &query, &lse, &dq, &dk, &dk];
                let operands = operands.map(Clone::clone);
                let request = KernelRequest { op: &op, operands: &operands, input_count: 6 };
                let target = cuda_target(architecture, 132, &[]);
                let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
                assert_eq!(chosen, expected, "{head_dim} {seq} {keys:?} {architecture:?}");
            }
        }
    }
}
