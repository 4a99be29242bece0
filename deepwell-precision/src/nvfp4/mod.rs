//! NVFP4: E2M1 elements, a UE4M3 scale per 16 elements and one f32 scale per tensor.
//!
//! A value is `e2m1 * ue4m3 * tensor_scale`. With `bound` the largest block scale in use
//! ([`ScaleBound`]) and `amax` the largest magnitude of the whole tensor, all in f32 and each
//! operation rounded to nearest even:
//!
//! ```text
//! encode_scale = min(bound * 6 / amax, f32::MAX)            1 when amax is 0
//! tensor_scale = 1 / encode_scale                           stored
//! block_scale  = ue4m3(min(block_amax / 6 * encode_scale, 448))    stored
//! factor       = min(encode_scale / block_scale, f32::MAX)  0 when block_scale is 0
//! element      = e2m1(x * factor)                           stored, saturating
//! ```
//!
//! The block scale is rounded to nearest, not up. If it was rounded down, the largest elements of
//! the block exceed 6 after scaling, by at most one part in 16, and become 6: this counts as
//! saturation and is part of the format. So is the underflow of elements whose block is so small
//! compared with the tensor that the block scale is zero.
//!
//! Deviations, each a field of [`QuantFormat`]:
//!
//! - `order = te` ([`ScaleOrder::Te`]) multiplies where the formulas above divide, as Transformer
//!   Engine does: `block_scale = ue4m3(min(block_amax * (encode_scale * (1 / 6)), 448))` and
//!   `factor = min(1 / (block_scale * tensor_scale), f32::MAX)`, also when the block scale is 0.
//! - `four_six` compares two block scales, the one above and
//!   `ue4m3(min(block_amax / 6 * encode_scale * 1.5, 448))`, and takes the one with the smaller sum
//!   of squared errors; the first if the sums are equal. Both are computed with a division by 6 in
//!   either order. An error is `element * block_scale * amax / (6 * bound) - x`.
//! - `hadamard` transforms groups of 16 elements along the contraction and rounds the results to
//!   BF16 ([`crate::Hadamard16::forward_bf16`]) before anything else. `amax` is then the largest
//!   magnitude of the transformed tensor: [`amax_of_rows`], [`amax_of_columns`].
//!
//! A sharded tensor needs the amax over all shards. A block with a NaN or an infinity gets a NaN
//! scale and the largest code for each element: the format has no infinity, and non-finite values
//! must not look finite.
//!
//! Source of the two levels and of 16 x 16 blocks for weights: "Pretraining Large Language Models
//! with NVFP4", arXiv 2509.25149.

use core::ops::Range;

use crate::error::{QuantizeError, Shape};
use crate::hadamard::POINTS;
use crate::names::named_enum;
use crate::packed::fp4_len;
use crate::simd::Level;
use crate::source::Values;
use crate::{
    BlockShape, ElementFormat, Hadamard16, Philox, QuantFormat, QuantStats, ScaleFormat, Source,
    TensorScale, e2m1, ue4m3,
};

mod amax;
mod columns;
mod dequantize;
mod four_six;
mod kernel;
mod rows;
#[cfg(test)]
mod tests;

pub use amax::{amax, amax_of_columns, amax_of_rows};
pub use dequantize::dequantize_rows;
use rows::RowsTask;

/// Elements along the contraction that share a block scale.
pub const BLOCK: usize = 16;

named_enum! {
    /// The largest block scale of a tensor.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum ScaleBound ("scale bound") {
        /// The largest UE4M3.
        #[default]
        Max448 = "448",
        /// A power of two with headroom: every block scale can be increased by half, which maps its
        /// largest magnitude to 4 instead of 6, without exceeding 448.
        Max256 = "256",
    }
}

impl ScaleBound {
    /// 448 or 256.
    #[must_use]
    pub const fn value(self) -> f32 {
        match self {
            Self::Max448 => ue4m3::MAX,
            Self::Max256 => 256.0,
        }
    }
}

