//! Typed instructions.
//!
//! [`decode()`] turns the text of one kernel into a [`Program`]: functions inlined, registers
//! numbered, labels and symbols resolved.

mod arithmetic;
mod barriers;
mod bulk;
mod calls;
mod compare;
mod contract;
mod control;
mod convert;
mod copy_instruction;
mod dispatch;
mod family;
mod instruction;
mod layout;
mod legality;
mod logic;
mod lower;
mod matrix;
mod matrix_instruction;
mod memory;
mod memory_instruction;
mod operands;
mod scalar_instruction;
mod scope;
mod special;
mod synchronize;
mod synchronize_instruction;
mod tensor_core;
mod tensor_instruction;
mod types;
mod unknown;
mod words;

pub use copy_instruction::*;
pub use instruction::*;
pub use layout::{GlobalAddresses, GlobalVariable, global_images, global_variables};
pub use matrix_instruction::*;
pub use memory_instruction::*;
pub use scalar_instruction::*;
pub use synchronize_instruction::*;
pub use tensor_instruction::*;
pub use types::*;
pub use unknown::{DecodeError, UnknownForm};

use crate::ptx::Module;

/// What decoding may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Fuses products and sums that leave their rounding open where ptxas would, so that results
    /// are those of a GPU; else every instruction rounds as it says.
    pub contract_products: bool,
}

impl Default for DecodeOptions {
    fn default() -> DecodeOptions {
        DecodeOptions { contract_products: true }
    }
}

/// [`decode_with`] with the options of [`DecodeOptions::default`].
///
/// # Errors
/// As [`decode_with`].
pub fn decode(
    module: &Module,
    kernel: &str,
    globals: &GlobalAddresses,
) -> Result<Program, DecodeError> {
    decode_with(module, kernel, globals, DecodeOptions::default())
}

/// Makes a program of one kernel. Functions that it calls are inlined.
///
/// Variables in global memory have to be placed before: [`global_variables`] lists them, and
/// [`global_images`] has their first bytes. Names that `globals` lacks are unknown to the kernel.
///
/// # Errors
/// [`DecodeError::UnknownForms`] with every form that is not understood, and what the other
/// variants say.
pub fn decode_with(
    module: &Module,
    kernel: &str,
    globals: &GlobalAddresses,
    options: DecodeOptions,
) -> Result<Program, DecodeError> {
    let Some(function) = module.kernels().find(|function| &*function.name == kernel) else {
        let names: Vec<String> =
            module.kernels().map(|function| format!("`{}`", function.name)).collect();
        return Err(DecodeError::NoKernel { name: kernel.to_string(), present: names.join(", ") });
    };
    lower::Lowering::run(module, function, globals, options)
}

/// A kernel that can run.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Instructions; a position in here is a program counter. The last one is an exit.
    pub steps: Vec<Step>,
    /// Masks of predicates that a warp needs.
    pub predicate_count: u32,
    /// Rows of 32-bit words (and halves) that a warp needs.
    pub word_count: u32,
    /// Rows of 64-bit words that a warp needs.
    pub long_count: u32,
    /// Bytes of local memory of a thread.
    pub local_bytes: u32,
    /// Bytes of shared memory before the dynamic part, which begins at this offset.
    pub shared_static_bytes: u32,
    /// Parameters in order of their offsets.
    pub parameters: Vec<ParameterLayout>,
    /// Bytes of all parameters.
    pub parameter_bytes: u32,
    /// The constant space, from its address 0 on.
    pub constants: Vec<u8>,
    /// `.reqntid`.
    pub required_threads: Option<[u32; 3]>,
    /// `.maxntid`.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqnctapercluster`.
    pub required_cluster: Option<[u32; 3]>,
    /// `.explicitcluster`: must be launched with a cluster shape.
    pub explicit_cluster: bool,
    /// `.target`, such as `sm_100a`.
    pub target: String,
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterLayout {
    /// Its name.
    pub name: String,
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
    /// Of the first byte.
    pub alignment: u32,
}

#[cfg(test)]
mod tests;
