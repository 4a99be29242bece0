//! Fused ops as data: a core op and an epilogue in one kernel.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Add, Axis, Check, Gelu, GeluBackward, Quantize, SwiGlu, product};
use crate::op::{MathUnit, OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, Op, OpError, OperandType, Shape};

/// `core`, then the steps of `epilogue`, in one kernel. Results that only the epilogue reads need
/// not be written.
///
/// The core and every step produce *results*, numbered in order: first the results of the core,
/// from 0, then the results of each step. Inputs are the core's inputs, then the additional inputs
/// of each step ([`Epilogue::input_count`]). Outputs are all results in order, except the `skipped`
/// ones.
///
/// The outputs are bit-identical to running the ops one by one: a step reads a result as rounded
/// for storage. Exception: a residual may be added to the unrounded, skipped result of a GEMM, so
/// that the sum is rounded once.
///
/// ```
/// use deepwell_ir::ops::{Activation, Epilogue, Fused, Gelu, Linear};
///
/// let gelu = Epilogue::Activation { of: 0, function: Activation::Gelu(Gelu { tanh: true }) };
/// let core = Box::new(Linear { bias: true }.into());
/// let fused = Fused { core, epilogue: vec![gelu], skipped: vec![0] };
/// assert_eq!(fused.full_name(), "linear_gelu");
/// assert_eq!((fused.position(0), fused.position(1)), (None, Some(0)));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fused {
    /// The first op.
    pub core: Box<Op>,
    /// The steps of the epilogue, in order; at least one.
    pub epilogue: Vec<Epilogue>,
    /// Results that are not stored, in ascending order: only epilogue steps read them.
    pub skipped: Vec<usize>,
}

/// One step of an epilogue. `of` is the number of the result that the step reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Epilogue {
    /// Adds a vector, an additional input, to each row.
    Bias {
        /// Result to add to.
        of: usize,
    },
    /// An element-wise function.
    Activation {
        /// Argument of the function; the first of two for [`Activation::SwiGlu`].
        of: usize,
        /// The function.
        function: Activation,
    },
    /// Adds a matrix, an additional input.
    Residual {
        /// Result to add to.
        of: usize,
    },
    /// Block quantization, with the results of [`Quantize`].
    Quantize {
        /// Result to quantize.
        of: usize,
        /// Format and axes.
        quantize: Quantize,
    },
}

/// An element-wise function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU of one result.
    Gelu(Gelu),
    /// Gradient of GELU; the forward input is an additional input.
    GeluBackward(GeluBackward),
    /// SwiGLU of two consecutive results: gate, then up.
    SwiGlu(SwiGlu),
}

impl Activation {
    fn rule(&self) -> &dyn OpRule {
        match self {
            Activation::Gelu(op) => op,
            Activation::GeluBackward(op) => op,
            Activation::SwiGlu(op) => op,
        }
    }

    /// The function as a separate op.
    fn to_op(&self) -> Op {
        match self.clone() {
            Activation::Gelu(op) => op.into(),
            Activation::GeluBackward(op) => op.into(),
            Activation::SwiGlu(op) => op.into(),
        }
    }
}

impl Epilogue {
    /// The step equivalent to `op` on result `of`; `None` if no step is equivalent.
    pub fn of_op(op: &Op, of: usize) -> Option<Epilogue> {
        let activation = |function| Epilogue::Activation { of, function };
        Some(match op {
            Op::Gelu(op) => activation(Activation::Gelu(op.clone())),
            Op::GeluBackward(op) => activation(Activation::GeluBackward(op.clone())),
            Op::SwiGlu(op) => activation(Activation::SwiGlu(op.clone())),
            Op::Add(_) => Epilogue::Residual { of },
            Op::Quantize(op) => Epilogue::Quantize { of, quantize: op.clone() },
            _ => return None,
        })
    }

    /// The step as a separate op; `None` for [`Epilogue::Bias`], which is a part of ops.
    pub fn to_op(&self) -> Option<Op> {
        Some(match self {
            Epilogue::Activation { function, .. } => function.to_op(),
            Epilogue::Residual { .. } => Add {}.into(),
            Epilogue::Quantize { quantize, .. } => quantize.clone().into(),
            Epilogue::Bias { .. } => return None,
        })
    }

