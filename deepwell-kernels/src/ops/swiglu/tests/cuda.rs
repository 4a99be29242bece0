//! `swiglu.cu`, and `stored_swiglu.cu` with the kernels that quantize its results.

use std::slice;

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{DType, Op, ops};
use deepwell_kernels::ops::swiglu::oracle;
use deepwell_precision::{BLOCK, Granularity, QuantFormat, scale_tiles};

use crate::compare::{Tolerance, assert_close};
use crate::fused_quantize::check_fused;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mx::tiled;

/// Gates where the sigmoid is flat, where its derivative cancels, and where FP32 ends.
const ADVERSARIAL: [f32; 16] = [
    0.0,
    -0.0,
    1e-38,
    -1e-38,
    -1.278_464_5,
    88.0,
    89.0,
    -85.0,
    -87.0,
    -89.0,
    -104.0,
    -1e4,
    1e4,
    3e30,
    -3e30,
    1e-40,
];

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize, adversarial: bool) {
    let what = format!("{rows}x{columns}");
    let (shape, len) = ([rows, columns], rows * columns);
    let mut gate = uniform(len, 1, 8.0);
    if adversarial {
        gate.iter_mut().zip(ADVERSARIAL.into_iter().cycle()).for_each(|(g, a)| *g = a);
    }
    let gate = HostTensor::bf16(&shape, &gate);
    let up = HostTensor::bf16(&shape, &uniform(len, 2, 2.0));
    let dout = HostTensor::bf16(&shape, &uniform(len, 3, 2.0));
    let (g, u, d) = (gate.to_f64(), up.to_f64(), dout.to_f64());
    let output = HostTensor::output(DType::Bf16, &shape);

    // The sigmoid is good to 2^-20 of itself at |gate| <= 16 and is rounded away with BF16's
    // 2^-8 beyond; below 2^-120 it may be zero, where |gate up| is up to 2^8: 2^-110 of nothing.
    let floor = 2f64.powi(-110);
    let got =
        gpu.run(ops::SwiGlu {}, &[gate.clone(), up.clone()], slice::from_ref(&output), false, 1);
    assert_close(&what, &got[0].to_f64(), &oracle::forward(&g, &u), Tolerance::bf16(floor));

    let inputs = [dout, gate, up];
    let got = gpu.run(ops::SwiGluBackward {}, &inputs, &[output.clone(), output], false, 1);
    let (dgate, dup) = oracle::backward(&d, &g, &u);
    // `1 + gate (1 - s)` cancels near gate = -1.28 and 1 - s loses bits at large gates: 2^-20 of
    // |dout up| s (1 + |gate|), which is 2^-20 * 4 * 1.1 for negative gates; for positive ones
    // nothing cancels, and gate (1 - s) is off by at most 16 * 2^-24 of the whole.
    let cancelled = 4.0 * 1.1 * 2f64.powi(-20);
    let tolerance = Tolerance::bf16(cancelled + floor);
    assert_close(&format!("dgate {what}"), &got[0].to_f64(), &dgate, tolerance);
    assert_close(&format!("dup {what}"), &got[1].to_f64(), &dup, Tolerance::bf16(floor));
}

trial!(gates_as_the_oracle);
fn gates_as_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in
        [(0, 8), (1, 1), (1, 7), (1, 8), (3, 3), (2, 8), (17, 255), (64, 256), (1000, 4097)]
    {
        if gpu.runs(rows * columns, 1 << 18) {
            check(&mut gpu, rows, columns, false);
        }
    }
    check(&mut gpu, 3, 16, true);
    check(&mut gpu, 3, 5, true);
}

trial!(what_is_not_finite_shows);
fn what_is_not_finite_shows() {
    let mut gpu = Gpu::open();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let gate = HostTensor::bf16(&[1, 5], &[nan, 1.0, 1.0, inf, -1.0]);
    let up = HostTensor::bf16(&[1, 5], &[1.0, nan, inf, 1.0, 2.0]);
    let output = [HostTensor::output(DType::Bf16, &[1, 5])];
    let got = gpu.run(ops::SwiGlu {}, &[gate, up], &output, false, 1)[0].to_f64();
    assert!(got[0].is_nan() && got[1].is_nan());
    assert_eq!(got[2..4], [f64::INFINITY; 2]);
    assert!(got[4].is_finite());
}

emulated! {
    swiglu on Sm100a: |gpu| check(gpu, 401, 1000, false)
}

emulated! {
    swiglu_quantize on Sm100a: |gpu| {
        crate::elementwise_quantize::check_file(gpu, "swiglu_quantize");
    }
}

emulated! {
    sm90_swiglu_backward_quantize on Sm90a: |gpu| {
        crate::elementwise_quantize::check_gradients_of_whole_tiles(gpu);
    }
}

