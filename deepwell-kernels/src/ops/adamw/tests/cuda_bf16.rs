//! `adamw_bf16.cu` against the CPU's update from the same coefficients: weights and moments are the
//! same to the bit. Masters in FP32 of the same call stay with their own kernel.

use std::slice::from_ref;

use deepwell_ir::DType;
use deepwell_ir::ops::{AdamW, AdamWCoefficients, MomentFormat};
use deepwell_kernels::ops::adamw::bf16::{MomentsMut, adamw_bf16};
use deepwell_precision::moments::{BLOCK, Moment};
use half::bf16;

use crate::adamw_fp8::{encoded, with_odd_gradients};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// Gradient, master and moments of a parameter. Some weights are infinite, NaN, zero or subnormal.
fn state(len: usize, seed: u64, moments: MomentFormat) -> [HostTensor; 4] {
    let mut master = uniform(len, seed + 3, 1.0);
    let odd = [f32::INFINITY, f32::NAN, 0.0, -1e-39, f32::MAX];
    for (at, weight) in master.iter_mut().step_by(97).enumerate() {
        *weight = odd[at % odd.len()];
    }
    let first = uniform(len, seed + 1, 0.1);
    let second: Vec<f32> = uniform(len, seed + 2, 0.1).iter().map(|x| x * x).collect();
    let stored = |values: &[f32], moment| match moments {
        MomentFormat::Fp32 => HostTensor::f32(&[len], values),
        MomentFormat::Fp8 => encoded(values, moment),
    };
    [
        HostTensor::f32(&[len], &with_odd_gradients(uniform(len, seed, 0.3))),
        HostTensor::bf16(&[len], &master),
        stored(&first, Moment::First),
        stored(&second, Moment::Second),
    ]
}

fn words<T: bytemuck::Pod>(tensor: &HostTensor) -> Vec<T> {
    bytemuck::pod_collect_to_vec(&tensor.bytes)
}

/// Step number `step`, or a skipped one, of parameters of these lengths.
fn check(gpu: &mut Gpu, lengths: &[usize], moments: MomentFormat, step: f32) {
    let coefficients: [f32; AdamWCoefficients::COUNT] =
        [step, 1e-3, 0.7, 0.1, 0.95, 0.05, 5.26e-3, 3.2, 1e-8];
    let first = 5;
    let of = |(index, &len): (usize, &usize)| state(len, 10 * index as u64, moments);
    let states: Vec<[HostTensor; 4]> = lengths.iter().enumerate().map(of).collect();
    let op = AdamW {
        parameters: first..first + lengths.len(),
        weight_decay: vec![0.1; lengths.len()],
        copies: Vec::new(),
        moments,
    };
    let updated: Vec<HostTensor> = states.iter().flatten().cloned().collect();
    let inputs = HostTensor::f32(&[coefficients.len()], &coefficients);
    let options = RunOptions { update: true, ..RunOptions::default() };
    let got = gpu.run_with(op, from_ref(&inputs), &updated, options);
    for (index, (state, got)) in states.iter().zip(got.chunks(4)).enumerate() {
        let what = format!("{} elements of {index}, {moments}, step {step}", lengths[index]);
        let [gradient, master, m, v] = state;
        let mut master: Vec<bf16> = words(master);
        let decay = f64::from(0.1f32);
        let (m, v) = match moments {
            MomentFormat::Fp32 => {
                let (mut m, mut v): (Vec<f32>, Vec<f32>) = (words(m), words(v));
                let both = MomentsMut::Fp32([&mut m, &mut v]);
                let gradient: Vec<f32> = words(gradient);
                adamw_bf16(&mut master, &gradient, both, first + index, decay, &coefficients);
                (bytemuck::cast_slice(&m).to_vec(), bytemuck::cast_slice(&v).to_vec())
            }
            MomentFormat::Fp8 => {
                let (mut m, mut v) = (m.bytes.clone(), v.bytes.clone());
                let both = MomentsMut::Fp8([&mut m, &mut v]);
                let gradient: Vec<f32> = words(gradient);
                adamw_bf16(&mut master, &gradient, both, first + index, decay, &coefficients);
                (m, v)
            }
        };
        assert_eq!(got[0].bytes, gradient.bytes, "{what}: the gradient was written");
        for (at, (got, expected)) in words::<bf16>(&got[1]).iter().zip(&master).enumerate() {
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{what}: master {at}: expected {expected}, got {got}");
        }
        if moments.is_fp32() {
            // An infinite weight has a finite gradient, so no moment is NaN.
            assert!(got[2].bytes == m && got[3].bytes == v, "{what}: moments");
        } else {
            assert!(got[2].bytes == m, "{what}: first moment");
            assert!(got[3].bytes == v, "{what}: second moment");
        }
    }
}

