//! Speed of the CPU's GEMMs on the shapes of the default model.
//!
//! `cargo bench -p deepwell-kernels --bench gemm_cpu [-- FILTER]`, where `FILTER` is part of a
//! tier's name. Each line is a linear layer with the minimum time and the GFLOP/s of its three
//! GEMMs. The sums at the end weight the shapes by their count in a training step of the default
//! model (4 layers; hidden 256, ffn 704, 2 of 4 heads for keys and values, vocabulary 256; 1024
//! tokens).

use std::hint::black_box;
use std::time::{Duration, Instant};

use deepwell_kernels::cpu::gemm::{self, DataKind, Operand, Output, Tier};
use deepwell_precision::ElementFormat;
use half::bf16;

const TOKENS: usize = 1024;

/// Name of a linear layer, its output and input features, and its count per step.
const LINEARS: [(&str, usize, usize, usize); 5] = [
    ("q, o", 256, 256, 8),
    ("k, v", 128, 256, 8),
    ("gate, up", 704, 256, 8),
    ("down", 256, 704, 4),
    ("head", 256, 256, 1),
];

/// The GEMMs of a linear layer as (m, n, k) and which operands are transposed in memory.
#[derive(Clone, Copy)]
struct Gemm {
    name: &'static str,
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
    accumulate: bool,
}

fn gemms(outputs: usize, inputs: usize) -> [Gemm; 3] {
    let gemm = |name, m, n, k, a_transposed, b_transposed, accumulate| Gemm {
        name,
        m,
        n,
        k,
        a_transposed,
        b_transposed,
        accumulate,
    };
    [
        gemm("fprop", TOKENS, outputs, inputs, false, false, false),
        gemm("dgrad", TOKENS, inputs, outputs, false, true, false),
        gemm("wgrad", outputs, inputs, TOKENS, true, true, true),
    ]
}

fn bf16_numbers(count: usize) -> Vec<bf16> {
    (0..count).map(|index| bf16::from_f32((index * 37 % 101) as f32 / 50.0 - 1.0)).collect()
}

/// The minimum time of a run, over at least 100 ms of runs.
fn least_time(mut run: impl FnMut()) -> Duration {
    run();
    let mut least = Duration::MAX;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(100) {
        let start = Instant::now();
        run();
        least = least.min(start.elapsed());
    }
    least
}

fn time(tier: Tier, kind: DataKind, gemm: Gemm) -> Duration {
    let Gemm { m, n, k, .. } = gemm;
    let (a_numbers, b_numbers) = (bf16_numbers(m * k), bf16_numbers(n * k));
    let data = |count: usize| -> Vec<u8> { (0..count).map(|i| (i * 37 % 127) as u8).collect() };
    let (a_data, b_data) = (data(m * k), data(n * k));
    let scales = |count: usize| -> Vec<u8> { (0..count).map(|i| 120 + (i % 9) as u8).collect() };
    let (a_scales, b_scales) = (scales(m * k / 32), scales(n * k / 32));
    let operand = |numbers, outer: usize, transposed: bool| {
        if transposed {
            Operand::rows_bf16(numbers, outer).transposed()
        } else {
            Operand::rows_bf16(numbers, k)
        }
    };
    let (a, b) = match kind {
        // Each direction has its own quantized copy, so MXFP8 rows always run along `k`.
        DataKind::Mx => (
            Operand::rows_mx(ElementFormat::E4M3, &a_data, &a_scales, k),
            Operand::rows_mx(ElementFormat::E4M3, &b_data, &b_scales, k),
        ),
        _ => (operand(&a_numbers, m, gemm.a_transposed), operand(&b_numbers, n, gemm.b_transposed)),
    };
    let mut workspace = vec![0u8; gemm::workspace_bytes(tier, m, n, k, kind, kind)];
    let mut result_f32 = vec![0.0f32; m * n];
    let mut result_bf16 = vec![bf16::ZERO; m * n];
    least_time(|| {
        let out = if gemm.accumulate {
            Output::F32 { data: &mut result_f32, accumulate: true }
        } else {
            Output::Bf16 { data: &mut result_bf16 }
        };
        gemm::gemm(tier, m, n, k, a, b, out, black_box(&mut workspace)).expect("a valid gemm");
    })
}

fn main() {
    // Cargo passes `--bench`; anything else is the filter.
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.expect("a thread pool");
        for tier in Tier::ALL {
            if !tier.is_available() || !tier.name().contains(&filter) {
                continue;
            }
            for (kind, kind_name) in [(DataKind::Bf16, "bf16"), (DataKind::Mx, "mxfp8")] {
                println!("\n{} tier, {kind_name} operands, {threads} thread(s)", tier.name());
                let (mut step, mut flops) = (Duration::ZERO, 0.0);
                for (name, outputs, inputs, count) in LINEARS {
                    let mut line = format!("  {name:<9}");
                    for gemm in gemms(outputs, inputs) {
                        let least = pool.install(|| time(tier, kind, gemm));
                        let work = 2.0 * (gemm.m * gemm.n * gemm.k) as f64;
                        line += &format!(
                            " | {} {:>7.1} us {:>7.1} GFLOP/s",
                            gemm.name,
                            least.as_secs_f64() * 1e6,
                            work / least.as_secs_f64() / 1e9
                        );
                        step += least * count as u32;
                        flops += work * count as f64;
                    }
                    println!("{line}");
                }
                println!(
                    "  all linears of a step: {:.2} ms, {:.2} GFLOP, {:.1} GFLOP/s",
                    step.as_secs_f64() * 1e3,
                    flops / 1e9,
                    flops / step.as_secs_f64() / 1e9
                );
            }
        }
    }
}
