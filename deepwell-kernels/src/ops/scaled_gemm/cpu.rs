//! GEMM of block-quantized operands.

use deepwell_ir::{KernelRequest, Op, Storage};
use deepwell_precision::{ElementFormat, QuantFormat};

use super::nvfp4;
use super::operand;
use crate::KernelError;
use crate::runtime::cpu::arena::{Arena, In};
use crate::runtime::cpu::gemm::{Operand, Output, Tier, gemm};
use crate::runtime::cpu::gemm_output::{self, Bias, GemmTarget};
use crate::runtime::cpu::operands::{Operands, Run};

/// Planes of an operand.
struct PlanesIn {
    data: In<u8>,
    scales: In<u8>,
    tensor_scale: Option<In<f32>>,
    element: ElementFormat,
    k: usize,
}

impl PlanesIn {
    /// The planes whose operands start at `first`.
    fn new(
        operands: &Operands<'_>,
        format: &QuantFormat,
        first: usize,
    ) -> Result<PlanesIn, KernelError> {
        let tensor_scale = match Storage::plane_count(format) {
            3 => Some(operands.input(first + 2)?),
            _ => None,
        };
        let data = operands.input(first)?;
        let scales = operands.input(first + 1)?;
        let (element, k) = (format.element, operands.shape(first)[1]);
        Ok(PlanesIn { data, scales, tensor_scale, element, k })
    }
}

/// Runs the GEMM of the operands' format.
fn multiply(
    tier: Tier,
    [m, n]: [usize; 2],
    [a, b]: [&PlanesIn; 2],
    arena: &Arena,
    out: Output<'_>,
    workspace: &mut [u8],
) -> Result<(), String> {
    if let (Some(a_scale), Some(b_scale)) = (&a.tensor_scale, &b.tensor_scale) {
        let planes = |operand: &PlanesIn, scale: &In<f32>| {
            let (data, scales) = (operand.data.of(arena), operand.scales.of(arena));
            nvfp4::Planes::whole(data, scales, scale.of(arena)[0], operand.k)
        };
        let (a, b) = (planes(a, a_scale), planes(b, b_scale));
        return nvfp4::scaled_gemm(tier, [m, n], a, b, out, workspace)
            .map_err(|error| error.to_string());
    }
    let mx = |operand: &PlanesIn| {
        let (data, scales) = (operand.data.of(arena), operand.scales.of(arena));
        Operand::rows_mx(operand.element, data, scales, operand.k)
    };
    gemm(tier, m, n, a.k, mx(a), mx(b), out, workspace).map_err(|error| error.to_string())
}

/// Prepares `[M,K]·[N,K]ᵀ` of quantized data and scales.
pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::ScaledGemm(op) = op else { return Err(operands.unknown_kernel()) };
    let tier = operands.tier()?;
    let a = PlanesIn::new(operands, &op.a, 0)?;
    let b = PlanesIn::new(operands, &op.b, op.b_input())?;
    let target_index = operands.output(0);
    let target = GemmTarget::new(operands, target_index)?;
    let workspace = operands.workspace::<u8>()?;
    let sizes = [operands.shape(0)[0], operands.shape(op.b_input())[0]];
    let bias = match op.bias {
        true => Some(Bias::new(operands, op.plane_inputs(), &target)?),
        false => None,
    };
    Ok(Box::new(move |arena| {
        let out = target.output(arena);
        multiply(tier, sizes, [&a, &b], arena, out, workspace.of(arena))?;
        if let Some(bias) = &bias {
            bias.add(&target, arena);
        }
        Ok(())
    }))
}

/// Scratch bytes of the GEMM.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, tier: Tier, _: usize) -> usize {
    let Op::ScaledGemm(op) = request.op else { return 0 };
    let b_input = op.b_input();
    let (a, b) = (&request.operands[operand::A].shape, &request.operands[b_input].shape);
    if !op.a.is_mx() {
        return nvfp4::workspace_bytes(tier, a[0], b[0], a[1]);
    }
    gemm_output::workspace_bytes(request, [0, b_input], [a[0], b[0], a[1]], tier)
}
