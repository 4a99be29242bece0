//! Our own kernels on small inputs. That they are right is what their own tests say; here the
//! emulator has to give a GPU's bits.

use deepwell_ir::ops::{Attention, AttentionHeads, Axis, Epilogue, Fused, Quantize};
use deepwell_ir::{DType, GemmKind, Op, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_precision::{BlockShape, Granularity, QuantFormat, ScaleRule};

use super::bench::Bench;
use super::golden::Group;
use crate::device::open_gpu_or_emulated;
use crate::gemm_operands::Kind;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix};
use crate::quantize::{numbers, outputs};

const SMS_OF_AN_H200: u32 = 132;

/// Runs ops and records what they write.
pub(super) struct Recorder {
    gpu: Gpu,
    group: Group,
}

impl Recorder {
    pub(super) fn new(group: &'static str) -> Recorder {
        // Kernels choose their grid, and with it the order of their sums, by the number of SMs.
        let gpu = open_gpu_or_emulated(Architecture::Sm90a, SMS_OF_AN_H200);
        Recorder { gpu, group: Group::new(group) }
    }

    pub(super) fn finish(self, bench: &Bench) {
        self.group.finish(&bench.properties());
    }

    /// What an op writes, not recorded.
    pub(super) fn run(
        &mut self,
        op: impl Into<Op>,
        inputs: &[HostTensor],
        outputs: &[HostTensor],
        options: RunOptions<'_>,
    ) -> Vec<HostTensor> {
        self.gpu.run_with(op, inputs, outputs, options)
    }

    pub(super) fn record(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        (inputs, outputs): (&[HostTensor], &[HostTensor]),
        options: RunOptions<'_>,
    ) {
        let got = self.run(op, inputs, outputs, options);
        for (index, tensor) in got.iter().enumerate() {
            self.group.record(&format!("{name}, output {index}"), &tensor.bytes);
        }
    }

    fn bf16_gemms(&mut self) {
        let options = RunOptions { kernel: Some("cuda_bf16_gemm"), ..RunOptions::default() };
        for kind in [Kind::Uniform, Kind::Cancelling, Kind::WideRange] {
            for (tokens, outputs, inputs) in [(130, 136, 200), (65, 67, 131)] {
                let x = HostTensor::bf16(&[tokens, inputs], &kind.values(tokens * inputs, 1));
                let w = HostTensor::bf16(&[outputs, inputs], &kind.values(outputs * inputs, 2));
                let dy = HostTensor::bf16(&[tokens, outputs], &kind.values(tokens * outputs, 3));
                let bias = HostTensor::bf16(&[outputs], &uniform(outputs, 4, 8.0));
                let before = uniform(outputs * inputs, 5, 8.0);
                let before = HostTensor::f32(&[outputs, inputs], &before);
                let name = |what: &str| format!("{what} {tokens}x{outputs}x{inputs} {kind:?}");

                let y = [HostTensor::output(DType::Bf16, &[tokens, outputs])];
                let op = ops::Linear { bias: true };
                let given = [x.clone(), w.clone(), bias];
                self.record(&name("linear"), op, (&given, &y), options);

                let dx = [HostTensor::output(DType::Bf16, &[tokens, inputs])];
                let op = ops::LinearDgrad {};
                self.record(&name("input gradient"), op, (&[dy.clone(), w], &dx), options);

                let op = ops::LinearWgrad {};
                let options = RunOptions { accumulate: true, ..options };
                let operands: (&[_], &[_]) = (&[dy, x], &[before]);
                self.record(&name("weight gradient"), op, operands, options);
            }
        }
    }

    fn mx_gemms(&mut self) {
        let options = RunOptions { kernel: Some("cuda_mxfp8_gemm"), ..RunOptions::default() };
        let square = QuantFormat::MXFP8.square();
        for kind in [MxKind::Even, MxKind::Spread] {
            for (rows, columns, k) in [(130, 136, 288), (65, 67, 100)] {
                let a = MxMatrix::new(rows, k, QuantFormat::MXFP8, kind, 1);
                let b = MxMatrix::new(columns, k, square, kind, 50);
                let given = [a.data, a.scales, b.data, b.scales];
                for output in [DType::Bf16, DType::F32] {
                    let op = ops::ScaledGemm {
                        kind: GemmKind::Fprop,
                        output,
                        bias: false,
                        a: QuantFormat::MXFP8,
                        b: square,
                    };
                    let out = [HostTensor::output(output, &[rows, columns])];
                    let name = format!("mxfp8 {rows}x{columns}x{k} {kind:?} {output}");
                    self.record(&name, op, (&given, &out), options);
                }
            }
        }
    }

