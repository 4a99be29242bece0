//! Table of scalar instructions with one type in the name, such as `brev.b32`, and the decoder of
//! its rows. The types of all operands follow from that type.

use super::lower::{Decoded, Lowering};
use super::scalar_instruction::{BinaryOperation, PermuteMode, TernaryOperation, UnaryOperation};
use super::types::Type;
use super::words::Words;
use crate::ptx::Operand;

/// An operation without its operands.
enum Operation {
    Unary(UnaryOperation),
    Binary(BinaryOperation),
    Ternary(TernaryOperation),
}

/// Type of an operand.
#[derive(Clone, Copy)]
enum OperandType {
    /// The type in the name.
    Named,
    /// `.u32`, or any type of this width.
    Word,
}

/// A row of the table.
pub(super) struct Form {
    name: &'static str,
    types: &'static [Type],
    /// Types of the destination and the sources.
    operands: &'static [OperandType],
    /// Takes the modifiers from the name.
    operation: fn(&mut Words<'_>) -> Result<Operation, String>,
}

use OperandType::{Named, Word};

const BITS: &[Type] = &[Type::B16, Type::B32, Type::B64];
const WIDE: &[Type] = &[Type::B32, Type::B64];
const WIDE_INTEGERS: &[Type] = &[Type::U32, Type::U64, Type::S32, Type::S64];
const WORD: &[Type] = &[Type::B32];
const WORD_INTEGERS: &[Type] = &[Type::U32, Type::S32];
const INTEGERS_AND_BITS: &[Type] = &[
    Type::B16,
    Type::B32,
    Type::B64,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S16,
    Type::S32,
    Type::S64,
];

const FORMS: &[Form] = &[
    Form {
        name: "cnot",
        types: BITS,
        operands: &[Named; 2],
        operation: |_| Ok(Operation::Unary(UnaryOperation::LogicalNot)),
    },
    Form {
        name: "popc",
        types: WIDE,
        operands: &[Word, Named],
        operation: |_| Ok(Operation::Unary(UnaryOperation::PopulationCount)),
    },
    Form {
        name: "clz",
        types: WIDE,
        operands: &[Word, Named],
        operation: |_| Ok(Operation::Unary(UnaryOperation::LeadingZeros)),
    },
    Form {
        name: "bfind",
        types: WIDE_INTEGERS,
        operands: &[Word, Named],
        operation: |words| {
            let shift_amount = words.take("shiftamt");
            Ok(Operation::Unary(UnaryOperation::FindBit { shift_amount }))
        },
    },
    Form {
        name: "brev",
        types: WIDE,
        operands: &[Named; 2],
        operation: |_| Ok(Operation::Unary(UnaryOperation::ReverseBits)),
    },
    Form {
        name: "shl",
        types: BITS,
        operands: &[Named, Named, Word],
        operation: |_| Ok(Operation::Binary(BinaryOperation::ShiftLeft)),
    },
    Form {
        name: "shr",
        types: INTEGERS_AND_BITS,
        operands: &[Named, Named, Word],
        operation: |_| Ok(Operation::Binary(BinaryOperation::ShiftRight)),
    },
    Form {
        name: "bmsk",
        types: WORD,
        operands: &[Named, Named, Word],
        operation: |words| {
            let wrap = words.either("wrap", "clamp")?;
            Ok(Operation::Binary(BinaryOperation::BitMask { wrap }))
        },
    },
    Form {
        name: "szext",
        types: WORD_INTEGERS,
        operands: &[Named, Named, Word],
        operation: |words| {
            let wrap = words.either("wrap", "clamp")?;
            Ok(Operation::Binary(BinaryOperation::ExtendSign { wrap }))
        },
    },
    Form {
        name: "mul24",
        types: WORD_INTEGERS,
        operands: &[Named; 3],
        operation: |words| {
            let high = words.either("hi", "lo")?;
            Ok(Operation::Binary(BinaryOperation::Multiply24 { high }))
        },
    },
    Form {
        name: "mad24",
        types: WORD_INTEGERS,
        operands: &[Named; 4],
        operation: |words| {
            let high = words.either("hi", "lo")?;
            let saturate = words.take("sat");
            Ok(Operation::Ternary(TernaryOperation::MultiplyAdd24 { high, saturate }))
        },
    },
    Form {
        name: "sad",
        types: INTEGERS_AND_BITS,
        operands: &[Named; 4],
        operation: |_| Ok(Operation::Ternary(TernaryOperation::SumOfAbsoluteDifferences)),
    },
    Form {
        name: "bfe",
        types: WIDE_INTEGERS,
        operands: &[Named, Named, Word, Word],
        operation: |_| Ok(Operation::Ternary(TernaryOperation::ExtractBits)),
    },
    Form {
        name: "fns",
        types: WORD,
        operands: &[Named; 4],
        operation: |_| Ok(Operation::Ternary(TernaryOperation::FindNthSet)),
    },
    Form {
        name: "shf",
        types: WORD,
        operands: &[Named; 4],
        operation: |words| {
            let left = words.either("l", "r")?;
            let wrap = words.either("wrap", "clamp")?;
            Ok(Operation::Ternary(match left {
                true => TernaryOperation::FunnelLeft { wrap },
                false => TernaryOperation::FunnelRight { wrap },
            }))
        },
    },
    Form {
        name: "prmt",
        types: WORD,
        operands: &[Named; 4],
        operation: |words| {
            let mode = words.take_from(&[
                ("f4e", PermuteMode::Forward4),
                ("b4e", PermuteMode::Backward4),
                ("rc8", PermuteMode::Replicate8),
                ("ecl", PermuteMode::EdgeClampLeft),
                ("ecr", PermuteMode::EdgeClampRight),
                ("rc16", PermuteMode::Replicate16),
            ]);
            let mode = mode.unwrap_or(PermuteMode::Index);
            Ok(Operation::Ternary(TernaryOperation::Permute(mode)))
        },
    },
];

/// Returns the table row of an instruction's first word.
pub(super) fn find(name: &str) -> Option<&'static Form> {
    FORMS.iter().find(|form| form.name == name)
}

