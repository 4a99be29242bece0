//! `quantize_nvfp4_groups.cu` against the CPU's quantization of each part: data, scales, tensor
//! scales and counters must be the same to the bit.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::{
    ElementRounding, Philox, QuantFormat, QuantStats, Source, packed, scale_tiles,
};
use half::bf16;

use crate::bf16_grouped_gemm::offsets_of;
use crate::harness::{Gpu, HostTensor};
use crate::quantize::assert_same;
use crate::quantize_nvfp4::{Quantized, formats, numbers_of, outer_and_k, transformed};

/// Parts of a tensor with a tensor scale each.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parts<'a> {
    /// Matrices of this many rows.
    Stack(usize, usize),
    /// Groups of rows, and rows that no group has.
    Groups(&'a [usize], usize),
}

impl Parts<'_> {
    /// Rows of each part.
    fn rows(self) -> Vec<usize> {
        match self {
            Parts::Stack(count, rows) => vec![rows; count],
            Parts::Groups(groups, _) => groups.to_vec(),
        }
    }

    /// Rows of a plane that holds all parts one below the other.
    fn all_rows(self) -> usize {
        match self {
            Parts::Stack(count, rows) => count * rows,
            Parts::Groups(groups, behind) => groups.iter().sum::<usize>() + behind,
        }
    }

    fn shape(self, columns: usize) -> Vec<usize> {
        match self {
            Parts::Stack(count, rows) => vec![count, rows, columns],
            Parts::Groups(..) => vec![self.all_rows(), columns],
        }
    }

    pub(crate) fn offsets(self) -> Option<HostTensor> {
        let Parts::Groups(groups, _) = self else { return None };
        Some(HostTensor::i32(&[groups.len() + 1], &offsets_of(groups)))
    }
}

/// What the parts of an operand are quantized to.
pub(crate) struct Operand {
    pub(crate) data: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) tensor_scales: Vec<f32>,
    pub(crate) outputs: [HostTensor; 3],
    stats: QuantStats,
}

/// Quantizes each part of `x` on the CPU. Groups quantized down columns lie side by side in the
/// rows of the operand, other parts one after the other; what no group has is zeros.
pub(crate) fn expected<S: Source>(
    x: &[S],
    parts: Parts<'_>,
    columns: usize,
    (format, axis): (&QuantFormat, Axis),
    philox: Option<Philox>,
) -> Operand {
    let mut first = 0;
    let of_part = |rows: usize| {
        let part = &x[first * columns..(first + rows) * columns];
        // Words of an element are those at its place in the whole operand.
        let words = match axis {
            Axis::Column => (first as u64, parts.all_rows() as u64),
            _ => ((first * columns) as u64, columns as u64),
        };
        let words = (philox, philox.map(|_| words));
        first += rows;
        (rows, Quantized::new(part, [rows, columns], format, axis, None, words))
    };
    let quantized: Vec<(usize, Quantized)> = parts.rows().into_iter().map(of_part).collect();
    let mut stats = QuantStats::default();
    quantized.iter().for_each(|(_, part)| stats.merge(&part.stats));
    let tensor_scales: Vec<f32> = quantized.iter().map(|(_, part)| part.tensor_scale).collect();
    let count = tensor_scales.len();
    let is_beside = matches!((parts, axis), (Parts::Groups(..), Axis::Column));
    let rows = parts.all_rows();
    let (data, scales) = match is_beside {
        false => {
            let mut data: Vec<u8> = quantized.iter().flat_map(|(_, it)| it.data.clone()).collect();
            let mut scales: Vec<u8> =
                quantized.iter().flat_map(|(_, it)| it.scales.clone()).collect();
            if let Parts::Groups(..) = parts {
                data.resize(packed::fp4_len(rows, columns), 0);
                scales.resize(scale_tiles::tiled_len(rows, columns.div_ceil(BLOCK)), 0);
            }
            (data, scales)
        }
        true => {
            let join =
                |lines: usize, plane: fn(&Quantized) -> &[u8], bytes: &dyn Fn(usize) -> usize| {
                    let line = |line: usize| {
                        let of = |(rows, it): &(usize, Quantized)| {
                            plane(it)[line * bytes(*rows)..][..bytes(*rows)].to_vec()
                        };
                        let mut joined: Vec<u8> = quantized.iter().flat_map(of).collect();
                        joined.resize(bytes(rows), 0);
                        joined
                    };
                    (0..lines).flat_map(line).collect::<Vec<u8>>()
                };
            let tile_k = scale_tiles::TILE_BLOCKS * BLOCK;
            let of_scales = |rows: usize| rows.div_ceil(tile_k) * scale_tiles::TILE_BYTES;
            (
                join(columns, |it| &it.data, &|rows| rows.div_ceil(2)),
                join(columns.div_ceil(scale_tiles::TILE_ROWS), |it| &it.scales, &of_scales),
            )
        }
    };
    let outputs = match parts {
        Parts::Stack(count, rows) => {
            let (outer, k) = outer_and_k(axis, rows, columns);
            let tiles = scale_tiles::shape(outer, k.div_ceil(BLOCK));
            [
                HostTensor::output(DType::E2m1, &[count, outer, k]),
                HostTensor::output(DType::Ue4m3, &[&[count], &tiles[..]].concat()),
                HostTensor::output(DType::F32, &[count, 1]),
            ]
        }
        Parts::Groups(..) => {
            let (outer, k) = outer_and_k(axis, rows, columns);
            [
                HostTensor::output(DType::E2m1, &[outer, k]),
                HostTensor::output(DType::Ue4m3, &scale_tiles::shape(outer, k.div_ceil(BLOCK))),
                HostTensor::output(DType::F32, &[count, 1]),
            ]
        }
    };
    Operand { data, scales, tensor_scales, outputs, stats }
}

