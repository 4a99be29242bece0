//! `dequantize_nvfp4.cu` against the CPU: every number must be the same.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, Dequantize};
use deepwell_kernels::ops::scaled_gemm::nvfp4::Planes;
use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::{Hadamard16, QuantFormat, scale_tiles};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::quantize_nvfp4::{Quantized, numbers_of, outer_and_k};

/// The result is `[rows, columns]`.
pub(crate) fn check(gpu: &mut Gpu, shape: [usize; 2], kind: &str) {
    let [rows, columns] = shape;
    let x = numbers_of(kind, rows, columns);
    for axis in [Axis::Row, Axis::Column] {
        let (outer, k) = outer_and_k(axis, rows, columns);
        for hadamard in [None, Some(Hadamard16::TRAINING)] {
            if hadamard.is_some() && !k.is_multiple_of(BLOCK) {
                continue;
            }
            let format = QuantFormat::NVFP4.with_hadamard(hadamard);
            let operand = Quantized::new(&x, shape, &format, axis, None, (None, None));
            // At the largest scale some numbers are beyond the largest BF16.
            for tensor_scale in [operand.tensor_scale, f32::MAX / 64.0] {
                let planes = Planes::whole(&operand.data, &operand.scales, tensor_scale, k);
                let (mut wide, mut narrow) = (vec![0f32; x.len()], vec![bf16::ZERO; x.len()]);
                match (axis, hadamard) {
                    (Axis::Column, None) => {
                        planes.dequantize_columns(columns, &mut wide);
                        planes.dequantize_columns(columns, &mut narrow);
                    }
                    (Axis::Column, Some(transform)) => {
                        planes.dequantize_transformed_columns(transform, columns, &mut wide);
                        planes.dequantize_transformed_columns(transform, columns, &mut narrow);
                    }
                    (_, None) => {
                        planes.dequantize_rows(&mut wide);
                        planes.dequantize_rows(&mut narrow);
                    }
                    (_, Some(transform)) => {
                        planes.dequantize_transformed_rows(transform, &mut wide);
                        planes.dequantize_transformed_rows(transform, &mut narrow);
                    }
                }
                let tiles = scale_tiles::shape(outer, k.div_ceil(BLOCK));
                let inputs = [
                    HostTensor::bytes(DType::E2m1, &[outer, k], &operand.data),
                    HostTensor::bytes(DType::Ue4m3, &tiles, &operand.scales),
                    HostTensor::f32(&[1], &[tensor_scale]),
                ];
                let narrow: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
                for (to, expected) in [(DType::F32, &wide), (DType::Bf16, &narrow)] {
                    let expected = HostTensor::from_f32(to, &shape, expected).to_f64();
                    let op = Dequantize { format, axis, to };
                    let output = HostTensor::output(to, &shape);
                    let got = gpu.run(op, &inputs, &[output], false, 1)[0].to_f64();
                    let same = |(a, b): (&f64, &f64)| {
                        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
                    };
                    let wrong = got.iter().zip(&expected).position(|pair| !same(pair));
                    let wrong = wrong.map(|at| (at, got[at], expected[at]));
                    assert_eq!(wrong, None, "{shape:?} {kind} {axis:?} {format} to {to}");
                }
            }
        }
    }
}

trial!(every_number_at_every_size);
fn every_number_at_every_size() {
    let mut gpu = Gpu::open();
    for shape in [[0, 32], [32, 0], [1, 1], [31, 33], [64, 64], [65, 63], [130, 200], [1000, 12]] {
        if gpu.runs(shape[0] * shape[1], 8 << 10) {
            for kind in ["random", "special"] {
                check(&mut gpu, shape, kind);
            }
        }
    }
}

emulated! {
    dequantize_nvfp4 on Sm90a: |gpu| check(gpu, [272, 80], "special")
}
