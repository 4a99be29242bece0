//! Ranks that have a part of each sequence each, one after the other: what they find together is
//! attention over whole sequences, by the oracle in f64.

use deepwell_ir::ops::{PartPlaces, Zigzag};
use half::bf16;

use super::*;
use crate::ops::attention::oracle;
use crate::runtime::cpu::gemm::best_tier;
use crate::runtime::cpu::test_support::{Random, for_thread_counts, poisoned, to_f64};

/// Sizes of whole sequences.
#[derive(Clone, Copy)]
struct Case {
    ranks: usize,
    /// Tokens of a chunk.
    chunk: usize,
    batch: usize,
    heads: (usize, usize),
    widths: (usize, usize),
    window: Option<usize>,
    has_sinks: bool,
}

impl Case {
    fn seq(&self) -> usize {
        2 * self.ranks * self.chunk
    }

    fn part(&self, place: usize) -> Zigzag {
        Zigzag { place, ranks: self.ranks }
    }

    /// The shape of a rank's part; `places` of queries and keys are in the sequence of the ranks.
    fn shape(&self, keys: KeySource, [queries, of_keys]: [usize; 2]) -> AttentionShape {
        let ((heads, kv_heads), (head_dim, value_dim)) = (self.heads, self.widths);
        let (batch, seq, scale) = (self.batch, 2 * self.chunk, 0.7);
        let (causal, window) = (true, self.window);
        let places = PartPlaces { queries: self.part(queries), keys: of_keys };
        AttentionShape {
            places: window.map(|_| places),
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            scale,
            causal,
            window,
            keys,
            heads_first: HeadsFirst::default(),
        }
    }

    /// A rank's rows of a tensor of so many columns.
    fn rows<T: Copy>(&self, whole: &[T], columns: usize, place: usize) -> Vec<T> {
        let rows: Vec<usize> = (0..whole.len() / columns).collect();
        let own = self.part(place).part_of(&rows, self.seq());
        own.into_iter().flat_map(|row| whole[row * columns..][..columns].iter().copied()).collect()
    }

    fn source(&self, place: usize, step: usize) -> KeySource {
        match step {
            0 => KeySource::Own,
            step if step <= place => KeySource::Earlier,
            _ => KeySource::Later,
        }
    }
}

/// Results of a rank: out and dq, and of each rank's keys what it adds to their gradients.
struct Results<E> {
    out: Vec<E>,
    dq: Vec<f32>,
    dsinks: Vec<f32>,
    /// By the place of the keys.
    dk_dv: Vec<(usize, Vec<f32>, Vec<f32>)>,
}

/// One rank, its keys those that `source` says.
fn run<E: Element>(
    case: &Case,
    [q, k, v, dout]: [&[E]; 4],
    sinks: Option<&[f32]>,
    rank: usize,
    source: &dyn Fn(usize) -> KeySource,
) -> Results<E> {
    let shape = case.shape(KeySource::Own, [rank, rank]);
    let columns = [
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.kv_heads * shape.value_dim,
        shape.heads * shape.value_dim,
    ];
    let q = case.rows(q, columns[0], rank);
    let dout = case.rows(dout, columns[3], rank);
    let steps: Vec<(usize, AttentionShape, Vec<E>, Vec<E>)> = (0..case.ranks)
        .map(|step| {
            let of = (rank + case.ranks - step) % case.ranks;
            let k = case.rows(k, columns[1], of);
            let v = case.rows(v, columns[2], of);
            (of, case.shape(source(step), [rank, of]), k, v)
        })
        .collect();
    let tier = best_tier();
    let mut parts: Vec<(Vec<f32>, Vec<f32>)> = Vec::new();
    for (of, shape, k, v) in &steps {
        // One part has the sinks.
        let sinks = sinks.filter(|_| *of == rank);
        let mut part = (poisoned::<f32>(dout.len()), poisoned::<f32>(shape.lse_len()));
        let mut workspace = vec![0xff; forward_workspace_bytes::<E>(shape, 2)];
        let (out, lse) = (&mut part.0, &mut part.1);
        attention_forward_on(tier, shape, &q, k, v, sinks, None, out, lse, &mut workspace).unwrap();
        parts.push(part);
    }
    let mut out = poisoned::<E>(dout.len());
    let mut lse = poisoned::<f32>(shape.lse_len());
    let views: Vec<(&[f32], &[f32])> = parts.iter().map(|it| (&*it.0, &*it.1)).collect();
    merge_attention(&views, (shape.heads, shape.seq), &mut out, &mut lse);
    let mut dsinks = vec![0.0; shape.heads];
    if let Some(sinks) = sinks {
        sink_gradients(&shape, &dout, &out, &lse, sinks, false, &mut dsinks).unwrap();
    }
    let mut results = Results { out, dq: vec![0.0; q.len()], dsinks, dk_dv: Vec::new() };
    for (of, shape, k, v) in &steps {
        let mut dq = poisoned::<f32>(q.len());
        let mut dk = poisoned::<f32>(k.len());
        let mut dv = poisoned::<f32>(v.len());
        let mut workspace = vec![0xff; backward_workspace_bytes::<E>(shape, 2)];
        attention_backward_on(
            tier,
            shape,
            &dout,
            &q,
            k,
            v,
            &results.out,
            &lse,
            None,
            &mut dq,
            &mut dk,
            &mut dv,
            &mut workspace,
        )
        .unwrap();
        results.dq.iter_mut().zip(dq).for_each(|(sum, term)| *sum += term);
        results.dk_dv.push((*of, dk, dv));
    }
    results
}

