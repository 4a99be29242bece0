//! Attention against the f64 oracle on the numbers that the kernel was given.

use half::bf16;

use super::*;
use crate::ops::attention::oracle;
use crate::runtime::cpu::gemm::{Tier, best_tier};
use crate::runtime::cpu::test_support::{
    Random, assert_close_each, for_thread_counts, poisoned, to_f64,
};

struct Case<E> {
    shape: AttentionShape,
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    dout: Vec<E>,
    sinks: Option<Vec<f32>>,
    documents: &'static [usize],
}

/// What forward and backward write.
#[derive(Debug, PartialEq)]
struct Results<E> {
    out: Vec<E>,
    lse: Vec<f32>,
    dq: Vec<E>,
    dk: Vec<E>,
    dv: Vec<E>,
    dsinks: Vec<f32>,
}

impl<E: Element> Case<E> {
    fn with_sinks(shape: AttentionShape) -> Self {
        let sinks = Random::new(shape.seq as u64).normals(shape.heads);
        Self { sinks: Some(sinks), ..Self::random(shape) }
    }

    /// Documents of these lengths, see [`oracle::Shape::documents`].
    fn cut(self, documents: &'static [usize]) -> Self {
        Self { documents, ..self }
    }

    fn oracle_shape(&self) -> oracle::Shape {
        let AttentionShape { batch, seq, heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        oracle::Shape {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            value_dim: Some(value_dim),
            scale: f64::from(self.shape.scale),
            causal: self.shape.causal,
            window: self.shape.window,
            documents: self.documents,
        }
    }

    fn random(shape: AttentionShape) -> Self {
        let mut random = Random::new((shape.seq * 101 + shape.head_dim) as u64);
        Self {
            shape,
            q: random.normals(shape.query_len()),
            k: random.normals(shape.key_len()),
            v: random.normals(shape.value_len()),
            dout: random.normals(shape.out_len()),
            sinks: None,
            documents: &[],
        }
    }

    fn sinks_f64(&self) -> Vec<f64> {
        to_f64(self.sinks.as_deref().unwrap_or_default())
    }

    fn run(&self, tier: Tier, workspace_threads: usize) -> Results<E> {
        let Self { shape, q, k, v, dout, sinks, documents } = self;
        let sinks = sinks.as_deref();
        let documents = (!documents.is_empty()).then(|| self.oracle_shape().documents_of_tokens());
        let cut = documents.as_deref();
        let mut results = Results {
            out: poisoned(dout.len()),
            lse: poisoned(shape.lse_len()),
            dq: poisoned(q.len()),
            dk: poisoned(k.len()),
            dv: poisoned(v.len()),
            dsinks: poisoned(sinks.map_or(0, <[f32]>::len)),
        };
        let Results { out, lse, dq, dk, dv, dsinks } = &mut results;
        let bytes = forward_workspace_bytes::<E>(shape, workspace_threads);
        let mut workspace = vec![0xff; bytes];
        attention_forward_on(tier, shape, q, k, v, sinks, cut, out, lse, &mut workspace).unwrap();
        let bytes = backward_workspace_bytes::<E>(shape, workspace_threads);
        let mut workspace = vec![0xff; bytes];
        let memory = &mut workspace;
        attention_backward_on(tier, shape, dout, q, k, v, out, lse, cut, dq, dk, dv, memory)
            .unwrap();
        if let Some(sinks) = sinks {
            sink_gradients(shape, dout, out, lse, sinks, false, dsinks).unwrap();
            let once = dsinks.clone();
            sink_gradients(shape, dout, out, lse, sinks, true, dsinks).unwrap();
            assert!(dsinks.iter().zip(&once).all(|(twice, once)| *twice == 2.0 * once));
            dsinks.copy_from_slice(&once);
        }
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
/// - a sink's gradient errs, in each row, by its weight times the error of delta, and by the
///   weight's own error, which is that of lse;
/// - each product passes on these errors times its other operand, and adds `(terms + 2) e` of the
///   size of its terms, which `sums` stands for.
struct Allowed {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dsinks: Vec<f64>,
}

fn allowed<E: Element>(case: &Case<E>, shape: &oracle::Shape) -> Allowed {
    let u = if E::NAME == "bf16" { f64::from(E::UNIT_ROUNDOFF) } else { 0.0 };
    let e = 2f64.powi(-24);
    let (width, value_width) = (shape.head_dim, shape.value_dim());
    let (q, k, v) = (to_f64(&case.q), to_f64(&case.k), to_f64(&case.v));
    let (dout, sinks) = (to_f64(&case.dout), case.sinks_f64());
    let forward = oracle::forward(shape, &q, &k, &v, &sinks);
    let sums = (shape.seq * shape.heads / shape.kv_heads + 2) as f64 * e;

    let mut allowed = Allowed {
        out: vec![0.0; dout.len()],
        lse: vec![],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
        dsinks: vec![0.0; sinks.len()],
    };
    for row @ (batch, head, token) in shape.rows() {
        let (p, lse) = oracle::probabilities(shape, &q, &k, &sinks, row);
        let at = shape.query(batch, token, head);
        let out_at = shape.out(batch, token, head);
        let (query, dout) = (&q[at..][..width], &dout[out_at..][..value_width]);
        let out = &forward.out[out_at..][..value_width];
        let keys: Vec<usize> = (0..p.len()).map(|key| shape.key(batch, key, head)).collect();
        let values: Vec<usize> = (0..p.len()).map(|key| shape.value(batch, key, head)).collect();

        let score_size = |key: usize| norm_of_products(query, &k[key..][..width]);
        let greatest_size = keys.iter().map(|&key| score_size(key)).fold(0.0, f64::max);
        let score_error = ((width + 2) as f64 * shape.scale.abs() * greatest_size
            + 4.0 * (shape.scale.abs() * greatest_size).max(lse.abs()))
            * e;
        let p_relative = 2.0 * score_error + 8.0 * e;
        allowed.lse.push(score_error + 8.0 * e + 2.0 * e * lse.abs());

        let value_size =
            |d: usize| -> f64 { values.iter().zip(&p).map(|(&at, p)| p * v[at + d].abs()).sum() };
        let mut delta_error = 0.0;
        let mut delta = 0.0;
        for d in 0..value_width {
            let size = value_size(d);
            let error = (2.0 * p_relative + u + sums) * size + (u + e) * out[d].abs();
            allowed.out[out_at + d] = error;
            delta_error +=
                dout[d].abs() * error + (value_width + 2) as f64 * e * (dout[d] * out[d]).abs();
            delta += dout[d] * out[d];
        }
        if let Some(sink) = sinks.get(head) {
            let weight = (sink - lse).exp();
            allowed.dsinks[head] += weight * (delta_error + (p_relative + sums) * delta.abs());
        }
        for ((&key, &value_at), &p) in keys.iter().zip(&values).zip(&p) {
            let value = &v[value_at..][..value_width];
            let dp: f64 = dout.iter().zip(value).map(|(a, b)| a * b).sum();
            let dp_error = (value_width + 2) as f64 * e * norm_of_products(dout, value);
            let ds = shape.scale * p * (dp - delta);
            let ds_error = shape.scale.abs() * p * (dp_error + delta_error)
                + (p_relative + 4.0 * e + u) * ds.abs();
            let p_error = (p_relative + u) * p;
            for (allowed, dout) in allowed.dv[value_at..].iter_mut().zip(dout) {
                *allowed += (p_error + sums * p) * dout.abs();
            }
            for d in 0..width {
                allowed.dk[key + d] += (ds_error + sums * ds.abs()) * query[d].abs();
                allowed.dq[at + d] += (ds_error + sums * ds.abs()) * k[key + d].abs();
            }
        }
    }
    allowed
}

fn check<E: Element>(case: &Case<E>) {
    let shape = case.shape;
    let oracle_shape = case.oracle_shape();
    let (q, k, v) = (to_f64(&case.q), to_f64(&case.k), to_f64(&case.v));
    let (dout, sinks) = (to_f64(&case.dout), case.sinks_f64());
    let forward = oracle::forward(&oracle_shape, &q, &k, &v, &sinks);
    let backward = oracle::backward(&oracle_shape, &dout, &q, &k, &v, &sinks);
    let allowed = allowed(case, &oracle_shape);
    // The gradients' last rounding, to E.
    let relative = f64::from(E::UNIT_ROUNDOFF);
    for tier in tiers() {
        let got = case.run(tier, 2);
        let cut = case.documents;
        let name = |tensor: &str| format!("{tensor} of {shape:?} {cut:?} {} on {tier:?}", E::NAME);
        assert_close_each(&name("out"), &got.out, &forward.out, 0.0, &allowed.out);
        assert_close_each(&name("lse"), &got.lse, &forward.lse, 0.0, &allowed.lse);
        assert_close_each(&name("dq"), &got.dq, &backward.dq, relative, &allowed.dq);
        assert_close_each(&name("dk"), &got.dk, &backward.dk, relative, &allowed.dk);
        assert_close_each(&name("dv"), &got.dv, &backward.dv, relative, &allowed.dv);
        let dsinks = &got.dsinks;
        assert_close_each(&name("dsinks"), dsinks, &backward.dsinks, 1e-7, &allowed.dsinks);
    }
}

fn shape(
    (batch, seq): (usize, usize),
    (heads, kv_heads, head_dim): (usize, usize, usize),
    scale: f32,
    causal: bool,
) -> AttentionShape {
    let (value_dim, window) = (head_dim, None);
    AttentionShape {
        batch,
        seq,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        scale,
        causal,
        window,
        keys: KeySource::Own,
        places: None,
        heads_first: HeadsFirst::default(),
    }
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
        check(&Case::<f32>::random(shape));
        check(&Case::<bf16>::random(shape));
    }
}

/// What a head may look at, beside all before it.
#[test]
fn windows_sinks_and_widths_of_values_agree_with_the_oracle() {
    let of = |seq| shape((2, seq), (4, 2, 16), 0.3, true);
    let window = |window, shape| AttentionShape { window: Some(window), ..shape };
    let values = |value_dim, shape| AttentionShape { value_dim, ..shape };
    for shape in [
        of(17),
        // A token alone, two, one less than all, all, more than all.
        window(1, of(17)),
        window(2, of(17)),
        window(16, of(17)),
        window(17, of(17)),
        window(100, of(17)),
        // Windows of a tile (128) and around it, and tiles that no query of another sees.
        window(127, of(300)),
        window(128, of(300)),
        window(129, of(300)),
        window(5, of(400)),
        // Values narrower and wider than keys.
        values(8, of(33)),
        values(40, of(140)),
        values(1, window(3, of(140))),
        shape((1, 150), (2, 1, 16), 0.25, false),
    ] {
        check(&Case::<f32>::random(shape));
        check(&Case::<f32>::with_sinks(shape));
        check(&Case::<bf16>::with_sinks(shape));
    }
}

/// Around tiles (128), every token alone, and tiles that lie in documents before all of another's.
#[test]
fn documents_agree_with_the_oracle() {
    let of = |seq| shape((2, seq), (4, 2, 16), 0.3, true);
    let window = |window, shape| AttentionShape { window: Some(window), ..shape };
    for (shape, documents) in [
        (of(17), &[1][..]),
        (of(17), &[5, 1, 9]),
        (of(1), &[1]),
        (of(300), &[127]),
        (of(300), &[128]),
        (of(300), &[129]),
        (of(290), &[3, 260]),
        (of(290), &[260, 3, 1, 1]),
        (window(40, of(290)), &[70, 30, 200]),
        (AttentionShape { value_dim: 40, ..of(140) }, &[2, 100]),
    ] {
        check(&Case::<f32>::random(shape).cut(documents));
        check(&Case::<f32>::with_sinks(shape).cut(documents));
        check(&Case::<bf16>::with_sinks(shape).cut(documents));
    }
}

/// A sink of minus infinity is none, one that is far above all scores leaves nothing, and a window
/// or a document of a whole sequence is none, to the bit.
#[test]
fn what_changes_nothing_changes_no_bit() {
    let plain = Case::<f32>::random(shape((1, 200), (2, 1, 16), 0.25, true));
    let windowed = Case {
        shape: AttentionShape { window: Some(200), ..plain.shape },
        ..Case::random(plain.shape)
    };
    let low = Case { sinks: Some(vec![-1e30; 2]), ..Case::random(plain.shape) };
    let high = Case { sinks: Some(vec![1e30; 2]), ..Case::<f32>::random(plain.shape) };
    for tier in tiers() {
        let expected = plain.run(tier, 1);
        assert_eq!(windowed.run(tier, 1), expected, "{tier:?}");
        let whole = Case::random(plain.shape).cut(&[200]);
        assert_eq!(whole.run(tier, 1), expected, "{tier:?}");
        let got = low.run(tier, 1);
        assert_eq!((&got.out, &got.lse), (&expected.out, &expected.lse), "{tier:?}");
        assert_eq!((&got.dq, &got.dv), (&expected.dq, &expected.dv), "{tier:?}");
        assert_eq!(got.dsinks, [0.0; 2]);
        assert!(high.run(tier, 1).out.iter().all(|value| *value == 0.0), "{tier:?}");
    }
}

/// Rows of `[batch, outer, inner, width]` as `[batch, inner, outer, width]`.
fn swapped<T: Copy>(rows: &[T], [batch, outer, inner]: [usize; 3]) -> Vec<T> {
    let width = rows.len() / (batch * outer * inner);
    let row = |b, i, o| &rows[((b * outer + o) * inner + i) * width..][..width];
    let of_batch = |b| (0..inner).flat_map(move |i| (0..outer).map(move |o| (b, i, o)));
    (0..batch).flat_map(of_batch).flat_map(|(b, i, o)| row(b, i, o).iter().copied()).collect()
}

/// Each operand by itself and all together, to the bit. Documents cover several tiles.
#[test]
fn heads_before_tokens_change_no_bit() {
    let plain = || {
        let shape = shape((2, 150), (4, 2, 16), 0.3, true);
        let shape = AttentionShape { value_dim: 24, window: Some(100), ..shape };
        Case::<bf16>::with_sinks(shape).cut(&[20, 130])
    };
    let expected = plain().run(best_tier(), 1);
    for bits in 1..16 {
        let [q, k, v, o] = [0, 1, 2, 3].map(|bit| bits >> bit & 1 == 1);
        let mut case = plain();
        let AttentionShape { batch, seq, heads, kv_heads, .. } = case.shape;
        case.shape.heads_first = HeadsFirst { q, k, v, o };
        let stored = |is_first: bool, heads: usize, rows: &[bf16]| match is_first {
            true => swapped(rows, [batch, seq, heads]),
            false => rows.to_vec(),
        };
        case.q = stored(q, heads, &case.q);
        case.k = stored(k, kv_heads, &case.k);
        case.v = stored(v, kv_heads, &case.v);
        case.dout = stored(o, heads, &case.dout);
        let got = case.run(best_tier(), 1);
        let name = format!("{:?}", case.shape.heads_first);
        assert_eq!(got.out, stored(o, heads, &expected.out), "{name}: out");
        assert_eq!(got.dq, stored(q, heads, &expected.dq), "{name}: dq");
        assert_eq!(got.dk, stored(k, kv_heads, &expected.dk), "{name}: dk");
        assert_eq!(got.dv, stored(v, kv_heads, &expected.dv), "{name}: dv");
        assert_eq!((&got.lse, &got.dsinks), (&expected.lse, &expected.dsinks), "{name}");
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
        attention_forward(&shape, &q, &k, &k, None, &mut out, &mut lse, workspace)
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
