//! Dequantization of NVFP4 operands with scales in tiles, and their GEMM.
//!
//! The product of an element and its block scale has at most six significant bits, so BF16
//! represents it exactly. The GEMM multiplies these products on the BF16 tiers and applies both
//! tensor scales to the FP32 sums, as tensor cores do.

use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::{Hadamard16, e2m1, scale_tiles, ue4m3};
use half::bf16;
use rayon::prelude::*;

use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{
    self, Carver, DataKind, GemmError, Operand, Output, Tier, carved_bytes,
};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, chunk_elements};

/// Values of all E2M1 bit patterns.
const VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut bits = 0;
    while bits < values.len() {
        values[bits] = e2m1::decode(bits as u8);
        bits += 1;
    }
    values
};

/// The planes of an operand quantized along K.
#[derive(Clone, Copy, Debug)]
pub struct Planes<'a> {
    /// Two E2M1 elements per byte, `[outer, K]`; each row starts at a new byte.
    pub data: &'a [u8],
    /// UE4M3 scales of `[outer, ceil(K / 16)]` blocks, in tiles.
    pub scales: &'a [u8],
    /// Factor on all values.
    pub tensor_scale: f32,
    /// Elements of a row.
    pub k: usize,
    /// What of the stored rows these are.
    pub part: Part,
}

/// A part of the stored operand: rows from `first_row` on, elements of a row from `first_k` on.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// First row.
    pub first_row: usize,
    /// First element of each row, a multiple of 16.
    pub first_k: usize,
    /// Stored elements of a row.
    pub stored_k: usize,
}

impl<'a> Planes<'a> {
    /// All rows of an operand.
    pub fn whole(data: &'a [u8], scales: &'a [u8], tensor_scale: f32, k: usize) -> Planes<'a> {
        let part = Part { first_row: 0, first_k: 0, stored_k: k };
        Planes { data, scales, tensor_scale, k, part }
    }
}

impl Planes<'_> {
    /// Element times block scale, without the tensor scale.
    #[inline(always)]
    fn scaled(&self, outer: usize, k: usize) -> f32 {
        let Part { first_row, first_k, stored_k } = self.part;
        let (outer, k) = (outer + first_row, k + first_k);
        let byte = self.data[outer * stored_k.div_ceil(2) + k / 2];
        let bits = byte >> (k % 2 * 4) & 0xF;
        let place = scale_tiles::offset(outer, k / BLOCK, stored_k.div_ceil(BLOCK));
        VALUES[usize::from(bits)] * ue4m3::decode(self.scales[place])
    }

    /// Computes [`Planes::scaled`] of every element, `[outer, K]`.
    fn expand(&self, target: &mut [bf16]) {
        let k = self.k.max(1);
        target.par_chunks_mut(k).enumerate().for_each(|(outer, row)| {
            for (block, row) in row.chunks_mut(BLOCK).enumerate() {
                for (i, target) in row.iter_mut().enumerate() {
                    *target = Element::from_f32(self.scaled(outer, block * BLOCK + i));
                }
            }
        });
    }

    /// Dequantizes a rowwise operand, `[outer, K]`.
    ///
    /// # Panics
    ///
    /// If a plane is too short.
    pub fn dequantize_rows<E: Element>(&self, target: &mut [E]) {
        let k = self.k.max(1);
        let rows_of_chunk = (chunk_elements(k) / k).max(1);
        target.par_chunks_mut(rows_of_chunk * k).enumerate().for_each(|(chunk, target)| {
            for (row, target) in target.chunks_mut(k).enumerate() {
                for (i, target) in target.iter_mut().enumerate() {
                    let scaled = self.scaled(chunk * rows_of_chunk + row, i);
                    *target = within(scaled * self.tensor_scale);
                }
            }
        });
    }

    /// Dequantizes a columnwise operand, `[columns, K]`, and transposes it back to `[K, columns]`.
    ///
    /// # Panics
    ///
    /// If a plane is too short.
    pub fn dequantize_columns<E: Element>(&self, columns: usize, target: &mut [E]) {
        if columns == 0 {
            return;
        }
        target.par_chunks_mut(BLOCK * columns).enumerate().for_each(|(block, target)| {
            for column in 0..columns {
                for (i, target) in target.chunks_mut(columns).enumerate() {
                    let scaled = self.scaled(column, block * BLOCK + i);
                    target[column] = within(scaled * self.tensor_scale);
                }
            }
        });
    }
}

