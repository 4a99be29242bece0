//! NVFP4 GEMMs of groups with a tensor scale for each group, on any kernel, against f64 sums of the
//! numbers that the operands stand for.

use deepwell_ir::ops::{Axis, GroupedRows, ScaledGroupedGemm};
use deepwell_ir::{DType, GemmKind, Tile};
use deepwell_kernels::ops::grouped_gemm::oracle;
use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::{QuantFormat, packed, scale_tiles};

use crate::bf16_grouped_gemm::offsets_of;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::assert_close_to_magnitudes;
use crate::quantize_nvfp4::Quantized;
use crate::sm90_dequantized_nvfp4_gemm::Operand;

/// Rows of which a group has a multiple.
const ALIGN: usize = scale_tiles::TILE_ROWS;
/// The block scale that makes NaN of anything.
const POISON: u8 = 0x7f;
/// Elements along K of a tile of scales.
const TILE_K: usize = scale_tiles::TILE_BLOCKS * BLOCK;

/// Tokens of each group: none, one, around a tile of rows or of scales, more, all in one group,
/// many groups; groups without tokens are first, last and between.
pub(crate) const GROUPS: [&[usize]; 7] = [
    &[0, 0, 0],
    &[128],
    &[128, 0, 256],
    &[0, 384, 0],
    &[128, 0, 128, 128, 0, 128, 128, 0, 128],
    &[1, 0, 127, 129],
    &[0, 255, 257, 1, 0],
];

/// An operand that joins the operands of groups.
struct Joined {
    inputs: [HostTensor; 3],
    values: Vec<f64>,
}

/// Rows of a group of so many tokens: whole tiles of scales.
fn padded(tokens: usize) -> usize {
    tokens.next_multiple_of(ALIGN)
}

/// A matrix as operand, with magnitudes that differ by rows, by blocks and, a millionfold, by
/// `group`. The last `padding` rows and elements of rows are zeros.
fn operand_of(
    [rows, k]: [usize; 2],
    padding: [usize; 2],
    format: QuantFormat,
    group: usize,
    seed: u64,
) -> Operand {
    let mut x = uniform(rows * k, seed + group as u64, 1.0);
    let factor = [1.0, 1e-3, 1e3][group % 3];
    for (index, x) in x.iter_mut().enumerate() {
        let exponent = (index / k.max(1) * 5 % 7 + index % k.max(1) / BLOCK * 3 % 5) as i32 - 6;
        *x *= factor * 2.0_f32.powi(exponent);
        if index / k + padding[0] >= rows || index % k + padding[1] >= k {
            *x = 0.0;
        }
    }
    let quantized = Quantized::new(&x, [rows, k], &format, Axis::Row, None, (None, None));
    let Quantized { data, scales, tensor_scale, .. } = &quantized;
    Operand::of_planes([rows, k], data, scales, *tensor_scale)
}

/// The operands of groups, each `[rows, k]` with padding.
fn operands(sizes: &[[[usize; 2]; 2]], format: QuantFormat, seed: u64) -> Vec<Operand> {
    let of = |(group, &[size, padding]): (usize, &[[usize; 2]; 2])| {
        operand_of(size, padding, format, group, seed)
    };
    sizes.iter().enumerate().map(of).collect()
}

fn tensor_scales(parts: &[Operand]) -> HostTensor {
    let scales: Vec<f32> = parts.iter().map(|part| part.inputs[2].to_f64()[0] as f32).collect();
    HostTensor::f32(&[parts.len(), 1], &scales)
}

/// Groups of rows one below the other, and rows that no group has, whose scales are NaN.
fn below(groups: &[usize], behind: usize, k: usize, seed: u64) -> Joined {
    let size = |&tokens: &usize| [[padded(tokens), k], [padded(tokens) - tokens, 0]];
    let sizes: Vec<_> = groups.iter().map(size).collect();
    let parts = operands(&sizes, QuantFormat::NVFP4, seed);
    let rows = groups.iter().copied().map(padded).sum::<usize>() + behind;
    let plane = |index: usize, len: usize| {
        let mut bytes: Vec<u8> =
            parts.iter().flat_map(|part| part.inputs[index].bytes.clone()).collect();
        bytes.resize(len, POISON);
        bytes
    };
    let data = plane(0, packed::fp4_len(rows, k));
    let scales = plane(1, scale_tiles::tiled_len(rows, k.div_ceil(BLOCK)));
    let mut values: Vec<f64> = parts.iter().flat_map(|part| part.values.clone()).collect();
    values.resize(rows * k, 0.0);
    let tiles = scale_tiles::shape(rows, k.div_ceil(BLOCK));
    let inputs = [
        HostTensor::bytes(DType::E2m1, &[rows, k], &data),
        HostTensor::bytes(DType::Ue4m3, &tiles, &scales),
        tensor_scales(&parts),
    ];
    Joined { inputs, values }
}

