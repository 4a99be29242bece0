//! GEMM of block-quantized operands.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::cpu::calls::gemm_output::{self, Bias, Target};
use crate::cpu::calls::{Operands, Run};
use crate::cpu::gemm::{Operand, Tier, gemm};

/// `[M,K]·[N,K]ᵀ` of quantized data and scales.
pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::MxGemm(op) = op else { return Err(operands.unknown_kernel()) };
    let tier = operands.tier()?;
    let (a, a_scales) = (operands.input::<u8>(0)?, operands.input::<u8>(1)?);
    let (b, b_scales) = (operands.input::<u8>(2)?, operands.input::<u8>(3)?);
    let target_index = operands.output(0);
    let target = Target::new(operands, target_index)?;
    let workspace = operands.workspace::<u8>()?;
    let (m, k, n) = (operands.shape(0)[0], operands.shape(0)[1], operands.shape(2)[0]);
    let bias = if op.bias { Some(Bias::new(operands, 4, &target)?) } else { None };
    Ok(Box::new(move |arena| {
        let a = Operand::rows_mx(a.of(arena), a_scales.of(arena), k);
        let b = Operand::rows_mx(b.of(arena), b_scales.of(arena), k);
        gemm(tier, m, n, k, a, b, target.output(arena), workspace.of(arena))
            .map_err(|error| error.to_string())?;
        if let Some(bias) = &bias {
            bias.add(&target, arena);
        }
        Ok(())
    }))
}

/// Scratch of the GEMM.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, tier: Tier, _: usize) -> usize {
    let (a, b) = (&request.operands[0].shape, &request.operands[2].shape);
    gemm_output::workspace_bytes(request, [0, 2], [a[0], b[0], a[1]], tier)
}
