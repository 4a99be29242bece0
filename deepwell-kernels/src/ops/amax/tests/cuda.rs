//! `amax.cu` against the CPU: the largest finite magnitude, to the bit.

use deepwell_ir::DType;
use deepwell_ir::ops::{Amax, Axis};
use deepwell_precision::nvfp4::{self, BLOCK};
use deepwell_precision::{Hadamard16, QuantFormat, Source};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::quantize_nvfp4::numbers_of;
use crate::quantize_nvfp4_operands::{self, formats};

fn check_of<S: Source>(
    gpu: &mut Gpu,
    (source, x): (HostTensor, &[S]),
    [rows, columns]: [usize; 2],
    what: &str,
) {
    let transform = QuantFormat::NVFP4.with_hadamard(Some(Hadamard16::TRAINING));
    for axis in [Axis::Row, Axis::Column] {
        for format in [QuantFormat::NVFP4, transform] {
            let k = if axis == Axis::Column { rows } else { columns };
            if format.hadamard.is_some() && !k.is_multiple_of(BLOCK) {
                continue;
            }
            let expected = match axis {
                Axis::Column => nvfp4::amax_of_columns(x, rows, columns, &format),
                _ => nvfp4::amax_of_rows(x, rows, columns, &format),
            };
            let output = HostTensor::output(DType::F32, &[1]);
            let got =
                gpu.run(Amax { format, axis }, std::slice::from_ref(&source), &[output], false, 1);
            let expected = expected.unwrap().to_ne_bytes();
            assert_eq!(got[0].bytes, expected, "{what} {rows}x{columns} {axis:?} {format}");
        }
    }
}

pub(crate) fn check(gpu: &mut Gpu, shape: [usize; 2], kind: &str) {
    let x = numbers_of(kind, shape[0], shape[1]);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    check_of(gpu, (HostTensor::f32(&shape, &x), &x), shape, &format!("f32 {kind}"));
    check_of(gpu, (HostTensor::bf16(&shape, &x), &rounded), shape, &format!("bf16 {kind}"));
}

trial!(the_largest_at_every_size);
fn the_largest_at_every_size() {
    let mut gpu = Gpu::open();
    for shape in [[0, 32], [32, 0], [1, 1], [3, 5], [16, 7], [7, 16], [130, 200], [2048, 272]] {
        if gpu.runs(shape[0] * shape[1], 64 << 10) {
            // The outlier is the last element.
            for kind in ["random", "tiny", "zeros", "special", "outlier"] {
                check(&mut gpu, shape, kind);
            }
        }
    }
}

emulated! {
    amax on Sm90a: |gpu| {
        check(gpu, [80, 256], "outlier");
        check(gpu, [96, 209], "special");
        // Both amaxes of a matrix from one read.
        quantize_nvfp4_operands::check(gpu, [272, 160], "special", formats()[0]);
    }
}
