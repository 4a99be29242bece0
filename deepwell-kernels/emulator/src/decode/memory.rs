//! Decoding of loads, stores, atomics and address instructions.

use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly, parts};
use super::types::{Address, Scope, Semantics, Source, Space, Type};
use super::words::Words;
use super::{Atomic, AtomicOperation, Instruction, Load, Store};
use crate::ptx::Operand;

const ELEMENTS: &[Type] = &[
    Type::B8,
    Type::B16,
    Type::B32,
    Type::B64,
    Type::B128,
    Type::U8,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S8,
    Type::S16,
    Type::S32,
    Type::S64,
    Type::F32,
    Type::F64,
    // Older compilers use float types for halves.
    Type::F16,
    Type::Bf16,
];

/// Operations of `atom` and `red`.
pub(super) const ATOMICS: &[(&str, AtomicOperation)] = &[
    ("add", AtomicOperation::Add),
    ("min", AtomicOperation::Min),
    ("max", AtomicOperation::Max),
    ("and", AtomicOperation::And),
    ("or", AtomicOperation::Or),
    ("xor", AtomicOperation::Xor),
    ("inc", AtomicOperation::Increment),
    ("dec", AtomicOperation::Decrement),
    ("exch", AtomicOperation::Exchange),
    ("cas", AtomicOperation::CompareAndSwap),
];

/// Takes the memory order and scope of an access; the default is `.weak`.
fn order(words: &mut Words<'_>) -> Result<(Semantics, Scope), String> {
    let semantics = words.take_semantics().unwrap_or(Semantics::Weak);
    if semantics == Semantics::Mmio {
        words.expect(&["relaxed"])?;
    }
    let scope = words.take_scope();
    match semantics {
        Semantics::Weak | Semantics::Volatile if scope.is_some() => {
            Err("a scope needs `.relaxed`, `.acquire` or `.release`".to_string())
        }
        Semantics::Weak | Semantics::Volatile | Semantics::Mmio => Ok((semantics, Scope::System)),
        _ => scope.map(|scope| (semantics, scope)).ok_or_else(|| "a scope is missing".to_string()),
    }
}

