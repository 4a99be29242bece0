//! Attention against the f64 oracle on the numbers that the kernel was given.

use half::bf16;

use super::*;
use crate::cpu::gemm::Tier;
use crate::cpu::test_support::{Random, assert_close_each, for_thread_counts, poisoned, to_f64};
use crate::ops::attention::oracle;

struct Case<E> {
    shape: AttentionShape,
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    dout: Vec<E>,
}

/// What forward and backward write.
#[derive(Debug, PartialEq)]
struct Results<E> {
    out: Vec<E>,
    lse: Vec<f32>,
    dq: Vec<E>,
    dk: Vec<E>,
    dv: Vec<E>,
}

impl<E: Element> Case<E> {
    fn random(shape: AttentionShape) -> Self {
        let mut random = Random::new((shape.seq * 101 + shape.head_dim) as u64);
        Self {
            shape,
            q: random.normals(shape.query_len()),
            k: random.normals(shape.key_len()),
            v: random.normals(shape.key_len()),
            dout: random.normals(shape.query_len()),
        }
    }

    fn run(&self, tier: Tier, workspace_threads: usize) -> Results<E> {
        let Self { shape, q, k, v, dout } = self;
        let mut results = Results {
            out: poisoned(q.len()),
            lse: poisoned(shape.lse_len()),
            dq: poisoned(q.len()),
            dk: poisoned(k.len()),
            dv: poisoned(k.len()),
        };
        let Results { out, lse, dq, dk, dv } = &mut results;
        let bytes = forward_workspace_bytes::<E>(shape, workspace_threads);
        let mut workspace = vec![0xff; bytes];
        attention_forward_on(tier, shape, q, k, v, out, lse, &mut workspace).unwrap();
        let bytes = backward_workspace_bytes::<E>(shape, workspace_threads);
        let mut workspace = vec![0xff; bytes];
        attention_backward_on(tier, shape, dout, q, k, v, out, lse, dq, dk, dv, &mut workspace)
            .unwrap();
        results
    }
}

fn tiers() -> impl Iterator<Item = Tier> {
    Tier::ALL.into_iter().filter(|tier| tier.is_available())
}

