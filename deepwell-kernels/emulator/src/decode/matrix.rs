//! Decoding of matrix instructions: `ldmatrix`, `stmatrix`, `movmatrix`, `mma.sync`, `wgmma`.

use super::legality;
use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly, parts};
use super::types::{Register, Source, Space, Type};
use super::words::Words;
use super::{
    Instruction, LoadMatrix, MatrixElement, MatrixShape, MmaKind, MmaShape, StoreMatrix,
    WarpGroupMma, WarpGroupOperand, WarpMma, WarpMmaScale, WarpMmaScales,
};
use crate::ptx::Operand;

struct MatrixForm {
    shape: MatrixShape,
    count: u32,
    transpose: bool,
    element: MatrixElement,
    space: Space,
}

/// Parses `m16n8k32` to three numbers.
fn parse_shape(word: &str) -> Option<MmaShape> {
    let (m, rest) = word.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some(MmaShape { m: m.parse().ok()?, n: n.parse().ok()?, k: k.parse().ok()? })
}

impl Lowering<'_> {
    fn matrix_form(&self, stores: bool, words: &mut Words<'_>) -> Result<MatrixForm, String> {
        words.expect(&["sync", "aligned"])?;
        let shape = words
            .take_from(&[
                ("m8n8", MatrixShape::M8n8),
                ("m8n16", MatrixShape::M8n16),
                ("m16n8", MatrixShape::M16n8),
                ("m16n16", MatrixShape::M16n16),
            ])
            .ok_or("the shape is missing")?;
        let count = words
            .take_from(&[("x1", 1), ("x2", 2), ("x4", 4)])
            .ok_or("`.x1` to `.x4` is missing")?;
        let transpose = words.take("trans");
        let space = words.take_space();
        if !matches!(space, Space::Generic | Space::Shared) {
            return Err("matrices are loaded from `.shared::cta`".to_string());
        }
        let element = if words.take("b8x16") {
            words
                .take_from(&[
                    ("b6x16_p32", MatrixElement::B8FromB6),
                    ("b4x16_p64", MatrixElement::B8FromB4),
                ])
                .ok_or("the source format is missing")?
        } else {
            match words.take_type_of(&[Type::B16, Type::B8])? {
                Type::B16 => MatrixElement::B16,
                _ => MatrixElement::B8,
            }
        };
        legality::matrix(stores, shape, count, transpose, element)?;
        Ok(MatrixForm { shape, count, transpose, element, space })
    }

    /// Decodes `ldmatrix`.
    pub(super) fn load_matrix(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let form = self.matrix_form(false, words)?;
        let [d, address] = exactly(operands)?;
        let destinations = self.word_destinations(d)?;
        let expected = form.count * if form.shape == MatrixShape::M16n16 { 2 } else { 1 };
        if destinations.len() as u32 != expected {
            return Err(format!("{expected} registers are expected, not {}", destinations.len()));
        }
        Ok(Instruction::LoadMatrix(LoadMatrix {
            shape: form.shape,
            count: form.count,
            transpose: form.transpose,
            element: form.element,
            destinations,
            address: self.plain_address(address)?,
            space: form.space,
        }))
    }

    /// Decodes `stmatrix`.
    pub(super) fn store_matrix(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let form = self.matrix_form(true, words)?;
        let [address, values] = exactly(operands)?;
        let sources = self.word_sources(values)?;
        if sources.len() as u32 != form.count {
            return Err(format!("{} registers are expected, not {}", form.count, sources.len()));
        }
        Ok(Instruction::StoreMatrix(StoreMatrix {
            shape: form.shape,
            count: form.count,
            transpose: form.transpose,
            element: form.element,
            sources,
            address: self.plain_address(address)?,
            space: form.space,
        }))
    }

    /// Decodes `movmatrix`.
    pub(super) fn move_matrix(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        words.expect(&["sync", "aligned", "m8n8", "trans", "b16"])?;
        let [d, a] = exactly(operands)?;
        Ok(Instruction::MoveMatrix {
            destination: self.destination(d, Type::B32)?,
            source: self.source(a, Type::B32)?,
        })
    }

    /// Decodes `mma.sync`.
    pub(super) fn warp_mma(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        words.expect(&["sync", "aligned"])?;
        let shape = words.take_by(parse_shape).ok_or("the shape is missing")?;
        let layout = |words: &mut Words<'_>| {
            words.take_from(&[("row", true), ("col", false)]).ok_or("a layout is missing")
        };
        let (a_is_row, b_is_row) = (layout(words)?, layout(words)?);
        let saturate = words.take("satfinite");
        let kind = words.take_from(&[
            ("kind::f8f6f4", MmaKind::F8f6f4),
            ("kind::mxf8f6f4", MmaKind::Mxf8f6f4),
            ("kind::mxf4", MmaKind::Mxf4),
            ("kind::mxf4nvf4", MmaKind::Mxf4nvf4),
        ]);
        let scaled = words.take("block_scale");
        let vector =
            words.take_from(&[("scale_vec::1X", 1), ("scale_vec::2X", 2), ("scale_vec::4X", 4)]);
        let [d_type, a_type, b_type, c_type] =
            [words.take_type()?, words.take_type()?, words.take_type()?, words.take_type()?];
        let scale_type =
            if scaled { Some(words.take_type_of(&[Type::Ue8m0, Type::Ue4m3])?) } else { None };
        if !scaled && vector.is_some() {
            return Err("`.scale_vec` needs `.block_scale`".to_string());
        }
        let form = legality::WarpForm { shape, d_type, a_type, b_type, c_type, kind };
        let counts = legality::warp_mma(&form, a_is_row, b_is_row, saturate)?;
        let operands = between(operands, 4, 8)?;
        let scales = match scale_type {
            None => {
                between(operands, 4, 4)?;
                None
            }
            Some(scale_type) => {
                let [_, _, _, _, a_data, a_ids, b_data, b_ids] = exactly(operands)?;
                let vector = legality::warp_scales(kind, vector, scale_type)?;
                Some(Box::new(WarpMmaScales {
                    vector,
                    scale_type,
                    a: self.warp_scale(a_data, a_ids)?,
                    b: self.warp_scale(b_data, b_ids)?,
                }))
            }
        };
        let d = self.fragment_destinations(&operands[0], counts[0], d_type)?;
        let a = self.fragment(&operands[1], counts[1], a_type)?;
        let b = self.fragment(&operands[2], counts[2], b_type)?;
        let c = self.fragment(&operands[3], counts[3], c_type)?;
        Ok(Instruction::WarpMma(WarpMma {
            shape,
            a_is_row,
            b_is_row,
            d_type,
            a_type,
            b_type,
            c_type,
            saturate,
            kind,
            scales,
            d,
            a,
            b,
            c,
        }))
    }

    fn fragment(
        &mut self,
        operand: &Operand,
        count: u32,
        element: Type,
    ) -> Result<Box<[Source]>, String> {
        let values = parts(operand);
        if values.len() as u32 != count {
            return Err(format!("`{operand}`: {count} registers are expected"));
        }
        let register = if element == Type::F64 { Type::B64 } else { Type::B32 };
        // C may be given as constant zeros.
        values
            .iter()
            .map(|value| match value {
                Operand::Single(_) => self.source(value, Type::F32),
                _ => self.source(value, register),
            })
            .collect()
    }

    fn fragment_destinations(
        &mut self,
        operand: &Operand,
        count: u32,
        element: Type,
    ) -> Result<Box<[Option<Register>]>, String> {
        let values = parts(operand);
        if values.len() as u32 != count {
            return Err(format!("`{operand}`: {count} registers are expected"));
        }
        let register = if element == Type::F64 { Type::B64 } else { Type::B32 };
        values.iter().map(|value| self.destination(value, register).map(Some)).collect()
    }

    fn warp_scale(&mut self, data: &Operand, ids: &Operand) -> Result<WarpMmaScale, String> {
        let [byte_id, thread_id] = exactly(parts(ids))?;
        let id = |lowering: &mut Self, operand: &Operand| -> Result<_, String> {
            lowering.source_any(operand, Type::U16)
        };
        Ok(WarpMmaScale {
            data: self.source(data, Type::B32)?,
            byte_id: id(self, byte_id)?,
            thread_id: id(self, thread_id)?,
        })
    }

    /// Decodes `wgmma`.
    pub(super) fn warp_group(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let action = words.peek().ok_or("the action is missing")?;
        words.take(action);
        words.expect(&["sync", "aligned"])?;
        match action {
            "fence" => {
                let [] = exactly(operands)?;
                Ok(Instruction::WarpGroupFence)
            }
            "commit_group" => {
                let [] = exactly(operands)?;
                Ok(Instruction::WarpGroupCommit)
            }
            "wait_group" => {
                let [pending] = exactly(operands)?;
                let pending = self.immediate(pending)? as u32;
                if pending > 7 {
                    return Err(format!("{pending} groups are more than 7"));
                }
                Ok(Instruction::WarpGroupWait { pending })
            }
            "mma_async" => self.warp_group_mma(words, operands),
            _ => Err(format!("`{action}` is not known for `wgmma`")),
        }
    }

    fn warp_group_mma(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take("sp") {
            return Err("sparse matrices are not known".to_string());
        }
        let shape = words.take_by(parse_shape).ok_or("the shape is missing")?;
        let saturate = words.take("satfinite");
        let [d_type, a_type, b_type] = [words.take_type()?, words.take_type()?, words.take_type()?];
        let d_count = legality::warp_group(shape, d_type, a_type, b_type, saturate)?;
        let integer = d_type == Type::S32;
        let half = matches!(a_type, Type::F16 | Type::Bf16);
        let in_registers = matches!(operands.get(1), Some(Operand::Vector(_)));
        let transposes = if half { 2 - usize::from(in_registers) } else { 0 };
        let count = 4 + if integer { 0 } else { 2 + transposes };
        let operands = between(operands, count, count)?;
        let values = parts(&operands[0]);
        if values.len() as u32 != d_count {
            return Err(format!("{d_count} registers are expected for D, not {}", values.len()));
        }
        let d: Result<Box<[Register]>, String> =
            values.iter().map(|value| self.destination(value, Type::B32)).collect();
        let a = if in_registers {
            let registers = self.word_sources(&operands[1])?;
            if registers.len() != 4 {
                return Err(format!("4 registers are expected for A, not {}", registers.len()));
            }
            WarpGroupOperand::Registers(registers)
        } else {
            WarpGroupOperand::Descriptor(self.source(&operands[1], Type::B64)?)
        };
        let negate = |lowering: &Self, position: usize| -> Result<bool, String> {
            if integer {
                return Ok(false);
            }
            match lowering.immediate(&operands[position])? as i64 {
                1 => Ok(false),
                -1 => Ok(true),
                other => Err(format!("scale {other} is neither 1 nor -1")),
            }
        };
        let transpose = |lowering: &Self, position: Option<usize>| -> Result<bool, String> {
            match position {
                None => Ok(false),
                Some(position) => match lowering.immediate(&operands[position])? {
                    0 => Ok(false),
                    1 => Ok(true),
                    other => Err(format!("transposition {other} is neither 0 nor 1")),
                },
            }
        };
        let scale_d = self.predicate(&operands[3])?;
        Ok(Instruction::WarpGroupMma(WarpGroupMma {
            shape,
            d_type,
            a_type,
            b_type,
            saturate,
            d: d?,
            a,
            b: self.source(&operands[2], Type::B64)?,
            scale_d,
            negate_a: negate(self, 4)?,
            negate_b: negate(self, 5)?,
            transpose_a: transpose(self, (half && !in_registers).then_some(6))?,
            transpose_b: transpose(self, half.then_some(count - 1))?,
        }))
    }
}
