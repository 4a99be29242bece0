//! `sm100_attention.cu`: the cases of `attention.cu`, and sizes around its own tiles.

use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{
    Case, Data, EMULATED_WORK, ORDERS, cases, check_forward_within, document_cases, extended_cases,
};
use crate::harness::{Gpu, RunOptions};

const KERNEL: &str = "cuda_sm100_attention";

/// Largest relative error of exponentials by the polynomial of `mma/exp2_by_fma.cuh`, 8.77e-5, see
/// `exponentials_by_polynomial_have_their_error`. If all weights of a row had the error, the
/// logarithm of the sum would have that error to within its square.
const EXPONENTIAL_ERROR: f64 = 9e-5;

fn check(gpu: &mut Gpu, case: &Case) {
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    check_forward_within(gpu, case, options, EXPONENTIAL_ERROR);
}

/// The GPU, if it has tcgen05; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    let has = [Architecture::Sm100a, Architecture::Sm103a]
        .iter()
        .any(|architecture| gpu.target().arch == architecture.target_name());
    if !has {
        skip("of sm_100");
    }
    gpu
}

trial!(exponentials_by_polynomial_have_their_error);
fn exponentials_by_polynomial_have_their_error() {
    let source = include_str!("../../../../cuda/mma/exp2_by_fma.cuh");
    let coefficients = ["0.0771190897", "0.2275643945", "0.6951461434", "1.0"].map(|text| {
        assert!(source.contains(&format!("both({text}f)")), "no coefficient {text}");
        text.parse::<f32>().unwrap()
    });
    // Every 2^-16 of the fractional part, by the FP32 operations of the kernel.
    let error = |step: u16| {
        let x = f32::from(step) / 65536.0;
        let power = coefficients.into_iter().reduce(|sum, next| sum.mul_add(x, next)).unwrap();
        (f64::from(power) / f64::from(x).exp2() - 1.0).abs()
    };
    let largest = (0..=u16::MAX).map(error).fold(0.0, f64::max);
    assert!((8.7e-5..8.8e-5).contains(&largest), "{largest}");
    assert!(largest * (1.0 + largest) < EXPONENTIAL_ERROR);
}

trial!(attention_on_tcgen05_of_any_size);
fn attention_on_tcgen05_of_any_size() {
    let mut gpu = open();
    // Around tiles of 256 queries, halves of 128, and blocks of 128 keys.
    let sizes = [66, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513].into_iter();
    let around = sizes.flat_map(|seq| {
        [(64, false), (64, true), (128, false), (128, true)].map(|(head_dim, causal)| {
            Case::new([1, seq, 2, 1, head_dim], causal, Data::Uniform(4.0))
        })
    });
    for case in cases().into_iter().chain(around) {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

trial!(attention_on_tcgen05_with_windows_sinks_and_documents);
fn attention_on_tcgen05_with_windows_sinks_and_documents() {
    let mut gpu = open();
    let is_taken = |case: &Case| case.shape.value_dim() == case.shape.head_dim;
    let extended = extended_cases().into_iter().filter(is_taken);
    for case in extended.chain(document_cases(&[16, 64, 96, 128])) {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

/// Every kernel: one to five blocks of keys for a tile, and one to three tiles for a CTA, of two
/// full halves, or of one, so that every wait sees both parities, and copies wait for free stages;
/// windows and documents that begin within blocks and skip some. Keys are processed from the last
/// to the first, so falling scores raise references, and sums are corrected.
fn every_kernel() -> impl Iterator<Item = Case> {
    [64, 96, 128].into_iter().flat_map(|head_dim| {
        let of = |sizes: [usize; 4], causal| {
            let [batch, seq, heads, kv_heads] = sizes;
            Case::new([batch, seq, heads, kv_heads, head_dim], causal, Data::Uniform(4.0))
        };
        [
            of([1, 520, 2, 1], true),
            of([1, 250, 12, 4], true),
            of([1, 600, 1, 1], false),
            of([1, 120, 12, 4], true).sinks(1.0),
            of([2, 260, 2, 2], false),
            Case { data: Data::Falling, ..of([1, 300, 6, 2], false) },
            Case { data: Data::Falling, ..of([1, 520, 3, 1], true).window(150).sinks(1.0) },
            of([1, 400, 4, 2], true).documents(&[130, 70, 1, 199]),
        ]
    })
}

/// Lengths around halves, tiles and blocks, and heads narrower than a kernel.
fn lengths() -> impl Iterator<Item = Case> {
    let widths =
        [(64, [1, 63, 64, 65, 127, 128, 129, 257]), (128, [0, 1, 2, 120, 128, 130, 255, 256])];
    let narrow =
        [8, 72, 120].map(|width| Case::new([1, 130, 2, 1, width], true, Data::Uniform(1.0)));
    let all = widths.into_iter().flat_map(|(head_dim, lengths)| {
        lengths.into_iter().enumerate().map(move |(index, seq)| {
            Case::new([2, seq, 2, 1, head_dim], index % 2 == 0, Data::Uniform(4.0))
        })
    });
    all.chain(narrow)
}

/// Scores that raise references in every block or never, NaN, scores of a standard deviation of 8,
/// and of up to 5e5 in either direction, so that rows see no positive score.
fn hard_scores() -> impl Iterator<Item = Case> {
    let data = [Data::Flat, Data::Rising, Data::Falling, Data::Nan, Data::Uniform(24.0)];
    let at = |(index, data)| Case::new([1, 300, 1, 1, [64, 128][index % 2]], index % 3 != 0, data);
    let large = [64, 128].map(|head_dim| Case::new([1, 40, 8, 1, head_dim], true, LARGE));
    data.into_iter().enumerate().map(at).chain(large)
}

/// Queries, with keys of up to 1, whose scores are up to 5e5 and above.
const LARGE: Data = Data::Uniform(1.5e6);

emulated! {
    sm100_attention on Sm100a: |gpu| {
        every_kernel().chain(lengths()).chain(hard_scores()).for_each(|case| check(gpu, &case));
        for (order, head_dim) in ORDERS.into_iter().zip([64, 128, 96]) {
            let case = Case::new([2, 70, 4, 2, head_dim], true, Data::Uniform(4.0));
            check(gpu, &case.heads_first(order));
        }
    }
}
