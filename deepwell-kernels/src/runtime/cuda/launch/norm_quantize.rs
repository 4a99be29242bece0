//! Shared by launchers of normalizations that quantize their output: `layout/norm_quantize.cuh`.

use deepwell_ir::ops::{Fused, QuantizeStep};
use deepwell_ir::{KernelRequest, Op};

use super::mx;
use super::support::all_bf16;
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::epilogue::EpilogueSet;

/// Elements of a vector, 16 bytes of BF16.
const VECTOR: usize = 8;
/// CTAs that process the rows of an M-block of 128, eight rows each.
const ROW_CTAS: usize = 16;

/// M-blocks of lookahead between row statistics and tiles: as many as the running CTAs cover, so
/// that a tile finds the statistics of its rows ready, and few more, so that the rows are still in
/// the L2 cache. A residual add or a mean takes longer: three more M-blocks for each are best on an
/// H200, by 1 to 2 % and by 2 to 6 %.
fn lookahead(m_blocks: usize, columns: usize, resident: usize, adds: bool, layer: bool) -> usize {
    let of_m_block = ROW_CTAS + columns.div_ceil(mx::TILE);
    let more = 3 * (usize::from(adds) + usize::from(layer));
    (resident.div_ceil(of_m_block) + more).min(m_blocks)
}

/// A normalization as the core of a fused op.
struct Norm {
    /// Name of the op.
    entry: &'static str,
    eps: f64,
    /// Whether a residual add precedes the normalization.
    adds: bool,
    /// Whether the normalization has a bias and a mean.
    layer: bool,
}

impl Norm {
    fn of(core: &Op) -> Option<Norm> {
        let norm = |entry, eps, adds, layer| Some(Norm { entry, eps, adds, layer });
        match core {
            Op::RmsNorm(op) => norm("rms_norm", op.eps, false, false),
            Op::AddRmsNorm(op) => norm("add_rms_norm", op.eps, true, false),
            Op::LayerNorm(op) => norm("layer_norm", op.eps, false, true),
            Op::AddLayerNorm(op) => norm("add_layer_norm", op.eps, true, true),
            _ => None,
        }
    }

    /// Index of the normalized result among the core's results.
    fn y(&self) -> usize {
        usize::from(self.adds)
    }

    /// Number of inputs of the core.
    fn inputs(&self) -> usize {
        2 + usize::from(self.adds) + usize::from(self.layer)
    }
}

/// Quantizes the normalized rows; no GEMM reads the residual sum.
pub(crate) fn epilogue(core: &Op) -> EpilogueSet {
    match core {
        Op::AddRmsNorm(_) | Op::AddLayerNorm(_) => EpilogueSet::quantizing(&[1]),
        _ => EpilogueSet::quantizing(&[0]),
    }
}

/// The fused op, its core, and the single quantization that the kernels support.
fn parts(op: &Op) -> Option<(&Fused, Norm, QuantizeStep<'_>)> {
    let Op::Fused(op) = op else { return None };
    let norm = Norm::of(&op.core)?;
    op.quantizations().next().map(|step| (op, norm, step))
}

/// Why a request that [`epilogue`] accepts cannot be served.
pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Some((op, norm, step)) = parts(request.op) else {
        return Some("makes one quantization, of the normalized rows".to_string());
    };
    let shape = &request.operands[0].shape;
    if let &[_, columns] = shape.as_slice()
        && (columns == 0 || !columns.is_multiple_of(VECTOR))
    {
        return Some(format!("takes rows that are multiples of {VECTOR} elements, not {columns}"));
    }
    let kept = (0..=norm.y()).filter_map(|result| op.position(result));
    let inputs = 0..norm.inputs();
    let floats: Vec<usize> =
        inputs.chain(kept.map(|position| request.input_count + position)).collect();
    all_bf16(request, &floats).or_else(|| mx::reject(step.quantize, shape))
}

/// Prepares a call for a kernel of `<file>.cu`.
pub(crate) fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    file: &'static str,
) -> Result<Vec<Step>, KernelError> {
    let Some((op, norm, step)) = parts(&call.call.op) else {
        return Err(call.refuse("expected a normalization and one quantization of its output"));
    };
    let &[rows, columns] = call.input(0).shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let kernel = format!("{}_quantize_{}", norm.entry, step.quantize.axis.name());
    let flags = mx::flags(&step.quantize.format);
    let shared_bytes = mx::shared_bytes(rows, columns, flags);
    let function = device.function(file, &kernel, shared_bytes)?;
    let resident = device.resident_ctas(function, mx::BF16_TILE_THREADS, shared_bytes)? as usize;
    let m_blocks = rows.div_ceil(mx::TILE);

    let none = Argument::Pointer(DevicePtr(0));
    let kept = |result| match op.position(result) {
        Some(position) => call.output(position).argument(),
        None => none,
    };
    let adds = usize::from(norm.adds);
    let delta = if norm.adds { call.input(1).argument() } else { none };
    let sum = if norm.adds { kept(0) } else { none };
    let mut arguments = vec![call.input(0).argument(), delta, call.input(1 + adds).argument()];
    if norm.layer {
        arguments.push(call.input(2 + adds).argument());
    }
    arguments.extend([sum, kept(norm.y())]);
    let statistics_of_rows = 1 + usize::from(norm.layer);
    arguments.extend((0..statistics_of_rows).map(|index| kept(norm.y() + 1 + index)));
    let mx::Outputs { places, statistics } =
        mx::outputs(call, step.quantize.axis, step.positions.start);
    arguments.extend(places);
    arguments.extend([
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::F32(norm.eps as f32),
        Argument::U32(flags),
        Argument::U32(lookahead(m_blocks, columns, resident, norm.adds, norm.layer) as u32),
        Argument::Pointer(device.arrival_counters(m_blocks)?),
        mx::totals(device, 1)?,
        statistics,
    ]);
    let ctas = (m_blocks * ROW_CTAS) as u32 + mx::ctas(rows, columns);
    let ctas = if m_blocks == 0 { 1 } else { ctas };
    Ok(vec![Device::launch(function, ctas, mx::BF16_TILE_THREADS, shared_bytes, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lead_by_what_runs_at_a_time() {
        // Four CTAs on each of 132 SMs.
        let expected = [
            ((0, 256), [0, 0, 0]),
            ((1, 8), [1, 1, 1]),
            ((128, 768), [24, 27, 30]),
            ((128, 2048), [17, 20, 23]),
            ((4, 2048), [4, 4, 4]),
            ((128, 4096), [11, 14, 17]),
            ((128, 16384), [4, 7, 10]),
        ];
        // RMSNorm alone, RMSNorm after an add, and LayerNorm after an add.
        let norms = [(false, false), (true, false), (true, true)];
        for ((m_blocks, columns), expected) in expected {
            let ahead = norms.map(|(adds, layer)| lookahead(m_blocks, columns, 528, adds, layer));
            assert_eq!(ahead, expected, "{m_blocks} x {columns}");
        }
    }
}
