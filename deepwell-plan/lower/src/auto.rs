//! `auto`: chooses the precision of each linear layer by predicted kernel times.

use std::collections::HashMap;
use std::fmt;

use deepwell_ir::ops::{
    Axis, GroupedGemmDgrad, GroupedGemmWgrad, LinearDgrad, LinearWgrad, Quantize, ScaledGemm,
    ScaledGroupedGemm,
};
use deepwell_ir::{
    Binding, DType, Dim, GemmKind, Graph, KernelCatalog, KernelRequest, Node, Op, OperandType,
    PrecisionPolicy, Shape, Storage, Target, TensorId, quantizable_weights,
};
use deepwell_precision::{Format, QuantFormat};
use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::lower::expand_experts;

/// Reason given in the policy's rules for layers kept in BF16.
const NOT_FASTER: &str = "MXFP8 is not predicted faster with its quantization";

/// Equal-sized weights at the same place in their layers, with the predicted GEMM times of the
/// first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoLayers {
    /// Name of the first weight.
    pub first: String,
    /// Number of weights.
    pub count: usize,
    /// Number of weights in the quantized format.
    pub quantized: usize,
    /// fprop, dgrad and wgrad in BF16, in microseconds.
    pub bf16_us: f64,
    /// fprop, dgrad and wgrad quantized, including quantization of inputs and gradients; `None`
    /// without kernels.
    pub quantized_us: Option<f64>,
}

/// The choices of `auto`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoPrecision {
    /// The quantizing preset.
    pub preset: String,
    /// Sequences and tokens per sequence assumed by the predictions.
    pub micro_batch: [usize; 2],
    /// Linear layers, in the order of the model.
    pub layers: Vec<AutoLayers>,
}

