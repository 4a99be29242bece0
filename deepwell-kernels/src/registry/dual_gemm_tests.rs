//! Two GEMMs as one call beside the f64 oracles of a GEMM and of SwiGLU.

use deepwell_ir::ops::{Activation, DualGemm, Linear, ScaledGemm, SwiGlu};
use deepwell_ir::{DType, GemmKind, Instance};
use deepwell_precision::{QuantFormat, nvfp4, packed, quantize_rows, scale_tiles, scales_len};
use half::bf16;

use super::*;
use crate::backend::Backend;
use crate::cpu::{CpuBackend, CpuCatalog, cpu_target};
use crate::ops::dequantize::oracle as mx_oracle;
use crate::ops::linear::oracle as linear_oracle;
use crate::ops::scaled_gemm::nvfp4_oracle;
use crate::ops::swiglu::oracle as swiglu_oracle;
use crate::runtime::cpu::test_support::{Random, for_thread_counts};
use crate::single_call::SingleCall;

/// How the operands of a GEMM are stored.
#[derive(Clone, Copy, Debug)]
enum Stored {
    F32,
    Bf16,
    Mxfp8,
    Nvfp4,
}

/// An operand as planes with their types, and the numbers that it holds.
struct Matrix {
    planes: Vec<(DType, Vec<usize>, Vec<u8>)>,
    numbers: Vec<f64>,
}

impl Matrix {
    fn new(stored: Stored, rows: usize, columns: usize, random: &mut Random) -> Matrix {
        let x: Vec<f32> = random.normals(rows * columns);
        let shape = vec![rows, columns];
        let tiles = |plain: &[u8], every: usize| {
            let blocks = columns.div_ceil(every);
            let mut tiles = vec![0; scale_tiles::tiled_len(rows, blocks)];
            scale_tiles::to_tiles(plain, rows, blocks, &mut tiles).unwrap();
            (vec![rows.div_ceil(128), blocks.div_ceil(4), 512], tiles)
        };
        match stored {
            Stored::F32 => Matrix {
                numbers: x.iter().copied().map(f64::from).collect(),
                planes: vec![(DType::F32, shape, bytemuck::cast_slice(&x).to_vec())],
            },
            Stored::Bf16 => {
                let x: Vec<bf16> = x.iter().copied().map(bf16::from_f32).collect();
                Matrix {
                    numbers: x.iter().map(|x| x.to_f64()).collect(),
                    planes: vec![(DType::Bf16, shape, bytemuck::cast_slice(&x).to_vec())],
                }
            }
            Stored::Mxfp8 => {
                let mut data = vec![0; rows * columns];
                let mut plain = vec![0; scales_len(rows, columns)];
                let format = QuantFormat::MXFP8;
                quantize_rows(&x, rows, columns, &format, &mut data, &mut plain).unwrap();
                let numbers = mx_oracle::dequantize_rows(&data, &plain, rows, columns);
                let (tiles_shape, tiles) = tiles(&plain, 32);
                let planes = vec![(DType::E4m3, shape, data), (DType::E8m0, tiles_shape, tiles)];
                Matrix { planes, numbers }
            }
            Stored::Nvfp4 => {
                let mut data = vec![0; packed::fp4_len(rows, columns)];
                let mut plain = vec![0; nvfp4::scales_len(rows, columns)];
                let common = nvfp4::Common::nearest(nvfp4::amax(&x));
                let format = QuantFormat::NVFP4;
                let quantized = nvfp4::quantize_rows(
                    &x, rows, columns, &format, &common, &mut data, &mut plain,
                );
                let (scale, _) = quantized.unwrap();
                let of_tensor = f64::from(scale);
                let numbers =
                    nvfp4_oracle::dequantize_rows(&data, &plain, of_tensor, rows, columns);
                let (tiles_shape, tiles) = tiles(&plain, 16);
                let planes = vec![
                    (DType::E2m1, shape, data),
                    (DType::Ue4m3, tiles_shape, tiles),
                    (DType::F32, vec![1], scale.to_le_bytes().to_vec()),
                ];
                Matrix { planes, numbers }
            }
        }
    }
}

