//! Predicted times of the GEMMs and quantizations of linear layers.

use std::collections::HashMap;

use deepwell_ir::ops::{
    Axis, GroupedGemmDgrad, GroupedGemmWgrad, GroupedRows, Linear, LinearDgrad, LinearWgrad,
    Quantize, QuantizeOperands, ScaledGemm, ScaledGroupedGemm, StochasticRound,
};
use deepwell_ir::{
    Binding, DType, Dim, GemmKind, Graph, IrError, KernelCatalog, KernelRequest, Node, Op,
    OperandType, Plane, PrecisionPolicy, Role, Shape, Storage, Target, TensorId,
    quantizable_weights, weight_assignments,
};
use deepwell_precision::hadamard::POINTS;
use deepwell_precision::{Assignment, ElementRounding, OperandClass, QuantFormat, scale_tiles};

use super::choice::{Layer, Priced};

/// An op with its inputs and outputs.
type Timed = (Op, Vec<OperandType>, Vec<OperandType>);

/// Formats of the six operands of the GEMMs of a layer, in the order of [`OperandClass::ALL`].
type Formats = [QuantFormat; 6];

/// Predicts the times of calls.
pub(super) struct Times<'a> {
    pub(super) policies: &'a [PrecisionPolicy],
    pub(super) catalog: &'a dyn KernelCatalog,
    pub(super) target: &'a Target,
    pub(super) binding: Binding,
}

/// A linear layer without its place in the model.
struct Gemms {
    /// Groups of rows, for experts.
    grouped: Option<GroupedRows>,
    bias: bool,
    /// Input `[R, K]`, weight `[N, K]` or `[G, N, K]`, output `[R, N]`.
    shapes: [Vec<usize>; 3],
}

impl Times<'_> {
    /// The linear layers of a graph with quantizable weights.
    pub(super) fn layers(&self, graph: &Graph) -> Result<Vec<Layer>, IrError> {
        let weights: HashMap<TensorId, Option<u32>> =
            quantizable_weights(graph).into_iter().collect();
        let assigned = self.policies.iter().map(|policy| weight_assignments(graph, policy));
        let assigned: Vec<HashMap<TensorId, Assignment>> =
            assigned.map(|it| Ok(it?.into_iter().collect())).collect::<Result<_, IrError>>()?;
        let mut places: HashMap<u32, usize> = HashMap::new();
        let of_node = |node: &Node| {
            let &[input, weight, ..] = node.inputs.as_slice() else { return None };
            let number = *weights.get(&weight)?;
            let shape = |id: TensorId| graph.tensor(id).shape.bind(&self.binding);
            let shapes = [shape(input), shape(weight), shape(node.outputs[0])];
            let (grouped, bias) = match &node.op {
                Op::Linear(op) => (None, op.bias),
                Op::GroupedGemm(op) => (Some(op.grouped), false),
                _ => return None,
            };
            let gemms = Gemms { grouped, bias, shapes };
            let bf16_s = self.sum_s(&gemms.plain())?;
            let of_policies: Vec<&Assignment> =
                assigned.iter().map(|of| of.get(&weight)).collect::<Option<_>>()?;
            let price = |(index, assignment): (usize, &&Assignment)| {
                let is_new = of_policies[..index].iter().all(|it| it.format != assignment.format);
                self.price(&gemms, assignment).filter(|_| is_new)
            };
            let priced = of_policies.iter().enumerate().map(price).collect();
            let formats = of_policies.iter().map(|it| it.format).collect();
            let place = number.map(|number| {
                let place = places.entry(number).or_default();
                *place += 1;
                *place
            });
            let name = graph.tensor(weight).name.clone();
            let kind = (place, gemms.shapes);
            Some(Layer { name, kind, input, bf16_s, formats, priced })
        };
        Ok(graph.nodes.iter().filter_map(of_node).collect())
    }

    /// The times of a layer in the formats of a policy; `None` without kernels for one of them, or
    /// with a GEMM that is not of quantized operands.
    fn price(&self, gemms: &Gemms, assignment: &Assignment) -> Option<Priced> {
        let are_scaled = GemmKind::ALL.iter().all(|&kind| assignment.gemm(kind).is_scaled);
        let formats = OperandClass::ALL.iter().map(|&class| assignment.operand(class));
        let formats: Formats = formats.collect::<Option<Vec<_>>>()?.try_into().ok()?;
        let role = if gemms.grouped.is_some() { Role::Expert } else { Role::Linear };
        let serves = |format| self.catalog.serves(format, role, self.target).is_ok();
        // Micro-batches of a plan may have fewer sequences than assumed.
        let transforms = formats.iter().any(|format| format.hadamard.is_some());
        let fits = !transforms || self.binding.seq.is_multiple_of(POINTS);
        if !are_scaled || !fits || !formats.iter().all(serves) {
            return None;
        }
        let of = |class: OperandClass| formats[class as usize];
        let [x, weight, y] = &gemms.shapes;
        let input = [of(OperandClass::FpropActivation), of(OperandClass::WgradActivation)];
        let gradient = [of(OperandClass::DgradGradient), of(OperandClass::WgradGradient)];
        let groups = gemms.grouped.map(|grouped| grouped.groups);
        let weight_s = match of(OperandClass::FpropWeight) {
            // AdamW writes these with the master weights.
            format if Storage::plane_count(&format) == 2 => 0.0,
            format => self.sum_s(&[quantize_weight(weight, format)])?,
        };
        let own_s = self.sum_s(&gemms.scaled(&formats))?
            + self.sum_s(&quantize(y, gradient, groups)?)?
            + weight_s;
        Some(Priced { own_s, input_s: self.sum_s(&quantize(x, input, groups)?)? })
    }

    /// Time of the calls in a row, seconds; `None` if a call has no kernel.
    fn sum_s(&self, calls: &[Timed]) -> Option<f64> {
        calls.iter().map(|call| self.call_s(call)).sum()
    }

    fn call_s(&self, (op, inputs, outputs): &Timed) -> Option<f64> {
        let operands = [inputs.as_slice(), outputs].concat();
        let request = KernelRequest { op, operands: &operands, input_count: inputs.len() };
        self.catalog.predicted_s(&request, self.target)
    }
}

