//! A producer and the block quantization of its outputs, in one kernel.

use std::borrow::Cow;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Axis, Quantize};
use crate::op::{MathUnit, OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, Op, OpError};

/// One block quantization behind a producer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizedOutput {
    /// Which output of the producer, counted among all that the producer alone would have.
    pub output: usize,
    /// How it is quantized.
    pub quantize: Quantize,
    /// Whether the high-precision output stays an output of the fused op: another node reads it.
    /// Entries of one and the same output agree.
    pub keep: bool,
}

/// `producer`, then the block quantization of some of its outputs, in one kernel that need not
/// write what nobody else reads.
///
/// Takes the producer's inputs. Gives the producer's outputs in order, those left out that an
/// entry of `quantized` does not keep; then for each entry what its [`Quantize`] gives: row codes
/// and scales, column codes and scales, counters.
///
/// The fused result is bit for bit that of the two ops one after the other: what is quantized is
/// the output as it would have been stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WithQuantize {
    /// What is computed first.
    pub producer: Box<Op>,
    /// What is quantized of it; at least one entry.
    pub quantized: Vec<QuantizedOutput>,
}

/// Producers that may be fused: the name of the fused op, and how many outputs the producer has.
fn fused_form(producer: &Op) -> Option<(&'static str, usize)> {
    Some(match producer {
        Op::RmsNorm(_) => ("rms_norm_quantize", 2),
        Op::AddRmsNorm(_) => ("add_rms_norm_quantize", 3),
        Op::RmsNormBackward(_) => ("rms_norm_backward_quantize", 2),
        Op::LayerNorm(_) => ("layer_norm_quantize", 3),
        Op::AddLayerNorm(_) => ("add_layer_norm_quantize", 4),
        Op::LayerNormBackward(_) => ("layer_norm_backward_quantize", 3),
        Op::SwiGlu(_) => ("swiglu_quantize", 1),
        Op::SwiGluBackward(_) => ("swiglu_backward_quantize", 2),
        Op::Gelu(_) => ("gelu_quantize", 1),
        Op::GeluBackward(_) => ("gelu_backward_quantize", 1),
        Op::RopeBackward(_) => ("rope_backward_quantize", 1),
        Op::Linear(_) => ("linear_quantize", 1),
        Op::LinearInputGrad(_) => ("linear_input_grad_quantize", 1),
        Op::MxGemm(_) => ("mx_gemm_quantize", 1),
        Op::WithActivation(op) => (op.quantized_name()?, op.output_count()),
        _ => return None,
    })
}

impl WithQuantize {
    /// Whether there is a fused form of `producer` at all.
    pub fn is_producer(producer: &Op) -> bool {
        fused_form(producer).is_some()
    }

    /// How many outputs the producer alone would have; 0 for an op that has no fused form.
    pub fn producer_output_count(&self) -> usize {
        fused_form(&self.producer).map_or(0, |(_, count)| count)
    }

    /// Whether output `output` of the producer is an output of the fused op too.
    pub fn keeps(&self, output: usize) -> bool {
        self.quantized.iter().all(|entry| entry.output != output || entry.keep)
    }

    /// Where output `output` of the producer stands among the outputs of the fused op; none when
    /// it is not kept.
    pub fn position_of_output(&self, output: usize) -> Option<usize> {
        self.keeps(output).then(|| (0..output).filter(|&earlier| self.keeps(earlier)).count())
    }

    /// Where the outputs of entry `entry` of [`WithQuantize::quantized`] stand among the outputs
    /// of the fused op.
    pub fn positions_of_quantized(&self, entry: usize) -> Range<usize> {
        let of_producer = (0..self.producer_output_count()).filter(|&o| self.keeps(o)).count();
        let before: usize =
            self.quantized[..entry].iter().map(|earlier| earlier.quantize.output_count()).sum();
        let start = of_producer + before;
        start..start + self.quantized[entry].quantize.output_count()
    }

    /// Shape of what entry `entry` quantizes, from the shapes of the fused op's outputs.
    pub fn source_shape(&self, entry: usize, output_shapes: &[Vec<usize>]) -> Vec<usize> {
        let mut shape = output_shapes[self.positions_of_quantized(entry).start].clone();
        if self.quantized[entry].quantize.axis == Axis::Column {
            shape.reverse();
        }
        shape
    }

