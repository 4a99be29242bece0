//! Layers that fall back to BF16: the program all in BF16, and an arena that holds both.

use deepwell_ir::{Graph, KernelCatalog, Program, Target};

use super::lower;
use crate::{Plan, PlanError};

/// Lowers `plan` all in BF16: what layers of `program` fall back to. None where it has nothing to
/// fall back from.
///
/// # Errors
/// As [`lower`].
pub fn lower_fallback(
    graph: &Graph,
    plan: &Plan,
    program: &Program,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Option<Program>, PlanError> {
    let quantized = program.precision.iter().filter(|tensor| tensor.format.is_quantized());
    let all: Vec<_> = quantized.map(|tensor| (tensor.tensor.as_str(), "all layers")).collect();
    if all.is_empty() {
        return Ok(None);
    }
    // What a policy quantizes decides how ranks cut parameters: it stays the policy that it is.
    let in_bf16 = Plan { policy: plan.policy.clone().force_bf16(all), ..plan.clone() };
    lower(graph, &in_bf16, catalog, target).map(Some)
}

/// Size of an arena in which `program` can be lowered again after some of its layers have fallen
/// back: its persistent part is largest with every operand quantized, its transient part with every
/// activation in BF16, as in `fallback`.
pub fn arena_bytes_with_fallback(program: &Program, fallback: Option<&Program>) -> usize {
    let arenas = || [program].into_iter().chain(fallback).map(|program| &program.arena);
    let persistent = arenas().map(|arena| arena.transient_offset).max().unwrap_or(0);
    persistent + arenas().map(|arena| arena.transient_bytes()).max().unwrap_or(0)
}
