//! What an instruction asks of the units of its SM.

use super::machine::Machine;
use crate::decode::{
    BinaryOperation, Instruction, MatrixElement, ScalarInstruction, Space, TernaryOperation, Type,
    UnaryOperation,
};

/// Demands of consecutive instructions of one warp.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Issue slots.
    pub issue: f32,
    /// FMA instructions of one and of two floats.
    pub fma: [f32; 2],
    /// ALU instructions.
    pub alu: f32,
    /// MUFU instructions.
    pub mufu: f32,
    /// Bytes through the port of shared memory.
    pub shared_bytes: f32,
    /// Bytes stored to device memory.
    pub stored_bytes: f32,
    /// Bytes loaded from device memory.
    pub loaded_bytes: f32,
    /// Clocks that the instructions take without other warps, fast and slow.
    pub alone: [f32; 2],
    /// Multiply-adds of `mma.sync`, in those of 16-bit operands.
    pub multiply_adds: f32,
}

impl Work {
    pub(super) fn add(&mut self, other: Work) {
        self.issue += other.issue;
        self.fma[0] += other.fma[0];
        self.fma[1] += other.fma[1];
        self.alu += other.alu;
        self.mufu += other.mufu;
        self.shared_bytes += other.shared_bytes;
        self.stored_bytes += other.stored_bytes;
        self.loaded_bytes += other.loaded_bytes;
        self.multiply_adds += other.multiply_adds;
    }

    /// The same at the rates of any machine, see [`Machine`].
    pub(super) fn lanes_at_least(&self) -> [f64; 3] {
        [self.fma[0] + self.fma[1], 2.0 * self.alu, 8.0 * self.mufu].map(f64::from)
    }

    /// Clocks in the lanes of an SM's quarter: FMA, ALU, MUFU.
    pub(super) fn lanes(&self, machine: &Machine) -> [f64; 3] {
        let [one, two] = self.fma.map(f64::from);
        [
            one * machine.fma_clocks + two * machine.fma_pair_clocks,
            f64::from(self.alu) * machine.alu_clocks,
            f64::from(self.mufu) * machine.mufu_clocks,
        ]
    }
}

/// Returns the work of an instruction; asynchronous operations only issue.
pub(super) fn work_of(instruction: &Instruction) -> Work {
    use Instruction as I;
    let one = Work { issue: 1.0, ..Work::default() };
    match instruction {
        I::Scalar(scalar) => of_scalar(scalar),
        // These are registers of the warp, or folded into addresses.
        I::Special { .. } | I::ConvertAddress { .. } | I::CreatePolicy { .. } | I::Hint => {
            Work::default()
        }
        I::Load(load) => {
            let bytes = (load.element.bytes() * 32 * load.destinations.len() as u32) as f32;
            of_access(load.space, bytes, true)
        }
        I::Store(store) => {
            let bytes = (store.element.bytes() * 32 * store.sources.len() as u32) as f32;
            of_access(store.space, bytes, false)
        }
        I::Atomic(atomic) => of_access(atomic.space, 128.0, false),
        I::LoadMatrix(load) => {
            let bytes = if load.element == MatrixElement::B16 { 128 } else { 256 };
            Work { shared_bytes: (bytes * load.count) as f32, ..one }
        }
        I::StoreMatrix(store) => {
            let bytes = if store.element == MatrixElement::B16 { 128 } else { 64 };
            Work { shared_bytes: (bytes * store.count) as f32, ..one }
        }
        // One warp instruction in a clock, through the port (QK).
        I::Shuffle(_) => Work { shared_bytes: 128.0, ..one },
        I::Vote(_) | I::Match(_) | I::Redux { .. } => Work { alu: 1.0, ..one },
        I::WarpMma(mma) => {
            let shape = mma.shape;
            let narrow = 16.0 / mma.a_type.bits() as f32;
            let products = (shape.m * shape.n * shape.k) as f32;
            Work { multiply_adds: products / narrow.max(1.0), ..one }
        }
        _ => one,
    }
}

fn of_access(space: Space, bytes: f32, is_load: bool) -> Work {
    let one = Work { issue: 1.0, ..Work::default() };
    match space {
        Space::Shared | Space::SharedCluster => Work { shared_bytes: bytes, ..one },
        Space::Global | Space::Generic if is_load => Work { loaded_bytes: bytes, ..one },
        Space::Global | Space::Generic => Work { stored_bytes: bytes, ..one },
        _ => one,
    }
}

fn of_scalar(scalar: &ScalarInstruction) -> Work {
    use ScalarInstruction as S;
    let alu = Work { issue: 1.0, alu: 1.0, ..Work::default() };
    let fma = |value_type: Type| match value_type {
        Type::F32x2 => Work { issue: 1.0, fma: [0.0, 1.0], ..Work::default() },
        _ => Work { issue: 1.0, fma: [1.0, 0.0], ..Work::default() },
    };
    let wide = |value_type: Type| if value_type.bits() == 64 { 2.0 } else { 1.0 };
    let scaled = |work: Work, by: f32| Work {
        issue: work.issue * by,
        fma: work.fma.map(|of| of * by),
        alu: work.alu * by,
        ..work
    };
    match scalar {
        // ptxas renames registers.
        S::Move { .. } | S::Pack { .. } | S::Unpack { .. } | S::MovePredicate { .. } => {
            Work::default()
        }
        S::CombinePredicates { .. } => Work { issue: 1.0, ..Work::default() },
        S::Unary { operation, .. } => match operation {
            UnaryOperation::Function(..) => Work { issue: 1.0, mufu: 1.0, ..Work::default() },
            // A modifier of the reader.
            UnaryOperation::FloatNegate { .. } | UnaryOperation::FloatAbsolute { .. } => {
                Work::default()
            }
            _ => alu,
        },
        S::Binary { operation, value_type, .. } => match operation {
            BinaryOperation::FloatAdd(_)
            | BinaryOperation::FloatSubtract(_)
            | BinaryOperation::FloatMultiply(_) => fma(*value_type),
            BinaryOperation::FloatDivide(_)
            | BinaryOperation::FloatDivideFull(_)
            | BinaryOperation::FloatDivideApproximate(_) => {
                Work { issue: 3.0, mufu: 1.0, fma: [2.0, 0.0], ..Work::default() }
            }
            BinaryOperation::Multiply(_) | BinaryOperation::Multiply24 { .. } => {
                scaled(fma(Type::S32), wide(*value_type))
            }
            _ => scaled(alu, wide(*value_type)),
        },
        S::Ternary { operation, value_type, .. } => match operation {
            TernaryOperation::FloatMultiplyAdd(_)
            | TernaryOperation::FloatMultiplySubtract { .. }
            | TernaryOperation::FloatMultiplyAddOutOfBounds { .. } => fma(*value_type),
            TernaryOperation::MultiplyAdd { .. } | TernaryOperation::MultiplyAdd24 { .. } => {
                scaled(fma(Type::S32), wide(*value_type))
            }
            _ => alu,
        },
        _ => alu,
    }
}
