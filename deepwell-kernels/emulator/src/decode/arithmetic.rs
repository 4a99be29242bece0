//! Decoding of integer and float arithmetic.

use super::Instruction;
use super::lower::{Decoded, Lowering};
use super::operands::exactly;
use super::scalar_instruction::{
    BinaryOperation, ExtremumModifiers, FloatFunction, FloatModifiers, FloatRounding, FloatTest,
    MultiplyPart, ScalarInstruction, TernaryOperation, UnaryOperation,
};
use super::types::Type;
use super::words::Words;
use crate::ptx::{Instruction as Line, Operand};

const INTEGERS: &[Type] = &[Type::U16, Type::U32, Type::U64, Type::S16, Type::S32, Type::S64];
const HALVES: &[Type] = &[Type::F16, Type::F16x2, Type::Bf16, Type::Bf16x2];
const FLOATS: &[Type] =
    &[Type::F16, Type::F16x2, Type::Bf16, Type::Bf16x2, Type::F32, Type::F32x2, Type::F64];

impl Words<'_> {
    /// `.rn`, `.rz`, `.rm`, `.rp`.
    pub(super) fn take_rounding(&mut self) -> Option<FloatRounding> {
        self.take_from(&[
            ("rn", FloatRounding::NearestEven),
            ("rz", FloatRounding::TowardZero),
            ("rm", FloatRounding::Down),
            ("rp", FloatRounding::Up),
        ])
    }

    /// Takes rounding, `.ftz`, `.sat` and `.relu`, as far as the type supports them.
    fn take_float_modifiers(&mut self, value_type: Type) -> Result<FloatModifiers, String> {
        let rounding = self.take_rounding().unwrap_or(FloatRounding::NearestEven);
        let modifiers = FloatModifiers {
            rounding,
            flush_subnormals: self.take("ftz"),
            saturate: self.take("sat"),
            relu: self.take("relu"),
        };
        if HALVES.contains(&value_type) && rounding != FloatRounding::NearestEven {
            return Err(format!("`.{value_type}` is only rounded to the nearest"));
        }
        let bf16 = matches!(value_type, Type::Bf16 | Type::Bf16x2);
        if modifiers.flush_subnormals && (bf16 || value_type == Type::F64) {
            return Err(format!("`.ftz` is not there for `.{value_type}`"));
        }
        if modifiers.saturate && (bf16 || matches!(value_type, Type::F64 | Type::F32x2)) {
            return Err(format!("`.sat` is not there for `.{value_type}`"));
        }
        Ok(modifiers)
    }

    fn take_extremum_modifiers(&mut self) -> ExtremumModifiers {
        let xor_sign = self.take("xorsign");
        ExtremumModifiers {
            flush_subnormals: self.take("ftz"),
            propagate_nan: self.take("NaN"),
            absolute: self.take("abs") && !xor_sign,
            xor_sign,
        }
    }
}