impl Gemms {
    /// The three GEMMs in BF16.
    fn plain(&self) -> Vec<Timed> {
        let [x, w, y] = &self.shapes;
        let bf16 = |shape: &[usize]| vec![dense(DType::Bf16, shape)];
        let wgrad = vec![dense(DType::F32, w)];
        let (ends, ops): ([Vec<OperandType>; 3], [Op; 3]) = match self.grouped {
            Some(grouped) => {
                let offsets = self.offsets();
                let fprop = deepwell_ir::ops::GroupedGemm { grouped }.into();
                let dgrad = GroupedGemmDgrad { grouped }.into();
                let wgrad = GroupedGemmWgrad { grouped }.into();
                ([offsets.clone(), offsets.clone(), offsets], [fprop, dgrad, wgrad])
            }
            None => {
                let fprop = Linear { bias: self.bias }.into();
                let ops = [fprop, LinearDgrad {}.into(), LinearWgrad {}.into()];
                ([self.added(), Vec::new(), Vec::new()], ops)
            }
        };
        let ins = [[bf16(x), bf16(w)], [bf16(y), bf16(w)], [bf16(y), bf16(x)]];
        let ins =
            ins.into_iter().zip(ends).map(|(operands, end)| [operands.concat(), end].concat());
        let outs = [bf16(y), bf16(x), wgrad];
        ops.into_iter().zip(ins).zip(outs).map(|((op, ins), outs)| (op, ins, outs)).collect()
    }

    /// The three GEMMs of quantized operands.
    fn scaled(&self, formats: &Formats) -> Vec<Timed> {
        GemmKind::ALL.iter().map(|&kind| self.scaled_gemm(kind, formats)).collect()
    }

    fn scaled_gemm(&self, kind: GemmKind, formats: &Formats) -> Timed {
        let [x, w, y] = &self.shapes;
        let [a, b] = OperandClass::of(kind).map(|class| formats[class as usize]);
        let (rows, stack) = (x[0], &w[..w.len() - 2]);
        let [n, k] = [w[w.len() - 2], w[w.len() - 1]];
        let groups = self.grouped.map(|grouped| grouped.groups);
        let of_rows = |format, shape| planes(format, Axis::Row, (&[], groups), shape);
        let of_weight = |shape| planes(b, Axis::Row, (stack, None), shape);
        let (mut inputs, output) = match kind {
            GemmKind::Fprop => ([of_rows(a, [rows, k]), of_weight([n, k])].concat(), y),
            GemmKind::Dgrad => ([of_rows(a, [rows, n]), of_weight([k, n])].concat(), x),
            GemmKind::Wgrad => ([of_rows(a, [n, rows]), of_rows(b, [k, rows])].concat(), w),
        };
        let dtype = if kind == GemmKind::Wgrad { DType::F32 } else { DType::Bf16 };
        let output_type = DType::Bf16;
        let op = match self.grouped {
            Some(grouped) => {
                inputs.extend(self.offsets());
                // Each group with a tensor scale has whole tiles of scales.
                let has_tensor_scale = Storage::plane_count(&a) == 3;
                let least = if has_tensor_scale { scale_tiles::TILE_ROWS } else { 1 };
                let grouped = GroupedRows { align: grouped.align.max(least), ..grouped };
                ScaledGroupedGemm { kind, grouped, output: output_type, a, b }.into()
            }
            None => {
                let bias = self.bias && kind == GemmKind::Fprop;
                inputs.extend(self.added().into_iter().filter(|_| bias));
                ScaledGemm { kind, output: output_type, bias, a, b }.into()
            }
        };
        (op, inputs, vec![dense(dtype, output)])
    }