/// Numbers that a result should hold, and how far off each may be.
struct Expected {
    numbers: Vec<f64>,
    tolerances: Vec<f64>,
}

/// A relative error of one rounding to a type.
fn rounding(dtype: DType) -> f64 {
    if dtype == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-24) }
}

impl Expected {
    /// Of one GEMM: sums in f32 in any order; rounded, and once more where a bias is added.
    fn of_gemm(a: &Matrix, b: &Matrix, bias: Option<&Matrix>, k: usize, to: DType) -> Expected {
        let bias = bias.map(|bias| &bias.numbers[..]);
        let numbers = linear_oracle::forward(&a.numbers, &b.numbers, bias, k);
        let magnitudes = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| x.abs()).collect() };
        let bias = bias.map(magnitudes);
        let a_sizes = magnitudes(&a.numbers);
        let b_sizes = magnitudes(&b.numbers);
        let sizes = linear_oracle::forward(&a_sizes, &b_sizes, bias.as_deref(), k);
        let sums = linear_oracle::forward(&a.numbers, &b.numbers, None, k);
        let tolerances = (0..numbers.len()).map(|i| {
            let of_sums = (k as f64 + 8.0) * rounding(DType::F32) * sizes[i];
            let before_bias = if bias.is_some() { sums[i].abs() } else { 0.0 };
            of_sums + 1.01 * rounding(to) * (numbers[i].abs() + before_bias)
        });
        let tolerances = tolerances.collect();
        Expected { numbers, tolerances }
    }

    /// Of SwiGLU on two results: each error times the slope, which is below 1.1, and one rounding.
    fn of_swiglu(gate: &Expected, up: &Expected, to: DType) -> Expected {
        let numbers = swiglu_oracle::forward(&gate.numbers, &up.numbers);
        let tolerances = (0..numbers.len()).map(|i| {
            let (g, u) = (gate.numbers[i].abs(), up.numbers[i].abs());
            let (of_gate, of_up) = (gate.tolerances[i], up.tolerances[i]);
            1.1 * (u + of_up) * of_gate
                + (g + of_gate) * of_up
                + (rounding(to) + 1e-6) * numbers[i].abs()
        });
        let tolerances = tolerances.collect();
        Expected { numbers, tolerances }
    }

    fn check(&self, what: &str, dtype: DType, bytes: &[u8]) {
        let got: Vec<f64> = match dtype {
            DType::Bf16 => {
                bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
            }
            _ => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into())
                .collect(),
        };
        assert_eq!(got.len(), self.numbers.len(), "{what}");
        for (index, &got) in got.iter().enumerate() {
            let (expected, tolerance) = (self.numbers[index], self.tolerances[index]);
            let is_close = (got - expected).abs() <= tolerance;
            assert!(is_close, "{what} at {index}: {got:e}, expected {expected:e} ± {tolerance:e}");
        }
    }
}

/// Runs one call on the CPU and gives the bytes of its outputs.
fn run(op: &Op, inputs: &[(DType, Vec<usize>, Vec<u8>)]) -> Vec<(DType, Vec<u8>)> {
    let types: Vec<(DType, Vec<usize>)> =
        inputs.iter().map(|(dtype, shape, _)| (*dtype, shape.clone())).collect();
    let operands: Vec<OperandType> = types
        .iter()
        .map(|(dtype, shape)| OperandType { dtype: *dtype, shape: shape.clone() })
        .collect();
    let outputs: Vec<(DType, Vec<usize>)> = op
        .outputs_of(&operands)
        .unwrap()
        .into_iter()
        .map(|output| (output.dtype, output.shape))
        .collect();
    let call = SingleCall::new(op.clone(), &types, &outputs);
    let target = cpu_target(2);
    let choice = call.select(&CpuCatalog, &target).unwrap().choice;
    let program = call.program(choice, target, 1);
    let mut backend = CpuBackend::new();
    backend.allocate(program.arena.bytes).unwrap();
    for (value, (_, _, bytes)) in program.values.iter().zip(inputs) {
        assert_eq!(value.range.bytes, bytes.len(), "{}", op.name());
        backend.write(value.range, bytes).unwrap();
    }
    let prepared = backend.prepare(&program, &program.calls[0], Instance::ONLY).unwrap();
    backend.enqueue(prepared).unwrap();
    let read = |value: &Value| {
        let mut bytes = vec![0; value.range.bytes];
        backend.read(value.range, &mut bytes).unwrap();
        (value.dtype, bytes)
    };
    program.values[inputs.len()..].iter().map(read).collect()
}