    fn error(&self, expected: impl Into<String>, got: impl Into<String>) -> OpError {
        OpError { op: self.name(), expected: expected.into(), got: got.into() }
    }

    /// The rules that entries obey among themselves and towards the producer's `outputs`.
    fn check_entries(&self, outputs: &[OutputType]) -> Result<(), OpError> {
        if self.quantized.is_empty() {
            return Err(self.error("at least one quantized output", "none"));
        }
        for entry in &self.quantized {
            let output = outputs.get(entry.output).ok_or_else(|| {
                self.error(
                    format!("quantized outputs below {}", outputs.len()),
                    entry.output.to_string(),
                )
            })?;
            if output.kind != OutputKind::Activation {
                return Err(self.error(
                    format!("an activation as quantized output {}", entry.output),
                    format!("{:?}", output.kind).to_lowercase(),
                ));
            }
            let of_same = self.quantized.iter().filter(|other| other.output == entry.output);
            if of_same.clone().any(|other| other.keep != entry.keep) {
                return Err(self.error(
                    format!("one `keep` for all copies of output {}", entry.output),
                    "both",
                ));
            }
        }
        Ok(())
    }
}

impl OpRule for WithQuantize {
    /// The producer's name followed by `_quantize`; `with_quantize` where there is no such op.
    fn name(&self) -> &'static str {
        fused_form(&self.producer).map_or("with_quantize", |(name, _)| name)
    }

    fn attributes(&self) -> String {
        let mut parts: Vec<String> = Vec::with_capacity(1 + self.quantized.len());
        parts.push(self.producer.rule().attributes());
        for entry in &self.quantized {
            let fate = if entry.keep { " kept" } else { "" };
            let attributes = entry.quantize.attributes();
            parts.push(format!("out{}{fate}: {attributes}", entry.output));
        }
        parts.retain(|part| !part.is_empty());
        parts.join("; ")
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        if !WithQuantize::is_producer(&self.producer) {
            return Err(self.error(
                "a producer that has a fused form: a normalization, an activation function, the \
                 backward of one of them or of a rotation, or a product of a linear layer",
                format!("`{}`", self.producer.name()),
            ));
        }
        let produced = self.producer.rule().infer(inputs)?;
        self.check_entries(&produced)?;
        let mut outputs = Vec::with_capacity(produced.len() + 5 * self.quantized.len());
        for (index, output) in produced.iter().enumerate() {
            if self.keeps(index) {
                outputs.push(output.clone());
            }
        }
        for (index, entry) in self.quantized.iter().enumerate() {
            let source = &produced[entry.output];
            let of_source = TensorType { shape: source.shape.clone(), dtype: source.dtype };
            let same = self.quantized[..index].iter().filter(|other| other.output == entry.output);
            // Named as a quantization of its own would be: a second copy has another name.
            let copy = match same.count() {
                0 => "mx".to_string(),
                number => format!("mx{number}"),
            };
            for output in entry.quantize.infer(&[of_source])? {
                let parts = [source.suffix.as_ref(), copy.as_str(), output.suffix.as_ref()];
                let suffix: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
                outputs.push(OutputType { suffix: Cow::Owned(suffix.join(".")), ..output });
            }
        }
        Ok(outputs)
    }

    /// The sum of both.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let kept = (0..self.producer_output_count()).filter(|&o| self.keeps(o)).count();
        let copies: usize = self.quantized.iter().map(|e| e.quantize.output_count()).sum();
        let (inputs, outputs) = shapes.split_at(shapes.len().saturating_sub(kept + copies));
        let mut of_producer = inputs.to_vec();
        for output in 0..self.producer_output_count() {
            let entry = || self.quantized.iter().position(|entry| entry.output == output);
            of_producer.push(match (self.position_of_output(output), entry()) {
                (Some(position), _) => outputs[position].clone(),
                (None, Some(entry)) => self.source_shape(entry, outputs),
                (None, None) => continue,
            });
        }
        let quantizing = (0..self.quantized.len())
            .map(|entry| self.quantized[entry].quantize.flops(&[self.source_shape(entry, outputs)]))
            .sum::<u64>();
        self.producer.rule().flops(&of_producer) + quantizing
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        self.producer.rule().unit(operands)
    }
}

#[cfg(test)]
mod tests {
    use deepwell_precision::MxSpec;

    use super::*;
    use crate::{Dim, Shape, ops};

