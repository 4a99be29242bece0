//! Tensor maps of GEMM operands and scales, on Hopper and Blackwell.

use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{TensorMapElement, TensorMapSpec, TensorMapSwizzle};

/// Bytes of an operand row in a stage, as in the source: the width of the swizzle.
pub(super) const STAGE_ROW_BYTES: usize = 128;
/// Rows of a scale tile, and bytes of a scale tile.
const SCALE_TILE_ROWS: usize = 128;
pub(super) const SCALE_TILE_BYTES: usize = 512;

/// Operand format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operands {
    /// BF16.
    Bf16,
    /// One-byte elements with a scale per 32 elements along K.
    Mx,
    /// Elements of four bits with a scale per 16 elements along K.
    Nvfp4,
}

impl Operands {
    /// Elements of K per stage.
    pub(super) fn stage_k(self) -> usize {
        match self {
            Operands::Bf16 => STAGE_ROW_BYTES / 2,
            Operands::Mx => STAGE_ROW_BYTES,
            Operands::Nvfp4 => STAGE_ROW_BYTES * 2,
        }
    }

    /// Scale tiles of a row along K in a stage.
    fn scale_steps(self) -> usize {
        match self {
            Operands::Bf16 => 0,
            Operands::Mx => 1,
            Operands::Nvfp4 => 4,
        }
    }

    /// Scale tiles per stage, for a tile of `columns`.
    pub(super) fn scale_tiles(self, columns: usize) -> usize {
        self.scale_steps() * (1 + columns / SCALE_TILE_ROWS)
    }
}

/// Tensor map of a K-major operand, `[rows, k]`: boxes of `box_rows` rows and the K of a stage.
pub(crate) fn k_major_boxes(
    tensor: &DeviceTensor,
    operands: Operands,
    box_rows: usize,
) -> TensorMapSpec {
    boxes(tensor, operands, [operands.stage_k(), box_rows])
}

/// Tensor map of an MN-major operand, `[k, rows]`: boxes of 128 bytes of rows and the K of a stage.
pub(crate) fn mn_major_boxes(tensor: &DeviceTensor, operands: Operands) -> TensorMapSpec {
    boxes(tensor, operands, [operands.stage_k(); 2])
}

/// Tensor map of scales, `[tiles, tiles, 512]`: boxes of a scale tile as two rows, since a box is
/// at most 256 elements wide.
pub(crate) fn scale_boxes(scales: &DeviceTensor) -> TensorMapSpec {
    const BOX: [usize; 2] = [256, SCALE_TILE_BYTES / 256];
    let bytes: usize = scales.shape.iter().product();
    TensorMapSpec {
        base: scales.pointer,
        element: TensorMapElement::U8,
        sizes: vec![BOX[0] as u64, (bytes / BOX[0]) as u64],
        strides_bytes: vec![BOX[0] as u64],
        box_sizes: BOX.map(|size| size as u32).to_vec(),
        swizzle: TensorMapSwizzle::None,
    }
}

/// Tensor map of NVFP4 scales, `[.., tiles, tiles, 512]`: boxes of a stage's tiles of `box_rows`
/// rows, a multiple of 128. Tiles beyond K are zeros, not the tiles of the next rows.
pub(crate) fn nvfp4_scale_boxes(scales: &DeviceTensor, box_rows: usize) -> TensorMapSpec {
    const HALF: usize = SCALE_TILE_BYTES / 2;
    let bytes: usize = scales.shape.iter().product();
    let along_k = scales.shape[scales.shape.len() - 2];
    let row_bytes = along_k * SCALE_TILE_BYTES;
    TensorMapSpec {
        base: scales.pointer,
        element: TensorMapElement::U8,
        sizes: [HALF, 2 * along_k, bytes / row_bytes].map(|size| size as u64).to_vec(),
        strides_bytes: [HALF, row_bytes].map(|stride| stride as u64).to_vec(),
        box_sizes: [HALF, 2 * Operands::Nvfp4.scale_steps(), box_rows / SCALE_TILE_ROWS]
            .map(|size| size as u32)
            .to_vec(),
        swizzle: TensorMapSwizzle::None,
    }
}

fn boxes(tensor: &DeviceTensor, operands: Operands, sizes: [usize; 2]) -> TensorMapSpec {
    // Elements, bytes of a unit of the map, and elements of a unit.
    let (element, bytes, packed) = match operands {
        Operands::Bf16 => (TensorMapElement::Bf16, 2, 1),
        Operands::Mx => (TensorMapElement::U8, 1, 1),
        Operands::Nvfp4 => (TensorMapElement::U8, 1, 2),
    };
    let [outer, inner] = [0, 1].map(|axis| tensor.shape[axis] as u64);
    TensorMapSpec {
        base: tensor.pointer,
        element,
        sizes: vec![inner / packed, outer],
        strides_bytes: vec![inner / packed * bytes],
        box_sizes: vec![(sizes[0] as u64 / packed) as u32, sizes[1] as u32],
        swizzle: TensorMapSwizzle::Bytes128,
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::DType;

    use super::*;
    use crate::runtime::cuda::driver::DevicePtr;

    #[test]
    fn boxes_are_one_swizzle_wide() {
        let tensor =
            DeviceTensor { pointer: DevicePtr(256), dtype: DType::Bf16, shape: vec![40, 72] };
        for (spec, stride, sizes) in [
            (k_major_boxes(&tensor, Operands::Bf16, 128), 144, [64, 128]),
            (k_major_boxes(&tensor, Operands::Mx, 64), 72, [128, 64]),
            (mn_major_boxes(&tensor, Operands::Bf16), 144, [64, 64]),
        ] {
            assert_eq!(spec.sizes, [72, 40]);
            assert_eq!(spec.strides_bytes, [stride]);
            assert_eq!(spec.box_sizes, sizes);
        }
        let tensor = DeviceTensor { dtype: DType::E2m1, shape: vec![40, 96], ..tensor };
        let spec = k_major_boxes(&tensor, Operands::Nvfp4, 64);
        assert_eq!((spec.sizes, spec.strides_bytes), (vec![48, 40], vec![48]));
        assert_eq!(spec.box_sizes, [128, 64]);
    }

    #[test]
    fn boxes_of_scales_end_with_their_rows() {
        let check = |shape: &[usize], rows, sizes: [u64; 3], stride, boxes: [u32; 3]| {
            let (pointer, shape) = (DevicePtr(256), shape.to_vec());
            let scales = DeviceTensor { pointer, dtype: DType::Ue4m3, shape };
            let spec = nvfp4_scale_boxes(&scales, rows);
            assert_eq!(spec.sizes, sizes);
            assert_eq!(spec.strides_bytes, [256, stride]);
            assert_eq!(spec.box_sizes, boxes);
        };
        check(&[3, 5, 512], 256, [256, 10, 3], 5 * 512, [256, 8, 2]);
        // A stack of matrices.
        check(&[2, 3, 1, 512], 128, [256, 2, 6], 512, [256, 8, 1]);
    }
}