    /// Lower-case name.
    pub fn name(&self) -> &'static str {
        match self {
            Epilogue::Bias { .. } => "bias",
            Epilogue::Activation { function, .. } => function.rule().name(),
            Epilogue::Residual { .. } => "residual",
            Epilogue::Quantize { .. } => "quantize",
        }
    }

    /// Numbers of the results that the step reads.
    pub fn reads(&self) -> Range<usize> {
        match *self {
            Epilogue::Activation { of, function: Activation::SwiGlu(_) } => of..of + 2,
            Epilogue::Bias { of }
            | Epilogue::Activation { of, .. }
            | Epilogue::Residual { of }
            | Epilogue::Quantize { of, .. } => of..of + 1,
        }
    }

    /// Number of additional inputs of the fused op for this step.
    pub fn input_count(&self) -> usize {
        match self {
            Epilogue::Bias { .. } | Epilogue::Residual { .. } => 1,
            Epilogue::Activation { function: Activation::GeluBackward(_), .. } => 1,
            Epilogue::Activation { .. } | Epilogue::Quantize { .. } => 0,
        }
    }

    /// Number of results of the step.
    pub fn result_count(&self) -> usize {
        match self {
            Epilogue::Quantize { quantize, .. } => quantize.result_count(),
            _ => 1,
        }
    }

    /// Types of the step's results for the given operand types: results read, then additional
    /// inputs.
    fn infer(&self, operands: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        match self {
            Epilogue::Activation { function, .. } => function.rule().infer(operands),
            Epilogue::Residual { .. } => Add {}.infer(operands),
            Epilogue::Quantize { quantize, .. } => quantize.infer(operands),
            Epilogue::Bias { .. } => {
                let check = Check::count(self.name(), operands, &["x", "bias"])?;
                let dtype = check.same_float(&[0, 1])?;
                let x = check.rank(0, 2)?;
                check.shape(1, &Shape(vec![x[1]]))?;
                Ok(vec![OutputType::activation("", operands[0].shape.clone(), dtype)])
            }
        }
    }

    /// FLOPs for a result of this shape.
    fn flops(&self, shape: &[usize]) -> u64 {
        match self {
            Epilogue::Activation { function, .. } => function.rule().flops(&[shape.to_vec()]),
            Epilogue::Quantize { quantize, .. } => quantize.flops(&[shape.to_vec()]),
            Epilogue::Bias { .. } | Epilogue::Residual { .. } => product(shape),
        }
    }
}

impl fmt::Display for Epilogue {
    /// `gelu of 0: tanh`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attributes = match self {
            Epilogue::Activation { function, .. } => function.rule().attributes(),
            Epilogue::Quantize { quantize, .. } => quantize.attributes(),
            Epilogue::Bias { .. } | Epilogue::Residual { .. } => String::new(),
        };
        write!(f, "{} of {}", self.name(), self.reads().start)?;
        if attributes.is_empty() { Ok(()) } else { write!(f, ": {attributes}") }
    }
}

/// A block quantization of an epilogue.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizeStep<'a> {
    /// The result that is quantized.
    pub of: usize,
    /// Format and axes.
    pub quantize: &'a Quantize,
    /// Range of the quantized planes among the outputs of the fused op.
    pub positions: Range<usize>,
}

impl Fused {
    /// Names of the core and of the steps, `scaled_gemm_gelu_quantize` for example; consecutive
    /// equal names appear once.
    pub fn full_name(&self) -> String {
        let mut names = vec![self.core.rule().name()];
        names.extend(self.epilogue.iter().map(Epilogue::name));
        names.dedup();
        names.join("_")
    }

    /// Number of results of the core and of all steps.
    pub fn result_count(&self) -> usize {
        self.results_of(self.epilogue.len()).start
    }

    /// Numbers of the results of step `step`; for the step count, an empty range at the end.
    pub fn results_of(&self, step: usize) -> Range<usize> {
        let before = self.epilogue[..step].iter().map(Epilogue::result_count).sum::<usize>();
        let start = self.core.rule().result_count() + before;
        start..start + self.epilogue.get(step).map_or(0, Epilogue::result_count)
    }

