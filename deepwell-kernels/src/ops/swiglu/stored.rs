//! SwiGLU and its backward from gate and up in MXFP8: dequantizes a row of both, then computes the
//! row as the kernels of [`super::cpu`] do.

use deepwell_ir::Op;
use deepwell_precision::QuantFormat;
use rayon::prelude::*;

use super::cpu::{backward_of, forward_of};
use crate::KernelError;
use crate::ops::dequantize::cpu::MxPlanes;
use crate::runtime::cpu::arena::In;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::vectorized;

/// Buffers for a row of gate and of up.
fn buffers<E: Element>(columns: usize) -> [Vec<E>; 2] {
    [vec![E::from_f32(0.0); columns], vec![E::from_f32(0.0); columns]]
}

/// Writes the activation of rows of `columns` elements.
///
/// # Panics
///
/// If a slice is too short.
pub fn stored_swiglu<E: Element>([gate, up]: [MxPlanes<'_>; 2], columns: usize, out: &mut [E]) {
    let rows = out.par_chunks_mut(columns.max(1)).enumerate();
    rows.for_each_init(
        || buffers(columns),
        |[of_gate, of_up], (row, out)| {
            vectorized(
                #[inline(always)]
                || {
                    gate.row(row, of_gate);
                    up.row(row, of_up);
                    forward_of(of_gate, of_up, out);
                },
            );
        },
    );
}

/// Writes the gradients of rows of `columns` elements.
///
/// # Panics
///
/// If a slice is too short.
pub fn stored_swiglu_backward<E: Element>(
    dout: &[E],
    [gate, up]: [MxPlanes<'_>; 2],
    columns: usize,
    dgate: &mut [E],
    dup: &mut [E],
) {
    let width = columns.max(1);
    let outputs = dgate.par_chunks_mut(width).zip(dup.par_chunks_mut(width));
    let rows = outputs.zip(dout.par_chunks(width)).enumerate();
    rows.for_each_init(
        || buffers(columns),
        |[of_gate, of_up], (row, ((dgate, dup), dout))| {
            vectorized(
                #[inline(always)]
                || {
                    gate.row(row, of_gate);
                    up.row(row, of_up);
                    backward_of(dout, [of_gate, of_up], dgate, dup);
                },
            );
        },
    );
}

/// Data and scales of gate, then of up, in the arena.
struct Stored {
    format: QuantFormat,
    planes: [[In<u8>; 2]; 2],
}

impl Stored {
    fn of(
        operands: &Operands<'_>,
        format: QuantFormat,
        first: usize,
    ) -> Result<Stored, KernelError> {
        let planes =
            |at: usize| Ok::<_, KernelError>([operands.input(at)?, operands.input(at + 1)?]);
        Ok(Stored { format, planes: [planes(first)?, planes(first + 2)?] })
    }
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::StoredSwiGlu(op) = op else { return Err(operands.unknown_kernel()) };
    let &[_, columns] = operands.shape(0) else {
        return Err(operands.unexpected(0, "a matrix"));
    };
    let Stored { format, planes } = Stored::of(operands, op.format, 0)?;
    by_float!(operands, 4, E => {
        let out = operands.target::<E>(4)?;
        Ok(Box::new(move |arena| {
            let planes = planes.each_ref().map(|[data, scales]| MxPlanes {
                element: format.element,
                hadamard: format.hadamard,
                data: data.of(arena),
                scales: scales.of(arena),
            });
            stored_swiglu(planes, columns, out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::StoredSwiGluBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let &[_, columns] = operands.shape(0) else {
        return Err(operands.unexpected(0, "a matrix"));
    };
    let Stored { format, planes } = Stored::of(operands, op.format, 1)?;
    by_float!(operands, 0, E => {
        let dout = operands.input::<E>(0)?;
        let (dgate, dup) = (operands.target::<E>(5)?, operands.target::<E>(6)?);
        Ok(Box::new(move |arena| {
            let planes = planes.each_ref().map(|[data, scales]| MxPlanes {
                element: format.element,
                hadamard: format.hadamard,
                data: data.of(arena),
                scales: scales.of(arena),
            });
            let (dgate, dup) = (dgate.of(arena), dup.of(arena));
            stored_swiglu_backward(dout.of(arena), planes, columns, dgate, dup);
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::cpu::{swiglu_backward, swiglu_forward};
    use super::*;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts, poisoned};
    use deepwell_precision::{BLOCK, ElementFormat, scale_tiles};

    /// The bits of a dequantization and of the kernels of the dequantized matrices.
    fn check(rows: usize, columns: usize) {
        let blocks = columns.div_ceil(BLOCK);
        let data = |seed: usize| -> Vec<u8> {
            (0..rows * columns).map(|index| (index * 37 + index / 256 + seed) as u8).collect()
        };
        let scales = |seed: usize| -> Vec<u8> {
            let plain: Vec<u8> =
                (0..rows * blocks).map(|index| (110 + (index * 7 + seed) % 20) as u8).collect();
            let mut tiles = vec![0; scale_tiles::tiled_len(rows, blocks)];
            scale_tiles::to_tiles(&plain, rows, blocks, &mut tiles).unwrap();
            tiles
        };
        let (data, scales) = ([data(0), data(9)], [scales(0), scales(4)]);
        let planes = [0, 1].map(|index| MxPlanes {
            element: ElementFormat::E4M3,
            hadamard: None,
            data: &data[index],
            scales: &scales[index],
        });
        let [gate, up] = planes.map(|planes| {
            let mut matrix = poisoned::<bf16>(rows * columns);
            planes.rows(columns, &mut matrix);
            matrix
        });
        let bits = |values: &[bf16]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        let dout: Vec<bf16> = Random::new(3).normals(rows * columns);
        for_thread_counts(|| {
            let [mut got, mut expected] = [(); 2].map(|()| poisoned::<bf16>(rows * columns));
            stored_swiglu(planes, columns, &mut got);
            swiglu_forward(&gate, &up, &mut expected);
            assert_eq!(bits(&got), bits(&expected), "{rows}x{columns}");
            let [mut got, mut expected] =
                [(); 2].map(|()| [(); 2].map(|()| poisoned::<bf16>(rows * columns)));
            let ([dgate, dup], [of_gate, of_up]) = (&mut got, &mut expected);
            stored_swiglu_backward(&dout, planes, columns, dgate, dup);
            swiglu_backward(&dout, &gate, &up, of_gate, of_up);
            assert_eq!(got.each_ref().map(|it| bits(it)), expected.each_ref().map(|it| bits(it)));
            bits(&got[0])
        });
    }

    #[test]
    fn stored_matrices_are_read_as_dequantized_ones() {
        for (rows, columns) in [(0, 32), (3, 0), (1, 1), (3, 33), (130, 160), (5, 96)] {
            check(rows, columns);
        }
    }
}
