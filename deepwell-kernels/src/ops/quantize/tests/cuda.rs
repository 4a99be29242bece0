//! `quantize.cu` against the CPU's quantization: data, scales and counters are all integers, and
//! every one must be the same.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{DType, ops};
use deepwell_precision::{
    BLOCK, BlockShape, Granularity, QuantFormat, QuantStats, ScaleRule, Source, quantize_both,
    quantize_columns, quantize_rows, scale_tiles, scales_len,
};
use half::bf16;

use crate::harness::{Gpu, HostTensor, uniform};
use crate::mx::tiled;

/// Every way to share exponents.
pub(crate) fn specs() -> Vec<QuantFormat> {
    let mut specs = Vec::new();
    for scale_rule in [ScaleRule::Rceil, ScaleRule::OcpFloor] {
        for granularity in [Granularity::G32, Granularity::G128] {
            for block in [BlockShape::Row, BlockShape::Square] {
                let format = QuantFormat::MXFP8.with_scale_rule(scale_rule);
                specs.push(format.with_granularity(granularity).with_shape(block));
            }
        }
    }
    specs
}

/// The empty outputs of a quantization of a `rows` x `columns` matrix.
pub(crate) fn outputs(axis: Axis, rows: usize, columns: usize) -> Vec<HostTensor> {
    let operand = |outer: usize, contraction: usize| {
        let scales = scale_tiles::shape(outer, contraction.div_ceil(BLOCK));
        [
            HostTensor::output(DType::E4m3, &[outer, contraction]),
            HostTensor::output(DType::E8m0, &scales),
        ]
    };
    let mut outputs = Vec::new();
    if axis != Axis::Column {
        outputs.extend(operand(rows, columns));
    }
    if axis != Axis::Row {
        outputs.extend(operand(columns, rows));
    }
    outputs.push(HostTensor::output(DType::U64, &[Quantize::STATISTICS]));
    outputs
}

/// What the CPU writes for [`outputs`].
pub(crate) fn reference<S: Source>(
    x: &[S],
    rows: usize,
    columns: usize,
    quantize: &Quantize,
) -> Vec<Vec<u8>> {
    let Quantize { format: spec, axis } = quantize;
    let len = rows * columns;
    let mut data = vec![0; len];
    let mut scales = vec![0; scales_len(rows, columns)];
    let mut data_t = vec![0; len];
    let mut scales_t = vec![0; scales_len(columns, rows)];
    let by_row = (&mut data[..], &mut scales[..]);
    let by_column = (&mut data_t[..], &mut scales_t[..]);
    let stats = match axis {
        Axis::Row => quantize_rows(x, rows, columns, spec, by_row.0, by_row.1),
        Axis::Column => quantize_columns(x, rows, columns, spec, by_column.0, by_column.1),
        Axis::Both => quantize_both(x, rows, columns, spec, by_row, by_column),
    };
    let QuantStats { amax, elements, underflows, saturations, scale_clamps, nonfinite } =
        stats.unwrap();
    let words = [amax.to_bits().into(), elements, underflows, saturations, scale_clamps, nonfinite];
    let mut outputs = Vec::new();
    if *axis != Axis::Column {
        outputs.extend([data, tiled(rows, columns, &scales)]);
    }
    if *axis != Axis::Row {
        outputs.extend([data_t, tiled(columns, rows, &scales_t)]);
    }
    outputs.push(bytemuck::cast_slice::<u64, u8>(&words).to_vec());
    outputs
}

/// Compares what a quantization of a `rows` x `columns` matrix wrote.
pub(crate) fn assert_same(what: &str, got: &[HostTensor], expected: &[Vec<u8>]) {
    assert_eq!(got.len(), expected.len(), "{what}: outputs");
    for (got, expected) in got.iter().zip(expected) {
        if got.dtype == DType::U64 {
            let words = expected.as_chunks::<8>().0;
            let expected: Vec<u64> = words.iter().map(|&word| u64::from_ne_bytes(word)).collect();
            let names = "amax bits, elements, underflows, saturations, clamps, non-finite";
            assert_eq!(got.to_u64(), expected, "{what}: {names}");
            continue;
        }
        assert_eq!(got.bytes.len(), expected.len(), "{what}: {} {:?}", got.dtype, got.shape);
        let differs = got.bytes.iter().zip(expected).position(|(a, b)| a != b);
        if let Some(index) = differs {
            let count = got.bytes.iter().zip(expected).filter(|(a, b)| a != b).count();
            panic!(
                "{what}: {} {:?}: {count} bytes differ, first {index}: {:#04x}, expected {:#04x}",
                got.dtype, got.shape, got.bytes[index], expected[index]
            );
        }
    }
}