/// The largest distance of what all ranks found from the oracle, over the largest magnitude of the
/// tensor: of out, dq, dk, dv and dsinks.
fn errors<E: Element>(case: &Case, swap: bool) -> [f64; 5] {
    let shape = case.shape(KeySource::Own, [0, 0]);
    let whole = oracle::Shape {
        batch: case.batch,
        seq: case.seq(),
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        value_dim: Some(shape.value_dim),
        scale: f64::from(shape.scale),
        causal: true,
        window: case.window,
        documents: &[],
    };
    let tokens = case.batch * case.seq();
    let mut random = Random::new(case.seq() as u64);
    let q: Vec<E> = random.normals(tokens * shape.heads * shape.head_dim);
    let k: Vec<E> = random.normals(tokens * shape.kv_heads * shape.head_dim);
    let v: Vec<E> = random.normals(tokens * shape.kv_heads * shape.value_dim);
    let dout: Vec<E> = random.normals(tokens * shape.heads * shape.value_dim);
    let [q64, k64, v64, dout64] = [&q, &k, &v, &dout].map(|it| to_f64(it));
    let sinks: Vec<f32> = random.normals(if case.has_sinks { shape.heads } else { 0 });
    let sinks64 = to_f64(&sinks);
    let sinks = case.has_sinks.then_some(&*sinks);
    let forward = oracle::forward(&whole, &q64, &k64, &v64, &sinks64);
    let expected = oracle::backward(&whole, &dout64, &q64, &k64, &v64, &sinks64);
    let widths = [
        shape.heads * shape.value_dim,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.kv_heads * shape.value_dim,
    ];
    let ranks: Vec<Results<E>> = (0..case.ranks)
        .map(|position| {
            let source = |step| match case.source(position, step) {
                KeySource::Earlier if swap => KeySource::Later,
                source => source,
            };
            run(case, [&q, &k, &v, &dout], sinks, position, &source)
        })
        .collect();
    let mut errors = [0.0; 5];
    let mut compare = |at: usize, whole: &[f64], position: usize, got: &[f64]| {
        let largest = whole.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
        for (expected, got) in case.rows(whole, widths[at], position).iter().zip(got) {
            let error = (expected - got).abs() / largest;
            errors[at] = if error.is_nan() { f64::INFINITY } else { f64::max(errors[at], error) };
        }
    };
    for (position, rank) in ranks.iter().enumerate() {
        compare(0, &forward.out, position, &to_f64(&rank.out));
        compare(1, &expected.dq, position, &to_f64(&rank.dq));
        let sum = |of: &dyn Fn(&Results<E>) -> Vec<f64>| {
            let terms: Vec<Vec<f64>> = ranks.iter().map(of).collect();
            (0..terms[0].len()).map(|at| terms.iter().map(|it| it[at]).sum()).collect::<Vec<f64>>()
        };
        let of = |rank: &Results<E>| rank.dk_dv.iter().position(|it| it.0 == position).unwrap();
        compare(2, &expected.dk, position, &sum(&|rank| to_f64(&rank.dk_dv[of(rank)].1)));
        compare(3, &expected.dv, position, &sum(&|rank| to_f64(&rank.dk_dv[of(rank)].2)));
    }
    if case.has_sinks {
        let largest = expected.dsinks.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
        for (head, expected) in expected.dsinks.iter().enumerate() {
            let got: f64 = ranks.iter().map(|rank| f64::from(rank.dsinks[head])).sum();
            errors[4] = f64::max(errors[4], (expected - got).abs() / largest);
        }
    }
    errors
}

