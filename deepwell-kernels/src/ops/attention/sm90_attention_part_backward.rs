//! `sm90_attention_part_backward.cu`: gradients of attention to a part of the keys, on wgmma.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::scale_log2;
use super::operand::backward;
use super::part_tokens::{PartTokens, other_op, reject_part};
use super::sm90_attention_backward::{
    COUNTERS, STATISTICS, STATISTICS_THREADS, Shape, THREADS, TILE_ROWS, least_section,
};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Elements of the widest heads.
pub(super) const WIDTH_MAX: usize = 128;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_sm90_attention_part_backward",
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
    all_bf16(request, &[0, 1, 2, 3, 4]).or_else(|| reject_part(&op.heads, lse, WIDTH_MAX))
}

/// Share of the peak on an H200: 0.33 to 0.47 for 4096 tokens and more
/// (`benchmarks/sm90_attention_part_2026-11-30.md`).
const SHARE: f64 = 0.36;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

/// Bytes of lse or delta of the queries that see keys, padded per sequence and head.
pub(super) fn statistic_bytes(tokens: &PartTokens) -> usize {
    tokens.sizes.batch_heads * tokens.queries().next_multiple_of(TILE_ROWS) * size_of::<f32>()
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let Op::AttentionPartBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let tokens = PartTokens::of(op.keys, &op.heads, &request.operands[backward::LSE].shape);
    statistic_bytes(&tokens) * STATISTICS
}

/// The launches that set gradients of hidden queries and keys to zeros.
pub(super) fn hide(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    tokens: &PartTokens,
) -> Result<Vec<Step>, KernelError> {
    let [dq, dk, dv] = [0, 1, 2].map(|index| call.output(index));
    let queries = tokens.hide_queries(device, &dq, None)?;
    let keys = tokens.hide_keys(device, [&dk, &dv])?;
    Ok(queries.into_iter().chain(keys).collect())
}

/// The launch that computes lse in powers of two and delta of the queries that see keys.
pub(super) fn launch_rows(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    tokens: &PartTokens,
    statistics: [DevicePtr; 2],
) -> Result<Step, KernelError> {
    let [dout, out, lse] = [0, 4, backward::LSE].map(|index| call.input(index));
    let sizes = tokens.sizes;
    let (lanes, rows_of_cta) = if sizes.head_dim <= 64 { ("d64", 64) } else { ("d128", 32) };
    let name = format!("sm90_attention_part_backward_rows_{lanes}");
    let function = device.function("sm90_attention_part_backward", &name, 0)?;
    let mut arguments: Vec<Argument> =
        [&dout, &out].map(|tensor| tokens.query_rows(tensor, 2)).into();
    arguments.push(tokens.lse_rows(&lse));
    arguments.extend(statistics.map(Argument::Pointer));
    arguments.extend(
        [tokens.queries(), sizes.seq, sizes.heads, sizes.head_dim]
            .map(|size| Argument::U32(size as u32)),
    );
    let rows = statistic_bytes(tokens) / size_of::<f32>();
    Ok(Device::launch(function, (rows / rows_of_cta) as u32, STATISTICS_THREADS, 0, arguments))
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
    let Some((shape, _)) = Shape::of(tokens.sizes.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", tokens.sizes.head_dim)));
    };
    let lse_log2 = call.workspace().0;
    let statistics = [lse_log2, lse_log2.offset(statistic_bytes(&tokens))];
    let scales = [op.heads.scale as f32, scale_log2(&op.heads)];
    steps.push(launch_rows(call, device, &tokens, statistics)?);
    for of in [Of::Keys, Of::Queries] {
        let part = Part { tokens: &tokens, shape, statistics, scales, of };
        steps.push(part.launch(call, device)?);
    }
    Ok(steps)
}

/// Whose gradients a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Keys,
    Queries,
}

/// A launch for the gradients of keys or of queries.
struct Part<'a> {
    tokens: &'a PartTokens,
    shape: Shape,
    statistics: [DevicePtr; 2],
    /// Scale of the scores, and the scale for exponentials in powers of two.
    scales: [f32; 2],
    of: Of,
}

