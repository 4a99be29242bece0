//! `sample_operand.cu`, byte for byte, and `product_error.cu` against the oracle in f64.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, ProductError, SAMPLED_ROWS, SampleOperand, first_sampled_row};
use deepwell_kernels::ops::product_error::oracle;
use deepwell_precision::nvfp4::BLOCK as FP4_BLOCK;
use deepwell_precision::{
    BLOCK, GemmKind, QuantFormat, e4m3, e8m0, quantize_rows, scale_tiles, scales_len, ue4m3,
};
use half::bf16;

use crate::harness::{Gpu, HostTensor, uniform};
use crate::quantize_nvfp4::Quantized;

/// The window of x `[rows, columns]` that a sample along an axis is.
fn window(x: &[f32], [rows, columns]: [usize; 2], axis: Axis, depth: usize) -> Vec<f32> {
    let is_column = axis == Axis::Column;
    let first = first_sampled_row(if is_column { columns } else { rows });
    let ([row0, column0], [height, width]) = match is_column {
        true => ([0, first], [depth, SAMPLED_ROWS]),
        false => ([first, 0], [SAMPLED_ROWS, depth]),
    };
    let at = |row: usize, column: usize| match row < rows && column < columns {
        true => x[row * columns + column],
        false => 0.0,
    };
    let places = (0..height).flat_map(|row| (0..width).map(move |column| (row, column)));
    places.map(|(row, column)| at(row0 + row, column0 + column)).collect()
}

fn check_sample(gpu: &mut Gpu, shape: [usize; 2], axis: Axis, depth: usize) {
    let x = uniform(shape[0] * shape[1], 3, 4.0);
    let sizes = match axis {
        Axis::Column => [depth, SAMPLED_ROWS],
        _ => [SAMPLED_ROWS, depth],
    };
    for dtype in [DType::Bf16, DType::F32] {
        let source = HostTensor::from_f32(dtype, &shape, &x);
        let expected = HostTensor::from_f32(dtype, &sizes, &window(&x, shape, axis, depth));
        let output = HostTensor::output(dtype, &sizes);
        let got = gpu.run(SampleOperand { axis, depth }, &[source], &[output], false, 1).remove(0);
        assert!(got == expected, "{shape:?} {axis:?} {depth} {dtype}");
    }
}

/// An operand of a GEMM: `[outer, k]` numbers, with their source in the orientation of `axis`.
struct Operand {
    sample: HostTensor,
    planes: Vec<HostTensor>,
    /// Sampled rows, `[128, depth]`: exact, and quantized.
    exact: Vec<f64>,
    quantized: Vec<f64>,
}

impl Operand {
    fn new(
        [outer, k]: [usize; 2],
        axis: Axis,
        format: QuantFormat,
        (dtype, seed): (DType, u64),
        depth: usize,
    ) -> Operand {
        let x: Vec<f32> = uniform(outer * k, seed, 3.0)
            .into_iter()
            .map(|x| bf16::from_f32(x * x * x).to_f32())
            .collect();
        let transposed: Vec<f32> =
            (0..outer * k).map(|at| x[at % outer * k + at / outer]).collect();
        let (source, shape) = match axis {
            Axis::Column => (&transposed, [k, outer]),
            _ => (&x, [outer, k]),
        };
        let sizes =
            if axis == Axis::Column { [depth, SAMPLED_ROWS] } else { [SAMPLED_ROWS, depth] };
        let sample = HostTensor::from_f32(dtype, &sizes, &window(source, shape, axis, depth));
        let (planes, values) = match format.is_of_family(&QuantFormat::NVFP4) {
            true => nvfp4(&x, [outer, k], &format),
            false => mxfp8(&x, [outer, k], &format),
        };
        let first = first_sampled_row(outer);
        let rows = |values: &[f64]| -> Vec<f64> {
            let at = |row: usize, along: usize| match first + row < outer && along < k {
                true => values[(first + row) * k + along],
                false => 0.0,
            };
            (0..SAMPLED_ROWS * depth).map(|index| at(index / depth, index % depth)).collect()
        };
        let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        Operand { sample, planes, exact: rows(&wide), quantized: rows(&values) }
    }
}

