//! The program itself: operands and number of its GEMMs.

use std::collections::HashMap;

use deepwell_ir::ops::{Axis, ScaledGemm, ScaledGroupedGemm};
use deepwell_ir::{
    Call, Derivation, GemmKind, Link, MemoryKind, Mode, NodeId, Op, Operand, ParameterState, Phase,
    Plane, Program, Storage, TensorId, TensorPrecision, ValueId,
};
use deepwell_precision::QuantFormat;

use super::emulated;
use super::report::Finding;

/// Origin of quantized data or scales.
#[derive(Clone, PartialEq, Eq)]
struct Origin {
    /// The quantization: name of its call and number within the call.
    quantization: String,
    /// Name of the tensor that was quantized.
    tensor: String,
    /// The tensor itself; for a recomputed call the tensor of the first run.
    source: Option<TensorId>,
    /// Index of the parameter, if the tensor is a parameter.
    parameter: Option<usize>,
    /// [`Axis::Row`] or [`Axis::Column`].
    axis: Axis,
    plane: Plane,
}

impl Origin {
    fn describe(&self) -> String {
        format!("{}wise `{}`", self.axis.name(), self.tensor)
    }
}

/// Origins of the values of a program.
pub(super) struct Origins<'a> {
    program: &'a Program,
    quantized: HashMap<ValueId, Origin>,
    /// Quantization axis of the operand from which a value was dequantized.
    dequantized: HashMap<ValueId, Axis>,
    /// Parameter of masters, of casts of masters, and of gradients.
    parameters: HashMap<ValueId, usize>,
}

impl<'a> Origins<'a> {
    fn new(program: &'a Program) -> Origins<'a> {
        let mut origins = Origins {
            program,
            quantized: HashMap::new(),
            dequantized: HashMap::new(),
            parameters: HashMap::new(),
        };
        for (index, state) in program.parameters.iter().enumerate() {
            origins.parameters.insert(state.master.value(), index);
            origins.parameters.extend(state.gradient.map(|gradient| (gradient, index)));
        }
        // An evaluation reads weight copies that the training program writes.
        for (index, value) in program.values.iter().enumerate() {
            if let (MemoryKind::Weights, Some(link)) = (value.memory, value.link) {
                origins.by_link(ValueId(index as u32), link);
            }
        }
        for call in &program.calls {
            origins.by_call(call);
        }
        origins
    }

    pub(super) fn program(&self) -> &'a Program {
        self.program
    }

    /// Returns the axis along which a value was quantized before its dequantization; none for a
    /// value that is not dequantized.
    pub(super) fn dequantized_axis(&self, value: ValueId) -> Option<Axis> {
        self.dequantized.get(&value).copied()
    }

    /// Records the origin of a weight copy from its link to a quantized, cast or dequantized
    /// master.
    fn by_link(&mut self, id: ValueId, link: Link) {
        let states = &self.program.parameters;
        let is_master = |state: &ParameterState| {
            self.program.value(state.master.value()).tensor == Some(link.of)
        };
        let Some(index) = states.iter().position(is_master) else { return };
        match link.derivation {
            Derivation::Plane { quantization, axis, plane, .. } => {
                let origin = Origin {
                    quantization: format!("{} of tensor {}", quantization, link.of.0),
                    tensor: states[index].name.clone(),
                    source: Some(link.of),
                    parameter: Some(index),
                    axis,
                    plane,
                };
                self.quantized.insert(id, origin);
            }
            Derivation::Dequantized { axis } => {
                self.parameters.insert(id, index);
                self.dequantized.insert(id, axis);
            }
            Derivation::Cast | Derivation::Recomputed => {
                self.parameters.insert(id, index);
            }
        }
    }

