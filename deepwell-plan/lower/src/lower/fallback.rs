//! BF16 fallback of GEMMs: the program all in BF16, and an arena large enough for every mixture.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deepwell_ir::{Graph, KernelCatalog, MemoryKind, Order, Program, Target, TensorId, ValueId};

use deepwell_precision::Format;

use super::train::lower;
use crate::arena::{Lifetime, align, peak_bytes};
use crate::{Plan, PlanError};

/// Lowers `plan` all in BF16, the fallback of the GEMMs of `program`. Returns `None` if `program`
/// has no quantized tensor.
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
    let in_bf16 = fallback_plan(plan, program);
    in_bf16.map(|in_bf16| lower(graph, &in_bf16, catalog, target)).transpose()
}

/// The plan lowered by [`lower_fallback`], common to all stages of a pipeline.
pub fn fallback_plan(plan: &Plan, program: &Program) -> Option<Plan> {
    let quantized = program.precision.iter().filter(|tensor| tensor.format.is_quantized());
    let all: Vec<_> = quantized.map(|tensor| (tensor.tensor.as_str(), "all weights")).collect();
    if all.is_empty() {
        return None;
    }
    // The policy's format decides how ranks cut parameters, so the policy is kept and overridden.
    Some(Plan { policy: plan.policy.clone().force_bf16(all), ..plan.clone() })
}

/// The plan all in MXFP8 of a policy whose format has fewer bits: GEMMs move to MXFP8 before
/// BF16. `None` for other policies.
pub(crate) fn mxfp8_plan(plan: &Plan, program: &Program) -> Option<Plan> {
    let lower = program.precision.iter().filter(|tensor| tensor.format.has_fewer_bits_than_mxfp8());
    let all: Vec<_> = lower.map(|tensor| (tensor.tensor.as_str(), "all weights")).collect();
    let policy = plan.policy.clone().force(Format::MXFP8, all.iter().copied());
    (!all.is_empty()).then(|| Plan { policy, ..plan.clone() })
}

/// Lowers a plan with some weights moved to BF16 into an existing arena. If overlapped calls need
/// more memory than the arena has, the calls run on one stream.
///
/// # Errors
/// As [`lower`].
pub fn lower_within(
    graph: &Graph,
    plan: &Plan,
    arena_bytes: usize,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    let program = lower(graph, plan, catalog, target)?;
    if program.arena.bytes <= arena_bytes || plan.has_one_stream() {
        return Ok(program);
    }
    lower(graph, &Plan { one_stream: true, ..plan.clone() }, catalog, target)
}

/// Divisor of the live bytes at the fullest call: the packing overhead allowed for a mixture's
/// arena. Arenas of the presets exceed their live bytes by less than 1 %.
const PACKING_SHARE: usize = 100;

/// Size of an arena in which `program` can be lowered again with the GEMMs of any of its weights in
/// BF16. `fallback` has all weights in BF16.
///
/// - Weight copies outlive a step. The arena has room for the larger copies of the two programs.
/// - The operands of a GEMM are quantized or in BF16, as in one of the two programs. GEMMs of
///   several weights share some activations, such as the input of queries, keys and values. If a
///   part of these GEMMs falls back, a step keeps both forms.
///
/// [`lower_within`] makes such programs.
pub fn arena_bytes_with_fallback(program: &Program, fallback: Option<&Program>) -> usize {
    arena_bytes_with_fallbacks(program, &Vec::from_iter(fallback))
}

/// [`arena_bytes_with_fallback`] for several formats to which the GEMMs of a weight may move.
pub fn arena_bytes_with_fallbacks(program: &Program, fallbacks: &[&Program]) -> usize {
    if fallbacks.is_empty() {
        return program.arena.bytes;
    }
    let own = program.arena.transient_offset;
    let persistent = fallbacks.iter().map(|fallback| {
        let with_copies = own + further_copy_bytes(program, fallback);
        with_copies.max(fallback.arena.transient_offset)
    });
    let programs = [program].into_iter().chain(fallbacks.iter().copied());
    let transients: Vec<Transient> = programs.map(Transient::of).collect();
    persistent.max().unwrap_or(own) + Transient::of_all_mixtures(&transients)
}

