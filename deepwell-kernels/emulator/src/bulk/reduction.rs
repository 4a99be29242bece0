//! Arithmetic of `cp.reduce`.

use super::element::ElementType;
use crate::error::Fault;
use crate::number::{Format, Rounding, decode, encode_f64};

/// Operations that combine a new value with the value in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOperation {
    /// Sum; floating point rounds to nearest even.
    Add,
    /// Minimum; of a number and a NaN, the number.
    Min,
    /// Maximum; of a number and a NaN, the number.
    Max,
    /// `old >= new ? 0 : old + 1`.
    Increment,
    /// `old == 0 || old > new ? new : old - 1`.
    Decrement,
    /// Bitwise.
    And,
    /// Bitwise.
    Or,
    /// Bitwise.
    Xor,
}

/// Element types of reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ReduceElement {
    B32,
    B64,
    U32,
    U64,
    S32,
    S64,
    F16,
    Bf16,
    F32,
    F64,
}

impl ReduceElement {
    /// Returns the reduction type of a map's elements.
    pub(super) fn of_map(element: ElementType) -> Option<ReduceElement> {
        Some(match element {
            ElementType::U32 => ReduceElement::U32,
            ElementType::S32 => ReduceElement::S32,
            ElementType::U64 => ReduceElement::U64,
            ElementType::S64 => ReduceElement::S64,
            ElementType::F16 => ReduceElement::F16,
            ElementType::Bf16 => ReduceElement::Bf16,
            ElementType::F32 | ElementType::F32FlushToZero => ReduceElement::F32,
            ElementType::F64 => ReduceElement::F64,
            _ => return None,
        })
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        use ReduceElement::{B32, Bf16, F16, F32, S32, U32};
        match self {
            F16 | Bf16 => 2,
            B32 | U32 | S32 | F32 => 4,
            _ => 8,
        }
    }

    /// Checks the operation and the type against the table of the ISA.
    pub(super) fn check(self, operation: ReduceOperation, to_global: bool) -> Result<(), Fault> {
        use ReduceElement::{B32, B64, Bf16, F16, F32, F64, S32, S64, U32, U64};
        use ReduceOperation::{Add, And, Decrement, Increment, Max, Min, Or, Xor};
        let known = match (operation, to_global) {
            (Add, true) => matches!(self, U32 | S32 | U64 | S64 | F32 | F64 | F16 | Bf16),
            (Add, false) => matches!(self, U32 | S32 | U64),
            (Min | Max, true) => matches!(self, U32 | S32 | U64 | S64 | F16 | Bf16),
            (Min | Max, false) => matches!(self, U32 | S32),
            (Increment | Decrement, _) => self == U32,
            (And | Or | Xor, true) => matches!(self, B32 | B64 | U32 | S32 | U64 | S64),
            (And | Or | Xor, false) => matches!(self, B32 | U32 | S32),
        };
        if known {
            return Ok(());
        }
        Err(Fault::new(
            "bulk-reduce-type",
            format!(
                "{operation:?} in {} memory does not know {self:?}",
                if to_global { "global" } else { "shared" }
            ),
        ))
    }

    /// Combines `new` into `old`.
    pub(super) fn combine(self, operation: ReduceOperation, old: &mut [u8], new: &[u8]) {
        let size = self.bytes();
        for (old, new) in old.chunks_exact_mut(size).zip(new.chunks_exact(size)) {
            let value = self.combine_bits(operation, bits(old), bits(new));
            old.copy_from_slice(&value.to_le_bytes()[..size]);
        }
    }

    fn combine_bits(self, operation: ReduceOperation, old: u64, new: u64) -> u64 {
        use ReduceElement::{Bf16, F16, F32, F64, S32, S64};
        match operation {
            ReduceOperation::And => old & new,
            ReduceOperation::Or => old | new,
            ReduceOperation::Xor => old ^ new,
            ReduceOperation::Increment => {
                if old >= new {
                    0
                } else {
                    old + 1
                }
            }
            ReduceOperation::Decrement => {
                if old == 0 || old > new {
                    new
                } else {
                    old - 1
                }
            }
            ReduceOperation::Add => match self {
                F16 => add_half(Format::F16, old, new),
                Bf16 => add_half(Format::BF16, old, new),
                F32 => u64::from(add_single(old as u32, new as u32)),
                F64 => canonical_double(f64::from_bits(old) + f64::from_bits(new)),
                _ => old.wrapping_add(new),
            },
            ReduceOperation::Min | ReduceOperation::Max => {
                let wants_greater = operation == ReduceOperation::Max;
                match self {
                    F16 => select_half(Format::F16, old, new, wants_greater),
                    Bf16 => select_half(Format::BF16, old, new, wants_greater),
                    S32 => select(old, new, (new as i32) > (old as i32), wants_greater),
                    S64 => select(old, new, (new as i64) > (old as i64), wants_greater),
                    _ => select(old, new, new > old, wants_greater),
                }
            }
        }
    }
}

fn bits(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn select(old: u64, new: u64, is_new_greater: bool, wants_greater: bool) -> u64 {
    if is_new_greater == wants_greater { new } else { old }
}

/// Selects the lesser or greater half; -0 is less than +0. Two NaNs give the canonical NaN.
fn select_half(format: Format, old: u64, new: u64, wants_greater: bool) -> u64 {
    let (old_value, new_value) = (decode(format, old as u32), decode(format, new as u32));
    match (old_value.is_nan(), new_value.is_nan()) {
        (true, true) => 0x7fff,
        (true, false) => new,
        (false, true) => old,
        (false, false) => {
            let greater = new_value.total_cmp(&old_value).is_gt();
            select(old, new, greater, wants_greater)
        }
    }
}

fn add_half(format: Format, old: u64, new: u64) -> u64 {
    // The formats have so few bits that the sum in f64 is exact, or one summand is too small to
    // decide a tie.
    let sum = f64::from(decode(format, old as u32)) + f64::from(decode(format, new as u32));
    if sum.is_nan() {
        return 0x7fff;
    }
    u64::from(encode_f64(format, sum, Rounding::NearestEven, false, false))
}

/// Adds without flushing subnormal inputs and results, as on an H200.
fn add_single(old: u32, new: u32) -> u32 {
    let sum = f32::from_bits(old) + f32::from_bits(new);
    if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() }
}

fn canonical_double(sum: f64) -> u64 {
    if sum.is_nan() { 0x7fff_ffff_ffff_ffff } else { sum.to_bits() }
}
