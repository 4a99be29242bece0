//! A GEMM for each group of rows: the projections of the experts of a mixture.
//!
//! Rows are laid out as in [`super::Dispatch`], at most `R` rows. Group `e` has the rows
//! `offsets[e]..offsets[e + 1]`, multiples of `align`; below, `x_e` denotes the rows of group `e`.
//!
//! | op | for each group | written |
//! |---|---|---|
//! | fprop, [`GroupedGemm`] | `y_e = x_e · w[e]ᵀ` | all `R` rows; zero from `offsets[G]` on |
//! | dgrad, [`GroupedGemmDgrad`] | `dx_e = dy_e · w[e]` | as fprop |
//! | wgrad, [`GroupedGemmWgrad`] | `dw[e] (+)= dy_eᵀ · x_e` | all of `dw` |
//!
//! For a group without rows, an overwriting wgrad sets the matrix to exactly 0, and an accumulating
//! wgrad leaves the matrix unchanged.
//!
//! Operand rows without a pair are zero, within groups and after the last group; a kernel may
//! multiply these rows, or skip them and write zeros. `offsets` are device values, unknown when a
//! kernel is launched: a grid is sized for `R` rows.
//!
//! # Quantized operands
//!
//! [`ScaledGroupedGemm`] takes planes in the layout of [`crate::Storage`], data `[M, K]` with K
//! contiguous and scales in tiles of 128 rows by four blocks of 32 along K, 512 bytes each:
//!
//! | | a | its scales | b | its scales |
//! |---|---|---|---|---|
//! | fprop | x rowwise `[R, K]` | `[R, K]` | w rowwise `[G, N, K]` | G times `[N, K]` |
//! | dgrad | dy rowwise `[R, N]` | `[R, N]` | w columnwise `[G, K, N]` | G times `[K, N]` |
//! | wgrad | dy columnwise `[N, R]` | `[N, R]` | x columnwise `[K, R]` | `[K, R]` |
//!
//! The scales of `[M, K]` are tiles `[M/128, K/128, 512]`, quotients rounded up, with a leading `G`
//! for G matrices. Each matrix of a weight is quantized separately: its tiles begin anew.
//! Activations and gradients are quantized as one matrix of `R` rows. The scales of row `r` of `x`
//! therefore have the same position in any grouping, and a tile of 128 rows belongs to a single
//! group only if `align` is a multiple of 128. In wgrad, block `j` along K is rows
//! `32·j..32·j + 32` of the buffer; group `e` has the blocks `offsets[e]/32..offsets[e + 1]/32`. If
//! 128 elements share an exponent, `align` must be a multiple of 128.

use deepwell_precision::{GemmKind, QuantFormat};
use serde::{Deserialize, Serialize};

use super::quantize::{grouped_planes_of, stacked_planes_of};
use super::{Axis, Check, GroupedRows};
use crate::autodiff::BackwardContext;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape, Storage};

fn unit(operands: &[DType]) -> MathUnit {
    if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
}

/// FLOPs of all pairs, without padding rows: two per multiply-add, for `rows` rows and the two
/// sizes of a matrix.
fn flops(grouped: &GroupedRows, rows: usize, sizes: [usize; 2]) -> u64 {
    2 * grouped.pairs_of(rows) as u64 * sizes[0] as u64 * sizes[1] as u64
}

/// x `[R, K]`, w `[G, N, K]`, offsets i32 `[G + 1]` → `[R, N]`: rows of each group times the
/// group's matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemm {
    /// Groups and their alignment.
    pub grouped: GroupedRows,
}

impl OpRule for GroupedGemm {
    fn name(&self) -> &'static str {
        "grouped_gemm"
    }

    fn attributes(&self) -> String {
        self.grouped.describe()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "w", "offsets"])?;
        let dtype = check.same_float(&[0, 1])?;
        self.grouped.check_offsets(&check, 2)?;
        let (x, w) = (check.rank(0, 2)?, check.rank(1, 3)?);
        check.shape(1, &Shape(vec![Dim::fixed(self.grouped.groups), w[1], x[1]]))?;
        Ok(vec![OutputType::activation("", Shape(vec![x[0], w[1]]), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        flops(&self.grouped, shapes[0][0], [shapes[1][1], shapes[1][2]])
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, w, offsets) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let grouped = self.grouped;
        let dw = context.parameter_gradient(w);
        context.emit(GroupedGemmWgrad { grouped }, "wgrad", &[dy, x, offsets], &[dw])?;
        let op = GroupedGemmDgrad { grouped };
        let dx = context.emit_fresh(op, "dgrad", &[dy, w, offsets])?[0];
        context.contribute(x, dx)
    }
}

/// dy `[R, N]`, w `[G, N, K]`, offsets i32 `[G + 1]` → dx `[R, K]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmDgrad {
    /// Groups and their alignment.
    pub grouped: GroupedRows,
}

