//! Layout of variables and parameters.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::types::{Space, Type};
use super::{DecodeError, ParameterLayout};
use crate::ptx::{Function, InitialValue, Module, Name, Operand, StatementKind, Variable};

/// A variable in global memory, to be allocated by the loader of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalVariable {
    /// Name of the variable.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Alignment of the first byte.
    pub alignment: u32,
    /// Whether the variable is defined in another module.
    pub is_extern: bool,
}

/// Addresses of variables in global memory, by name.
pub type GlobalAddresses = BTreeMap<String, u64>;

/// Size of the constant space: ten banks of 64 KiB.
const CONSTANT_BYTES_MAX: u64 = 640 << 10;

fn variables_in(module: &Module, space: Space) -> impl Iterator<Item = &Variable> {
    let inner = module.functions.iter().flat_map(|function| {
        function.body.iter().flatten().filter_map(|statement| match &statement.kind {
            StatementKind::Variable(variable) => Some(variable),
            _ => None,
        })
    });
    module.variables.iter().chain(inner).filter(move |variable| variable.space == Some(space))
}

/// Returns all variables in global memory, including those inside of functions.
pub fn global_variables(module: &Module) -> Vec<GlobalVariable> {
    variables_in(module, Space::Global)
        .map(|variable| GlobalVariable {
            name: variable.name.to_string(),
            bytes: variable.bytes(),
            alignment: variable.alignment,
            is_extern: variable.is_extern,
        })
        .collect()
}

/// Returns the initial bytes of variables in global memory.
///
/// # Errors
/// An initializer with a name that has no address.
pub fn global_images(
    module: &Module,
    addresses: &GlobalAddresses,
) -> Result<Vec<(String, Vec<u8>)>, DecodeError> {
    variables_in(module, Space::Global)
        .filter(|variable| !variable.is_extern)
        .map(|variable| Ok((variable.name.to_string(), image(variable, addresses)?)))
        .collect()
}

fn image(variable: &Variable, addresses: &GlobalAddresses) -> Result<Vec<u8>, DecodeError> {
    let error = |reason: String| DecodeError::Variable { name: variable.name.to_string(), reason };
    let size = usize::try_from(variable.bytes()).map_err(|_| error("too large".to_string()))?;
    let mut bytes = vec![0; size];
    let element = variable.element.bytes() as usize;
    for (position, value) in variable.initial.iter().enumerate() {
        let bits = match value {
            InitialValue::Bits(bits) => *bits,
            InitialValue::Address { name, offset, byte, .. } => {
                let address = addresses.get(&**name).ok_or_else(|| {
                    error(format!("initialized with the address of `{name}`, which has none"))
                })?;
                address.wrapping_add_signed(*offset) >> (8 * byte.unwrap_or(0))
            }
        };
        let place = bytes
            .get_mut(position * element..(position + 1) * element)
            .ok_or_else(|| error(format!("more than its {size} bytes are given")))?;
        place.copy_from_slice(&u128::from(bits).to_le_bytes()[..element]);
    }
    Ok(bytes)
}

/// Returns the addresses of a module's constants in the constant space, and the bytes of the space.
pub(super) fn constants(
    module: &Module,
    globals: &GlobalAddresses,
) -> Result<(HashMap<Name, u64>, Vec<u8>), DecodeError> {
    let mut addresses = HashMap::new();
    let mut bytes = Vec::new();
    for variable in variables_in(module, Space::Constant) {
        let start = bytes.len().next_multiple_of(variable.alignment.max(1) as usize);
        if start as u64 + variable.bytes() > CONSTANT_BYTES_MAX {
            let name = variable.name.to_string();
            let reason = format!("constants of a module take at most {CONSTANT_BYTES_MAX} bytes");
            return Err(DecodeError::Variable { name, reason });
        }
        bytes.resize(start, 0);
        bytes.extend(image(variable, globals)?);
        addresses.insert(variable.name.clone(), start as u64);
    }
    Ok((addresses, bytes))
}