named_enum! {
    /// Order of the operations that compute block scales and factors. The orders differ in about
    /// one block scale of a thousand, by one unit in the last place.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum ScaleOrder ("scale order") {
        /// Divides by 6 and by the block scale: one rounding for each.
        #[default]
        Deepwell = "deepwell",
        /// Multiplies by reciprocals, as Transformer Engine does, to the same bytes.
        Te = "te",
    }
}

impl ScaleOrder {
    /// Factor from values to the product of block scale and element: [`encode_scale`], except that
    /// Transformer Engine takes 1 for an infinite `amax`.
    #[must_use]
    pub const fn encode_scale(self, amax: f32, bound: ScaleBound) -> f32 {
        match self {
            Self::Te if !amax.is_finite() => 1.0,
            _ => encode_scale(amax, bound),
        }
    }
}

/// Parameters of a whole tensor, including all shards.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Common {
    /// The largest finite magnitude, from [`amax_of_rows`] or [`amax_of_columns`].
    pub amax: f32,
    /// Source of random words for stochastic rounding, at the elements' row-major indices in the
    /// operand. Required by formats with stochastic rounding, and allowed for no other.
    pub philox: Option<Philox>,
    /// Positions of the words, if the matrix is a part of a tensor: the index of the first element
    /// in the whole operand, and the distance from one row of the operand to the next.
    pub words: Option<(u64, u64)>,
}

impl Common {
    /// Parameters of a format that rounds to nearest.
    #[must_use]
    pub const fn nearest(amax: f32) -> Self {
        Self { amax, philox: None, words: None }
    }
}

/// A [`QuantFormat`] in the form used by the kernels.
#[derive(Clone, Copy, Debug, Default)]
struct Nvfp4Spec {
    /// 1 x 16 (`Row`), or 16 x 16 (`Square`), whose scale is stored for each of its rows.
    block: BlockShape,
    bound: ScaleBound,
    order: ScaleOrder,
    four_six: bool,
    hadamard: Option<Hadamard16>,
    stochastic: Option<Philox>,
    /// Index of the first word, and words from one row of the operand to the next.
    words: (u64, u64),
    /// The largest magnitude of the tensor.
    amax: f32,
}

impl Nvfp4Spec {
    /// The form of an operand with rows of `k` elements.
    fn new(format: &QuantFormat, common: &Common, k: usize) -> Result<Self, QuantizeError> {
        let QuantFormat { element, block, scale, tensor_scale, order, four_six, hadamard, .. } =
            *format;
        let (ElementFormat::E2M1, TensorScale::F32, ScaleFormat::Ue4m3(bound)) =
            (element, tensor_scale, scale)
        else {
            return Err(format.refused("NVFP4"));
        };
        if usize::from(block.k) != BLOCK || !(block.is_square() || block.rows == 1) {
            return Err(format.refused("NVFP4 with blocks of 1x16 or 16x16"));
        }
        format.check_settings()?;
        match (format.is_stochastic(), common.philox) {
            (true, None) => Err(format.refused("rounding to nearest where no words are given")),
            (false, Some(_)) => Err(format.refused("stochastic rounding where words are given")),
            (_, stochastic) => {
                let (block, amax) = (block.shape(), common.amax);
                let words = common.words.unwrap_or((0, k as u64));
                Ok(Self { block, bound, order, four_six, hadamard, stochastic, words, amax })
            }
        }
    }
}

/// Factor from values to the product of block scale and element; see the module documentation. The
/// sign of `amax` is ignored; NaN and infinity count as `f32::MAX`.
#[must_use]
pub const fn encode_scale(amax: f32, bound: ScaleBound) -> f32 {
    let amax = amax.abs();
    if amax == 0.0 {
        return 1.0;
    }
    let amax = if amax <= f32::MAX { amax } else { f32::MAX };
    let scale = bound.value() * e2m1::MAX / amax;
    if scale <= f32::MAX { scale } else { f32::MAX }
}

/// Bytes of the block scales of a `rows` x `cols` matrix: row-major [rows, ceil(cols / 16)].
#[must_use]
pub const fn scales_len(rows: usize, cols: usize) -> usize {
    rows * cols.div_ceil(BLOCK)
}

