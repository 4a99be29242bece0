//! `sm100_bf16_gemm_fused.cu` and `sm100_mxfp8_gemm_fused.cu`: the bits of the GEMM alone, of the
//! activation alone, and of the CPU's quantization of what that stores.

use deepwell_ir::ops::{
    Axis, Epilogue, Fused, Gelu, GeluBackward, Linear, LinearDgrad, Quantize, ScaledGemm,
};
use deepwell_ir::{DType, GemmKind, Op, Tile};
use deepwell_precision::{QuantFormat, ScaleRule};
use half::bf16;

use crate::gemm_operands::Kind;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix};
use crate::quantize::{assert_same, outputs, reference};
use crate::tcgen05;

/// What is multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operands {
    Bf16(Kind),
    /// With infinities in rows of every tile.
    Bf16Infinite,
    Mx(MxKind),
    /// With data and scales that are NaN.
    MxNan,
}

impl Operands {
    /// Magnitudes of a bias that does not hide the sums.
    fn bias_max(self) -> f32 {
        match self {
            Operands::Bf16(Kind::Tiny) | Operands::Mx(MxKind::Tiny) => (-121f32).exp2(),
            _ => 2.0,
        }
    }
}

/// M, N, K.
type Sizes = (usize, usize, usize);

/// A GEMM with its operands.
struct Multiplied {
    op: Op,
    inputs: Vec<HostTensor>,
    kernel: &'static str,
    /// With what follows, and where CTAs take over tiles.
    fused: &'static str,
    tile: Tile,
}

/// The GEMM of a layer's output or, `backward`, of the gradient of its input.
fn multiplied(
    operands: Operands,
    backward: bool,
    (rows, columns, k): Sizes,
    (m, n): (usize, usize),
) -> Multiplied {
    let bias = HostTensor::bf16(&[columns], &uniform(columns, 4, operands.bias_max()));
    if let Operands::Bf16(_) | Operands::Bf16Infinite = operands {
        let kind = if let Operands::Bf16(kind) = operands { kind } else { Kind::Uniform };
        let mut a = kind.values(rows * k, 1);
        if operands == Operands::Bf16Infinite {
            a.iter_mut().step_by(64 * k).for_each(|value| *value = f32::INFINITY);
        }
        let a = HostTensor::bf16(&[rows, k], &a);
        let shape = if backward { [k, columns] } else { [columns, k] };
        let b = HostTensor::bf16(&shape, &kind.values(columns * k, 2));
        let mut inputs = vec![a, b];
        let op: Op = match backward {
            true => LinearDgrad {}.into(),
            false => Linear { bias: true }.into(),
        };
        inputs.extend((!backward).then_some(bias));
        return Multiplied {
            op,
            inputs,
            kernel: "cuda_sm100_bf16_gemm",
            fused: "cuda_sm100_bf16_gemm_fused",
            tile: Tile::new(m, n, 64),
        };
    }
    let spec = QuantFormat::MXFP8;
    let numbers = if let Operands::Mx(kind) = operands { kind } else { MxKind::Even };
    let mut a = MxMatrix::new(rows, k, spec, numbers, 1);
    let b = MxMatrix::new(columns, k, spec, numbers, 50);
    if operands == Operands::MxNan {
        let (mut data, mut scales) = (a.data.bytes.clone(), a.plain_scales.clone());
        data[rows / 2 * k] = 0x7f;
        // Of the last row, which leaves NaN in columns that are there and in those that are not.
        let last = scales.len() - 1;
        scales[last] = 0xff;
        a = MxMatrix::from_bytes(rows, k, &data, &scales);
    }
    let kind = if backward { GemmKind::Dgrad } else { GemmKind::Fprop };
    let op = ScaledGemm { kind, output: DType::Bf16, bias: !backward, a: spec, b: spec }.into();
    let mut inputs = vec![a.data, a.scales, b.data, b.scales];
    inputs.extend((!backward).then_some(bias));
    Multiplied {
        op,
        inputs,
        kernel: "cuda_sm100_mxfp8_gemm",
        fused: "cuda_sm100_mxfp8_gemm_fused",
        tile: Tile::new(m, n, 128),
    }
}

