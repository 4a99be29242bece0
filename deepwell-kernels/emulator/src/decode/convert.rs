//! Decoding of conversions.

use super::Instruction;
use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly};
use super::scalar_instruction::{Conversion, FloatRounding, IntegerRounding, ScalarInstruction};
use super::types::{Source, Type};
use super::words::Words;
use crate::ptx::Operand;

const SMALL_PAIRS: &[Type] =
    &[Type::E4m3x2, Type::E5m2x2, Type::E3m2x2, Type::E2m3x2, Type::E2m1x2];
const SMALL_QUADS: &[Type] =
    &[Type::E4m3x4, Type::E5m2x4, Type::E3m2x4, Type::E2m3x4, Type::E2m1x4];

fn is_integer(value_type: Type) -> bool {
    use Type::{S8, S16, S32, S64, U8, U16, U32, U64};
    matches!(value_type, U8 | U16 | U32 | U64 | S8 | S16 | S32 | S64)
}

fn is_float(value_type: Type) -> bool {
    matches!(value_type, Type::F16 | Type::Bf16 | Type::F32 | Type::F64)
}

impl Lowering<'_> {
    /// Decodes `cvt` and `cvt.pack`.
    pub(super) fn conversion(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take("pack") {
            return self.pack(words, operands);
        }
        let integer_rounding = words.take_from(&[
            ("rni", IntegerRounding::NearestEven),
            ("rzi", IntegerRounding::TowardZero),
            ("rmi", IntegerRounding::Down),
            ("rpi", IntegerRounding::Up),
        ]);
        let float_rounding = words.take_rounding().or_else(|| {
            words.take_from(&[
                ("rna", FloatRounding::NearestAway),
                ("rs", FloatRounding::Stochastic),
            ])
        });
        let conversion = Conversion {
            integer_rounding,
            float_rounding,
            flush_subnormals: words.take("ftz"),
            saturate: words.take("sat"),
            saturate_finite: words.take("satfinite"),
            relu: words.take("relu"),
            to: words.take_type()?,
            from: words.take_type()?,
        };
        check(&conversion)?;
        let Conversion { to, from, .. } = conversion;
        let stochastic = float_rounding == Some(FloatRounding::Stochastic);
        let least = 2 + usize::from(stochastic);
        let (d, values) =
            between(operands, least, 4)?.split_first().ok_or("operands are missing")?;
        let (values, extra) = if stochastic {
            let (random, values) = values.split_last().ok_or("random bits are missing")?;
            (values, Some(self.source(random, Type::B32)?))
        } else {
            (values, None)
        };
        let values = match values {
            [Operand::Vector(four)] if SMALL_QUADS.contains(&to) => four,
            other => other,
        };
        let expected = if SMALL_QUADS.contains(&to) {
            4
        } else if to.name().ends_with("x2") && from == Type::F32 {
            2
        } else {
            1
        };
        if values.len() != expected {
            return Err(format!("{expected} values are expected, {} are given", values.len()));
        }
        let destination = match self.destination_wide(d, to)? {
            Some(register) => register,
            None => self.temporary(to)?,
        };
        let sources: Result<Box<[Source]>, String> =
            values.iter().map(|value| self.source_wide(value, from)).collect();
        Ok(Instruction::Scalar(ScalarInstruction::Convert {
            conversion,
            destination,
            sources: sources?,
            extra,
        }))
    }

    fn pack(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        words.expect(&["sat"])?;
        let to_known = [Type::U16, Type::S16, Type::U8, Type::S8, Type::U4, Type::S4];
        let to = words.take_type_of(&to_known)?;
        let from = words.take_type_of(&[Type::S32])?;
        let (d, a, b, c) = if to.bits() == 16 {
            let [d, a, b] = exactly(operands)?;
            (d, a, b, None)
        } else {
            words.take_type_of(&[Type::B32])?;
            let [d, a, b, c] = exactly(operands)?;
            (d, a, b, Some(self.source(c, Type::B32)?))
        };
        Ok(Instruction::Scalar(ScalarInstruction::ConvertPack {
            to,
            from,
            destination: self.destination(d, Type::B32)?,
            a: self.source(a, from)?,
            b: self.source(b, from)?,
            c,
        }))
    }
}

