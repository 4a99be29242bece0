//! Decoder: typed instructions from parsed PTX.
//!
//! [`decode()`] turns the text of one kernel into a [`Program`]: functions are inlined, registers
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
mod scalar_forms;
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

/// Options of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Fuses products and sums without rounding modifiers as ptxas does, so that results equal
    /// those of a GPU. Otherwise every instruction rounds separately.
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
/// The errors of [`decode_with`].
pub fn decode(
    module: &Module,
    kernel: &str,
    globals: &GlobalAddresses,
) -> Result<Program, DecodeError> {
    decode_with(module, kernel, globals, DecodeOptions::default())
}

/// Decodes one kernel. Called functions are inlined.
///
/// Variables in global memory must be allocated before: [`global_variables`] lists them, and
/// [`global_images`] returns their initial bytes. A variable missing from `globals` is an unknown
/// name in the kernel.
///
/// # Errors
/// [`DecodeError::UnknownForms`] with all unknown forms; otherwise see [`DecodeError`].
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

/// An executable kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Name of the kernel.
    pub name: String,
    /// Instructions; a program counter is an index into this list. The last instruction is an exit.
    pub steps: Vec<Step>,
    /// Number of predicate registers of a warp.
    pub predicate_count: u32,
    /// Number of 32-bit (and 16-bit) registers of a warp.
    pub word_count: u32,
    /// Number of 64-bit registers of a warp.
    pub long_count: u32,
    /// Bytes of local memory per thread.
    pub local_bytes: u32,
    /// Bytes of static shared memory; the dynamic part begins at this offset.
    pub shared_static_bytes: u32,
    /// Parameters, by offset.
    pub parameters: Vec<ParameterLayout>,
    /// Total bytes of the parameters.
    pub parameter_bytes: u32,
    /// Contents of the constant space, from address 0.
    pub constants: Vec<u8>,
    /// `.reqntid`.
    pub required_threads: Option<[u32; 3]>,
    /// `.maxntid`.
    pub max_threads: Option<[u32; 3]>,
    /// `.minnctapersm`.
    pub min_ctas_per_sm: Option<u32>,
    /// `.maxnreg`.
    pub max_registers: Option<u32>,
    /// `.reqnctapercluster`.
    pub required_cluster: Option<[u32; 3]>,
    /// `.explicitcluster`: a launch must give a cluster shape.
    pub explicit_cluster: bool,
    /// `.target`, such as `sm_100a`.
    pub target: String,
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterLayout {
    /// Name of the parameter.
    pub name: String,
    /// Offset of the first byte.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
    /// Alignment in bytes.
    pub alignment: u32,
}

#[cfg(test)]
mod tests;
