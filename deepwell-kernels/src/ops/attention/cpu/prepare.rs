//! Prepares calls of a program as calls of the kernels.

use deepwell_ir::ops::{AttentionHeads, KeySource, PartPlaces};
use deepwell_ir::{DType, KernelRequest, Op};
use half::bf16;

use super::super::operand::backward;
use super::{
    attention_backward_on, attention_forward_on, attention_shape, backward_workspace_bytes,
    forward_workspace_bytes, merge_attention, sink_gradients,
};
use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, Stored, by_float};

/// An element type that operands may be stored in.
trait Number: Element + Stored {}

impl<T: Element + Stored> Number for T {}

/// Origin and place of keys.
type Keys = (KeySource, Option<PartPlaces>);

/// Returns the heads of a forward op, the origin of its keys, and whether the op is an attention
/// part.
fn forward_of(op: &Op) -> Option<(&AttentionHeads, Keys, bool)> {
    match op {
        Op::Attention(op) => Some((&op.heads, (KeySource::Own, None), false)),
        Op::AttentionPart(op) => Some((&op.heads, (op.keys, op.places), true)),
        _ => None,
    }
}

/// [`forward_of`] for backward ops.
fn backward_of(op: &Op) -> Option<(&AttentionHeads, Keys, bool)> {
    match op {
        Op::AttentionBackward(op) => Some((&op.heads, (KeySource::Own, None), false)),
        Op::AttentionPartBackward(op) => Some((&op.heads, (op.keys, op.places), true)),
        _ => None,
    }
}

pub(in super::super) fn prepare_forward(
    operands: &Operands<'_>,
    op: &Op,
) -> Result<Run, KernelError> {
    let Some((_, _, is_part)) = forward_of(op) else { return Err(operands.unknown_kernel()) };
    by_float!(operands, 0, E => {
        match is_part {
            true => forward::<E, f32>(operands, op),
            false => forward::<E, E>(operands, op),
        }
    })
}

fn forward<E: Number, O: Number>(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Some((heads, keys, _)) = forward_of(op) else { return Err(operands.unknown_kernel()) };
    let shape = attention_shape(heads, keys, (operands.program.batch, operands.program.seq));
    let (tier, workspace) = (operands.tier()?, operands.workspace::<u8>()?);
    let q = operands.input::<E>(0)?;
    let k = operands.input::<E>(1)?;
    let v = operands.input::<E>(2)?;
    let sinks = heads.sinks.then(|| operands.input::<f32>(3)).transpose()?;
    let documents = heads.documents_at(3).map(|at| operands.input::<i32>(at)).transpose()?;
    let inputs = operands.input_count;
    let out = operands.target::<O>(inputs)?;
    let lse = operands.target::<f32>(inputs + 1)?;
    Ok(Box::new(move |arena| {
        attention_forward_on(
            tier,
            &shape,
            q.of(arena),
            k.of(arena),
            v.of(arena),
            sinks.as_ref().map(|sinks| sinks.of(arena)),
            documents.as_ref().map(|documents| documents.of(arena)),
            out.of(arena),
            lse.of(arena),
            workspace.of(arena),
        )
        .map_err(|error| error.to_string())
    }))
}

pub(in super::super) fn prepare_backward(
    operands: &Operands<'_>,
    op: &Op,
) -> Result<Run, KernelError> {
    let Some((_, _, is_part)) = backward_of(op) else { return Err(operands.unknown_kernel()) };
    by_float!(operands, 0, E => {
        match is_part {
            true => backward::<E, f32>(operands, op),
            false => backward::<E, E>(operands, op),
        }
    })
}

fn backward<E: Number, O: Number>(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Some((heads, keys, _)) = backward_of(op) else { return Err(operands.unknown_kernel()) };
    let shape = attention_shape(heads, keys, (operands.program.batch, operands.program.seq));
    let (tier, workspace) = (operands.tier()?, operands.workspace::<u8>()?);
    let (dout, q) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
    let (k, v) = (operands.input::<E>(2)?, operands.input::<E>(3)?);
    let (out, lse) = (operands.input::<E>(4)?, operands.input::<f32>(5)?);
    let sinks = heads.sinks.then(|| operands.input::<f32>(6)).transpose()?;
    let documents = heads.documents_at(6).map(|at| operands.input::<i32>(at)).transpose()?;
    let first = operands.input_count;
    let dq = operands.target::<O>(first)?;
    let dk = operands.target::<O>(first + 1)?;
    let dv = operands.target::<O>(first + 2)?;
    let dsinks = heads.sinks.then(|| operands.target::<f32>(first + 3)).transpose()?;
    let accumulate = operands.adds();
    Ok(Box::new(move |arena| {
        if let (Some(sinks), Some(dsinks)) = (&sinks, &dsinks) {
            let dout = dout.of(arena);
            let out = out.of(arena);
            let lse = lse.of(arena);
            let (sinks, dsinks) = (sinks.of(arena), dsinks.of(arena));
            sink_gradients(&shape, dout, out, lse, sinks, accumulate, dsinks)
                .map_err(|error| error.to_string())?;
        }
        attention_backward_on(
            tier,
            &shape,
            dout.of(arena),
            q.of(arena),
            k.of(arena),
            v.of(arena),
            out.of(arena),
            lse.of(arena),
            documents.as_ref().map(|documents| documents.of(arena)),
            dq.of(arena),
            dk.of(arena),
            dv.of(arena),
            workspace.of(arena),
        )
        .map_err(|error| error.to_string())
    }))
}

pub(in super::super) fn prepare_merge(
    operands: &Operands<'_>,
    op: &Op,
) -> Result<Run, KernelError> {
    let Op::MergeAttention(op) = op else { return Err(operands.unknown_kernel()) };
    let (heads, seq, inputs) = (op.heads, operands.program.seq, operands.input_count);
    let parts = (0..inputs)
        .step_by(2)
        .map(|at| Ok((operands.input::<f32>(at)?, operands.input::<f32>(at + 1)?)));
    let parts: Vec<_> = parts.collect::<Result<_, KernelError>>()?;
    by_float!(operands, inputs, E => {
        let out = operands.target::<E>(inputs)?;
        let lse = operands.target::<f32>(inputs + 1)?;
        Ok(Box::new(move |arena| {
            let parts: Vec<(&[f32], &[f32])> =
                parts.iter().map(|(out, lse)| (out.of(arena), lse.of(arena))).collect();
            merge_attention(&parts, (heads, seq), out.of(arena), lse.of(arena));
            Ok(())
        }))
    })
}

pub(in super::super) fn forward_workspace(
    request: &KernelRequest<'_>,
    _: Tier,
    threads: usize,
) -> usize {
    let Some((heads, keys, _)) = forward_of(request.op) else { return 0 };
    let lse = &request.operands[request.input_count + 1].shape;
    let shape = attention_shape(heads, keys, (lse[0], lse[2]));
    match request.operands[0].dtype {
        DType::Bf16 => forward_workspace_bytes::<bf16>(&shape, threads),
        _ => forward_workspace_bytes::<f32>(&shape, threads),
    }
}

pub(in super::super) fn backward_workspace(
    request: &KernelRequest<'_>,
    _: Tier,
    threads: usize,
) -> usize {
    let Some((heads, keys, _)) = backward_of(request.op) else { return 0 };
    let lse = &request.operands[backward::LSE].shape;
    let shape = attention_shape(heads, keys, (lse[0], lse[2]));
    match request.operands[0].dtype {
        DType::Bf16 => backward_workspace_bytes::<bf16>(&shape, threads),
        _ => backward_workspace_bytes::<f32>(&shape, threads),
    }
}
