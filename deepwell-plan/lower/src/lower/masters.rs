//! Storage of the master weights.

use deepwell_ir::ops::MasterFormat;
use deepwell_ir::{DType, Graph, bf16_masters};

use crate::{Plan, PlanError};

/// The quantized graph with the master weights of the plan.
pub(super) fn with_masters(graph: Graph, plan: &Plan) -> Result<Graph, PlanError> {
    if plan.optimizer.masters == MasterFormat::Fp32 {
        return Ok(graph);
    }
    let refuse = |expected: &str, got: String| {
        let (what, expected) = ("master weights in BF16", expected.to_string());
        Err(PlanError::Request { what, expected, got })
    };
    if plan.parallel.shards_optimizer() {
        return refuse("ZeRO stage 0", format!("stage {}", plan.parallel.zero));
    }
    let graph = bf16_masters(&graph)?;
    if !graph.parameters().any(|(_, tensor)| tensor.dtype == DType::Bf16) {
        let expected = "matrices that calls read quantized or in BF16";
        return refuse(expected, "calls that read FP32".to_string());
    }
    Ok(graph)
}