/// The epilogue of a GEMM.
#[derive(Clone, Debug)]
pub(crate) struct Follows {
    /// The exact form or that with the hyperbolic tangent; none: no activation.
    tanh: Option<bool>,
    /// Of a gradient.
    backward: bool,
    /// Whether the GEMM output is stored, and what comes last.
    keep: [bool; 2],
    quantize: Option<Quantize>,
}

/// Everything that the kernels do at once.
const ALL: Follows =
    Follows { tanh: Some(true), backward: false, keep: [true; 2], quantize: Some(BOTH) };

const BOTH: Quantize = quantize(Axis::Both, ScaleRule::Rceil);

const fn quantize(axis: Axis, scale_rule: ScaleRule) -> Quantize {
    Quantize { format: QuantFormat::MXFP8.with_scale_rule(scale_rule), axis }
}

pub(crate) fn check(
    gpu: &mut Gpu,
    operands: Operands,
    sizes: Sizes,
    tile: (usize, usize),
    follows: &Follows,
) {
    let (rows, columns, _) = sizes;
    let what = format!("{operands:?} {sizes:?} {tile:?} {follows:?}");
    let gemm = multiplied(operands, follows.backward, sizes, tile);
    let options = |kernel| RunOptions {
        kernel: Some(kernel),
        tile: Some(gemm.tile),
        ..RunOptions::default()
    };
    let empty = HostTensor::output(DType::Bf16, &[rows, columns]);
    let out = std::slice::from_ref(&empty);
    let one_by_one = |gpu: &mut Gpu, op: Op, inputs: &[HostTensor]| match inputs.len() {
        _ if op == gemm.op => gpu.run_with(op, inputs, out, options(gemm.kernel)).remove(0),
        _ => gpu.run(op, inputs, out, false, 1).remove(0),
    };

    // One after the other.
    let multiplied = one_by_one(gpu, gemm.op.clone(), &gemm.inputs);
    let forward = HostTensor::bf16(&[rows, columns], &uniform(rows * columns, 7, 6.0));
    let mut inputs = gemm.inputs.clone();
    let (mut epilogue, mut skipped) = (Vec::new(), Vec::new());
    let mut last = multiplied.clone();
    let [keep_gemm, keep_last] = follows.keep;
    if let Some(tanh) = follows.tanh {
        let mut of_activation = vec![multiplied.clone()];
        let activation: Op = match follows.backward {
            true => GeluBackward { tanh }.into(),
            false => Gelu { tanh }.into(),
        };
        if follows.backward {
            of_activation.push(forward.clone());
            inputs.push(forward);
        }
        last = one_by_one(gpu, activation.clone(), &of_activation);
        epilogue.extend(Epilogue::of_op(&activation, 0));
        skipped.extend((!keep_gemm).then_some(0));
    }
    let mut expected = Vec::new();
    if follows.tanh.is_some() && keep_gemm {
        expected.push(multiplied);
    }
    if keep_last || follows.quantize.is_none() {
        expected.push(last.clone());
    }

    // All at once.
    let mut targets = vec![empty.clone(); expected.len()];
    if let Some(quantize) = &follows.quantize {
        let of = epilogue.len();
        epilogue.push(Epilogue::Quantize { of, quantize: quantize.clone() });
        skipped.extend((!keep_last).then_some(of));
        targets.extend(outputs(quantize.axis, rows, columns));
    }
    let op: Op = Fused { core: Box::new(gemm.op.clone()), epilogue, skipped }.into();
    let got = gpu.run_with(op, &inputs, &targets, options(gemm.fused));
    for (index, expected) in expected.iter().enumerate() {
        assert!(got[index] == *expected, "{what}: output {index} differs from its own");
    }
    if let Some(quantize) = &follows.quantize {
        let values: Vec<bf16> = bytemuck::pod_collect_to_vec(&last.bytes);
        let operands = reference(&values, rows, columns, quantize);
        assert_same(&what, &got[expected.len()..], &operands);
    }
}