/// Quantizes a matrix with blocks along its rows and returns its tensor scale.
///
/// `src` is row-major [rows, cols]. `bytes` receives [`crate::packed`] elements, two per byte
/// ([`fp4_len`]), `scales` the [`crate::ue4m3`] scales, row-major [rows, ceil(cols / 16)]; the last
/// block of a row may be shorter. Large matrices are split over the threads of the current rayon
/// pool. Does not allocate.
///
/// In the statistics a saturation is a finite element beyond 6 after scaling, and a clamp is a
/// non-zero block whose scale became zero.
///
/// ```
/// use deepwell_precision::{QuantFormat, nvfp4};
/// let source = [6.0_f32, -3.0, 0.5];
/// let common = nvfp4::Common::nearest(nvfp4::amax(&source));
/// let (mut bytes, mut scales) = ([0; 2], [0; 1]);
/// let format = QuantFormat::NVFP4;
/// let (tensor_scale, stats) =
///     nvfp4::quantize_rows(&source, 1, 3, &format, &common, &mut bytes, &mut scales)?;
/// assert_eq!((bytes, scales, stats.amax), ([0xD7, 0x01], [0x7E], 6.0));
/// let mut back = [0.0_f32; 3];
/// nvfp4::dequantize_rows(&bytes, &scales, tensor_scale, 1, 3, &mut back)?;
/// assert!(back.iter().zip(source).all(|(&y, x)| (y - x).abs() < 1e-6));
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for a
/// format that is not NVFP4 or combines settings that exclude each other,
/// [`QuantizeError::Multiple`] when a transform does not divide the contraction into groups of 16;
/// nothing is written in these cases.
pub fn quantize_rows<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    common: &Common,
    bytes: &mut [u8],
    scales: &mut [u8],
) -> Result<(f32, QuantStats), QuantizeError> {
    check("src", src.len(), rows, cols, bytes.len(), scales.len())?;
    let spec = Nvfp4Spec::new(format, common, cols)?;
    whole_groups(spec.hadamard, cols)?;
    let encode_scale = spec.order.encode_scale(common.amax, spec.bound);
    let stats = rows_at(Level::Native, S::values(src), cols, encode_scale, spec, bytes, scales);
    Ok((1.0 / encode_scale, stats))
}

/// Quantizes a matrix with blocks along its columns, for a GEMM that contracts over rows, and
/// returns its tensor scale.
///
/// `src` is row-major [rows, cols]. The operand is stored transposed, since the tensor cores read
/// FP4 only with the contraction contiguous: `bytes_t` and `scales_t` equal the output of
/// [`quantize_rows`] for the [cols, rows] transpose, byte for byte. Otherwise as [`quantize_rows`].
///
/// ```
/// use deepwell_precision::{QuantFormat, nvfp4, packed::fp4_len};
/// let source: Vec<f32> = (0..6).map(|i| i as f32).collect(); // 3 rows of 2
/// let (mut bytes_t, mut scales_t) = ([0; fp4_len(2, 3)], [0; nvfp4::scales_len(2, 3)]);
/// let (format, common) = (QuantFormat::NVFP4, nvfp4::Common::nearest(5.0));
/// nvfp4::quantize_columns(&source, 3, 2, &format, &common, &mut bytes_t, &mut scales_t)?;
/// // Column 0 is 0, 2, 4 in the first two bytes; its largest element is the code 7.
/// assert_eq!(bytes_t[0] & 0x0F, 0);
/// assert_eq!(bytes_t[1], 0x07);
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for a
/// format that is not NVFP4 or combines settings that exclude each other,
/// [`QuantizeError::Multiple`] when a transform does not divide the contraction into groups of 16;
/// nothing is written in these cases.
pub fn quantize_columns<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    common: &Common,
    bytes_t: &mut [u8],
    scales_t: &mut [u8],
) -> Result<(f32, QuantStats), QuantizeError> {
    quantize_columns_of(src, (rows, cols), 0..rows, format, common, bytes_t, scales_t)
}

