//! Throughput of the element-wise CPU kernels at the default model's shapes, compared with
//! `memcpy`.
//!
//! `cargo bench -p deepwell-kernels --bench elementwise_cpu [-- FILTER]` prints, for each op, the
//! median time of a call on two threads, the minimum of bytes read and written, the bandwidth, and
//! the time of a memcpy of as many bytes on the same threads (half read, half written). Buffers are
//! warm in cache, as within a training step.
//!
//! Shapes: 1024 tokens (8 sequences of 128), hidden 256, ffn 704, 4 query heads and 2 KV heads
//! of 64, vocabulary 256; AdamW and the norm over 3,082,496 parameters.

use std::hint::black_box;
use std::time::Instant;

use deepwell_kernels::cpu::element::Element;
use deepwell_kernels::ops::adamw::cpu::{AdamwTensor, StepScalars, adamw};
use deepwell_kernels::ops::add::cpu::add;
use deepwell_kernels::ops::bias_grad::cpu::{bias_add_backward, bias_add_forward};
use deepwell_kernels::ops::cast::cpu::cast;
use deepwell_kernels::ops::embedding::cpu::{embedding_backward, embedding_forward};
use deepwell_kernels::ops::gelu::cpu::{gelu_backward, gelu_forward};
use deepwell_kernels::ops::grad_norm::cpu::global_norm;
use deepwell_kernels::ops::layer_norm::cpu::{
    add_layer_norm_forward, layer_norm_backward, layer_norm_backward_workspace_bytes,
    layer_norm_forward,
};
use deepwell_kernels::ops::rms_norm::cpu::{
    add_rms_norm_forward, rms_norm_backward, rms_norm_backward_workspace_bytes, rms_norm_forward,
};
use deepwell_kernels::ops::rope::cpu::{
    RopeShape, rope_backward, rope_forward, rope_forward_in_place, rope_tables,
};
use deepwell_kernels::ops::swiglu::cpu::{swiglu_backward, swiglu_forward};
use half::bf16;
use rayon::prelude::*;

const TOKENS: usize = 1024;
const SEQ: usize = 128;
const HIDDEN: usize = 256;
const FFN: usize = 704;
const VOCABULARY: usize = 256;
const PARAMETERS: usize = 3_082_496;
const THREADS: usize = 2;

/// Numbers between -1 and 1 with a period of 1021.
fn values<E: Element>(len: usize) -> Vec<E> {
    let wave = |index: usize| ((index * 2_654_435_761 % 1021) as f32 - 510.0) / 510.0;
    (0..len).map(|index| E::from_f32(wave(index))).collect()
}

