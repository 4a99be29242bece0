//! Dispatch of instructions to functions on rows.

use super::registers::{LANES, Registers};
use super::rows::longs2;
use super::{compare, convert, float, integer, integer_ternary};
use crate::decode::{Register, ScalarInstruction, Source};

/// Executes one instruction on the lanes of `mask`. Other lanes keep their values.
pub fn execute(instruction: &ScalarInstruction, registers: &mut Registers, mask: u32) {
    use ScalarInstruction as S;
    let r = registers;
    match instruction {
        S::Move { destination, source } => move_row(r, mask, *destination, *source),
        S::Pack { destination, part_bits, sources } => {
            pack(r, mask, *destination, *part_bits, sources);
        }
        S::Unpack { destinations, part_bits, source } => {
            unpack(r, mask, destinations, *part_bits, *source);
        }
        S::Unary { operation, value_type, destination, a } => {
            if !float::unary(r, mask, *operation, *value_type, *destination, *a) {
                integer::unary(r, mask, *operation, *value_type, *destination, *a);
            }
        }
        S::Binary { operation, value_type, destination, a, b } => {
            let sources = [*a, *b];
            if !float::binary(r, mask, *operation, *value_type, *destination, sources) {
                integer::binary(r, mask, *operation, *value_type, *destination, sources);
            }
        }
        S::Ternary { operation, value_type, destination, a, b, c } => {
            let sources = [*a, *b, *c];
            if !float::ternary(r, mask, *operation, *value_type, *destination, sources) {
                integer_ternary::ternary(r, mask, *operation, *value_type, *destination, sources);
            }
        }
        S::InsertBits { value_type, destination, a, b, position, length } => {
            let (position, length) = (r.row32(*position), r.row32(*length));
            let (a, b) = (r.row64(*a), r.row64(*b));
            let bits = value_type.bits();
            let out: [u64; LANES] = std::array::from_fn(|lane| {
                integer_ternary::insert(a[lane], b[lane], position[lane], length[lane], bits)
            });
            r.set_row64(*destination, &out, mask);
        }
        S::Convert { conversion, destination, sources, extra } => {
            convert::convert(r, mask, conversion, *destination, sources, *extra);
        }
        S::ConvertPack { to, from, destination, a, b, c } => {
            convert::pack(r, mask, *to, *from, *destination, [*a, *b], *c);
        }
        S::MixedPrecision { multiply, subtract, narrow, modifiers, destination, a, b, c } => {
            let (multiply, subtract) = (*multiply, *subtract);
            let sources = [*a, *b, *c];
            float::mixed(r, mask, *destination, sources, multiply, subtract, *narrow, *modifiers);
        }
        S::SetPredicate {
            comparison,
            value_type,
            flush_subnormals,
            combine,
            destination,
            second,
            a,
            b,
        } => {
            let (low, high) =
                compare::compare(r, *comparison, *value_type, *flush_subnormals, [*a, *b]);
            let with = |value: u32| match combine {
                Some((operation, other)) => {
                    compare::combine(*operation, value, r.predicate(*other))
                }
                None => value,
            };
            let (first, other) = (with(low), with(high.unwrap_or(!low)));
            if let Some(index) = destination {
                r.set_predicate(*index, first, mask);
            }
            if let Some(index) = second {
                r.set_predicate(*index, other, mask);
            }
        }
        S::Set {
            comparison,
            value_type,
            result_type,
            flush_subnormals,
            combine,
            destination,
            a,
            b,
        } => {
            let (low, high) =
                compare::compare(r, *comparison, *value_type, *flush_subnormals, [*a, *b]);
            let with = |value: u32| match combine {
                Some((operation, other)) => {
                    compare::combine(*operation, value, r.predicate(*other))
                }
                None => value,
            };
            let results = (with(low), high.map(with));
            compare::set(r, mask, *result_type, high.is_some(), results, *destination);
        }
        S::Select { destination, a, b, predicate } => {
            compare::select(r, mask, *destination, *a, *b, *predicate);
        }
        S::TestFloat { test, value_type, destination, a } => {
            let values = compare::test(r, *test, *value_type, *a);
            r.set_predicate(*destination, values, mask);
        }
        S::MovePredicate { destination, source } => {
            let values = r.predicate(*source);
            r.set_predicate(*destination, values, mask);
        }
        S::CombinePredicates { operation, destination, a, b } => {
            let values = compare::combine(*operation, r.predicate(*a), r.predicate(*b));
            r.set_predicate(*destination, values, mask);
        }
    }
}

fn move_row(r: &mut Registers, mask: u32, destination: Register, source: Source) {
    match destination {
        Register::Long(_) => {
            let row = r.row64(source);
            r.set_row64(destination, &row, mask);
        }
        _ => {
            let row = r.row32(source);
            r.set_row32(destination, &row, mask);
        }
    }
}

fn pack(r: &mut Registers, mask: u32, destination: Register, part_bits: u32, sources: &[Source]) {
    if let [low, high] = sources
        && part_bits == 32
    {
        return longs2(r, mask, destination, [*low, *high], |low, high| {
            low & 0xffff_ffff | high << 32
        });
    }
    let part = (1u64 << part_bits) - 1;
    let mut out = [0u64; LANES];
    for (place, source) in sources.iter().enumerate() {
        let row = r.row64(*source);
        for lane in 0..LANES {
            out[lane] |= (row[lane] & part) << (place as u32 * part_bits);
        }
    }
    r.set_row64(destination, &out, mask);
}

fn unpack(
    r: &mut Registers,
    mask: u32,
    destinations: &[Option<Register>],
    part_bits: u32,
    source: Source,
) {
    let row = r.row64(source);
    let part = (1u64 << part_bits) - 1;
    for (place, destination) in destinations.iter().enumerate() {
        if let Some(destination) = destination {
            let shift = place as u32 * part_bits;
            let out: [u64; LANES] = std::array::from_fn(|lane| row[lane] >> shift & part);
            r.set_row64(*destination, &out, mask);
        }
    }
}