    /// Whether a result is an output.
    pub fn is_stored(&self, result: usize) -> bool {
        result < self.result_count() && !self.skipped.contains(&result)
    }

    /// Position of a result among the outputs; `None` if the result is skipped.
    pub fn position(&self, result: usize) -> Option<usize> {
        let earlier = self.skipped.iter().filter(|&&skipped| skipped < result).count();
        self.is_stored(result).then(|| result - earlier)
    }

    /// Number of core inputs among `inputs` inputs.
    pub fn core_input_count(&self, inputs: usize) -> usize {
        inputs.saturating_sub(self.epilogue.iter().map(Epilogue::input_count).sum())
    }

    /// Range of the inputs of step `step` among `inputs` inputs.
    pub fn inputs_of(&self, step: usize, inputs: usize) -> Range<usize> {
        let before = self.epilogue[..step].iter().map(Epilogue::input_count).sum::<usize>();
        let start = self.core_input_count(inputs) + before;
        start..start + self.epilogue[step].input_count()
    }

    /// The quantizations among the steps.
    pub fn quantizations(&self) -> impl Iterator<Item = QuantizeStep<'_>> {
        self.epilogue.iter().enumerate().filter_map(|(step, epilogue)| {
            let Epilogue::Quantize { of, quantize } = epilogue else { return None };
            let results = self.results_of(step);
            // No step reads quantized results, so all of them are stored.
            let start = self.position(results.start)?;
            Some(QuantizeStep { of: *of, quantize, positions: start..start + results.len() })
        })
    }

    /// Shapes of all results, from the shapes of the outputs. A skipped result has the shape of the
    /// step's result, or of the quantized data.
    pub fn result_shapes(&self, outputs: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let count = self.result_count();
        let mut shapes: Vec<Vec<usize>> = (0..count)
            .map(|result| self.position(result).and_then(|at| outputs.get(at)).cloned())
            .map(Option::unwrap_or_default)
            .collect();
        for (step, epilogue) in self.epilogue.iter().enumerate().rev() {
            let mut shape = shapes[self.results_of(step).start].clone();
            if let Epilogue::Quantize { quantize: Quantize { axis: Axis::Column, .. }, .. } =
                epilogue
            {
                shape.reverse();
            }
            for read in epilogue.reads().filter(|read| self.skipped.contains(read)) {
                shapes[read].clone_from(&shape);
            }
        }
        shapes
    }

    /// Types of all results, from those of the inputs and of the outputs.
    ///
    /// # Errors
    /// Operands that the op does not accept, or a wrong number of outputs.
    pub fn result_types(
        &self,
        inputs: &[OperandType],
        outputs: &[OperandType],
    ) -> Result<Vec<OperandType>, OpError> {
        let inputs: Vec<TensorType> = inputs
            .iter()
            .map(|input| TensorType {
                shape: Shape::new(input.shape.iter().copied()),
                dtype: input.dtype,
            })
            .collect();
        let results = self.results(&inputs)?;
        let expected = OpRule::result_count(self);
        if outputs.len() != expected {
            return Err(self.error(format!("{expected} outputs"), outputs.len().to_string()));
        }
        let types = results.into_iter().enumerate().map(|(result, inferred)| {
            match self.position(result) {
                Some(position) => outputs[position].clone(),
                None => OperandType {
                    dtype: inferred.dtype,
                    // All input sizes are fixed, so result sizes are fixed.
                    shape: inferred.shape.as_fixed().unwrap_or_default(),
                },
            }
        });
        Ok(types.collect())
    }

    fn error(&self, expected: impl Into<String>, got: impl Into<String>) -> OpError {
        OpError { op: self.name(), expected: expected.into(), got: got.into() }
    }

    /// Checks the core, the steps and the skipped results, independent of operands.
    fn check_parts(&self) -> Result<(), OpError> {
        if let Op::Fused(core) = &*self.core {
            return Err(self.error("a core that is not fused itself", core.full_name()));
        }
        if self.epilogue.is_empty() {
            return Err(self.error("at least one step behind the core", "none"));
        }
        if !self.skipped.is_sorted_by(|a, b| a < b) {
            return Err(self.error("ascending skipped results", format!("{:?}", self.skipped)));
        }
        for &result in &self.skipped {
            if !self.epilogue.iter().any(|step| step.reads().contains(&result)) {
                let expected = "skipped results that a step reads";
                return Err(self.error(expected, result.to_string()));
            }
        }
        Ok(())
    }

    /// Types of all results.
    fn results(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        self.check_parts()?;
        let mut results = self.core.rule().infer(&inputs[..self.core_input_count(inputs.len())])?;
        let expected = self.core.rule().result_count();
        if results.len() != expected {
            let what = format!("{expected} results of `{}`", self.core.name());
            return Err(self.error(what, results.len().to_string()));
        }
        for (step, epilogue) in self.epilogue.iter().enumerate() {
            let mut operands = Vec::with_capacity(2);
            let mut suffix = "";
            for read in epilogue.reads() {
                let result = results.get(read).ok_or_else(|| {
                    let below = format!("results below {} for `{epilogue}`", results.len());
                    self.error(below, read.to_string())
                })?;
                // `SameAsInput` results of ops that move activations are activations, too.
                if !matches!(result.kind, OutputKind::Activation | OutputKind::SameAsInput) {
                    return Err(self.error(
                        format!("an activation as result {read} for `{epilogue}`"),
                        format!("{:?}", result.kind).to_lowercase(),
                    ));
                }
                operands.push(TensorType { shape: result.shape.clone(), dtype: result.dtype });
                if operands.len() == 1 {
                    suffix = &result.suffix;
                }
            }
            let step_inputs = inputs.get(self.inputs_of(step, inputs.len()));
            operands.extend(step_inputs.unwrap_or_default().iter().cloned());
            let parts = [suffix, epilogue.name()];
            let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            let mut prefix = parts.join(".");
            // Number repeated steps of one kind on the same result.
            let is_same = |other: &&Epilogue| {
                other.name() == epilogue.name() && other.reads() == epilogue.reads()
            };
            match self.epilogue[..step].iter().filter(is_same).count() {
                0 => {}
                number => prefix += &number.to_string(),
            }
            for mut output in epilogue.infer(&operands)? {
                output.suffix = Cow::Owned(match &*output.suffix {
                    "" => prefix.clone(),
                    step_inputs => format!("{prefix}.{step_inputs}"),
                });
                results.push(output);
            }
        }
        Ok(results)
    }
}