impl Lowering<'_> {
    pub(super) fn unary(
        &mut self,
        operation: UnaryOperation,
        value_type: Type,
        result_type: Type,
        operands: &[Operand],
    ) -> Decoded {
        let [d, a] = exactly(operands)?;
        let destination = self.destination(d, result_type)?;
        let a = self.source(a, value_type)?;
        Ok(Instruction::Scalar(ScalarInstruction::Unary { operation, value_type, destination, a }))
    }

    pub(super) fn binary(
        &mut self,
        operation: BinaryOperation,
        value_type: Type,
        types: [Type; 3],
        operands: &[Operand],
    ) -> Decoded {
        let [d, a, b] = exactly(operands)?;
        let destination = self.destination(d, types[0])?;
        let (a, b) = (self.source(a, types[1])?, self.source(b, types[2])?);
        Ok(Instruction::Scalar(ScalarInstruction::Binary {
            operation,
            value_type,
            destination,
            a,
            b,
        }))
    }

    pub(super) fn ternary(
        &mut self,
        operation: TernaryOperation,
        value_type: Type,
        types: [Type; 4],
        operands: &[Operand],
    ) -> Decoded {
        let [d, a, b, c] = exactly(operands)?;
        let destination = self.destination(d, types[0])?;
        let a = self.source(a, types[1])?;
        let b = self.source(b, types[2])?;
        let c = self.source(c, types[3])?;
        Ok(Instruction::Scalar(ScalarInstruction::Ternary {
            operation,
            value_type,
            destination,
            a,
            b,
            c,
        }))
    }

    /// Decodes `add` to `neg`, for integers and floats.
    pub(super) fn arithmetic(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let value_type = words.take_type()?;
        if FLOATS.contains(&value_type) {
            return self.float_arithmetic(name, value_type, words, operands);
        }
        let packed = matches!(value_type, Type::U16x2 | Type::S16x2);
        let packed_too = matches!(name, "add" | "sub" | "min" | "max") && packed;
        // Untyped bits, which carry chains use.
        let bits = matches!(value_type, Type::B32 | Type::B64 | Type::B16);
        let bits_too = bits && matches!(name, "add" | "sub" | "addc" | "subc");
        if !INTEGERS.contains(&value_type) && !packed_too && !bits_too {
            return Err(format!("type `.{value_type}` is not known for `{name}`"));
        }
        self.integer_arithmetic(name, value_type, words, operands)
    }

    fn integer_arithmetic(
        &mut self,
        name: &str,
        value_type: Type,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let same = [value_type; 3];
        match name {
            "add" | "sub" | "addc" | "subc" => {
                let carry_in = name.ends_with('c');
                let carry_out = words.take("cc");
                let saturate = words.take("sat");
                if saturate && (carry_in || carry_out || value_type != Type::S32) {
                    return Err("`.sat` is only there for `.s32` without carry".to_string());
                }
                let operation = if name.starts_with("add") {
                    BinaryOperation::Add { saturate, carry_in, carry_out }
                } else {
                    BinaryOperation::Subtract { saturate, carry_in, carry_out }
                };
                self.binary(operation, value_type, same, operands)
            }
            "mul" => {
                let part = self.multiply_part(words)?;
                let wide = self.multiply_type(part, value_type)?;
                let types = [wide, value_type, value_type];
                self.binary(BinaryOperation::Multiply(part), value_type, types, operands)
            }
            "mad" | "madc" => {
                let part = self.multiply_part(words)?;
                let wide = self.multiply_type(part, value_type)?;
                let carry_in = name == "madc";
                let carry_out = words.take("cc");
                let saturate = words.take("sat");
                if saturate && (part != MultiplyPart::High || value_type != Type::S32) {
                    return Err("`.sat` is only there for `.hi.s32`".to_string());
                }
                if (carry_in || carry_out) && part == MultiplyPart::Wide {
                    return Err("carry is only there for `.lo` and `.hi`".to_string());
                }
                let operation =
                    TernaryOperation::MultiplyAdd { part, saturate, carry_in, carry_out };
                self.ternary(operation, value_type, [wide, value_type, value_type, wide], operands)
            }
            "div" => self.binary(BinaryOperation::Divide, value_type, same, operands),
            "rem" => self.binary(BinaryOperation::Remainder, value_type, same, operands),
            "min" | "max" => {
                let relu = words.take("relu");
                if relu && !matches!(value_type, Type::S32 | Type::S16x2) {
                    return Err("`.relu` is only there for `.s32` and `.s16x2`".to_string());
                }
                let operation = if name == "min" {
                    BinaryOperation::Minimum { relu }
                } else {
                    BinaryOperation::Maximum { relu }
                };
                self.binary(operation, value_type, same, operands)
            }
            "abs" | "neg" if value_type.is_signed() => {
                let absolute = name == "abs";
                let operation =
                    if absolute { UnaryOperation::Absolute } else { UnaryOperation::Negate };
                self.unary(operation, value_type, value_type, operands)
            }
            _ => Err(format!("type `.{value_type}` is not known for `{name}`")),
        }
    }

    fn multiply_part(&self, words: &mut Words<'_>) -> Result<MultiplyPart, String> {
        words
            .take_from(&[
                ("lo", MultiplyPart::Low),
                ("hi", MultiplyPart::High),
                ("wide", MultiplyPart::Wide),
            ])
            .ok_or_else(|| "`.lo`, `.hi` or `.wide` is missing".to_string())
    }

    fn multiply_type(&self, part: MultiplyPart, value_type: Type) -> Result<Type, String> {
        if part != MultiplyPart::Wide {
            return Ok(value_type);
        }
        match value_type {
            Type::U16 | Type::S16 => Ok(Type::B32),
            Type::U32 | Type::S32 => Ok(Type::B64),
            _ => Err(format!("`.wide` is not there for `.{value_type}`")),
        }
    }

    fn float_arithmetic(
        &mut self,
        name: &str,
        value_type: Type,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        match name {
            "add" | "sub" | "fma" | "mul" | "mad" => {
                self.float_sum_or_product(name, value_type, words, operands)
            }
            "div" => self.float_division(value_type, words, operands),
            "min" | "max" if value_type != Type::F32x2 => {
                self.float_extremum(name, value_type, words, operands)
            }
            "abs" | "neg" if value_type != Type::F32x2 => {
                let flush_subnormals = words.take("ftz");
                let operation = match name {
                    "abs" => UnaryOperation::FloatAbsolute { flush_subnormals },
                    _ => UnaryOperation::FloatNegate { flush_subnormals },
                };
                self.unary(operation, value_type, value_type, operands)
            }
            _ => Err(format!("type `.{value_type}` is not known for `{name}`")),
        }
    }

    fn float_sum_or_product(
        &mut self,
        name: &str,
        value_type: Type,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let has_mixed_form = value_type == Type::F32 && matches!(name, "add" | "sub" | "fma");
        let narrow = match has_mixed_form {
            true => words.take_from(&[("f16", Type::F16), ("bf16", Type::Bf16)]),
            false => None,
        };
        if name == "fma" && words.take("oob") {
            let relu = words.take("relu");
            words.expect(&["rn"])?;
            if !HALVES.contains(&value_type) {
                return Err(format!("`.oob` is not there for `.{value_type}`"));
            }
            let operation = TernaryOperation::FloatMultiplyAddOutOfBounds { relu };
            return self.ternary(operation, value_type, [value_type; 4], operands);
        }
        let modifiers = words.take_float_modifiers(value_type)?;
        if modifiers.relu && name != "fma" {
            return Err("`.relu` is only there for `fma`".to_string());
        }
        if let Some(narrow) = narrow {
            return self.mixed(name, narrow, modifiers, operands);
        }
        let operation = match name {
            "add" => BinaryOperation::FloatAdd(modifiers),
            "sub" => BinaryOperation::FloatSubtract(modifiers),
            "mul" => BinaryOperation::FloatMultiply(modifiers),
            _ => {
                let operation = TernaryOperation::FloatMultiplyAdd(modifiers);
                return self.ternary(operation, value_type, [value_type; 4], operands);
            }
        };
        self.binary(operation, value_type, [value_type; 3], operands)
    }

    fn float_division(
        &mut self,
        value_type: Type,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        if !matches!(value_type, Type::F32 | Type::F64) {
            return Err(format!("type `.{value_type}` is not known for `div`"));
        }
        let single = value_type == Type::F32;
        let full = single && words.take("full");
        let approximate = single && words.take("approx");
        let modifiers = words.take_float_modifiers(value_type)?;
        let operation = match (approximate, full) {
            (true, _) => BinaryOperation::FloatDivideApproximate(modifiers),
            (false, true) => BinaryOperation::FloatDivideFull(modifiers),
            (false, false) => BinaryOperation::FloatDivide(modifiers),
        };
        self.binary(operation, value_type, [value_type; 3], operands)
    }

    fn float_extremum(
        &mut self,
        name: &str,
        value_type: Type,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let modifiers = words.take_extremum_modifiers();
        let minimum = name == "min";
        if operands.len() != 4 {
            let operation = match minimum {
                true => BinaryOperation::FloatMinimum(modifiers),
                false => BinaryOperation::FloatMaximum(modifiers),
            };
            return self.binary(operation, value_type, [value_type; 3], operands);
        }
        if value_type != Type::F32 {
            return Err("three operands are only there for `.f32`".to_string());
        }
        let operation = match minimum {
            true => TernaryOperation::FloatMinimum3(modifiers),
            false => TernaryOperation::FloatMaximum3(modifiers),
        };
        self.ternary(operation, value_type, [value_type; 4], operands)
    }

    /// Decodes instructions with single-precision results of half-precision operands.
    fn mixed(
        &mut self,
        name: &str,
        narrow: Type,
        modifiers: FloatModifiers,
        operands: &[Operand],
    ) -> Decoded {
        let multiply = name == "fma";
        let (d, a, b, c) = if multiply {
            let [d, a, b, c] = exactly(operands)?;
            (d, a, b, c)
        } else {
            let [d, a, c] = exactly(operands)?;
            (d, a, a, c)
        };
        Ok(Instruction::Scalar(ScalarInstruction::MixedPrecision {
            multiply,
            subtract: name == "sub",
            narrow,
            modifiers,
            destination: self.destination(d, Type::F32)?,
            a: self.source(a, narrow)?,
            b: self.source(b, narrow)?,
            c: self.source(c, Type::F32)?,
        }))
    }

    /// Fuses a sum with a product, operand number `operand` of the sum.
    pub(super) fn fuse(
        &mut self,
        sum: &Instruction,
        product: &Line,
        operand: usize,
    ) -> Option<Instruction> {
        let Instruction::Scalar(ScalarInstruction::Binary {
            operation,
            value_type,
            destination,
            a,
            b,
        }) = sum
        else {
            return None;
        };
        let c = if operand == 1 { *b } else { *a };
        let operation = match operation {
            BinaryOperation::FloatAdd(modifiers) => TernaryOperation::FloatMultiplyAdd(*modifiers),
            BinaryOperation::FloatSubtract(modifiers) => {
                let negate_product = operand == 2;
                TernaryOperation::FloatMultiplySubtract { modifiers: *modifiers, negate_product }
            }
            _ => return None,
        };
        let a = self.source(&product.operands[1], *value_type).ok()?;
        let b = self.source(&product.operands[2], *value_type).ok()?;
        Some(Instruction::Scalar(ScalarInstruction::Ternary {
            operation,
            value_type: *value_type,
            destination: *destination,
            a,
            b,
            c,
        }))
    }

    /// Decodes functions of floats, `copysign` and `testp`.
    pub(super) fn float_function(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let value_type = words.take_type_of(FLOATS)?;
        let approximate = words.take("approx");
        match name {
            "copysign" => {
                self.binary(BinaryOperation::CopySign, value_type, [value_type; 3], operands)
            }
            "testp" => {
                let test = words
                    .take_from(&[
                        ("finite", FloatTest::Finite),
                        ("infinite", FloatTest::Infinite),
                        ("number", FloatTest::Number),
                        ("notanumber", FloatTest::NotANumber),
                        ("normal", FloatTest::Normal),
                        ("subnormal", FloatTest::Subnormal),
                    ])
                    .ok_or("what is tested is missing")?;
                let [p, a] = exactly(operands)?;
                Ok(Instruction::Scalar(ScalarInstruction::TestFloat {
                    test,
                    value_type,
                    destination: self.predicate_register(p)?,
                    a: self.source(a, value_type)?,
                }))
            }
            _ => {
                // For doubles and bfloat16, `.ftz` is part of the instruction's name.
                let flush = words.take("ftz");
                let modifiers = FloatModifiers {
                    flush_subnormals: flush,
                    ..words.take_float_modifiers(value_type)?
                };
                let double = value_type == Type::F64;
                let half = !double && value_type != Type::F32;
                let function = match (name, approximate) {
                    ("rcp", true) if double && flush => FloatFunction::ReciprocalHigh,
                    ("rcp", true) if value_type == Type::F32 => {
                        FloatFunction::ReciprocalApproximate
                    }
                    ("rcp", false) if !half => FloatFunction::Reciprocal,
                    ("rsqrt", true) if double && flush => FloatFunction::InverseRootHigh,
                    ("rsqrt", true) if !half => FloatFunction::InverseRootApproximate,
                    ("sqrt", true) if value_type == Type::F32 => FloatFunction::RootApproximate,
                    ("sqrt", false) if !half => FloatFunction::Root,
                    ("sin", true) if value_type == Type::F32 => FloatFunction::Sine,
                    ("cos", true) if value_type == Type::F32 => FloatFunction::Cosine,
                    ("lg2", true) if value_type == Type::F32 => FloatFunction::Logarithm2,
                    ("ex2", true) if !double && value_type != Type::F32x2 => {
                        FloatFunction::Exponential2
                    }
                    ("tanh", true) if !double && value_type != Type::F32x2 => {
                        FloatFunction::HyperbolicTangent
                    }
                    _ => return Err(format!("type `.{value_type}` is not known for `{name}`")),
                };
                {
                    let operation = UnaryOperation::Function(function, modifiers);
                    self.unary(operation, value_type, value_type, operands)
                }
            }
        }
    }
}