impl Planes<'_> {
    /// The numbers of block `block` of a row, in FP32, with the transform undone.
    fn untransformed(&self, outer: usize, block: usize, transform: Hadamard16) -> [f32; BLOCK] {
        let mut group =
            std::array::from_fn(|i| self.scaled(outer, block * BLOCK + i) * self.tensor_scale);
        transform.inverse(&mut group);
        group
    }

    /// [`Planes::dequantize_rows`] of an operand that was transformed before quantization.
    ///
    /// # Panics
    ///
    /// If a plane is too short, or K is not a multiple of 16.
    pub fn dequantize_transformed_rows<E: Element>(&self, transform: Hadamard16, target: &mut [E]) {
        assert!(self.k.is_multiple_of(BLOCK), "expected whole groups of {BLOCK}, got {}", self.k);
        target.par_chunks_mut(self.k.max(1)).enumerate().for_each(|(row, target)| {
            for (block, target) in target.chunks_mut(BLOCK).enumerate() {
                let group = self.untransformed(row, block, transform);
                target.iter_mut().zip(group).for_each(|(target, x)| *target = within(x));
            }
        });
    }

    /// [`Planes::dequantize_columns`] of an operand that was transformed before quantization.
    ///
    /// # Panics
    ///
    /// As [`Planes::dequantize_transformed_rows`].
    pub fn dequantize_transformed_columns<E: Element>(
        &self,
        transform: Hadamard16,
        columns: usize,
        target: &mut [E],
    ) {
        assert!(self.k.is_multiple_of(BLOCK), "expected whole groups of {BLOCK}, got {}", self.k);
        target.par_chunks_mut((BLOCK * columns).max(1)).enumerate().for_each(|(block, target)| {
            for column in 0..columns {
                let group = self.untransformed(column, block, transform);
                let rows = target.chunks_mut(columns);
                rows.zip(group).for_each(|(row, x)| row[column] = within(x));
            }
        });
    }
}

/// Rounds to the type; a finite value beyond the type's largest number becomes this number, as in
/// [`deepwell_precision::nvfp4::dequantize_rows`].
fn within<E: Element>(value: f32) -> E {
    let nearest = E::from_f32(value);
    let is_beyond = value.is_finite() && nearest.to_f32().is_infinite();
    // The largest BF16: only for BF16 can an FP32 value be out of range.
    if is_beyond { E::from_f32(bf16::MAX.to_f32().copysign(value)) } else { nearest }
}

/// Workspace bytes of [`scaled_gemm`].
#[must_use]
pub fn workspace_bytes(tier: Tier, m: usize, n: usize, k: usize) -> usize {
    // Each of four buffers may begin up to a cache line after an aligned start.
    4 * 64
        + carved_bytes::<bf16>(m * k)
        + carved_bytes::<bf16>(n * k)
        + carved_bytes::<f32>(m * n)
        + gemm::workspace_bytes(tier, m, n, k, DataKind::Bf16, DataKind::Bf16)
}

/// Writes `a[m, k] · b[n, k]ᵀ` to `out`, `[m, n]`: FP32 sums of exact products, then both tensor
/// scales.
///
/// # Errors
///
/// [`GemmError`] as for [`gemm::gemm`], if a plane, the output or the workspace is too short.
pub fn scaled_gemm(
    tier: Tier,
    [m, n]: [usize; 2],
    a: Planes<'_>,
    b: Planes<'_>,
    out: Output<'_>,
    workspace: &mut [u8],
) -> Result<(), GemmError> {
    let k = a.k;
    let (needed, got) = (workspace_bytes(tier, m, n, k), workspace.len());
    if got < needed {
        return Err(GemmError::WorkspaceTooSmall { needed, got });
    }
    out.validate(m, n)?;
    let mut carver = Carver::new(workspace);
    let a_values = carver.take::<bf16>(m * k);
    let b_values = carver.take::<bf16>(n * k);
    let sums = carver.take::<f32>(m * n);
    a.expand(a_values);
    b.expand(b_values);
    let left = Operand::rows_bf16(a_values, k);
    let right = Operand::rows_bf16(b_values, k);
    let of_sums = Output::F32 { data: &mut *sums, accumulate: false };
    gemm::gemm(tier, m, n, k, left, right, of_sums, carver.rest())?;
    let scale = a.tensor_scale * b.tensor_scale;
    match out {
        Output::F32 { data, accumulate } => {
            each(data, sums, |out, sum| *out = if accumulate { *out } else { 0.0 } + sum * scale);
        }
        Output::Bf16 { data } => each(data, sums, |out, sum| *out = Element::from_f32(sum * scale)),
    }
    Ok(())
}

