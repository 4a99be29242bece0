//! `attention_part.cu` and `attention_part_backward.cu`: attention to the keys of one rank of a
//! context-parallel group, and its gradients.

use deepwell_ir::ops::{AttentionHeads, KeySource};
use deepwell_ir::{KernelRequest, Op};

use super::cuda::{self, Width, extended_elements, reject_heads};
use super::cuda_backward;
use super::operand::backward;
use super::part_tokens::seen_tokens;
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_attention_part", &["attention_part"], prepare)
        .reject(reject)
        .predict(cuda::predict),
    CudaKernelSpec::new(
        "cuda_attention_part_backward",
        &["attention_part_backward"],
        prepare_backward,
    )
    .reject(reject_backward)
    .predict(cuda_backward::predict)
    .workspace_bytes(cuda_backward::workspace_bytes),
];

/// Tile width for heads, and the suffix of the kernels' names. Extended kernels also support heads
/// that are narrower than their tiles.
fn kernel_of(heads: &AttentionHeads) -> Option<(usize, String)> {
    match Width::of(heads.head_dim).filter(|_| heads.extension().is_none()) {
        Some(width) if !width.padded => Some((width.elements, width.name())),
        _ => extended_elements(heads).map(|width| (width, format!("d{width}_extended"))),
    }
}

/// Kernel arguments of visibility: whether the mask is causal, the number of leading queries that
/// see nothing, and the number of keys that the others see.
fn seen(keys: KeySource, heads: &AttentionHeads, seq: usize) -> (bool, [Argument; 2]) {
    let (causal, first_query, seen) = seen_tokens(keys, heads, seq);
    (causal, [first_query, seen].map(|tokens| Argument::U32(tokens as u32)))
}

/// Refuses extensions other than values of another width.
fn reject_others(heads: &AttentionHeads) -> Option<String> {
    let but_values = AttentionHeads { value_dim: None, ..heads.clone() };
    let got = but_values.extension()?;
    Some(format!("takes attention without windows, sinks and documents, not {got}"))
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionPart(op) = request.op else {
        return Some("takes `attention_part`".to_string());
    };
    reject_others(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2]))
        .or_else(|| reject_heads(&op.heads, &request.operands[request.input_count + 1].shape))
}

fn reject_backward(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionPartBackward(op) = request.op else {
        return Some("takes `attention_part_backward`".to_string());
    };
    reject_others(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4]))
        .or_else(|| reject_heads(&op.heads, &request.operands[backward::LSE].shape))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionPart(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_part`"));
    };
    let (causal, seen) = seen(op.keys, &op.heads, call.output(1).shape[2]);
    let mut last = vec![Argument::U32(op.heads.value_dim() as u32)];
    last.extend(seen);
    let kernel = ("attention_part", kernel_of(&op.heads));
    Ok(vec![cuda::launch(call, device, kernel, &op.heads, causal, last)?])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionPartBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_part_backward`"));
    };
    let (causal, seen) = seen(op.keys, &op.heads, call.input(backward::LSE).shape[2]);
    let mut last = vec![Argument::U32(op.heads.value_dim() as u32)];
    last.extend(seen);
    let kernel = ("attention_part_backward", kernel_of(&op.heads));
    Ok(vec![cuda_backward::launch(call, device, kernel, &op.heads, causal, last)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every head size has an existing kernel.
    #[test]
    fn narrow_heads_go_through_extended_kernels() {
        for (head_dim, value_dim, expected) in [
            (16, None, Some("d16")),
            (24, None, Some("d64_extended")),
            (64, None, Some("d64")),
            (96, None, Some("d128_extended")),
            (128, None, Some("d128")),
            (64, Some(128), Some("d128_extended")),
            (192, Some(128), Some("d192_extended")),
            (136, None, None),
            (60, None, None),
        ] {
            let heads = AttentionHeads { head_dim, value_dim, ..AttentionHeads::default() };
            let found = kernel_of(&heads).map(|(_, name)| name);
            assert_eq!(found.as_deref(), expected, "{head_dim} {value_dim:?}");
        }
    }

    /// The kernel arguments agree with the op for each query.
    #[test]
    fn queries_see_what_the_op_says() {
        for seq in [2, 6, 130] {
            for keys in [KeySource::Own, KeySource::Earlier, KeySource::Later] {
                let heads = AttentionHeads { causal: true, ..AttentionHeads::default() };
                let (causal, [Argument::U32(first_query), Argument::U32(keys_end)]) =
                    seen(keys, &heads, seq)
                else {
                    panic!("sizes");
                };
                for query in 0..seq {
                    let mask = if causal { query + 1 } else { seq };
                    let is_blind = query < first_query as usize;
                    let got = if is_blind { 0 } else { mask.min(keys_end as usize) };
                    assert_eq!(got, keys.seen(query, seq, true), "{keys:?} {query} of {seq}");
                }
            }
        }
    }
}
