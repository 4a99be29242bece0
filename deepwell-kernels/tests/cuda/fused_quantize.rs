//! An op fused with quantizations of its results: the bits of the op alone, and of the CPU's
//! quantization of what it stores.

use deepwell_ir::Op;
use deepwell_ir::ops::{Axis, Epilogue, Fused, Quantize};
use deepwell_precision::{Granularity, QuantFormat};
use half::bf16;

use crate::harness::{Gpu, HostTensor};
use crate::mixture::{Choice, HARD, Mixture};
use crate::quantize::{assert_same, outputs, reference, specs};

/// Runs `op` fused, named `name`, whose first outputs of `of_core` are quantized as `entries` say:
/// all of them kept, each alone and none; in either order.
pub(crate) fn check_fused(
    gpu: &mut Gpu,
    op: &Op,
    name: &str,
    inputs: &[HostTensor],
    of_core: &[HostTensor],
    entries: &[Quantize],
    what: &str,
) {
    check_fused_of_sequences(gpu, 1, op, name, inputs, of_core, entries, what);
}

/// [`check_fused`] of rows that are tokens of sequences of `seq`.
#[expect(clippy::too_many_arguments, reason = "a case of a table")]
pub(crate) fn check_fused_of_sequences(
    gpu: &mut Gpu,
    seq: usize,
    op: &Op,
    name: &str,
    inputs: &[HostTensor],
    of_core: &[HostTensor],
    entries: &[Quantize],
    what: &str,
) {
    let alone = gpu.run(op.clone(), inputs, of_core, false, seq);
    let quantized = entries.len();
    // What the CPU makes of each output is the same for every way to fuse.
    let references: Vec<Vec<Vec<u8>>> = entries
        .iter()
        .zip(&alone)
        .map(|(quantize, alone)| {
            let &[rows, columns] = alone.shape.as_slice() else { panic!("no matrix") };
            let y: Vec<bf16> = bytemuck::pod_collect_to_vec(&alone.bytes);
            reference(&y, rows, columns, quantize)
        })
        .collect();
    for kept in 0..1usize << quantized {
        let is_kept = |output: usize| output >= quantized || kept >> output & 1 == 1;
        let mut order: Vec<usize> = (0..quantized).collect();
        if kept == 0 {
            order.reverse();
        }
        let step = |&of: &usize| Epilogue::Quantize { of, quantize: entries[of].clone() };
        let epilogue = order.iter().map(step).collect();
        let what = format!("{} {what} kept={kept} {entries:?}", op.name());
        let kept_outputs = (0..of_core.len()).filter(|&output| is_kept(output));
        let mut targets: Vec<HostTensor> =
            kept_outputs.map(|output| of_core[output].clone()).collect();
        for &output in &order {
            let &[rows, columns] = of_core[output].shape.as_slice() else { panic!("no matrix") };
            targets.extend(outputs(entries[output].axis, rows, columns));
        }
        let skipped = (0..of_core.len()).filter(|&output| !is_kept(output)).collect();
        let fused = Fused { core: Box::new(op.clone()), epilogue, skipped };
        assert_eq!(Op::from(fused.clone()).name(), name);
        let got = gpu.run(fused.clone(), inputs, &targets, false, seq);
        for (output, alone) in alone.iter().enumerate() {
            if let Some(position) = fused.position(output) {
                assert!(got[position] == *alone, "{what}: output {output} differs from its own");
            }
        }
        for step in fused.quantizations() {
            let what = format!("{what}: operands of output {}", step.of);
            assert_same(&what, &got[step.positions], &references[step.of]);
        }
    }
}

/// Calls `check` with mixtures and columns, capacities and ways to quantize two results: groups
/// that are whole tiles and not, empty ones and dropped pairs, rows of one tile and of several,
/// whole ones and not; every way to share exponents along each axis.
pub(crate) fn each_mixture(mut check: impl FnMut(Mixture, usize, usize, &[Quantize; 2])) {
    let both = |granularity| {
        let format = QuantFormat::MXFP8.with_granularity(granularity);
        [Quantize { format, axis: Axis::Both }, Quantize { format, axis: Axis::Both }]
    };
    let (fine, wide) = (both(Granularity::G32), both(Granularity::G128));
    for (mixture, columns) in HARD.into_iter().zip([8, 64, 24, 264, 40, 512, 136, 128, 8, 8]) {
        // The last but one has many rows.
        check(mixture, columns, usize::MAX, if columns == 264 { &wide } else { &fine });
    }
    check(HARD[5], 264, 7, &fine);
    check(HARD[5], 64, 0, &fine);
    // Whole tiles, in two bands of columns.
    let whole = Mixture { tokens: 33, experts: 3, top_k: 2, choice: Choice::Spread, align: 128 };
    check(whole, 256, 20, &wide);
    check(whole, 640, usize::MAX, &fine);
    // More tiles than the emulated device holds CTAs at a time, by a factor that is not whole.
    check(whole, 1408, 20, &wide);
    check(whole, 1280, usize::MAX, &fine);
    for axis in [Axis::Row, Axis::Column] {
        for format in [fine[0].format, wide[0].format] {
            let quantize = Quantize { format, axis };
            check(whole, 384, usize::MAX, &[quantize.clone(), quantize]);
        }
    }
    let specs = specs();
    for (index, &format) in specs.iter().enumerate() {
        let other = specs[(index + 3) % specs.len()];
        let axis = [Axis::Row, Axis::Column, Axis::Both][index % 3];
        check(
            HARD[7],
            72,
            usize::MAX,
            &[Quantize { format, axis }, Quantize { format: other, axis }],
        );
    }
}