/// Data and scales of a matrix: every code under scales that differ between neighbours; `special`
/// ones are the ends of the range and NaN.
fn stored(rows: usize, columns: usize, seed: usize, special: bool) -> [HostTensor; 2] {
    let code = |index: usize| match (index * 37 + index / 256 + seed) as u8 {
        0x7f | 0xff if !special => 0x38,
        code => code,
    };
    let scale = |index: usize| match index % 23 {
        3 if special => 0,
        5 if special => 1,
        7 if special => 254,
        9 if special => 255,
        _ => (115 + (index * 7 + seed) % 9) as u8,
    };
    let blocks = columns.div_ceil(BLOCK);
    let data: Vec<u8> = (0..rows * columns).map(code).collect();
    let plain: Vec<u8> = (0..rows * blocks).map(scale).collect();
    let scales = tiled(rows, columns, &plain);
    [
        HostTensor::bytes(DType::E4m3, &[rows, columns], &data),
        HostTensor::bytes(DType::E8m0, &scale_tiles::shape(rows, blocks), &scales),
    ]
}

/// The bits of a dequantization and of the op on its result; quantized results have the bits of
/// the op alone, quantized.
fn check_stored(gpu: &mut Gpu, rows: usize, columns: usize, granularity: Option<Granularity>) {
    let format = QuantFormat::MXFP8;
    let shape = [rows, columns];
    for special in [false, true] {
        let what = format!("{rows}x{columns} special {special}");
        let output = || HostTensor::output(DType::Bf16, &shape);
        let planes = [stored(rows, columns, 0, special), stored(rows, columns, 5, special)];
        let dequantize = ops::Dequantize { format, axis: Axis::Row, to: DType::Bf16 };
        let restored = planes
            .clone()
            .map(|planes| gpu.run(dequantize.clone(), &planes, &[output()], false, 1).remove(0));
        let dout = HostTensor::bf16(&shape, &uniform(rows * columns, 3, 2.0));
        let stored = planes.concat();
        let cases: [(Op, Op, Vec<HostTensor>, usize); 2] = [
            (ops::StoredSwiGlu { format }.into(), ops::SwiGlu {}.into(), Vec::new(), 1),
            (
                ops::StoredSwiGluBackward { format }.into(),
                ops::SwiGluBackward {}.into(),
                vec![dout],
                2,
            ),
        ];
        for (op, exact, first, results) in cases {
            let inputs = [first.clone(), stored.clone()].concat();
            let outputs = vec![output(); results];
            if let Some(granularity) = granularity {
                for axis in [Axis::Row, Axis::Column, Axis::Both] {
                    let format = format.with_granularity(granularity);
                    let entries = vec![Quantize { format, axis }; results];
                    let name = format!("{}_quantize", op.name());
                    check_fused(gpu, &op, &name, &inputs, &outputs, &entries, &what);
                }
                continue;
            }
            let got = gpu.run(op.clone(), &inputs, &outputs, false, 1);
            let inputs = [first, restored.to_vec()].concat();
            let expected = gpu.run(exact, &inputs, &outputs, false, 1);
            for (got, expected) in got.iter().zip(&expected) {
                let (got, expected) = (got.to_f64(), expected.to_f64());
                let same =
                    |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                let wrong = got.iter().zip(&expected).position(|pair| !same(pair));
                let wrong = wrong.map(|at| (at, got[at], expected[at]));
                assert_eq!(wrong, None, "{} {what}", op.name());
            }
        }
    }
}

trial!(stored_inputs_as_dequantized_ones);
fn stored_inputs_as_dequantized_ones() {
    let mut gpu = Gpu::open();
    for (rows, columns) in [(0, 8), (1, 8), (3, 40), (130, 264), (128, 256), (1024, 5632)] {
        if !gpu.runs(rows * columns, 1 << 16) {
            continue;
        }
        check_stored(&mut gpu, rows, columns, None);
        for granularity in [Granularity::G32, Granularity::G128] {
            check_stored(&mut gpu, rows, columns, Some(granularity));
        }
    }
}

emulated! {
    stored_swiglu on Sm100a: |gpu| check_stored(gpu, 131, 264, None)
}

emulated! {
    stored_swiglu_quantize on Sm100a: |gpu| {
        check_stored(gpu, 130, 264, Some(Granularity::G32));
        check_stored(gpu, 128, 256, Some(Granularity::G128));
    }
}

emulated! {
    sm90_stored_swiglu_backward_quantize on Sm90a: |gpu| {
        for (rows, columns) in [(128, 256), (384, 640)] {
            check_stored(gpu, rows, columns, Some(Granularity::G128));
            check_stored(gpu, rows, columns, Some(Granularity::G32));
        }
    }
}
