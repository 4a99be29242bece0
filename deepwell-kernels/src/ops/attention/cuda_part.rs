//! `attention_part.cu` and `attention_part_backward.cu`: attention to the keys of one rank of a
//! context-parallel group, and its gradients.

use deepwell_ir::ops::{AttentionHeads, KeySource, PartPlaces, Zigzag};
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

/// Window argument without a window: more than all tokens of a sequence.
const NO_WINDOW: usize = 1 << 30;

/// Kernel arguments of visibility: whether the mask is causal, the number of leading queries that
/// see nothing, the number of keys that the others see, the tokens of a window, and the positions
/// of both chunks of queries and of keys.
fn seen(
    (keys, places): (KeySource, Option<PartPlaces>),
    heads: &AttentionHeads,
    seq: usize,
) -> (bool, [Argument; 7]) {
    let (causal, first_query, seen) = seen_tokens(keys, heads, seq);
    // Windows count only with places, which the op checks.
    let window = heads.window.filter(|_| places.is_some()).unwrap_or(NO_WINDOW).min(NO_WINDOW);
    let begins = |part: Zigzag| part.begins(seq);
    let [[query_low, query_high], [key_low, key_high]] =
        places.map_or([[0; 2]; 2], |at| [begins(at.queries), begins(at.key_tokens())]);
    let tokens = [first_query, seen, window, query_low, query_high, key_low, key_high];
    (causal, tokens.map(|tokens| Argument::U32(tokens as u32)))
}

/// Refuses several documents, and positions beyond the window argument without a window.
fn reject_mask(heads: &AttentionHeads, places: Option<PartPlaces>, seq: usize) -> Option<String> {
    if heads.documents {
        return Some("takes joined documents, not several to a sequence".to_string());
    }
    let tokens = places.map_or(seq, |places| places.queries.ranks * seq);
    (tokens >= NO_WINDOW).then(|| format!("takes fewer than {NO_WINDOW} tokens, not {tokens}"))
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionPart(op) = request.op else {
        return Some("takes `attention_part`".to_string());
    };
    let lse = &request.operands[request.input_count + 1].shape;
    reject_mask(&op.heads, op.places, lse[2])
        .or_else(|| all_bf16(request, &[0, 1, 2]))
        .or_else(|| reject_heads(&op.heads, lse))
}

fn reject_backward(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionPartBackward(op) = request.op else {
        return Some("takes `attention_part_backward`".to_string());
    };
    let lse = &request.operands[backward::LSE].shape;
    reject_mask(&op.heads, op.places, lse[2])
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4]))
        .or_else(|| reject_heads(&op.heads, lse))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionPart(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_part`"));
    };
    let (causal, seen) = seen((op.keys, op.places), &op.heads, call.output(1).shape[2]);
    let mut last = vec![Argument::U32(op.heads.value_dim() as u32)];
    last.push(cuda::sinks_argument(call, &op.heads));
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
    let seq = call.input(backward::LSE).shape[2];
    let (causal, seen) = seen((op.keys, op.places), &op.heads, seq);
    let mut last = vec![Argument::U32(op.heads.value_dim() as u32)];
    last.extend(seen);
    let kernel = ("attention_part_backward", kernel_of(&op.heads));
    let mut steps = vec![cuda_backward::launch(call, device, kernel, &op.heads, causal, last)?];
    steps.extend(cuda_backward::sink_gradients_after(call, device, &op.heads)?);
    Ok(steps)
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
                let (causal, [Argument::U32(first_query), Argument::U32(keys_end), ..]) =
                    seen((keys, None), &heads, seq)
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