    fn by_call(&mut self, call: &Call) {
        let source = call.operands.first().map(|operand| operand.value);
        match (&call.op, source) {
            (Op::Cast(_), Some(source)) if call.phase == Phase::Weights => {
                if let Some(&index) = self.parameters.get(&source) {
                    self.parameters.extend(call.outputs().iter().map(|out| (out.value, index)));
                }
            }
            (Op::StochasticRound(_), _) => {
                let scales = call.operands.get(1).and_then(|it| self.quantized.get(&it.value));
                if let Some(origin) = scales.cloned() {
                    let of_data = |output: &Operand| {
                        (output.value, Origin { plane: Plane::Data, ..origin.clone() })
                    };
                    self.quantized.extend(call.outputs().iter().map(of_data));
                }
            }
            (Op::Dequantize(_), Some(source)) => {
                if let Some(origin) = self.quantized.get(&source) {
                    for output in call.outputs() {
                        self.dequantized.insert(output.value, origin.axis);
                        self.parameters.extend(origin.parameter.map(|index| (output.value, index)));
                    }
                }
            }
            _ => {}
        }
        for (index, quantization) in call.quantizations().into_iter().enumerate() {
            let states = &self.program.parameters;
            let is_source =
                |state: &ParameterState| quantization.source == Some(state.master.value());
            let parameter = states.iter().position(is_source);
            let stored = quantization.source.and_then(|id| self.program.value(id).tensor);
            let source = stored.or_else(|| quantization.tensor(self.program));
            let outputs = quantization.quantize.planes();
            for (operand, (axis, plane)) in quantization.quantized_operands().iter().zip(outputs) {
                let origin = Origin {
                    quantization: format!("{}[{index}]", call.name),
                    tensor: quantization.source_name(self.program).to_string(),
                    source: source.map(|id| self.program.first_run(id)),
                    parameter,
                    axis,
                    plane,
                };
                self.quantized.insert(operand.value, origin);
            }
        }
    }

    fn parameter_name(&self, index: Option<usize>) -> String {
        match index.and_then(|index| self.program.parameters.get(index)) {
            Some(state) => format!("parameter `{}`", state.name),
            None => "no parameter".to_string(),
        }
    }

    /// The parameter of a GEMM's layer.
    fn parameter_of(&self, call: &Call) -> Option<(GemmKind, Option<usize>)> {
        let of_value = |value: ValueId| self.parameters.get(&value).copied();
        let output = call.outputs().first().map(|operand| operand.value);
        let weight = |index: usize| call.operands.get(index).map(|operand| operand.value);
        Some(match call.op.leading() {
            Op::Linear(_) | Op::GroupedGemm(_) => (GemmKind::Fprop, weight(1).and_then(of_value)),
            Op::LinearDgrad(_) | Op::GroupedGemmDgrad(_) => {
                (GemmKind::Dgrad, weight(1).and_then(of_value))
            }
            Op::LinearWgrad(_) | Op::GroupedGemmWgrad(_) => {
                (GemmKind::Wgrad, output.and_then(of_value))
            }
            op => {
                let op = scaled_gemm(op)?;
                if op.kind == GemmKind::Wgrad {
                    return Some((op.kind, output.and_then(of_value)));
                }
                let origin = weight(op.b_input()).and_then(|value| self.quantized.get(&value));
                (op.kind, origin.and_then(|origin| origin.parameter))
            }
        })
    }
}

/// Returns a GEMM of quantized operands; for a grouped GEMM the attributes that both share.
fn scaled_gemm(op: &Op) -> Option<ScaledGemm> {
    match op {
        Op::ScaledGemm(op) => Some(op.clone()),
        Op::ScaledGroupedGemm(op) => {
            let ScaledGroupedGemm { kind, output, a, b, .. } = op.clone();
            Some(ScaledGemm { kind, output, bias: false, a, b })
        }
        _ => None,
    }
}

/// Axis along which each operand of a GEMM is quantized.
pub(super) fn wanted_axes(kind: GemmKind) -> [Axis; 2] {
    match kind {
        GemmKind::Fprop => [Axis::Row, Axis::Row],
        GemmKind::Dgrad => [Axis::Row, Axis::Column],
        GemmKind::Wgrad => [Axis::Column, Axis::Column],
    }
}

/// Operands that the GEMMs of one layer have in common.
#[derive(Default)]
struct LayerUse {
    parameter: Option<usize>,
    input: Option<Origin>,
    output_gradient: Option<Origin>,
}