impl OpRule for GroupedGemmDgrad {
    fn name(&self) -> &'static str {
        "grouped_gemm_dgrad"
    }

    fn attributes(&self) -> String {
        self.grouped.describe()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "w", "offsets"])?;
        let dtype = check.same_float(&[0, 1])?;
        self.grouped.check_offsets(&check, 2)?;
        let (dy, w) = (check.rank(0, 2)?, check.rank(1, 3)?);
        check.shape(1, &Shape(vec![Dim::fixed(self.grouped.groups), dy[1], w[2]]))?;
        Ok(vec![OutputType::activation("", Shape(vec![dy[0], w[2]]), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        flops(&self.grouped, shapes[0][0], [shapes[1][1], shapes[1][2]])
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }
}

/// dy `[R, N]`, x `[R, K]`, offsets i32 `[G + 1]` → dw f32 `[G, N, K]`, `(+)=`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmWgrad {
    /// Groups and their alignment.
    pub grouped: GroupedRows,
}

impl OpRule for GroupedGemmWgrad {
    fn name(&self) -> &'static str {
        "grouped_gemm_wgrad"
    }

    fn attributes(&self) -> String {
        self.grouped.describe()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "x", "offsets"])?;
        check.same_float(&[0, 1])?;
        self.grouped.check_offsets(&check, 2)?;
        let (dy, x) = (check.rank(0, 2)?, check.rank(1, 2)?);
        check.shape(1, &Shape(vec![dy[0], x[1]]))?;
        let groups = Dim::fixed(self.grouped.groups);
        Ok(vec![OutputType::accumulator("dw", Shape(vec![groups, dy[1], x[1]]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        flops(&self.grouped, shapes[0][0], [shapes[0][1], shapes[1][1]])
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }
}

/// The planes of a, the planes of b, offsets i32 `[G + 1]` → `[R, N]`, or for wgrad dw f32
/// `[G, N, K]` `(+)=`: one of the three GEMMs on quantized operands, with FP32 accumulation. See
/// the module documentation for the shapes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScaledGroupedGemm {
    /// GEMM of the linear layer.
    pub kind: GemmKind,
    /// Groups and their alignment.
    pub grouped: GroupedRows,
    /// Storage type of the result of fprop and dgrad.
    pub output: DType,
    /// Quantization format of `a`.
    pub a: QuantFormat,
    /// Quantization format of `b`.
    pub b: QuantFormat,
}

impl ScaledGroupedGemm {
    /// Input index of the data of `b`; the scales follow.
    pub fn b_input(&self) -> usize {
        Storage::plane_count(&self.a)
    }

    /// Number of inputs that are operand planes; `offsets` is the next input.
    pub fn plane_inputs(&self) -> usize {
        self.b_input() + Storage::plane_count(&self.b)
    }
}

impl OpRule for ScaledGroupedGemm {
    fn name(&self) -> &'static str {
        "scaled_grouped_gemm"
    }

    fn attributes(&self) -> String {
        let ScaledGroupedGemm { kind, grouped, a, b, .. } = self;
        let mut text = format!("{} {}", kind.name(), grouped.describe());
        text += &super::scaled_gemm::families(a, b);
        let row = deepwell_precision::Block::row(a.scale.stored_every() as u16);
        if a.block != row || b.block != row {
            text += &format!(" blocks={}*{}", a.block, b.block);
        }
        text
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let mut names = vec!["a", "a_scale", "a_tensor_scale"][..self.b_input()].to_vec();
        names.extend(&["b", "b_scale", "b_tensor_scale"][..Storage::plane_count(&self.b)]);
        names.push("offsets");
        let check = Check::count(self.name(), inputs, &names)?;
        let ScaledGroupedGemm { kind, grouped, output, a: a_format, b: b_format } = *self;
        super::scaled_gemm::operands_multiply(&check, &a_format, &b_format)?;
        grouped.check_offsets(&check, self.plane_inputs())?;
        let (a, groups) = (check.rank(0, 2)?, Dim::fixed(grouped.groups));
        let grouped_planes =
            |format, shape| grouped_planes_of(&check, format, Axis::Row, groups, shape);
        check.planes(0, &grouped_planes(a_format, [a[0], a[1]])?)?;
        let b_input = self.b_input();
        if kind == GemmKind::Wgrad {
            let every = a_format.block.k.max(b_format.block.k) as usize;
            if !grouped.align.is_multiple_of(every) {
                let expected = format!("groups of a multiple of {every} rows, which share a scale");
                return Err(check.error(expected, grouped.describe()));
            }
            let b = check.rank(b_input, 2)?;
            check.shape(b_input, &Shape(vec![b[0], a[1]]))?;
            check.planes(b_input, &grouped_planes(b_format, [b[0], b[1]])?)?;
            return Ok(vec![OutputType::accumulator("dw", Shape(vec![groups, a[0], b[0]]))]);
        }
        let b = check.rank(b_input, 3)?;
        check.shape(b_input, &Shape(vec![groups, b[1], a[1]]))?;
        let planes = stacked_planes_of(&check, b_format, Axis::Row, &[b[0]], [b[1], b[2]])?;
        check.planes(b_input, &planes)?;
        Ok(vec![OutputType::activation("", Shape(vec![a[0], b[1]]), output)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let (a, b) = (&shapes[0], &shapes[self.b_input()]);
        match self.kind {
            GemmKind::Wgrad => flops(&self.grouped, a[1], [a[0], b[0]]),
            _ => flops(&self.grouped, a[0], [b[1], b[2]]),
        }
    }

    fn unit(&self, _operands: &[DType]) -> MathUnit {
        super::scaled_gemm::unit_of(&self.a)
    }
}