impl Part<'_> {
    /// Suffix of the kernel, shared memory, rows of boxes of queries and of keys.
    fn kernel(&self) -> (String, u32, [usize; 2]) {
        let (width, of_keys, of_queries) =
            (self.shape.head_dim, self.shape.keys[0], self.shape.queries[0]);
        match self.of {
            Of::Keys => {
                let name = format!("keys_d{width}_{of_keys}");
                (name, self.shape.key_bytes(), [of_keys, TILE_ROWS])
            }
            Of::Queries => {
                let name = format!("queries_d{width}_{of_queries}");
                (name, self.shape.query_bytes(), [TILE_ROWS, of_queries])
            }
        }
    }

    /// Tiles, and heads of a section of scheduler/attention_order.cuh.
    fn work(&self, device: &Device<'_>) -> (usize, usize) {
        let tokens = self.tokens;
        let (sms, group) = (device.sm_count() as usize, tokens.group());
        let key_heads = tokens.sizes.key_heads();
        let l2_bytes = device.driver.properties().l2_bytes;
        match self.of {
            Of::Keys => {
                let tiles = tokens.keys.div_ceil(TILE_ROWS);
                // The group's queries and dout are streamed.
                let streamed = tokens.sizes_of(tokens.queries());
                let fit = streamed.section(key_heads, 2 * group, l2_bytes);
                (tiles * key_heads, fit.max(least_section(tiles, sms, key_heads)))
            }
            Of::Queries => {
                let tiles = tokens.queries().div_ceil(TILE_ROWS);
                // Sections of whole groups, whose heads share keys and values.
                let fit = tokens.sizes_of(tokens.keys).section(key_heads, 2, l2_bytes);
                let section = fit.max(least_section(tiles * group, sms, key_heads));
                (tiles * tokens.sizes.batch_heads, section * group)
            }
        }
    }

    fn launch(&self, call: &CallView<'_>, device: &mut Device<'_>) -> Result<Step, KernelError> {
        let tokens = self.tokens;
        let [dout, q, k, v] = [0, 1, 2, 3].map(|index| call.input(index));
        let [dq, dk, dv] = [0, 1, 2].map(|index| call.output(index));
        let (name, shared_bytes, [query_rows, key_rows]) = self.kernel();
        let name = format!("sm90_attention_part_backward_{name}");
        let function = device.function("sm90_attention_part_backward", &name, shared_bytes)?;
        let mut arguments = Vec::with_capacity(20);
        for map in [
            tokens.query_boxes(&dout, query_rows),
            tokens.query_boxes(&q, query_rows),
            tokens.key_boxes(&k, key_rows),
            tokens.key_boxes(&v, key_rows),
        ] {
            arguments.push(Argument::TensorMap(device.tensor_map(&map)?));
        }
        match self.of {
            Of::Keys => arguments.extend([dk.argument(), dv.argument()]),
            Of::Queries => arguments.push(tokens.query_rows(&dq, size_of::<f32>())),
        }
        arguments.extend(self.statistics.map(Argument::Pointer));
        arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
        arguments.extend(tokens.arguments());
        let (tiles, section) = self.work(device);
        arguments.extend([tokens.batch, section].map(|size| Argument::U32(size as u32)));
        arguments.push(Argument::U32(tokens.causal.into()));
        arguments.extend(self.scales.map(Argument::F32));
        // Persistent CTAs loop over tiles.
        let ctas = tiles.min(device.sm_count() as usize) as u32;
        Ok(Device::launch(function, ctas, THREADS, shared_bytes, arguments))
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{AttentionHeads, KeySource};

    use super::*;

    #[test]
    fn names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_part_backward.cu");
        for head_dim in [8, 64, 72, 128] {
            let (shape, _) = Shape::of(head_dim).unwrap();
            let width = shape.head_dim;
            for (of, [block, slots, stages]) in [("KEYS", shape.keys), ("QUERIES", shape.queries)] {
                let line = format!("{of}(d{width}_{block}, {width}, {block}, {slots}, {stages})");
                assert!(source.contains(&line), "{line}");
            }
        }
    }

    #[test]
    fn statistics_are_of_the_queries_that_take_part() {
        let heads = AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            causal: true,
            ..AttentionHeads::default()
        };
        for (source, seq, rows) in [
            (KeySource::Own, 258, 384),
            (KeySource::Earlier, 258, 384),
            (KeySource::Later, 258, 256),
            (KeySource::Later, 256, 128),
            (KeySource::Earlier, 1, 0),
        ] {
            let tokens = PartTokens::of(source, &heads, &[3, 4, seq]);
            assert_eq!(statistic_bytes(&tokens), 12 * rows * 4, "{source:?} {seq}");
        }
    }
}
