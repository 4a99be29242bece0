//! Decoding of `tcgen05`.

use super::legality;
use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly};
use super::types::{Source, Space, Type};
use super::words::Words;
use super::{
    Instruction, MmaKind, Tcgen05, Tcgen05CopyFormat, Tcgen05CopyShape, Tcgen05Mma, Tcgen05Operand,
    Tcgen05Scales, Tcgen05Shape,
};
use crate::ptx::Operand;

const REPEATS: &[(&str, u32)] = &[
    ("x1", 1),
    ("x2", 2),
    ("x4", 4),
    ("x8", 8),
    ("x16", 16),
    ("x32", 32),
    ("x64", 64),
    ("x128", 128),
];

const SHAPES: &[(&str, Tcgen05Shape)] = &[
    ("32x32b", Tcgen05Shape::S32x32b),
    ("16x64b", Tcgen05Shape::S16x64b),
    ("16x128b", Tcgen05Shape::S16x128b),
    ("16x256b", Tcgen05Shape::S16x256b),
    ("16x32bx2", Tcgen05Shape::S16x32bx2),
];

const COPY_SHAPES: &[(&str, Tcgen05CopyShape)] = &[
    ("128x256b", Tcgen05CopyShape::Rows128Bits256),
    ("4x256b", Tcgen05CopyShape::Rows4Bits256),
    ("128x128b", Tcgen05CopyShape::Rows128Bits128),
    ("64x128b", Tcgen05CopyShape::Rows64Bits128Warps02And13),
    ("32x128b", Tcgen05CopyShape::Rows32Bits128AllWarps),
];

const KINDS: &[(&str, MmaKind)] = &[
    ("kind::f16", MmaKind::F16),
    ("kind::tf32", MmaKind::Tf32),
    ("kind::f8f6f4", MmaKind::F8f6f4),
    ("kind::i8", MmaKind::I8),
    ("kind::mxf8f6f4", MmaKind::Mxf8f6f4),
    ("kind::mxf4", MmaKind::Mxf4),
    ("kind::mxf4nvf4", MmaKind::Mxf4nvf4),
];

const SCALE_VECTORS: &[(&str, legality::ScaleVector)] = &[
    ("scale_vec::1X", legality::ScaleVector::Count(1)),
    ("scale_vec::2X", legality::ScaleVector::Count(2)),
    ("scale_vec::4X", legality::ScaleVector::Count(4)),
    ("block16", legality::ScaleVector::Block(16)),
    ("block32", legality::ScaleVector::Block(32)),
];

/// Operands of an MMA after the descriptors, but for scales.
struct MmaTail<'a> {
    disable_output_lanes: Box<[Source]>,
    scale_input_d: u32,
    enable: &'a Operand,
}