impl Lowering<'_> {
    /// Returns the space of an access: the opcode's, refined by the space of the variable.
    fn space_of(&self, said: Space, variable: Option<Space>) -> Result<Space, String> {
        match (said, variable) {
            (_, None) => Ok(said),
            // Parameters of functions are in local memory.
            (Space::Parameter, Some(Space::Local)) => Ok(Space::Local),
            (Space::Generic, Some(Space::Global)) => Ok(Space::Global),
            (Space::SharedCluster, Some(Space::Shared)) => Ok(Space::Shared),
            (said, Some(variable)) if said == variable => Ok(said),
            (said, Some(variable)) => {
                Err(format!("the variable is in {variable:?}, the access to {said:?}"))
            }
        }
    }

    /// Decodes `ld` and `ldu`.
    pub(super) fn load(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let (semantics, scope) = order(words)?;
        if matches!(semantics, Semantics::Release | Semantics::AcquireRelease)
            || semantics == Semantics::SequentiallyConsistent
        {
            return Err("a load does not release".to_string());
        }
        let said = words.take_space();
        let read_only = words.take("nc");
        let has_policy = words.take_cache_hints();
        words.take("unified");
        let vector = words.take_vector();
        let element = words.take_type_of(ELEMENTS)?;
        check_vector(vector, element)?;
        let operands = between(operands, 2, 2 + usize::from(has_policy))?;
        let (address, variable) = self.address(&operands[1])?;
        let space = self.space_of(said, variable)?;
        if read_only && space != Space::Global {
            return Err("`.nc` is only there for global memory".to_string());
        }
        let targets = parts(&operands[0]);
        if targets.len() != vector {
            return Err(format!("{vector} registers are expected, {} are given", targets.len()));
        }
        let mut destinations = Vec::with_capacity(vector);
        for target in targets {
            match element {
                Type::B128 => {
                    destinations.extend(self.wide_destination(target)?.map(Some));
                }
                _ => destinations.push(self.destination_wide(target, element)?),
            }
        }
        Ok(Instruction::Load(Load {
            space,
            semantics,
            scope,
            read_only,
            element: if element == Type::B128 { Type::B64 } else { element },
            destinations: destinations.into(),
            address,
        }))
    }

    /// Decodes `st`, `st.async` and `st.bulk`.
    pub(super) fn store(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take("async") {
            return self.store_async(words, operands);
        }
        let (semantics, scope) = order(words)?;
        if matches!(semantics, Semantics::Acquire | Semantics::AcquireRelease)
            || semantics == Semantics::SequentiallyConsistent
        {
            return Err("a store does not acquire".to_string());
        }
        let said = words.take_space();
        let has_policy = words.take_cache_hints();
        let vector = words.take_vector();
        let element = words.take_type_of(ELEMENTS)?;
        check_vector(vector, element)?;
        let operands = between(operands, 2, 2 + usize::from(has_policy))?;
        let (address, variable) = self.address(&operands[0])?;
        let space = self.space_of(said, variable)?;
        if space == Space::Constant {
            return Err("constants are not written".to_string());
        }
        let values = parts(&operands[1]);
        let values = if element == Type::B128 { &operands[1..2] } else { values };
        if values.len() != vector {
            return Err(format!("{vector} values are expected, {} are given", values.len()));
        }
        let mut sources = Vec::with_capacity(vector);
        for value in values {
            match element {
                Type::B128 => sources.extend(self.wide_source(value)?),
                _ => sources.push(self.source_wide(value, element)?),
            }
        }
        Ok(Instruction::Store(Store {
            space,
            semantics,
            scope,
            element: if element == Type::B128 { Type::B64 } else { element },
            sources: sources.into(),
            address,
        }))
    }

    /// Decodes `atom`, `red` and `red.async`.
    pub(super) fn atomic(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        if name == "red" && words.take("async") {
            return self.reduce_async(words, operands);
        }
        let semantics = words.take_semantics().unwrap_or(Semantics::Relaxed);
        let scope = words.take_scope().unwrap_or(Scope::Device);
        let said = words.take_space();
        let operation = words.take_from(ATOMICS).ok_or("the operation is missing")?;
        let no_flush = words.take("noftz");
        let has_policy = words.take_cache_hints();
        let vector = words.take_vector();
        let element = words.take_type()?;
        check_atomic(name, operation, element, vector, no_flush)?;
        let returns = usize::from(name == "atom");
        let compares = usize::from(operation == AtomicOperation::CompareAndSwap);
        let count = 2 + returns + compares;
        let operands = between(operands, count, count + usize::from(has_policy))?;
        let mut destinations = Vec::new();
        if returns == 1 && operands[0] != Operand::Sink {
            for target in self.elements(&operands[0], vector, element)? {
                match element {
                    Type::B128 => destinations.extend(self.wide_destination(target)?.map(Some)),
                    _ => destinations.push(self.destination_wide(target, element)?),
                }
            }
        }
        let (address, variable) = self.address(&operands[returns])?;
        let space = self.space_of(said, variable)?;
        if !matches!(space, Space::Generic | Space::Global | Space::Shared | Space::SharedCluster) {
            return Err("atomics are only there for global and shared memory".to_string());
        }
        let first = self.atomic_values(&operands[returns + 1], vector, element)?;
        let (values, compare) = if compares == 1 {
            (self.atomic_values(&operands[returns + 2], vector, element)?, first)
        } else {
            (first, Box::default())
        };
        Ok(Instruction::Atomic(Atomic {
            space,
            semantics,
            scope,
            operation,
            element,
            destinations: destinations.into(),
            address,
            values,
            compare,
        }))
    }

    fn elements<'o>(
        &self,
        operand: &'o Operand,
        vector: usize,
        element: Type,
    ) -> Result<&'o [Operand], String> {
        let found = match element {
            Type::B128 => std::slice::from_ref(operand),
            _ => parts(operand),
        };
        if found.len() == vector {
            return Ok(found);
        }
        Err(format!("{vector} elements are expected, {} are given", found.len()))
    }

    fn atomic_values(
        &mut self,
        operand: &Operand,
        vector: usize,
        element: Type,
    ) -> Result<Box<[Source]>, String> {
        if element == Type::B128 {
            return Ok(self.wide_source(operand)?.into());
        }
        let values = self.elements(operand, vector, element)?;
        values.iter().map(|value| self.source_wide(value, element)).collect()
    }

    /// Decodes `cvta`, `isspacep`, `mapa`, `getctarank` and `createpolicy`.
    pub(super) fn address_instruction(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        match name {
            "cvta" => {
                let to_window = words.take("to");
                let space = words.take_space();
                if space == Space::Generic {
                    return Err("the space is missing".to_string());
                }
                let value_type = words.take_type_of(&[Type::U32, Type::U64])?;
                let [d, a] = exactly(operands)?;
                let (source, variable) = self.address_value(a, value_type)?;
                let space = self.space_of(space, variable)?;
                let destination = self.destination(d, value_type)?;
                Ok(Instruction::ConvertAddress { destination, source, space, to_window })
            }
            "isspacep" => {
                let space = words.take_space();
                let [p, a] = exactly(operands)?;
                let source = self.source_any(a, Type::B64)?;
                let destination = self.predicate_register(p)?;
                Ok(Instruction::IsSpace { destination, source, space })
            }
            "mapa" | "getctarank" => {
                let space = words.take_space();
                if !matches!(space, Space::Generic | Space::SharedCluster) {
                    return Err("only `.shared::cluster` is known here".to_string());
                }
                let value_type = words.take_type_of(&[Type::U32, Type::U64])?;
                if name == "mapa" {
                    let [d, a, rank] = exactly(operands)?;
                    return Ok(Instruction::MapAddress {
                        destination: self.destination(d, value_type)?,
                        source: self.address_value(a, value_type)?.0,
                        rank: self.source(rank, Type::U32)?,
                        space,
                    });
                }
                let [d, a] = exactly(operands)?;
                Ok(Instruction::CtaRank {
                    destination: self.destination(d, Type::U32)?,
                    source: self.address_value(a, value_type)?.0,
                    space,
                })
            }
            _ => {
                words.take_type_of(&[Type::B64])?;
                while words
                    .take_by(|word| {
                        let known = word.starts_with("L2")
                            || matches!(word, "fractional" | "range" | "cvt" | "global");
                        known.then_some(())
                    })
                    .is_some()
                {}
                let operands = between(operands, 1, 4)?;
                Ok(Instruction::CreatePolicy {
                    destination: self.destination(&operands[0], Type::B64)?,
                })
            }
        }
    }

    /// Decodes an address value: a register, a variable, or a variable plus an offset.
    fn address_value(
        &mut self,
        operand: &Operand,
        value_type: Type,
    ) -> Result<(Source, Option<Space>), String> {
        let variable = match operand {
            Operand::Name(name) | Operand::Offset(name, _) => {
                self.variable(name).ok().map(|found| found.0)
            }
            _ => None,
        };
        Ok((self.source(operand, value_type)?, variable))
    }

    /// Decodes cache hints. Operands are checked although the hints have no effect.
    pub(super) fn cache_hint(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        words.take_space();
        let known = words.take_by(|word| {
            matches!(word, "L1" | "L2" | "tensormap" | "L2::evict_last" | "L2::evict_normal")
                .then_some(())
        });
        if known.is_none() {
            return Err("the cache is missing".to_string());
        }
        let most = if matches!(name, "applypriority" | "discard") { 2 } else { 1 };
        let operands = between(operands, 1, most)?;
        self.plain_address(&operands[0])?;
        // Discarded data may or may not survive; the emulator keeps the data.
        Ok(Instruction::Hint)
    }

    /// A zero address, for operands that an instruction lacks.
    pub(super) fn no_address() -> Address {
        Address { base: Source::Immediate(0), offset: 0 }
    }
}

