//! `bf16_gemm.cu`: the three GEMMs of a linear layer against their definition in f64.

use deepwell_ir::{DType, Op, ops};
use deepwell_kernels::ops::linear::oracle as linear;

use crate::compare::assert_close;
use crate::gemm_operands::{Kind, gemm_tolerance};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// Tokens, outputs, inputs: empty, single, odd, around the tile of 128 and the step of 64, and
/// rows that allow no 16-byte copies.
const SIZES: &[(usize, usize, usize)] = &[
    (0, 8, 8),
    (8, 0, 8),
    (8, 8, 0),
    (1, 1, 1),
    (3, 5, 7),
    (8, 8, 8),
    (16, 24, 64),
    (127, 128, 65),
    (128, 127, 64),
    (129, 136, 72),
    (130, 131, 133),
    (128, 128, 192),
    (257, 120, 1000),
    (96, 392, 256),
    (600, 520, 264),
    (257, 264, 2049),
];

/// Products of elements at most on the emulator: sizes around one tile.
pub(crate) const EMULATED_WORK: usize = 3 << 20;

/// All three GEMMs of a layer of `(tokens, outputs, inputs)` by one kernel.
pub(crate) fn check(gpu: &mut Gpu, kernel: &str, sizes: (usize, usize, usize), kind: Kind) {
    let options = RunOptions { kernel: Some(kernel), ..RunOptions::default() };
    check_with(gpu, options, sizes, kind);
}

/// [`check`] with everything chosen.
pub(crate) fn check_with(
    gpu: &mut Gpu,
    options: RunOptions<'_>,
    sizes: (usize, usize, usize),
    kind: Kind,
) {
    let (tokens, outputs, inputs) = sizes;
    let kernel = options.kernel.unwrap_or("default kernel");
    let x = HostTensor::bf16(&[tokens, inputs], &kind.values(tokens * inputs, 1));
    let w = HostTensor::bf16(&[outputs, inputs], &kind.values(outputs * inputs, 2));
    let dy = HostTensor::bf16(&[tokens, outputs], &kind.values(tokens * outputs, 3));
    let bias = HostTensor::bf16(&[outputs], &uniform(outputs, 4, 8.0));
    let before = HostTensor::f32(&[outputs, inputs], &uniform(outputs * inputs, 5, 8.0));
    let numbers = |tensor: &HostTensor| tensor.to_f64();
    let mut run = |op: Op, given: &[&HostTensor], output: &HostTensor, accumulate: bool| {
        let given: Vec<HostTensor> = given.iter().map(|&tensor| tensor.clone()).collect();
        let options = RunOptions { accumulate, ..options };
        gpu.run_with(op, &given, std::slice::from_ref(output), options).remove(0).to_f64()
    };
    let name = |what: &str| format!("{kernel} {what} {sizes:?} {kind:?} {:?}", options.tile);

    let y = HostTensor::output(DType::Bf16, &[tokens, outputs]);
    for has_bias in [false, true] {
        let added = has_bias.then(|| numbers(&bias));
        let mut expected = linear::forward(&numbers(&x), &numbers(&w), added.as_deref(), inputs);
        if inputs == 0 {
            // The oracle has no rows to walk when there is nothing to sum.
            expected =
                (0..tokens).flat_map(|_| added.clone().unwrap_or(vec![0.0; outputs])).collect();
        }
        let mut given = vec![&x, &w];
        given.extend(has_bias.then_some(&bias));
        let got = run(ops::Linear { bias: has_bias }.into(), &given, &y, false);
        let tolerance = gemm_tolerance(DType::Bf16, inputs, kind, 8.0);
        assert_close(&name("linear"), &got, &expected, tolerance);
    }

    let dx = HostTensor::output(DType::Bf16, &[tokens, inputs]);
    let mut expected = linear::data_gradient(&numbers(&dy), &numbers(&w), inputs);
    if outputs == 0 {
        expected = vec![0.0; tokens * inputs];
    }
    let got = run(ops::LinearDgrad {}.into(), &[&dy, &w], &dx, false);
    let tolerance = gemm_tolerance(DType::Bf16, outputs, kind, 0.0);
    assert_close(&name("dgrad"), &got, &expected, tolerance);

    for accumulate in [false, true] {
        let mut expected = linear::weight_gradient(&numbers(&dy), &numbers(&x), outputs, inputs);
        if accumulate {
            expected.iter_mut().zip(numbers(&before)).for_each(|(sum, there)| *sum += there);
        }
        let got = run(ops::LinearWgrad {}.into(), &[&dy, &x], &before, accumulate);
        let tolerance = gemm_tolerance(DType::F32, tokens, kind, 8.0);
        assert_close(&name("wgrad"), &got, &expected, tolerance);
    }
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = Gpu::open();
    for &sizes in SIZES {
        let (tokens, outputs, inputs) = sizes;
        if !gpu.runs(tokens * outputs * inputs, EMULATED_WORK) {
            continue;
        }
        check(&mut gpu, "cuda_bf16_gemm", sizes, Kind::Uniform);
    }
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = Gpu::open();
    for kind in [Kind::Integers, Kind::Cancelling, Kind::WideRange] {
        for sizes in [(130, 136, 200), (65, 67, 131)] {
            check(&mut gpu, "cuda_bf16_gemm", sizes, kind);
        }
    }
}

trial!(nan_and_infinity_stay_in_their_rows);
/// What is not finite reaches its row and column of the result, and nothing else.
fn nan_and_infinity_stay_in_their_rows() {
    let mut gpu = Gpu::open();
    let options = RunOptions { kernel: Some("cuda_bf16_gemm"), ..RunOptions::default() };
    for inputs in [72, 71] {
        check_not_finite(&mut gpu, options, inputs);
    }
}

/// A GEMM with NaN and infinities in three places of its operands.
pub(crate) fn check_not_finite(gpu: &mut Gpu, options: RunOptions<'_>, inputs: usize) {
    let (tokens, outputs) = (140, 135);
    let mut x = uniform(tokens * inputs, 1, 1.0);
    let mut w = uniform(outputs * inputs, 2, 1.0);
    x[3 * inputs + inputs - 1] = f32::NAN;
    x[130 * inputs] = f32::INFINITY;
    w[134 * inputs + 1] = f32::NEG_INFINITY;
    let x = HostTensor::bf16(&[tokens, inputs], &x);
    let w = HostTensor::bf16(&[outputs, inputs], &w);
    let expected = linear::forward(&x.to_f64(), &w.to_f64(), None, inputs);
    let y = HostTensor::output(DType::Bf16, &[tokens, outputs]);
    let got = gpu.run_with(ops::Linear { bias: false }, &[x, w], &[y], options);
    let got = got[0].to_f64();
    assert_eq!(expected.iter().filter(|value| !value.is_finite()).count(), 2 * 135 + 138);
    let tolerance = gemm_tolerance(DType::Bf16, inputs, Kind::Uniform, 0.0);
    assert_close(&format!("inputs {inputs}"), &got, &expected, tolerance);
}

emulated! {
    bf16_gemm on Sm100a: |gpu| {
        for sizes in [(390, 264, 264), (130, 131, 265)] {
            check(gpu, "cuda_bf16_gemm", sizes, Kind::Uniform);
        }
    }
}
