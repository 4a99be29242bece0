//! MXFP8 operands for tests of GEMMs.

use deepwell_ir::DType;
use deepwell_kernels::ops::dequantize::oracle::{BLOCK, dequantize_rows};
use deepwell_precision::{QuantFormat, scale_tiles};

use crate::compare::{Compared, assert_biased_within};
use crate::harness::{HostTensor, uniform};

/// Data and scales as the device reads them, and the numbers that they stand for.
pub(crate) struct MxMatrix {
    pub(crate) data: HostTensor,
    /// In tiles.
    pub(crate) scales: HostTensor,
    /// The same by rows.
    pub(crate) plain_scales: Vec<u8>,
    pub(crate) values: Vec<f64>,
}

/// What the operands hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MxKind {
    /// Any finite code; exponents of scales within three of each other.
    Even,
    /// Any finite code; exponents of scales up to 60 apart.
    Spread,
    /// Elements of 1, 2 and 4 of either sign, scales of 1/2, 1 and 2: sums are exact in FP32.
    Exact,
    /// Any finite code; sums of products near 2^-122, so that MX scales of the results are clamped.
    Tiny,
}

/// One random number in `[0, bound)` for each index.
fn draws(len: usize, seed: u64, bound: u8) -> Vec<u8> {
    let scale = f32::from(bound);
    uniform(len, seed, 0.5).iter().map(|x| (((x + 0.5) * scale) as u8).min(bound - 1)).collect()
}

impl MxMatrix {
    /// A `[rows, k]` matrix with scales as `spec` says.
    pub(crate) fn new(
        rows: usize,
        k: usize,
        spec: QuantFormat,
        kind: MxKind,
        seed: u64,
    ) -> MxMatrix {
        let (lowest, count) = match kind {
            MxKind::Even => (126, 4),
            MxKind::Spread => (97, 60),
            MxKind::Exact => (126, 3),
            MxKind::Tiny => (56, 4),
        };
        let blocks = k.div_ceil(BLOCK);
        let of_group = draws(rows * blocks, seed, count);
        let along = usize::from(spec.block.k) / BLOCK;
        let across = if spec.block.is_square() { usize::from(spec.block.k) } else { 1 };
        let scale_of = |index: usize| {
            let (row, block) = (index / blocks, index % blocks);
            lowest + of_group[row / across * across * blocks + block / along * along]
        };
        let scales: Vec<u8> = (0..rows * blocks).map(scale_of).collect();
        let data: Vec<u8> = match kind {
            MxKind::Exact => {
                // 0x38 is one; eight more is twice as much.
                let code = |&draw: &u8| 0x38 + draw % 3 * 8 + if draw < 3 { 0x80 } else { 0 };
                draws(rows * k, seed + 1, 6).iter().map(code).collect()
            }
            _ => {
                let sign = draws(rows * k, seed + 2, 2);
                let code = |(magnitude, sign): (&u8, &u8)| magnitude | sign << 7;
                draws(rows * k, seed + 1, 0x7f).iter().zip(&sign).map(code).collect()
            }
        };
        MxMatrix::from_bytes(rows, k, &data, &scales)
    }

    /// From scales by rows.
    pub(crate) fn from_bytes(rows: usize, k: usize, data: &[u8], scales: &[u8]) -> MxMatrix {
        MxMatrix {
            data: HostTensor::bytes(DType::E4m3, &[rows, k], data),
            scales: HostTensor::bytes(
                DType::E8m0,
                &scale_tiles::shape(rows, k.div_ceil(BLOCK)),
                &tiled(rows, k, scales),
            ),
            plain_scales: scales.to_vec(),
            values: dequantize_rows(data, scales, rows, k),
        }
    }
}

impl MxMatrix {
    /// Elements, and scales by rows.
    pub(crate) fn to_bytes(&self) -> (Vec<u8>, Vec<u8>) {
        (self.data.bytes.clone(), self.plain_scales.clone())
    }
}

/// Scales of data `[rows, k]` as programs have them.
pub(crate) fn tiled(rows: usize, k: usize, plain: &[u8]) -> Vec<u8> {
    let blocks = k.div_ceil(BLOCK);
    let mut tiles = vec![0; scale_tiles::tiled_len(rows, blocks)];
    scale_tiles::to_tiles(plain, rows, blocks, &mut tiles).unwrap();
    tiles
}

/// For each element of `a · bᵀ` the sum of the magnitudes of its products, a bound of every partial
/// sum: `a` `[rows, k]`, `b` `[columns, k]`.
pub(crate) fn magnitudes(a: &MxMatrix, b: &MxMatrix, k: usize) -> Vec<f64> {
    let absolute = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
    deepwell_kernels::ops::linear::oracle::forward(
        &absolute(&a.values),
        &absolute(&b.values),
        None,
        k,
    )
}

/// Compares with a reference where the error may be `share` of the magnitudes, and one rounding to
/// `output`. What tensor cores cut off has the sign of what is cut: all elements may be smaller by
/// the same share.
pub(crate) fn assert_close_to_magnitudes(
    what: &str,
    got: &[f64],
    expected: &[f64],
    magnitudes: &[f64],
    share: f64,
    output: DType,
) -> Compared {
    let rounding = match output {
        DType::Bf16 => 2f64.powi(-8),
        _ => 2f64.powi(-23),
    };
    let bounds: Vec<f64> = magnitudes
        .iter()
        .zip(expected)
        .map(|(magnitude, expected)| share * magnitude + rounding * expected.abs())
        .collect();
    assert_biased_within(what, got, expected, &bounds, share)
}
