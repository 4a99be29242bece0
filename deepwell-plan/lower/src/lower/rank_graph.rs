//! The part of the graph on a rank, with fused nodes.

use deepwell_ir::{
    Binding, Graph, IrError, KernelCatalog, KernelRequest, OperandType, Target, TensorType, fuse,
};

use super::expert::expand_for_rank;
use super::splits::Splits;
use super::tensor;
use crate::{Plan, PlanError};

/// Returns a rank's part of each layer: its tokens, heads, columns and experts. Groups of rows are
/// a multiple of `align`, required by the formats of the whole model and therefore the same on all
/// ranks.
pub(super) fn part_of_layers(
    graph: &Graph,
    plan: &Plan,
    align: usize,
    target: &Target,
) -> Result<(Graph, Splits), PlanError> {
    let (own, mut splits) = tensor::split(graph, plan, target)?;
    let (own, of_experts) = expand_for_rank(&own, align, target)?;
    splits.extend(of_experts);
    Ok((own, splits))
}

/// Checks that `target`'s rank belongs to the plan's world.
pub(super) fn check_ranks(plan: &Plan, target: &Target) -> Result<(), PlanError> {
    let expected = plan.parallel.ranks(target.ranks.rank as usize);
    if target.ranks == expected {
        return Ok(());
    }
    Err(PlanError::Request {
        what: "ranks of the target",
        expected: format!("those of the plan, {expected:?}"),
        got: format!("{:?}", target.ranks),
    })
}

/// Fuses nodes if the catalog predicts less time for the sizes of the plan.
pub(super) fn fuse_for(
    graph: &Graph,
    plan: &Plan,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Graph, IrError> {
    let binding = Binding { batch: plan.micro_batch, seq: plan.rank_seq() };
    fuse(graph, &|op, inputs, outputs| {
        let bind =
            |of: &TensorType| OperandType { dtype: of.dtype, shape: of.shape.bind(&binding) };
        let operands: Vec<OperandType> = inputs.iter().chain(outputs).map(bind).collect();
        let request = KernelRequest { op, operands: &operands, input_count: inputs.len() };
        catalog.predicted_s(&request, target)
    })
}
