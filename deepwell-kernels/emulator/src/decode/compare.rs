//! Decoding of comparisons, selections and moves.

use super::Instruction;
use super::lower::{Decoded, Lowering};
use super::operands::{exactly, parts, register_bits};
use super::scalar_instruction::{Comparison, LogicOperation, ScalarInstruction, TernaryOperation};
use super::scope::Binding;
use super::special::special_register;
use super::types::{Register, Source, Type};
use super::words::Words;
use crate::ptx::Operand;

const COMPARISONS: &[(&str, Comparison)] = &[
    ("eq", Comparison::Equal),
    ("ne", Comparison::NotEqual),
    ("lt", Comparison::Less),
    ("le", Comparison::LessEqual),
    ("gt", Comparison::Greater),
    ("ge", Comparison::GreaterEqual),
    ("lo", Comparison::Less),
    ("ls", Comparison::LessEqual),
    ("hi", Comparison::Greater),
    ("hs", Comparison::GreaterEqual),
    ("equ", Comparison::EqualOrNan),
    ("neu", Comparison::NotEqualOrNan),
    ("ltu", Comparison::LessOrNan),
    ("leu", Comparison::LessEqualOrNan),
    ("gtu", Comparison::GreaterOrNan),
    ("geu", Comparison::GreaterEqualOrNan),
    ("num", Comparison::Ordered),
    ("nan", Comparison::Unordered),
];

const LOGIC: &[(&str, LogicOperation)] =
    &[("and", LogicOperation::And), ("or", LogicOperation::Or), ("xor", LogicOperation::Xor)];

/// Types of comparisons and selections.
fn is_plain(value_type: Type) -> bool {
    (value_type.is_integer() && value_type.bits() >= 16)
        || matches!(value_type, Type::F32 | Type::F64)
}

fn is_half(value_type: Type) -> bool {
    matches!(value_type, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2)
}

fn check_comparison(comparison: Comparison, value_type: Type) -> Result<(), String> {
    use Comparison as C;
    let integer = matches!(
        comparison,
        C::Equal | C::NotEqual | C::Less | C::LessEqual | C::Greater | C::GreaterEqual
    );
    if value_type.is_integer() && !integer {
        return Err(format!("the comparison is only there for floats, not for `.{value_type}`"));
    }
    if matches!(value_type, Type::B16 | Type::B32 | Type::B64)
        && !matches!(comparison, C::Equal | C::NotEqual)
    {
        return Err(format!("`.{value_type}` is only compared by `.eq` and `.ne`"));
    }
    Ok(())
}

