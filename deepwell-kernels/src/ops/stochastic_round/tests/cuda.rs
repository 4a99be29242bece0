//! `stochastic_round.cu` against the CPU's rounding: every byte must be the same.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, StochasticRound};
use deepwell_precision::{
    BLOCK, ElementFormat, ElementRounding, Philox, QuantFormat, e8m0, quantize_columns,
    quantize_rows, scale_tiles, scales_len,
};

use crate::harness::{Gpu, HostTensor};
use crate::mx::tiled;
use crate::quantize::numbers;

/// Seed and step, of which the low half counts.
const KEY: [u64; 2] = [0x0123_4567_89AB_CDEF, 3 << 32 | 17];

/// x is `[rows, columns]`.
pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize, kind: &str) {
    for (axis, dtype) in [
        (Axis::Row, DType::Bf16),
        (Axis::Column, DType::Bf16),
        (Axis::Row, DType::F32),
        (Axis::Column, DType::F32),
    ] {
        let what = format!("{rows}x{columns} {kind} {} of {dtype}", axis.name());
        let source = HostTensor::from_f32(dtype, &[rows, columns], &numbers(kind, rows, columns));
        let x: Vec<f32> = source.to_f64().iter().map(|&x| x as f32).collect();
        let by_column = axis == Axis::Column;
        let (outer, k) = if by_column { (columns, rows) } else { (rows, columns) };
        let mut data = vec![0; x.len()];
        let mut plain = vec![0; scales_len(outer, k)];
        let quantize = if by_column { quantize_columns::<f32> } else { quantize_rows::<f32> };
        quantize(&x, rows, columns, &QuantFormat::MXFP8, &mut data, &mut plain).unwrap();
        let stream = StochasticRound::stream("stochastic_round") | u64::from(KEY[1] as u32);
        let philox = Philox { seed: KEY[0], stream };
        let expected = |index: usize| {
            let (row, along) = (index / k, index % k);
            let at = if by_column { along * columns + row } else { index };
            let factor = e8m0::reciprocal(plain[row * k.div_ceil(BLOCK) + along / BLOCK]);
            ElementFormat::E4M3.encode_stochastic(x[at] * factor, philox.word(index as u64))
        };
        let inputs = [
            source,
            HostTensor::bytes(
                DType::E8m0,
                &scale_tiles::shape(outer, k.div_ceil(BLOCK)),
                &tiled(outer, k, &plain),
            ),
            HostTensor::u64(&[2], &KEY),
        ];
        let output = HostTensor::output(DType::E4m3, &[outer, k]);
        let format = QuantFormat::MXFP8.with_rounding(ElementRounding::Stochastic);
        let got =
            gpu.run(StochasticRound { format, axis, columns: None }, &inputs, &[output], false, 1);
        let wrong = (0..x.len()).find(|&index| got[0].bytes[index] != expected(index));
        let wrong = wrong.map(|index| (index, got[0].bytes[index], expected(index)));
        assert_eq!(wrong, None, "{what}: index, got, expected");
    }
}

trial!(every_byte_at_every_size);
fn every_byte_at_every_size() {
    let mut gpu = Gpu::open();
    for (rows, columns) in
        [(0, 32), (32, 0), (1, 1), (31, 33), (64, 64), (65, 63), (130, 200), (257, 260), (1000, 12)]
    {
        if gpu.runs(rows * columns, 64 << 10) {
            for kind in ["wide", "edges", "tiny", "special"] {
                check(&mut gpu, rows, columns, kind);
            }
        }
    }
}

emulated! {
    stochastic_round on Sm100a: |gpu| check(gpu, 200, 260, "wide")
}
