//! `latent_key_value.cu`: copies by their bits, and sums over heads in their order.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::latent_key_value::cpu;
use deepwell_kernels::ops::latent_key_value::oracle::{self, Shape};
use half::bf16;

use crate::compare::{EXACT, Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

const fn shape(heads: usize, plain_dim: usize, rope_dim: usize, value_dim: usize) -> Shape {
    Shape { heads, plain_dim, rope_dim, value_dim }
}

fn check(gpu: &mut Gpu, tokens: usize, shape: &Shape) {
    let what = format!("{tokens} tokens of {shape:?}");
    let Shape { heads, plain_dim, rope_dim, value_dim } = *shape;
    let op = ops::LatentKeyValue { heads, plain_dim, rope_dim, value_dim };
    let widths = [shape.source_columns(), rope_dim, shape.key_columns(), heads * value_dim];
    let tensor = |index: usize| {
        let columns = widths[index];
        HostTensor::bf16(&[tokens, columns], &uniform(tokens * columns, index as u64 + 1, 4.0))
    };
    let output = |index: usize| HostTensor::output(DType::Bf16, &[tokens, widths[index]]);

    let inputs = [tensor(0), tensor(1)];
    let got = gpu.run(op.clone(), &inputs, &[output(2), output(3)], false, 1);
    let (k, v) = oracle::forward(shape, &inputs[0].to_f64(), &inputs[1].to_f64());
    for (name, got, expected) in [("k", &got[0], k), ("v", &got[1], v)] {
        assert_close(&format!("{name} of {what}"), &got.to_f64(), &expected, EXACT);
    }

    let inputs = [tensor(2), tensor(3)];
    let op = ops::LatentKeyValueBackward { forward: op };
    let got = gpu.run(op, &inputs, &[output(0), output(1)], false, 1);
    let (dkv, dk_rope) = oracle::backward(shape, &inputs[0].to_f64(), &inputs[1].to_f64());
    assert_close(&format!("dkv of {what}"), &got[0].to_f64(), &dkv, EXACT);
    // A rounding of each partial sum, by 2^-24 of at most 4 a head, and one to BF16.
    let heads_squared = (heads * heads) as f64;
    let tolerance = Tolerance::bf16(4.0 * heads_squared * 2f64.powi(-24));
    assert_close(&format!("dk_rope of {what}"), &got[1].to_f64(), &dk_rope, tolerance);
    // Sums in the same order have the bits of the CPU.
    let [dk, dv] = [0, 1]
        .map(|index: usize| -> Vec<bf16> { bytemuck::pod_collect_to_vec(&inputs[index].bytes) });
    let mut on_cpu = [0, 1].map(|index: usize| vec![bf16::ZERO; tokens * widths[index]]);
    let [dkv, dk_rope] = &mut on_cpu;
    cpu::latent_key_value_backward(shape, &dk, &dv, dkv, dk_rope);
    for (got, expected) in got.iter().zip(&on_cpu) {
        assert_eq!(got.bytes, bytemuck::cast_slice::<_, u8>(expected), "bits of {what}");
    }
}

/// No token, one, and several; one head and many; parts of whole vectors and not; the published
/// heads of DeepSeek-V3.
fn check_hard(gpu: &mut Gpu) {
    for (tokens, shape) in [
        (0, shape(2, 8, 8, 8)),
        (1, shape(1, 1, 1, 1)),
        (1, shape(3, 8, 16, 24)),
        (5, shape(2, 4, 4, 8)),
        (31, shape(7, 3, 2, 5)),
        (33, shape(4, 32, 32, 48)),
        (2, shape(16, 128, 64, 128)),
    ] {
        check(gpu, tokens, &shape);
    }
}

/// NaN in a gradient of a shared column shows in that column of its token alone.
fn check_not_finite(gpu: &mut Gpu) {
    let (heads, width) = (3, 16);
    let op = ops::LatentKeyValue { heads, plain_dim: 8, rope_dim: 8, value_dim: 8 };
    let op = ops::LatentKeyValueBackward { forward: op };
    let mut dk = vec![1.0; 2 * heads * width];
    dk[heads * width + width + 8 + 5] = f32::NAN;
    let inputs =
        [HostTensor::bf16(&[2, heads * width], &dk), HostTensor::bf16(&[2, heads * 8], &[1.0; 48])];
    let outputs = [2 * heads * 8, 8].map(|columns| HostTensor::output(DType::Bf16, &[2, columns]));
    let got = gpu.run(op, &inputs, &outputs, false, 1);
    assert!(got[0].to_f64().iter().all(|&value| value == 1.0));
    for (index, value) in got[1].to_f64().into_iter().enumerate() {
        assert!(if index == 8 + 5 { value.is_nan() } else { value == 3.0 }, "{index}: {value}");
    }
}

trial!(keys_and_values_are_those_of_the_definition);
fn keys_and_values_are_those_of_the_definition() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    check_not_finite(&mut gpu);
    if gpu.runs(1, 0) {
        check(&mut gpu, 1000, &shape(128, 128, 64, 128));
    }
}

emulated! {
    latent_key_value on Sm90a: |gpu| {
        check_hard(gpu);
        check_not_finite(gpu);
        check(gpu, 40, &shape(4, 32, 32, 48));
        check(gpu, 20, &shape(3, 20, 12, 9));
    }
}