fn norm_of_products(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

/// What each result may be off by, absolutely.
///
/// Sources, with `u` the rounding unit of `E` (zero for F32 storage, where nothing is rounded) and
/// `e = 2^-24`:
/// - a score errs by `s = (head_dim + 2) e |scale| sum |q| |k|` and a few units of its own size
///   and of lse's; a probability then errs by `2 s` and 8 units (the exponential, the running
///   sums and their rescaling) relative to itself, and by `u` where it is rounded;
/// - dp errs by `(head_dim + 2) e sum |dout| |v|`; delta by the rounding of out,
///   `u sum |dout| |out|`, and out's own error;
/// - ds errs by `|scale| p` times the errors of dp and delta, plus the errors of p on it, plus
///   `u |ds|` for its rounding;
/// - each product passes on these errors times its other operand, and adds `(terms + 2) e` of the
///   size of its terms, which `sums` stands for.
struct Allowed {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn allowed<E: Element>(case: &Case<E>, shape: &oracle::Shape) -> Allowed {
    let u = if E::NAME == "bf16" { f64::from(E::UNIT_ROUNDOFF) } else { 0.0 };
    let e = 2f64.powi(-24);
    let width = shape.head_dim;
    let (q, k, v) = (to_f64(&case.q), to_f64(&case.k), to_f64(&case.v));
    let dout = to_f64(&case.dout);
    let forward = oracle::forward(shape, &q, &k, &v);
    let sums = (shape.seq * shape.heads / shape.kv_heads + 2) as f64 * e;

    let mut allowed = Allowed {
        out: vec![0.0; q.len()],
        lse: vec![],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; k.len()],
    };
    for row @ (batch, head, token) in shape.rows() {
        let (p, lse) = oracle::probabilities(shape, &q, &k, row);
        let at = shape.query(batch, token, head);
        let (query, dout) = (&q[at..][..width], &dout[at..][..width]);
        let out = &forward.out[at..][..width];
        let keys: Vec<usize> = (0..p.len()).map(|key| shape.key(batch, key, head)).collect();

        let score_size = |key: usize| norm_of_products(query, &k[key..][..width]);
        let greatest_size = keys.iter().map(|&key| score_size(key)).fold(0.0, f64::max);
        let score_error = ((width + 2) as f64 * shape.scale.abs() * greatest_size
            + 4.0 * (shape.scale.abs() * greatest_size).max(lse.abs()))
            * e;
        let p_relative = 2.0 * score_error + 8.0 * e;
        allowed.lse.push(score_error + 8.0 * e + 2.0 * e * lse.abs());

        let value_size =
            |d: usize| -> f64 { keys.iter().zip(&p).map(|(&key, p)| p * v[key + d].abs()).sum() };
        let mut delta_error = 0.0;
        let mut delta = 0.0;
        for d in 0..width {
            let size = value_size(d);
            let error = (2.0 * p_relative + u + sums) * size + (u + e) * out[d].abs();
            allowed.out[at + d] = error;
            delta_error +=
                dout[d].abs() * error + (width + 2) as f64 * e * (dout[d] * out[d]).abs();
            delta += dout[d] * out[d];
        }
        for (&key, &p) in keys.iter().zip(&p) {
            let value = &v[key..][..width];
            let dp: f64 = dout.iter().zip(value).map(|(a, b)| a * b).sum();
            let dp_error = (width + 2) as f64 * e * norm_of_products(dout, value);
            let ds = shape.scale * p * (dp - delta);
            let ds_error = shape.scale.abs() * p * (dp_error + delta_error)
                + (p_relative + 4.0 * e + u) * ds.abs();
            let p_error = (p_relative + u) * p;
            for d in 0..width {
                allowed.dv[key + d] += (p_error + sums * p) * dout[d].abs();
                allowed.dk[key + d] += (ds_error + sums * ds.abs()) * query[d].abs();
                allowed.dq[at + d] += (ds_error + sums * ds.abs()) * k[key + d].abs();
            }
        }
    }
    allowed
}

fn check<E: Element>(shape: AttentionShape) {
    let case = Case::<E>::random(shape);
    let AttentionShape { batch, seq, heads, kv_heads, head_dim, scale, causal } = shape;
    let scale = f64::from(scale);
    let oracle_shape = oracle::Shape { batch, seq, heads, kv_heads, head_dim, scale, causal };
    let (q, k, v) = (to_f64(&case.q), to_f64(&case.k), to_f64(&case.v));
    let forward = oracle::forward(&oracle_shape, &q, &k, &v);
    let backward = oracle::backward(&oracle_shape, &to_f64(&case.dout), &q, &k, &v);
    let allowed = allowed(&case, &oracle_shape);
    // The gradients' last rounding, to E.
    let relative = f64::from(E::UNIT_ROUNDOFF);
    for tier in tiers() {
        let got = case.run(tier, 2);
        let name = |tensor: &str| format!("{tensor} of {shape:?} {} on {tier:?}", E::NAME);
        assert_close_each(&name("out"), &got.out, &forward.out, 0.0, &allowed.out);
        assert_close_each(&name("lse"), &got.lse, &forward.lse, 0.0, &allowed.lse);
        assert_close_each(&name("dq"), &got.dq, &backward.dq, relative, &allowed.dq);
        assert_close_each(&name("dk"), &got.dk, &backward.dk, relative, &allowed.dk);
        assert_close_each(&name("dv"), &got.dv, &backward.dv, relative, &allowed.dv);
    }
}

fn shape(
    (batch, seq): (usize, usize),
    (heads, kv_heads, head_dim): (usize, usize, usize),
    scale: f32,
    causal: bool,
) -> AttentionShape {
    AttentionShape { batch, seq, heads, kv_heads, head_dim, scale, causal }
}

#[test]
fn agrees_with_the_oracle() {
    for shape in [
        shape((1, 1), (1, 1, 1), 1.0, true),
        shape((2, 3), (2, 1, 4), 0.5, true),
        shape((1, 17), (4, 2, 31), 0.18, true),
        shape((2, 33), (3, 3, 33), 0.17, false),
        // One tile exactly, one key more, one less.
        shape((1, 128), (2, 1, 64), 0.125, true),
        shape((1, 129), (2, 2, 16), 0.25, true),
        shape((1, 127), (2, 1, 16), 0.25, false),
        // Several tiles, with the mask through the middle of some.
        shape((1, 300), (2, 1, 32), 0.18, true),
        shape((1, 260), (1, 1, 8), 0.35, false),
        // Softmax turned around, and sharp.
        shape((1, 40), (2, 1, 16), -0.25, true),
        shape((1, 150), (1, 1, 16), 3.0, true),
        shape((1, 9), (1, 1, 8), 0.0, true),
    ] {
        check::<f32>(shape);
        check::<bf16>(shape);
    }
}

#[test]
fn nothing_to_do() {
    for (tokens, head_dim) in [((0, 4), 8), ((2, 0), 8)] {
        let case = Case::<bf16>::random(shape(tokens, (2, 1, head_dim), 1.0, true));
        for tier in tiers() {
            assert!(case.run(tier, 1).out.is_empty());
        }
    }
}

/// Scores of +-1e4, which overflow an exponential that is not taken from the greatest.
#[test]
fn large_scores_do_not_overflow() {
    let shape = shape((1, 200), (1, 1, 16), 100.0, true);
    let case = Case::<f32>::random(shape);
    for tier in tiers() {
        let got = case.run(tier, 1);
        for values in [&got.out, &got.lse, &got.dq, &got.dk, &got.dv] {
            assert!(values.iter().all(|value| value.is_finite()), "{tier:?}");
        }
    }
}

#[test]
fn non_finite_inputs_show() {
    let shape = shape((1, 140), (1, 1, 16), 0.25, true);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::<bf16>::random(shape);
        // A key in the second tile: the queries before it do not see it.
        case.k[130 * 16] = bf16::from_f32(bad);
        for tier in tiers() {
            let out = case.run(tier, 1).out;
            assert!(out[..130 * 16].iter().all(|value| value.is_finite()), "{tier:?}");
            if bad.is_nan() {
                assert!(out[130 * 16..].iter().all(|value| value.is_nan()), "{tier:?}");
            }
        }
    }
}