fn each<T: Send>(out: &mut [T], sums: &[f32], write: impl Fn(&mut T, f32) + Sync) {
    let chunks = out.par_chunks_mut(ELEMENTS_PER_CHUNK).zip(sums.par_chunks(ELEMENTS_PER_CHUNK));
    chunks.for_each(|(out, sums)| {
        for (out, &sum) in out.iter_mut().zip(sums) {
            write(out, sum);
        }
    });
}

#[cfg(test)]
mod tests {
    use deepwell_precision::nvfp4::{self, Common};
    use deepwell_precision::{QuantFormat, packed};

    use super::*;
    use crate::ops::scaled_gemm::nvfp4_oracle as oracle;
    use crate::runtime::cpu::gemm::best_tier;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts, poisoned};

    /// A matrix quantized by `deepwell-precision`.
    struct Quantized {
        data: Vec<u8>,
        plain: Vec<u8>,
        scales: Vec<u8>,
        tensor_scale: f32,
        outer: usize,
        k: usize,
    }

    impl Quantized {
        fn new(outer: usize, k: usize, seed: u64) -> Quantized {
            let x: Vec<f32> = Random::new(seed).normals(outer * k);
            let mut data = vec![0; packed::fp4_len(outer, k)];
            let mut plain = vec![0; nvfp4::scales_len(outer, k)];
            let common = Common::nearest(nvfp4::amax(&x));
            let format = QuantFormat::NVFP4;
            let (tensor_scale, _) =
                nvfp4::quantize_rows(&x, outer, k, &format, &common, &mut data, &mut plain)
                    .unwrap();
            let blocks = k.div_ceil(BLOCK);
            let mut scales = vec![0xEE; scale_tiles::tiled_len(outer, blocks)];
            scale_tiles::to_tiles(&plain, outer, blocks, &mut scales).unwrap();
            Quantized { data, plain, scales, tensor_scale, outer, k }
        }

        fn planes(&self) -> Planes<'_> {
            let Quantized { data, scales, tensor_scale, k, .. } = self;
            Planes::whole(data, scales, *tensor_scale, *k)
        }

        /// By definition, in f64.
        fn numbers(&self) -> Vec<f64> {
            let Quantized { data, plain, tensor_scale, outer, k, .. } = self;
            oracle::dequantize_rows(data, plain, f64::from(*tensor_scale), *outer, *k)
        }
    }

    #[test]
    fn numbers_are_those_of_the_definition() {
        for (outer, k) in [(0, 16), (1, 1), (3, 33), (130, 96), (257, 31)] {
            let quantized = Quantized::new(outer, k, 5);
            let expected = quantized.numbers();
            for_thread_counts(|| {
                let mut rows = poisoned::<f32>(outer * k);
                quantized.planes().dequantize_rows(&mut rows);
                let mut columns = poisoned::<f32>(outer * k);
                quantized.planes().dequantize_columns(outer, &mut columns);
                for (i, &expected) in expected.iter().enumerate() {
                    assert_eq!(rows[i], expected as f32, "{outer} x {k} at {i}");
                    assert_eq!(columns[i % k * outer + i / k], expected as f32);
                }
                rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
        }
    }

    #[test]
    fn sums_are_those_of_the_numbers() {
        for (m, n, k) in [(1, 1, 16), (33, 17, 48), (64, 96, 160), (5, 7, 31)] {
            let (a, b) = (Quantized::new(m, k, 1), Quantized::new(n, k, 2));
            let (left, right) = (a.numbers(), b.numbers());
            for accumulate in [false, true] {
                let before = 0.5_f32;
                let mut out = vec![before; m * n];
                let tier = best_tier();
                let mut workspace = vec![0xEE; workspace_bytes(tier, m, n, k)];
                let output = Output::F32 { data: &mut out, accumulate };
                scaled_gemm(tier, [m, n], a.planes(), b.planes(), output, &mut workspace).unwrap();
                for (i, &got) in out.iter().enumerate() {
                    let pairs = (0..k).map(|at| left[i / n * k + at] * right[i % n * k + at]);
                    let size: f64 = pairs.clone().map(f64::abs).sum();
                    let expected = pairs.sum::<f64>() + f64::from(before) * f64::from(accumulate);
                    let tolerance = (k as f64 + 6.0) * 2f64.powi(-24) * (size + 1.0);
                    assert!((f64::from(got) - expected).abs() <= tolerance, "{m} {n} {k} {i}");
                }
            }
        }
    }
}