/// Ways to go on: each function of the elements, what is kept, along which axes, by which rule.
fn ways() -> Vec<Follows> {
    let quantized = |axis| Some(quantize(axis, ScaleRule::Rceil));
    let floor = Some(quantize(Axis::Both, ScaleRule::OcpFloor));
    let mut ways = Vec::new();
    for backward in [false, true] {
        let way = |tanh, keep, quantize| Follows { tanh, backward, keep, quantize };
        ways.extend([
            way(None, [false, false], quantized(Axis::Both)),
            way(None, [false, true], quantized(Axis::Row)),
            way(Some(false), [true, true], None),
            way(Some(true), [false, true], None),
            way(Some(true), [true, false], quantized(Axis::Row)),
            way(Some(false), [false, true], quantized(Axis::Column)),
            way(Some(false), [true, true], floor.clone()),
        ]);
    }
    ways
}

const TILES: [(usize, usize); 4] = [(128, 128), (128, 256), (256, 128), (256, 256)];

/// One row or column of groups, parts of tiles, rows that are no whole groups of 16 or 32.
const SIZES: &[Sizes] =
    &[(1, 32, 32), (33, 96, 64), (127, 160, 144), (130, 256, 80), (272, 288, 272), (64, 544, 32)];

fn check_all(gpu: &mut Gpu, operands: Operands) {
    for (index, way) in ways().iter().enumerate() {
        for (at, &tile) in TILES.iter().enumerate() {
            let sizes = SIZES[(index + at) % SIZES.len()];
            check(gpu, operands, sizes, tile, way);
        }
    }
}

trial!(every_way_to_go_on);
fn every_way_to_go_on() {
    let mut gpu = tcgen05::open();
    check_all(&mut gpu, Operands::Bf16(Kind::Uniform));
    check_all(&mut gpu, Operands::Mx(MxKind::Even));
}

trial!(hard_numbers);
/// Groups of very different scales, of zeros, of numbers that are not finite; rows of operands that
/// are no whole groups.
fn hard_numbers() {
    let mut gpu = tcgen05::open();
    let hard = [
        Operands::Bf16(Kind::WideRange),
        Operands::Bf16(Kind::Integers),
        Operands::Bf16(Kind::Cancelling),
        Operands::Bf16(Kind::Tiny),
        Operands::Bf16Infinite,
        Operands::Mx(MxKind::Spread),
        Operands::Mx(MxKind::Tiny),
        Operands::MxNan,
    ];
    let ways = ways();
    for (index, &operands) in hard.iter().enumerate() {
        for (at, way) in ways.iter().filter(|way| way.quantize.is_some()).enumerate() {
            check(&mut gpu, operands, (75, 224, 96), TILES[(index + at) % 4], way);
        }
    }
}

trial!(rows_that_are_no_groups);
/// Rows that allow eight elements at a time but are no groups: without quantization.
fn rows_that_are_no_groups() {
    let mut gpu = tcgen05::open();
    for way in ways().iter().filter(|way| way.quantize.is_none()) {
        for operands in [Operands::Bf16(Kind::Uniform), Operands::Mx(MxKind::Even)] {
            check(&mut gpu, operands, (70, 136, 48), (128, 128), way);
        }
    }
}

/// Four tiles and more for each CTA of an emulated device with four SMs: two accumulators are used
/// again. Then small sizes of hard numbers by both rules of scales, so that every counter counts.
pub(crate) fn check_several_tiles(gpu: &mut Gpu, operands: Operands, hard: &[Operands]) {
    for (tile, sizes) in [
        ((128, 128), (390, 512, 400)),
        ((128, 256), (390, 1024, 400)),
        ((256, 128), (760, 384, 400)),
        // K that does not end where the ring does.
        ((256, 256), (760, 544, 528)),
    ] {
        let backward = Follows { backward: true, tanh: Some(false), ..ALL };
        check(gpu, operands, sizes, tile, &backward);
        check(gpu, operands, sizes, tile, &ALL);
        // Of several CTAs, as they count together; of launches of one size one is recorded.
        for (at, &operands) in hard.iter().enumerate() {
            let floor = Some(quantize(Axis::Both, ScaleRule::OcpFloor));
            let floored = Follows { quantize: floor, ..ALL };
            let gradient = Follows { backward: true, ..floored.clone() };
            for (follows, columns) in [(ALL, 480), (floored, 416), (gradient, 448)] {
                check(gpu, operands, (300, columns, 64 + 32 * at), tile, &follows);
            }
        }
    }
}
