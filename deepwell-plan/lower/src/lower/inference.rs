//! Lowers the forward pass up to the inputs of the output head, for text generation.

use deepwell_ir::{
    Graph, KernelCatalog, Mode, Op, Phase, PrecisionPolicy, Program, Schedule, Target, Tensor,
    TensorKind, ValueId, apply_served_precision, verify_program,
};
use deepwell_precision::{QuantFormat, Role};

use super::evaluation::{FORWARD, without_router_losses};
use super::expand_experts;
use super::lowering::Lowering;
use super::rank::RankContext;
use super::rank_graph::fuse_for;
use crate::request::base_plan;
use crate::{OptimizerSpec, PlanError, PlanRequest};

/// A model without loss, gradients or optimizer, for one sequence at a time.
///
/// Both programs share an arena. The caller runs the GEMM with the output head, for one row of
/// many.
#[derive(Clone, Debug)]
pub struct Inference {
    /// Makes the compute copies of the weights from the FP32 masters; runs once, after the masters
    /// are written.
    pub weights: Program,
    /// The forward pass of one sequence.
    pub forward: Program,
    /// Input of the head, `[tokens, hidden]`; a value of `forward`.
    pub rows: ValueId,
    /// The head's weight as the policy stores it, `[vocab, hidden]`; a value of `weights`.
    pub head: ValueId,
}

/// Lowers the forward pass of a captured graph for one sequence of `seq` tokens.
///
/// Memory is FP32 masters, one copy of each weight, and the activations of one sequence.
///
/// # Errors
/// A policy that cannot be applied, an op without a kernel on `target`, or a graph that does not
/// end in an output head with cross-entropy.
pub fn lower_inference(
    graph: &Graph,
    policy: &PrecisionPolicy,
    seq: usize,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Inference, PlanError> {
    lower_forward(graph, policy, seq, catalog, target, false)
}

/// Like [`lower_inference`], but with the loss after the output head: for measuring how well a
/// model predicts a text.
///
/// # Errors
/// As [`lower_inference`].
pub fn lower_scoring(
    graph: &Graph,
    policy: &PrecisionPolicy,
    seq: usize,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Inference, PlanError> {
    lower_forward(graph, policy, seq, catalog, target, true)
}

fn lower_forward(
    graph: &Graph,
    policy: &PrecisionPolicy,
    seq: usize,
    catalog: &dyn KernelCatalog,
    target: &Target,
    keeps_loss: bool,
) -> Result<Inference, PlanError> {
    let request = PlanRequest {
        seq,
        global_batch: 1,
        policy: policy.clone(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: Some(1),
        recompute: None,
        saved_activations: Default::default(),
    };
    let plan = base_plan(graph, &request, target);
    let serves = |format: &QuantFormat, role: Role| catalog.serves(format, role, target);
    let expanded = without_router_losses(&expand_experts(graph, policy)?);
    let (quantized, precision) = apply_served_precision(&expanded, policy, &serves)?;
    let mut graph = fuse_for(&quantized, &plan, catalog, target)?;
    // The loss is dropped only now, after the pass that made the head's compute copy.
    let is_loss = |op: &Op| matches!(op, Op::LinearCrossEntropy(_));
    let Some(loss) = graph.nodes.iter().position(|node| is_loss(&node.op)) else {
        return Err(PlanError::Request {
            what: "model",
            expected: "a graph that ends in an output head with cross-entropy".to_string(),
            got: format!("`{}`, which has none", graph.name),
        });
    };
    let (rows, head) = (graph.nodes[loss].inputs[0], graph.nodes[loss].inputs[1]);
    if !keeps_loss {
        graph.nodes.remove(loss);
    }

    let once = Schedule { passes: vec![FORWARD], slots: 1 };
    let rank = RankContext::new(&graph, &plan, catalog, target, &once);
    let mut lowering = Lowering::new(rank);
    lowering.parameters.add_masters(&rank, &mut lowering.build);
    // The values written by the host, at fixed places for the forward pass.
    let is_input = |tensor: &Tensor| matches!(tensor.kind, TensorKind::Input { .. });
    for (id, _) in graph.tensors_with_ids().filter(|(_, tensor)| is_input(tensor)) {
        lowering.build.value(id);
    }
    lowering.body(Phase::Weights)?;
    // A head kept in FP32 by the policy is the master itself.
    let head = lowering.build.value(head);
    let weights = lowering.finish(Mode::Evaluate, precision.clone(), None)?.program;
    verify_program(&weights)?;

    let mut lowering = Lowering::new(rank);
    lowering.parameters.add_masters(&rank, &mut lowering.build);
    lowering.body(Phase::Forward)?;
    let rows = lowering.build.value(rows);
    let forward = lowering.finish(Mode::Evaluate, precision, Some(&weights))?.program;
    verify_program(&forward)?;
    Ok(Inference { weights, forward, rows, head })
}