/// Bytes by which the larger copies of each weight exceed the copies of `program`.
pub fn further_copy_bytes(program: &Program, fallback: &Program) -> usize {
    let (own, in_bf16) = (copy_bytes(program), copy_bytes(fallback));
    let further = own.iter().map(|(weight, bytes)| {
        let in_bf16 = in_bf16.get(weight).copied().unwrap_or(0);
        in_bf16.saturating_sub(*bytes)
    });
    further.sum()
}

/// Bytes of the values living within a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transient {
    /// Transient part of the arena.
    pub bytes: usize,
    /// Live bytes at the fullest call.
    pub alive: usize,
    /// Operands shared by GEMMs of several weights.
    pub shared: usize,
}

impl Transient {
    fn of(program: &Program) -> Transient {
        let [in_slot, others] = shared_operand_bytes(program);
        Transient {
            bytes: program.arena.transient_bytes(),
            alive: program.arena.transient_lower_bound_bytes,
            shared: program.slots as usize * in_slot + others,
        }
    }

    /// Transient bytes sufficient for every mixture of two programs.
    pub fn of_mixtures(planned: Transient, in_bf16: Transient) -> usize {
        Transient::of_all_mixtures(&[planned, in_bf16])
    }

    /// [`Transient::of_mixtures`] of several programs: most is alive when the operands of one are,
    /// and the shared operands of all others.
    fn of_all_mixtures(programs: &[Transient]) -> usize {
        let shared: usize = programs.iter().map(|it| it.shared).sum();
        let alive = programs.iter().map(|it| it.alive + shared - it.shared);
        let alive = alive.max().unwrap_or(0);
        let bytes = programs.iter().map(|it| it.bytes).max().unwrap_or(0);
        (alive + alive / PACKING_SHARE).max(bytes)
    }
}

/// Bytes of the copies of each weight that outlive a step.
fn copy_bytes(program: &Program) -> HashMap<TensorId, usize> {
    let mut bytes = HashMap::new();
    for value in program.values_of(MemoryKind::Weights) {
        let Some(weight) = value.link.map(|link| link.of).or(value.tensor) else { continue };
        *bytes.entry(weight).or_default() += align(value.range.bytes);
    }
    bytes
}

/// The most live bytes of operands shared by GEMMs of several weights: first of operands in
/// activation slots, which live from body to body, then of operands within a body.
fn shared_operand_bytes(program: &Program) -> [usize; 2] {
    shared_operand_lifetimes(program).map(|lifetimes| peak_bytes(&lifetimes))
}

/// The lifetimes of these operands.
pub fn shared_operand_lifetimes(program: &Program) -> [Vec<Lifetime>; 2] {
    let readers = program.weights_by_operand();
    let mut weights: HashMap<Option<TensorId>, BTreeSet<usize>> = HashMap::new();
    for (&id, of_operand) in &readers {
        weights.entry(tensor_of(program, id)).or_default().extend(of_operand);
    }
    let is_shared = |id: ValueId| {
        let is_transient = !program.value(id).memory.is_persistent();
        is_transient && readers.contains_key(&id) && weights[&tensor_of(program, id)].len() > 1
    };
    let Ok(order) = Order::of(&program.calls, &program.bodies) else { return Default::default() };
    let mut lives: BTreeMap<ValueId, Lifetime> = BTreeMap::new();
    for (index, call) in program.calls.iter().enumerate() {
        let last = order.last_beside(index);
        for id in call.operands.iter().map(|operand| operand.value).filter(|id| is_shared(*id)) {
            let bytes = program.value(id).range.bytes;
            let life = lives.entry(id).or_insert(Lifetime { bytes, first: index, last });
            life.last = life.last.max(last);
        }
    }
    let is_in_slots = |id: &ValueId| program.value(*id).slot_stride_bytes > 0;
    let (in_slots, others): (Vec<_>, Vec<_>) =
        lives.into_iter().partition(|(id, _)| is_in_slots(id));
    [in_slots, others].map(|lives| lives.into_iter().map(|(_, life)| life).collect())
}

/// The tensor stored by a value, or the tensor of the plane stored by a value.
fn tensor_of(program: &Program, id: ValueId) -> Option<TensorId> {
    let value = program.value(id);
    let plane = value.link.filter(|link| link.plane().is_some());
    plane.map(|link| link.of).or(value.tensor)
}
