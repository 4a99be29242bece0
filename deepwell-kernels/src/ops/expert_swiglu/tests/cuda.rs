//! `expert_swiglu.cu` and `expert_swiglu_quantize.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::{Axis, ExpertActivation, ExpertSwiGlu, ExpertSwiGluBackward, Quantize};
use deepwell_kernels::ops::expert_swiglu::oracle;
use deepwell_precision::{Granularity, QuantFormat};

use crate::compare::assert_within;
use crate::fused_quantize::{check_fused, each_mixture};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mixture::{Choice, HARD, Mixture};
use crate::quantize::numbers;

const CLAMPED: ExpertActivation = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 2.5 };
const ACTIVATIONS: [ExpertActivation; 2] = [ExpertActivation::SwiGlu, CLAMPED];

fn check(
    gpu: &mut Gpu,
    activation: ExpertActivation,
    mixture: Mixture,
    columns: usize,
    capacity: usize,
) {
    let what = format!("{activation:?} {mixture:?} of {columns}, capacity {capacity}");
    let (rows, pairs) = (mixture.rows(), mixture.tokens * mixture.top_k);
    let len = rows * columns;
    let grouped = mixture.grouped(capacity);
    let maps = mixture.maps(&grouped);
    let is_poisoned = |index: usize| grouped.pairs[index / columns] < 0;
    let matrix = |seed: u64, scale: f32| {
        let mut values = uniform(len, seed, scale);
        // What no pair has is not read.
        for (index, value) in values.iter_mut().enumerate().filter(|(i, _)| is_poisoned(*i)) {
            *value = if index % 2 == 0 { f32::NAN } else { f32::INFINITY };
        }
        HostTensor::bf16(&[rows, columns], &values)
    };
    let (gate, up, dout) = (matrix(1, 6.0), matrix(2, 3.0), matrix(3, 2.0));
    let mut of_pairs = uniform(pairs, 4, 1.0);
    if let Some(gate) = of_pairs.last_mut() {
        *gate = 0.0;
    }
    let gates = HostTensor::f32(&[mixture.tokens, mixture.top_k], &of_pairs);
    let wide = |tensor: &HostTensor| tensor.to_f64();
    let (g, u, d, factors) = (wide(&gate), wide(&up), wide(&dout), wide(&gates));

    // The sigmoid is good to 2^-20 of itself, 1 - s to 2^-20 absolutely, which the gate multiplies;
    // each product rounds by 2^-24.
    let size = |index: usize| {
        let pair = usize::try_from(grouped.pairs[index / columns]).ok();
        let factor = pair.map_or(0.0, |pair| factors[pair].abs());
        (factor, (1.0 + 2.0 * g[index].abs()) * (1.0 + u[index].abs()))
    };
    let bound = |expected: f64, size: f64| expected.abs() / 256.0 + 2f64.powi(-19) * size + 1e-30;
    let of_pair = |index: usize, value: f64| if is_poisoned(index) { 0.0 } else { value };

    let inputs = [&[gate.clone(), up.clone(), gates.clone()][..], &maps].concat();
    let out = HostTensor::output(DType::Bf16, &[rows, columns]);
    let got = gpu.run(ExpertSwiGlu { activation }, &inputs, std::slice::from_ref(&out), false, 1);
    let expected = oracle::forward(activation, &g, &u, &factors, &grouped.pairs);
    let bounds: Vec<f64> = (0..len)
        .map(|index| {
            let (factor, one) = size(index);
            bound(expected[index], of_pair(index, factor * one))
        })
        .collect();
    assert_within(&format!("out {what}"), &got[0].to_f64(), &expected, &bounds);

    let inputs = [&[dout, gate, up, gates.clone()][..], &maps].concat();
    let dgates = HostTensor::output(DType::F32, &gates.shape);
    let outputs = [out.clone(), out, dgates];
    let got = gpu.run(ExpertSwiGluBackward { activation }, &inputs, &outputs, false, 1);
    let [dgate, dup, dgates] = oracle::backward(activation, &d, &g, &u, &factors, &grouped.pairs);
    for (name, got, expected) in [("dgate", &got[0], &dgate), ("dup", &got[1], &dup)] {
        let bounds: Vec<f64> = (0..len)
            .map(|index| {
                let (factor, one) = size(index);
                bound(expected[index], of_pair(index, factor * one * d[index].abs()))
            })
            .collect();
        assert_within(&format!("{name} {what}"), &got.to_f64(), expected, &bounds);
    }
    // Of a dot product also `columns` roundings of sums.
    let mut bounds = vec![1e-30; pairs];
    for index in (0..len).filter(|index| !is_poisoned(*index)) {
        let each = 2f64.powi(-19) + columns as f64 * 2f64.powi(-24);
        bounds[grouped.pairs[index / columns] as usize] += each * size(index).1 * d[index].abs();
    }
    assert_within(&format!("dgates {what}"), &got[2].to_f64(), &dgates, &bounds);
}