/// Numbers of one kind.
pub(crate) fn numbers(kind: &str, rows: usize, columns: usize) -> Vec<f32> {
    let len = rows * columns;
    let base = uniform(len, (rows * 7919 + columns) as u64, 1.0);
    let at = |index: usize| (index / columns, index % columns);
    base.iter()
        .enumerate()
        .map(|(index, &x)| {
            let (row, column) = at(index);
            match kind {
                "random" => x * 3.0,
                // Powers from 2^-60 to 2^60 by squares, so that blocks differ and underflow.
                "wide" => x * 2.0_f32.powi(((row / 16 * 31 + column / 16 * 17) % 120) as i32 - 60),
                // Near the fractions where the rules round up or saturate.
                "edges" => {
                    [448.0, 449.0, 447.0, 256.0, 511.0, 1.75, 1.76, -448.0, 0.0, -0.0]
                        [(x.to_bits() as usize >> 3) % 10]
                        * 2.0_f32.powi((row % 5) as i32 - 2)
                }
                // Subnormals of f32, and the smallest normal numbers: clamped scales.
                "tiny" => f32::from_bits(x.to_bits() >> (5 + column / 32 % 4)) * 0.25,
                "clamped" => x * 2.0_f32.powi(-126) * 2.0_f32.powi((column / 32 % 12) as i32 - 2),
                "zeros" if (row / 32 + column / 32) % 2 == 0 => 0.0,
                "zeros" => -0.0,
                "special" => match (row * 131 + column * 17) % 997 {
                    3 => f32::NAN,
                    500 => f32::INFINITY,
                    700 => f32::NEG_INFINITY,
                    900 => f32::MAX,
                    _ if (row / 32) % 3 == 1 => 0.0,
                    _ => x,
                },
                other => panic!("no numbers of kind {other}"),
            }
        })
        .collect()
}

pub(crate) const KINDS: [&str; 7] =
    ["random", "wide", "edges", "tiny", "clamped", "zeros", "special"];

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize, kind: &str, quantize: &Quantize) {
    let x = numbers(kind, rows, columns);
    let what = format!("{rows}x{columns} {kind} {quantize:?}");
    let empty = outputs(quantize.axis, rows, columns);
    let source = HostTensor::f32(&[rows, columns], &x);
    let got = gpu.run(quantize.clone(), &[source], &empty, false, 1);
    assert_same(&format!("f32 {what}"), &got, &reference(&x, rows, columns, quantize));

    let source = HostTensor::bf16(&[rows, columns], &x);
    let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let got = gpu.run(quantize.clone(), &[source], &empty, false, 1);
    assert_same(&format!("bf16 {what}"), &got, &reference(&x, rows, columns, quantize));
}

trial!(every_kind_of_number_in_every_way);
fn every_kind_of_number_in_every_way() {
    let mut gpu = Gpu::open();
    for spec in specs() {
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            for kind in KINDS {
                let (rows, columns) = gpu.pick((256, 384), (64, 96));
                check(&mut gpu, rows, columns, kind, &ops::Quantize { format: spec, axis });
            }
        }
    }
}

trial!(every_size);
fn every_size() {
    let mut gpu = Gpu::open();
    let sizes = [
        (0, 32),
        (32, 0),
        (1, 1),
        (1, 32),
        (32, 1),
        (31, 33),
        (32, 32),
        (33, 31),
        (127, 129),
        (128, 128),
        (129, 127),
        (130, 136),
        (48, 200),
        (160, 72),
        (257, 260),
        (1000, 12),
        (5, 1024),
    ];
    for (rows, columns) in sizes {
        if !gpu.runs(rows * columns, 3 << 10) {
            continue;
        }
        for spec in specs() {
            for axis in [Axis::Row, Axis::Column, Axis::Both] {
                for kind in ["wide", "special"] {
                    check(&mut gpu, rows, columns, kind, &ops::Quantize { format: spec, axis });
                }
            }
        }
    }
}

trial!(more_tiles_than_the_device_holds);
fn more_tiles_than_the_device_holds() {
    let mut gpu = Gpu::open();
    for granularity in [Granularity::G32, Granularity::G128] {
        let spec = QuantFormat::MXFP8.with_granularity(granularity);
        // An emulated device holds 20 or so.
        let (rows, columns) = gpu.pick((4096, 4096), (512, 1024));
        check(&mut gpu, rows, columns, "wide", &ops::Quantize { format: spec, axis: Axis::Both });
    }
}

