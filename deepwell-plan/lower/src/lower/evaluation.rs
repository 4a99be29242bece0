//! The forward pass alone, over the weights of a training program.

use std::borrow::Cow;

use deepwell_ir::{
    Graph, KernelCatalog, Mode, Node, Op, Phase, Program, Schedule, Slotted, Target,
    apply_precision_of_rank, expert_row_alignment, verify_program,
};
use deepwell_precision::{QuantFormat, Role};

use super::context;
use super::lowering::Lowering;
use super::masters::with_masters;
use super::rank::RankContext;
use super::rank_graph::fuse_for;
use super::rank_graph::part_of_layers;
use super::splits::slices;
use super::stage;
use super::stage::part_of_rank;
use crate::{Plan, PlanError};

/// The forward pass of the only micro-batch.
pub(super) const FORWARD: Slotted =
    Slotted { phase: Phase::Forward, chunk: 0, micro_batch: 0, slot: 0 };

/// Lowers the evaluation of one micro-batch over the weights of a training program. The evaluation
/// reads the training program's weight copies in place, and reuses the transient part of the arena.
///
/// # Errors
/// As [`lower`](super::lower).
pub fn lower_evaluation(
    graph: &Graph,
    plan: &Plan,
    training: &Program,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    let serves = |format: &QuantFormat, role: Role| catalog.serves(format, role, target);
    let graph = without_router_losses(graph);
    let align = expert_row_alignment(&graph, &plan.policy)?;
    let (own, splits) = part_of_layers(&graph, plan, align, target)?;
    let (cut, pipeline) = stage::cut(&own, plan, target)?;
    let slices = slices(&splits, target);
    let (quantized, precision) = apply_precision_of_rank(&cut, &plan.policy, &serves, slices)?;
    let quantized = with_masters(quantized, plan)?;
    let quantized = context::part_of_sequences(Cow::Owned(quantized), plan, target)?;
    let quantized = part_of_rank(quantized, pipeline.as_ref())?;
    let graph = fuse_for(&quantized, plan, catalog, target)?;
    let chunks = 0..plan.parallel.chunks as u32;
    let passes = chunks.map(|chunk| Slotted { chunk, ..FORWARD }).collect();
    let once = Schedule { passes, slots: 1 };
    let rank = RankContext {
        pipeline: pipeline.as_ref(),
        splits: Some(&splits),
        ..RankContext::new(&graph, plan, catalog, target, &once)
    };
    let mut lowering = Lowering::new(rank);
    lowering.persistent_values(Mode::Evaluate);
    for chunk in 0..rank.chunks() {
        lowering.body_of_chunk(Phase::Forward, chunk)?;
    }
    let program = lowering.finish(Mode::Evaluate, precision, Some(training))?.program;
    verify_program(&program)?;
    Ok(program)
}

/// The graph without the auxiliary losses of routers: an evaluation measures only how well tokens
/// are predicted.
pub(super) fn without_router_losses(graph: &Graph) -> Graph {
    let is_kept = |node: &&Node| !matches!(node.op, Op::RouterLoss(_));
    let nodes = graph.nodes.iter().filter(is_kept).cloned().collect();
    Graph { nodes, ..graph.clone() }
}
