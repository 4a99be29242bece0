//! Attention.

use deepwell_ir::ops::AttentionHeads;

use super::{KernelError, Operands, Run, by_float};
use crate::ops::attention::cpu::{AttentionShape, attention_backward_on, attention_forward_on};

/// The kernel's shape of a call.
pub(crate) fn attention_shape(heads: &AttentionHeads, batch: usize, seq: usize) -> AttentionShape {
    AttentionShape {
        batch,
        seq,
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        scale: heads.scale as f32,
        causal: heads.causal,
    }
}

pub(super) fn forward(operands: &Operands<'_>, heads: &AttentionHeads) -> Result<Run, KernelError> {
    let shape = attention_shape(heads, operands.program.batch, operands.program.seq);
    let (tier, workspace) = (operands.tier()?, operands.workspace::<u8>()?);
    by_float!(operands, 0, E => {
        let (q, k, v) =
            (operands.input::<E>(0)?, operands.input::<E>(1)?, operands.input::<E>(2)?);
        let (out, lse) = (operands.target::<E>(3)?, operands.target::<f32>(4)?);
        Ok(Box::new(move |arena| {
            attention_forward_on(
                tier,
                &shape,
                q.of(arena),
                k.of(arena),
                v.of(arena),
                out.of(arena),
                lse.of(arena),
                workspace.of(arena),
            )
            .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn backward(
    operands: &Operands<'_>,
    heads: &AttentionHeads,
) -> Result<Run, KernelError> {
    let shape = attention_shape(heads, operands.program.batch, operands.program.seq);
    let (tier, workspace) = (operands.tier()?, operands.workspace::<u8>()?);
    by_float!(operands, 0, E => {
        let (dout, q) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (k, v) = (operands.input::<E>(2)?, operands.input::<E>(3)?);
        let (out, lse) = (operands.input::<E>(4)?, operands.input::<f32>(5)?);
        let (dq, dk) = (operands.target::<E>(6)?, operands.target::<E>(7)?);
        let dv = operands.target::<E>(8)?;
        Ok(Box::new(move |arena| {
            attention_backward_on(
                tier,
                &shape,
                dout.of(arena),
                q.of(arena),
                k.of(arena),
                v.of(arena),
                out.of(arena),
                lse.of(arena),
                dq.of(arena),
                dk.of(arena),
                dv.of(arena),
                workspace.of(arena),
            )
            .map_err(|error| error.to_string())
        }))
    })
}
