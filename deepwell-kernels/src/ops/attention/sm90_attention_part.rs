//! `sm90_attention_part.cu`: attention to the keys of one rank of a context-parallel group, on
//! wgmma.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::scale_log2;
use super::operand::forward;
use super::part_tokens::{PartTokens, other_op, reject_part};
use super::sm90_attention::Shape;
use super::tensor_map_launch::COUNTERS;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Elements of the widest heads.
const WIDTH_MAX: usize = 128;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_attention_part", &["attention_part"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionPart(op) = request.op else {
        return Some("takes `attention_part`".to_string());
    };
    let lse = &request.operands[request.input_count + forward::LSE].shape;
    all_bf16(request, &[0, 1, 2]).or_else(|| reject_part(&op.heads, lse, WIDTH_MAX))
}

/// Share of the BF16 peak on an H200 for 4096 tokens and more: 0.50 to 0.55 with heads of 64, 0.59
/// to 0.64 with heads of 128 (`benchmarks/sm90_attention_part_2026-11-30.md`).
const SHARE: f64 = 0.5;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionPart(op) = &call.call.op else {
        return Err(other_op(call, "attention_part"));
    };
    let (out, lse) = (call.output(0), call.output(forward::LSE));
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let tokens = PartTokens::of(op.keys, &op.heads, &lse.shape);
    let mut steps: Vec<Step> = tokens.hide_queries(device, &out, Some(&lse))?.into_iter().collect();
    if tokens.queries() > 0 {
        steps.push(launch(call, device, &tokens, scale_log2(&op.heads))?);
    }
    Ok(steps)
}

/// The launch for the queries that see keys.
fn launch(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    tokens: &PartTokens,
    scale_log2: f32,
) -> Result<Step, KernelError> {
    let [q, k, v] = [0, 1, 2].map(|index| call.input(index));
    let (out, lse) = (call.output(0), call.output(forward::LSE));
    let sizes = tokens.sizes_of(tokens.keys);
    let Some(shape) = Shape::of(sizes.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
    };
    let name = format!("sm90_attention_part_d{}", shape.head_dim);
    let function = device.function("sm90_attention_part", &name, shape.shared_bytes())?;
    let maps = [
        tokens.query_boxes(&q, shape.queries()),
        tokens.key_boxes(&k, shape.block_keys),
        tokens.key_boxes(&v, shape.block_keys),
    ];
    let mut arguments = Vec::with_capacity(16);
    for map in maps {
        arguments.push(Argument::TensorMap(device.tensor_map(&map)?));
    }
    arguments.push(tokens.query_rows(&out, size_of::<f32>()));
    arguments.push(tokens.lse_rows(&lse));
    arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
    arguments.extend(tokens.arguments());
    // Sections of whole groups, whose heads share keys and values.
    let l2_bytes = device.driver.properties().l2_bytes;
    let section = sizes.section(sizes.key_heads(), 2, l2_bytes) * tokens.group();
    arguments.extend([sizes.batch_heads, section].map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::U32(tokens.causal.into()));
    arguments.push(Argument::F32(scale_log2));
    let tiles = tokens.queries().div_ceil(shape.queries()) * sizes.batch_heads;
    // Persistent CTAs loop over tiles.
    let ctas = tiles.min(device.sm_count() as usize) as u32;
    Ok(Device::launch(function, ctas, shape.threads(), shape.shared_bytes(), arguments))
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{AttentionHeads, AttentionPart, KeySource};
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_part.cu");
        for (head_dim, line) in [
            (8, "SM90_ATTENTION_PART(d64, 64, 3, 128, 2)"),
            (96, "SM90_ATTENTION_PART(d96, 96, 2, 128, 2)"),
            (WIDTH_MAX, "SM90_ATTENTION_PART(d128, 128, 2, 128, 2)"),
        ] {
            let Shape { head_dim, consumers, block_keys, slots } = Shape::of(head_dim).unwrap();
            let of_shape = format!(
                "SM90_ATTENTION_PART(d{head_dim}, {head_dim}, {consumers}, {block_keys}, {slots})"
            );
            assert_eq!(of_shape, line);
            assert!(source.contains(line), "{line}");
        }
    }

    #[test]
    fn it_is_taken_on_hopper() {
        for (architecture, head_dim, expected) in [
            (Architecture::Sm90a, 64, "cuda_sm90_attention_part"),
            (Architecture::Sm90a, 128, "cuda_sm90_attention_part"),
            (Architecture::Sm100a, 128, "cuda_attention_part"),
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
                let op = AttentionPart { heads, keys, places: None }.into();
                let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
                let query = of(DType::Bf16, &[4096, 4 * head_dim]);
                let key = of(DType::Bf16, &[4096, 2 * head_dim]);
                let out = of(DType::F32, &[4096, 4 * head_dim]);
                let lse = of(DType::F32, &[2, 4, 2048]);
                let operands = [&query, &key, &key, &out, &lse].map(Clone::clone);
                let request = KernelRequest { op: &op, operands: &operands, input_count: 3 };
                let target = cuda_target(architecture, 132, &[]);
                let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
                assert_eq!(chosen, expected, "{head_dim} {keys:?} {architecture:?}");
            }
        }
    }
}
