//! Decoding of bit operations: logic, shifts, permutation, counting and fields.

use super::Instruction;
use super::lower::{Decoded, Lowering};
use super::operands::exactly;
use super::scalar_instruction::{
    BinaryOperation, LogicOperation, PermuteMode, ScalarInstruction, TernaryOperation,
    UnaryOperation,
};
use super::types::Type;
use super::words::Words;
use crate::ptx::Operand;

const BITS: &[Type] = &[Type::B16, Type::B32, Type::B64];

impl Lowering<'_> {
    /// Decodes `and` to `prmt`.
    pub(super) fn logic(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        match name {
            "and" | "or" | "xor" => {
                let value_type =
                    words.take_type_of(&[Type::Predicate, Type::B16, Type::B32, Type::B64])?;
                let (predicates, bits) = match name {
                    "and" => (LogicOperation::And, BinaryOperation::And),
                    "or" => (LogicOperation::Or, BinaryOperation::Or),
                    _ => (LogicOperation::Xor, BinaryOperation::Xor),
                };
                if value_type != Type::Predicate {
                    return self.binary(bits, value_type, [value_type; 3], operands);
                }
                let [p, a, b] = exactly(operands)?;
                Ok(Instruction::Scalar(ScalarInstruction::CombinePredicates {
                    operation: predicates,
                    destination: self.predicate_register(p)?,
                    a: self.predicate(a)?,
                    b: self.predicate(b)?,
                }))
            }
            "not" => {
                let value_type =
                    words.take_type_of(&[Type::Predicate, Type::B16, Type::B32, Type::B64])?;
                if value_type != Type::Predicate {
                    return self.unary_into(UnaryOperation::Not, value_type, value_type, operands);
                }
                let [p, a] = exactly(operands)?;
                let source = self.predicate(a)?.negate();
                let destination = self.predicate_register(p)?;
                Ok(Instruction::Scalar(ScalarInstruction::MovePredicate { destination, source }))
            }
            "cnot" => {
                let value_type = words.take_type_of(BITS)?;
                self.unary_into(UnaryOperation::LogicalNot, value_type, value_type, operands)
            }
            "lop3" => {
                let value_type = words.take_type_of(&[Type::B32])?;
                let [d, a, b, c, table] = exactly(operands)?;
                let table = self.immediate(table)?;
                if table > 255 {
                    return Err(format!("truth table {table} is more than 255"));
                }
                let same = [value_type; 4];
                let operands = [d.clone(), a.clone(), b.clone(), c.clone()];
                let operation = TernaryOperation::Logic3(table as u8);
                self.ternary(operation, value_type, same, &operands)
            }
            "shf" => {
                words.take_type_of(&[Type::B32])?;
                let left = words.take("l");
                if !left {
                    words.expect(&["r"])?;
                }
                let wrap = words.take("wrap");
                if !wrap {
                    words.expect(&["clamp"])?;
                }
                let operation = if left {
                    TernaryOperation::FunnelLeft { wrap }
                } else {
                    TernaryOperation::FunnelRight { wrap }
                };
                self.ternary(operation, Type::B32, [Type::B32; 4], operands)
            }
            "shl" => {
                let value_type = words.take_type_of(BITS)?;
                let types = [value_type, value_type, Type::U32];
                self.binary(BinaryOperation::ShiftLeft, value_type, types, operands)
            }
            "shr" => {
                let value_type = words.take_type()?;
                if !value_type.is_integer() || value_type.bits() < 16 {
                    return Err(format!("type `.{value_type}` is not known for `shr`"));
                }
                let types = [value_type, value_type, Type::U32];
                self.binary(BinaryOperation::ShiftRight, value_type, types, operands)
            }
            _ => {
                words.take_type_of(&[Type::B32])?;
                let mode = words
                    .take_from(&[
                        ("f4e", PermuteMode::Forward4),
                        ("b4e", PermuteMode::Backward4),
                        ("rc8", PermuteMode::Replicate8),
                        ("ecl", PermuteMode::EdgeClampLeft),
                        ("ecr", PermuteMode::EdgeClampRight),
                        ("rc16", PermuteMode::Replicate16),
                    ])
                    .unwrap_or(PermuteMode::Index);
                let operation = TernaryOperation::Permute(mode);
                self.ternary(operation, Type::B32, [Type::B32; 4], operands)
            }
        }
    }

    /// Decodes counting, bit fields and small products.
    pub(super) fn bits(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let wide = [Type::B32, Type::B64];
        let integers = [Type::U32, Type::U64, Type::S32, Type::S64];
        let words32 = [Type::U32, Type::S32];
        match name {
            "popc" | "clz" => {
                let value_type = words.take_type_of(&wide)?;
                let operation = if name == "popc" {
                    UnaryOperation::PopulationCount
                } else {
                    UnaryOperation::LeadingZeros
                };
                self.unary_into(operation, value_type, Type::U32, operands)
            }
            "bfind" => {
                let shift_amount = words.take("shiftamt");
                let value_type = words.take_type_of(&integers)?;
                let operation = UnaryOperation::FindBit { shift_amount };
                self.unary_into(operation, value_type, Type::U32, operands)
            }
            "brev" => {
                let value_type = words.take_type_of(&wide)?;
                self.unary_into(UnaryOperation::ReverseBits, value_type, value_type, operands)
            }
            "bfe" => {
                let value_type = words.take_type_of(&integers)?;
                let types = [value_type, value_type, Type::U32, Type::U32];
                self.ternary(TernaryOperation::ExtractBits, value_type, types, operands)
            }
            "bfi" => {
                let value_type = words.take_type_of(&wide)?;
                let [d, a, b, position, length] = exactly(operands)?;
                Ok(Instruction::Scalar(ScalarInstruction::InsertBits {
                    value_type,
                    destination: self.destination(d, value_type)?,
                    a: self.source(a, value_type)?,
                    b: self.source(b, value_type)?,
                    position: self.source(position, Type::U32)?,
                    length: self.source(length, Type::U32)?,
                }))
            }
            "fns" => {
                words.take_type_of(&[Type::B32])?;
                self.ternary(TernaryOperation::FindNthSet, Type::B32, [Type::B32; 4], operands)
            }
            "bmsk" | "szext" => {
                let wrap = words.take("wrap");
                if !wrap {
                    words.expect(&["clamp"])?;
                }
                let (operation, value_type) = if name == "bmsk" {
                    (BinaryOperation::BitMask { wrap }, words.take_type_of(&[Type::B32])?)
                } else {
                    (BinaryOperation::ExtendSign { wrap }, words.take_type_of(&words32)?)
                };
                self.binary(operation, value_type, [value_type, value_type, Type::U32], operands)
            }
            "mul24" | "mad24" => {
                let high = words.take("hi");
                if !high {
                    words.expect(&["lo"])?;
                }
                let saturate = words.take("sat");
                let value_type = words.take_type_of(&words32)?;
                if name == "mul24" {
                    let operation = BinaryOperation::Multiply24 { high };
                    return self.binary(operation, value_type, [value_type; 3], operands);
                }
                let operation = TernaryOperation::MultiplyAdd24 { high, saturate };
                self.ternary(operation, value_type, [value_type; 4], operands)
            }
            "sad" => {
                let value_type = words.take_type()?;
                if !value_type.is_integer() || value_type.bits() < 16 {
                    return Err(format!("type `.{value_type}` is not known for `sad`"));
                }
                let operation = TernaryOperation::SumOfAbsoluteDifferences;
                self.ternary(operation, value_type, [value_type; 4], operands)
            }
            _ => {
                let high = name == "dp2a" && words.take("hi");
                if name == "dp2a" && !high {
                    words.expect(&["lo"])?;
                }
                let a = words.take_type_of(&words32)?;
                let b = words.take_type_of(&words32)?;
                let signed = [a.is_signed(), b.is_signed()];
                let operation = if name == "dp4a" {
                    TernaryOperation::Dot4 { signed }
                } else {
                    TernaryOperation::Dot2 { signed, high }
                };
                self.ternary(operation, Type::B32, [Type::B32; 4], operands)
            }
        }
    }
}