/// Returns the layout of a kernel's parameters, and their total size.
pub(super) fn parameters(function: &Function) -> (Vec<ParameterLayout>, u32) {
    let mut offset = 0u32;
    let parameters = function
        .parameters
        .iter()
        .map(|parameter| {
            let alignment = parameter.alignment.max(1);
            offset = offset.checked_next_multiple_of(alignment).unwrap_or(u32::MAX);
            let bytes = parameter.bytes() as u32;
            let layout = ParameterLayout {
                name: parameter.name.to_string(),
                offset,
                bytes,
                alignment: parameter.alignment,
            };
            offset = offset.saturating_add(bytes);
            layout
        })
        .collect();
    (parameters, offset)
}

/// Returns the function and all functions called directly or indirectly.
pub(super) fn reachable<'m>(module: &'m Module, kernel: &'m Function) -> Vec<&'m Function> {
    let mut found: Vec<&Function> = vec![kernel];
    let mut next = 0;
    while next < found.len() {
        let body = found[next].body.iter().flatten();
        next += 1;
        for statement in body {
            let StatementKind::Instruction(instruction) = &statement.kind else { continue };
            if &*instruction.opcode.words[0] != "call" {
                continue;
            }
            for operand in &instruction.operands {
                let Operand::Name(name) = operand else { continue };
                if let Some(function) = module.function(name)
                    && function.body.is_some()
                    && !found.iter().any(|known| known.name == function.name)
                {
                    found.push(function);
                }
            }
        }
    }
    found
}

/// Returns the offsets of a kernel's shared variables by name, and the start of dynamic shared
/// memory.
pub(super) fn shared(
    module: &Module,
    functions: &[&Function],
) -> Result<(HashMap<Name, u64>, u32), DecodeError> {
    let mut used = BTreeSet::new();
    for statement in functions.iter().flat_map(|function| function.body.iter().flatten()) {
        if let StatementKind::Instruction(instruction) = &statement.kind {
            for operand in &instruction.operands {
                collect_names(operand, &mut used);
            }
        }
    }
    let inner = functions.iter().flat_map(|function| {
        function.body.iter().flatten().filter_map(|statement| match &statement.kind {
            StatementKind::Variable(variable) => Some(variable),
            _ => None,
        })
    });
    let candidates = module
        .variables
        .iter()
        .filter(|variable| used.contains(&*variable.name))
        .chain(inner)
        .filter(|variable| variable.space == Some(Space::Shared));
    let mut offsets = HashMap::new();
    let mut dynamic = Vec::new();
    let mut top = 0u64;
    let mut dynamic_alignment = 1;
    for variable in candidates {
        let is_dynamic = variable.is_extern && variable.bytes() == 0;
        if is_dynamic {
            dynamic_alignment = dynamic_alignment.max(variable.alignment);
            dynamic.push(variable.name.clone());
            continue;
        }
        if !variable.initial.is_empty() {
            return Err(DecodeError::Variable {
                name: variable.name.to_string(),
                reason: "shared memory has no initial values".to_string(),
            });
        }
        top = top.next_multiple_of(u64::from(variable.alignment.max(1)));
        offsets.insert(variable.name.clone(), top);
        top += variable.bytes();
    }
    top = top.next_multiple_of(u64::from(dynamic_alignment));
    for name in dynamic {
        offsets.insert(name, top);
    }
    let bytes = u32::try_from(top).ok().filter(|bytes| *bytes < 1 << 24);
    let bytes = bytes.ok_or_else(|| DecodeError::Variable {
        name: "shared memory".to_string(),
        reason: format!("{top} bytes are more than a window of 16 MiB holds"),
    })?;
    Ok((offsets, bytes))
}

fn collect_names<'a>(operand: &'a Operand, names: &mut BTreeSet<&'a str>) {
    match operand {
        Operand::Name(name) | Operand::Offset(name, _) => {
            names.insert(name);
        }
        Operand::Address { base: Some(name), .. } => {
            names.insert(name);
        }
        Operand::TensorAddress { base, coordinates, .. } => {
            if let Some(name) = base {
                names.insert(name);
            }
            coordinates.iter().for_each(|operand| collect_names(operand, names));
        }
        Operand::Vector(operands) | Operand::Group(operands) => {
            operands.iter().for_each(|operand| collect_names(operand, names));
        }
        Operand::Pair(first, second) => {
            collect_names(first, names);
            collect_names(second, names);
        }
        Operand::Negated(operand) => collect_names(operand, names),
        _ => {}
    }
}

/// Bytes of a call slot for a value of a type.
pub(super) fn slot_bytes(value_type: Type) -> u32 {
    value_type.bytes().max(1)
}
