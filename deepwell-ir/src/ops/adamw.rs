//! Gradient norm and the AdamW update (Loshchilov and Hutter, arXiv 1711.05101).

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use deepwell_precision::moments;
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
/// `[2]` (applied steps, skipped steps; updated) → coefficients f32 `[9]`, in this order: number of
/// the step from 1, or 0 if the gradient norm is not finite and the step is skipped, learning rate,
/// clip factor, 1 - beta1, beta2, 1 - beta2, step size (learning rate over the first moment's
/// correction), reciprocal square root of the second moment's correction, eps.
///
/// With `of_bucket` the coefficients are those of one bucket, updated before the norm of all
/// gradients is known. The norm is that of the step before, a fourth input, u64 `[n]`, has the sums
/// of squares of the bucket's gradients ([`SumsOfSquares`]), and the counters are only read. The
/// bucket's update is skipped if a sum is not finite; a norm that is not finite does not clip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWCoefficients {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Whether the coefficients are for one bucket.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub of_bucket: bool,
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
        let of_bucket = if self.of_bucket { " of_bucket" } else { "" };
        format!("betas=({}, {}) eps={:e}{of_bucket}", self.beta1, self.beta2, self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = ["grad_norm", "schedule", "counters", "sums_of_squares"];
        let count = names.len() - usize::from(!self.of_bucket);
        let check = Check::count(self.name(), inputs, &names[..count])?;
        for (index, (dtype, count)) in
            [(DType::F32, 1), (DType::F32, 2), (DType::U64, 2)].into_iter().enumerate()
        {
            check.dtype(index, dtype)?;
            check.shape(index, &Shape::new([count]))?;
        }
        if self.of_bucket {
            check.dtype(3, DType::U64)?;
            check.rank(3, 1)?;
        }
        Ok(vec![OutputType::statistic("", Shape::new([Self::COUNT]), DType::F32)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }
}

/// Storage of the two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentFormat {
    /// FP32, in the shape of the parameter.
    #[default]
    Fp32,
    /// E4M3 in blocks of 128 elements with a common scale, rounded stochastically; see
    /// [`deepwell_precision::moments`].
    Fp8,
}

impl MomentFormat {
    /// Type and shape of the moments of a parameter: of its shape in FP32, or blocks of bytes.
    #[must_use]
    pub fn stored(self, shape: &[usize]) -> (DType, Vec<usize>) {
        match self {
            MomentFormat::Fp32 => (DType::F32, shape.to_vec()),
            MomentFormat::Fp8 => {
                let blocks = moments::blocks(product(shape) as usize);
                (DType::E4m3, vec![blocks, moments::BLOCK_BYTES])
            }
        }
    }

    /// Bytes per parameter of both moments of a large parameter.
    #[must_use]
    pub fn bytes_per_parameter(self) -> f64 {
        match self {
            MomentFormat::Fp32 => 8.0,
            MomentFormat::Fp8 => 2.0 * moments::BLOCK_BYTES as f64 / moments::BLOCK as f64,
        }
    }

    /// Name in settings and text forms.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            MomentFormat::Fp32 => "fp32",
            MomentFormat::Fp8 => "fp8",
        }
    }

    /// Whether this is the default.
    #[must_use]
    pub fn is_fp32(&self) -> bool {
        *self == MomentFormat::Fp32
    }
}

impl fmt::Display for MomentFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MomentFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<MomentFormat, String> {
        let all = [MomentFormat::Fp32, MomentFormat::Fp8];
        let found = all.into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| format!("expected `fp32` or `fp8`, got `{text}`"))
    }
}

/// Storage of the master weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterFormat {
    /// FP32.
    #[default]
    Fp32,
    /// Matrices in BF16, rounded stochastically by each update; vectors and the weights of routers
    /// in FP32.
    Bf16,
}

impl MasterFormat {
    /// Name in settings and text forms.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            MasterFormat::Fp32 => "fp32",
            MasterFormat::Bf16 => "bf16",
        }
    }

    /// Whether this is the default.
    #[must_use]
    pub fn is_fp32(&self) -> bool {
        *self == MasterFormat::Fp32
    }
}

impl fmt::Display for MasterFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MasterFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<MasterFormat, String> {
        let all = [MasterFormat::Fp32, MasterFormat::Bf16];
        let found = all.into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| format!("expected `fp32` or `bf16`, got `{text}`"))
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
/// updated in place, master weight, first moment and second moment. Gradient and master have one
/// shape; the gradient is f32, the master f32 or bf16; moments have the storage of
/// [`MomentFormat`]. Outputs: the tensors of each entry of `copies`, in order, computed from the
/// updated weights.
///
/// Moments in FP8 and masters in BF16 are rounded with random bits that follow from the number of
/// the step, the parameter's index among those of the program and the index of the element.
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
    /// Storage of the moments.
    #[serde(default, skip_serializing_if = "MomentFormat::is_fp32")]
    pub moments: MomentFormat,
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
        check.dtype(0, DType::F32)?;
        for parameter in 0..parameters {
            let gradient = Self::LEADING_OPERANDS + parameter * Self::OPERANDS_PER_PARAMETER;
            let (master, moments) = (gradient + 1, [gradient + 2, gradient + 3]);
            let shape = &inputs[gradient].shape;
            check.dtype(gradient, DType::F32)?;
            if inputs[master].dtype != DType::Bf16 {
                check.dtype(master, DType::F32)?;
            }
            check.shape(master, shape)?;
            let Some(fixed) = shape.as_fixed() else {
                return Err(check.error("a shape without batch or sequence", format!("{shape:?}")));
            };
            let (dtype, stored) = self.moments.stored(&fixed);
            for index in moments {
                check.dtype(index, dtype)?;
                check.shape(index, &Shape::new(stored.iter().copied()))?;
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
        let moments = match self.moments {
            MomentFormat::Fp32 => String::new(),
            other => format!(" moments={}", other.name()),
        };
        format!("parameters={}..{}{copies}{moments}", self.parameters.start, self.parameters.end)
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
