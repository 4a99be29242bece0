//! Speed of the CPU's attention and of its fused output head on the default model's shapes.
//!
//! `cargo bench -p deepwell-kernels --bench attention_and_head_cpu`. Each line is the minimum time
//! of a call over at least 200 ms of calls, per tier and number of threads.

use std::hint::black_box;
use std::time::{Duration, Instant};

use deepwell_ir::ops::{HeadsFirst, KeySource};
use deepwell_kernels::cpu::element::Element;
use deepwell_kernels::cpu::gemm::Tier;
use deepwell_kernels::ops::attention::cpu::{self as attention, AttentionShape};
use deepwell_kernels::ops::linear_cross_entropy::cpu::{self as head, HeadGradients};
use half::bf16;

const TOKENS_FIRST: HeadsFirst = HeadsFirst { q: false, k: false, v: false, o: false };

const ATTENTIONS: [AttentionShape; 2] = [
    AttentionShape {
        batch: 8,
        seq: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        value_dim: 64,
        scale: 0.125,
        causal: true,
        keys: KeySource::Own,
        places: None,
        window: None,
        heads_first: TOKENS_FIRST,
    },
    AttentionShape {
        batch: 1,
        seq: 2048,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        value_dim: 64,
        scale: 0.125,
        causal: true,
        keys: KeySource::Own,
        places: None,
        window: None,
        heads_first: TOKENS_FIRST,
    },
];

/// Tokens, hidden, vocabulary.
const HEADS: [(usize, usize, usize); 2] = [(1024, 256, 256), (1024, 256, 32000)];

fn numbers<E: Element>(count: usize) -> Vec<E> {
    (0..count).map(|index| E::from_f32((index * 37 % 101) as f32 / 50.0 - 1.0)).collect()
}

fn least_time_us(mut run: impl FnMut()) -> f64 {
    run();
    let mut least = Duration::MAX;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        run();
        least = least.min(start.elapsed());
    }
    least.as_secs_f64() * 1e6
}

fn time_attention<E: Element>(tier: Tier, shape: &AttentionShape, threads: usize) -> (f64, f64) {
    let (q, dout): (Vec<E>, Vec<E>) = (numbers(shape.query_len()), numbers(shape.query_len()));
    let (k, v): (Vec<E>, Vec<E>) = (numbers(shape.key_len()), numbers(shape.key_len()));
    let (mut out, mut lse) = (dout.clone(), vec![0.0; shape.lse_len()]);
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let mut workspace = vec![0; attention::forward_workspace_bytes::<E>(shape, threads)];
    let forward = least_time_us(|| {
        let workspace = black_box(&mut workspace);
        let (out, lse) = (&mut out, &mut lse);
        attention::attention_forward_on(tier, shape, &q, &k, &v, None, None, out, lse, workspace)
            .expect("a valid attention");
    });
    let mut workspace = vec![0; attention::backward_workspace_bytes::<E>(shape, threads)];
    let backward = least_time_us(|| {
        attention::attention_backward_on(
            tier,
            shape,
            &dout,
            &q,
            &k,
            &v,
            &out,
            &lse,
            None,
            &mut dq,
            &mut dk,
            &mut dv,
            black_box(&mut workspace),
        )
        .expect("a valid attention");
    });
    (forward, backward)
}

fn time_head<E: Element>(tier: Tier, (tokens, hidden, vocab): (usize, usize, usize)) -> (f64, f64) {
    let (x, w): (Vec<E>, Vec<E>) = (numbers(tokens * hidden), numbers(vocab * hidden));
    let targets: Vec<i32> = (0..tokens).map(|token| (token * 7 % vocab) as i32).collect();
    let (mut dx, mut dw) = (x.clone(), vec![0.0; w.len()]);
    let mut loss = 0.0;
    let mut workspace = vec![0; head::workspace_bytes::<E>(tokens, hidden, vocab, true)];
    let mut time = |with_gradients: bool| {
        least_time_us(|| {
            let gradients = with_gradients.then_some(HeadGradients { dx: &mut dx, dw: &mut dw });
            head::linear_cross_entropy_on(
                tier,
                &x,
                &w,
                &targets,
                hidden,
                1.0,
                &mut loss,
                gradients,
                false,
                black_box(&mut workspace),
            )
            .expect("a valid head");
        })
    };
    (time(false), time(true))
}

fn main() {
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.expect("a thread pool");
        for tier in Tier::ALL.into_iter().filter(|tier| tier.is_available()) {
            for shape in &ATTENTIONS {
                let (forward, backward) =
                    pool.install(|| time_attention::<bf16>(tier, shape, threads));
                println!(
                    "{threads} thread(s), {:<11} attention batch {} seq {:>4}: \
                     forward {forward:>9.1} us, backward {backward:>9.1} us",
                    tier.name(),
                    shape.batch,
                    shape.seq
                );
            }
            for sizes in HEADS {
                let (loss, both) = pool.install(|| time_head::<bf16>(tier, sizes));
                println!(
                    "{threads} thread(s), {:<11} head of {:>5} words:      \
                     loss {loss:>12.1} us, with gradients {both:>9.1} us",
                    tier.name(),
                    sizes.2
                );
            }
        }
    }
}