    fn quantize(axis: Axis) -> Quantize {
        Quantize { spec: MxSpec::default(), axis }
    }

    fn entry(output: usize, axis: Axis, keep: bool) -> QuantizedOutput {
        QuantizedOutput { output, quantize: quantize(axis), keep }
    }

    fn matrix(columns: usize) -> TensorType {
        TensorType { shape: Shape(vec![Dim::TOKENS, columns.into()]), dtype: DType::Bf16 }
    }

    fn fused(producer: impl Into<Op>, quantized: Vec<QuantizedOutput>) -> WithQuantize {
        WithQuantize { producer: Box::new(producer.into()), quantized }
    }

    #[test]
    fn outputs_are_the_kept_ones_then_the_copies() {
        let vector = TensorType { shape: Shape(vec![64.into()]), dtype: DType::Bf16 };
        let x = [matrix(64), matrix(64), vector];
        let names = |op: &WithQuantize, inputs: &[TensorType]| -> Vec<String> {
            op.infer(inputs).unwrap().into_iter().map(|output| output.suffix.into()).collect()
        };
        let norm = |quantized| fused(ops::AddRmsNorm { eps: 1e-5 }, quantized);
        let op = norm(vec![entry(1, Axis::Both, false)]);
        assert_eq!(op.name(), "add_rms_norm_quantize");
        assert_eq!(
            names(&op, &x),
            ["sum", "rstd", "mx.row", "mx.row.scale", "mx.col", "mx.col.scale", "mx.stats"]
        );
        assert_eq!([0, 1, 2].map(|output| op.position_of_output(output)), [Some(0), None, Some(1)]);
        assert_eq!(op.positions_of_quantized(0), 2..7);
        let op = norm(vec![entry(1, Axis::Row, true), entry(1, Axis::Column, true)]);
        assert_eq!(
            names(&op, &x),
            [
                "sum",
                "",
                "rstd",
                "mx.row",
                "mx.row.scale",
                "mx.stats",
                "mx1.col",
                "mx1.col.scale",
                "mx1.stats"
            ]
        );
        assert_eq!(op.positions_of_quantized(1), 6..9);
        let op = fused(
            ops::SwiGluBackward {},
            vec![entry(0, Axis::Column, false), entry(1, Axis::Row, true)],
        );
        assert_eq!(
            names(&op, &[matrix(32), matrix(32), matrix(32)]),
            [
                "dup",
                "dgate.mx.col",
                "dgate.mx.col.scale",
                "dgate.mx.stats",
                "dup.mx.row",
                "dup.mx.row.scale",
                "dup.mx.stats"
            ]
        );
    }

    #[test]
    fn work_is_that_of_both() {
        // gate, up; then column codes, scales, counters: 5 per element, and 3 for one copy.
        let op = fused(ops::SwiGlu {}, vec![entry(0, Axis::Column, false)]);
        let (tokens, width) = (64, 96);
        let shapes = [
            vec![tokens, width],
            vec![tokens, width],
            vec![width, tokens],
            vec![1, 1, 512],
            vec![6],
        ];
        assert_eq!(op.flops(&shapes), (5 + 3) * (tokens * width) as u64);
        assert_eq!(op.source_shape(0, &shapes[2..]), [tokens, width]);
    }

    #[test]
    fn wrong_ones_are_refused() {
        let check = |op: WithQuantize, inputs: &[TensorType], expected: &str| {
            let message = op.infer(inputs).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        };
        let two = [matrix(32), matrix(32)];
        check(
            fused(ops::Add {}, vec![entry(0, Axis::Row, false)]),
            &two,
            "`with_quantize`: expected a producer that has a fused form",
        );
        check(fused(ops::SwiGlu {}, vec![]), &two, "at least one quantized output, got none");
        check(
            fused(ops::SwiGlu {}, vec![entry(1, Axis::Row, false)]),
            &two,
            "quantized outputs below 1, got 1",
        );
        check(
            fused(ops::SwiGlu {}, vec![entry(0, Axis::Row, false), entry(0, Axis::Column, true)]),
            &two,
            "one `keep` for all copies of output 0",
        );
        let vector = TensorType { shape: Shape(vec![32.into()]), dtype: DType::Bf16 };
        check(
            fused(ops::RmsNorm { eps: 1e-5 }, vec![entry(1, Axis::Row, false)]),
            &[matrix(32), vector],
            "an activation as quantized output 1, got statistic",
        );
    }
}
