//! Legality of `tcgen05.mma`.

use super::address::TensorAddress;
use super::datapath::DataPath;
use super::elements::Container;
use super::instruction_descriptor::{InstructionDescriptor, has_scales, packs_4_bits};
use super::legality::{
    check_scale_id, check_shape, check_swizzle, check_transposed_n, scales_along_k,
};
use super::mma::{A_COLUMNS, MmaPlan, PlannedA};
use super::scale_factors::ScaleTile;
use super::shared_descriptor::SharedDescriptor;
use super::tile::{Major, SharedTile};
use crate::decode::MmaKind;
use crate::error::Fault;

/// Location of A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixA {
    /// Shared memory, with a matrix descriptor.
    Shared(u64),
    /// Tensor memory, with an address.
    Tensor(u32),
}

/// Block-scale operands of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleOperands {
    /// Elements along K per scale: 16 or 32.
    pub block: u32,
    /// Tensor-memory address of the scales of A.
    pub a: u32,
    /// Tensor-memory address of the scales of B.
    pub b: u32,
}

/// One `tcgen05.mma` with its operand values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmaRequest {
    /// `.kind`.
    pub kind: MmaKind,
    /// `.cta_group`: 1 or 2.
    pub group: u32,
    /// Rank of the issuing CTA.
    pub rank: u32,
    /// `.ws`.
    pub weight_stationary: bool,
    /// Tensor-memory address of D.
    pub d: u32,
    /// A.
    pub a: MatrixA,
    /// Matrix descriptor of B.
    pub b: u64,
    /// Instruction descriptor.
    pub instruction: u32,
    /// `.block_scale`.
    pub scales: Option<ScaleOperands>,
    /// `enable-input-d`: accumulate into D.
    pub accumulate: bool,
    /// D is multiplied by 2^-`scale_input_d` before accumulation.
    pub scale_input_d: u32,
    /// Bit mask of lanes of D that are not written: 128 bits for each CTA.
    pub disabled_lanes: [u32; 8],
    /// `.ashift`.
    pub shift_a: bool,
}

impl MmaRequest {
    /// Checks that the instruction is legal, independently of memory contents.
    ///
    /// # Errors
    /// The broken rule: those of [`InstructionDescriptor::decode`],
    /// [`SharedDescriptor::decode`], [`SharedTile::check`], [`check_shape`], [`check_swizzle`],
    /// [`check_transposed_n`], [`scales_along_k`], [`check_scale_id`], [`ScaleTile::decode`] and
    /// [`TensorAddress`]; `mma-scales`, `mma-scale-input-d`, `mma-shift-a`, `mma-disabled-lanes`,
    /// `tensor-a-transpose`, `tensor-a-weight-stationary`, `tensor-a-lane`,
    /// `tensor-operands-overlap`.
    pub fn check(&self) -> Result<MmaPlan, Fault> {
        let kind = self.kind;
        let descriptor =
            InstructionDescriptor::decode(kind, self.weight_stationary, self.instruction)?;
        let (m, n) = (descriptor.m, descriptor.n);
        check_shape(kind, self.group, self.weight_stationary, m, n)?;
        check_transposed_n(kind, self.group, &descriptor)?;
        self.check_options()?;
        let Some(path) = DataPath::select(m, self.group, self.weight_stationary) else {
            return Err(Fault::new(
                "mma-shape-m",
                format!("no layout for M = {m} with `.cta_group::{}`", self.group),
            ));
        };
        let d = TensorAddress::decode(self.d)?;
        d.check_lane("D", path.first_lanes())?;
        d.check_columns("D", n / path.slices())?;
        let a = self.plan_a(path, &descriptor, d)?;
        let b = SharedTile {
            descriptor: SharedDescriptor::decode("B", self.b)?,
            major: descriptor.major_b,
            container: Container::shared(descriptor.b, packs_4_bits(kind)),
        };
        check_swizzle("B", descriptor.b, b.major, b.descriptor.swizzle)?;
        b.check("B", n / self.group)?;
        let scales = self.plan_scales(path, &descriptor)?;
        let plan = MmaPlan {
            kind,
            group: self.group,
            rank: if self.group == 2 { self.rank & !1 } else { self.rank },
            path,
            descriptor,
            d,
            a,
            b,
            scales,
            accumulate: self.accumulate,
            scale_input_d: self.scale_input_d,
            disabled_lanes: self.disabled_lanes,
        };
        plan.check_overlap()?;
        Ok(plan)
    }