    fn quantizations(&mut self) {
        let (rows, columns) = (160, 264);
        for (granularity, block, scale_rule) in [
            (Granularity::G32, BlockShape::Row, ScaleRule::Rceil),
            (Granularity::G32, BlockShape::Square, ScaleRule::OcpFloor),
            (Granularity::G128, BlockShape::Square, ScaleRule::Rceil),
        ] {
            let spec = QuantFormat::MXFP8
                .with_granularity(granularity)
                .with_shape(block)
                .with_scale_rule(scale_rule);
            for kind in ["wide", "edges", "tiny", "special"] {
                let values = numbers(kind, rows, columns);
                let quantize = Quantize { format: spec, axis: Axis::Both };
                let empty = outputs(Axis::Both, rows, columns);
                for dtype in [DType::F32, DType::Bf16] {
                    let x = [HostTensor::from_f32(dtype, &[rows, columns], &values)];
                    let name =
                        format!("quantize {dtype} {kind} {granularity:?} {block:?} {scale_rule:?}");
                    let operands: (&[_], &[_]) = (&x, &empty);
                    let options = RunOptions::default();
                    self.record(&name, quantize.clone(), operands, options);
                }
            }
        }
    }

    /// A producer with the quantization of its first output.
    fn fused(&mut self, name: &str, producer: Op, inputs: &[HostTensor], more: &[HostTensor]) {
        let (rows, columns) = (inputs[0].shape[0], inputs[0].shape[1]);
        let quantize = Quantize { format: QuantFormat::MXFP8, axis: Axis::Both };
        let epilogue = vec![Epilogue::Quantize { of: 0, quantize }];
        let op = Fused { core: Box::new(producer), epilogue, skipped: Vec::new() };
        let mut empty = vec![HostTensor::output(DType::Bf16, &[rows, columns])];
        empty.extend_from_slice(more);
        empty.extend(outputs(Axis::Both, rows, columns));
        let operands: (&[_], &[_]) = (inputs, &empty);
        self.record(name, op, operands, RunOptions::default());
    }

    fn fused_quantizations(&mut self) {
        for (rows, columns) in [(129, 384), (33, 1000)] {
            let of_row = HostTensor::output(DType::F32, &[rows]);
            for kind in ["random", "wide"] {
                let x = HostTensor::bf16(&[rows, columns], &numbers(kind, rows, columns));
                let weight = HostTensor::bf16(&[columns], &uniform(columns, 3, 2.0));
                let up = HostTensor::bf16(&[rows, columns], &uniform(rows * columns, 4, 6.0));
                let name = |what: &str| format!("{what} {rows}x{columns} {kind}");
                let norm = ops::RmsNorm { eps: 1e-5 }.into();
                let of_row = std::slice::from_ref(&of_row);
                self.fused(&name("rms norm"), norm, &[x.clone(), weight], of_row);
                self.fused(&name("swiglu"), ops::SwiGlu {}.into(), &[x, up], &[]);
            }
        }
    }

    fn attention(&mut self) {
        for (seq, head_dim, causal) in [(133, 64, true), (70, 128, false), (65, 32, true)] {
            let (batch, heads, kv_heads) = (2, 4, 2);
            let scale = 1.0 / (head_dim as f64).sqrt();
            let op = Attention {
                heads: AttentionHeads {
                    heads,
                    kv_heads,
                    head_dim,
                    scale,
                    causal,
                    ..AttentionHeads::default()
                },
            };
            let matrix = |width: usize, seed| {
                let shape = [batch * seq, width];
                HostTensor::bf16(&shape, &uniform(batch * seq * width, seed, 2.0))
            };
            let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
            let given = [matrix(queries, 1), matrix(keys, 2), matrix(keys, 3)];
            let empty = [
                HostTensor::output(DType::Bf16, &[batch * seq, queries]),
                HostTensor::output(DType::F32, &[batch, heads, seq]),
            ];
            let name = format!("attention {seq} {head_dim} causal={causal}");
            let kernel = Some("cuda_attention");
            let options = RunOptions { seq, kernel, ..RunOptions::default() };
            self.record(&name, op, (&given, &empty), options);
        }
    }

    fn cross_entropy(&mut self) {
        let kernel = Some("cuda_linear_cross_entropy");
        let options = RunOptions { kernel, ..RunOptions::default() };
        for (tokens, hidden, vocab) in [(33, 64, 130), (20, 24, 4097)] {
            let targets: Vec<i32> = (0..tokens).map(|token| token as i32 * 3 % 97).collect();
            let given = [
                HostTensor::bf16(&[tokens, hidden], &uniform(tokens * hidden, 1, 1.0)),
                HostTensor::bf16(&[vocab, hidden], &uniform(vocab * hidden, 2, 1.0)),
                HostTensor::i32(&[tokens], &targets),
                HostTensor::f32(&[1], &[1.0 / tokens as f32]),
            ];
            let empty = [
                HostTensor::output(DType::F32, &[1]),
                HostTensor::output(DType::Bf16, &[tokens, hidden]),
                HostTensor::output(DType::F32, &[vocab, hidden]),
            ];
            let name = format!("cross entropy {tokens}x{vocab}x{hidden}");
            let op = ops::LinearCrossEntropyGrad {};
            self.record(&name, op, (&given, &empty), options);
        }
    }
}

trial!(our_kernels);
fn our_kernels() {
    let bench = Bench::open();
    let mut recorder = Recorder::new("kernels");
    recorder.bf16_gemms();
    recorder.mx_gemms();
    recorder.quantizations();
    recorder.fused_quantizations();
    recorder.attention();
    recorder.cross_entropy();
    recorder.finish(&bench);
}
