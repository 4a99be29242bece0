//! `router_logits.cu`, and `router_parts.cu` around the library's GEMMs: FP32 GEMMs against f64
//! sums.

use deepwell_ir::DType;
use deepwell_ir::ops::{RouterLogits, RouterLogitsBackward};
use deepwell_kernels::ops::linear::oracle;

use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// A sum of `k` products in FP32: each addition rounds by 2^-24 of the magnitudes at most, and so
/// do what is added to it and the sum of runs.
fn bounds(expected: &[f64], magnitudes: &[f64], k: usize, rounding: f64) -> Vec<f64> {
    let share = (k + 34) as f64 * 2f64.powi(-24);
    let bound = |(x, size): (&f64, &f64)| share * size + rounding * x.abs() + 1e-30;
    expected.iter().zip(magnitudes).map(bound).collect()
}

/// The kernels of an op and its backward, and by what share of the magnitudes dx may be off besides
/// what sums are: GEMMs of small parts are left out.
struct Kernels {
    forward: &'static str,
    backward: &'static str,
    left_out: f64,
}

const OWN: Kernels = Kernels {
    forward: "cuda_router_logits",
    backward: "cuda_router_logits_backward",
    left_out: 0.0,
};

/// What a sum of GEMMs of parts lacks: each factor is off by 2^-18 of it without its third part,
/// and the GEMM of the second parts, 2^-9 of each factor, is left out.
const LIBRARY: Kernels = Kernels {
    forward: "cublaslt_router_logits",
    backward: "cublaslt_router_logits_backward",
    left_out: 3.0 / (1 << 18) as f64,
};

fn check(gpu: &mut Gpu, kernels: &Kernels, tokens: usize, experts: usize, width: usize) {
    let what = format!("{}: {tokens} tokens, {experts} experts, width {width}", kernels.forward);
    let options = |kernel, accumulate| RunOptions {
        accumulate,
        kernel: Some(kernel),
        ..RunOptions::default()
    };
    let x = HostTensor::bf16(&[tokens, width], &uniform(tokens * width, 1, 2.0));
    let w = HostTensor::f32(&[experts, width], &uniform(experts * width, 2, 1.0));
    let bias = HostTensor::f32(&[experts], &uniform(experts, 3, 1.0));
    let dlogits = HostTensor::f32(&[tokens, experts], &uniform(tokens * experts, 4, 1.0));
    let before = HostTensor::f32(&[experts, width], &uniform(experts * width, 5, 4.0));
    let sizes =
        |tensor: &HostTensor| -> Vec<f64> { tensor.to_f64().iter().map(|x| x.abs()).collect() };
    let numbers = |tensor: &HostTensor| tensor.to_f64();

    for has_bias in [false, true] {
        let of = |values: Vec<f64>| has_bias.then_some(values);
        let (added, size) = (of(numbers(&bias)), of(sizes(&bias)));
        let expected = oracle::forward(&numbers(&x), &numbers(&w), added.as_deref(), width);
        let magnitudes = oracle::forward(&sizes(&x), &sizes(&w), size.as_deref(), width);
        let mut inputs = vec![x.clone(), w.clone()];
        inputs.extend(has_bias.then(|| bias.clone()));
        let output = [HostTensor::output(DType::F32, &[tokens, experts])];
        let op = RouterLogits { bias: has_bias };
        let got = gpu.run_with(op, &inputs, &output, options(kernels.forward, false));
        let bounds = bounds(&expected, &magnitudes, width, 0.0);
        assert_within(&format!("logits {what}"), &got[0].to_f64(), &expected, &bounds);
    }

    let dx = oracle::data_gradient(&numbers(&dlogits), &numbers(&w), width);
    let of_dx = oracle::data_gradient(&sizes(&dlogits), &sizes(&w), width);
    let dw = oracle::weight_gradient(&numbers(&dlogits), &numbers(&x), experts, width);
    let of_dw = oracle::weight_gradient(&sizes(&dlogits), &sizes(&x), experts, width);
    for accumulate in [false, true] {
        let inputs = [dlogits.clone(), x.clone(), w.clone()];
        // Only `dw` adds to what is there.
        let there = HostTensor::bf16(&[tokens, width], &vec![f32::NAN; tokens * width]);
        let outputs = [there, before.clone()];
        let options = options(kernels.backward, accumulate);
        let got = gpu.run_with(RouterLogitsBackward {}, &inputs, &outputs, options);
        let mut within = bounds(&dx, &of_dx, experts, 1.0 / 256.0);
        within.iter_mut().zip(&of_dx).for_each(|(bound, size)| *bound += kernels.left_out * size);
        assert_within(&format!("dx {what}"), &got[0].to_f64(), &dx, &within);
        let add = |(sum, there): (&f64, f64)| if accumulate { sum + there } else { *sum };
        let dw: Vec<f64> = dw.iter().zip(numbers(&before)).map(add).collect();
        let of_dw: Vec<f64> = of_dw.iter().zip(sizes(&before)).map(add).collect();
        let within = bounds(&dw, &of_dw, tokens, 2f64.powi(-23));
        assert_within(&format!("dw {what}"), &got[1].to_f64(), &dw, &within);
    }
}

fn check_hard(gpu: &mut Gpu) {
    for (tokens, experts, width) in [
        (1, 1, 1),
        (1, 8, 64),
        (31, 33, 100),
        (33, 8, 64),
        (65, 130, 36),
        (64, 64, 16),
        (5, 4, 7),
        (70, 160, 40),
        (130, 161, 130),
    ] {
        check(gpu, &OWN, tokens, experts, width);
    }
}

trial!(gemms_as_the_oracle);
fn gemms_as_the_oracle() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    check_library(&mut gpu);
    if gpu.runs(1, 0) {
        for kernels in [&OWN, &LIBRARY] {
            check(&mut gpu, kernels, 3000, 128, 2048);
        }
    }
}

fn check_library(gpu: &mut Gpu) {
    for (tokens, experts, width) in [(1, 8, 8), (33, 8, 64), (130, 40, 136), (70, 160, 40)] {
        check(gpu, &LIBRARY, tokens, experts, width);
    }
}

// Three runs of tokens for the weight gradient and of columns for the logits, the last not whole;
// columns of tiles of input gradients whose CTAs go down several.
emulated! {
    router_logits on Sm90a: |gpu| {
        check_hard(gpu);
        check(gpu, &OWN, 600, 8, 530);
        check(gpu, &OWN, 70, 70, 130);
        check(gpu, &OWN, 450, 40, 100);
    }
}
emulated! { router_parts on Sm90a: check_library }
