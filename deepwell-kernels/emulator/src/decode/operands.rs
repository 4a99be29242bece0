//! Decoding of operands: registers, constants and addresses.

use super::lower::Lowering;
use super::scalar_instruction::{Comparison, ScalarInstruction};
use super::scope::Binding;
use super::special::special_register;
use super::types::{Address, PredicateSource, Register, Source, Space, Type};
use super::{Instruction, SpecialRegister};
use crate::ptx::{Name, Operand};

/// Returns the width of the register for a value of a type.
pub(super) fn register_bits(value_type: Type) -> u32 {
    match value_type.bits() {
        0..=16 => 16,
        17..=32 => 32,
        _ => 64,
    }
}

impl Lowering<'_> {
    fn value_register(&self, name: &str) -> Result<Option<Register>, String> {
        match self.find(name) {
            Some(Binding::Value(register)) => Ok(Some(register)),
            Some(Binding::Predicate(_)) => {
                Err(format!("`{name}` is a predicate, a value is expected"))
            }
            Some(Binding::Wide(_)) => {
                Err(format!("`{name}` has 128 bits, a smaller value is expected"))
            }
            Some(Binding::Variable { .. }) | None => Ok(None),
        }
    }

    /// Decodes a value of exactly the width of `value_type`.
    pub(super) fn source(&mut self, operand: &Operand, value_type: Type) -> Result<Source, String> {
        let source = self.source_any(operand, value_type)?;
        if let Source::Register(register) = source
            && register.bits() != register_bits(value_type)
        {
            return Err(format!(
                "`{operand}` has {} bits, `.{value_type}` has {}",
                register.bits(),
                value_type.bits()
            ));
        }
        Ok(source)
    }

    /// Decodes a value of at least the width of `value_type`.
    pub(super) fn source_wide(
        &mut self,
        operand: &Operand,
        value_type: Type,
    ) -> Result<Source, String> {
        let source = self.source_any(operand, value_type)?;
        if let Source::Register(register) = source
            && register.bits() < value_type.bits().min(64)
        {
            return Err(format!(
                "`{operand}` has {} bits, `.{value_type}` has {}",
                register.bits(),
                value_type.bits()
            ));
        }
        Ok(source)
    }

    /// Decodes a value of any width.
    pub(super) fn source_any(
        &mut self,
        operand: &Operand,
        value_type: Type,
    ) -> Result<Source, String> {
        match operand {
            Operand::Name(name) => {
                if let Some(register) = self.value_register(name)? {
                    return Ok(Source::Register(register));
                }
                if let Some((special, special_type)) = special_register(name) {
                    let wide = special_type.bits() > 32 || register_bits(value_type) == 64;
                    let temporary = if wide { Type::B64 } else { Type::B32 };
                    let destination = self.temporary(temporary)?;
                    self.emit(Instruction::Special { destination, register: special });
                    if register_bits(value_type) == destination.bits() {
                        return Ok(Source::Register(destination));
                    }
                    // Truncates to the instruction's width, such as the upper bits of a counter.
                    let cut = self.temporary(value_type)?;
                    self.emit(Instruction::Scalar(ScalarInstruction::Move {
                        destination: cut,
                        source: Source::Register(destination),
                    }));
                    return Ok(Source::Register(cut));
                }
                self.variable_address(name, 0, value_type)
            }
            Operand::Offset(name, offset) => self.variable_address(name, *offset, value_type),
            Operand::Integer(value) => {
                use Type::{Bf16, Bf16x2, F16, F16x2, F32, F32x2, F64};
                if matches!(value_type, F16 | F16x2 | Bf16 | Bf16x2 | F32 | F32x2 | F64)
                    && *value != 0
                {
                    return Err(format!("`{operand}` is an integer, `.{value_type}` is expected"));
                }
                Ok(Source::Immediate(*value))
            }
            Operand::Single(bits) => Ok(Source::Immediate(match value_type {
                Type::F64 => f64::from(f32::from_bits(*bits)).to_bits(),
                _ => u64::from(*bits),
            })),
            Operand::Double(bits) => Ok(Source::Immediate(match value_type {
                Type::F32 => u64::from((f64::from_bits(*bits) as f32).to_bits()),
                _ => *bits,
            })),
            // Braces around a single value.
            Operand::Vector(parts) if parts.len() == 1 => self.source_any(&parts[0], value_type),
            _ => Err(format!("`{operand}` is no value")),
        }
    }

    /// Decodes the address of a variable. Addresses that depend on the launch or the CTA are
    /// special registers of the engine.
    fn variable_address(
        &mut self,
        name: &Name,
        offset: i64,
        value_type: Type,
    ) -> Result<Source, String> {
        let (space, address) = self.variable(name)?;
        let address = address.wrapping_add_signed(offset);
        let register = match space {
            Space::Shared => SpecialRegister::SharedVariable(address as u32),
            Space::Parameter => SpecialRegister::ParameterVariable(address as u32),
            Space::Constant => SpecialRegister::ConstantVariable(address as u32),
            _ => return Ok(Source::Immediate(address)),
        };
        let wide = register_bits(value_type) == 64;
        let destination = self.temporary(if wide { Type::B64 } else { Type::B32 })?;
        self.emit(Instruction::Special { destination, register });
        Ok(Source::Register(destination))
    }

    /// Returns the space and the address of a variable.
    pub(super) fn variable(&self, name: &Name) -> Result<(Space, u64), String> {
        match self.find(name) {
            Some(Binding::Variable { space, address, .. }) => Ok((space, address)),
            Some(_) => Err(format!("`{name}` is a register, a variable is expected")),
            None => Err(format!("`{name}` is not declared")),
        }
    }

    /// Decodes a destination of exactly the width of `value_type`.
    pub(super) fn destination(
        &mut self,
        operand: &Operand,
        value_type: Type,
    ) -> Result<Register, String> {
        match self.destination_any(operand)? {
            Some(register) if register.bits() == register_bits(value_type) => Ok(register),
            Some(register) => Err(format!(
                "`{operand}` has {} bits, `.{value_type}` has {}",
                register.bits(),
                value_type.bits()
            )),
            // `_` gets a temporary register.
            None => self.temporary(value_type),
        }
    }

    /// Decodes a destination of at least the width of `value_type`; `None` for `_`.
    pub(super) fn destination_wide(
        &mut self,
        operand: &Operand,
        value_type: Type,
    ) -> Result<Option<Register>, String> {
        match self.destination_any(operand)? {
            Some(register) if register.bits() < value_type.bits().min(64) => Err(format!(
                "`{operand}` has {} bits, `.{value_type}` has {}",
                register.bits(),
                value_type.bits()
            )),
            found => Ok(found),
        }
    }

    fn destination_any(&self, operand: &Operand) -> Result<Option<Register>, String> {
        match operand {
            Operand::Sink => Ok(None),
            Operand::Name(name) => match self.value_register(name)? {
                Some(register) => Ok(Some(register)),
                None => Err(format!("`{name}` is no register")),
            },
            Operand::Vector(parts) if parts.len() == 1 => self.destination_any(&parts[0]),
            _ => Err(format!("`{operand}` is no register")),
        }
    }

    /// Decodes a predicate destination; `None` for `_`.
    pub(super) fn predicate_destination(&self, operand: &Operand) -> Result<Option<u32>, String> {
        match operand {
            Operand::Sink => Ok(None),
            Operand::Name(name) => match self.find(name) {
                Some(Binding::Predicate(index)) => Ok(Some(index)),
                _ => Err(format!("`{name}` is no predicate register")),
            },
            _ => Err(format!("`{operand}` is no predicate register")),
        }
    }

    /// Decodes a predicate destination; `_` gets a temporary register.
    pub(super) fn predicate_register(&mut self, operand: &Operand) -> Result<u32, String> {
        match self.predicate_destination(operand)? {
            Some(index) => Ok(index),
            None => self.temporary_predicate(),
        }
    }

    /// Decodes `p`, `!p`, 0 or 1.
    pub(super) fn predicate(&mut self, operand: &Operand) -> Result<PredicateSource, String> {
        match operand {
            Operand::Name(name) => {
                if let Some((register, Type::Predicate)) = special_register(name) {
                    let value = self.temporary(Type::B32)?;
                    self.emit(Instruction::Special { destination: value, register });
                    let index = self.temporary_predicate()?;
                    self.emit(Instruction::Scalar(ScalarInstruction::SetPredicate {
                        comparison: Comparison::NotEqual,
                        value_type: Type::B32,
                        flush_subnormals: false,
                        combine: None,
                        destination: Some(index),
                        second: None,
                        a: Source::Register(value),
                        b: Source::Immediate(0),
                    }));
                    return Ok(PredicateSource::Register { index, negated: false });
                }
                let index = self
                    .predicate_destination(operand)?
                    .ok_or_else(|| format!("`{operand}` is no predicate"))?;
                Ok(PredicateSource::Register { index, negated: false })
            }
            Operand::Negated(inner) => Ok(self.predicate(inner)?.negate()),
            // A true predicate constant may be written as -1.
            Operand::Integer(value) => Ok(PredicateSource::Constant(*value != 0)),
            _ => Err(format!("`{operand}` is no predicate")),
        }
    }

    /// Decodes `[base + offset]`. Also returns the space of the variable, if the base is one.
    pub(super) fn address(
        &mut self,
        operand: &Operand,
    ) -> Result<(Address, Option<Space>), String> {
        match operand {
            Operand::Address { base, offset } => self.place(base.as_ref(), *offset),
            _ => Err(format!("`{operand}` is no address in brackets")),
        }
    }

    /// Decodes `[base + offset]` without the variable's space.
    pub(super) fn plain_address(&mut self, operand: &Operand) -> Result<Address, String> {
        Ok(self.address(operand)?.0)
    }

    /// Decodes a base and an offset.
    pub(super) fn place(
        &mut self,
        base: Option<&Name>,
        offset: i64,
    ) -> Result<(Address, Option<Space>), String> {
        let Some(name) = base else {
            return Ok((Address { base: Source::Immediate(0), offset }, None));
        };
        if let Some(register) = self.value_register(name)? {
            if register.bits() < 32 {
                return Err(format!("`{name}` has {} bits, an address 32 or 64", register.bits()));
            }
            return Ok((Address { base: Source::Register(register), offset }, None));
        }
        let (space, address) = self.variable(name)?;
        let address =
            Address { base: Source::Immediate(0), offset: (address as i64).wrapping_add(offset) };
        Ok((address, Some(space)))
    }

    /// Decodes a 128-bit value as two halves.
    pub(super) fn wide_source(&mut self, operand: &Operand) -> Result<[Source; 2], String> {
        match operand {
            Operand::Name(name) => match self.find(name) {
                Some(Binding::Wide(low)) => Ok([
                    Source::Register(Register::Long(low)),
                    Source::Register(Register::Long(low + 1)),
                ]),
                _ => Err(format!("`{name}` is no register of 128 bits")),
            },
            Operand::Vector(halves) if halves.len() == 2 => {
                Ok([self.source(&halves[0], Type::B64)?, self.source(&halves[1], Type::B64)?])
            }
            _ => Err(format!("`{operand}` is no value of 128 bits")),
        }
    }

    /// Decodes a 128-bit destination as two halves.
    pub(super) fn wide_destination(&self, operand: &Operand) -> Result<[Register; 2], String> {
        match operand {
            Operand::Name(name) => match self.find(name) {
                Some(Binding::Wide(low)) => Ok([Register::Long(low), Register::Long(low + 1)]),
                _ => Err(format!("`{name}` is no register of 128 bits")),
            },
            _ => Err(format!("`{operand}` is no register of 128 bits")),
        }
    }

    /// Decodes 32-bit sources in braces.
    pub(super) fn word_sources(&mut self, operand: &Operand) -> Result<Box<[Source]>, String> {
        parts(operand).iter().map(|one| self.source(one, Type::B32)).collect()
    }

    /// Decodes 32-bit destinations in braces.
    pub(super) fn word_destinations(
        &mut self,
        operand: &Operand,
    ) -> Result<Box<[Option<Register>]>, String> {
        let found: Result<Box<[_]>, String> =
            parts(operand).iter().map(|one| self.destination_wide(one, Type::B32)).collect();
        let found = found?;
        if found.iter().flatten().any(|register| register.bits() != 32) {
            return Err(format!("`{operand}` has registers that do not have 32 bits"));
        }
        Ok(found)
    }

    /// Decodes an immediate integer.
    pub(super) fn immediate(&self, operand: &Operand) -> Result<u64, String> {
        match operand {
            Operand::Integer(value) => Ok(*value),
            _ => Err(format!("`{operand}` has to be a constant")),
        }
    }
}

/// Returns the operands in braces, or a single operand.
pub(super) fn parts(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(operands) => operands,
        one => std::slice::from_ref(one),
    }
}

/// Checks for exactly N operands.
pub(super) fn exactly<const N: usize>(operands: &[Operand]) -> Result<&[Operand; N], String> {
    operands
        .try_into()
        .map_err(|_| format!("{N} operands are expected, {} are given", operands.len()))
}

/// Checks for `least` to `most` operands.
pub(super) fn between(
    operands: &[Operand],
    least: usize,
    most: usize,
) -> Result<&[Operand], String> {
    if (least..=most).contains(&operands.len()) {
        return Ok(operands);
    }
    Err(format!("{least} to {most} operands are expected, {} are given", operands.len()))
}