/// Checks the types of a conversion and the modifiers that the pair allows.
fn check(conversion: &Conversion) -> Result<(), String> {
    let Conversion { to, from, integer_rounding, float_rounding, .. } = *conversion;
    let pair = || format!("`.{to}` from `.{from}`");
    let rounding_among = |allowed: &[FloatRounding]| match float_rounding {
        Some(rounding) if allowed.contains(&rounding) => Ok(()),
        Some(_) => Err(format!("this rounding is not there for {}", pair())),
        None => Err(format!("{} needs a rounding", pair())),
    };
    use FloatRounding as R;
    let all = [R::NearestEven, R::TowardZero, R::Down, R::Up];
    let small = SMALL_PAIRS.contains(&to) || SMALL_QUADS.contains(&to);
    if small && !conversion.saturate_finite {
        return Err(format!("{} needs `.satfinite`", pair()));
    }
    let half_or_packed = matches!(to, Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2);
    if conversion.saturate_finite
        && !(small || half_or_packed || to == Type::Tf32)
        && to != Type::Ue8m0x2
    {
        return Err(format!("`.satfinite` is not there for {}", pair()));
    }
    let relu_known = half_or_packed || small || to == Type::Tf32;
    if conversion.relu && !relu_known {
        return Err(format!("`.relu` is not there for {}", pair()));
    }
    if integer_rounding.is_some() && float_rounding.is_some() {
        return Err("two roundings are given".to_string());
    }
    match (to, from) {
        _ if is_integer(to) && is_integer(from) => {
            if integer_rounding.is_some() || float_rounding.is_some() {
                return Err(format!("{} has no rounding", pair()));
            }
            Ok(())
        }
        _ if is_integer(to) && is_float(from) => match integer_rounding {
            Some(_) => Ok(()),
            None => Err(format!("{} needs a rounding to an integer", pair())),
        },
        _ if is_float(to) && is_integer(from) => rounding_among(&all),
        _ if is_float(to) && is_float(from) => {
            if to == from {
                // Rounding to an integral value of the same type, or a copy.
                return match float_rounding {
                    Some(_) if to != Type::F32 && to != Type::F64 => rounding_among(&all),
                    _ => Ok(()),
                };
            }
            if integer_rounding.is_some() {
                return Err(format!("{} is no integer", pair()));
            }
            let widens = to.bits() > from.bits();
            if float_rounding.is_none() && !widens {
                return Err(format!("{} needs a rounding", pair()));
            }
            if float_rounding.is_some() { rounding_among(&all) } else { Ok(()) }
        }
        (Type::F16x2 | Type::Bf16x2, Type::F32) => {
            rounding_among(&[R::NearestEven, R::TowardZero, R::Stochastic])
        }
        (Type::Tf32, Type::F32) => rounding_among(&[R::NearestEven, R::TowardZero, R::NearestAway]),
        (Type::Ue8m0x2, Type::F32 | Type::Bf16x2) => rounding_among(&[R::TowardZero, R::Up]),
        (Type::Bf16x2, Type::Ue8m0x2) => rounding_among(&[R::NearestEven]),
        (_, Type::F32 | Type::F16x2 | Type::Bf16x2) if SMALL_PAIRS.contains(&to) => {
            rounding_among(&[R::NearestEven])
        }
        (_, Type::F32) if SMALL_QUADS.contains(&to) => rounding_among(&[R::Stochastic]),
        (Type::F16x2, _) if SMALL_PAIRS.contains(&from) => rounding_among(&[R::NearestEven]),
        _ => Err(format!("{} is not known", pair())),
    }
}
