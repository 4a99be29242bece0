//! What tests of several ranks share: a small model, a machine that is not looked at, and what they
//! are compared with.

pub(crate) mod reference;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, ParameterState, Program, ValueId};
use deepwell_probe::{Cpu, Hardware};

pub(crate) fn graph() -> Graph {
    capture(&LlamaConfig::preset("llama-micro").expect("a preset")).expect("a graph")
}

pub(crate) fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

/// Master weights of a program.
pub(crate) fn masters_of(program: &Program) -> Vec<ValueId> {
    program.parameters.iter().map(|state| state.master.value()).collect()
}

/// Moments of a program that are whole.
pub(crate) fn moments_of(program: &Program) -> Vec<ValueId> {
    let of_parameter = |state: &ParameterState| [state.first_moment, state.second_moment];
    program.parameters.iter().flat_map(of_parameter).flatten().collect()
}
