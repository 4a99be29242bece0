//! Operands that are a little off: constants are changed in place, registers by an instruction
//! before, into registers that the program does not use.

use super::{Class, Edit, Replacement};
use crate::decode::{
    BinaryOperation, Instruction, Program, Register, ScalarInstruction, Source, Type,
};

/// Registers beyond those of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spare {
    word: u32,
    long: u32,
}

/// How a value is changed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Add(i64),
    /// These bits are inverted.
    Invert(u64),
}

impl Spare {
    pub(super) fn of(program: &Program) -> Spare {
        Spare { word: program.word_count, long: program.long_count }
    }

    /// Gives the program the registers.
    pub(super) fn take(self, program: &mut Program) {
        (program.word_count, program.long_count) = (self.word + 1, self.long + 1);
    }

    /// An instruction with one of its sources changed: `put` makes it of the new source.
    pub(super) fn edit(
        self,
        class: Class,
        what: &'static str,
        source: Source,
        change: Change,
        put: impl FnOnce(Source) -> Instruction,
    ) -> Edit {
        let (before, changed) = self.changed(source, change);
        let steps = before.into_iter().chain([put(changed)]).collect();
        Edit { class, what, replacement: Replacement::Steps(steps) }
    }

    /// The changed source, and the instruction that computes it, if it takes one.
    pub(super) fn changed(self, source: Source, change: Change) -> (Option<Instruction>, Source) {
        let register = match (source, change) {
            (Source::Immediate(value), Change::Add(by)) => {
                return (None, Source::Immediate(value.wrapping_add_signed(by)));
            }
            (Source::Immediate(value), Change::Invert(bits)) => {
                return (None, Source::Immediate(value ^ bits));
            }
            (Source::Register(register), _) => register,
        };
        let (destination, value_type) = match register {
            Register::Half(_) | Register::Word(_) => (Register::Word(self.word), Type::B32),
            Register::Long(_) => (Register::Long(self.long), Type::B64),
        };
        let (operation, value_type, by) = match (change, value_type) {
            (Change::Invert(bits), of) => (BinaryOperation::Xor, of, bits),
            (Change::Add(by), Type::B32) => (add(), Type::U32, u64::from(by as u32)),
            (Change::Add(by), _) => (add(), Type::U64, by as u64),
        };
        let b = Source::Immediate(by);
        let computed =
            ScalarInstruction::Binary { operation, value_type, destination, a: source, b };
        (Some(Instruction::Scalar(computed)), Source::Register(destination))
    }
}

fn add() -> BinaryOperation {
    BinaryOperation::Add { saturate: false, carry_in: false, carry_out: false }
}
