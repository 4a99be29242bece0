//! Fused ops as one call: a core op followed by its epilogue, or two GEMMs, run kernel by kernel.
//! Results that the call does not store stay in its scratch.
//!
//! Every core accepts every epilogue here, because the kernels of the epilogue's ops run the steps.

use deepwell_ir::ops::{Epilogue, Fused};
use deepwell_ir::{
    ALIGNMENT_BYTES, ByteRange, Call, KernelRequest, MemoryKind, Op, OpError, OperandType, Value,
};

use super::cpu::workspace_of;
use crate::KernelError;
use crate::runtime::cpu::CpuKernel;
use crate::runtime::cpu::add_bias::bias_add_forward_in_place;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, by_float, run_of};

/// Kernels whose parts are kernels of ops.
pub(super) const COMPOSED: &[CpuKernel] =
    &[CpuKernel::new("dual_gemm", dual_gemm).scratch(dual_gemm_workspace_bytes).tiered()];

/// One op of a fused request, as a request of its own.
#[derive(Clone, Debug)]
pub(crate) struct OpRequest {
    pub(crate) op: Op,
    operands: Vec<OperandType>,
    input_count: usize,
}

impl OpRequest {
    pub(crate) fn request(&self) -> KernelRequest<'_> {
        KernelRequest { op: &self.op, operands: &self.operands, input_count: self.input_count }
    }
}

/// A fused request, split into single-op requests.
#[derive(Clone, Debug)]
pub(crate) struct SplitRequest {
    pub(crate) core: OpRequest,
    /// The epilogue steps that are ops. The bias step is not: `add_bias` computes it.
    pub(crate) steps: Vec<OpRequest>,
    /// Types of all results, stored or not.
    results: Vec<OperandType>,
    /// Range of each result in the scratch; `None` for results that the call stores.
    ranges: Vec<Option<ByteRange>>,
    /// Bytes of these results; the core's own scratch begins after them.
    pub(crate) bytes: usize,
}

impl SplitRequest {
    pub(crate) fn new(
        op: &Fused,
        inputs: &[OperandType],
        outputs: &[OperandType],
    ) -> Result<SplitRequest, OpError> {
        let results = op.result_types(inputs, outputs)?;
        let mut bytes = 0;
        let ranges = results
            .iter()
            .enumerate()
            .map(|(index, result)| {
                if op.is_stored(index) {
                    return None;
                }
                let result_bytes = result.storage_bytes().unwrap_or(usize::MAX);
                let range = ByteRange { offset: bytes, bytes: result_bytes };
                bytes += range.bytes.next_multiple_of(ALIGNMENT_BYTES);
                Some(range)
            })
            .collect();
        let core_inputs = op.core_input_count(inputs.len());
        let core_outputs = &results[..op.results_of(0).start];
        let core = OpRequest {
            op: (*op.core).clone(),
            operands: [&inputs[..core_inputs], core_outputs].concat(),
            input_count: core_inputs,
        };
        let step = |(index, step): (usize, &Epilogue)| {
            let step_inputs = &inputs[op.inputs_of(index, inputs.len())];
            let read = &results[step.reads()];
            let operands = [read, step_inputs, &results[op.results_of(index)]].concat();
            Some(OpRequest {
                op: step.to_op()?,
                operands,
                input_count: read.len() + step_inputs.len(),
            })
        };
        let steps = op.epilogue.iter().enumerate().filter_map(step).collect();
        Ok(SplitRequest { core, steps, results, ranges, bytes })
    }

    /// Results that the call does not store, as values in its scratch.
    fn values(&self, call: &Call) -> Vec<Option<Value>> {
        let value = |(result, range): (&OperandType, &Option<ByteRange>)| {
            let ByteRange { offset, bytes } = (*range)?;
            let range = ByteRange { offset: call.workspace.offset + offset, bytes };
            let (name, shape) = (call.name.clone(), result.shape.clone());
            Some(Value::new(name, result.dtype, shape, MemoryKind::Workspace, range))
        };
        self.results.iter().zip(&self.ranges).map(value).collect()
    }
}