/// Neither the pool's threads nor the slots of the workspace change a bit.
#[test]
fn threads_do_not_change_a_bit() {
    let shape = shape((2, 150), (4, 2, 32), 0.2, true);
    for tier in tiers() {
        let case = Case::<bf16>::random(shape);
        for_thread_counts(|| case.run(tier, rayon::current_num_threads()));
        assert_eq!(case.run(tier, 1), case.run(tier, 100), "{tier:?}");
        let case = Case::<f32>::random(shape);
        for_thread_counts(|| case.run(tier, 2));
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let good = shape((1, 4), (2, 1, 8), 1.0, true);
    let run = |shape: AttentionShape, q_len: usize, bytes: usize| {
        let (q, k) = (vec![0.0f32; q_len], vec![0.0f32; 32]);
        let (mut out, mut lse) = (vec![0.0f32; 64], vec![0.0f32; 8]);
        let workspace = &mut vec![0; bytes];
        attention_forward(&shape, &q, &k, &k, &mut out, &mut lse, workspace)
            .unwrap_err()
            .to_string()
    };
    let bytes = forward_workspace_bytes::<f32>(&good, 1);
    for (message, expected) in [
        (run(AttentionShape { kv_heads: 0, ..good }, 64, bytes), "got 2 and 0"),
        (run(AttentionShape { heads: 3, kv_heads: 2, ..good }, 64, bytes), "got 3 and 2"),
        (run(good, 63, bytes), "tensor `q`: expected 64 elements, got 63"),
        (run(good, 64, 100), "workspace: expected at least"),
    ] {
        assert!(message.contains(expected), "{message}");
    }
}