impl Lowering<'_> {
    /// Decodes an instruction of the table.
    pub(super) fn scalar_form(
        &mut self,
        form: &Form,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let operation = (form.operation)(words)?;
        let named = words.take_type_of(form.types)?;
        let types: Vec<Type> = form
            .operands
            .iter()
            .map(|operand| match operand {
                Named => named,
                Word => Type::U32,
            })
            .collect();
        match (operation, types.as_slice()) {
            (Operation::Unary(operation), &[d, _]) => self.unary(operation, named, d, operands),
            (Operation::Binary(operation), &[d, a, b]) => {
                self.binary(operation, named, [d, a, b], operands)
            }
            (Operation::Ternary(operation), &[d, a, b, c]) => {
                self.ternary(operation, named, [d, a, b, c], operands)
            }
            _ => unreachable!("the operation of `{}` takes other operands", form.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::Opcode;

    #[test]
    fn rows_have_distinct_names_and_the_operands_of_their_operation() {
        for (index, form) in FORMS.iter().enumerate() {
            let others = FORMS[index + 1..].iter();
            assert!(others.clone().all(|other| other.name != form.name), "{}", form.name);
            // All modifiers that some form must have.
            let words = ["x", "lo", "r", "clamp"].map(Into::into).into();
            let opcode = Opcode { text: "x".into(), words };
            let mut words = Words::new(&opcode).expect("few words");
            let sources = match (form.operation)(&mut words).expect(form.name) {
                Operation::Unary(_) => 1,
                Operation::Binary(_) => 2,
                Operation::Ternary(_) => 3,
            };
            assert_eq!(form.operands.len(), 1 + sources, "{}", form.name);
        }
    }
}