impl Lowering<'_> {
    /// Decodes all `tcgen05` instructions.
    pub(super) fn tcgen05(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let action = words.peek().ok_or("the action is missing")?;
        words.take(action);
        Ok(Instruction::Tcgen05(match action {
            "fence::before_thread_sync" => {
                let [] = exactly(operands)?;
                Tcgen05::FenceBefore
            }
            "fence::after_thread_sync" => {
                let [] = exactly(operands)?;
                Tcgen05::FenceAfter
            }
            "wait::ld" | "wait::st" => {
                words.expect(&["sync", "aligned"])?;
                let [] = exactly(operands)?;
                if action == "wait::ld" { Tcgen05::WaitLoad } else { Tcgen05::WaitStore }
            }
            "ld" => self.tensor_load(words, operands)?,
            "st" => self.tensor_store(words, operands)?,
            _ => {
                let group = words
                    .take_from(&[("cta_group::1", 1), ("cta_group::2", 2)])
                    .ok_or("`.cta_group` is missing")?;
                self.grouped(action, group, words, operands)?
            }
        }))
    }

    /// Decodes an instruction of a CTA or a pair of CTAs.
    fn grouped(
        &mut self,
        action: &str,
        group: u32,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05, String> {
        match action {
            "alloc" => self.tensor_allocation(group, words, operands),
            "dealloc" => {
                words.expect(&["sync", "aligned", "b32"])?;
                let [address, columns] = exactly(operands)?;
                Ok(Tcgen05::Deallocate {
                    group,
                    address: self.source(address, Type::B32)?,
                    columns: self.columns(columns)?,
                })
            }
            "relinquish_alloc_permit" => {
                words.expect(&["sync", "aligned"])?;
                let [] = exactly(operands)?;
                Ok(Tcgen05::Relinquish { group })
            }
            "commit" => self.tensor_commit(group, words, operands),
            "shift" => {
                words.expect(&["down"])?;
                let [address] = exactly(operands)?;
                Ok(Tcgen05::Shift { group, address: self.plain_address(address)? })
            }
            "cp" => self.tensor_copy_to(group, words, operands),
            "mma" => Ok(Tcgen05::Mma(Box::new(self.tensor_mma(group, words, operands)?))),
            _ => Err(format!("`{action}` is not known for `tcgen05`")),
        }
    }

    fn tensor_allocation(
        &mut self,
        group: u32,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05, String> {
        words.expect(&["sync", "aligned", "b32"])?;
        let space = words.take_space();
        if !matches!(space, Space::Generic | Space::Shared) {
            return Err("only `.shared::cta` is known here".to_string());
        }
        let [target, columns] = exactly(operands)?;
        let (target, variable) = self.address(target)?;
        let (space, columns) = (variable.unwrap_or(space), self.columns(columns)?);
        Ok(Tcgen05::Allocate { group, target, space, columns })
    }

    fn tensor_commit(
        &mut self,
        group: u32,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05, String> {
        words.expect(&["mbarrier::arrive::one", "b64"])?;
        let space = words.take_space();
        if !matches!(space, Space::Generic | Space::SharedCluster) {
            return Err("only `.shared::cluster` is known here".to_string());
        }
        let multicast = words.take("multicast::cluster");
        let count = 1 + usize::from(multicast);
        let operands = between(operands, count, count)?;
        let barrier = self.plain_address(&operands[0])?;
        let mask = operands.get(1).map(|mask| self.source(mask, Type::B16)).transpose()?;
        Ok(Tcgen05::Commit { group, barrier, space, multicast: mask })
    }

    fn tensor_copy_to(
        &mut self,
        group: u32,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05, String> {
        let shape = words.take_from(COPY_SHAPES).ok_or("the shape is missing")?;
        let shape = match shape {
            Tcgen05CopyShape::Rows64Bits128Warps02And13 => words
                .take_from(&[
                    ("warpx2::02_13", Tcgen05CopyShape::Rows64Bits128Warps02And13),
                    ("warpx2::01_23", Tcgen05CopyShape::Rows64Bits128Warps01And23),
                ])
                .ok_or("`.64x128b` needs `.warpx2::02_13` or `.warpx2::01_23`")?,
            Tcgen05CopyShape::Rows32Bits128AllWarps => {
                words.expect(&["warpx4"])?;
                shape
            }
            _ => shape,
        };
        let source_format = match words.take("b8x16") {
            true => words
                .take_from(&[
                    ("b6x16_p32", Tcgen05CopyFormat::B6),
                    ("b4x16_p64", Tcgen05CopyFormat::B4),
                ])
                .ok_or("the source format is missing")?,
            false => Tcgen05CopyFormat::Same,
        };
        let [target, descriptor] = exactly(operands)?;
        let target = self.plain_address(target)?;
        let descriptor = self.source(descriptor, Type::B64)?;
        Ok(Tcgen05::Copy { group, shape, source_format, target, descriptor })
    }

    /// Decodes a number of columns; constants are checked.
    fn columns(&mut self, operand: &Operand) -> Result<Source, String> {
        if let Operand::Integer(columns) = operand
            && !(columns.is_power_of_two() && (32..=512).contains(columns))
        {
            return Err(format!("{columns} columns are no power of two of 32 to 512"));
        }
        self.source(operand, Type::U32)
    }

    fn tensor_mma(
        &mut self,
        group: u32,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05Mma, String> {
        if words.take("sp") {
            return Err("sparse matrices are not known".to_string());
        }
        if words.take("ws") {
            return Err("the weight-stationary form is not known".to_string());
        }
        let kind = words.take_from(KINDS).ok_or("`.kind` is missing")?;
        let scaled = words.take("block_scale");
        let vector = words.take_from(SCALE_VECTORS);
        let shift_a = words.take("ashift");
        // Collector hints do not change results.
        words.take_by(|word| word.starts_with("collector::a::").then_some(()));
        let block_kind = matches!(kind, MmaKind::Mxf8f6f4 | MmaKind::Mxf4 | MmaKind::Mxf4nvf4);
        if scaled != block_kind {
            return Err("`.block_scale` belongs to the kinds with scales".to_string());
        }
        if !scaled && vector.is_some() {
            return Err("the size of scales needs `.block_scale`".to_string());
        }
        let operands = between(operands, 5, 7)?;
        let a = match &operands[1] {
            Operand::Address { .. } => Tcgen05Operand::Tensor(self.plain_address(&operands[1])?),
            other => Tcgen05Operand::Descriptor(self.source(other, Type::B64)?),
        };
        if shift_a && !matches!(a, Tcgen05Operand::Tensor(_)) {
            return Err("`.ashift` needs A in tensor memory".to_string());
        }
        let mut scales = None;
        let tail = if scaled {
            let [scale_a, scale_b, enable] = exactly(&operands[4..])?;
            let (count, block) = legality::tensor_scales(kind, vector)?;
            scales = Some(Tcgen05Scales {
                vector: count,
                block,
                a: self.plain_address(scale_a)?,
                b: self.plain_address(scale_b)?,
            });
            MmaTail { disable_output_lanes: Box::default(), scale_input_d: 0, enable }
        } else {
            self.mma_tail(group, kind, &operands[4..])?
        };
        Ok(Tcgen05Mma {
            group,
            kind,
            d: self.plain_address(&operands[0])?,
            a,
            b: self.source(&operands[2], Type::B64)?,
            instruction_descriptor: self.source(&operands[3], Type::B32)?,
            disable_output_lanes: tail.disable_output_lanes,
            enable_input_d: self.predicate(tail.enable)?,
            scale_input_d: tail.scale_input_d,
            shift_a,
            scales,
        })
    }

    /// Decodes the lanes that are not written, whether D is an input, and D's scale.
    fn mma_tail<'a>(
        &mut self,
        group: u32,
        kind: MmaKind,
        operands: &'a [Operand],
    ) -> Result<MmaTail<'a>, String> {
        let (mut rest, mut disable_output_lanes) = (operands, Box::default());
        if let Some(Operand::Vector(values)) = rest.first() {
            let expected = 4 * group as usize;
            if values.len() != expected {
                return Err(format!("{expected} words of lanes are expected"));
            }
            disable_output_lanes = self.word_sources(&rest[0])?;
            rest = &rest[1..];
        }
        let rest = between(rest, 1, 2)?;
        let mut scale_input_d = 0;
        if let Some(scale) = rest.get(1) {
            if !matches!(kind, MmaKind::F16 | MmaKind::Tf32) {
                return Err("D is only scaled for `f16` and `tf32`".to_string());
            }
            scale_input_d = self.immediate(scale)? as u32;
            if scale_input_d > 15 {
                return Err(format!("scale {scale_input_d} is more than 15"));
            }
        }
        Ok(MmaTail { disable_output_lanes, scale_input_d, enable: &rest[0] })
    }

    fn tensor_shape(&self, words: &mut Words<'_>) -> Result<(Tcgen05Shape, u32, u32), String> {
        words.expect(&["sync", "aligned", "b32"])?;
        let shape = words.take_from(SHAPES).ok_or("the shape is missing")?;
        let repeat = words.take_from(REPEATS).ok_or("`.x1` to `.x128` is missing")?;
        let registers = shape.registers() * repeat;
        if registers > 128 {
            return Err(format!("{registers} registers are more than 128"));
        }
        Ok((shape, repeat, registers))
    }

    fn tensor_load(
        &mut self,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05, String> {
        if words.take("red") {
            return Err("loads that reduce are not known".to_string());
        }
        let (shape, repeat, registers) = self.tensor_shape(words)?;
        let pack = words.take("pack::16b");
        let split = usize::from(shape == Tcgen05Shape::S16x32bx2);
        let operands = between(operands, 2 + split, 2 + split)?;
        let destinations = self.word_destinations(&operands[0])?;
        if destinations.len() as u32 != registers {
            return Err(format!("{registers} registers are expected, not {}", destinations.len()));
        }
        let half_offset = if split == 1 { self.immediate(&operands[2])? as u32 } else { 0 };
        let address = self.plain_address(&operands[1])?;
        Ok(Tcgen05::Load { shape, repeat, pack, half_offset, destinations, address })
    }

    fn tensor_store(
        &mut self,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Result<Tcgen05, String> {
        let (shape, repeat, registers) = self.tensor_shape(words)?;
        let unpack = words.take("unpack::16b");
        let split = usize::from(shape == Tcgen05Shape::S16x32bx2);
        let operands = between(operands, 2 + split, 2 + split)?;
        let sources = self.word_sources(&operands[1 + split])?;
        if sources.len() as u32 != registers {
            return Err(format!("{registers} registers are expected, not {}", sources.len()));
        }
        let half_offset = if split == 1 { self.immediate(&operands[1])? as u32 } else { 0 };
        let address = self.plain_address(&operands[0])?;
        Ok(Tcgen05::Store { shape, repeat, unpack, half_offset, sources, address })
    }
}
