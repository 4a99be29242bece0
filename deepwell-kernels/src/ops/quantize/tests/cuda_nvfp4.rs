//! `quantize_nvfp4.cu` against the CPU's quantization: data, scales, tensor scale and counters must
//! be the same to the bit.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::nvfp4::{self, BLOCK, Common, ScaleBound, ScaleOrder};
use deepwell_precision::{
    Hadamard16, Philox, QuantFormat, QuantStats, ScaleFormat, Source, packed, scale_tiles,
};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::quantize::{assert_same, numbers};

/// Every setting of the format, as far as they do not exclude each other.
pub(crate) fn formats() -> Vec<QuantFormat> {
    let mut formats = Vec::new();
    for order in [ScaleOrder::Deepwell, ScaleOrder::Te] {
        for bound in [ScaleBound::Max448, ScaleBound::Max256] {
            let scale = ScaleFormat::Ue4m3(bound);
            let plain = QuantFormat { scale, ..QuantFormat::NVFP4 }.with_order(order);
            formats.extend([plain, plain.square(), plain.with_four_six(true)]);
        }
    }
    formats
}

/// The recipe's transform.
pub(crate) fn transformed() -> [QuantFormat; 2] {
    [ScaleOrder::Deepwell, ScaleOrder::Te]
        .map(|order| QuantFormat::NVFP4.with_order(order).with_hadamard(Some(Hadamard16::TRAINING)))
}

/// Numbers of one kind: those of MXFP8's tests, and one outlier under which blocks vanish.
pub(crate) fn numbers_of(kind: &str, rows: usize, columns: usize) -> Vec<f32> {
    let mut x = numbers(if kind == "outlier" { "random" } else { kind }, rows, columns);
    if let ("outlier", Some(last)) = (kind, x.last_mut()) {
        *last = 3e4;
    }
    x
}

/// Rows of an operand, and its contraction.
pub(crate) fn outer_and_k(axis: Axis, rows: usize, columns: usize) -> (usize, usize) {
    if axis == Axis::Column { (columns, rows) } else { (rows, columns) }
}

/// An operand that the CPU quantized.
pub(crate) struct Quantized {
    pub(crate) data: Vec<u8>,
    /// In tiles.
    pub(crate) scales: Vec<u8>,
    pub(crate) tensor_scale: f32,
    pub(crate) stats: QuantStats,
}

impl Quantized {
    /// Quantizes a matrix along an axis; `amax` is that of the tensor, if the matrix is a slice.
    pub(crate) fn new<S: Source>(
        x: &[S],
        [rows, columns]: [usize; 2],
        format: &QuantFormat,
        axis: Axis,
        amax: Option<f32>,
        words: (Option<Philox>, Option<(u64, u64)>),
    ) -> Quantized {
        let (outer, k) = outer_and_k(axis, rows, columns);
        let of_matrix = match axis {
            Axis::Column => nvfp4::amax_of_columns(x, rows, columns, format),
            _ => nvfp4::amax_of_rows(x, rows, columns, format),
        };
        let amax = amax.unwrap_or(of_matrix.unwrap());
        let mut data = vec![0; packed::fp4_len(outer, k)];
        let mut plain = vec![0; nvfp4::scales_len(outer, k)];
        let common = Common { amax, philox: words.0, words: words.1 };
        let quantize = match axis {
            Axis::Column => nvfp4::quantize_columns::<S>,
            _ => nvfp4::quantize_rows::<S>,
        };
        let (tensor_scale, stats) =
            quantize(x, rows, columns, format, &common, &mut data, &mut plain).unwrap();
        let mut scales = vec![0; scale_tiles::tiled_len(outer, k.div_ceil(BLOCK))];
        scale_tiles::to_tiles(&plain, outer, k.div_ceil(BLOCK), &mut scales).unwrap();
        Quantized { data, scales, tensor_scale, stats }
    }
}

/// The planes of an operand `[outer, k]`, to be written.
pub(crate) fn planes(outer: usize, k: usize) -> [HostTensor; 3] {
    [
        HostTensor::output(DType::E2m1, &[outer, k]),
        HostTensor::output(DType::Ue4m3, &scale_tiles::shape(outer, k.div_ceil(BLOCK))),
        HostTensor::output(DType::F32, &[1]),
    ]
}