const PLAIN: Case = Case {
    ranks: 2,
    chunk: 1,
    batch: 1,
    heads: (1, 1),
    widths: (4, 4),
    window: None,
    has_sinks: false,
};

const CASES: [Case; 12] = [
    PLAIN,
    Case { chunk: 7, batch: 2, heads: (4, 2), widths: (8, 8), ..PLAIN },
    Case { ranks: 3, chunk: 5, batch: 2, heads: (2, 1), widths: (6, 3), ..PLAIN },
    // Halves of a tile and of several.
    Case { chunk: 64, heads: (2, 2), widths: (16, 16), ..PLAIN },
    Case { chunk: 100, heads: (2, 1), widths: (8, 8), ..PLAIN },
    Case { chunk: 7, batch: 2, heads: (4, 2), has_sinks: true, ..PLAIN },
    // Windows within a chunk, of a chunk, over chunks of several ranks, and of all tokens.
    Case { ranks: 1, chunk: 9, window: Some(4), ..PLAIN },
    Case { ranks: 3, chunk: 5, heads: (2, 1), window: Some(2), ..PLAIN },
    Case { ranks: 3, chunk: 5, heads: (2, 1), window: Some(5), ..PLAIN },
    Case { ranks: 3, chunk: 5, batch: 2, window: Some(12), has_sinks: true, ..PLAIN },
    Case { chunk: 100, heads: (2, 1), widths: (8, 8), window: Some(130), ..PLAIN },
    Case { ranks: 3, chunk: 5, window: Some(1000), ..PLAIN },
];

/// Sums of up to 400 terms in FP32, of which the largest are about as large as the result, and
/// exponentials of scores that err by about as many units; in BF16 numbers are rounded by 2^-9
/// each, and several times one after the other. The factors are rough; what is wrong is beyond them
/// by far, as the next test shows.
#[test]
fn ranks_together_attend_to_whole_sequences() {
    for case in &CASES {
        for_thread_counts(|| {
            let errors = errors::<f32>(case, false);
            assert!(errors.iter().all(|&error| error < 400.0 * 2f64.powi(-24)), "{errors:?}");
            errors
        });
        let errors = errors::<bf16>(case, false);
        assert!(errors.iter().all(|&error| error < 4.0 * 2f64.powi(-8)), "{errors:?}");
    }
}

/// Keys of an earlier place taken for those of a later one.
#[test]
fn keys_of_another_place_are_seen() {
    for case in CASES.iter().filter(|case| case.ranks > 1) {
        let errors = errors::<f32>(case, true);
        assert!(errors.iter().any(|&error| error > 0.05), "{errors:?}");
    }
}

/// A set of keys of which nothing is seen changes no bit, wherever it stands.
#[test]
fn what_is_not_seen_changes_no_bit() {
    let (heads, seq, width) = (2, 3, 4);
    let mut random = Random::new(3);
    let out: Vec<f32> = random.normals(seq * heads * width);
    let lse: Vec<f32> = random.normals(heads * seq);
    let nothing = (vec![0.0; out.len()], vec![f32::NEG_INFINITY; lse.len()]);
    let merged = |parts: &[(&[f32], &[f32])]| {
        let mut to = poisoned::<f32>(out.len());
        let mut sums = poisoned::<f32>(lse.len());
        merge_attention(parts, (heads, seq), &mut to, &mut sums);
        (to, sums)
    };
    let alone = (out.as_slice(), lse.as_slice());
    let nothing = (nothing.0.as_slice(), nothing.1.as_slice());
    assert_eq!(merged(&[alone]), (out.clone(), lse.clone()));
    for parts in [[alone, nothing], [nothing, alone]] {
        assert_eq!(merged(&parts), (out.clone(), lse.clone()));
    }
}
