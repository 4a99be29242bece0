//! `stochastic_round_nvfp4_groups.cu` against the CPU's rounding of each group: every byte must be
//! the same.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, StochasticRound};
use deepwell_precision::nvfp4::{BLOCK, ScaleOrder};
use deepwell_precision::{ElementRounding, Hadamard16, Philox, QuantFormat, Source, scale_tiles};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::quantize_nvfp4::outer_and_k;
use crate::quantize_nvfp4_groups::{Parts, expected, nearest, source};

/// Seed and step, of which the low half counts.
const KEY: [u64; 2] = [0x0123_4567_89AB_CDEF, 3 << 32 | 17];

fn check_of<S: Source>(
    gpu: &mut Gpu,
    (source, x): (HostTensor, &[S]),
    (parts, columns): (Parts<'_>, usize),
    op: &StochasticRound,
    what: &str,
) {
    let rows = x.len() / columns;
    let (outer, k) = outer_and_k(op.axis, rows, columns);
    let before = expected(x, parts, columns, (&nearest(op.format), op.axis), None);
    let stream = StochasticRound::stream("stochastic_round") | u64::from(KEY[1] as u32);
    let philox = Some(Philox { seed: KEY[0], stream });
    let rounded = expected(x, parts, columns, (&op.format, op.axis), philox);
    assert_eq!(rounded.scales, before.scales, "{what}");
    let count = before.tensor_scales.len();
    let inputs = [
        source,
        HostTensor::bytes(
            DType::Ue4m3,
            &scale_tiles::shape(outer, k.div_ceil(BLOCK)),
            &before.scales,
        ),
        HostTensor::f32(&[count, 1], &before.tensor_scales),
        HostTensor::u64(&[2], &KEY),
        parts.offsets().expect("groups"),
    ];
    let output = HostTensor::output(DType::E2m1, &[outer, k]);
    let got = gpu.run(op.clone(), &inputs, &[output], false, 1).remove(0).bytes;
    let wrong = got.iter().zip(&rounded.data).position(|(a, b)| a != b);
    let wrong = wrong.map(|index| (index, got[index], rounded.data[index]));
    assert_eq!(wrong, None, "{what}: byte, got, expected");
}

fn check(gpu: &mut Gpu, groups: &[usize], behind: usize, columns: usize, kind: &str) {
    let parts = Parts::Groups(groups, behind);
    let x = source(parts, columns, kind);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let shape = [x.len() / columns, columns];
    let plain = QuantFormat::NVFP4.with_rounding(ElementRounding::Stochastic);
    let transformed = plain.with_hadamard(Some(Hadamard16::TRAINING));
    for axis in [Axis::Row, Axis::Column] {
        for format in [plain, plain.square().with_order(ScaleOrder::Te), transformed] {
            if format.hadamard.is_some() && axis == Axis::Row && !columns.is_multiple_of(BLOCK) {
                continue;
            }
            let op = StochasticRound { format, axis, columns: None };
            let what = format!("{groups:?} + {behind} x {columns} {kind} {op:?}");
            let source = HostTensor::f32(&shape, &x);
            check_of(gpu, (source, &x), (parts, columns), &op, &format!("f32 {what}"));
            let source = HostTensor::bf16(&shape, &x);
            check_of(gpu, (source, &rounded), (parts, columns), &op, &format!("bf16 {what}"));
        }
    }
}

trial!(every_byte_of_every_group);
fn every_byte_of_every_group() {
    let mut gpu = Gpu::open();
    for (groups, behind, columns) in
        [(&[128][..], 0, 17), (&[0, 128, 0, 256], 128, 144), (&[0, 0], 128, 32)]
    {
        for kind in ["random", "special", "outlier"] {
            check(&mut gpu, groups, behind, columns, kind);
        }
    }
}

emulated! {
    stochastic_round_nvfp4_groups on Sm90a: |gpu| {
        check(gpu, &[128, 0, 256], 128, 144, "special");
    }
}