trial!(every_bf16);
/// All magnitudes of BF16 as the only element of a block: every scale and clamp there is.
fn every_bf16() {
    let mut gpu = Gpu::open();
    let x: Vec<f32> = (0..1_u32 << 16)
        .flat_map(|bits| (0..32).map(move |i| if i == bits as usize % 32 { bits } else { 0 }))
        .map(|bits| f32::from_bits(bits << 16))
        .collect();
    let (rows, columns) = (1 << 13, 256);
    for scale_rule in [ScaleRule::Rceil, ScaleRule::OcpFloor] {
        let spec = QuantFormat::MXFP8.with_scale_rule(scale_rule);
        let quantize = ops::Quantize { format: spec, axis: Axis::Both };
        let source = HostTensor::bf16(&[rows, columns], &x);
        let values: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let got =
            gpu.run(quantize.clone(), &[source], &outputs(Axis::Both, rows, columns), false, 1);
        assert_same("all of bf16", &got, &reference(&values, rows, columns, &quantize));
    }
}

/// The empty outputs of a quantization of a stack, and what each matrix gives as if it were alone:
/// counters are of all.
pub(crate) fn stack_reference(
    matrices: &[Vec<f32>],
    [rows, columns]: [usize; 2],
    quantize: &Quantize,
) -> (Vec<HostTensor>, Vec<Vec<u8>>) {
    let each: Vec<Vec<Vec<u8>>> =
        matrices.iter().map(|x| reference(x, rows, columns, quantize)).collect();
    let empty: Vec<HostTensor> = outputs(quantize.axis, rows, columns)
        .iter()
        .map(|output| match output.dtype {
            DType::U64 => output.clone(),
            dtype => HostTensor::output(dtype, &[&[matrices.len()], &output.shape[..]].concat()),
        })
        .collect();
    let planes = (0..empty.len() - 1)
        .map(|plane| each.iter().flat_map(|outputs| outputs[plane].clone()).collect());
    let mut expected: Vec<Vec<u8>> = planes.collect();
    let mut counters = [0u64; Quantize::STATISTICS];
    for outputs in &each {
        let words = outputs.last().expect("counters").as_chunks::<8>().0;
        for (index, (all, word)) in counters.iter_mut().zip(words).enumerate() {
            let own = u64::from_ne_bytes(*word);
            // The first are the bits of the largest magnitude.
            *all = if index == 0 { (*all).max(own) } else { *all + own };
        }
    }
    expected.push(bytemuck::cast_slice(&counters).to_vec());
    (empty, expected)
}

/// A stack of matrices of FP32 as experts' weights are.
fn check_stack(gpu: &mut Gpu, matrices: usize, [rows, columns]: [usize; 2], quantize: &Quantize) {
    let kinds = KINDS.into_iter().cycle().take(matrices);
    let numbers: Vec<Vec<f32>> = kinds.map(|kind| numbers(kind, rows, columns)).collect();
    let (empty, expected) = stack_reference(&numbers, [rows, columns], quantize);
    let x = HostTensor::f32(&[matrices, rows, columns], &numbers.concat());
    let got = gpu.run(quantize.clone(), &[x], &empty, false, 1);
    assert_same(&format!("{matrices} of {rows}x{columns} {quantize:?}"), &got, &expected);
}

fn check_stacks(gpu: &mut Gpu) {
    for axis in [Axis::Row, Axis::Column, Axis::Both] {
        let quantize = |format| Quantize { format, axis };
        // Scales of a matrix do not fill a tile, so that the next one's begin anew.
        check_stack(gpu, 3, [40, 160], &quantize(QuantFormat::MXFP8));
        check_stack(gpu, 1, [32, 32], &quantize(QuantFormat::MXFP8));
        let square = QuantFormat::MXFP8.with_granularity(Granularity::G128).square();
        check_stack(gpu, 2, [128, 256], &quantize(square));
    }
}

trial!(stacks_of_matrices);
fn stacks_of_matrices() {
    check_stacks(&mut Gpu::open());
}

emulated! {
    quantize on Sm100a: |gpu| {
        check_stacks(gpu);
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            for granularity in [Granularity::G32, Granularity::G128] {
                let spec = QuantFormat::MXFP8.with_granularity(granularity);
                // Four by three tiles of 128, whole ones and the rest.
                let (rows, columns) = (390, 264);
                check(gpu, rows, columns, "wide", &Quantize { format: spec, axis });
            }
        }
    }
}

emulated! {
    quantize_square on Sm100a: |gpu| {
        let square = QuantFormat::MXFP8
            .with_granularity(Granularity::G128)
            .with_shape(BlockShape::Square);
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            for kind in ["wide", "special", "clamped"] {
                check(gpu, 256, 384, kind, &Quantize { format: square, axis });
            }
        }
    }
}
