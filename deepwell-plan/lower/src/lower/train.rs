//! Lowers the training step.

use deepwell_ir::{Graph, KernelCatalog, Program, Target};

use super::scheduling::Scheduling;
use super::shared_graph::SharedGraph;
use crate::{Plan, PlanError};

/// Lowers the training step: bodies for forward, backward, optimizer (with the gradient norm) and
/// the compute copies of the weights for the next step, and a schedule of forward and backward for
/// each micro-batch.
///
/// # Errors
/// Errors of a pass for an unsupported graph or policy, or an op without a kernel on `target`.
pub fn lower(
    graph: &Graph,
    plan: &Plan,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    SharedGraph::of(graph, plan, catalog, target)?.lower_stage(catalog, target)
}

/// [`lower`] with another order of the passes, activations of several micro-batches in flight, or
/// calls on several streams. Losses stay the same: gradients are accumulated in micro-batch order.
///
/// # Errors
/// As [`lower`], and a schedule that does not run each micro-batch of the plan exactly once.
pub fn lower_scheduled(
    graph: &Graph,
    plan: &Plan,
    scheduling: &Scheduling<'_>,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    let shared = SharedGraph::of(graph, plan, catalog, target)?;
    shared.lower_scheduled(scheduling, catalog, target)
}