impl fmt::Display for AutoPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |of: fn(&AutoLayers) -> usize| self.layers.iter().map(of).sum::<usize>();
        let (all, quantized) = (sum(|it| it.count), sum(|it| it.quantized));
        let [batch, seq] = self.micro_batch;
        write!(f, "{quantized} of {all} linear layers in {}", self.preset)?;
        write!(f, ", {} in bf16, by predicted times for {batch} x {seq} tokens", all - quantized)?;
        if (1..all).contains(&quantized) {
            let in_bf16 = self.layers.iter().filter(|it| it.quantized < it.count);
            let like = |it: &AutoLayers| format!("{} like {}", it.count - it.quantized, it.first);
            write!(f, "; bf16: {}", in_bf16.map(like).collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

/// Builds a policy with `preset` for each linear layer whose GEMMs are predicted faster with it,
/// quantization included, and BF16 for all other layers. Predictions are the times of kernel
/// selection on `target`, for micro-batches of `batch` sequences.
///
/// # Errors
/// An unknown preset, or a graph whose experts cannot be expanded.
pub fn auto_precision(
    graph: &Graph,
    preset: &str,
    (batch, seq): (usize, usize),
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<(PrecisionPolicy, AutoPrecision), PlanError> {
    let base = PrecisionPolicy::preset(preset).map_err(deepwell_ir::IrError::from)?;
    let graph = expand_experts(graph, &base)?;
    let times = Times { policy: &base, catalog, target, binding: Binding { batch, seq } };
    let layers = times.layers(&graph);
    let chosen = quantized(&layers);
    let report = report(&layers, &chosen);
    let policy = policy(base, &layers, &chosen)?;
    let (preset, micro_batch) = (preset.to_string(), [batch, seq]);
    Ok((policy, AutoPrecision { preset, micro_batch, layers: report }))
}

/// A linear layer and its predicted times.
struct Layer {
    name: String,
    /// Place among the linear layers of the enclosing layer (`None` outside of layers); sizes of
    /// input, weight and output.
    kind: (Option<usize>, [Vec<usize>; 3]),
    input: TensorId,
    bf16_s: f64,
    /// The three GEMMs with quantized operands; `None` without kernels.
    gemms_s: Option<f64>,
    /// Quantization of the input, shared by all layers with this input.
    input_s: f64,
    /// Quantization of the output gradient.
    gradient_s: f64,
}

impl Layer {
    /// Seconds if `readers` layers share the quantized input.
    fn quantized_s(&self, readers: usize) -> Option<f64> {
        let input_s = self.input_s / readers.max(1) as f64;
        self.gemms_s.map(|gemms_s| gemms_s + input_s + self.gradient_s)
    }

    /// Number of chosen layers with the same input.
    fn readers(&self, layers: &[Layer], chosen: &[bool]) -> usize {
        let reads = |(layer, is_chosen): &(&Layer, &bool)| **is_chosen && layer.input == self.input;
        layers.iter().zip(chosen).filter(reads).count()
    }
}

/// The layers to quantize. Removing a layer raises the cost of a shared input for the remaining
/// readers, so the choice is repeated until no layer is removed.
fn quantized(layers: &[Layer]) -> Vec<bool> {
    let mut chosen: Vec<bool> = layers.iter().map(|layer| layer.gemms_s.is_some()).collect();
    loop {
        let mut readers: HashMap<TensorId, usize> = HashMap::new();
        for (layer, _) in layers.iter().zip(&chosen).filter(|(_, is_chosen)| **is_chosen) {
            *readers.entry(layer.input).or_default() += 1;
        }
        let is_faster = |layer: &Layer| {
            let readers = readers.get(&layer.input).copied().unwrap_or(0);
            layer.quantized_s(readers).is_some_and(|seconds| seconds < layer.bf16_s)
        };
        let next: Vec<bool> =
            layers.iter().zip(&chosen).map(|(layer, &it)| it && is_faster(layer)).collect();
        if next == chosen {
            return chosen;
        }
        chosen = next;
    }
}

/// Summarizes the choices by kind of layer.
fn report(layers: &[Layer], chosen: &[bool]) -> Vec<AutoLayers> {
    let mut report: Vec<(&Layer, AutoLayers)> = Vec::new();
    for (layer, is_quantized) in layers.iter().zip(chosen) {
        let known = report.iter().position(|(first, _)| first.kind == layer.kind);
        let known = known.unwrap_or_else(|| {
            let quantized_s = layer.quantized_s(layer.readers(layers, chosen));
            let first = AutoLayers {
                first: layer.name.clone(),
                count: 0,
                quantized: 0,
                bf16_us: layer.bf16_s * 1e6,
                quantized_us: quantized_s.map(|seconds| seconds * 1e6),
            };
            report.push((layer, first));
            report.len() - 1
        });
        report[known].1.count += 1;
        report[known].1.quantized += usize::from(*is_quantized);
    }
    report.into_iter().map(|(_, layers)| layers).collect()
}

/// The base policy with a rule for each layer kept in BF16; plain BF16 if no layer is quantized.
fn policy(
    base: PrecisionPolicy,
    layers: &[Layer],
    chosen: &[bool],
) -> Result<PrecisionPolicy, PlanError> {
    if !layers.is_empty() && !chosen.contains(&true) {
        return Ok(PrecisionPolicy::bf16());
    }
    let in_bf16 = layers.iter().zip(chosen).filter(|(_, is_quantized)| !**is_quantized);
    let with_rule = |policy: PrecisionPolicy, (layer, _): (&Layer, &bool)| {
        policy.with_rule_because(&layer.name, Format::Bf16, NOT_FASTER)
    };
    let policy = in_bf16.into_iter().try_fold(base, with_rule);
    Ok(policy.map_err(deepwell_ir::IrError::from)?)
}

/// Predicts the times of calls.
struct Times<'a> {
    policy: &'a PrecisionPolicy,
    catalog: &'a dyn KernelCatalog,
    target: &'a Target,
    binding: Binding,
}

impl Times<'_> {
    /// The linear layers of a graph with quantizable weights.
    fn layers(&self, graph: &Graph) -> Vec<Layer> {
        let weights: HashMap<TensorId, Option<u32>> =
            quantizable_weights(graph).into_iter().collect();
        let mut places: HashMap<u32, usize> = HashMap::new();
        let of_node = |node: &Node| {
            let &[input, weight, ..] = node.inputs.as_slice() else { return None };
            let number = *weights.get(&weight)?;
            let shape = |id: TensorId| graph.tensor(id).shape.bind(&self.binding);
            let shapes = [shape(input), shape(weight), shape(node.outputs[0])];
            let name = graph.tensor(weight).name.clone();
            let (bf16_s, gemms_s) = match &node.op {
                Op::Linear(op) => self.linear(op.bias, &shapes),
                Op::GroupedGemm(_) => self.grouped(&node.op, &shapes),
                _ => return None,
            }?;
            let [x, _, y] = &shapes;
            let (input_s, gradient_s) = (self.quantize_s(x), self.quantize_s(y));
            let place = number.map(|number| {
                let place = places.entry(number).or_default();
                *place += 1;
                *place
            });
            let kind = (place, shapes);
            Some(Layer { name, kind, input, bf16_s, gemms_s, input_s, gradient_s })
        };
        graph.nodes.iter().filter_map(of_node).collect()
    }

    /// Seconds of the three GEMMs of a linear layer, in BF16 and with quantized operands.
    fn linear(&self, bias: bool, [x, w, y]: &[Vec<usize>; 3]) -> Option<(f64, Option<f64>)> {
        let bf16 = |shape: &[usize]| vec![dense(DType::Bf16, shape)];
        let f32 = |shape: &[usize]| vec![dense(DType::F32, shape)];
        let add = if bias { bf16(&w[..1]) } else { Vec::new() };
        let fprop = deepwell_ir::ops::Linear { bias }.into();
        let plain = [
            (fprop, [bf16(x), bf16(w), add.clone()].concat(), bf16(y)),
            (LinearDgrad {}.into(), [bf16(y), bf16(w)].concat(), bf16(x)),
            (LinearWgrad {}.into(), [bf16(y), bf16(x)].concat(), f32(w)),
        ];
        let (activations, weights) = self.formats();
        let (m, [n, k]) = (x[0], [w[0], w[1]]);
        let gemm = |kind, bias, b| {
            let (a, output) = (activations, DType::Bf16);
            Op::from(ScaledGemm { kind, output, bias, a, b })
        };
        let operands = |a: [usize; 2], b: [usize; 2], of_b: QuantFormat| {
            [planes(activations, Axis::Row, &[], a), planes(of_b, Axis::Row, &[], b)].concat()
        };
        let scaled = [
            (
                gemm(GemmKind::Fprop, bias, weights),
                [operands([m, k], [n, k], weights), add].concat(),
                bf16(y),
            ),
            (gemm(GemmKind::Dgrad, false, weights), operands([m, n], [k, n], weights), bf16(x)),
            (
                gemm(GemmKind::Wgrad, false, activations),
                operands([n, m], [k, m], activations),
                f32(w),
            ),
        ];
        Some((self.sum_s(&plain)?, self.sum_s(&scaled)))
    }

    /// Seconds of the three grouped GEMMs of the experts of a layer, in BF16 and quantized.
    fn grouped(&self, op: &Op, [x, w, y]: &[Vec<usize>; 3]) -> Option<(f64, Option<f64>)> {
        let Op::GroupedGemm(fprop) = op else { return None };
        let grouped = fprop.grouped;
        let bf16 = |shape: &[usize]| vec![dense(DType::Bf16, shape)];
        let f32 = |shape: &[usize]| vec![dense(DType::F32, shape)];
        let offsets = vec![dense(DType::I32, &[grouped.groups + 1])];
        let plain = [
            (op.clone(), [bf16(x), bf16(w), offsets.clone()].concat(), bf16(y)),
            (
                GroupedGemmDgrad { grouped }.into(),
                [bf16(y), bf16(w), offsets.clone()].concat(),
                bf16(x),
            ),
            (
                GroupedGemmWgrad { grouped }.into(),
                [bf16(y), bf16(x), offsets.clone()].concat(),
                f32(w),
            ),
        ];
        let (activations, weights) = self.formats();
        let (rows, [groups, n, k]) = (x[0], [w[0], w[1], w[2]]);
        let gemm = |kind, b| {
            let (a, output) = (activations, DType::Bf16);
            Op::from(ScaledGroupedGemm { kind, grouped, output, a, b })
        };
        let operands = |a: [usize; 2], stack: &[usize], b: [usize; 2], of_b: QuantFormat| {
            let a = planes(activations, Axis::Row, &[], a);
            [a, planes(of_b, Axis::Row, stack, b), offsets.clone()].concat()
        };
        let scaled = [
            (
                gemm(GemmKind::Fprop, weights),
                operands([rows, k], &[groups], [n, k], weights),
                bf16(y),
            ),
            (
                gemm(GemmKind::Dgrad, weights),
                operands([rows, n], &[groups], [k, n], weights),
                bf16(x),
            ),
            (
                gemm(GemmKind::Wgrad, activations),
                operands([n, rows], &[], [k, rows], activations),
                f32(w),
            ),
        ];
        Some((self.sum_s(&plain)?, self.sum_s(&scaled)))
    }

    /// Formats of activations and gradients, and of weights.
    fn formats(&self) -> (QuantFormat, QuantFormat) {
        (self.policy.activation_format(), self.policy.weight_format())
    }

    /// Seconds of quantizing activations or gradients along both axes: rowwise for fprop and dgrad,
    /// columnwise for wgrad.
    fn quantize_s(&self, shape: &[usize]) -> f64 {
        let &[rows, columns] = shape else { return 0.0 };
        let (format, _) = self.formats();
        let op = Op::from(Quantize { format, axis: Axis::Both });
        let counters = vec![dense(DType::U64, &[Quantize::STATISTICS])];
        let of_axis = |axis| planes(format, axis, &[], [rows, columns]);
        let outputs = [of_axis(Axis::Row), of_axis(Axis::Column), counters].concat();
        self.call_s(&op, vec![dense(DType::Bf16, shape)], outputs).unwrap_or(f64::INFINITY)
    }

    /// Time of the calls in a row, seconds; `None` if a call has no kernel.
    fn sum_s(&self, calls: &[(Op, Vec<OperandType>, Vec<OperandType>)]) -> Option<f64> {
        let of = |(op, inputs, outputs): &(Op, Vec<OperandType>, Vec<OperandType>)| {
            self.call_s(op, inputs.clone(), outputs.clone())
        };
        calls.iter().map(of).sum()
    }

    fn call_s(&self, op: &Op, inputs: Vec<OperandType>, outputs: Vec<OperandType>) -> Option<f64> {
        let input_count = inputs.len();
        let operands = [inputs, outputs].concat();
        let request = KernelRequest { op, operands: &operands, input_count };
        self.catalog.predicted_s(&request, self.target)
    }
}

fn dense(dtype: DType, shape: &[usize]) -> OperandType {
    OperandType { dtype, shape: shape.to_vec() }
}

/// Data and scales of a matrix, or of a stack of matrices, along one axis.
fn planes(format: QuantFormat, axis: Axis, stack: &[usize], shape: [usize; 2]) -> Vec<OperandType> {
    let shape = shape.map(Dim::from);
    let planes = Storage::Planes { format, axis, shape }.planes().unwrap_or_default();
    let of_plane = |plane: deepwell_ir::PlaneType| {
        let Shape(sizes) = plane.shape;
        let sizes = sizes.iter().filter_map(|size| size.as_fixed());
        OperandType { dtype: plane.dtype, shape: stack.iter().copied().chain(sizes).collect() }
    };
    planes.into_iter().map(of_plane).collect()
}