/// [`quantize_columns`] of the rows `range` of a matrix of `rows` x `cols`, for a GEMM that
/// contracts over these rows only: tokens of one expert. Writes the blocks of these rows and no
/// others. `common.amax` is that of the rows in the range.
///
/// # Errors
///
/// As [`quantize_columns`]; [`QuantizeError::Multiple`] also when the range does not start at a
/// multiple of 16, and [`QuantizeError::Length`] when it ends after the rows.
pub fn quantize_columns_of<S: Source>(
    src: &[S],
    (rows, cols): (usize, usize),
    range: Range<usize>,
    format: &QuantFormat,
    common: &Common,
    bytes_t: &mut [u8],
    scales_t: &mut [u8],
) -> Result<(f32, QuantStats), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("src", rows * cols, src.len())?;
    shape.expect("bytes_t", fp4_len(cols, rows), bytes_t.len())?;
    shape.expect("scales_t", scales_len(cols, rows), scales_t.len())?;
    if range.start > range.end || range.end > rows {
        return shape.expect("range", rows, range.end).map(|()| Default::default());
    }
    if !range.start.is_multiple_of(BLOCK) {
        return Err(QuantizeError::Multiple { cols: range.start, multiple: BLOCK });
    }
    let spec = Nvfp4Spec::new(format, common, rows)?;
    whole_groups(spec.hadamard, range.len())?;
    let encode_scale = spec.order.encode_scale(common.amax, spec.bound);
    let (scale, rows) = (1.0 / encode_scale, (range.start, range.end));
    let stats = columns_at(
        Level::Native,
        S::values(src),
        cols,
        rows,
        encode_scale,
        spec,
        bytes_t,
        scales_t,
    );
    Ok((scale, stats))
}

/// [`quantize_rows`] on checked arguments.
fn rows_at(
    level: Level,
    src: Values<'_>,
    cols: usize,
    encode_scale: f32,
    spec: Nvfp4Spec,
    bytes: &mut [u8],
    scales: &mut [u8],
) -> QuantStats {
    let elements = src.len() as u64;
    if src.is_empty() {
        return QuantStats::default();
    }
    let first_row = 0;
    let stats = match src {
        Values::F32(src) => {
            RowsTask { src, cols, first_row, encode_scale, spec, bytes, scales }.run(level)
        }
        Values::Bf16(src) => {
            RowsTask { src, cols, first_row, encode_scale, spec, bytes, scales }.run(level)
        }
    };
    QuantStats { elements, ..stats }
}

/// [`quantize_columns_of`] on checked arguments.
#[expect(clippy::too_many_arguments, reason = "those of the public function, and the level")]
fn columns_at(
    level: Level,
    src: Values<'_>,
    cols: usize,
    row_range: (usize, usize),
    encode_scale: f32,
    spec: Nvfp4Spec,
    bytes_t: &mut [u8],
    scales_t: &mut [u8],
) -> QuantStats {
    let elements = ((row_range.1 - row_range.0) * cols) as u64;
    if elements == 0 {
        return QuantStats::default();
    }
    let task = columns::ColumnsTask {
        src,
        rows: src.len() / cols,
        cols,
        col_range: (0, cols),
        row_range,
        encode_scale,
        spec,
        bytes_t,
        scales_t,
    };
    QuantStats { elements, ..task.run(level) }
}

/// Whether a transform divides `k` elements along the contraction into whole groups.
fn whole_groups(hadamard: Option<Hadamard16>, k: usize) -> Result<(), QuantizeError> {
    match hadamard.is_none() || k.is_multiple_of(POINTS) {
        true => Ok(()),
        false => Err(QuantizeError::Multiple { cols: k, multiple: POINTS }),
    }
}

fn check(
    name: &'static str,
    values: usize,
    rows: usize,
    cols: usize,
    bytes: usize,
    scales: usize,
) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect(name, rows * cols, values)?;
    shape.expect("bytes", fp4_len(rows, cols), bytes)?;
    shape.expect("scales", scales_len(rows, cols), scales)
}
