//! `cast.cu`.

use deepwell_ir::{DType, ops};
use half::bf16;

use crate::harness::{Gpu, HostTensor, uniform};

pub(crate) fn check(gpu: &mut Gpu, what: &str, values: &[f32]) {
    for from in [DType::F32, DType::Bf16] {
        for to in [DType::F32, DType::Bf16] {
            let x = HostTensor::from_f32(from, &[values.len()], values);
            let given: Vec<f32> = x.to_f64().iter().map(|&x| x as f32).collect();
            let expected = HostTensor::from_f32(to, &[values.len()], &given);
            let output = HostTensor::output(to, &[values.len()]);
            let got = gpu.run(ops::Cast { to }, &[x], &[output], false, 1);
            // One rounding, to nearest even: the same bits, but for those of a NaN.
            let same =
                |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            let (got, expected) = (got[0].to_f64(), expected.to_f64());
            let wrong = got.iter().zip(&expected).position(|pair| !same(pair));
            assert_eq!(wrong.map(|i| (i, got[i], expected[i])), None, "{what}: {from} to {to}");
        }
    }
}

trial!(rounds_to_nearest_even_at_every_length);
fn rounds_to_nearest_even_at_every_length() {
    let mut gpu = Gpu::open();
    for len in [0, 1, 3, 4, 5, 1023, 1025, 4095, 4096, 4097, 4100, 1_000_003, 9_000_001] {
        if !gpu.runs(len, 1 << 20) {
            continue;
        }
        check(&mut gpu, &len.to_string(), &uniform(len, len as u64, 100.0));
    }
}

trial!(keeps_every_code_and_rounds_between_them);
fn keeps_every_code_and_rounds_between_them() {
    let mut gpu = Gpu::open();
    let codes: Vec<f32> = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32()).collect();
    check(&mut gpu, "codes", &codes);
    // A quarter, a half and three quarters of the way to the next code.
    for lower_half in [0x4000, 0x7fff, 0x8000, 0x8001, 0xc000, 0xffff] {
        let between: Vec<f32> =
            (0..0x7f80u32).map(|bits| f32::from_bits(bits << 16 | lower_half)).collect();
        check(&mut gpu, &format!("codes and {lower_half:#x}"), &between);
    }
}

emulated! {
    cast on Sm100a: |gpu| check(gpu, "tiles", &uniform(800_003, 1, 100.0))
}