fn check_hard(gpu: &mut Gpu) {
    for activation in ACTIVATIONS {
        for (mixture, columns) in HARD.into_iter().zip([8, 64, 3, 24, 33, 512, 64, 9, 40, 1]) {
            check(gpu, activation, mixture, columns, usize::MAX);
        }
        check(gpu, activation, HARD[5], 64, 7);
        check(gpu, activation, HARD[5], 64, 0);
    }
}

/// Fused with the quantization of what comes out: the same bits.
fn check_quantized(
    gpu: &mut Gpu,
    activation: ExpertActivation,
    mixture: Mixture,
    columns: usize,
    capacity: usize,
    how: &[Quantize; 2],
) {
    let (rows, grouped) = (mixture.rows(), mixture.grouped(capacity));
    let maps = mixture.maps(&grouped);
    let matrix = |values: Vec<f32>| {
        let mut values = values;
        // What no pair has is not read.
        for (row, _) in grouped.pairs.iter().enumerate().filter(|(_, pair)| **pair < 0) {
            values[row * columns..][..columns].fill(f32::NAN);
        }
        HostTensor::bf16(&[rows, columns], &values)
    };
    let len = rows * columns;
    let gate = matrix(uniform(len, 1, 6.0));
    let up = matrix(uniform(len, 2, 3.0));
    let kind = if columns == 64 { "special" } else { "wide" };
    let dout = matrix(numbers(kind, rows, columns));
    let shape = [mixture.tokens, mixture.top_k];
    let gates = HostTensor::f32(&shape, &uniform(mixture.tokens * mixture.top_k, 4, 1.0));
    let out = HostTensor::output(DType::Bf16, &[rows, columns]);
    let what = format!("{activation:?} {mixture:?} of {columns}, capacity {capacity}");

    let inputs = [&[gate.clone(), up.clone(), gates.clone()][..], &maps].concat();
    let op = ExpertSwiGlu { activation }.into();
    let name = "expert_swiglu_quantize";
    let of_core = std::slice::from_ref(&out);
    check_fused(gpu, &op, name, &inputs, of_core, &how[..1], &what);

    let inputs = [&[dout, gate, up, gates][..], &maps].concat();
    let op = ExpertSwiGluBackward { activation }.into();
    let of_core = [out.clone(), out, HostTensor::output(DType::F32, &shape)];
    check_fused(gpu, &op, "expert_swiglu_backward_quantize", &inputs, &of_core, how, &what);
}

fn check_all_quantized(gpu: &mut Gpu) {
    let mut index = 0;
    each_mixture(|mixture, columns, capacity, how| {
        index += 1;
        // Both where a kernel has a tile of its own for each.
        let both = columns == 128 || columns == 72;
        for (of, activation) in ACTIVATIONS.into_iter().enumerate() {
            if both || index % 2 == of {
                check_quantized(gpu, activation, mixture, columns, capacity, how);
            }
        }
    });
}

trial!(experts_are_quantized_on_their_way);
fn experts_are_quantized_on_their_way() {
    let mut gpu = Gpu::open();
    check_all_quantized(&mut gpu);
    // More tiles than a GPU holds at a time: each activation once, with dropped pairs and without.
    if gpu.runs(1, 0) {
        let large = Mixture { tokens: 1000, experts: 64, top_k: 4, ..HARD[8] };
        let of = |granularity| Quantize {
            format: QuantFormat::MXFP8.with_granularity(granularity),
            axis: Axis::Both,
        };
        let (fine, wide) = (of(Granularity::G32), of(Granularity::G128));
        let ways = [(usize::MAX, [fine.clone(), fine.clone()]), (50, [wide, fine])];
        for (activation, (capacity, how)) in ACTIVATIONS.into_iter().zip(ways) {
            check_quantized(&mut gpu, activation, large, 1408, capacity, &how);
        }
    }
}

trial!(experts_as_the_oracle);
fn experts_as_the_oracle() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        let large = Mixture { tokens: 2000, experts: 64, top_k: 4, ..HARD[1] };
        check(&mut gpu, ExpertActivation::SwiGlu, large, 1408, usize::MAX);
    }
}

emulated! {
    expert_swiglu on Sm90a: |gpu| {
        check_hard(gpu);
        let mixture =
            Mixture { tokens: 120, experts: 8, top_k: 2, choice: Choice::Spread, align: 32 };
        for activation in ACTIVATIONS {
            for columns in [264, 33] {
                check(gpu, activation, mixture, columns, 40);
            }
        }
    }
}

/// Mixtures of whole tiles.
fn check_whole_tiles(gpu: &mut Gpu) {
    each_mixture(|mixture, columns, capacity, how| {
        // Those of 640 columns are more tiles than the emulated device holds CTAs at a time.
        if mixture.align == 128 && [256, 384, 640].contains(&columns) {
            for activation in ACTIVATIONS {
                check_quantized(gpu, activation, mixture, columns, capacity, how);
            }
        }
    });
}

emulated! {
    expert_swiglu_quantize on Sm100a: check_all_quantized
}

emulated! {
    sm90_expert_swiglu_backward_quantize on Sm90a: check_whole_tiles
}
