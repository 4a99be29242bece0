//! `sm90_attention_narrow_values.cu`.

use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, ORDERS, check_forward_with};
use crate::harness::{Gpu, RunOptions};

const KERNEL: &str = "cuda_sm90_attention_narrow_values";

fn check(gpu: &mut Gpu, case: &Case) {
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    check_forward_with(gpu, case, options);
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

trial!(attention_with_narrow_values_of_any_size);
/// Around tiles of 128 queries and blocks of 96 keys.
fn attention_with_narrow_values_of_any_size() {
    let mut gpu = open();
    for (head_dim, value_dim) in [(192, 128), (136, 72), (184, 8)] {
        let of = |sizes: [usize; 4], causal, data| {
            let [batch, seq, heads, kv_heads] = sizes;
            Case::new([batch, seq, heads, kv_heads, head_dim], causal, data).values(value_dim)
        };
        let random = Data::Uniform(1.0);
        let mut cases = Vec::new();
        for seq in [1, 63, 95, 96, 97, 127, 128, 129, 191, 193, 200, 289] {
            cases.push(of([1, seq, 1, 1], true, random));
            cases.push(of([1, seq, 1, 1], false, random));
            cases.push(of([2, seq, 4, 2], true, random));
            cases.push(of([1, seq, 3, 1], false, Data::Uniform(8.0)));
        }
        for data in [Data::Flat, Data::Rising, Data::Falling, Data::Nan] {
            cases.push(of([1, 133, 2, 1], true, data));
        }
        for (seq, window) in [(1, 1), (130, 1), (200, 95), (200, 96), (200, 97), (300, 129)] {
            cases.push(of([1, seq, 2, 1], true, random).window(window));
        }
        cases.push(of([2, 129, 2, 1], true, random).sinks(2.0));
        cases.push(of([1, 100, 2, 1], false, random).sinks(40.0));
        cases.push(of([1, 200, 2, 1], true, random).documents(&[31, 65, 1, 100]));
        cases.push(of([2, 100, 2, 2], true, random).documents(&[5, 70]).window(20).sinks(1.0));
        for case in cases {
            if gpu.runs(case.work(), 2 * EMULATED_WORK) {
                check(&mut gpu, &case);
            }
        }
    }
}

trial!(attention_with_narrow_values_of_many_tiles);
/// What no emulator runs: more tiles than SMs, and every stage used many times.
fn attention_with_narrow_values_of_many_tiles() {
    let mut gpu = open();
    for (sizes, causal) in [
        ([6, 270, 16, 16, 192], true),
        ([4, 257, 24, 12, 136], false),
        ([1, 1500, 20, 10, 192], true),
    ] {
        let case = Case::new(sizes, causal, Data::Uniform(2.0)).values(128);
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

// Tiles for each SM, of up to four blocks of keys: every wait sees both parities.
emulated! {
    sm90_attention_narrow_values on Sm90a: |gpu| {
        for (head_dim, value_dim) in [(192, 128), (136, 72)] {
            let of = |seq, causal| {
                let case = Case::new([1, seq, 3, 1, head_dim], causal, Data::Uniform(4.0));
                case.values(value_dim)
            };
            check(gpu, &of(400, true));
            check(gpu, &of(300, false));
            check(gpu, &of(400, true).documents(&[130, 70, 1, 199]));
            check(gpu, &of(400, true).window(150).sinks(1.0));
        }
        for order in ORDERS {
            let case = Case::new([2, 70, 4, 2, 192], true, Data::Uniform(4.0));
            check(gpu, &case.values(128).heads_first(order));
        }
    }
}
