//! `adamw_fp8.cu` against the CPU's update from the same coefficients: weights, moments and copies
//! are the same to the bit.

use std::slice::from_ref;

use deepwell_ir::DType;
use deepwell_ir::ops::{AdamW, AdamWCoefficients, Cast, CopyKind, MomentFormat, WeightCopy};
use deepwell_kernels::ops::adamw::fp8::adamw_fp8;
use deepwell_precision::moments::{self, BLOCK, BLOCK_BYTES, Moment, NEAREST};

use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// Blocks of a moment, rounded to nearest.
pub(crate) fn encoded(values: &[f32], moment: Moment) -> HostTensor {
    let mut bytes = Vec::new();
    for values in values.chunks(BLOCK) {
        let (mut whole, mut block) = ([0.0; BLOCK], [0; BLOCK_BYTES]);
        whole[..values.len()].copy_from_slice(values);
        moments::encode(&whole, moment, &NEAREST, &mut block);
        bytes.extend(block);
    }
    let shape = vec![moments::blocks(values.len()), BLOCK_BYTES];
    HostTensor { dtype: DType::E4m3, shape, bytes }
}

/// Sets some gradients to numbers for which the fast roots and quotients of the kernels do not
/// hold: zeros, moments and squares near to or below the smallest normal number, and a square that
/// overflows.
pub(crate) fn with_odd_gradients(mut gradient: Vec<f32>) -> Vec<f32> {
    let odd = [0.0, 1e-37, -1e-30, 3e-19, -4e-20, -1e-12, 1e-8, 2e3, -1e12, 3e19];
    for (at, value) in gradient.iter_mut().skip(5).step_by(61).enumerate() {
        *value = odd[at % odd.len()];
    }
    gradient
}

/// Gradient, master and moments of a parameter. Every third block has a gradient of zero and
/// moments of zero, every fifth an odd gradient beside moments of zero, and every eleventh moments
/// whose quotient overflows.
fn state(len: usize, seed: u64) -> [HostTensor; 4] {
    let without = |mut values: Vec<f32>, step: usize| {
        values.chunks_mut(BLOCK).step_by(step).for_each(|block| block.fill(0.0));
        values
    };
    let sparse = |values: Vec<f32>| without(without(values, 3), 5);
    let gradient = without(with_odd_gradients(uniform(len, seed, 0.3)), 3);
    let overflowing = |mut values: Vec<f32>, value: f32| {
        values.chunks_mut(BLOCK).skip(1).step_by(11).for_each(|block| block.fill(value));
        values
    };
    let first = overflowing(sparse(uniform(len, seed + 1, 0.1)), 1e32);
    let second = sparse(uniform(len, seed + 2, 0.1)).iter().map(|x| x * x).collect();
    [
        HostTensor::f32(&[len], &overflowing(gradient, 0.0)),
        HostTensor::f32(&[len], &uniform(len, seed + 3, 1.0)),
        encoded(&first, Moment::First),
        encoded(&overflowing(second, 1e-20), Moment::Second),
    ]
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&tensor.bytes)
}

/// Step number `step`, or a skipped one, of parameters of these lengths; every second one has a
/// BF16 copy.
fn check(gpu: &mut Gpu, lengths: &[usize], step: f32) {
    let coefficients: [f32; AdamWCoefficients::COUNT] =
        [step, 1e-3, 0.7, 0.1, 0.95, 0.05, 5.26e-3, 3.2, 1e-8];
    let first = 5;
    let states: Vec<[HostTensor; 4]> =
        lengths.iter().enumerate().map(|(index, &len)| state(len, 10 * index as u64)).collect();
    let copied: Vec<usize> = (0..lengths.len()).step_by(2).collect();
    let op = AdamW {
        parameters: first..first + lengths.len(),
        weight_decay: vec![0.1; lengths.len()],
        copies: copied
            .iter()
            .map(|&parameter| WeightCopy {
                parameter,
                kind: CopyKind::Cast(Cast { to: DType::Bf16 }),
            })
            .collect(),
        moments: MomentFormat::Fp8,
    };
    let before = copied.iter().map(|&at| HostTensor::bf16(&[lengths[at]], &vec![7.0; lengths[at]]));
    let updated: Vec<HostTensor> = states.iter().flatten().cloned().chain(before).collect();
    let inputs = HostTensor::f32(&[coefficients.len()], &coefficients);
    let options = RunOptions { update: true, ..RunOptions::default() };
    let got = gpu.run_with(op, from_ref(&inputs), &updated, options);
    let mut masters = Vec::new();
    for (index, (state, got)) in states.iter().zip(got.chunks(4)).enumerate() {
        let [gradient, master, m, v] = state.clone();
        let (mut master, mut m, mut v) = (floats(&master), m.bytes, v.bytes);
        let moments = [&mut m[..], &mut v[..]];
        let parameter = first + index;
        let decay = f64::from(0.1f32);
        adamw_fp8(&mut master, &floats(&gradient), moments, parameter, decay, &coefficients);
        let what = format!("{} elements of {index}, step {step}", lengths[index]);
        assert_eq!(got[0].bytes, gradient.bytes, "{what}: the gradient was written");
        assert_eq!(floats(&got[1]), master, "{what}: master");
        assert!(got[2].bytes == m, "{what}: first moment");
        assert!(got[3].bytes == v, "{what}: second moment");
        masters.push(master);
    }
    for (&at, copy) in copied.iter().zip(&got[4 * lengths.len()..]) {
        let expected = match step {
            0.0 => vec![7.0; lengths[at]],
            _ => masters[at].clone(),
        };
        assert_eq!(copy.bytes, HostTensor::bf16(&[lengths[at]], &expected).bytes, "copy of {at}");
    }
}

/// Lengths around the elements of a lane, a block, a CTA, and two steps of which one is skipped.
fn check_lengths(gpu: &mut Gpu) {
    let tables: [&[usize]; 4] =
        [&[1], &[3, 4, 5, 127, 128, 129], &[4095, 4096, 4097, 0, 1], &[2 * 4096 + 1155, 7, 640]];
    for lengths in tables {
        for step in [3.0, 0.0] {
            check(gpu, lengths, step);
        }
    }
}

trial!(moments_in_fp8_as_on_the_cpu);
fn moments_in_fp8_as_on_the_cpu() {
    let mut gpu = Gpu::open();
    check_lengths(&mut gpu);
    if gpu.runs(1 << 24, 1 << 18) {
        check(&mut gpu, &[3, 2_500_003], 100_000.0);
    }
}

emulated! {
    adamw_fp8 on Sm100a: check_lengths
}
