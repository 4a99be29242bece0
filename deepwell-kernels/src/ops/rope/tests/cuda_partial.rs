//! `rope_partial.cu`: the bits of the CPU, whose numbers are those of the oracle.

use std::slice;

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::rope::{cpu, oracle};
use half::bf16;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

/// Heads of `plain` elements that stay and `2 half` that turn.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    heads: usize,
    plain: usize,
    half: usize,
    seq: usize,
    interleaved: bool,
}

fn check(gpu: &mut Gpu, case: Case) {
    let Case { rows, heads, plain, half, seq, interleaved } = case;
    let head_dim = plain + 2 * half;
    let shape = [rows, heads * head_dim];
    // Frequencies of few bits: their products with positions are exact in FP32, as in the oracle.
    let frequencies: Vec<f32> = (0..half).map(|i| 0.75 * 0.5f32.powi(i as i32 % 12)).collect();
    let rope = ops::Rope {
        heads,
        head_dim,
        plain_dim: plain,
        interleaved,
        inverse_frequencies: frequencies.clone(),
        attention_factor: 1.0,
    };
    let largest = 4.0;
    let x = HostTensor::bf16(&shape, &uniform(rows * heads * head_dim, 7, largest));
    let numbers: Vec<bf16> = bytemuck::pod_collect_to_vec(&x.bytes);
    let wide: Vec<f64> = frequencies.iter().map(|&f| f64::from(f)).collect();
    let of = oracle::Shape { heads, head_dim, plain_dim: plain, interleaved, seq };
    let of_rows = cpu::RopeShape { heads, head_dim, plain_dim: plain, interleaved, seq };
    let (mut cosines, mut sines) = (vec![0.0; seq * half], vec![0.0; seq * half]);
    cpu::rope_tables(&frequencies, seq, &mut cosines, &mut sines);
    // Two products and a sum in FP32 with sines rounded to it, where they may cancel.
    let tolerance = Tolerance::bf16(f64::from(largest) * 1.5 * 2f64.powi(-21));
    let output = [HostTensor::output(DType::Bf16, &shape)];
    let mut on_cpu = vec![bf16::ZERO; numbers.len()];

    let got = gpu.run(rope.clone(), slice::from_ref(&x), &output, false, seq);
    let expected = oracle::forward(&x.to_f64(), &of, &wide);
    assert_close(&format!("forward, {case:?}"), &got[0].to_f64(), &expected, tolerance);
    if rows > 0 {
        cpu::rope_forward(&numbers, of_rows, &cosines, &sines, &mut on_cpu);
        assert_eq!(got[0].bytes, bytemuck::cast_slice::<_, u8>(&on_cpu), "forward, {case:?}");
    }

    let op = ops::RopeBackward { forward: rope };
    let got = gpu.run(op, slice::from_ref(&x), &output, false, seq);
    let expected = oracle::backward(&x.to_f64(), &of, &wide);
    assert_close(&format!("backward, {case:?}"), &got[0].to_f64(), &expected, tolerance);
    if rows > 0 {
        cpu::rope_backward(&numbers, of_rows, &cosines, &sines, &mut on_cpu);
        assert_eq!(got[0].bytes, bytemuck::cast_slice::<_, u8>(&on_cpu), "backward, {case:?}");
    }
}

const fn case(rows: usize, heads: usize, plain: usize, half: usize, seq: usize) -> Case {
    Case { rows, heads, plain, half, seq, interleaved: true }
}

/// No row, one, and several; one head and more than a thread takes; heads that turn as a whole, and
/// whose parts are whole vectors or not.
fn check_hard(gpu: &mut Gpu) {
    for hard in [
        case(0, 2, 8, 8, 4),
        case(1, 1, 0, 1, 1),
        case(5, 1, 0, 32, 5),
        case(6, 3, 8, 4, 3),
        case(7, 5, 3, 2, 7),
        case(12, 13, 16, 8, 4),
        case(9, 2, 128, 32, 3),
        case(33, 4, 12, 6, 11),
    ] {
        check(gpu, hard);
        // Heads that turn whole, halves apart, are for `rope.cu`.
        if hard.plain > 0 {
            check(gpu, Case { interleaved: false, ..hard });
        }
    }
}

trial!(has_the_bits_of_the_cpu);
fn has_the_bits_of_the_cpu() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        check(&mut gpu, case(1024, 128, 128, 32, 1024));
    }
}

trial!(what_is_not_finite_stays_with_its_pair);
fn what_is_not_finite_stays_with_its_pair() {
    let mut gpu = Gpu::open();
    // Elements 8 to 15 turn; that of an infinite one's pair is infinity times a sine of zero.
    for (interleaved, lost) in [(true, [3, 12, 13]), (false, [3, 8, 12])] {
        let rope = ops::Rope {
            heads: 1,
            head_dim: 16,
            plain_dim: 8,
            interleaved,
            inverse_frequencies: vec![1.0, 0.5, 0.25, 0.125],
            attention_factor: 1.0,
        };
        let mut x = vec![1.0; 16];
        x[3] = f32::NAN;
        x[12] = f32::INFINITY;
        let x = HostTensor::bf16(&[1, 16], &x);
        let output = [HostTensor::output(DType::Bf16, &[1, 16])];
        let got = gpu.run(rope, &[x], &output, false, 1)[0].to_f64();
        let found: Vec<usize> =
            got.iter().enumerate().filter(|(_, x)| !x.is_finite()).map(|(i, _)| i).collect();
        assert_eq!(found, lost, "interleaved {interleaved}");
    }
}

emulated! {
    rope_partial on Sm90a: |gpu| {
        check_hard(gpu);
        for interleaved in [true, false] {
            check(gpu, Case { interleaved, ..case(200, 5, 64, 32, 48) });
            check(gpu, Case { interleaved, ..case(200, 3, 5, 3, 48) });
        }
    }
}
