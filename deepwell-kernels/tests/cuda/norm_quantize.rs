//! `rms_norm_quantize.cu` and `layer_norm_quantize.cu`: the bits of the normalization alone, and of
//! the CPU's quantization of what it stores.

use deepwell_ir::ops::{Axis, Epilogue, Fused, Quantize};
use deepwell_ir::{DType, Op, ops};
use deepwell_precision::{Granularity, QuantFormat};
use half::bf16;

use crate::harness::{Gpu, HostTensor, uniform};
use crate::quantize::{assert_same, outputs, reference, specs};

const EPS: f64 = 1e-5;
/// The fused ops, in the order of [`norms`].
const FUSED: [&str; 4] = [
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "layer_norm_quantize",
    "add_layer_norm_quantize",
];

/// A normalization and its operands.
struct Norm {
    op: Op,
    inputs: Vec<HostTensor>,
    /// What it writes, alone.
    outputs: Vec<HostTensor>,
    /// Which of those is normalized.
    y: usize,
}

/// Rows whose blocks differ in size, with what is not finite in a few of them.
fn matrix(rows: usize, columns: usize, seed: u64) -> HostTensor {
    let mut x = uniform(rows * columns, seed, 2.0);
    for (index, x) in x.iter_mut().enumerate() {
        let (row, column) = (index / columns, index % columns);
        *x *= 2f32.powi((column / 40 % 9) as i32 - 4);
        match (row % 61, column) {
            (7, 5) => *x = f32::NAN,
            (19, 3) => *x = f32::INFINITY,
            (30, _) => *x = 0.0,
            _ => {}
        }
    }
    HostTensor::bf16(&[rows, columns], &x)
}

fn norms(rows: usize, columns: usize) -> [Norm; 4] {
    let vector = |seed| HostTensor::bf16(&[columns], &uniform(columns, seed, 2.0));
    let (x, delta) = (matrix(rows, columns, 1), matrix(rows, columns, 2));
    let (weight, bias) = (vector(3), vector(4));
    let empty = HostTensor::output(DType::Bf16, &[rows, columns]);
    let of_row = HostTensor::output(DType::F32, &[rows]);
    let alone = |op: Op, more: &[&HostTensor], outputs: &[&HostTensor], y| Norm {
        op,
        inputs: std::iter::once(&x).chain(more.iter().copied()).cloned().collect(),
        outputs: outputs.iter().copied().cloned().collect(),
        y,
    };
    let (rms, add_rms) = (ops::RmsNorm { eps: EPS }, ops::AddRmsNorm { eps: EPS });
    let (layer, add_layer) = (ops::LayerNorm { eps: EPS }, ops::AddLayerNorm { eps: EPS });
    [
        alone(rms.into(), &[&weight], &[&empty, &of_row], 0),
        alone(add_rms.into(), &[&delta, &weight], &[&empty, &empty, &of_row], 1),
        alone(layer.into(), &[&weight, &bias], &[&empty, &of_row, &of_row], 0),
        alone(add_layer.into(), &[&delta, &weight, &bias], &[&empty, &empty, &of_row, &of_row], 1),
    ]
}

fn check(gpu: &mut Gpu, rows: usize, columns: usize, quantize: &Quantize, keep: bool) {
    check_some(gpu, |_| true, (rows, columns), quantize, keep);
}

/// The fused ops of a file, `rms_norm_quantize` for example, along each axis, with rows over four
/// CTAs, which take four M-blocks of 128.
pub(crate) fn check_file(gpu: &mut Gpu, file: &str) {
    for (axis, keep) in [(Axis::Row, true), (Axis::Column, false), (Axis::Both, true)] {
        let quantize = Quantize { format: QuantFormat::MXFP8, axis };
        check_some(gpu, |name| name.ends_with(file), (390, 392), &quantize, keep);
    }
}

fn check_some(
    gpu: &mut Gpu,
    is_asked_for: impl Fn(&str) -> bool,
    (rows, columns): (usize, usize),
    quantize: &Quantize,
    keep: bool,
) {
    let norms = norms(rows, columns).into_iter().zip(FUSED);
    for (norm, name) in norms.filter(|(_, name)| is_asked_for(name)) {
        let what = format!("{name} {rows}x{columns} keep={keep} {quantize:?}");
        let alone = gpu.run(norm.op.clone(), &norm.inputs, &norm.outputs, false, 1);
        let y: Vec<bf16> = alone[norm.y].to_f64().iter().map(|&y| bf16::from_f64(y)).collect();
        let expected = reference(&y, rows, columns, quantize);

        let fused = Fused {
            core: Box::new(norm.op),
            epilogue: vec![Epilogue::Quantize { of: norm.y, quantize: quantize.clone() }],
            skipped: (!keep).then_some(norm.y).into_iter().collect(),
        };
        assert_eq!(Op::from(fused.clone()).name(), name);
        let is_kept = |index: usize| keep || index != norm.y;
        let kept: Vec<usize> = (0..norm.outputs.len()).filter(|&index| is_kept(index)).collect();
        let mut empty: Vec<_> = kept.iter().map(|&index| norm.outputs[index].clone()).collect();
        empty.extend(outputs(quantize.axis, rows, columns));
        let got = gpu.run(fused, &norm.inputs, &empty, false, 1);
        for (got, &index) in got.iter().zip(&kept) {
            assert!(*got == alone[index], "{what}: output {index} differs from the norm's alone");
        }
        assert_same(&what, &got[kept.len()..], &expected);
    }
}

trial!(every_way_to_quantize);
fn every_way_to_quantize() {
    let mut gpu = Gpu::open();
    for (index, spec) in specs().into_iter().enumerate() {
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            let (rows, columns) = gpu.pick((160, 768), (36, 136));
            check(&mut gpu, rows, columns, &Quantize { format: spec, axis }, index % 2 == 0);
        }
    }
}

trial!(every_size);
fn every_size() {
    let mut gpu = Gpu::open();
    // Nothing, one, tile - 1 and + 1, rows over one to eight CTAs, and longer than these hold.
    let sizes = [
        (0, 256),
        (1, 8),
        (31, 136),
        (127, 128),
        (129, 384),
        (33, 1000),
        (130, 2048),
        (64, 2056),
        (257, 4096),
        (40, 5120),
        (5, 11008),
    ];
    for (rows, columns) in sizes {
        // The CTAs of an emulated device hold rows of no more.
        if !gpu.runs(columns, 512) {
            continue;
        }
        for granularity in [Granularity::G32, Granularity::G128] {
            let spec = QuantFormat::MXFP8.with_granularity(granularity);
            let keep = granularity == Granularity::G32;
            check(&mut gpu, rows, columns, &Quantize { format: spec, axis: Axis::Both }, keep);
        }
    }
}

trial!(more_m_blocks_than_the_device_holds);
fn more_m_blocks_than_the_device_holds() {
    let mut gpu = Gpu::open();
    let quantize = Quantize { format: QuantFormat::MXFP8, axis: Axis::Both };
    let (rows, columns) = gpu.pick((16 * 1024 + 1, 1024), (1281, 264));
    check(&mut gpu, rows, columns, &quantize, true);
}