    fn check_options(&self) -> Result<(), Fault> {
        if !matches!(self.kind, MmaKind::F16 | MmaKind::Tf32) && self.scale_input_d != 0
            || self.scale_input_d > 15
        {
            return Err(Fault::new(
                "mma-scale-input-d",
                format!(
                    "expected a scale of D from 0 to 15 and kind f16 or tf32, got {} and {:?}",
                    self.scale_input_d, self.kind
                ),
            ));
        }
        if self.shift_a {
            return Err(Fault::new("mma-shift-a", "`.ashift` is not supported"));
        }
        let disabled = self.disabled_lanes.iter().any(|&word| word != 0);
        if disabled && (has_scales(self.kind) || self.weight_stationary) {
            return Err(Fault::new(
                "mma-disabled-lanes",
                "lanes of D cannot be disabled with block scales or `.ws`",
            ));
        }
        if self.group == 1 && self.disabled_lanes[4..].iter().any(|&word| word != 0) {
            return Err(Fault::new(
                "mma-disabled-lanes",
                "expected 4 words of disabled lanes with `.cta_group::1`, got 8",
            ));
        }
        Ok(())
    }

    fn plan_a(
        &self,
        path: DataPath,
        descriptor: &InstructionDescriptor,
        d: TensorAddress,
    ) -> Result<PlannedA, Fault> {
        let packed = packs_4_bits(self.kind);
        let bits = match self.a {
            MatrixA::Shared(bits) => {
                let tile = SharedTile {
                    descriptor: SharedDescriptor::decode("A", bits)?,
                    major: descriptor.major_a,
                    container: Container::shared(descriptor.a, packed),
                };
                check_swizzle("A", descriptor.a, tile.major, tile.descriptor.swizzle)?;
                tile.check("A", descriptor.m / self.group)?;
                return Ok(PlannedA::Shared(tile));
            }
            MatrixA::Tensor(bits) => bits,
        };
        if descriptor.major_a == Major::Mn {
            return Err(Fault::new(
                "tensor-a-transpose",
                "A in tensor memory is K-major: bit 15 (transpose) must be 0",
            ));
        }
        if self.weight_stationary && path != DataPath::D {
            return Err(Fault::new(
                "tensor-a-weight-stationary",
                "A in tensor memory with `.ws` is supported for M = 128 only",
            ));
        }
        let a = TensorAddress::decode(bits)?;
        a.check_lane("A", path.first_lanes())?;
        a.check_columns("A", A_COLUMNS)?;
        if a.lane != d.lane {
            return Err(Fault::new(
                "tensor-a-lane",
                format!("A begins at lane {} and D at lane {}: expected the same", a.lane, d.lane),
            ));
        }
        Ok(PlannedA::Tensor(a, Container::tensor(descriptor.a, packed)))
    }

    fn plan_scales(
        &self,
        path: DataPath,
        descriptor: &InstructionDescriptor,
    ) -> Result<Option<(u32, ScaleTile, ScaleTile)>, Fault> {
        let (fields, operands) = match (descriptor.scales, self.scales) {
            (None, None) => return Ok(None),
            (Some(fields), Some(operands)) => (fields, operands),
            _ => {
                return Err(Fault::new(
                    "mma-scales",
                    format!("{:?} and `.block_scale` do not go together", self.kind),
                ));
            }
        };
        let count = scales_along_k(self.kind, fields.format, operands.block)?;
        check_scale_id("A", count, fields.id_a)?;
        check_scale_id("B", count, fields.id_b)?;
        let a = ScaleTile::decode("the scales of A", operands.a, fields.id_a, count)?;
        let b = ScaleTile::decode("the scales of B", operands.b, fields.id_b, count)?;
        let rows = ScaleTile::columns(descriptor.m / path.blocks());
        a.address.check_columns("the scales of A", rows)?;
        let columns = ScaleTile::columns(descriptor.n / path.slices());
        b.address.check_columns("the scales of B", columns)?;
        Ok(Some((operands.block, a, b)))
    }
}
