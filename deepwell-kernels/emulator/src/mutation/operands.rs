//! Operands with small errors. Constants are changed in place. Registers are changed by an extra
//! instruction that writes to a register unused by the program.

use super::{Class, Edit, Replacement};
use crate::decode::{
    BinaryOperation, Instruction, Program, Register, ScalarInstruction, Source, Type,
};

/// The first registers beyond those of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spare {
    word: u32,
    long: u32,
}

/// Change of a value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Add(i64),
    /// Inverts these bits.
    Invert(u64),
}

impl Spare {
    pub(super) fn of(program: &Program) -> Spare {
        Spare { word: program.word_count, long: program.long_count }
    }

    /// Adds the spare registers to the program.
    pub(super) fn take(self, program: &mut Program) {
        (program.word_count, program.long_count) = (self.word + 1, self.long + 1);
    }

    /// Builds an edit with one changed source; `put` builds the instruction from the new source.
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

    /// Returns the changed source, and for a register the instruction that computes the value.
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