/// Numbers of a kind for all parts, a thousandfold of each other; rows that no group has are zeros,
/// as after a dispatch.
pub(crate) fn source(parts: Parts<'_>, columns: usize, kind: &str) -> Vec<f32> {
    let mut x = Vec::new();
    for (index, rows) in parts.rows().into_iter().enumerate() {
        let factor = [1.0, 1e-3, 1e3][index % 3];
        x.extend(numbers_of(kind, rows, columns).into_iter().map(|x| x * factor));
    }
    x.resize(parts.all_rows() * columns, 0.0);
    x
}

fn check_of<S: Source>(
    gpu: &mut Gpu,
    (source, x): (HostTensor, &[S]),
    parts: Parts<'_>,
    columns: usize,
    quantize: &Quantize,
    what: &str,
) {
    let (mut outputs, mut planes) = (Vec::new(), Vec::new());
    let mut stats = QuantStats::default();
    for &axis in quantize.axes() {
        let operand = expected(x, parts, columns, (&quantize.format, axis), None);
        stats.merge(&operand.stats);
        outputs.extend(operand.outputs);
        planes.extend([operand.data, operand.scales]);
        planes.push(bytemuck::cast_slice::<f32, u8>(&operand.tensor_scales).to_vec());
    }
    outputs.push(HostTensor::output(DType::U64, &[Quantize::STATISTICS]));
    let QuantStats { amax: largest, elements, underflows, saturations, scale_clamps, nonfinite } =
        stats;
    let words =
        [largest.to_bits().into(), elements, underflows, saturations, scale_clamps, nonfinite];
    planes.push(bytemuck::cast_slice::<u64, u8>(&words).to_vec());
    let inputs: Vec<HostTensor> = [source].into_iter().chain(parts.offsets()).collect();
    let got = gpu.run(quantize.clone(), &inputs, &outputs, false, 1);
    assert_same(what, &got, &planes);
}

pub(crate) fn check(
    gpu: &mut Gpu,
    parts: Parts<'_>,
    columns: usize,
    kind: &str,
    quantize: &Quantize,
) {
    let x = source(parts, columns, kind);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let shape = parts.shape(columns);
    let what = format!("{parts:?} x {columns} {kind} {quantize:?}");
    let source = HostTensor::f32(&shape, &x);
    check_of(gpu, (source, &x), parts, columns, quantize, &format!("f32 {what}"));
    let source = HostTensor::bf16(&shape, &x);
    check_of(gpu, (source, &rounded), parts, columns, quantize, &format!("bf16 {what}"));
}

/// Formats with their axes.
fn forms() -> Vec<Quantize> {
    let formats = formats().into_iter().chain(transformed());
    let of = |format: QuantFormat| {
        let both = [Axis::Row, Axis::Column, Axis::Both];
        let axes =
            both.into_iter().filter(move |&it| format.hadamard.is_none() || it != Axis::Both);
        axes.map(move |axis| Quantize { format, axis })
    };
    formats.flat_map(of).collect()
}

trial!(every_part_as_on_the_cpu);
fn every_part_as_on_the_cpu() {
    let mut gpu = Gpu::open();
    for (parts, columns) in [
        (Parts::Groups(&[128], 0), 48),
        (Parts::Groups(&[0, 256, 0, 128, 0], 128), 80),
        (Parts::Groups(&[0, 0], 128), 32),
        (Parts::Stack(3, 48), 144),
        (Parts::Stack(1, 129), 33),
        (Parts::Stack(2, 16), 272),
    ] {
        for quantize in forms() {
            let rows = parts.rows().into_iter().max().unwrap_or(0);
            let (_, k) = outer_and_k(quantize.axis, rows, columns);
            if quantize.format.hadamard.is_some() && !k.is_multiple_of(BLOCK) {
                continue;
            }
            for kind in ["random", "special", "zeros", "outlier"] {
                check(&mut gpu, parts, columns, kind, &quantize);
            }
        }
    }
}

/// The operand of stochastic rounding to nearest, whose scales it keeps.
pub(crate) fn nearest(format: QuantFormat) -> QuantFormat {
    format.with_rounding(ElementRounding::Nearest)
}

emulated! {
    quantize_nvfp4_groups on Sm90a: |gpu| {
        let groups = Parts::Groups(&[128, 0, 256, 128], 128);
        let square = QuantFormat::NVFP4.square();
        for kind in ["special", "wide"] {
            check(gpu, groups, 130, kind, &Quantize { format: square, axis: Axis::Both });
        }
        for axis in [Axis::Row, Axis::Column] {
            let format = QuantFormat::NVFP4.with_four_six(true);
            check(gpu, groups, 144, "wide", &Quantize { format, axis });
            check(gpu, groups, 144, "special", &Quantize { format: transformed()[0], axis });
            check(gpu, Parts::Stack(3, 145), 72, "special", &Quantize { format: square, axis });
        }
        let both = Quantize { format: square, axis: Axis::Both };
        check(gpu, Parts::Stack(2, 144), 80, "wide", &both);
    }
}
