//! `stochastic_round_nvfp4.cu` against the CPU's rounding: every byte must be the same.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, PartOfColumns, StochasticRound};
use deepwell_precision::nvfp4::{BLOCK, ScaleOrder};
use deepwell_precision::{ElementRounding, Hadamard16, Philox, QuantFormat, Source, scale_tiles};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::quantize_nvfp4::{Quantized, numbers_of, outer_and_k};

/// Seed and step, of which the low half counts.
const KEY: [u64; 2] = [0x0123_4567_89AB_CDEF, 3 << 32 | 17];

fn check_of<S: Source>(
    gpu: &mut Gpu,
    (source, x): (HostTensor, &[S]),
    shape: [usize; 2],
    op: &StochasticRound,
    what: &str,
) {
    let [rows, columns] = shape;
    let (outer, k) = outer_and_k(op.axis, rows, columns);
    let nearest = op.format.with_rounding(ElementRounding::Nearest);
    // A slice has the amax of the whole tensor.
    let amax = op.columns.map(|_| 50.0);
    let before = Quantized::new(x, shape, &nearest, op.axis, amax, (None, None));
    let stream = StochasticRound::stream("stochastic_round") | u64::from(KEY[1] as u32);
    let philox = Some(Philox { seed: KEY[0], stream });
    let words = op.columns.map(|PartOfColumns { place, parts }| match op.axis {
        Axis::Column => ((place * columns * rows) as u64, rows as u64),
        _ => ((place * columns) as u64, (parts * columns) as u64),
    });
    let expected = Quantized::new(x, shape, &op.format, op.axis, amax, (philox, words));
    assert_eq!(expected.scales, before.scales, "{what}");
    let tiles = scale_tiles::shape(outer, k.div_ceil(BLOCK));
    let mut inputs = vec![
        source,
        HostTensor::bytes(DType::Ue4m3, &tiles, &before.scales),
        HostTensor::f32(&[1], &[before.tensor_scale]),
        HostTensor::u64(&[2], &KEY),
    ];
    inputs.extend(amax.map(|amax| HostTensor::f32(&[1], &[amax])));
    let output = HostTensor::output(DType::E2m1, &[outer, k]);
    let got = gpu.run(op.clone(), &inputs, &[output], false, 1).remove(0).bytes;
    let wrong = got.iter().zip(&expected.data).position(|(a, b)| a != b);
    let wrong = wrong.map(|index| (index, got[index], expected.data[index]));
    assert_eq!(wrong, None, "{what}: byte, got, expected");
}

/// x is `[rows, columns]`.
pub(crate) fn check(gpu: &mut Gpu, shape: [usize; 2], kind: &str) {
    let [rows, columns] = shape;
    let x = numbers_of(kind, rows, columns);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let plain = QuantFormat::NVFP4.with_rounding(ElementRounding::Stochastic);
    let transformed = plain.with_hadamard(Some(Hadamard16::TRAINING));
    let part = Some(PartOfColumns { place: 1, parts: 3 });
    for axis in [Axis::Row, Axis::Column] {
        let (_, k) = outer_and_k(axis, rows, columns);
        for (format, columns_of) in [
            (plain, None),
            (plain.square(), None),
            (plain.with_order(ScaleOrder::Te), part),
            (transformed, None),
        ] {
            if format.hadamard.is_some() && !k.is_multiple_of(BLOCK) {
                continue;
            }
            let op = StochasticRound { format, axis, columns: columns_of };
            let what = format!("{rows}x{columns} {kind} {op:?}");
            let source = HostTensor::f32(&shape, &x);
            check_of(gpu, (source, &x), shape, &op, &format!("f32 {what}"));
            let source = HostTensor::bf16(&shape, &x);
            check_of(gpu, (source, &rounded), shape, &op, &format!("bf16 {what}"));
        }
    }
}

trial!(every_byte_at_every_size);
fn every_byte_at_every_size() {
    let mut gpu = Gpu::open();
    for shape in [
        [0, 32],
        [32, 0],
        [1, 1],
        [15, 17],
        [31, 33],
        [64, 64],
        [65, 63],
        [130, 200],
        [257, 260],
        [1000, 12],
    ] {
        if gpu.runs(shape[0] * shape[1], 8 << 10) {
            for kind in ["random", "wide", "edges", "tiny", "special", "outlier"] {
                check(&mut gpu, shape, kind);
            }
        }
    }
}

emulated! {
    stochastic_round_nvfp4 on Sm90a: |gpu| check(gpu, [256, 272], "special")
}
