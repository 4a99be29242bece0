//! `sm90_attention.cu`: the cases of `attention.cu`, and sizes around its own tiles.

use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, cases, check_forward_with};
use crate::harness::{Gpu, RunOptions};

const KERNEL: &str = "cuda_sm90_attention";

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

trial!(attention_on_wgmma_of_any_size);
fn attention_on_wgmma_of_any_size() {
    let mut gpu = open();
    let mut all = cases();
    // Around tiles of 128 and 192 queries and blocks of 128 keys.
    for head_dim in [64, 128] {
        for seq in [66, 130, 190, 192, 194, 255, 256, 258, 383, 384, 385, 400] {
            for causal in [false, true] {
                all.push(Case::new([1, seq, 2, 1, head_dim], causal, Data::Uniform(4.0)));
            }
        }
    }
    // Wider than what `attention.cu` takes.
    for head_dim in [136, 192, 256] {
        for seq in [1, 63, 64, 65, 129, 200] {
            all.push(Case::new([2, seq, 4, 2, head_dim], true, Data::Uniform(1.0)));
            all.push(Case::new([1, seq, 3, 1, head_dim], false, Data::Uniform(1.0)));
        }
        all.push(Case::new([1, 133, 2, 1, head_dim], true, Data::Nan));
    }
    for case in all {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

trial!(long_sequences_on_wgmma);
/// More tiles than SMs, and every stage used many times.
fn long_sequences_on_wgmma() {
    let mut gpu = open();
    for head_dim in [64, 96, 128, 256] {
        let seq = gpu.pick(1500, 300);
        for (causal, data) in [
            (true, Data::Uniform(1.0)),
            (false, Data::Uniform(8.0)),
            (true, Data::Rising),
            (false, Data::Nan),
        ] {
            let heads = gpu.pick(20, 2);
            check(&mut gpu, &Case::new([1, seq, heads, heads / 2, head_dim], causal, data));
        }
    }
}

// Five tiles for each SM or so, of up to four blocks of keys: every wait sees both parities.
emulated! {
    sm90_attention on Sm90a: |gpu| {
        for head_dim in [64, 96, 128, 256] {
            for (seq, causal) in [(400, true), (300, false)] {
                for kernel in ["", "_v1", "_v2", "_v3", "_v4", "_v6"] {
                    let name = format!("{KERNEL}{kernel}");
                    let options = RunOptions { kernel: Some(&name), ..RunOptions::default() };
                    let case = Case::new([1, seq, 3, 1, head_dim], causal, Data::Uniform(4.0));
                    if kernel.is_empty() || matches!(head_dim, 64 | 128) && causal {
                        check_forward_with(gpu, &case, options);
                    }
                }
            }
        }
    }
}
