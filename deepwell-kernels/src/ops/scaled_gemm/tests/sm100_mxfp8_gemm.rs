//! `sm100_mxfp8_gemm.cu`: MXFP8 GEMMs on tcgen05 against f64 sums of what they stand for.

use deepwell_ir::{DType, GemmKind, Tile, ops};
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::QuantFormat;

use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};
use crate::tcgen05;

pub(crate) const KERNEL: &str = "cuda_sm100_mxfp8_gemm";

/// M, N, K: single, odd, around the tiles of 128 and 256 and the stage of 128, scales that lie by
/// single bytes, by words and by 16 bytes, more K-blocks than the pipeline has stages, and three
/// tiles for each of four SMs.
const SIZES: &[(usize, usize, usize)] = &[
    (1, 1, 16),
    (3, 5, 48),
    (127, 128, 128),
    (129, 127, 144),
    (256, 257, 512),
    (130, 136, 1152),
    (250, 520, 1040),
    (384, 512, 128),
    (768, 512, 272),
];

/// Sums are cut below 2^-25 of their largest term in each step of 32 along K; then a bias or what
/// was there is added.
fn share(k: usize) -> f64 {
    (k.div_ceil(32) as f64 + 8.0) * 2f64.powi(-23)
}

/// The type of the result, whether there is a bias, and whether it is added to what is there.
pub(crate) type Form = (DType, bool, bool);

/// Every kind of form.
const FORMS: [Form; 4] = [
    (DType::Bf16, false, false),
    (DType::Bf16, true, false),
    (DType::F32, true, false),
    (DType::F32, false, true),
];

/// A GEMM by `tile`, or by the one that it gets.
pub(crate) fn check(
    gpu: &mut Gpu,
    kernel: &str,
    tile: Option<Tile>,
    (rows, columns, k): (usize, usize, usize),
    forms: &[Form],
) {
    let spec = QuantFormat::MXFP8;
    let a = MxMatrix::new(rows, k, spec, MxKind::Even, 1);
    let b = MxMatrix::new(columns, k, spec, MxKind::Even, 50);
    let sums = linear::forward(&a.values, &b.values, None, k);
    let magnitude = magnitudes(&a, &b, k);
    let biases = uniform(columns, 4, 8.0);
    let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
    for &(output, has_bias, accumulate) in forms {
        let bias = HostTensor::from_f32(output, &[columns], &biases);
        let out = match accumulate {
            true => before.clone(),
            false => HostTensor::output(output, &[rows, columns]),
        };
        let (mut expected, mut magnitude) = (sums.clone(), magnitude.clone());
        let (added, there) = (bias.to_f64(), before.to_f64());
        for index in 0..rows * columns {
            let bias = if has_bias { added[index % columns] } else { 0.0 };
            let before = if accumulate { there[index] } else { 0.0 };
            expected[index] += bias + before;
            magnitude[index] += bias.abs() + before.abs();
        }
        // Accumulating is what the weights' gradients do, whatever the other results are in.
        let (gemm, stored) = match accumulate {
            true => (GemmKind::Wgrad, DType::Bf16),
            false => (GemmKind::Fprop, output),
        };
        let op = ops::ScaledGemm { kind: gemm, output: stored, bias: has_bias, a: spec, b: spec };
        let mut inputs = vec![a.data.clone(), a.scales.clone(), b.data.clone(), b.scales.clone()];
        inputs.extend(has_bias.then_some(bias));
        let kernel = Some(kernel);
        let options = RunOptions { accumulate, kernel, tile, ..RunOptions::default() };
        let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
        let name = format!("{rows}x{columns}x{k} {tile:?} {output} {has_bias} {accumulate}");
        assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share(k), output);
    }
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = tcgen05::open();
    for &sizes in SIZES {
        check(&mut gpu, KERNEL, None, sizes, &FORMS);
    }
}

// The stages of a pipeline are used again in the second tile, if not in the first, and each of the
// four K-blocks whose scales are read at a time is there.
emulated! {
    sm100_mxfp8_gemm on Sm100a: |gpu| {
        for ((m, n), cluster, sizes) in [
            // Four tiles for each CTA: two accumulators are used again.
            ((128, 128), [1, 1], (390, 504, 400)),
            ((128, 256), [1, 1], (390, 760, 400)),
            ((256, 128), [1, 1], (760, 384, 400)),
            // K that does not end where the pipeline does: waits after the last stage see both
            // parities.
            ((256, 256), [1, 1], (760, 264, 528)),
            // The second tile of some clusters is beyond the result.
            ((256, 128), [1, 2], (264, 264, 528)),
            ((256, 256), [2, 1], (520, 264, 400)),
        ] {
            let tile = Tile { cluster, ..Tile::new(m, n, 128) };
            let forms = [(DType::Bf16, true, false), (DType::F32, false, true)];
            check(gpu, KERNEL, Some(tile), sizes, &forms);
        }
    }
}

emulated! {
    sm100_mxfp8_gemm_fused on Sm100a: |gpu| {
        use crate::fused_gemm::{Operands, check_several_tiles};
        let hard = [Operands::Mx(MxKind::Spread), Operands::Mx(MxKind::Tiny), Operands::MxNan];
        check_several_tiles(gpu, Operands::Mx(MxKind::Even), &hard);
    }
}