fn check_vector(vector: usize, element: Type) -> Result<(), String> {
    let bits = vector as u32 * element.bits();
    if bits > 256 || (vector == 8 && element.bits() != 32) {
        return Err(format!("{vector} elements of `.{element}` are more than a vector holds"));
    }
    Ok(())
}

fn check_atomic(
    name: &str,
    operation: AtomicOperation,
    element: Type,
    vector: usize,
    no_flush: bool,
) -> Result<(), String> {
    use AtomicOperation as A;
    use Type::{B16, B32, B64, B128, Bf16, Bf16x2, F16, F16x2, F32, F64, S32, S64, U32, U64};
    let allowed: &[Type] = match operation {
        A::Add => &[U32, S32, U64, S64, F32, F64, F16, F16x2, Bf16, Bf16x2],
        A::Min | A::Max if vector > 1 => &[F16, F16x2, Bf16, Bf16x2],
        A::Min | A::Max => &[U32, S32, U64, S64, F16, F16x2, Bf16, Bf16x2],
        A::And | A::Or | A::Xor => &[B32, B64],
        A::Increment | A::Decrement => &[U32],
        A::Exchange => &[B32, B64, B128],
        A::CompareAndSwap => &[B16, B32, B64, B128],
    };
    if !allowed.contains(&element) {
        return Err(format!("type `.{element}` is not known for this operation"));
    }
    if name == "red" && matches!(operation, A::Exchange | A::CompareAndSwap) {
        return Err("`red` does not exchange".to_string());
    }
    let half = matches!(element, F16 | F16x2 | Bf16 | Bf16x2);
    if half != no_flush {
        return Err(format!("`.noftz` belongs to half floats, the type is `.{element}`"));
    }
    let vectors: &[usize] = match element {
        F32 | F16x2 | Bf16x2 => &[1, 2, 4],
        F16 | Bf16 => &[1, 2, 4, 8],
        _ => &[1],
    };
    if !vectors.contains(&vector) || (vector > 1 && element == F32 && operation != A::Add) {
        return Err(format!("vectors of {vector} are not there for `.{element}`"));
    }
    Ok(())
}