/// Groups of columns side by side, `rows` rows each, and columns that no group has. Values are
/// transposed, `[columns, rows]`.
fn beside(groups: &[usize], behind: usize, rows: usize, seed: u64) -> Joined {
    let size = |&tokens: &usize| [[rows, padded(tokens)], [0, padded(tokens) - tokens]];
    let sizes: Vec<_> = groups.iter().map(size).collect();
    let parts = operands(&sizes, QuantFormat::NVFP4, seed);
    let groups: Vec<usize> = groups.iter().copied().map(padded).collect();
    let columns = groups.iter().sum::<usize>() + behind;
    // Lines of a plane that groups have a part of each: `bytes_of` of a number of columns.
    let join = |index: usize, lines: usize, bytes_of: fn(usize) -> usize| -> Vec<u8> {
        let line = |line: usize| {
            let of_group = |(part, &group): (&Operand, &usize)| {
                let bytes = bytes_of(group);
                part.inputs[index].bytes[line * bytes..][..bytes].to_vec()
            };
            let mut joined: Vec<u8> = parts.iter().zip(&groups).flat_map(of_group).collect();
            joined.resize(bytes_of(columns), POISON);
            joined
        };
        (0..lines).flat_map(line).collect()
    };
    let data = join(0, rows, |columns| columns / 2);
    let row_tiles = rows.div_ceil(scale_tiles::TILE_ROWS);
    let scales = join(1, row_tiles, |columns| columns.div_ceil(TILE_K) * scale_tiles::TILE_BYTES);
    let of_group = |(part, &group): (&Operand, &usize)| -> Vec<f64> {
        let at = |column: usize, row: usize| part.values[row * group + column];
        (0..group).flat_map(|column| (0..rows).map(move |row| at(column, row))).collect()
    };
    let mut values: Vec<f64> = parts.iter().zip(&groups).flat_map(of_group).collect();
    values.resize(columns * rows, 0.0);
    let tiles = scale_tiles::shape(rows, columns.div_ceil(BLOCK));
    let inputs = [
        HostTensor::bytes(DType::E2m1, &[rows, columns], &data),
        HostTensor::bytes(DType::Ue4m3, &tiles, &scales),
        tensor_scales(&parts),
    ];
    Joined { inputs, values }
}

/// Matrices of experts, one after the other.
fn stack(count: usize, [rows, k]: [usize; 2]) -> Joined {
    let parts = operands(&vec![[[rows, k], [0, 0]]; count], QuantFormat::NVFP4.square(), 50);
    let join = |index: usize| -> Vec<u8> {
        parts.iter().flat_map(|part| part.inputs[index].bytes.clone()).collect()
    };
    let tiles = scale_tiles::shape(rows, k.div_ceil(BLOCK));
    let inputs = [
        HostTensor::bytes(DType::E2m1, &[count, rows, k], &join(0)),
        HostTensor::bytes(DType::Ue4m3, &[&[count], &tiles[..]].concat(), &join(1)),
        tensor_scales(&parts),
    ];
    Joined { inputs, values: parts.iter().flat_map(|part| part.values.clone()).collect() }
}

fn absolute(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x.abs()).collect()
}

/// As of the GEMMs without groups: tensor cores cut the sum below 2^-23 once in each step of 64
/// along K, and terms far below it; then two factors and their product are rounded.
pub(crate) fn block_scaled_share(contraction: usize) -> f64 {
    (contraction.div_ceil(64) as f64 + 8.0) * 2f64.powi(-23)
}

/// As of the GEMM without groups on wgmma: its steps of 16 along K cut the sum, and round it once.
pub(crate) fn bf16_share(contraction: usize) -> f64 {
    (contraction.div_ceil(16) as f64 * 2.0 + 12.0) * 2f64.powi(-23)
}

#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) kernel: &'static str,
    /// Tokens of each group, which has rows of zeros after them.
    pub(crate) groups: &'a [usize],
    /// Rows that no group has.
    pub(crate) behind: usize,
    pub(crate) tile: Option<Tile>,
    /// What a sum over so many may be wrong by, as a share of the magnitudes.
    pub(crate) share: fn(usize) -> f64,
}

