//! The GEMMs of grouped rows in NVFP4: every group of rows and every matrix has a tensor scale.

use deepwell_ir::GemmKind;
use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::scale_tiles;
use half::bf16;

use super::{Sizes, check_offsets, part_of};
use crate::KernelError;
use crate::ops::scaled_gemm::nvfp4::{Part, Planes, scaled_gemm};
use crate::runtime::cpu::arena::{Arena, In};
use crate::runtime::cpu::gemm::{Output, Tier};
use crate::runtime::cpu::gemm_output::GemmTarget;
use crate::runtime::cpu::operands::{Operands, Run};

/// The planes of an operand, with a tensor scale for each group or matrix.
#[derive(Clone, Copy)]
struct Grouped<'a> {
    data: &'a [u8],
    scales: &'a [u8],
    tensor_scales: &'a [f32],
}

impl<'a> Grouped<'a> {
    /// The rows of a group, `[count, k]`.
    fn rows(self, group: usize, first_row: usize, k: usize) -> Planes<'a> {
        let part = Part { first_row, first_k: 0, stored_k: k };
        let Grouped { data, scales, tensor_scales } = self;
        Planes { data, scales, tensor_scale: tensor_scales[group], k, part }
    }

    /// The columns of a group, `count` of the `stored_k` of each row.
    fn columns(self, group: usize, first_k: usize, count: usize, stored_k: usize) -> Planes<'a> {
        let part = Part { first_row: 0, first_k, stored_k };
        Planes { k: count, part, ..self.rows(group, 0, stored_k) }
    }

    /// Matrix `index` of a stack of `[rows, k]`.
    fn matrix(self, index: usize, rows: usize, k: usize) -> Planes<'a> {
        let bytes = rows * k.div_ceil(2);
        let tiles = scale_tiles::tiled_len(rows, k.div_ceil(BLOCK));
        let data = &self.data[index * bytes..][..bytes];
        let scales = &self.scales[index * tiles..][..tiles];
        Planes::whole(data, scales, self.tensor_scales[index], k)
    }
}

/// The planes of an operand in the arena.
struct GroupedIn {
    data: In<u8>,
    scales: In<u8>,
    tensor_scales: In<f32>,
}

impl GroupedIn {
    fn new(operands: &Operands<'_>, first: usize) -> Result<GroupedIn, KernelError> {
        Ok(GroupedIn {
            data: operands.input(first)?,
            scales: operands.input(first + 1)?,
            tensor_scales: operands.input(first + 2)?,
        })
    }

    fn of<'a>(&self, arena: &'a Arena) -> Grouped<'a> {
        Grouped {
            data: self.data.of(arena),
            scales: self.scales.of(arena),
            tensor_scales: self.tensor_scales.of(arena),
        }
    }
}

pub(super) fn prepare(
    operands: &Operands<'_>,
    tier: Tier,
    kind: GemmKind,
    [b, offsets]: [usize; 2],
    sizes: Sizes,
) -> Result<Run, KernelError> {
    let (a, b) = (GroupedIn::new(operands, 0)?, GroupedIn::new(operands, b)?);
    let offsets = operands.input::<i32>(offsets)?;
    let target = GemmTarget::new(operands, operands.output(0))?;
    let workspace = operands.workspace::<u8>()?;
    Ok(Box::new(move |arena| {
        let mut out = target.output(arena);
        let operands = [a.of(arena), b.of(arena)];
        grouped_gemm(tier, kind, sizes, operands, offsets.of(arena), &mut out, workspace.of(arena))
    }))
}

/// As [`super::grouped_gemm`], of planes quantized along the contraction.
fn grouped_gemm(
    tier: Tier,
    kind: GemmKind,
    Sizes { rows, n, k }: Sizes,
    [a, b]: [Grouped<'_>; 2],
    offsets: &[i32],
    out: &mut Output<'_>,
    workspace: &mut [u8],
) -> Result<(), String> {
    let groups = check_offsets(offsets, rows, BLOCK)?;
    let columns = if kind == GemmKind::Fprop { n } else { k };
    for (index, group) in groups.iter().enumerate() {
        let (first, count) = (group.start, group.len());
        let (m, a, b, start) = match kind {
            GemmKind::Fprop => (count, a.rows(index, first, k), b.matrix(index, n, k), first * n),
            GemmKind::Dgrad => (count, a.rows(index, first, n), b.matrix(index, k, n), first * k),
            GemmKind::Wgrad => (
                n,
                a.columns(index, first, count, rows),
                b.columns(index, first, count, rows),
                index * n * k,
            ),
        };
        let part = part_of(out, start..start + m * columns);
        scaled_gemm(tier, [m, columns], a, b, part, workspace)
            .map_err(|error| error.to_string())?;
    }
    if kind != GemmKind::Wgrad {
        let end = groups.last().map_or(0, |group| group.end);
        match out {
            Output::F32 { data, .. } => data[end * columns..].fill(0.0),
            Output::Bf16 { data } => data[end * columns..].fill(bf16::ZERO),
        }
    }
    Ok(())
}