/// Median seconds of a call, over at least 30 calls and 0.2 seconds.
fn median_time_s(mut work: impl FnMut()) -> f64 {
    for _ in 0..5 {
        work();
    }
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 30 || start.elapsed().as_secs_f64() < 0.2 {
        let before = Instant::now();
        work();
        times.push(before.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Seconds of a memcpy that moves `bytes` in total, on [`THREADS`] threads.
fn copy_time_s(bytes: usize) -> f64 {
    let half = bytes / 2;
    let source = vec![1u8; half];
    let mut target = vec![0u8; half];
    let part = half.div_ceil(THREADS).max(1);
    median_time_s(|| {
        target.par_chunks_mut(part).zip(source.par_chunks(part)).for_each(|(target, source)| {
            target.copy_from_slice(source);
        });
        black_box(&mut target);
    })
}

fn report(filter: Option<&str>, name: &str, bytes: usize, work: impl FnMut()) {
    if filter.is_some_and(|filter| !name.contains(filter)) {
        return;
    }
    let time_s = median_time_s(work);
    let copy_s = copy_time_s(bytes);
    println!(
        "{name:<34} {:>9.1} us {:>9.3} MB {:>7.1} GB/s | memcpy {:>8.1} us {:>6.2} of its rate",
        time_s * 1e6,
        bytes as f64 / 1e6,
        bytes as f64 / time_s / 1e9,
        copy_s * 1e6,
        copy_s / time_s,
    );
}

fn main() {
    // Cargo passes `--bench`; any other argument is the filter.
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build();
    match pool {
        Ok(pool) => pool.install(|| run(filter.as_deref())),
        Err(error) => eprintln!("cannot start {THREADS} threads: {error}"),
    }
}

fn run(filter: Option<&str>) {
    println!("{THREADS} threads; bytes are counted once per tensor read or written");
    norms(filter);
    layer_norms(filter);
    positions_and_tokens(filter);
    elementwise(filter);
    optimizer(filter);
}

fn norms(filter: Option<&str>) {
    let n = TOKENS * HIDDEN;
    let (x, delta, dy): (Vec<bf16>, Vec<bf16>, Vec<bf16>) = (values(n), values(n), values(n));
    let weight: Vec<bf16> = values(HIDDEN);
    let mut rstd = vec![0.0f32; TOKENS];
    let (mut y, mut sum) = (values::<bf16>(n), values::<bf16>(n));
    report(filter, "rms_norm_forward bf16", n * 4, || {
        rms_norm_forward(&x, &weight, 1e-5, &mut y, &mut rstd);
    });
    report(filter, "add_rms_norm_forward bf16", n * 8, || {
        add_rms_norm_forward(&x, &delta, &weight, 1e-5, &mut sum, &mut y, &mut rstd);
    });
    let mut dweight = vec![0.0f32; HIDDEN];
    let mut workspace = vec![0.0; rms_norm_backward_workspace_bytes(TOKENS, HIDDEN) / 4];
    for (name, residual, bytes) in [
        ("rms_norm_backward bf16", None, n * 6),
        ("rms_norm_backward bf16 + residual", Some(&delta[..]), n * 8),
    ] {
        report(filter, name, bytes, || {
            rms_norm_backward(
                &dy,
                &x,
                &weight,
                &rstd,
                residual,
                &mut y,
                &mut dweight,
                false,
                &mut workspace,
            );
        });
    }
}

fn layer_norms(filter: Option<&str>) {
    let n = TOKENS * HIDDEN;
    let (x, delta, dy): (Vec<bf16>, Vec<bf16>, Vec<bf16>) = (values(n), values(n), values(n));
    let (weight, bias): (Vec<bf16>, Vec<bf16>) = (values(HIDDEN), values(HIDDEN));
    let (mut mean, mut rstd) = (vec![0.0f32; TOKENS], vec![0.0f32; TOKENS]);
    let (mut y, mut sum) = (values::<bf16>(n), values::<bf16>(n));
    report(filter, "layer_norm_forward bf16", n * 4, || {
        layer_norm_forward(&x, &weight, &bias, 1e-5, &mut y, &mut mean, &mut rstd);
    });
    report(filter, "add_layer_norm_forward bf16", n * 8, || {
        add_layer_norm_forward(
            &x, &delta, &weight, &bias, 1e-5, &mut sum, &mut y, &mut mean, &mut rstd,
        );
    });
    let (mut dweight, mut dbias) = (vec![0.0f32; HIDDEN], vec![0.0f32; HIDDEN]);
    let mut workspace = vec![0.0; layer_norm_backward_workspace_bytes(TOKENS, HIDDEN) / 4];
    for (name, residual, bytes) in [
        ("layer_norm_backward bf16", None, n * 6),
        ("layer_norm_backward bf16 + residual", Some(&delta[..]), n * 8),
    ] {
        report(filter, name, bytes, || {
            layer_norm_backward(
                &dy,
                &x,
                &weight,
                &mean,
                &rstd,
                residual,
                &mut y,
                &mut dweight,
                &mut dbias,
                false,
                &mut workspace,
            );
        });
    }
}

fn positions_and_tokens(filter: Option<&str>) {
    let n = TOKENS * HIDDEN;
    let x: Vec<bf16> = values(n);
    let mut y: Vec<bf16> = values(n);
    let shape = RopeShape { heads: 4, head_dim: 64, seq: SEQ, ..RopeShape::default() };
    let inv_freq: Vec<f32> = (0..32).map(|i| 10_000f32.powf(-2.0 * i as f32 / 64.0)).collect();
    let (mut cos, mut sin) = (vec![0.0; SEQ * 32], vec![0.0; SEQ * 32]);
    rope_tables(&inv_freq, SEQ, &mut cos, &mut sin);
    report(filter, "rope_forward bf16", n * 4, || rope_forward(&x, shape, &cos, &sin, &mut y));
    report(filter, "rope_forward_in_place bf16", n * 4, || {
        rope_forward_in_place(&mut y, shape, &cos, &sin);
    });
    report(filter, "rope_backward bf16", n * 4, || rope_backward(&x, shape, &cos, &sin, &mut y));

    let tokens: Vec<i32> = (0..TOKENS).map(|i| ((i * i + 17 * i) % 97 + 30) as i32).collect();
    let table: Vec<bf16> = values(VOCABULARY * HIDDEN);
    let mut dtable = vec![0.0f32; VOCABULARY * HIDDEN];
    report(filter, "embedding_forward bf16", n * 4, || {
        embedding_forward(&tokens, &table, VOCABULARY, HIDDEN, &mut y).expect("tokens in range");
    });
    let bytes = n * 2 + VOCABULARY * HIDDEN * 4;
    report(filter, "embedding_backward bf16", bytes, || {
        embedding_backward(&tokens, &x, VOCABULARY, HIDDEN, None, &mut dtable, false)
            .expect("tokens in range");
    });
}

fn elementwise(filter: Option<&str>) {
    let n = TOKENS * FFN;
    let (gate, up, dout): (Vec<bf16>, Vec<bf16>, Vec<bf16>) = (values(n), values(n), values(n));
    let (mut out, mut dup): (Vec<bf16>, Vec<bf16>) = (values(n), values(n));
    report(filter, "swiglu_forward bf16", n * 6, || swiglu_forward(&gate, &up, &mut out));
    report(filter, "swiglu_backward bf16", n * 10, || {
        swiglu_backward(&dout, &gate, &up, &mut out, &mut dup);
    });
    for (form, tanh) in [("", false), (", tanh", true)] {
        report(filter, &format!("gelu_forward bf16{form}"), n * 4, || {
            gelu_forward(&gate, tanh, &mut out);
        });
        report(filter, &format!("gelu_backward bf16{form}"), n * 6, || {
            gelu_backward(&dout, &gate, tanh, &mut out);
        });
    }
    let n = TOKENS * HIDDEN;
    report(filter, "add bf16", n * 6, || add(&gate[..n], &up[..n], &mut out[..n]));
    let bias: Vec<bf16> = values(HIDDEN);
    report(filter, "bias_add_forward bf16", n * 4, || {
        bias_add_forward(&gate[..n], &bias, &mut out[..n]);
    });
    let mut dbias = vec![0.0f32; HIDDEN];
    let mut workspace = vec![0.0f32; TOKENS.div_ceil(64) * HIDDEN];
    report(filter, "bias_add_backward bf16", n * 2, || {
        bias_add_backward(&gate[..n], &mut dbias, false, &mut workspace);
    });
}

fn optimizer(filter: Option<&str>) {
    let mut param: Vec<f32> = values(PARAMETERS);
    let mut narrow: Vec<bf16> = values(PARAMETERS);
    report(filter, "cast f32 -> bf16, all weights", PARAMETERS * 6, || cast(&param, &mut narrow));
    let mut wide: Vec<f32> = values(PARAMETERS);
    report(filter, "cast bf16 -> f32, all weights", PARAMETERS * 6, || cast(&narrow, &mut wide));

    let grad: Vec<f32> = values(PARAMETERS);
    report(filter, "global_norm f32, all gradients", PARAMETERS * 4, || {
        black_box(global_norm(&[&grad]));
    });
    let (mut m, mut v) = (vec![0.0f32; PARAMETERS], vec![0.0f32; PARAMETERS]);
    let mut step = 0;
    report(filter, "adamw f32, all weights", PARAMETERS * 28, || {
        step += 1;
        let scalars = StepScalars {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            max_grad_norm: 1.0,
            step,
            grad_norm: 2.0,
        };
        let outcome = adamw(
            &mut [AdamwTensor {
                param: &mut param,
                grad: &grad,
                m: &mut m,
                v: &mut v,
                weight_decay: 0.1,
            }],
            &scalars,
        );
        assert!(!outcome.skipped);
    });
}
