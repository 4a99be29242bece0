//! `quantize_nvfp4_operands.cu` against the CPU's quantization and stochastic rounding of each
//! operand: data, scales, tensor scales and counters must be the same to the bit.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, Quantize, QuantizeOperands};
use deepwell_precision::nvfp4::{BLOCK, ScaleOrder};
use deepwell_precision::{ElementRounding, Hadamard16, Philox, QuantFormat, QuantStats};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::quantize::assert_same;
use crate::quantize_nvfp4::{Quantized, numbers_of, outer_and_k, planes};

/// Seed and step, of which the low half counts.
const KEY: [u64; 2] = [0x0123_4567_89AB_CDEF, 3 << 32 | 17];
/// Streams of the operands; the low half is the step's.
const STREAMS: [u64; 2] = [0x1234_5678 << 32, 0x9ABC_DEF0 << 32];

/// Formats of the operands: those of activations, of gradients, and without parts of the recipe.
pub(crate) fn formats() -> Vec<[QuantFormat; 2]> {
    let plain = QuantFormat::NVFP4;
    let te = plain.with_order(ScaleOrder::Te);
    let transformed = |format: QuantFormat| format.with_hadamard(Some(Hadamard16::TRAINING));
    let random = |format: QuantFormat| format.with_rounding(ElementRounding::Stochastic);
    vec![
        [plain.with_four_six(true), transformed(plain)],
        [random(plain), random(transformed(plain))],
        [te, random(transformed(te))],
        [random(te), te],
        [transformed(te), random(plain.square())],
        [random(transformed(plain)), transformed(te)],
    ]
}

/// Quantizes numbers of a kind to both operands.
pub(crate) fn check(gpu: &mut Gpu, shape: [usize; 2], kind: &str, formats: [QuantFormat; 2]) {
    let [rows, columns] = shape;
    let x = numbers_of(kind, rows, columns);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let streams: [Option<u64>; 2] =
        std::array::from_fn(|at| formats[at].is_stochastic().then_some(STREAMS[at]));
    let [row, column] = formats;
    let row = Quantize { format: row, axis: Axis::Row };
    let column = Quantize { format: column, axis: Axis::Column };
    let op = QuantizeOperands { row, column, streams };
    let (mut outputs, mut expected) = (Vec::new(), Vec::new());
    for (Quantize { format, axis }, stream) in op.operands().into_iter().zip(streams) {
        let (outer, k) = outer_and_k(*axis, rows, columns);
        outputs.extend(planes(outer, k));
        outputs.push(HostTensor::output(DType::U64, &[Quantize::STATISTICS]));
        let nearest = format.with_rounding(ElementRounding::Nearest);
        let nearest = Quantized::new(&rounded, shape, &nearest, *axis, None, (None, None));
        let step = u64::from(KEY[1] as u32);
        let philox = stream.map(|stream| Philox { seed: KEY[0], stream: stream | step });
        let quantized = Quantized::new(&rounded, shape, format, *axis, None, (philox, None));
        expected.extend([quantized.data, quantized.scales]);
        expected.push(quantized.tensor_scale.to_ne_bytes().to_vec());
        let QuantStats { amax, elements, underflows, saturations, scale_clamps, nonfinite } =
            nearest.stats;
        let words =
            [amax.to_bits().into(), elements, underflows, saturations, scale_clamps, nonfinite];
        expected.push(bytemuck::cast_slice::<u64, u8>(&words).to_vec());
    }
    let mut inputs = vec![HostTensor::bf16(&shape, &x)];
    inputs.extend(op.has_key().then(|| HostTensor::u64(&[2], &KEY)));
    let what = format!("{rows}x{columns} {kind} {op:?}");
    let got = gpu.run(op, &inputs, &outputs, false, 1);
    assert_same(&what, &got, &expected);
}

trial!(every_byte_at_every_size);
fn every_byte_at_every_size() {
    let mut gpu = Gpu::open();
    for shape in [
        [0, 32],
        [32, 0],
        [1, 1],
        [15, 17],
        [16, 1],
        [16, 16],
        [12, 20],
        [48, 132],
        [31, 33],
        [64, 64],
        [80, 63],
        [130, 200],
        [256, 272],
        [1008, 12],
    ] {
        if !gpu.runs(shape[0] * shape[1], 4 << 10) {
            continue;
        }
        for formats in formats() {
            let [across, down] = formats.map(|format| format.hadamard.is_some());
            let is_whole = |needs: bool, k: usize| !needs || k.is_multiple_of(BLOCK);
            let is_random = formats.iter().any(QuantFormat::is_stochastic);
            let is_refused = is_random && shape.iter().any(|size| !size.is_multiple_of(4));
            if is_refused || !is_whole(across, shape[1]) || !is_whole(down, shape[0]) {
                continue;
            }
            for kind in ["random", "wide", "edges", "tiny", "zeros", "special", "outlier"] {
                check(&mut gpu, shape, kind, formats);
            }
        }
    }
}

emulated! {
    quantize_nvfp4_operands on Sm90a: |gpu| {
        for (formats, kind) in formats().into_iter().zip(["wide", "special"].into_iter().cycle()) {
            check(gpu, [272, 160], kind, formats);
        }
        check(gpu, [144, 35], "outlier", formats()[0]);
    }
}
