//! `attention_backward.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::AttentionBackward;
use deepwell_kernels::ops::attention::oracle::{
    RowGradient, backward, backward_of_rows, forward, probabilities,
};
use rayon::prelude::*;

use crate::attention::{
    Case, Data, EMULATED_WORK, HALF_ULP, SLACK, cases, document_cases, extended_cases,
    extended_heads, heads,
};
use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, RunOptions};

/// How far dq, dk and dv may be from exact when p, ds and out have each been rounded to BF16 and
/// `dout`, `q`, `k`, `v` are exact; final roundings not counted.
pub(crate) fn backward_bounds(case: &Case, out: &[f64], inputs: [&[f64]; 5]) -> [Vec<f64>; 4] {
    let [_, q, k, _, sinks] = inputs;
    let rows: Vec<_> = case.shape.rows().collect();
    let rows = rows.par_iter().map(|&row| {
        let (p, lse) = probabilities(&case.shape, q, k, sinks, row);
        (row, p, lse)
    });
    backward_bounds_of(case, out, inputs, rows)
}

/// [`backward_bounds`] of rows in their order, with the probabilities of the first keys and lse.
pub(crate) fn backward_bounds_of(
    case: &Case,
    out: &[f64],
    inputs: [&[f64]; 5],
    rows: impl IndexedParallelIterator<Item = ((usize, usize, usize), Vec<f64>, f64)>,
) -> [Vec<f64>; 4] {
    let [dout, q, k, v, sinks] = inputs;
    let (shape, values) = (&case.shape, case.shape.value_dim());
    let of_row = |((batch, head, token), p, lse): ((usize, usize, usize), Vec<f64>, f64)| {
        let out_at = shape.out(batch, token, head);
        let dout = &dout[out_at..][..values];
        // delta is summed from an output that was rounded.
        let delta: f64 = (0..values).map(|d| dout[d] * out[out_at + d]).sum();
        let delta_error: f64 =
            (0..values).map(|d| HALF_ULP * (dout[d] * out[out_at + d]).abs()).sum();
        let of_sink = sinks
            .get(head)
            .map_or(0.0, |sink| (sink - lse).exp() * (delta_error + 2f64.powi(-13) * delta.abs()));
        // FP32 holds p to 2^-13 as long as scores stay below 2^10.
        let relative = HALF_ULP + 2f64.powi(-13);
        let error = |(index, p): (usize, &f64)| {
            let value = shape.value(batch, index, head);
            let dp: f64 = (0..values).map(|d| dout[d] * v[value + d]).sum();
            shape.scale * p * (relative * (dp - delta).abs() + delta_error)
        };
        let dscores = p.iter().enumerate().map(error).collect();
        let weights = p.iter().map(|p| relative * p).collect();
        (RowGradient { weights, dscores }, (head, of_sink))
    };
    let (rows, of_sinks): (Vec<RowGradient>, Vec<(usize, f64)>) = rows.map(of_row).unzip();
    let mut dsinks = vec![0.0; sinks.len()];
    if !sinks.is_empty() {
        of_sinks.into_iter().for_each(|(head, of_sink)| dsinks[head] += of_sink);
    }
    // Errors add up as the gradients do, whatever the signs.
    let sizes = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let bounds = backward_of_rows(shape, &sizes(dout), &sizes(q), &sizes(k), &rows);
    [bounds.dq, bounds.dk, bounds.dv, dsinks]
}

pub(crate) fn check_backward(gpu: &mut Gpu, case: &Case) {
    check_backward_with(gpu, case, RunOptions::default());
}

