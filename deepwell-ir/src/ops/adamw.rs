//! Gradient norm and the AdamW update (Loshchilov and Hutter, arXiv 1711.05101).

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Check, WeightCopy, product};
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// All gradients → global L2 norm, f32 `[1]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradNorm {}

impl OpRule for GradNorm {
    fn name(&self) -> &'static str {
        "grad_norm"
    }

    fn infer(&self, _inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        Ok(vec![OutputType::statistic("", Shape::new([1usize]), DType::F32)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * shapes.iter().map(|shape| product(shape)).sum::<u64>()
    }
}

/// Tensors → sum of squares of each tensor, u64 `[tensors]`: the bits of an f64. Ranks exchange
/// these sums if gradients are sharded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SumsOfSquares {}

impl OpRule for SumsOfSquares {
    fn name(&self) -> &'static str {
        "sums_of_squares"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check { op: self.name(), inputs };
        for index in 0..inputs.len() {
            check.dtype(index, DType::F32)?;
        }
        Ok(vec![OutputType::statistic("", Shape::new([inputs.len()]), DType::U64)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * shapes.iter().map(|shape| product(shape)).sum::<u64>()
    }
}

/// Lists of sums from [`SumsOfSquares`], u64 `[n]` each → square root of the total, added in order,
/// list by list, f32 `[1]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormOfSums {}

impl OpRule for NormOfSums {
    fn name(&self) -> &'static str {
        "norm_of_sums"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check { op: self.name(), inputs };
        for index in 0..inputs.len() {
            check.dtype(index, DType::U64)?;
            check.rank(index, 1)?;
        }
        Ok(vec![OutputType::statistic("", Shape::new([1usize]), DType::F32)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        shapes.iter().map(|shape| product(shape)).sum()
    }
}

/// Counts a step and computes the coefficients shared by all buckets of the step.
///
/// grad_norm f32 `[1]`, schedule f32 `[2]` (learning rate, largest gradient norm), counters u64
/// `[2]` (applied steps, skipped steps; updated) → coefficients f32 `[9]`, in this order: 1 if the
/// step is applied and 0 if the gradient norm is not finite, learning rate, clip factor, 1 - beta1,
/// beta2, 1 - beta2, step size (learning rate over the first moment's correction), reciprocal
/// square root of the second moment's correction, eps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWCoefficients {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
}

impl AdamWCoefficients {
    /// Number of coefficients.
    pub const COUNT: usize = 9;
}

impl OpRule for AdamWCoefficients {
    fn name(&self) -> &'static str {
        "adamw_coefficients"
    }

    fn attributes(&self) -> String {
        format!("betas=({}, {}) eps={:e}", self.beta1, self.beta2, self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["grad_norm", "schedule", "counters"])?;
        for (index, (dtype, count)) in
            [(DType::F32, 1), (DType::F32, 2), (DType::U64, 2)].into_iter().enumerate()
        {
            check.dtype(index, dtype)?;
            check.shape(index, &Shape::new([count]))?;
        }
        Ok(vec![OutputType::statistic("", Shape::new([Self::COUNT]), DType::F32)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }
}

/// Updates the parameters of one bucket in place.
///
/// A bucket is a range of [`Program::parameters`](crate::Program::parameters) whose master weights
/// are consecutive in the arena, each aligned to [`ALIGNMENT_BYTES`](crate::ALIGNMENT_BYTES);
/// gradients, first moments and second moments are laid out the same way. A shard of a bucket that
/// ends at parameter boundaries is therefore one range of each of the four.
///
/// Operands: the coefficients of [`AdamWCoefficients`], then for each parameter the gradient and,
/// updated in place, master weight, first moment and second moment, all f32 of one shape. Outputs:
/// the tensors of each entry of `copies`, in order, computed from the updated weights.
///
/// A skipped step changes nothing: copies and counters keep the values of the previous weights,
/// written by an earlier call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// The bucket, as indices into the parameters of the program. For a [sharded](crate::Shard)
    /// bucket, the shard to update, with operands of one slice.
    pub parameters: Range<usize>,
    /// Decoupled weight decay of each parameter, in operand order.
    pub weight_decay: Vec<f32>,
    /// Compute copies that the op writes in addition to the weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<WeightCopy>,
}

impl AdamW {
    /// Operands before those of the first parameter.
    pub const LEADING_OPERANDS: usize = 1;
    /// Operands per parameter: gradient, master, first moment, second moment.
    pub const OPERANDS_PER_PARAMETER: usize = 4;

    /// Operand index of a parameter's master weight.
    pub fn master(parameter: usize) -> usize {
        Self::LEADING_OPERANDS + parameter * Self::OPERANDS_PER_PARAMETER + 1
    }

    /// Number of operands before the outputs.
    pub fn input_count(&self) -> usize {
        Self::LEADING_OPERANDS + Self::OPERANDS_PER_PARAMETER * self.weight_decay.len()
    }

    /// All copies, each with the range of its output tensors.
    pub fn copies_with_outputs(&self) -> impl Iterator<Item = (&WeightCopy, Range<usize>)> {
        self.copies.iter().scan(0, |next, copy| {
            let first = *next;
            *next += copy.kind.output_count();
            Some((copy, first..*next))
        })
    }

    fn check(&self, inputs: &[TensorType]) -> Result<(), OpError> {
        let check = Check { op: self.name(), inputs };
        let parameters = self.parameters.len();
        let decays = self.weight_decay.len();
        if parameters != decays {
            return Err(check.error(format!("{parameters} weight decays"), decays.to_string()));
        }
        let expected = Self::LEADING_OPERANDS + Self::OPERANDS_PER_PARAMETER * parameters;
        if inputs.len() != expected {
            return Err(check.error(format!("{expected} operands"), inputs.len().to_string()));
        }
        check.shape(0, &Shape::new([AdamWCoefficients::COUNT]))?;
        for index in 0..inputs.len() {
            check.dtype(index, DType::F32)?;
        }
        for parameter in 0..parameters {
            let gradient = Self::LEADING_OPERANDS + parameter * Self::OPERANDS_PER_PARAMETER;
            for index in gradient..gradient + Self::OPERANDS_PER_PARAMETER {
                check.shape(index, &inputs[gradient].shape)?;
            }
        }
        if let Some(copy) = self.copies.iter().find(|copy| copy.parameter >= parameters) {
            let got = format!("one of parameter {}", copy.parameter);
            return Err(check.error(format!("copies of {parameters} parameters"), got));
        }
        Ok(())
    }
}

impl OpRule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn attributes(&self) -> String {
        let copies = match self.copies.len() {
            0 => String::new(),
            count => format!(" copies={count}"),
        };
        format!("parameters={}..{}{copies}", self.parameters.start, self.parameters.end)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        self.check(inputs)?;
        let of_copy = |copy: &WeightCopy| copy.infer(&inputs[Self::master(copy.parameter)]);
        let outputs: Vec<Vec<OutputType>> =
            self.copies.iter().map(of_copy).collect::<Result<_, _>>()?;
        Ok(outputs.concat())
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let masters = (0..self.weight_decay.len()).map(|index| &shapes[Self::master(index)]);
        let of_copy = |(copy, outputs): (&WeightCopy, Range<usize>)| {
            let first = self.input_count();
            let outputs = &shapes[first + outputs.start..first + outputs.end];
            let master = &shapes[Self::master(copy.parameter)];
            copy.kind.rule().flops(&[std::slice::from_ref(master), outputs].concat())
        };
        let of_copies: u64 = self.copies_with_outputs().map(of_copy).sum();
        14 * masters.map(|shape| product(shape)).sum::<u64>() + of_copies
    }
}