impl OpRule for Fused {
    /// Name in error messages; see [`Fused::full_name`].
    fn name(&self) -> &'static str {
        "fused"
    }

    fn attributes(&self) -> String {
        let mut parts = vec![self.core.rule().attributes()];
        parts.extend(self.epilogue.iter().map(Epilogue::to_string));
        if !self.skipped.is_empty() {
            let skipped: Vec<String> = self.skipped.iter().map(usize::to_string).collect();
            parts.push(format!("skips {}", skipped.join(", ")));
        }
        parts.retain(|part| !part.is_empty());
        parts.join("; ")
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let results = self.results(inputs)?;
        let stored = results.into_iter().enumerate().filter(|(at, _)| !self.skipped.contains(at));
        Ok(stored.map(|(_, output)| output).collect())
    }

    fn result_count(&self) -> usize {
        self.result_count() - self.skipped.len()
    }

    /// Sum over the core and all steps.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let outputs = OpRule::result_count(self).min(shapes.len());
        let (inputs, outputs) = shapes.split_at(shapes.len() - outputs);
        let results = self.result_shapes(outputs);
        let of_core = results[..self.core.rule().result_count()].iter();
        let core_inputs = inputs[..self.core_input_count(inputs.len())].iter();
        let of_core: Vec<Vec<usize>> = core_inputs.chain(of_core).cloned().collect();
        let steps = self.epilogue.iter().map(|step| step.flops(&results[step.reads().start]));
        self.core.rule().flops(&of_core) + steps.sum::<u64>()
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        self.core.rule().unit(operands)
    }
}

#[cfg(test)]
mod tests;
