//! A training job to plan, and the plan that all candidates start from.

use deepwell_ir::{Graph, Op, PrecisionPolicy, Recompute, SavedActivations, Target};

use crate::{OptimizerSpec, Parallel, Plan};

/// A training job to plan.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Precision of each tensor.
    pub policy: PrecisionPolicy,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// Memory limit of each device; `None` for [`memory_limit_bytes`](crate::memory_limit_bytes).
    pub memory_limit_bytes: Option<u64>,
    /// Fixed micro-batch size, if given.
    pub micro_batch: Option<usize>,
    /// Fixed recomputation, if given.
    pub recompute: Option<Recompute>,
    /// Storage of activations between the forward and the backward pass.
    pub saved_activations: SavedActivations,
}

/// The base plan of all candidates.
pub fn base_plan(graph: &Graph, request: &PlanRequest, target: &Target) -> Plan {
    Plan {
        model: graph.name.clone(),
        device: device_name(target),
        arch: target.arch.clone(),
        seq: request.seq,
        micro_batch: request.global_batch,
        micro_batches: 1,
        recompute: Recompute::None,
        saved_activations: request.saved_activations,
        policy: request.policy.clone(),
        precision: Vec::new(),
        kernels: Vec::new(),
        optimizer: request.optimizer.clone(),
        bucket_bytes: Plan::BUCKET_BYTES,
        capacity_factor: capacity_factor(graph),
        measures_products: false,
        one_stream: false,
        parallel: Parallel::default(),
        stages: Vec::new(),
        tuned: Vec::new(),
    }
}

/// Name of the target's device on the command line.
fn device_name(target: &Target) -> String {
    match target.gpu {
        Some(index) => format!("cuda:{index}"),
        None if target.arch == "cpu" => "cpu".to_string(),
        // The architecture name starts with the generation: `hopper-sm90`.
        None => format!("emulated:{}", target.arch.rsplit('-').next().unwrap_or_default()),
    }
}

/// The capacity factor of a captured graph, the same in all layers.
fn capacity_factor(graph: &Graph) -> Option<f64> {
    graph.nodes.iter().find_map(|node| match &node.op {
        Op::Experts(op) => op.capacity_factor,
        _ => None,
    })
}
