//! `cross_entropy.cu` and `cross_entropy_gemm.cu`: the output head with its loss, with both kinds
//! of GEMMs.

use std::fmt;

use deepwell_ir::ops::IGNORED_TARGET;
use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::linear_cross_entropy::oracle;
use half::bf16;

use crate::compare::{Tolerance, assert_biased, assert_close};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// A kernel of the catalog and the `.cu` files that it launches.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    name: &'static str,
    launches: &'static [&'static str],
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.launches.join(", "))
    }
}

pub(crate) const KERNELS: [Kernel; 2] = [
    Kernel { name: "cublaslt_linear_cross_entropy", launches: &["cross_entropy"] },
    Kernel {
        name: "cuda_linear_cross_entropy",
        launches: &["cross_entropy", "cross_entropy_gemm"],
    },
];

/// Which tokens have a target.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Targets {
    All,
    EveryThirdIgnored,
    NoneAtAll,
}

pub(crate) struct Case {
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    /// Largest elements of x; those of w are below 1.
    pub(crate) scale: f32,
    pub(crate) targets: Targets,
}

impl Case {
    fn targets(&self) -> Vec<i32> {
        let target = |(token, x): (usize, f32)| match self.targets {
            Targets::NoneAtAll => IGNORED_TARGET,
            Targets::EveryThirdIgnored if token % 3 == 1 => IGNORED_TARGET,
            _ => (((x + 0.5) * self.vocab as f32) as usize).min(self.vocab - 1) as i32,
        };
        uniform(self.tokens, 5, 0.5).into_iter().enumerate().map(target).collect()
    }
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

pub(crate) fn check(gpu: &mut Gpu, kernel: Kernel, case: &Case) {
    let &Case { tokens, hidden, vocab, scale, .. } = case;
    let what = format!("{kernel}, {tokens} tokens, w {vocab}x{hidden}, {:?}", case.targets);
    let x = HostTensor::bf16(&[tokens, hidden], &uniform(tokens * hidden, 1, scale));
    let w = HostTensor::bf16(&[vocab, hidden], &uniform(vocab * hidden, 2, 1.0));
    let targets = case.targets();
    let loss_scale = 1.0 / tokens.max(1) as f32;
    let inputs = [
        x.clone(),
        w.clone(),
        HostTensor::i32(&[tokens], &targets),
        HostTensor::f32(&[1], &[loss_scale]),
    ];
    let (x, w, scale_64) = (x.to_f64(), w.to_f64(), f64::from(loss_scale));
    let expected_loss = oracle::forward(&x, &w, &targets, hidden, scale_64);
    let expected = oracle::backward(&x, &w, &targets, hidden, scale_64);

    // A logit is a sum of `hidden` products in FP32, each step of which rounds (or cuts, within
    // the tensor cores) a partial sum of at most hidden · scale.
    let largest_logit = hidden as f64 * f64::from(scale);
    let logit_error = hidden as f64 * 2f64.powi(-23) * largest_logit;
    // lse and the target's logit are off by that; exponentials by 2^-21 and, the exponent being
    // rounded, 2^-23 of it; the sum of a row's exponentials by its length.
    let share_error = logit_error + 2f64.powi(-21) + 2.0 * largest_logit * 2f64.powi(-23);
    let loss_error = 2.0 * share_error + largest_logit * 2f64.powi(-22);
    let before_loss = 2.5;
    let loss_tolerance = Tolerance { absolute: loss_error, relative: 2f64.powi(-23) };

    // dlogits are off by a rounding to BF16 and by their share; what they are multiplied with is
    // at most 1 (w) or scale (x).
    let dlogit_error = 2f64.powi(-8) + 2.0 * share_error;
    let row_sum = 2.0 * scale_64;
    let dx_tolerance = Tolerance::bf16(row_sum * dlogit_error + row_sum * 2f64.powi(-20));
    let column_sum = (0..vocab)
        .map(|word| (0..tokens).map(|t| expected.dlogits[t * vocab + word].abs()).sum::<f64>())
        .fold(0.0, f64::max);
    // A probability that should be zero may be share_error of itself only: no floor is needed.
    let column_sum = column_sum * f64::from(scale);
    let dw_absolute = column_sum * (dlogit_error + tokens as f64 * 2f64.powi(-23)) + 1e-6;
    let dw_tolerance = Tolerance { absolute: dw_absolute, relative: 0.0 };
    // A token's largest dlogit is the loss scale itself where its target is unlikely: it has the
    // same rounding to BF16 everywhere.
    let bias = (bf16::from_f32(loss_scale).to_f64() / scale_64 - 1.0).abs();

    for accumulate in [false, true] {
        let what = format!("{what}, accumulate {accumulate}");
        let loss = HostTensor::f32(&[1], &[before_loss as f32]);
        let dx = HostTensor::output(DType::Bf16, &[tokens, hidden]);
        let before_dw: Vec<f32> = (0..vocab * hidden).map(|i| (i % 5) as f32).collect();
        let dw = HostTensor::f32(&[vocab, hidden], &before_dw);
        let options = RunOptions { accumulate, kernel: Some(kernel.name), ..RunOptions::default() };
        let added_loss = expected_loss + if accumulate { before_loss } else { 0.0 };

        let outputs = [loss.clone()];
        let got = gpu.run_with(ops::LinearCrossEntropy {}, &inputs, &outputs, options);
        assert_close(&what, &got[0].to_f64(), &[added_loss], loss_tolerance);

        let outputs = [loss, dx, dw.clone()];
        let got = gpu.run_with(ops::LinearCrossEntropyGrad {}, &inputs, &outputs, options);
        assert_close(&what, &got[0].to_f64(), &[added_loss], loss_tolerance);
        let of = |output: &str| format!("{output}, {what}");
        assert_biased(&of("dx"), &got[1].to_f64(), &expected.dx, dx_tolerance, bias).must_tell();
        let added_dw =
            if accumulate { add(&expected.dw, &dw.to_f64()) } else { expected.dw.clone() };
        assert_biased(&of("dw"), &got[2].to_f64(), &added_dw, dw_tolerance, bias).must_tell();
    }
}

trial!(losses_and_gradients_as_the_oracle);
fn losses_and_gradients_as_the_oracle() {
    let mut gpu = Gpu::open();
    let case = |tokens, hidden, vocab, targets| Case { tokens, hidden, vocab, scale: 1.0, targets };
    for kernel in KERNELS {
        for case in [
            case(0, 8, 5, Targets::All),
            case(1, 1, 1, Targets::All),
            case(3, 8, 4, Targets::EveryThirdIgnored),
            case(5, 8, 7, Targets::NoneAtAll),
            case(33, 7, 13, Targets::All),
            case(7, 16, 33, Targets::EveryThirdIgnored),
            case(130, 64, 300, Targets::EveryThirdIgnored),
            // A tile of logits and one more; all that shared memory keeps, and more.
            case(5, 16, 4096, Targets::All),
            case(4, 24, 4097, Targets::EveryThirdIgnored),
            case(3, 8, 24_577, Targets::All),
            case(2, 8, 50_257, Targets::All),
            // Two chunks, the second shorter.
            case(4200, 8, 20, Targets::EveryThirdIgnored),
        ] {
            // GEMMs take whole tiles.
            let work = case.tokens.max(128) * case.hidden.max(64) * case.vocab;
            if gpu.runs(work, 1 << 26) {
                check(&mut gpu, kernel, &case);
            }
        }
    }
}

trial!(sharp_distributions_as_the_oracle);
fn sharp_distributions_as_the_oracle() {
    let mut gpu = Gpu::open();
    for kernel in KERNELS {
        for (tokens, hidden, vocab, scale) in [(40, 16, 100, 8.0), (20, 4, 5000, 100.0)] {
            let targets = Targets::EveryThirdIgnored;
            check(&mut gpu, kernel, &Case { tokens, hidden, vocab, scale, targets });
        }
    }
}

trial!(equal_logits_give_the_logarithm_of_the_vocabulary);
fn equal_logits_give_the_logarithm_of_the_vocabulary() {
    let mut gpu = Gpu::open();
    let (tokens, vocab) = gpu.pick((300, 70_001), (20, 9001));
    let inputs = [
        HostTensor::bf16(&[tokens, 1], &vec![0.0; tokens]),
        HostTensor::bf16(&[vocab, 1], &vec![1.0; vocab]),
        HostTensor::i32(&[tokens], &vec![77; tokens]),
        HostTensor::f32(&[1], &[1.0 / tokens as f32]),
    ];
    let output = [HostTensor::output(DType::F32, &[1])];
    let expected = (vocab as f64).ln();
    for kernel in KERNELS {
        let options = RunOptions { kernel: Some(kernel.name), ..RunOptions::default() };
        let got = gpu.run_with(ops::LinearCrossEntropy {}, &inputs, &output, options);
        // One logarithm in FP32 of an exact sum, the losses' mean with a rounded loss scale.
        let tolerance = Tolerance { absolute: 0.0, relative: 2f64.powi(-22) };
        assert_close(&kernel.to_string(), &got[0].to_f64(), &[expected], tolerance);
    }
}

trial!(a_target_outside_of_the_vocabulary_or_a_nan_shows);
fn a_target_outside_of_the_vocabulary_or_a_nan_shows() {
    let mut gpu = Gpu::open();
    for kernel in KERNELS {
        for (target, x) in [(5, 1.0), (-1, 1.0), (2, f32::NAN), (2, f32::INFINITY)] {
            let mut values = vec![1.0; 3 * 8];
            values[8] = x;
            let inputs = [
                HostTensor::bf16(&[3, 8], &values),
                HostTensor::bf16(&[5, 8], &uniform(40, 2, 1.0)),
                HostTensor::i32(&[3], &[0, target, IGNORED_TARGET]),
                HostTensor::f32(&[1], &[0.5]),
            ];
            let outputs = [
                HostTensor::output(DType::F32, &[1]),
                HostTensor::output(DType::Bf16, &[3, 8]),
                HostTensor::output(DType::F32, &[5, 8]),
            ];
            let options = RunOptions { kernel: Some(kernel.name), ..RunOptions::default() };
            let op = ops::LinearCrossEntropyGrad {};
            let got = gpu.run_with(op, &inputs, &outputs, options);
            let what = format!("{kernel}, target {target}, x {x}");
            assert!(got[0].to_f64()[0].is_nan(), "{what}");
            let dx = got[1].to_f64();
            assert!(dx[..8].iter().all(|dx| dx.is_finite()), "{what}");
            assert!(dx[8..16].iter().all(|dx| dx.is_nan()), "{what}");
            assert!(dx[16..].iter().all(|&dx| dx == 0.0), "{what}");
            assert!(got[2].to_f64().iter().all(|dw| dw.is_nan()), "{what}");
        }
    }
}

fn check_head(gpu: &mut Gpu, kernel: Kernel, tokens: usize, hidden: usize, vocab: usize) {
    let targets = Targets::EveryThirdIgnored;
    check(gpu, kernel, &Case { tokens, hidden, vocab, scale: 1.0, targets });
}

// Rows of seven tiles, of which shared memory keeps six.
emulated! {
    cross_entropy on Sm100a: |gpu| {
        check_head(gpu, KERNELS[0], 13, 8, 7 * 4096 - 3);
        crate::vocab_parallel::check_head(gpu, (40, 64, 96, 2));
    }
}

emulated! {
    cross_entropy_gemm on Sm100a: |gpu| {
        check_head(gpu, KERNELS[1], 390, 136, 264);
        // Four tiles along K: the last is where the first was, and the result passes there.
        check_head(gpu, KERNELS[1], 150, 131, 201);
    }
}