/// Checks that each [`ScaledGemm`] of `program` reads the right operands:
/// - the data and scales of an operand were written by one quantization, also for dequantizations;
/// - fprop reads activation and weight rowwise, dgrad the gradient rowwise and the weight
///   columnwise, wgrad gradient and activation columnwise;
/// - the three GEMMs of a layer read the same parameter (wgrad writes its gradient), the same input
///   and the same output gradient. GEMMs of a layer come from one node.
pub fn audit_provenance(program: &Program) -> Vec<Finding> {
    let origins = Origins::new(program);
    let mut findings = Vec::new();
    let mut layers: HashMap<NodeId, LayerUse> = HashMap::new();
    for call in &program.calls {
        let mut add = |what: String| {
            findings.push(Finding { call: call.name.clone(), what });
        };
        if let Op::Dequantize(op) = &call.op {
            let operand = operand_at(&origins, call, 0, &op.format, &mut add);
            if let Some(operand) = operand.filter(|operand| operand.axis != op.axis) {
                add(format!(
                    "takes the {} where it quantizes {}wise",
                    operand.describe(),
                    op.axis.name()
                ));
            }
        }
        if let Some(op) = scaled_gemm(call.op.leading()) {
            let [Some(a), Some(b)] = operands(&origins, call, &op, &mut add) else { continue };
            roles(&origins, call, &op, a, b, &mut add);
            let layer = layers.entry(call.source).or_default();
            same_layer(&origins, call, &op, [a, b], layer, &mut add);
        }
    }
    findings
}

/// Returns the origin of each operand whose planes agree and that has the right axis.
fn operands<'a>(
    origins: &'a Origins<'_>,
    call: &Call,
    op: &ScaledGemm,
    add: &mut dyn FnMut(String),
) -> [Option<&'a Origin>; 2] {
    let wanted = wanted_axes(op.kind);
    std::array::from_fn(|side| {
        let (first, format) = [(0, &op.a), (op.b_input(), &op.b)][side];
        let data = operand_at(origins, call, first, format, add)?;
        if data.axis != wanted[side] {
            let wanted = wanted[side].name();
            let kind = op.kind.name();
            let got = data.describe();
            add(format!("{kind} reads the {got}, expected it {wanted}wise"));
        }
        Some(data)
    })
}

/// Returns the origin of the quantized operand whose data is operand `first`, followed by its other
/// planes, if all planes have the same origin.
fn operand_at<'a>(
    origins: &'a Origins<'_>,
    call: &Call,
    first: usize,
    format: &QuantFormat,
    add: &mut dyn FnMut(String),
) -> Option<&'a Origin> {
    let planes = [(Plane::Data, "data"), (Plane::Scales, "scales"), (Plane::TensorScale, "scale")];
    let mut origins_read: Vec<Option<&Origin>> = Vec::with_capacity(planes.len());
    for (index, &(plane, kind)) in planes[..Storage::plane_count(format)].iter().enumerate() {
        let id = call.operands[first + index].value;
        let name = &origins.program.value(id).name;
        let origin = origins.quantized.get(&id);
        match origin {
            Some(origin) if origin.plane == plane => {}
            Some(_) => add(format!("reads `{name}` as {kind}")),
            None => add(format!("reads `{name}` as {kind}, which no quantization wrote")),
        }
        origins_read.push(origin.filter(|origin| origin.plane == plane));
    }
    let origins_read: Vec<&Origin> = origins_read.into_iter().collect::<Option<_>>()?;
    let (data, others) = origins_read.split_first()?;
    for other in others {
        if (&data.quantization, data.axis) != (&other.quantization, other.axis) {
            let (data, other) = (data.describe(), other.describe());
            add(format!("reads data of the {data} with scales of the {other}"));
            return None;
        }
    }
    Some(data)
}

/// Checks that exactly the operands that should be weights are weights.
fn roles(
    origins: &Origins<'_>,
    call: &Call,
    op: &ScaledGemm,
    a: &Origin,
    b: &Origin,
    add: &mut dyn FnMut(String),
) {
    let kind = op.kind.name();
    let wants_weight = op.kind != GemmKind::Wgrad;
    if a.parameter.is_some() {
        add(format!("{kind} reads the weight `{}` as its first operand", a.tensor));
    }
    if b.parameter.is_some() != wants_weight {
        let expected = if wants_weight { "a weight" } else { "an activation" };
        add(format!("{kind} reads `{}`, expected {expected}", b.tensor));
    }
    if !wants_weight && origins.parameter_of(call).is_none_or(|(_, index)| index.is_none()) {
        add("wgrad writes into what is no gradient of a parameter".to_string());
    }
}

