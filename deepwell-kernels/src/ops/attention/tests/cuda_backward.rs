//! `attention_backward.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::AttentionBackward;
use deepwell_kernels::ops::attention::oracle::{backward, forward, probabilities};

use crate::attention::{
    Case, Data, EMULATED_WORK, HALF_ULP, SLACK, cases, document_cases, extended_cases,
    extended_heads, heads,
};
use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, RunOptions};

/// How far dq, dk and dv may be from exact when p, ds and out have each been rounded to BF16 and
/// `dout`, `q`, `k`, `v` are exact; final roundings not counted.
fn backward_bounds(case: &Case, out: &[f64], inputs: [&[f64]; 5]) -> [Vec<f64>; 4] {
    let [_, q, k, _, sinks] = inputs;
    let rows = case.shape.rows().map(|row| {
        let (p, lse) = probabilities(&case.shape, q, k, sinks, row);
        (row, p, lse)
    });
    backward_bounds_of(case, out, inputs, rows)
}

/// [`backward_bounds`] of rows with these probabilities of the first keys, and lse.
pub(crate) fn backward_bounds_of(
    case: &Case,
    out: &[f64],
    inputs: [&[f64]; 5],
    rows: impl Iterator<Item = ((usize, usize, usize), Vec<f64>, f64)>,
) -> [Vec<f64>; 4] {
    let [dout, q, k, v, sinks] = inputs;
    let (shape, width) = (&case.shape, case.shape.head_dim);
    let values = shape.value_dim();
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let mut dsinks = vec![0.0; sinks.len()];
    for ((batch, head, token), p, lse) in rows {
        let query = shape.query(batch, token, head);
        let out_at = shape.out(batch, token, head);
        let dout = &dout[out_at..][..values];
        // delta is summed from an output that was rounded.
        let delta: f64 = (0..values).map(|d| dout[d] * out[out_at + d]).sum();
        let delta_error: f64 =
            (0..values).map(|d| HALF_ULP * (dout[d] * out[out_at + d]).abs()).sum();
        if let Some(sink) = sinks.get(head) {
            dsinks[head] += (sink - lse).exp() * (delta_error + 2f64.powi(-13) * delta.abs());
        }
        for (index, p) in p.iter().enumerate() {
            let key = shape.key(batch, index, head);
            let value = shape.value(batch, index, head);
            let dp: f64 = (0..values).map(|d| dout[d] * v[value + d]).sum();
            // FP32 holds p to 2^-13 as long as scores stay below 2^10.
            let relative = HALF_ULP + 2f64.powi(-13);
            let error = shape.scale * p * (relative * (dp - delta).abs() + delta_error);
            for d in 0..width {
                dq[query + d] += error * k[key + d].abs();
                dk[key + d] += error * q[query + d].abs();
            }
            for d in 0..values {
                dv[value + d] += relative * p * dout[d].abs();
            }
        }
    }
    [dq, dk, dv, dsinks]
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
    let mut inputs = vec![dout, q, k, v, out, lse];
    let mut outputs = [case.query_shape(), case.key_shape(), case.value_shape()]
        .map(|shape| HostTensor::output(DType::Bf16, &shape))
        .to_vec();
    let of_sinks = [case.shape.heads];
    inputs.extend(case.extra_inputs());
    if case.sinks.is_some() {
        outputs.push(HostTensor::output(DType::F32, &of_sinks));
    }
    let options = RunOptions { seq: case.shape.seq, ..options };
    let got = gpu.run_with(op, &inputs, &outputs, options);
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
        heads().chain(extended_heads()).for_each(|case| check_backward(gpu, &case));
    }
}
