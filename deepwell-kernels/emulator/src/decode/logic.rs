//! Decoding of bit operations whose operands differ from the table's: predicates, truth tables,
//! fields and dot products of bytes.

use super::Instruction;
use super::lower::{Decoded, Lowering};
use super::operands::exactly;
use super::scalar_instruction::{
    BinaryOperation, LogicOperation, ScalarInstruction, TernaryOperation, UnaryOperation,
};
use super::types::Type;
use super::words::Words;
use crate::ptx::Operand;

const BITS_OR_PREDICATE: &[Type] = &[Type::Predicate, Type::B16, Type::B32, Type::B64];

impl Lowering<'_> {
    /// Decodes `and`, `or`, `xor`.
    pub(super) fn logic(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let value_type = words.take_type_of(BITS_OR_PREDICATE)?;
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

    /// Decodes `not`.
    pub(super) fn not(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let value_type = words.take_type_of(BITS_OR_PREDICATE)?;
        if value_type != Type::Predicate {
            return self.unary(UnaryOperation::Not, value_type, value_type, operands);
        }
        let [p, a] = exactly(operands)?;
        let source = self.predicate(a)?.negate();
        let destination = self.predicate_register(p)?;
        Ok(Instruction::Scalar(ScalarInstruction::MovePredicate { destination, source }))
    }

    /// Decodes `lop3`.
    pub(super) fn logic3(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let value_type = words.take_type_of(&[Type::B32])?;
        let [_, _, _, _, table] = exactly(operands)?;
        let table = self.immediate(table)?;
        if table > 255 {
            return Err(format!("truth table {table} is more than 255"));
        }
        let operation = TernaryOperation::Logic3(table as u8);
        self.ternary(operation, value_type, [value_type; 4], &operands[..4])
    }

    /// Decodes `bfi`.
    pub(super) fn insert_bits(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let value_type = words.take_type_of(&[Type::B32, Type::B64])?;
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

    /// Decodes `dp4a` and `dp2a`.
    pub(super) fn dot_product(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let is_dot2 = name == "dp2a";
        let high = is_dot2 && words.either("hi", "lo")?;
        let a = words.take_type_of(&[Type::U32, Type::S32])?;
        let b = words.take_type_of(&[Type::U32, Type::S32])?;
        let signed = [a.is_signed(), b.is_signed()];
        let operation = match is_dot2 {
            true => TernaryOperation::Dot2 { signed, high },
            false => TernaryOperation::Dot4 { signed },
        };
        self.ternary(operation, Type::B32, [Type::B32; 4], operands)
    }
}
