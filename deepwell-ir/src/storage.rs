//! Memory layout of tensors. Sizes in bytes are computed only here.

use deepwell_precision::{ElementFormat, QuantFormat, ScaleFormat, TensorScale, scale_tiles};
use serde::{Deserialize, Serialize};

use crate::ops::Axis;
use crate::{DType, Dim, Shape};

/// One part of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plane {
    /// The elements.
    Data,
    /// The scales of the blocks.
    Scales,
    /// One scale for the whole tensor.
    TensorScale,
    /// Counters that the quantization wrote.
    Counters,
}

impl Plane {
    /// Suffix of the plane's name after the axis; empty for the data.
    pub const fn suffix(self) -> &'static str {
        match self {
            Plane::Data => "",
            Plane::Scales => ".scale",
            Plane::TensorScale => ".tensor_scale",
            Plane::Counters => ".stats",
        }
    }
}

/// A plane with its type and shape, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneType {
    /// Role of the plane.
    pub plane: Plane,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Shape,
}

/// How a tensor is stored.
#[expect(clippy::large_enum_variant, reason = "made where the planes are asked for, never stored")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// As one plane of data.
    Dense {
        /// Element type.
        dtype: DType,
        /// Row-major shape.
        shape: Shape,
    },
    /// A matrix as planes of a quantized format, quantized along one axis.
    Planes {
        /// Quantization format.
        format: QuantFormat,
        /// [`Axis::Row`], or [`Axis::Column`] for transposed storage.
        axis: Axis,
        /// Rows and columns of the matrix.
        shape: [Dim; 2],
    },
}

impl Storage {
    /// The counters of a quantization: bits of amax as f32, elements, underflows, saturations,
    /// scale clamps, non-finite values.
    pub const COUNTERS: usize = 6;

    /// Planes in the order of op operands: data; for a quantized matrix then scales and, if the
    /// format has one, the tensor scale.
    ///
    /// Data is `[M, K]`, K contiguous. Scales are stored in tiles of 128 rows by four scales along
    /// K, `[M/128, K/(4·block), 512]`, see [`deepwell_precision::scale_tiles`].
    ///
    /// `None` for a format with unsupported element or scale types, or for both axes at once.
    pub fn planes(&self) -> Option<Vec<PlaneType>> {
        let (format, axis, [rows, columns]) = match self {
            Storage::Dense { dtype, shape } => {
                let (dtype, shape) = (*dtype, shape.clone());
                return Some(vec![PlaneType { plane: Plane::Data, dtype, shape }]);
            }
            Storage::Planes { format, axis, shape } => (format, axis, *shape),
        };
        let [m, k] = match axis {
            Axis::Row => [rows, columns],
            Axis::Column => [columns, rows],
            Axis::Both => return None,
        };
        let data = match format.element {
            ElementFormat::E4M3 => DType::E4m3,
            ElementFormat::E5M2 => DType::E5m2,
            ElementFormat::E3M2 => DType::E3m2,
            ElementFormat::E2M3 => DType::E2m3,
            ElementFormat::E2M1 => DType::E2m1,
            _ => return None,
        };
        let scales = match format.scale {
            ScaleFormat::E8m0(_) => DType::E8m0,
            ScaleFormat::Ue4m3(_) => DType::Ue4m3,
            _ => return None,
        };
        let plane = |plane, dtype, shape: Vec<Dim>| PlaneType { plane, dtype, shape: Shape(shape) };
        let tiles = vec![
            m.blocks_of(scale_tiles::TILE_ROWS),
            k.blocks_of(scale_tiles::TILE_BLOCKS * format.scale.stored_every()),
            scale_tiles::TILE_BYTES.into(),
        ];
        let mut planes =
            vec![plane(Plane::Data, data, vec![m, k]), plane(Plane::Scales, scales, tiles)];
        if Storage::plane_count(format) == 3 {
            planes.push(plane(Plane::TensorScale, DType::F32, vec![1.into()]));
        }
        Some(planes)
    }

    /// Number of planes of an operand in this format.
    pub fn plane_count(format: &QuantFormat) -> usize {
        if format.tensor_scale == TensorScale::None { 2 } else { 3 }
    }
}

/// Bytes of a row-major tensor; `None` if the number overflows `usize`. Elements smaller than a
/// byte are packed without gaps, low bits first, and every row begins at a byte boundary.
///
/// ```
/// use deepwell_ir::{DType, storage_bytes};
/// assert_eq!(storage_bytes(DType::Bf16, &[3, 5]), Some(30));
/// assert_eq!(storage_bytes(DType::E2m1, &[3, 5]), Some(9));
/// assert_eq!(storage_bytes(DType::E2m3, &[3, 5]), Some(12));
/// assert_eq!(storage_bytes(DType::F32, &[usize::MAX, 2]), None);
/// ```
pub fn storage_bytes(dtype: DType, shape: &[usize]) -> Option<usize> {
    let (rows, last) = match shape {
        [rows @ .., last] => (rows, *last),
        [] => (shape, 1),
    };
    let row_bytes = last.checked_mul(dtype.bits() as usize)?.div_ceil(8);
    rows.iter().copied().try_fold(row_bytes, usize::checked_mul)
}

#[cfg(test)]
mod tests {
    use deepwell_precision::{nvfp4, packed, scales_len};

    use super::*;

    /// Bytes of each plane of a matrix.
    fn bytes(format: QuantFormat, axis: Axis, rows: usize, columns: usize) -> Vec<usize> {
        let shape = [rows.into(), columns.into()];
        let planes = Storage::Planes { format, axis, shape }.planes().unwrap();
        let fixed = planes.iter().map(|plane| (plane.dtype, plane.shape.as_fixed().unwrap()));
        fixed.map(|(dtype, shape)| storage_bytes(dtype, &shape).unwrap()).collect()
    }

    #[test]
    fn planes_are_as_long_as_what_is_written_to_them() {
        for (rows, columns) in [(1, 1), (128, 128), (130, 33), (7, 96), (300, 257)] {
            for (axis, m, k) in [(Axis::Row, rows, columns), (Axis::Column, columns, rows)] {
                let tiles = |scales: usize| scale_tiles::tiled_len(m, scales / m.max(1));
                let mx = [m * k, tiles(scales_len(m, k))];
                for format in [QuantFormat::MXFP8, QuantFormat::MXFP8_128.square()] {
                    assert_eq!(bytes(format, axis, rows, columns), mx, "{format} {rows}x{columns}");
                }
                for &element in ElementFormat::ALL {
                    let format = QuantFormat::mx(element);
                    let data = packed::len(element, m, k);
                    assert_eq!(bytes(format, axis, rows, columns), [data, mx[1]], "{format}");
                }
                let fp4 = [packed::fp4_len(m, k), tiles(nvfp4::scales_len(m, k)), 4];
                let got = bytes(QuantFormat::NVFP4.square(), axis, rows, columns);
                assert_eq!(got, fp4, "{rows}x{columns}");
            }
        }
    }

    #[test]
    fn planes_are_of_one_axis() {
        let shape = [1.into(), 1.into()];
        let format = QuantFormat::MXFP8;
        assert_eq!(Storage::Planes { format, axis: Axis::Both, shape }.planes(), None);
    }
}