fn nvfp4(x: &[f32], shape @ [outer, k]: [usize; 2], format: &QuantFormat) -> Planes {
    let of = Quantized::new(x, shape, format, Axis::Row, None, (None, None));
    let blocks = k.div_ceil(FP4_BLOCK);
    let value = |at: usize| {
        let (row, along) = (at / k, at % k);
        let code = of.data[row * k.div_ceil(2) + along / 2] >> (along % 2 * 4) & 0xF;
        let scale = ue4m3::decode(of.scales[scale_tiles::offset(row, along / FP4_BLOCK, blocks)]);
        let element = f64::from(format.element.decode(code));
        element * f64::from(scale) * f64::from(of.tensor_scale)
    };
    let tiles = scale_tiles::shape(outer, blocks);
    let planes = vec![
        HostTensor::bytes(DType::E2m1, &shape, &of.data),
        HostTensor::bytes(DType::Ue4m3, &tiles, &of.scales),
        HostTensor::f32(&[1], &[of.tensor_scale]),
    ];
    (planes, (0..outer * k).map(value).collect())
}

fn mxfp8(x: &[f32], shape @ [outer, k]: [usize; 2], format: &QuantFormat) -> Planes {
    let blocks = k.div_ceil(BLOCK);
    let (mut data, mut plain) = (vec![0; outer * k], vec![0; scales_len(outer, k)]);
    quantize_rows(x, outer, k, format, &mut data, &mut plain).unwrap();
    let mut scales = vec![0; scale_tiles::tiled_len(outer, blocks)];
    scale_tiles::to_tiles(&plain, outer, blocks, &mut scales).unwrap();
    let value = |at: usize| {
        let scale = e8m0::decode(plain[at / k * blocks + at % k / BLOCK]);
        f64::from(e4m3::decode(data[at])) * f64::from(scale)
    };
    let values = (0..outer * k).map(value).collect();
    let tiles = scale_tiles::shape(outer, blocks);
    let planes = vec![
        HostTensor::bytes(DType::E4m3, &shape, &data),
        HostTensor::bytes(DType::E8m0, &tiles, &scales),
    ];
    (planes, values)
}

/// Planes of an operand and the numbers that they stand for.
type Planes = (Vec<HostTensor>, Vec<f64>);

/// a is `[m, k]`, b is `[n, k]`.
fn check_error(gpu: &mut Gpu, [m, n, k]: [usize; 3], kind: GemmKind, format: QuantFormat) {
    let op = ProductError { kind, weight: "w".to_string(), a: format, b: format };
    let [a_axis, b_axis] = op.axes();
    // A sample may be longer than the operand.
    let depth = k + 5;
    let a = Operand::new([m, k], a_axis, format, (DType::Bf16, 1), depth);
    let b = Operand::new([n, k], b_axis, format, (DType::F32, 2), depth);
    let expected = oracle::product_error([&a.exact, &b.exact], [&a.quantized, &b.quantized], depth);
    let inputs: Vec<HostTensor> =
        [a.sample, b.sample].into_iter().chain(a.planes).chain(b.planes).collect();
    let output = HostTensor::output(DType::F32, &[2]);
    let what = format!("{m}x{n}x{k} {op:?}");
    let got = gpu.run(op, &inputs, &[output], false, 1).remove(0).to_f64();
    // FP32 sums of `k` terms: relative errors of k · 2^-24 of the terms' sizes, which is far below
    // the error of the formats.
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-3 * expected, "{what}: {got} beside {expected}");
    }
    assert!(k == 0 || expected[1] > 1e-5 * expected[0], "{what}: no error to measure");
}

/// Groups of which the largest is in the middle, first, last, the first of equals, or empty.
const GROUPS: [&[usize]; 5] =
    [&[128, 0, 384, 256], &[512, 128], &[0, 0, 256], &[128, 256, 256], &[0, 0]];

