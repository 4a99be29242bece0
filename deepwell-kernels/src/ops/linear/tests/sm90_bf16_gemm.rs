//! `sm90_bf16_gemm.cu`: the three GEMMs of a linear layer on wgmma against their definition in f64.

use deepwell_ir::{DType, GemmKind, Op, Tile, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_trials::skip;

use crate::bf16_gemm::{check_not_finite, check_with};
use crate::compare::assert_close;
use crate::gemm_operands::{Kind, gemm_tolerance};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// All that the kernel has.
const TILES: [Tile; 4] = [
    Tile::new(128, 128, 64),
    Tile::new(256, 128, 64),
    Tile::new(128, 256, 64),
    Tile { cluster: [2, 1], ..Tile::new(128, 256, 64) },
];

/// Tokens, outputs, inputs for each tile: single, odd numbers of tokens, around the boxes of 64 and
/// the tiles of 128 and 256, and more K-blocks than the pipelines have stages.
const SIZES: &[(usize, usize, usize)] = &[
    (1, 8, 8),
    (3, 16, 24),
    (63, 72, 136),
    (127, 128, 64),
    (130, 264, 248),
    (257, 120, 520),
    (641, 136, 72),
    (72, 648, 640),
];

fn options(tile: Tile) -> RunOptions<'static> {
    RunOptions { kernel: Some("cuda_sm90_bf16_gemm"), tile: Some(tile), ..RunOptions::default() }
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

/// One GEMM of (M, N, K) whose contraction is cut into so many parts, which are added up.
fn check_parts(
    gpu: &mut Gpu,
    tile: Tile,
    gemm: GemmKind,
    (m, n, k): (usize, usize, usize),
    parts: usize,
    kind: Kind,
) {
    let [a, b] = match gemm {
        GemmKind::Fprop => [[m, k], [n, k]],
        GemmKind::Dgrad => [[m, k], [k, n]],
        GemmKind::Wgrad => [[k, m], [k, n]],
    };
    let operand =
        |shape: [usize; 2], seed| HostTensor::bf16(&shape, &kind.values(shape[0] * shape[1], seed));
    let (a, b) = (operand(a, 1), operand(b, 2));
    let bias = HostTensor::bf16(&[n], &uniform(n, 4, 8.0));
    let before = HostTensor::f32(&[m, n], &uniform(m * n, 5, 8.0));
    let (left, right) = (a.to_f64(), b.to_f64());
    let y = HostTensor::output(DType::Bf16, &[m, n]);
    // Operation, inputs, result, what is expected.
    let (op, given, out, expected): (Op, _, _, _) = match gemm {
        GemmKind::Fprop => {
            let expected = linear::forward(&left, &right, Some(&bias.to_f64()), k);
            (ops::Linear { bias: true }.into(), vec![a, b, bias], y, expected)
        }
        GemmKind::Dgrad => {
            let expected = linear::data_gradient(&left, &right, n);
            (ops::LinearDgrad {}.into(), vec![a, b], y, expected)
        }
        GemmKind::Wgrad => {
            let mut expected = linear::weight_gradient(&left, &right, m, n);
            expected.iter_mut().zip(before.to_f64()).for_each(|(sum, there)| *sum += there);
            (ops::LinearWgrad {}.into(), vec![a, b], before, expected)
        }
    };
    let options = RunOptions {
        accumulate: gemm == GemmKind::Wgrad,
        workspace_bytes: Some(parts * m * n * size_of::<f32>()),
        ..options(tile)
    };
    let got = gpu.run_with(op, &given, std::slice::from_ref(&out), options).remove(0).to_f64();
    let tolerance = gemm_tolerance(out.dtype, k, kind, 8.0);
    let name = format!("{gemm:?} {m}x{n}x{k} in {parts} parts {kind:?} {tile:?}");
    assert_close(&name, &got, &expected, tolerance);
}

const GEMMS: [GemmKind; 3] = [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad];

trial!(contractions_in_parts);
/// The last part shorter than the others, and of a stage that is not full; columns that are no
/// multiple of four, which outputs of a layer may be.
fn contractions_in_parts() {
    let mut gpu = open();
    for (index, tile) in TILES.into_iter().enumerate() {
        for gemm in GEMMS {
            for (sizes, parts) in [
                ((8, 8, 72), 2),
                ((136, 72, 200), 4),
                ((72, 264, 584 + 8 * index), 3),
                ((40, 136, 1096), 16),
            ] {
                if gpu.runs(sizes.0 * sizes.1 * sizes.2, 12 << 20) {
                    check_parts(&mut gpu, tile, gemm, sizes, parts, Kind::Uniform);
                }
            }
            check_parts(&mut gpu, tile, gemm, (136, 136, 320), 2, Kind::Integers);
        }
        check_parts(&mut gpu, tile, GemmKind::Fprop, (72, 67, 584), 2, Kind::Uniform);
    }
}

trial!(long_contractions_get_parts);
/// As the catalog plans them.
fn long_contractions_get_parts() {
    let mut gpu = open();
    let (tokens, outputs, inputs) = gpu.pick((16384, 256, 2048), (2056, 72, 136));
    let dy = HostTensor::bf16(&[tokens, outputs], &Kind::Integers.values(tokens * outputs, 3));
    let x = HostTensor::bf16(&[tokens, inputs], &Kind::Integers.values(tokens * inputs, 1));
    let before = HostTensor::f32(&[outputs, inputs], &uniform(outputs * inputs, 5, 8.0));
    let got = gpu.run_with(
        ops::LinearWgrad {},
        &[dy.clone(), x.clone()],
        std::slice::from_ref(&before),
        RunOptions { kernel: Some("cuda_sm90_bf16_gemm"), ..RunOptions::default() },
    );
    let expected = linear::weight_gradient(&dy.to_f64(), &x.to_f64(), outputs, inputs);
    let tolerance = gemm_tolerance(DType::F32, tokens, Kind::Integers, 0.0);
    assert_close("a long weight gradient", &got[0].to_f64(), &expected, tolerance);
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = open();
    for tile in TILES {
        for &sizes in SIZES {
            check_with(&mut gpu, options(tile), sizes, Kind::Uniform);
        }
    }
}

trial!(gemms_of_large_matrices);
/// What no emulator runs: every SM has several tiles of long sums.
fn gemms_of_large_matrices() {
    let mut gpu = open();
    for (index, tile) in TILES.into_iter().enumerate() {
        let sizes = gpu.pick((1032, 2048 + 136 * index, 1096), (140, 136, 272));
        check_with(&mut gpu, options(tile), sizes, Kind::Integers);
    }
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = open();
    for tile in TILES {
        for kind in [Kind::Integers, Kind::Cancelling, Kind::WideRange] {
            check_with(&mut gpu, options(tile), (130, 136, 200), kind);
        }
        check_not_finite(&mut gpu, options(tile), 72);
    }
}

// Three tiles for each SM, whose stages are used more than twice in each of the three GEMMs: every
// wait sees both parities. The second tile of some clusters is beyond the result.
emulated! {
    sm90_bf16_gemm on Sm90a: |gpu| {
        for (tile, sizes) in TILES.into_iter().zip([
            (392, 392, 424),
            (776, 776, 328),
            (520, 520, 648),
            (520, 520, 648),
        ]) {
            check_with(gpu, options(tile), sizes, Kind::Uniform);
        }
        // Sums in FP32 of all layouts, each CTA having tiles of both parts.
        for (tile, sizes) in TILES.into_iter().zip([
            (392, 264, 584),
            (776, 264, 456),
            (392, 520, 456),
            (392, 520, 456),
        ]) {
            for gemm in GEMMS {
                check_parts(gpu, tile, gemm, sizes, 2, Kind::Uniform);
            }
        }
    }
}

emulated! {
    sum_parts on Sm90a: |gpu| {
        for gemm in [GemmKind::Fprop, GemmKind::Wgrad] {
            check_parts(gpu, TILES[0], gemm, (136, 136, 584), 5, Kind::Uniform);
        }
    }
}