fn types(values: &[&Value]) -> Vec<OperandType> {
    values
        .iter()
        .map(|value| OperandType { dtype: value.dtype, shape: value.shape.clone() })
        .collect()
}

/// Prepares a [`Fused`] op.
pub(super) fn fused(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Fused(op) = op else { return Err(operands.unknown_kernel()) };
    let call = operands.call;
    let (inputs, stored) = operands.values.split_at(operands.input_count);
    let split = SplitRequest::new(op, &types(inputs), &types(stored))
        .map_err(|error| operands.refused(error.to_string()))?;
    let workspace = operands.workspace;
    if workspace.bytes < split.bytes {
        return Err(operands.refused(format!(
            "expected a workspace of at least {} bytes, got {}",
            split.bytes, workspace.bytes
        )));
    }
    let unstored = split.values(call);
    let results: Vec<&Value> = unstored
        .iter()
        .enumerate()
        .filter_map(|(result, value)| {
            value.as_ref().or_else(|| op.position(result).map(|at| stored[at]))
        })
        .collect();
    let rest =
        ByteRange { offset: workspace.offset + split.bytes, bytes: workspace.bytes - split.bytes };
    let core_inputs = op.core_input_count(inputs.len());
    let of_core = [&inputs[..core_inputs], &results[..op.results_of(0).start]].concat();
    let of_core = Operands::new(operands.site(), of_core, core_inputs, rest);
    let mut runs = vec![run_of(&op.core, &of_core)?];
    for (index, step) in op.epilogue.iter().enumerate() {
        let step_inputs = &inputs[op.inputs_of(index, inputs.len())];
        let read = &results[step.reads()];
        let of_step = [read, step_inputs, &results[op.results_of(index)]].concat();
        let of_step = Operands::new(operands.site(), of_step, read.len() + step_inputs.len(), rest);
        runs.push(match step.to_op() {
            Some(op) => run_of(&op, &of_step)?,
            None => {
                let run = add_bias(&of_step)?;
                of_step.check_views()?;
                run
            }
        });
    }
    Ok(Box::new(move |arena| runs.iter().try_for_each(|run| run(arena))))
}

/// Maps x, bias to x with the bias added to each row.
fn add_bias(operands: &Operands<'_>) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (x, bias) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let y = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            let y = y.of(arena);
            y.copy_from_slice(x.of(arena));
            bias_add_forward_in_place(y, bias.of(arena));
            Ok(())
        }))
    })
}

/// Prepares a [`deepwell_ir::ops::DualGemm`].
fn dual_gemm(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::DualGemm(op) = op else { return Err(operands.unknown_kernel()) };
    let (inputs, outputs) = operands.values.split_at(operands.input_count);
    let (Some(of), &[first, second]) = (op.operands(inputs.len()), outputs) else {
        return Err(operands.refused("expected the operands of two GEMMs".to_string()));
    };
    let mut runs = Vec::with_capacity(2);
    for (indices, output) in of.into_iter().zip([first, second]) {
        let values: Vec<&Value> =
            indices.iter().map(|&index| inputs[index]).chain([output]).collect();
        let gemm = Operands::new(operands.site(), values, indices.len(), operands.workspace);
        runs.push(run_of(&op.gemm, &gemm)?);
    }
    Ok(Box::new(move |arena| runs.iter().try_for_each(|run| run(arena))))
}

/// The larger of the two GEMMs' workspaces; the GEMMs run one after the other.
fn dual_gemm_workspace_bytes(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let Op::DualGemm(op) = request.op else { return 0 };
    let Some(of) = op.operands(request.input_count) else { return 0 };
    let output = request.operands.get(request.input_count);
    let bytes = of.map(|inputs| {
        let operands = inputs.iter().map(|&index| &request.operands[index]);
        let operands: Vec<OperandType> = operands.chain(output).cloned().collect();
        let gemm = KernelRequest { op: &op.gemm, operands: &operands, input_count: inputs.len() };
        workspace_of(&gemm, tier, threads)
    });
    bytes[0].max(bytes[1])
}

#[cfg(test)]
#[path = "dual_gemm_tests.rs"]
mod dual_gemm_tests;