fn offsets_of(groups: &[usize]) -> Vec<i32> {
    let ends = groups.iter().scan(0, |end, rows| {
        *end += *rows as i32;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

/// Rows of a group, and how many are before those of the tile.
fn sampled(groups: &[usize]) -> (usize, std::ops::Range<usize>) {
    let offsets = offsets_of(groups);
    let most = groups.iter().max().expect("a group");
    let group = groups.iter().position(|rows| rows == most).expect("the largest");
    (group, offsets[group] as usize..offsets[group + 1] as usize)
}

/// Samples of rows of groups, along both axes, and of a stack of matrices.
fn check_sample_of_group(gpu: &mut Gpu, groups: &[usize], [columns, depth]: [usize; 2]) {
    let offsets = HostTensor::i32(&[groups.len() + 1], &offsets_of(groups));
    let rows = groups.iter().sum::<usize>() + 40;
    let (group, of_group) = sampled(groups);
    for axis in [Axis::Row, Axis::Column] {
        let sizes = match axis {
            Axis::Column => [depth, SAMPLED_ROWS],
            _ => [SAMPLED_ROWS, depth],
        };
        let x = uniform(rows * columns, 3, 4.0);
        let of_rows = &x[of_group.start * columns..of_group.end * columns];
        let stack = uniform(groups.len() * 140 * columns, 4, 4.0);
        let matrix = &stack[group * 140 * columns..][..140 * columns];
        for (source, shape, part, rows_of_part) in [
            (&x, vec![rows, columns], of_rows, of_group.len()),
            (&stack, vec![groups.len(), 140, columns], matrix, 140),
        ] {
            let expected = window(part, [rows_of_part, columns], axis, depth);
            for dtype in [DType::Bf16, DType::F32] {
                let inputs = [HostTensor::from_f32(dtype, &shape, source), offsets.clone()];
                let expected = HostTensor::from_f32(dtype, &sizes, &expected);
                let output = HostTensor::output(dtype, &sizes);
                let op = SampleOperand { axis, depth };
                let got = gpu.run(op, &inputs, &[output], false, 1).remove(0);
                assert!(got == expected, "{groups:?} {shape:?} {axis:?} {dtype}");
            }
        }
    }
}

/// The error of a grouped GEMM: as that of the GEMM of the largest group, whose operands are
/// those of this group alone.
fn check_error_of_group(
    gpu: &mut Gpu,
    groups: &[usize],
    [n, k]: [usize; 2],
    kind: GemmKind,
    format: QuantFormat,
) {
    let op = ProductError { kind, weight: "w".to_string(), a: format, b: format };
    let (group, rows) = sampled(groups);
    let is_wgrad = kind == GemmKind::Wgrad;
    let depth = if is_wgrad { 300 } else { k + 5 };
    let operand = |of: usize, shape: [usize; 2], index: usize| {
        let source = [(DType::Bf16, 10), (DType::F32, 20)][index];
        let source = (source.0, source.1 + of as u64);
        Operand::new(shape, op.axes()[index], format, source, depth)
    };
    // Operands of groups, and of the rows that no group has.
    let of_rows = |outer: usize, index: usize| -> Vec<Operand> {
        let shape = |&rows: &usize| if is_wgrad { [outer, rows] } else { [rows, outer] };
        let all = groups.iter().chain(&[128]).map(shape).enumerate();
        all.map(|(of, shape)| operand(of, shape, index)).collect()
    };
    let outer = |index: usize| if is_wgrad { [n, k][index] } else { k };
    let (a, b) = match is_wgrad {
        true => (of_rows(outer(0), 0), of_rows(outer(1), 1)),
        false => {
            let stack = (0..groups.len()).map(|of| operand(of, [n, k], 1)).collect();
            (of_rows(outer(0), 0), stack)
        }
    };
    let (of_a, of_b) = (&a[group], &b[group]);
    let expected = oracle::product_error(
        [&of_a.exact, &of_b.exact],
        [&of_a.quantized, &of_b.quantized],
        depth,
    );
    let all_rows = groups.iter().sum::<usize>() + 128;
    let count = groups.len();
    let mut inputs = vec![of_a.sample.clone(), of_b.sample.clone()];
    inputs.extend(match is_wgrad {
        true => joined(&a, [n, all_rows], true, count),
        false => joined(&a, [all_rows, k], false, count),
    });
    inputs.extend(match is_wgrad {
        true => joined(&b, [k, all_rows], true, count),
        false => stacked(&b, [n, k]),
    });
    inputs.push(HostTensor::i32(&[count + 1], &offsets_of(groups)));
    let output = HostTensor::output(DType::F32, &[2]);
    let what = format!("{groups:?} {n}x{k} {op:?}");
    let got = gpu.run(op, &inputs, &[output], false, 1).remove(0).to_f64();
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-3 * expected, "{what}: {got} beside {expected}");
    }
    assert_eq!(expected[1] > 1e-5 * expected[0], !rows.is_empty(), "{what}: no error to measure");
}

/// Planes of operands below each other or, along the rows, beside each other; the last operand
/// belongs to no group.
fn joined(
    operands: &[Operand],
    shape: [usize; 2],
    is_beside: bool,
    groups: usize,
) -> Vec<HostTensor> {
    let plane = |index: usize| {
        let planes = operands.iter().map(|operand| &operand.planes[index]);
        // Lines of tiles of scales, or of elements.
        let lines = match (is_beside, index) {
            (false, _) => 1,
            (true, 0) => shape[0],
            (true, _) => shape[0].div_ceil(scale_tiles::TILE_ROWS),
        };
        let line = |line: usize| -> Vec<u8> {
            let of = |plane: &HostTensor| {
                let bytes = plane.bytes.len() / lines;
                plane.bytes[line * bytes..][..bytes].to_vec()
            };
            planes.clone().flat_map(of).collect()
        };
        (0..lines).flat_map(line).collect::<Vec<u8>>()
    };
    let mut planes = with_shape(operands, &shape, [plane(0), plane(1)]);
    if operands[0].planes.len() == 3 {
        planes.push(tensor_scales(&operands[..groups]));
    }
    planes
}

/// Planes of matrices one after the other.
fn stacked(operands: &[Operand], shape: [usize; 2]) -> Vec<HostTensor> {
    let plane = |index: usize| -> Vec<u8> {
        operands.iter().flat_map(|operand| operand.planes[index].bytes.clone()).collect()
    };
    let shape = [&[operands.len()], &shape[..]].concat();
    let mut planes = with_shape(operands, &shape, [plane(0), plane(1)]);
    if operands[0].planes.len() == 3 {
        planes.push(tensor_scales(operands));
    }
    planes
}

fn with_shape(
    operands: &[Operand],
    shape: &[usize],
    [data, scales]: [Vec<u8>; 2],
) -> Vec<HostTensor> {
    let [of_data, of_scales] = [0, 1].map(|index| operands[0].planes[index].dtype);
    let block = if of_scales == DType::Ue4m3 { FP4_BLOCK } else { BLOCK };
    let (stack, matrix) = shape.split_at(shape.len() - 2);
    let tiles = scale_tiles::shape(matrix[0], matrix[1].div_ceil(block));
    vec![
        HostTensor::bytes(of_data, shape, &data),
        HostTensor::bytes(of_scales, &[stack, &tiles[..]].concat(), &scales),
    ]
}

fn tensor_scales(operands: &[Operand]) -> HostTensor {
    let scales: Vec<f32> =
        operands.iter().map(|operand| operand.planes[2].to_f64()[0] as f32).collect();
    HostTensor::f32(&[operands.len(), 1], &scales)
}

trial!(groups_of_every_size);
fn groups_of_every_size() {
    let mut gpu = Gpu::open();
    for groups in GROUPS {
        for sizes in [[40, 48], [300, 520], [129, 100]] {
            check_sample_of_group(&mut gpu, groups, sizes);
        }
        for kind in [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad] {
            for format in [QuantFormat::NVFP4, QuantFormat::MXFP8] {
                check_error_of_group(&mut gpu, groups, [130, 96], kind, format);
                check_error_of_group(&mut gpu, groups, [40, 264], kind, format);
            }
        }
    }
}

trial!(samples_of_every_size);
fn samples_of_every_size() {
    let mut gpu = Gpu::open();
    for shape in [[1, 1], [127, 40], [130, 33], [300, 20], [20, 300], [400, 129]] {
        for (axis, depth) in [(Axis::Row, 48), (Axis::Column, 64), (Axis::Row, 20)] {
            check_sample(&mut gpu, shape, axis, depth);
        }
    }
}

trial!(errors_of_every_gemm);
fn errors_of_every_gemm() {
    let mut gpu = Gpu::open();
    for [m, n, k] in [[1, 1, 16], [128, 128, 64], [130, 300, 96], [400, 129, 160]] {
        for kind in [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad] {
            for format in [QuantFormat::NVFP4, QuantFormat::MXFP8] {
                check_error(&mut gpu, [m, n, k], kind, format);
            }
        }
    }
}

emulated! {
    sample_operand on Sm90a: |gpu| {
        check_sample(gpu, [300, 70], Axis::Row, 80);
        check_sample(gpu, [70, 300], Axis::Column, 80);
        check_sample_of_group(gpu, &[128, 0, 384], [70, 80]);
    }
}

emulated! {
    product_error on Sm90a: |gpu| {
        check_error(gpu, [400, 130, 144], GemmKind::Wgrad, QuantFormat::NVFP4);
        check_error(gpu, [130, 400, 96], GemmKind::Dgrad, QuantFormat::MXFP8);
        check_error_of_group(gpu, &[128, 0, 384], [130, 96], GemmKind::Fprop, QuantFormat::NVFP4);
        check_error_of_group(gpu, &[128, 0, 384], [130, 96], GemmKind::Wgrad, QuantFormat::MXFP8);
    }
}