fn same_layer(
    origins: &Origins<'_>,
    call: &Call,
    op: &ScaledGemm,
    [a, b]: [&Origin; 2],
    layer: &mut LayerUse,
    add: &mut dyn FnMut(String),
) {
    let parameter = origins.parameter_of(call).and_then(|(_, index)| index);
    let layer_parameter = *layer.parameter.get_or_insert_with(|| parameter.unwrap_or(usize::MAX));
    if Some(layer_parameter) != parameter {
        let got = origins.parameter_name(parameter);
        let expected = origins.parameter_name(Some(layer_parameter));
        add(format!("belongs to {got}, other GEMMs of the layer to {expected}"));
    }
    let mut same = |slot: &mut Option<Origin>, origin: &Origin, role: &str| {
        let expected = slot.get_or_insert_with(|| origin.clone());
        if expected.source != origin.source {
            let (got, expected) = (&origin.tensor, &expected.tensor);
            add(format!("reads `{got}` as {role}, other GEMMs of the layer `{expected}`"));
        }
    };
    match op.kind {
        GemmKind::Fprop => same(&mut layer.input, a, "input"),
        GemmKind::Dgrad => same(&mut layer.output_gradient, a, "gradient of the output"),
        GemmKind::Wgrad => {
            same(&mut layer.output_gradient, a, "gradient of the output");
            same(&mut layer.input, b, "input");
        }
    }
}

/// Checks that precisely the GEMMs that `program.precision` quantizes are [`ScaledGemm`]s: for each
/// parameter one fprop, in a training program also one dgrad and one wgrad (recomputed calls
/// apart). The other GEMMs of linear layers must read dequantized operands exactly where the policy
/// emulates them.
pub fn audit_counts(program: &Program) -> Vec<Finding> {
    let origins = Origins::new(program);
    let mut findings = Vec::new();
    let mut add = |call: &str, what: String| {
        findings.push(Finding { call: call.to_string(), what });
    };
    let precision: Vec<Option<&TensorPrecision>> = program
        .parameters
        .iter()
        .map(|state| program.precision.iter().find(|entry| entry.tensor == state.name))
        .collect();
    let gemm_of = |index: usize, kind: GemmKind| {
        precision[index].map(|entry| entry.gemm(kind)).unwrap_or_default()
    };
    let format_of = |index: usize| precision[index].map_or("bf16", |entry| entry.format.name());
    let mut counts: HashMap<(usize, GemmKind), usize> = HashMap::new();
    for call in &program.calls {
        let Some((kind, parameter)) = origins.parameter_of(call) else { continue };
        let is_scaled_call = scaled_gemm(call.op.leading()).is_some();
        let Some(index) = parameter else {
            add(&call.name, format!("{} of no known parameter", kind.name()));
            continue;
        };
        let name = &program.parameters[index].name;
        let gemm = gemm_of(index, kind);
        match (gemm.is_scaled, is_scaled_call) {
            (true, false) => {
                let dtype = program.value(call.operands[0].value).dtype;
                let kind = kind.name();
                let format = format_of(index);
                let what = format!("{kind} of `{name}` in {dtype}, expected {format}");
                add(&call.name, what);
            }
            (false, true) => {
                let kind = kind.name();
                let format = call.op.formats().first().map_or("no format", QuantFormat::name);
                let what = format!("{kind} of `{name}` in {format}, which the policy is not");
                add(&call.name, what);
            }
            (false, false) => {
                let mut add = |what| add(&call.name, what);
                emulated::check_operands(&origins, call, kind, gemm, &mut add);
            }
            (true, true) if !call.recomputes => *counts.entry((index, kind)).or_default() += 1,
            (true, true) => {}
        }
    }
    let kinds: &[GemmKind] = match program.mode {
        Mode::Train => GemmKind::ALL,
        Mode::Evaluate => &[GemmKind::Fprop],
    };
    for (index, state) in program.parameters.iter().enumerate() {
        for &kind in kinds.iter().filter(|&&kind| gemm_of(index, kind).is_scaled) {
            let got = counts.get(&(index, kind)).copied().unwrap_or(0);
            if got != 1 {
                let (name, kind) = (&state.name, kind.name());
                let format = format_of(index);
                let what = format!("`{name}`: expected 1 {kind} in {format}, got {got}");
                add("program", what);
            }
        }
    }
    findings
}