    fn offsets(&self) -> Vec<OperandType> {
        self.grouped.map(|it| dense(DType::I32, &[it.groups + 1])).into_iter().collect()
    }

    /// The bias, if there is one.
    fn added(&self) -> Vec<OperandType> {
        self.bias.then(|| dense(DType::Bf16, &self.shapes[1][..1])).into_iter().collect()
    }
}

/// The quantization of an activation or gradient along rows, for fprop and dgrad, and down columns,
/// for wgrad. `groups` of rows have tensor scales of their own.
fn quantize(
    shape: &[usize],
    [row, column]: [QuantFormat; 2],
    groups: Option<usize>,
) -> Option<Vec<Timed>> {
    let &[rows, columns] = shape else { return None };
    let size = [rows, columns];
    let x = dense(DType::Bf16, shape);
    let nearest = |format: QuantFormat| format.with_rounding(ElementRounding::Nearest);
    let both = [(row, Axis::Row), (column, Axis::Column)];
    let has_tensor_scale = Storage::plane_count(&row) == 3;
    let groups = groups.filter(|_| has_tensor_scale);
    let of_axis = |(format, axis)| planes(format, axis, (&[], groups), size);
    let key = dense(DType::U64, &[2]);
    if has_tensor_scale && groups.is_none() {
        let of = |(format, axis)| Quantize { format, axis };
        let streams = [row, column].map(|format| format.is_stochastic().then_some(0));
        let op = QuantizeOperands { row: of(both[0]), column: of(both[1]), streams };
        let inputs = [x].into_iter().chain(op.has_key().then_some(key)).collect();
        let of_operand = |it| [of_axis(it), counters()].concat();
        return Some(vec![(op.into(), inputs, both.map(of_operand).concat())]);
    }
    let offsets: Vec<OperandType> =
        groups.map(|count| dense(DType::I32, &[count + 1])).into_iter().collect();
    let inputs = [vec![x.clone()], offsets.clone()].concat();
    if nearest(row) == nearest(column) {
        let op = Quantize { format: nearest(row), axis: Axis::Both };
        let outputs = [both.map(of_axis).concat(), counters()].concat();
        return Some(vec![(op.into(), inputs, outputs)]);
    }
    let mut calls = Vec::new();
    for (format, axis) in both {
        let op = Quantize { format: nearest(format), axis };
        let operand = of_axis((format, axis));
        calls.push((op.into(), inputs.clone(), [operand.clone(), counters()].concat()));
        if format.is_stochastic() {
            let op = StochasticRound { format, axis, columns: None };
            let ends = [vec![key.clone()], offsets.clone()].concat();
            let inputs = [vec![x.clone()], operand[1..].to_vec(), ends].concat();
            calls.push((op.into(), inputs, operand[..1].to_vec()));
        }
    }
    Some(calls)
}

/// The quantization of a master weight, or of a stack of them, for fprop and dgrad.
fn quantize_weight(shape: &[usize], format: QuantFormat) -> Timed {
    let (stack, matrix) = shape.split_at(shape.len().saturating_sub(2));
    let size = [matrix[0], matrix[1]];
    let op = Quantize { format, axis: Axis::Both };
    let operands = [Axis::Row, Axis::Column].map(|axis| planes(format, axis, (stack, None), size));
    (op.into(), vec![dense(DType::F32, shape)], [operands.concat(), counters()].concat())
}

fn counters() -> Vec<OperandType> {
    vec![dense(DType::U64, &[Quantize::STATISTICS])]
}

fn dense(dtype: DType, shape: &[usize]) -> OperandType {
    OperandType { dtype, shape: shape.to_vec() }
}

/// The planes of a matrix along one axis: of a stack of matrices, or of a matrix whose rows are in
/// groups with a tensor scale each.
fn planes(
    format: QuantFormat,
    axis: Axis,
    (stack, groups): (&[usize], Option<usize>),
    shape: [usize; 2],
) -> Vec<OperandType> {
    let shape = shape.map(Dim::from);
    let planes = Storage::Planes { format, axis, shape }.planes().unwrap_or_default();
    let of_plane = |plane: deepwell_ir::PlaneType| {
        if let (Plane::TensorScale, Some(groups)) = (plane.plane, groups) {
            return dense(plane.dtype, &[groups, 1]);
        }
        let Shape(sizes) = plane.shape;
        let sizes = sizes.iter().filter_map(|size| size.as_fixed());
        let shape: Vec<usize> = stack.iter().copied().chain(sizes).collect();
        dense(plane.dtype, &shape)
    };
    planes.into_iter().map(of_plane).collect()
}