#[test]
fn both_results_and_their_swiglu_are_those_of_the_oracle() {
    for (stored, bias, output, [m, n, k]) in [
        (Stored::F32, false, DType::F32, [1, 1, 1]),
        (Stored::F32, true, DType::F32, [33, 17, 65]),
        (Stored::Bf16, false, DType::Bf16, [64, 96, 32]),
        (Stored::Bf16, true, DType::Bf16, [31, 130, 70]),
        (Stored::Mxfp8, false, DType::Bf16, [64, 96, 160]),
        (Stored::Mxfp8, true, DType::Bf16, [130, 32, 96]),
        (Stored::Nvfp4, false, DType::Bf16, [64, 96, 160]),
        (Stored::Nvfp4, false, DType::F32, [33, 130, 32]),
    ] {
        let what = format!("{stored:?} bias {bias} {m} x {n} x {k}");
        let random = &mut Random::new((m * n * k) as u64);
        let a = Matrix::new(stored, m, k, random);
        let [gate, up] = [0, 1].map(|_| Matrix::new(stored, n, k, random));
        let of_bias = if output == DType::F32 { Stored::F32 } else { Stored::Bf16 };
        let biases = [0, 1].map(|_| {
            let vector = Matrix::new(of_bias, 1, n, random);
            let planes = vector.planes.into_iter().map(|(dtype, _, bytes)| (dtype, vec![n], bytes));
            Matrix { planes: planes.collect(), ..vector }
        });
        let kind = GemmKind::Fprop;
        let scaled = |format| ScaledGemm { kind, output, bias, a: format, b: format }.into();
        let gemm: Op = match stored {
            Stored::F32 | Stored::Bf16 => Linear { bias }.into(),
            Stored::Mxfp8 => scaled(QuantFormat::MXFP8),
            Stored::Nvfp4 => scaled(QuantFormat::NVFP4),
        };
        let mut inputs = a.planes.clone();
        for (weight, vector) in [&gate, &up].into_iter().zip(&biases) {
            inputs.extend(weight.planes.clone());
            inputs.extend(vector.planes.clone().into_iter().filter(|_| bias));
        }
        let [of_gate, of_up] = [(&gate, &biases[0]), (&up, &biases[1])].map(|(weight, vector)| {
            Expected::of_gemm(&a, weight, bias.then_some(vector), k, output)
        });
        let of_swiglu = Expected::of_swiglu(&of_gate, &of_up, output);

        let dual = DualGemm { gemm: Box::new(gemm) };
        let step = Epilogue::Activation { of: 0, function: Activation::SwiGlu(SwiGlu {}) };
        let fused = |skipped: &[usize]| -> Op {
            let core = Box::new(dual.clone().into());
            Fused { core, epilogue: vec![step.clone()], skipped: skipped.to_vec() }.into()
        };
        for (op, expected) in [
            (dual.clone().into(), vec![&of_gate, &of_up]),
            (fused(&[]), vec![&of_gate, &of_up, &of_swiglu]),
            // Neither result is stored.
            (fused(&[0, 1]), vec![&of_swiglu]),
        ] {
            for_thread_counts(|| {
                let outputs = run(&op, &inputs);
                assert_eq!(outputs.len(), expected.len(), "{what}");
                for (index, (expected, (dtype, bytes))) in expected.iter().zip(&outputs).enumerate()
                {
                    assert_eq!(*dtype, output, "{what}");
                    expected.check(&format!("{what}, {} result {index}", op.name()), *dtype, bytes);
                }
                outputs
            });
        }
    }
}
