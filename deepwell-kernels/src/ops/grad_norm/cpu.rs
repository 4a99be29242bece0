//! The global L2 norm of the gradients.
//!
//! Squares are exact in `f64` and cannot overflow, so the norm is finite exactly when every
//! gradient is finite (and the norm itself fits `f32`). Sums follow one tree over fixed blocks.

use deepwell_ir::Op;

use crate::KernelError;
use crate::runtime::cpu::arena::In;
use crate::runtime::cpu::operands::{Operands, Run};
use crate::runtime::cpu::parallel::{LANES, padded_block, vectorized};

/// Numbers per leaf of the summation tree.
const BLOCK: usize = 32 * 1024;

/// Returns the sum of squares of one slice, as a tree over blocks of 32 Ki numbers.
///
/// The tree depends on the length alone, so the result is the same at any number of threads.
/// Infinities give infinity, and a NaN gives NaN.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    if values.len() <= BLOCK {
        return vectorized(
            #[inline(always)]
            || sum_block(values),
        );
    }
    let blocks_left = values.len().div_ceil(BLOCK) / 2;
    let (left, right) = values.split_at(blocks_left * BLOCK);
    let (left, right) = rayon::join(|| sum_of_squares(left), || sum_of_squares(right));
    left + right
}

#[inline(always)]
fn sum_block(values: &[f32]) -> f64 {
    #[inline(always)]
    fn add_block(lanes: &mut [f64; LANES], block: &[f32; LANES]) {
        for lane in 0..LANES {
            lanes[lane] += f64::from(block[lane]) * f64::from(block[lane]);
        }
    }
    let mut lanes = [0.0f64; LANES];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        add_block(&mut lanes, block);
    }
    if !rest.is_empty() {
        add_block(&mut lanes, &padded_block(rest));
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the sum of squares of many tensors: a tree over the list, with [`sum_of_squares`] as
/// leaves.
///
/// The result depends on the order of the list and the lengths, not on the threads. Ranks that each
/// hold a part of the gradients add these sums before the root of [`global_norm`].
pub fn sum_of_squares_of_all(tensors: &[&[f32]]) -> f64 {
    match tensors {
        [] => 0.0,
        [one] => sum_of_squares(one),
        many => {
            let (left, right) = many.split_at(many.len() / 2);
            let (left, right) =
                rayon::join(|| sum_of_squares_of_all(left), || sum_of_squares_of_all(right));
            left + right
        }
    }
}

/// Returns the root of the sum of squares of all gradients, each tensor of any shape.
///
/// The norm is NaN or infinite if a gradient is; [`adamw`](crate::ops::adamw::cpu::adamw) then
/// skips the step.
///
/// ```
/// use deepwell_kernels::ops::grad_norm::cpu::global_norm;
///
/// assert_eq!(global_norm(&[&[3.0, 0.0], &[-4.0]]), 5.0);
/// assert!(global_norm(&[&[1.0], &[f32::NAN]]).is_nan());
/// ```
pub fn global_norm(tensors: &[&[f32]]) -> f32 {
    sum_of_squares_of_all(tensors).sqrt() as f32
}

pub(super) fn prepare(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let gradients: Vec<In<f32>> =
        (0..operands.input_count).map(|i| operands.input(i)).collect::<Result<_, _>>()?;
    let norm = operands.target::<f32>(operands.output(0))?;
    Ok(Box::new(move |arena| {
        // In operand order, so that the sum is the same at any number of threads.
        let total: f64 = gradients.iter().map(|g| sum_of_squares(g.of(arena))).sum();
        norm.of(arena)[0] = total.sqrt() as f32;
        Ok(())
    }))
}

/// Returns the root of the sum of partial sums of squares, added in their order.
pub fn norm_of_sums(sums: impl IntoIterator<Item = f64>) -> f32 {
    sums.into_iter().sum::<f64>().sqrt() as f32
}

pub(super) fn prepare_sums(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let tensors: Vec<In<f32>> =
        (0..operands.input_count).map(|i| operands.input(i)).collect::<Result<_, _>>()?;
    let sums = operands.target::<u64>(operands.output(0))?;
    Ok(Box::new(move |arena| {
        for (sum, tensor) in sums.of(arena).iter_mut().zip(&tensors) {
            *sum = sum_of_squares(tensor.of(arena)).to_bits();
        }
        Ok(())
    }))
}

pub(super) fn prepare_norm_of_sums(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let lists: Vec<In<u64>> =
        (0..operands.input_count).map(|i| operands.input(i)).collect::<Result<_, _>>()?;
    let norm = operands.target::<f32>(operands.output(0))?;
    Ok(Box::new(move |arena| {
        let all = lists.iter().flat_map(|list| list.of(arena));
        norm.of(arena)[0] = norm_of_sums(all.map(|&bits| f64::from_bits(bits)));
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::grad_norm::oracle;
    use crate::runtime::cpu::test_support::{Random, assert_close, for_thread_counts, to_f64};

    #[test]
    fn matches_the_oracle() {
        let tables: [&[usize]; 7] = [
            &[],
            &[0],
            &[1],
            &[31, 32, 33],
            &[BLOCK - 1, BLOCK, BLOCK + 1],
            &[3 * BLOCK + 7, 0, 5],
            &[256 * 256, 256, 704 * 256, 704 * 256, 1],
        ];
        for lengths in tables {
            let mut random = Random::new(lengths.len() as u64);
            let tensors: Vec<Vec<f32>> = lengths.iter().map(|&len| random.normals(len)).collect();
            let slices: Vec<&[f32]> = tensors.iter().map(|tensor| &tensor[..]).collect();
            let wide: Vec<Vec<f64>> = tensors.iter().map(|tensor| to_f64(tensor)).collect();
            let wide: Vec<&[f64]> = wide.iter().map(|tensor| &tensor[..]).collect();
            for_thread_counts(|| {
                let norm = [global_norm(&slices)];
                // Sums in f64, rounded once to f32.
                assert_close("norm", &norm, &[oracle::forward(&wide)], 6e-8, 0.0);
                norm
            });
        }
    }

    /// Parts of any lengths: sums in f64, rounded once to f32.
    #[test]
    fn sums_of_parts_give_the_norm() {
        let values = Random::new(3).normals(3 * BLOCK + 70);
        let expected = [oracle::forward(&[&to_f64(&values)])];
        for parts in [1, 2, 3, 7, 64] {
            let sums = values.chunks(values.len().div_ceil(parts)).map(sum_of_squares);
            assert_close("norm", &[norm_of_sums(sums)], &expected, 6e-8, 0.0);
        }
        assert!(norm_of_sums([1.0, f64::NAN]).is_nan() && norm_of_sums([]) == 0.0);
        assert_eq!(norm_of_sums([1.0, f64::INFINITY]), f32::INFINITY);
    }

    #[test]
    fn extreme_gradients() {
        let root_two = |x: f32| (f64::from(x) * std::f64::consts::SQRT_2) as f32;
        for (gradients, expected) in [
            (vec![1e30f32, 1e30], root_two(1e30)),
            (vec![1e-30, 1e-30], root_two(1e-30)),
            (vec![3e38, 3e38], f32::INFINITY),
            (vec![f32::NEG_INFINITY, 1.0], f32::INFINITY),
        ] {
            assert_eq!(global_norm(&[&gradients]), expected, "{gradients:?}");
        }
        let mut many = vec![1.0f32; 2 * BLOCK + 3];
        for place in [0, 31, BLOCK, 2 * BLOCK + 2] {
            many[place] = f32::NAN;
            assert!(global_norm(&[&[1.0], &many]).is_nan(), "NaN at {place}");
            many[place] = 1.0;
        }
    }
}