/// A call with a master in FP32 beside one in BF16: each has its own kernel.
fn check_mixed(gpu: &mut Gpu) {
    let len = BLOCK + 5;
    let coefficients = [2.0, 1e-3, 1.0, 0.1, 0.95, 0.05, 5e-3, 3.2, 1e-8];
    let narrow = state(len, 3, MomentFormat::Fp32);
    let mut wide = state(len, 3, MomentFormat::Fp32);
    wide[1] = HostTensor::f32(
        &[len],
        &words::<bf16>(&wide[1]).iter().map(|w| w.to_f32()).collect::<Vec<_>>(),
    );
    let op = AdamW {
        parameters: 0..2,
        weight_decay: vec![0.0; 2],
        copies: Vec::new(),
        moments: MomentFormat::Fp32,
    };
    let updated: Vec<HostTensor> = wide.iter().chain(&narrow).cloned().collect();
    let inputs = HostTensor::f32(&[coefficients.len()], &coefficients);
    let options = RunOptions { update: true, ..RunOptions::default() };
    let got = gpu.run_with(op, from_ref(&inputs), &updated, options);
    let (wide, narrow) = (words::<f32>(&got[1]), words::<bf16>(&got[5]));
    assert_eq!((got[1].dtype, got[5].dtype), (DType::F32, DType::Bf16));
    for (at, (wide, narrow)) in wide.iter().zip(narrow).enumerate() {
        let below = bf16::from_bits((wide.to_bits() >> 16) as u16);
        let above = bf16::from_bits((wide.to_bits() >> 16) as u16 + 1);
        let is_neighbour = narrow == below || narrow == above || wide.is_nan() && narrow.is_nan();
        assert!(is_neighbour, "weight {at}: {wide} became {narrow}");
    }
    assert!(got[2].bytes == got[6].bytes && got[3].bytes == got[7].bytes, "moments");
}

/// Lengths around the elements of a lane, a block, a CTA, and two steps of which one is skipped.
fn check_lengths(gpu: &mut Gpu) {
    let tables: [&[usize]; 5] = [
        &[1, 2],
        &[3, 4, 5, 127, 128, 130],
        &[1023, 1024, 1025, 0, 1],
        &[4095, 4096, 4097],
        &[2 * 4096 + 1155, 7, 640],
    ];
    for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
        for lengths in tables {
            for step in [3.0, 0.0] {
                check(gpu, lengths, moments, step);
            }
        }
    }
    check_mixed(gpu);
}

trial!(masters_in_bf16_as_on_the_cpu);
fn masters_in_bf16_as_on_the_cpu() {
    let mut gpu = Gpu::open();
    check_lengths(&mut gpu);
    if gpu.runs(1 << 24, 1 << 18) {
        check(&mut gpu, &[3, 2_500_003], MomentFormat::Fp8, 100_000.0);
        check(&mut gpu, &[3, 2_500_003], MomentFormat::Fp32, 100_000.0);
    }
}

emulated! {
    adamw_bf16 on Sm100a: check_lengths
}
