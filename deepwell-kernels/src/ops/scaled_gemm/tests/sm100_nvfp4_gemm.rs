//! `sm100_nvfp4_gemm.cu`: NVFP4 GEMMs on tcgen05 against f64 sums of the numbers that the operands
//! stand for and, where sums are exact, to the bit.

use deepwell_ir::{DType, GemmKind, Tile, ops};
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::{QuantFormat, packed, scale_tiles};
use half::bf16;

use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::sm90_dequantized_nvfp4_gemm::{Case, FORMS, Form, Operand, check_forms};
use crate::tcgen05;

const KERNEL: &str = "cuda_sm100_nvfp4_gemm";

/// M, N, K: single, around the tiles of 128 and 256, around the step of 64 and the stage of 256,
/// more K-blocks than the pipeline has stages, and three tiles for each of four SMs.
const SIZES: [[usize; 3]; 11] = [
    [1, 1, 32],
    [3, 5, 64],
    [127, 128, 96],
    [129, 127, 256],
    [128, 129, 224],
    [256, 257, 288],
    [255, 136, 1056],
    [130, 40, 2080],
    [250, 520, 512],
    [384, 512, 256],
    [768, 512, 544],
];

/// Tensor cores cut the sum below 2^-23 once in each step of 64 along K, and terms far below it;
/// then two factors, their product and a sum are rounded.
pub(crate) fn case_of(kernel: &str, tile: Option<Tile>, k: usize) -> Case<'_> {
    let share = (k.div_ceil(64) as f64 + 8.0) * 2f64.powi(-23);
    Case { kernel, tile, share, workspace_bytes: None }
}

fn case(tile: Option<Tile>, k: usize) -> Case<'static> {
    case_of(KERNEL, tile, k)
}

/// An operand whose sums of products are exact in FP32: elements of all codes, scales of 1/2 to 2.
fn exact([rows, k]: [usize; 2], tensor_scale: f32, seed: u64) -> Operand {
    // From 0 to 256.
    let random = |count, seed| uniform(count, seed, 128.0).into_iter().map(|x| (x + 128.0) as u8);
    let data: Vec<u8> = random(packed::fp4_len(rows, k), seed).collect();
    let blocks = k / BLOCK;
    let scale_of = |x: u8| [0x30, 0x38, 0x40][usize::from(x % 3)];
    let plain: Vec<u8> = random(rows * blocks, seed + 1).map(scale_of).collect();
    let mut scales = vec![0; scale_tiles::tiled_len(rows, blocks)];
    scale_tiles::to_tiles(&plain, rows, blocks, &mut scales).unwrap();
    Operand::of_planes([rows, k], &data, &scales, tensor_scale)
}

/// The rounding of a result: the product of both tensor scales, then that with the sum, then a sum
/// with the bias or with what was there.
pub(crate) fn check_bits(gpu: &mut Gpu, kernel: &str, tile: Option<Tile>, [m, n, k]: [usize; 3]) {
    let (a_scale, b_scale) = (0.337_f32, 1.7e-3_f32);
    let (a, b) = (exact([m, k], a_scale, 11), exact([n, k], b_scale, 21));
    let scale = f64::from(a_scale) * f64::from(b_scale);
    // Exact: the numbers are products of three factors, and the sums multiples of 1/64.
    let sums = linear::forward(&a.values, &b.values, None, k);
    let sums = sums.iter().map(|sum| ((sum / scale * 64.0).round() / 64.0) as f32);
    let products: Vec<f32> = sums.map(|sum| sum * (a_scale * b_scale)).collect();
    let bias: Vec<f32> = uniform(n, 4, 2.0).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    let before = uniform(m * n, 5, 2.0);
    for (kind, output, has_bias) in FORMS {
        let is_wgrad = kind == GemmKind::Wgrad;
        let of_element = |(index, &product): (usize, &f32)| match (has_bias, is_wgrad) {
            (true, _) => product + bias[index % n],
            (_, true) => before[index] + product,
            _ => product,
        };
        let expected = products.iter().enumerate().map(of_element);
        let expected: Vec<f64> = expected
            .map(|x| if output == DType::Bf16 { bf16::from_f32(x).to_f64() } else { x.into() })
            .collect();
        let stored = if is_wgrad { DType::Bf16 } else { output };
        let format = QuantFormat::NVFP4;
        let op = ops::ScaledGemm { kind, output: stored, bias: has_bias, a: format, b: format };
        let mut inputs = [a.inputs.clone(), b.inputs.clone()].concat();
        inputs.extend(has_bias.then(|| HostTensor::from_f32(output, &[n], &bias)));
        let out = match is_wgrad {
            true => HostTensor::f32(&[m, n], &before),
            false => HostTensor::output(output, &[m, n]),
        };
        let kernel = Some(kernel);
        let options = RunOptions { accumulate: is_wgrad, kernel, tile, ..RunOptions::default() };
        let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
        let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
        if let Some(at) = wrong {
            let (got, expected) = (got[at], expected[at]);
            panic!("{m}x{n}x{k} {kind} {output} {has_bias} at {at}: {got}, not {expected}");
        }
    }
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = tcgen05::open();
    for sizes in SIZES {
        check_forms(&mut gpu, case(None, sizes[2]), sizes, false, &FORMS);
    }
    // A scale that is NaN makes its row NaN, and no other, also where K ends within a stage.
    check_forms(&mut gpu, case(None, 288), [390, 24, 288], true, &FORMS);
}

trial!(results_are_rounded_as_on_the_cpu);
fn results_are_rounded_as_on_the_cpu() {
    let mut gpu = tcgen05::open();
    for sizes in [[5, 3, 32], [130, 136, 288], [257, 264, 320]] {
        check_bits(&mut gpu, KERNEL, None, sizes);
    }
}

// The stages of a pipeline are used again in the second tile, if not in the first, and K ends
// within a stage and within an MMA. Rows of the second tile have NaN.
emulated! {
    sm100_nvfp4_gemm on Sm100a: |gpu| {
        let forms: [Form; 2] =
            [(GemmKind::Fprop, DType::Bf16, true), (GemmKind::Wgrad, DType::F32, false)];
        for ((m, n), cluster, sizes) in [
            // Four tiles for each CTA: two accumulators are used again.
            ((128, 128), [1, 1], [390, 504, 544]),
            ((128, 256), [1, 1], [390, 760, 544]),
            ((256, 128), [1, 1], [760, 384, 544]),
            // K that does not end where the pipeline does: waits after the last stage see both
            // parities.
            ((256, 256), [1, 1], [760, 264, 800]),
            // The second tile of some clusters is beyond the result.
            ((256, 128), [1, 2], [264, 264, 800]),
            ((256, 256), [2, 1], [520, 264, 544]),
        ] {
            let tile = Some(Tile { cluster, ..Tile::new(m, n, 256) });
            check_forms(gpu, case(tile, sizes[2]), sizes, true, &forms);
        }
    }
}
