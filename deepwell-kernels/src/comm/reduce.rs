//! Reductions over ranks, in rank order.

use deepwell_ir::DType;
use deepwell_ir::ops::Reduction;
use half::bf16;

/// Reduces the parts of all ranks, each as long as `output`. F32 and BF16 are summed in FP32 and
/// rounded once, in the order of the parts, independent of the order of arrival.
///
/// # Errors
/// A type that cannot be reduced.
pub(crate) fn reduce(
    reduction: Reduction,
    dtype: DType,
    parts: &[&[u8]],
    output: &mut [u8],
) -> Result<(), String> {
    match (dtype, reduction) {
        (DType::F32, Reduction::Sum) => fold(parts, output, f32::from_le_bytes, |a, b| a + b),
        (DType::F32, Reduction::Max) => fold(parts, output, f32::from_le_bytes, largest),
        (DType::Bf16, Reduction::Sum) => fold(parts, output, bf16_to_f32, |a, b| a + b),
        (DType::Bf16, Reduction::Max) => fold(parts, output, bf16_to_f32, largest),
        (DType::I32, Reduction::Sum) => fold(parts, output, i32::from_le_bytes, i32::wrapping_add),
        (DType::I32, Reduction::Max) => fold(parts, output, i32::from_le_bytes, i32::max),
        (DType::U64, Reduction::Sum) => fold(parts, output, u64::from_le_bytes, u64::wrapping_add),
        (DType::U64, Reduction::Max) => fold(parts, output, u64::from_le_bytes, u64::max),
        _ => return Err(format!("expected f32, bf16, i32 or u64 to reduce, got {dtype}")),
    }
    Ok(())
}

fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    bf16::from_le_bytes(bytes).to_f32()
}

/// The larger number; NaN if either is NaN, where `f32::max` would drop NaN.
fn largest(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// Conversion back to an element of `N` bytes.
trait Stored<const N: usize> {
    fn stored(self) -> [u8; N];
}

impl Stored<4> for f32 {
    fn stored(self) -> [u8; 4] {
        self.to_le_bytes()
    }
}

impl Stored<2> for f32 {
    fn stored(self) -> [u8; 2] {
        bf16::from_f32(self).to_le_bytes()
    }
}

impl Stored<4> for i32 {
    fn stored(self) -> [u8; 4] {
        self.to_le_bytes()
    }
}

impl Stored<8> for u64 {
    fn stored(self) -> [u8; 8] {
        self.to_le_bytes()
    }
}

fn fold<const N: usize, T: Copy + Stored<N>>(
    parts: &[&[u8]],
    output: &mut [u8],
    read: impl Fn([u8; N]) -> T,
    join: impl Fn(T, T) -> T,
) {
    let Some((first, rest)) = parts.split_first() else { return };
    let rest: Vec<&[[u8; N]]> = rest.iter().map(|part| part.as_chunks().0).collect();
    let elements = output.as_chunks_mut().0.iter_mut().zip(first.as_chunks().0);
    for (index, (element, &first)) in elements.enumerate() {
        let of_rest = rest.iter().map(|part| read(part[index]));
        *element = of_rest.fold(read(first), &join).stored();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn not_a_number_is_not_lost_in_a_maximum() {
        let parts = [bytes(&[f32::NAN, 1.0, -2.0]), bytes(&[1.0, f32::NAN, -1.0])];
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut out = vec![0; 12];
        reduce(Reduction::Max, DType::F32, &parts, &mut out).unwrap();
        let out: Vec<f32> = out.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        assert!(out[0].is_nan() && out[1].is_nan() && out[2] == -1.0, "{out:?}");
    }

    /// 256 and eight times 1 in BF16: rounding at each addition would stay at 256.
    #[test]
    fn sums_of_bf16_are_rounded_once() {
        let of = |number: f32| bf16::from_f32(number).to_le_bytes().to_vec();
        let parts: Vec<Vec<u8>> = [256.0].into_iter().chain([1.0; 8]).map(of).collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut out = vec![0; 2];
        reduce(Reduction::Sum, DType::Bf16, &parts, &mut out).unwrap();
        assert_eq!(bf16::from_le_bytes([out[0], out[1]]).to_f32(), 264.0);
    }

    #[test]
    fn quantized_data_is_not_reduced() {
        let error = reduce(Reduction::Sum, DType::E4m3, &[&[1], &[2]], &mut [0]).unwrap_err();
        assert!(error.contains("got e4m3"), "{error}");
    }
}