/// [`check_backward`] with a kernel of its own.
pub(crate) fn check_backward_with(gpu: &mut Gpu, case: &Case, options: RunOptions<'_>) {
    let [q, k, v, dout] = case.inputs();
    let [q64, k64, v64, dout64] = [&q, &k, &v, &dout].map(HostTensor::to_f64);
    let sinks = case.sink_scores();
    let sinks64: Vec<f64> = sinks.iter().map(|&x| x.into()).collect();
    let result = forward(&case.shape, &q64, &k64, &v64, &sinks64);
    let expected = backward(&case.shape, &dout64, &q64, &k64, &v64, &sinks64);
    let bounds = backward_bounds(case, &result.out, [&dout64, &q64, &k64, &v64, &sinks64]);
    let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let out = HostTensor::bf16(&case.out_shape(), &narrow(&result.out));
    let lse = HostTensor::f32(&case.lse_shape(), &narrow(&result.lse));
    let op = AttentionBackward { heads: case.heads() };
    let (first, heads) = (case.heads_first, case.shape.heads);
    let kv_heads = case.shape.kv_heads;
    let mut inputs = vec![
        case.stored(&dout, heads, first.o),
        case.stored(&q, heads, first.q),
        case.stored(&k, kv_heads, first.k),
        case.stored(&v, kv_heads, first.v),
        case.stored(&out, heads, first.o),
        lse,
    ];
    let mut outputs = [case.query_shape(), case.key_shape(), case.value_shape()]
        .map(|shape| HostTensor::output(DType::Bf16, &shape))
        .to_vec();
    let of_sinks = [case.shape.heads];
    inputs.extend(case.extra_inputs());
    if case.sinks.is_some() {
        outputs.push(HostTensor::output(DType::F32, &of_sinks));
    }
    let options = RunOptions { seq: case.shape.seq, ..options };
    let mut got = gpu.run_with(op, &inputs, &outputs, options);
    got[0] = case.loaded(&got[0], heads, first.q);
    got[1] = case.loaded(&got[1], kv_heads, first.k);
    got[2] = case.loaded(&got[2], kv_heads, first.v);
    let expected = [expected.dq, expected.dk, expected.dv, expected.dsinks];
    for (index, what) in ["dq", "dk", "dv", "dsinks"].into_iter().enumerate().take(got.len()) {
        // With one key, dp - delta cancels but for the rounding of FP32 sums.
        let bounds: Vec<f64> = bounds[index]
            .iter()
            .zip(&expected[index])
            .map(|(bound, value)| SLACK * (bound + HALF_ULP * value.abs()) + 1e-5)
            .collect();
        let name = format!("{}: {what}", case.name());
        let compared = assert_within(&name, &got[index].to_f64(), &expected[index], &bounds);
        // Narrow heads have few elements a token, and bounds that add up over all keys.
        let is_wide = case.shape.head_dim.min(case.shape.value_dim()) >= 64;
        if case.has_gradients() && is_wide && index < 3 {
            compared.must_tell();
        }
    }
}

trial!(attention_backward_of_any_size);
fn attention_backward_of_any_size() {
    let mut gpu = Gpu::open();
    for case in cases() {
        // Where one row is NaN, which gradients are depends on how keys are cut into tiles.
        if !matches!(case.data, Data::Nan) && gpu.runs(case.work(), EMULATED_WORK / 2) {
            check_backward(&mut gpu, &case);
        }
    }
}

trial!(attention_backward_with_windows_sinks_and_other_values);
fn attention_backward_with_windows_sinks_and_other_values() {
    let mut gpu = Gpu::open();
    for case in extended_cases() {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            check_backward(&mut gpu, &case);
        }
    }
}

trial!(attention_backward_within_documents);
fn attention_backward_within_documents() {
    let mut gpu = Gpu::open();
    for case in document_cases(&[16, 64, 96, 128]) {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            check_backward(&mut gpu, &case);
        }
    }
    let wide = Case::new([1, 70, 2, 1, 192], true, Data::Uniform(1.0)).values(128);
    check_backward(&mut gpu, &wide.documents(&[33, 20]));
}

emulated! {
    attention_backward on Sm100a: |gpu| {
        for case in heads().chain(extended_heads()) {
            let kernel = Some("cuda_attention_backward");
            check_backward_with(gpu, &case, RunOptions { kernel, ..RunOptions::default() });
        }
    }
}
