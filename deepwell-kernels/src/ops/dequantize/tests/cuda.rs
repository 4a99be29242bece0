//! `dequantize.cu` against the definition: every number must be the same.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, Dequantize};
use deepwell_kernels::ops::dequantize::oracle as mx;
use deepwell_precision::{BLOCK, QuantFormat, scale_tiles};

use crate::harness::{Gpu, HostTensor};
use crate::mx::tiled;

/// Every code under scales that differ between neighbours, the ends of the range among them.
fn operand(rows: usize, k: usize) -> (Vec<u8>, Vec<u8>) {
    let code = |index: usize| (index * 37 + index / 256) as u8;
    let scale = |index: usize| match index % 11 {
        3 => 0,
        5 => 1,
        7 => 254,
        9 => 255,
        _ => (90 + index * 7 % 70) as u8,
    };
    ((0..rows * k).map(code).collect(), (0..rows * k.div_ceil(BLOCK)).map(scale).collect())
}

/// The result is `[rows, columns]`.
pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize) {
    for (axis, to) in [
        (Axis::Row, DType::Bf16),
        (Axis::Column, DType::Bf16),
        (Axis::Row, DType::F32),
        (Axis::Column, DType::F32),
    ] {
        let what = format!("{rows}x{columns} {} to {to}", axis.name());
        let is_column = axis == Axis::Column;
        let (outer, k) = if is_column { (columns, rows) } else { (rows, columns) };
        let (data, plain) = operand(outer, k);
        let values = match is_column {
            true => mx::dequantize_transposed(&data, &plain, rows, columns),
            false => mx::dequantize_rows(&data, &plain, rows, columns),
        };
        // FP32 holds each number, or it is infinite there.
        let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
        let expected = HostTensor::from_f32(to, &[rows, columns], &values).to_f64();
        let scales = tiled(outer, k, &plain);
        let inputs = [
            HostTensor::bytes(DType::E4m3, &[outer, k], &data),
            HostTensor::bytes(DType::E8m0, &scale_tiles::shape(outer, k.div_ceil(BLOCK)), &scales),
        ];
        let output = HostTensor::output(to, &[rows, columns]);
        let got = gpu.run(
            Dequantize { format: QuantFormat::MXFP8, axis, to },
            &inputs,
            &[output],
            false,
            1,
        );
        let got = got[0].to_f64();
        let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let wrong = got.iter().zip(&expected).position(|pair| !same(pair));
        assert_eq!(wrong.map(|i| (i, got[i], expected[i])), None, "{what}");
    }
}

trial!(every_number_at_every_size);
fn every_number_at_every_size() {
    let mut gpu = Gpu::open();
    for (rows, columns) in [
        (0, 32),
        (32, 0),
        (1, 1),
        (31, 33),
        (64, 64),
        (65, 63),
        (130, 200),
        (257, 260),
        (1000, 12),
        (4096, 1536),
    ] {
        if gpu.runs(rows * columns, 64 << 10) {
            check(&mut gpu, rows, columns);
        }
    }
}

emulated! {
    dequantize on Sm100a: |gpu| check(gpu, 200, 260)
}
