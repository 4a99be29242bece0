//! A tensor as matrices, and the byte sizes of its quantized form.

use deepwell_precision::{BLOCK, nvfp4, packed, scale_tiles};

use super::{FileFormat, ScaleLayout};

/// A tensor as consecutive equal matrices, with blocks along their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrices {
    pub(super) count: usize,
    /// Rows of one matrix: the outputs of a linear layer.
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// The shape of a tensor with inputs last, as used by quantization.
pub(super) fn inputs_last(shape: &[usize], is_inputs_first: bool) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let ([.., inputs, outputs], true) = (&mut shape[..], is_inputs_first) {
        std::mem::swap(inputs, outputs);
    }
    shape
}

impl Matrices {
    /// None when the elements cannot be counted.
    pub(super) fn new(shape: &[usize]) -> Option<Self> {
        let (rest, cols) = match shape {
            [rest @ .., cols] => (rest, *cols),
            [] => (&[][..], 1),
        };
        let (outer, rows) = match rest {
            [outer @ .., rows] => (outer, *rows),
            [] => (&[][..], 1),
        };
        let count = outer.iter().try_fold(1_usize, |a, &b| a.checked_mul(b))?;
        // Eight bytes for each element and padding to tiles, with room above.
        let padded = rows.checked_add(128)?.checked_mul(cols.checked_add(128)?)?;
        padded.checked_mul(count)?.checked_mul(8)?;
        Some(Self { count, rows, cols })
    }

    /// Rows of all matrices.
    pub(super) fn rows_total(self) -> usize {
        self.count * self.rows
    }
}

/// Storage form of a quantized tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) format: FileFormat,
    pub(super) layout: ScaleLayout,
}

impl Stored {
    /// Elements per scale.
    pub(super) fn block(self) -> usize {
        if self.format == FileFormat::Nvfp4 { nvfp4::BLOCK } else { BLOCK }
    }

    /// Bytes of the data of `cols` neighbouring elements of a row.
    pub(super) fn data_len(self, cols: usize) -> usize {
        match self.format {
            FileFormat::Mxfp8 => cols,
            FileFormat::Mxfp6 => packed::fp6_len(1, cols),
            FileFormat::Mxfp4 | FileFormat::Nvfp4 => packed::fp4_len(1, cols),
        }
    }

    /// Element type of the data, by its safetensors name.
    pub(super) fn data_dtype(self) -> &'static str {
        if self.format == FileFormat::Mxfp8 { "F8_E4M3" } else { "U8" }
    }

    /// Element type of the scales.
    pub(super) fn scales_dtype(self) -> &'static str {
        match (self.format, self.layout) {
            (FileFormat::Nvfp4, ScaleLayout::Plain) => "F8_E4M3",
            _ => "U8",
        }
    }

    /// Scales of one row.
    pub(super) fn blocks(self, cols: usize) -> usize {
        cols.div_ceil(self.block())
    }

    /// Bytes of the scales of one matrix.
    pub(super) fn matrix_scales_len(self, matrices: Matrices) -> usize {
        let blocks = self.blocks(matrices.cols);
        match self.layout {
            ScaleLayout::Plain => matrices.rows * blocks,
            ScaleLayout::Tiled => scale_tiles::tiled_len(matrices.rows, blocks),
        }
    }

    /// Shape of the stored data of a tensor of `shape`.
    pub(super) fn data_shape(self, shape: &[usize]) -> Vec<usize> {
        let mut data = shape.to_vec();
        if let Some(cols) = data.last_mut() {
            *cols = self.data_len(*cols);
        }
        data
    }

    /// Shape of the stored scales: the tensor's shape with blocks in place of elements, or for
    /// tiles a row of bytes per matrix.
    pub(super) fn scales_shape(self, shape: &[usize], matrices: Matrices) -> Vec<usize> {
        match self.layout {
            ScaleLayout::Plain => {
                let mut scales = shape.to_vec();
                if let Some(cols) = scales.last_mut() {
                    *cols = self.blocks(*cols);
                }
                scales
            }
            ScaleLayout::Tiled => vec![matrices.count, self.matrix_scales_len(matrices)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_shapes() {
        let matrices = |count, rows, cols| Some(Matrices { count, rows, cols });
        for (shape, expected) in [
            (&[][..], matrices(1, 1, 1)),
            (&[7], matrices(1, 1, 7)),
            (&[3, 7], matrices(1, 3, 7)),
            (&[2, 5, 3, 7], matrices(10, 3, 7)),
            (&[0, 7], matrices(1, 0, 7)),
            (&[usize::MAX, 2], None),
        ] {
            assert_eq!(Matrices::new(shape), expected, "{shape:?}");
        }
    }

    #[test]
    fn stored_shapes() {
        use {FileFormat::*, ScaleLayout::*};
        for (format, layout, data, scales) in [
            (Mxfp8, Plain, vec![2, 130, 70], vec![2, 130, 3]),
            (Mxfp6, Plain, vec![2, 130, 53], vec![2, 130, 3]),
            (Mxfp4, Tiled, vec![2, 130, 35], vec![2, 1024]),
            (Nvfp4, Plain, vec![2, 130, 35], vec![2, 130, 5]),
            (Nvfp4, Tiled, vec![2, 130, 35], vec![2, 2048]),
        ] {
            let stored = Stored { format, layout };
            let shape = [2, 130, 70];
            let matrices = Matrices::new(&shape).expect("small");
            assert_eq!(stored.data_shape(&shape), data, "{format:?}");
            assert_eq!(stored.scales_shape(&shape, matrices), scales, "{format:?} {layout:?}");
        }
    }
}