impl Lowering<'_> {
    /// Decodes `setp`, `set`, `selp` and `slct`.
    pub(super) fn comparison(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        match name {
            "selp" => {
                let value_type = words.take_type()?;
                if !is_plain(value_type) {
                    return Err(format!("type `.{value_type}` is not known for `selp`"));
                }
                let [d, a, b, p] = exactly(operands)?;
                Ok(Instruction::Scalar(ScalarInstruction::Select {
                    destination: self.destination(d, value_type)?,
                    a: self.source(a, value_type)?,
                    b: self.source(b, value_type)?,
                    predicate: self.predicate(p)?,
                }))
            }
            "slct" => {
                let flush_subnormals = words.take("ftz");
                let value_type = words.take_type()?;
                let condition = words.take_type_of(&[Type::S32, Type::F32])?;
                if !is_plain(value_type) {
                    return Err(format!("type `.{value_type}` is not known for `slct`"));
                }
                let operation = TernaryOperation::SelectBySign { condition, flush_subnormals };
                let types = [value_type, value_type, value_type, condition];
                self.ternary(operation, value_type, types, operands)
            }
            _ => self.compare(name, words, operands),
        }
    }

    fn compare(&mut self, name: &str, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let comparison = words.take_from(COMPARISONS).ok_or("the comparison is missing")?;
        let logic = words.take_from(LOGIC);
        let flush_subnormals = words.take("ftz");
        let result_type = if name == "set" { Some(words.take_type()?) } else { None };
        let value_type = words.take_type()?;
        if !is_plain(value_type) && !is_half(value_type) {
            return Err(format!("type `.{value_type}` is not known for `{name}`"));
        }
        check_comparison(comparison, value_type)?;
        let (d, a, b, combine) = match logic {
            Some(logic) => {
                let [d, a, b, c] = exactly(operands)?;
                (d, a, b, Some((logic, self.predicate(c)?)))
            }
            None => {
                let [d, a, b] = exactly(operands)?;
                (d, a, b, None)
            }
        };
        let (a, b) = (self.source(a, value_type)?, self.source(b, value_type)?);
        if let Some(result_type) = result_type {
            use Type::{Bf16, Bf16x2, F16, F16x2, F32, S16, S32, U16, U32};
            let known = [U16, S16, U32, S32, F32, F16, Bf16, F16x2, Bf16x2];
            if !known.contains(&result_type) {
                return Err(format!("result of type `.{result_type}` is not known for `set`"));
            }
            return Ok(Instruction::Scalar(ScalarInstruction::Set {
                comparison,
                value_type,
                result_type,
                flush_subnormals,
                combine,
                destination: self.destination(d, result_type)?,
                a,
                b,
            }));
        }
        let (destination, second) = match d {
            Operand::Pair(first, second) => {
                (self.predicate_destination(first)?, self.predicate_destination(second)?)
            }
            one => (self.predicate_destination(one)?, None),
        };
        Ok(Instruction::Scalar(ScalarInstruction::SetPredicate {
            comparison,
            value_type,
            flush_subnormals,
            combine,
            destination,
            second,
            a,
            b,
        }))
    }

    /// Decodes `mov` of registers, addresses, vectors, predicates and special registers.
    pub(super) fn mov(
        &mut self,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Option<Instruction>, String> {
        let value_type = words.take_type()?;
        words.finish()?;
        let [d, a] = exactly(operands)?;
        match value_type {
            Type::Predicate => {
                let source = self.predicate(a)?;
                let destination = self.predicate_register(d)?;
                return Ok(Some(Instruction::Scalar(ScalarInstruction::MovePredicate {
                    destination,
                    source,
                })));
            }
            Type::B128 => return self.move_wide(d, a).map(Some),
            _ if is_plain(value_type) || is_half(value_type) || value_type == Type::F32x2 => {}
            _ => return Err(format!("type `.{value_type}` is not known for `mov`")),
        }
        if let Operand::Vector(targets) = d {
            // From a vector, one move per element; from one register, an unpack.
            if let Operand::Vector(values) = a {
                return self.move_each(value_type, targets, values);
            }
            let part_bits = self.part_bits(value_type, targets.len())?;
            let source = self.source(a, value_type)?;
            let part_type = part_type(part_bits)?;
            let destinations: Result<Box<[_]>, String> =
                targets.iter().map(|one| self.destination_wide(one, part_type)).collect();
            return Ok(Some(Instruction::Scalar(ScalarInstruction::Unpack {
                destinations: destinations?,
                part_bits,
                source,
            })));
        }
        let destination = self.destination(d, value_type)?;
        if let Operand::Vector(values) = a {
            let part_bits = self.part_bits(value_type, values.len())?;
            let part_type = part_type(part_bits)?;
            let sources: Result<Box<[_]>, String> =
                values.iter().map(|one| self.source_wide(one, part_type)).collect();
            return Ok(Some(Instruction::Scalar(ScalarInstruction::Pack {
                destination,
                part_bits,
                sources: sources?,
            })));
        }
        if let Operand::Name(name) = a
            && self.find(name).is_none()
            && let Some((register, special_type)) = special_register(name)
            && register_bits(special_type) <= destination.bits()
        {
            return Ok(Some(Instruction::Special { destination, register }));
        }
        let steps = self.step_count();
        let source = self.source(a, value_type)?;
        // `a` was the address of a variable, just read into a temporary of this line. A register
        // read by an earlier line is not redirected.
        if self.step_count() > steps && self.redirect_special(source, destination) {
            return Ok(None);
        }
        Ok(Some(Instruction::Scalar(ScalarInstruction::Move { destination, source })))
    }

    fn move_each(
        &mut self,
        value_type: Type,
        targets: &[Operand],
        values: &[Operand],
    ) -> Result<Option<Instruction>, String> {
        if targets.len() != values.len() {
            return Err("vectors of different lengths".to_string());
        }
        for (target, value) in targets.iter().zip(values) {
            let destination = self.destination(target, value_type)?;
            let source = self.source(value, value_type)?;
            self.emit(Instruction::Scalar(ScalarInstruction::Move { destination, source }));
        }
        Ok(None)
    }

    fn part_bits(&self, value_type: Type, count: usize) -> Result<u32, String> {
        let bits = value_type.bits();
        if !matches!(count, 2 | 4) || bits / (count as u32) < 8 {
            return Err(format!("{count} parts of `.{value_type}` are not known"));
        }
        Ok(bits / count as u32)
    }

    fn move_wide(&mut self, d: &Operand, a: &Operand) -> Decoded {
        let targets: Vec<Register> = match d {
            Operand::Vector(_) => parts(d)
                .iter()
                .map(|one| self.destination(one, Type::B64))
                .collect::<Result<_, _>>()?,
            Operand::Sink => return Err("128 bits to `_`".to_string()),
            one => self.wide_destination(one)?.to_vec(),
        };
        let values: Vec<Source> = match a {
            Operand::Name(name) if matches!(self.find(name), Some(Binding::Wide(_))) => {
                self.wide_source(a)?.to_vec()
            }
            Operand::Integer(value) => vec![Source::Immediate(*value), Source::Immediate(0)],
            other => self.wide_source(other)?.to_vec(),
        };
        if targets.len() != 2 || values.len() != 2 {
            return Err("128 bits are two parts of 64".to_string());
        }
        // The second target may be the first value, so save it.
        let kept = self.temporary(Type::B64)?;
        let moved = |destination, source| {
            Instruction::Scalar(ScalarInstruction::Move { destination, source })
        };
        self.emit(moved(kept, values[1]));
        self.emit(moved(targets[0], values[0]));
        Ok(moved(targets[1], Source::Register(kept)))
    }
}

fn part_type(bits: u32) -> Result<Type, String> {
    match bits {
        8 => Ok(Type::B8),
        16 => Ok(Type::B16),
        32 => Ok(Type::B32),
        64 => Ok(Type::B64),
        _ => Err(format!("parts of {bits} bits are not known")),
    }
}
