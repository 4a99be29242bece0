//! `embedding.cu`.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::embedding::oracle;

use crate::harness::{Gpu, HostTensor, uniform};

fn tokens_of(len: usize, vocab: usize, seed: u64) -> Vec<i32> {
    let unit = uniform(len, seed, 0.5);
    let token = |x: &f32| (((x + 0.5) * vocab as f32) as usize).min(vocab - 1) as i32;
    unit.iter().map(token).collect()
}

pub(crate) fn check(gpu: &mut Gpu, rows: usize, vocab: usize, width: usize) {
    let table = HostTensor::bf16(&[vocab, width], &uniform(vocab * width, 1, 3.0));
    let tokens = tokens_of(rows, vocab, 2);
    let expected = oracle::forward(&tokens, &table.to_f64(), width);
    let inputs = [HostTensor::i32(&[rows], &tokens), table];
    let output = [HostTensor::output(DType::Bf16, &[rows, width])];
    let got = gpu.run(ops::Embedding::default(), &inputs, &output, false, 1);
    assert_eq!(got[0].to_f64(), expected, "{rows} rows of {width} from {vocab}");
}

trial!(copies_rows_of_any_width);
fn copies_rows_of_any_width() {
    let mut gpu = Gpu::open();
    for (rows, vocab, width) in [
        (0, 5, 8),
        (1, 1, 1),
        (3, 5, 7),
        (129, 11, 3),
        (5, 3, 8),
        (128, 256, 16),
        (129, 257, 24),
        (1000, 300, 136),
        (1025, 100, 768),
        (77, 4, 4097),
        (300, 50, 4096),
    ] {
        check(&mut gpu, rows, vocab, width);
    }
}

trial!(a_token_outside_of_the_table_is_nan);
fn a_token_outside_of_the_table_is_nan() {
    let mut gpu = Gpu::open();
    for width in [3, 8] {
        let table = HostTensor::bf16(&[4, width], &vec![1.0; 4 * width]);
        let tokens = [3, 4, -1, 0, i32::MAX, i32::MIN];
        let inputs = [HostTensor::i32(&[6], &tokens), table];
        let output = [HostTensor::output(DType::Bf16, &[6, width])];
        let got = gpu.run(ops::Embedding::default(), &inputs, &output, false, 1)[0].to_f64();
        for (row, &token) in got.chunks_exact(width).zip(&tokens) {
            let known = (0..4).contains(&token);
            assert!(row.iter().all(|&x| if known { x == 1.0 } else { x.is_nan() }), "{token}");
        }
    }
}

emulated! {
    embedding on Sm100a: |gpu| {
        check(gpu, 400, 50, 4096);
        check(gpu, 50, 10, 4097);
        crate::vocab_parallel::check_embedding(gpu, (1000, 40, 6, 2));
    }
}