impl Case<'_> {
    fn op(&self, kind: GemmKind) -> ScaledGroupedGemm {
        let grouped = GroupedRows::new(self.groups.len(), ALIGN);
        let a = QuantFormat::NVFP4;
        let b = if kind == GemmKind::Wgrad { a } else { a.square() };
        ScaledGroupedGemm { kind, grouped, output: DType::Bf16, a, b }
    }

    fn offsets(&self) -> Vec<i32> {
        offsets_of(&self.groups.iter().copied().map(padded).collect::<Vec<_>>())
    }

    /// Fprop or dgrad with results of `columns`.
    pub(crate) fn check_rows(&self, gpu: &mut Gpu, kind: GemmKind, [columns, k]: [usize; 2]) {
        let Case { kernel, groups, behind, tile, share } = *self;
        let offsets = self.offsets();
        let end = *offsets.last().expect("a group") as usize;
        let places = HostTensor::i32(&[groups.len() + 1], &offsets);
        let (a, b) = (below(groups, behind, k, 1), stack(groups.len(), [columns, k]));
        let [expected, magnitudes] =
            [(a.values.clone(), b.values.clone()), (absolute(&a.values), absolute(&b.values))]
                .map(|(a, b)| oracle::forward(&a, &b, &offsets, k, columns));
        let inputs = [&a.inputs[..], &b.inputs[..], &[places]].concat();
        let out = HostTensor::output(DType::Bf16, &[end + behind, columns]);
        let options = RunOptions { kernel: Some(kernel), tile, ..RunOptions::default() };
        let got = gpu.run_with(self.op(kind), &inputs, &[out], options)[0].to_f64();
        let what = format!("{kind} of {groups:?} + {behind}, {columns}x{k} {tile:?}");
        let (share, output) = (share(k), DType::Bf16);
        assert_close_to_magnitudes(&what, &got, &expected, &magnitudes, share, output);
        assert!(got[end * columns..].iter().all(|&y| y == 0.0), "{what}: rows behind");
    }

    /// Weight gradients of `[n, k]`, written and accumulated.
    pub(crate) fn check_wgrad(&self, gpu: &mut Gpu, [n, k]: [usize; 2]) {
        let Case { kernel, groups, behind, tile, share } = *self;
        let (offsets, count) = (self.offsets(), groups.len());
        let places = HostTensor::i32(&[count + 1], &offsets);
        let (a, b) = (beside(groups, behind, n, 7), beside(groups, behind, k, 8));
        let [sums, magnitudes] =
            [(a.values.clone(), b.values.clone()), (absolute(&a.values), absolute(&b.values))]
                .map(|(dy, x)| oracle::weight_gradient(&dy, &x, &offsets, k, n));
        let inputs = [&a.inputs[..], &b.inputs[..], &[places]].concat();
        let before = HostTensor::f32(&[count, n, k], &uniform(count * n * k, 5, 8.0));
        let there = before.to_f64();
        let longest = groups.iter().copied().map(padded).max().unwrap_or(0);
        for accumulate in [false, true] {
            let added = |(sum, there): (&f64, &f64)| if accumulate { sum + there } else { *sum };
            let expected: Vec<f64> = sums.iter().zip(&there).map(added).collect();
            let bounds = magnitudes.iter().zip(&there);
            let bounds: Vec<f64> = bounds
                .map(|(sum, there)| if accumulate { sum + there.abs() } else { *sum })
                .collect();
            let kernel = Some(kernel);
            let options = RunOptions { accumulate, kernel, tile, ..RunOptions::default() };
            let outputs = std::slice::from_ref(&before);
            let got = gpu.run_with(self.op(GemmKind::Wgrad), &inputs, outputs, options);
            let got = got[0].to_f64();
            let what = format!("wgrad of {groups:?} + {behind}, {n}x{k} {accumulate} {tile:?}");
            let (share, output) = (share(longest), DType::F32);
            assert_close_to_magnitudes(&what, &got, &expected, &bounds, share, output);
            for group in (0..count).filter(|&group| groups[group] == 0) {
                let of_group = group * n * k..(group + 1) * n * k;
                let same = got[of_group.clone()].iter().zip(&expected[of_group]);
                let is_same = same.into_iter().all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(is_same, "{what}: group {group} without rows");
            }
        }
    }
}

/// All groups, with sizes around tiles and, in `k_step`, single steps of the contraction.
pub(crate) fn check_all(gpu: &mut Gpu, case: Case<'_>, k_step: usize) {
    for (index, groups) in GROUPS.into_iter().enumerate() {
        let case = Case { groups, behind: [128, 0, 384][index % 3], ..case };
        if groups.iter().sum::<usize>() + case.behind == 0 {
            continue;
        }
        // One column, around a tile, K within a step and within a stage.
        let columns = [1, 127, 129, 40, 257, 130, 128][index];
        let k = [k_step, 96, 288, 256, 544, 64, 160 + k_step][index];
        case.check_rows(gpu, GemmKind::Fprop, [columns, k]);
        let sizes = [[1, 40], [127, 129], [129, 1], [40, 257], [33, 48], [130, 24], [128, 72]];
        case.check_wgrad(gpu, sizes[index]);
    }
}
