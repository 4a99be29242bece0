//! Our kernels of gradients on small inputs: the emulator has to give a GPU's bits.

use deepwell_ir::ops::{Attention, AttentionBackward, AttentionHeads};
use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::layer_norm::oracle as layer_norm;
use deepwell_kernels::ops::rms_norm::oracle as rms_norm;

use super::bench::Bench;
use super::kernels::Recorder;
use crate::harness::{HostTensor, RunOptions, uniform};

const EPS: f64 = 1e-5;

/// Rows and columns. Norms add over rows in as many CTAs as there are SMs: no more rows than four
/// of them take, which is what an emulated device has. Rows of one warp, of four, and those that
/// are taken element by element.
const NORMS: [(usize, usize); 3] = [(61, 768), (7, 4096), (4, 33)];

/// Tokens of a sequence, width of a head, whether causal: tiles of queries and keys that are whole
/// and not, each way to cut them.
const HEADS: [(usize, usize, bool); 4] =
    [(133, 64, true), (70, 128, false), (65, 32, true), (40, 16, false)];

fn bf16(shape: [usize; 2], seed: u64, scale: f32) -> HostTensor {
    HostTensor::bf16(&shape, &uniform(shape[0] * shape[1], seed, scale))
}

/// Statistics of rows.
fn of_rows(values: &[f64]) -> HostTensor {
    let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
    HostTensor::f32(&[values.len()], &values)
}

/// Gradients of attention, from what the device's own forward writes.
fn attention(recorder: &mut Recorder) {
    for (seq, head_dim, causal) in HEADS {
        let (heads, kv_heads) = (2, 1);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let heads_of = AttentionHeads {
            heads,
            kv_heads,
            head_dim,
            scale,
            causal,
            ..AttentionHeads::default()
        };
        let (queries, keys) = ([seq, heads * head_dim], [seq, kv_heads * head_dim]);
        let [q, k, v] =
            [(queries, 1), (keys, 2), (keys, 3)].map(|(shape, seed)| bf16(shape, seed, 2.0));
        let by = |kernel| RunOptions { seq, kernel: Some(kernel), ..RunOptions::default() };
        let empty = [
            HostTensor::output(DType::Bf16, &queries),
            HostTensor::output(DType::F32, &[1, heads, seq]),
        ];
        let forward = Attention { heads: heads_of.clone() };
        let given = [q.clone(), k.clone(), v.clone()];
        let mut written = recorder.run(forward, &given, &empty, by("cuda_attention"));
        let mut given = vec![bf16(queries, 4, 1.0), q, k, v];
        given.append(&mut written);
        let empty = [queries, keys, keys].map(|shape| HostTensor::output(DType::Bf16, &shape));
        let name = format!("attention_backward {seq} {head_dim} causal={causal}");
        let op = AttentionBackward { heads: heads_of };
        recorder.record(&name, op, (&given, &empty), by("cuda_attention_backward"));
    }
}

fn norms(recorder: &mut Recorder) {
    for (rows, columns) in NORMS {
        let matrix = |seed, scale| bf16([rows, columns], seed, scale);
        let (dy, x, dresidual) = (matrix(1, 1.0), matrix(2, 3.0), matrix(3, 1.0));
        let weight = HostTensor::bf16(&[columns], &uniform(columns, 4, 2.0));
        let vector = |seed| HostTensor::f32(&[columns], &uniform(columns, seed, 1.0));
        let dx = HostTensor::output(DType::Bf16, &[rows, columns]);
        let rms = rms_norm::forward(&x.to_f64(), &weight.to_f64(), EPS);
        let layer = layer_norm::forward(&x.to_f64(), &weight.to_f64(), &vec![0.0; columns], EPS);
        for more in [false, true] {
            let name = |norm: &str| format!("{norm} {rows}x{columns} residual and added: {more}");
            let options = RunOptions { accumulate: more, ..RunOptions::default() };
            let residual = more.then(|| dresidual.clone());

            let mut given = vec![dy.clone(), x.clone(), weight.clone(), of_rows(&rms.rstd)];
            given.extend(residual.clone());
            let empty = [dx.clone(), vector(5)];
            let op = ops::RmsNormBackward { residual: more };
            recorder.record(&name("rms_norm_backward"), op, (&given, &empty), options);

            let (mean, rstd) = (of_rows(&layer.mean), of_rows(&layer.rstd));
            let mut given = vec![dy.clone(), x.clone(), weight.clone(), mean, rstd];
            given.extend(residual);
            let empty = [dx.clone(), vector(5), vector(6)];
            let op = ops::LayerNormBackward { residual: more };
            recorder.record(&name("layer_norm_backward"), op, (&given, &empty), options);
        }
    }
}

trial!(kernels_of_gradients);
fn kernels_of_gradients() {
    let bench = Bench::open();
    let mut recorder = Recorder::new("gradients");
    attention(&mut recorder);
    norms(&mut recorder);
    recorder.finish(&bench);
}