fn check_of<S: Source>(
    gpu: &mut Gpu,
    (source, x): (HostTensor, &[S]),
    shape: [usize; 2],
    quantize: &Quantize,
    amax: Option<f32>,
    what: &str,
) {
    let [rows, columns] = shape;
    let mut outputs = Vec::new();
    let mut expected = Vec::new();
    let mut stats = QuantStats::default();
    for &axis in quantize.axes() {
        let (outer, k) = outer_and_k(axis, rows, columns);
        outputs.extend(planes(outer, k));
        let of_axis = Quantized::new(x, shape, &quantize.format, axis, amax, (None, None));
        stats.merge(&of_axis.stats);
        expected.extend([of_axis.data, of_axis.scales]);
        expected.push(of_axis.tensor_scale.to_ne_bytes().to_vec());
    }
    outputs.push(HostTensor::output(DType::U64, &[Quantize::STATISTICS]));
    let QuantStats { amax: largest, elements, underflows, saturations, scale_clamps, nonfinite } =
        stats;
    let words =
        [largest.to_bits().into(), elements, underflows, saturations, scale_clamps, nonfinite];
    expected.push(bytemuck::cast_slice::<u64, u8>(&words).to_vec());
    let inputs: Vec<HostTensor> =
        [source].into_iter().chain(amax.map(|amax| HostTensor::f32(&[1], &[amax]))).collect();
    let got = gpu.run(quantize.clone(), &inputs, &outputs, false, 1);
    assert_same(what, &got, &expected);
}

/// Quantizes numbers of a kind from both types, also as a slice of a tensor with larger numbers.
pub(crate) fn check(gpu: &mut Gpu, shape: [usize; 2], kind: &str, quantize: &Quantize) {
    let [rows, columns] = shape;
    let x = numbers_of(kind, rows, columns);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    for amax in [None, Some(1000.0)] {
        let what = format!("{rows}x{columns} {kind} amax {amax:?} {quantize:?}");
        let source = HostTensor::f32(&shape, &x);
        check_of(gpu, (source, &x), shape, quantize, amax, &format!("f32 {what}"));
        let source = HostTensor::bf16(&shape, &x);
        check_of(gpu, (source, &rounded), shape, quantize, amax, &format!("bf16 {what}"));
    }
}

const KINDS: [&str; 8] =
    ["random", "wide", "edges", "tiny", "clamped", "zeros", "special", "outlier"];

/// Formats with their axes.
fn forms() -> Vec<Quantize> {
    let all = [Axis::Row, Axis::Column, Axis::Both];
    let of = |format, axes: &[Axis]| -> Vec<Quantize> {
        axes.iter().map(|&axis| Quantize { format, axis }).collect()
    };
    let mut forms: Vec<Quantize> =
        formats().into_iter().flat_map(|format| of(format, &all)).collect();
    forms.extend(transformed().into_iter().flat_map(|format| of(format, &all[..2])));
    forms
}

trial!(every_kind_of_number_in_every_form);
fn every_kind_of_number_in_every_form() {
    let mut gpu = Gpu::open();
    let shape = gpu.pick([256, 384], [48, 80]);
    for quantize in forms() {
        for kind in KINDS {
            check(&mut gpu, shape, kind, &quantize);
        }
    }
}

trial!(every_size);
fn every_size() {
    let mut gpu = Gpu::open();
    for shape in [
        [0, 32],
        [32, 0],
        [1, 1],
        [1, 16],
        [16, 1],
        [15, 17],
        [17, 15],
        [33, 31],
        [127, 129],
        [128, 128],
        [129, 127],
        [130, 136],
        [48, 200],
        [160, 72],
        [257, 260],
        [1000, 12],
        [5, 1024],
    ] {
        if !gpu.runs(shape[0] * shape[1], 3 << 10) {
            continue;
        }
        for quantize in forms() {
            let (_, k) = outer_and_k(quantize.axis, shape[0], shape[1]);
            if quantize.format.hadamard.is_none() || k.is_multiple_of(BLOCK) {
                check(&mut gpu, shape, "random", &quantize);
            }
        }
    }
}

emulated! {
    quantize_nvfp4 on Sm90a: |gpu| {
        let square = QuantFormat::NVFP4.square();
        for kind in ["special", "wide"] {
            check(gpu, [265, 250], kind, &Quantize { format: square, axis: Axis::Both });
        }
        for axis in [Axis::Row, Axis::Column] {
            check(gpu, [250, 265], "wide", &Quantize { format: square, axis });
            let format = QuantFormat::NVFP4.with_four_six(true);
            check(gpu, [250, 272], "wide", &Quantize { format, axis });
            check(gpu, [272, 256], "special", &Quantize { format: transformed()[0], axis });
        }
    }
}
