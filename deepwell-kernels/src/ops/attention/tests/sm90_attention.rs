//! `sm90_attention.cu`: the cases of `attention.cu`, and sizes around its own tiles.

use deepwell_ir::DType;
use deepwell_ir::ops::Attention;
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::attention::oracle::probabilities;
use deepwell_trials::skip;
use rayon::prelude::*;

use crate::attention::{
    Case, Data, EMULATED_WORK, HALF_ULP, ORDERS, SLACK, cases, check_forward_with, document_cases,
    extended_cases, one_document_changes_no_bit,
};
use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, RunOptions};

const KERNEL: &str = "cuda_sm90_attention";

fn check(gpu: &mut Gpu, case: &Case) {
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    check_forward_with(gpu, case, options);
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

trial!(attention_on_wgmma_of_any_size);
fn attention_on_wgmma_of_any_size() {
    let mut gpu = open();
    let mut all = cases();
    // Around tiles of 128 and 192 queries and blocks of 128 keys.
    for head_dim in [64, 128] {
        for seq in [66, 130, 190, 192, 194, 255, 256, 258, 383, 384, 385, 400] {
            for causal in [false, true] {
                all.push(Case::new([1, seq, 2, 1, head_dim], causal, Data::Uniform(4.0)));
            }
        }
    }
    // Wider than what `attention.cu` takes.
    for head_dim in [136, 192, 256] {
        for seq in [1, 63, 64, 65, 129, 200] {
            all.push(Case::new([2, seq, 4, 2, head_dim], true, Data::Uniform(1.0)));
            all.push(Case::new([1, seq, 3, 1, head_dim], false, Data::Uniform(1.0)));
        }
        all.push(Case::new([1, 133, 2, 1, head_dim], true, Data::Nan));
    }
    for case in all {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

trial!(attention_on_wgmma_with_windows_sinks_and_documents);
fn attention_on_wgmma_with_windows_sinks_and_documents() {
    let mut gpu = open();
    let is_taken = |case: &Case| case.shape.value_dim() == case.shape.head_dim;
    let extended = extended_cases().into_iter().filter(is_taken);
    for case in extended.chain(document_cases(&[16, 64, 96, 128, 256])) {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

trial!(one_document_on_wgmma_changes_no_bit);
fn one_document_on_wgmma_changes_no_bit() {
    let mut gpu = open();
    for head_dim in [64, 96, 128] {
        let backward = Some("cuda_sm90_attention_backward");
        one_document_changes_no_bit(&mut gpu, head_dim, [Some(KERNEL), backward]);
    }
}

/// Several tiles of keys and queries, which begin in the middle of documents and windows.
fn extended_heads() -> impl Iterator<Item = Case> {
    [64, 96, 128, 256].into_iter().flat_map(|head_dim| {
        let case = || Case::new([1, 400, 3, 1, head_dim], true, Data::Uniform(4.0));
        [
            case().documents(&[130, 70, 1, 199]),
            case().window(150).sinks(1.0),
            case().documents(&[250, 150]).window(140).sinks(2.0),
        ]
    })
}

/// Rows of a long attention that are compared with the oracle: enough to meet every place of a row
/// in its tile and of a tile among all.
const ROWS_COMPARED: usize = 400;

/// [`check`] of a share of the rows.
fn check_rows(gpu: &mut Gpu, case: &Case) {
    let [q, k, v, _] = case.inputs();
    let outputs = [
        HostTensor::output(DType::Bf16, &case.query_shape()),
        HostTensor::output(DType::F32, &case.lse_shape()),
    ];
    let op = Attention { heads: case.heads() };
    let options = RunOptions { kernel: Some(KERNEL), seq: case.shape.seq, ..RunOptions::default() };
    let got = gpu.run_with(op, &[q.clone(), k.clone(), v.clone()], &outputs, options);
    let (got, lse) = (got[0].to_f64(), got[1].to_f64());
    let [q, k, v] = [q, k, v].map(|x| x.to_f64());
    let shape = &case.shape;
    let count = lse.len();
    // A step that has no factor in common with sequences: rows of all heads, and all remainders.
    let step = count.div_ceil(ROWS_COMPARED) | 1;
    let of_row = |&(index, row): &(usize, (usize, usize, usize))| {
        let (batch, head, token) = row;
        let mut actual = Vec::new();
        let mut expected = Vec::new();
        let mut bounds = Vec::new();
        let (p, row_lse) = probabilities(shape, &q, &k, &[], row);
        let difference = (lse[index] - row_lse).abs();
        let is_same = difference <= 1e-4 || lse[index].is_nan() && row_lse.is_nan();
        assert!(is_same, "{}: lse of {row:?} is {}, expected {row_lse}", case.name(), lse[index]);
        for d in 0..shape.head_dim {
            let value = |key: usize| v[shape.key(batch, key, head) + d];
            let of = |size: fn(f64) -> f64| -> f64 {
                p.iter().enumerate().map(|(key, p)| p * size(value(key))).sum()
            };
            let out = of(|x| x);
            actual.push(got[shape.query(batch, token, head) + d]);
            expected.push(out);
            // Weights are rounded to BF16, and the result is.
            bounds.push(SLACK * HALF_ULP * (of(f64::abs) + out.abs()));
        }
        [actual, expected, bounds]
    };
    let rows: Vec<_> = shape.rows().enumerate().step_by(step).collect();
    let of_rows: Vec<[Vec<f64>; 3]> = rows.par_iter().map(of_row).collect();
    let [actual, expected, bounds] = [0, 1, 2]
        .map(|of| of_rows.iter().flat_map(|row| row[of].iter().copied()).collect::<Vec<f64>>());
    assert_within(&format!("{}: out", case.name()), &actual, &expected, &bounds);
}

trial!(long_sequences_on_wgmma);
/// More tiles than SMs, and every stage used many times.
fn long_sequences_on_wgmma() {
    let mut gpu = open();
    for head_dim in [64, 96, 128, 256] {
        let (seq, heads) = gpu.pick((1500, 20), (300, 2));
        for (causal, data) in
            [(true, Data::Uniform(1.0)), (false, Data::Uniform(8.0)), (false, Data::Nan)]
        {
            check_rows(&mut gpu, &Case::new([1, seq, heads, heads / 2, head_dim], causal, data));
        }
    }
}

// Five tiles for each SM or so, of up to four blocks of keys: every wait sees both parities.
emulated! {
    sm90_attention on Sm90a: |gpu| {
        for head_dim in [64, 96, 128, 256] {
            for (seq, causal) in [(400, true), (300, false)] {
                check(gpu, &Case::new([1, seq, 3, 1, head_dim], causal, Data::Uniform(4.0)));
            }
        }
        extended_heads().for_each(|case| check(gpu, &case));
        for (order, head_dim) in ORDERS.into_iter().zip([64, 128, 96]) {
            let case = || Case::new([2, 70, 4, 2, head_dim], true, Data::Uniform(4.0));
            check(gpu, &case().heads_first(order));
            check(gpu, &case().heads_first(order).documents(&[30, 40]).sinks(1.0));
        }
    }
}
