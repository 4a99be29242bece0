//! Pattern rules: groups of calls that form one op of the graph.
//!
//! A rule matches the last call of a pattern and its operands. Earlier calls of the pattern stay
//! pending and are dropped later if nothing reads them.

use std::collections::HashMap;

use super::attention;
use super::constant::Constant;
use super::exported::{Arg, AtenNode};
use super::rope;
use super::trace::{arg, int};
use super::value::{Exprs, Id, Kind, Operand, Value, View, single};

/// A call that may be the last call of a pattern.
pub(super) struct Call<'a> {
    /// Bare name of the op.
    pub(super) op: &'a str,
    pub(super) node: &'a AtenNode,
    /// Tensor and number operands, in argument order.
    pub(super) operands: &'a [Operand],
    /// Shape of the first result.
    pub(super) shape: &'a [usize],
    /// Index of the node.
    pub(super) index: usize,
}

/// `sqrt(2/π)` and 0.044715 of GELU's tanh approximation, as written by exported models.
const GELU_INNER: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

fn is_about(value: f64, expected: f64) -> bool {
    (value - expected).abs() <= 1e-6 * expected.abs()
}

impl Call<'_> {
    /// The result, if a rule matches the call.
    pub(super) fn apply(
        &self,
        exprs: &mut Exprs,
        buffers: &HashMap<String, Constant>,
    ) -> Option<Value> {
        match self.op {
            "embedding" => self.embedding(exprs),
            "linear" => self.linear(exprs, self.named("input")?, self.named("weight")?, false),
            "addmm" => self.addmm(exprs),
            "mm" | "bmm" | "matmul" => self.product(exprs),
            "add" => rope::apply(self, exprs, buffers)
                .or_else(|| self.add_bias(exprs))
                .or_else(|| self.add_positions(exprs))
                .or_else(|| self.residual(exprs)),
            "mul" => self
                .silu(exprs)
                .or_else(|| self.swiglu(exprs))
                .or_else(|| self.rms_norm_by_hand(exprs))
                .or_else(|| self.gelu_by_hand(exprs)),
            "gelu" => {
                let tanh = arg(self.node, &["approximate"]) == Some(&Arg::Text("tanh".to_string()));
                let x = exprs.rows(&self.operands.first()?.value)?;
                Some(self.result(exprs, Kind::Gelu { x, tanh }))
            }
            "relu" => {
                let x = exprs.rows(&self.operands.first()?.value)?;
                Some(self.result(exprs, Kind::Relu { x }))
            }
            "rms_norm" => self.rms_norm(exprs),
            "layer_norm" | "native_layer_norm" => self.layer_norm(exprs),
            "where" => attention::without_guard(self, exprs),
            "scaled_dot_product_attention" | "_scaled_dot_product_flash_attention_for_cpu" => {
                attention::fused(self, exprs)
            }
            _ => None,
        }
    }

    pub(super) fn named(&self, name: &str) -> Option<&Value> {
        self.operands.iter().find(|operand| operand.name == name).map(|operand| &operand.value)
    }

    /// Both operands of a sum or product, in order and swapped.
    pub(super) fn both_ways(&self) -> Option<[(&Value, &Value); 2]> {
        let [a, b] = self.operands else { return None };
        // A factor on the second operand would be another op.
        if int(self.node, &["alpha"]).is_some_and(|alpha| alpha != 1) {
            return None;
        }
        Some([(&a.value, &b.value), (&b.value, &a.value)])
    }

    /// A new expression of the call's shape, viewed as a whole.
    pub(super) fn result(&self, exprs: &mut Exprs, kind: Kind) -> Value {
        let id = exprs.add(kind, self.shape.to_vec(), Some(self.index));
        exprs.whole(id)
    }

    fn float(&self, name: &str) -> Option<f64> {
        match arg(self.node, &[name])? {
            Arg::Float(value) => Some(*value),
            Arg::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    fn embedding(&self, exprs: &mut Exprs) -> Option<Value> {
        let (table, &[rows, width]) = exprs.parameter(self.named("weight")?)? else { return None };
        let table = table.to_string();
        match self.named("indices")? {
            Value::Known(ids) => {
                let seq = exprs.sizes.seq;
                let ordered =
                    ids.values.iter().enumerate().all(|(at, &id)| id == (at % seq) as f64);
                if ids.shape.last() != Some(&seq) || !ordered || rows < seq {
                    return None;
                }
                let id = exprs.add(Kind::Positions { table }, vec![seq, width], Some(self.index));
                let Value::View(view) = exprs.whole(id) else { return None };
                let shape: Vec<i64> = self.shape.iter().map(|&size| size as i64).collect();
                let layout = view.layout.expanded(&shape)?;
                Some(Value::View(View { layout, node: Some(self.index), ..view }))
            }
            ids => {
                let id = exprs.base_of(ids)?;
                // PyTorch has normalized the index to count from the first row; -1 means none.
                let padding = int(self.node, &["padding_idx"]);
                let padding = padding.and_then(|row| usize::try_from(row).ok());
                matches!(exprs.kind(id), Kind::Tokens)
                    .then(|| self.result(exprs, Kind::Embedding { table, padding }))
            }
        }
    }

    /// `x · w`, where the weight view is `[inputs, outputs]` if `turned`.
    fn linear(&self, exprs: &mut Exprs, x: &Value, w: &Value, turned: bool) -> Option<Value> {
        let bias = match self.named("bias") {
            Some(bias) if self.op == "linear" => Some(exprs.vector(bias)?.0.to_string()),
            _ => None,
        };
        self.linear_of(exprs, x, w, turned, bias)
    }

    fn linear_of(
        &self,
        exprs: &mut Exprs,
        x: &Value,
        w: &Value,
        turned: bool,
        bias: Option<String>,
    ) -> Option<Value> {
        let x = exprs.rows(x)?;
        let weight = exprs.weight(w, turned)?;
        let fits = weight.inputs == exprs.width(x) && self.shape.last() == Some(&weight.outputs);
        fits.then(|| self.result(exprs, Kind::Linear { x, weight, bias }))
    }

    fn addmm(&self, exprs: &mut Exprs) -> Option<Value> {
        let plain = |name: &str| self.float(name).is_none_or(|factor| factor == 1.0);
        if !plain("alpha") || !plain("beta") {
            return None;
        }
        let bias = exprs.vector(self.named("self")?)?.0.to_string();
        self.linear_of(exprs, self.named("mat1")?, self.named("mat2")?, true, Some(bias))
    }

    fn product(&self, exprs: &mut Exprs) -> Option<Value> {
        let [x, w] = self.operands else { return None };
        self.linear(exprs, &x.value, &w.value, true)
            .or_else(|| attention::by_hand(self, exprs, &x.value, &w.value))
    }

    /// Adds a bias to a linear layer without bias.
    fn add_bias(&self, exprs: &mut Exprs) -> Option<Value> {
        self.both_ways()?.into_iter().find_map(|(x, bias)| {
            let id = exprs.rows(x)?;
            let (bias, length) = exprs.vector(bias)?;
            let Kind::Linear { x, weight, bias: None } = exprs.kind(id) else { return None };
            let kind = Kind::Linear { x: *x, weight: weight.clone(), bias: Some(bias.to_string()) };
            (length == weight.outputs).then(|| self.result(exprs, kind))
        })
    }

    fn add_positions(&self, exprs: &mut Exprs) -> Option<Value> {
        self.both_ways()?.into_iter().find_map(|(x, positions)| {
            let x = exprs.rows(x)?;
            let Value::View(view) = positions else { return None };
            let Kind::Positions { table } = exprs.kind(view.base) else { return None };
            let table = table.clone();
            let [seq, width] = [exprs.sizes.seq, exprs.width(x)];
            // A single contiguous run through the table, repeated for each sequence.
            let steps: Vec<_> =
                view.layout.flat().into_iter().filter(|atom| atom.stride != 0).collect();
            let whole: usize = steps.iter().map(|atom| atom.size).product();
            let fits = view.scale == 1.0 && view.layout.offset == 0 && steps.len() <= 1;
            (fits && whole == seq * width)
                .then(|| self.result(exprs, Kind::AddPositions { x, table }))
        })
    }

    fn residual(&self, exprs: &mut Exprs) -> Option<Value> {
        let [(a, b), _] = self.both_ways()?;
        let (a, b) = (exprs.rows(a)?, exprs.rows(b)?);
        (exprs.width(a) == exprs.width(b)).then(|| self.result(exprs, Kind::Add { a, b }))
    }

    /// `x · sigmoid(x)`, the decomposition of silu.
    fn silu(&self, exprs: &mut Exprs) -> Option<Value> {
        self.both_ways()?.into_iter().find_map(|(x, gate)| {
            let operands = exprs.pending(gate, "sigmoid")?.to_vec();
            let same = exprs.columns(x)? == exprs.columns(&operands.first()?.value)?;
            let kind =
                Kind::Pending { op: "silu".to_string(), operands: operands.into(), output: 0 };
            same.then(|| self.result(exprs, kind))
        })
    }

    fn swiglu(&self, exprs: &mut Exprs) -> Option<Value> {
        self.both_ways()?.into_iter().find_map(|(gate, up)| {
            let gate = exprs.columns(&exprs.pending(gate, "silu")?.first()?.value)?;
            let up = exprs.columns(up)?;
            (gate.width == up.width).then(|| self.result(exprs, Kind::SwiGlu { gate, up }))
        })
    }

    /// `gain · (x / root(mean(x²) + eps))`.
    fn rms_norm_by_hand(&self, exprs: &mut Exprs) -> Option<Value> {
        let (x, eps, gain, width) = self.both_ways()?.into_iter().find_map(|(normed, gain)| {
            let (gain, width) = exprs.vector(gain)?;
            let [a, b] = exprs.pending(normed, "mul")? else { return None };
            let sides = [(&a.value, &b.value), (&b.value, &a.value)];
            let (x, eps) = sides.into_iter().find_map(|(x, root)| {
                let x = exprs.rows(x)?;
                Some((x, eps_of_root(exprs, root, x)?))
            })?;
            let last = self.shape.last() == Some(&width);
            last.then(|| (x, eps, gain.to_string(), width))
        })?;
        Some(self.result(exprs, Kind::RmsNorm { x, gain, width, eps }))
    }

    fn rms_norm(&self, exprs: &mut Exprs) -> Option<Value> {
        let x = exprs.rows(self.named("input")?)?;
        let (gain, width) = exprs.vector(self.named("weight")?)?;
        let gain = gain.to_string();
        // Default of PyTorch: F32 machine epsilon.
        let eps = self.float("eps").unwrap_or(f64::from(f32::EPSILON));
        Some(self.result(exprs, Kind::RmsNorm { x, gain, width, eps }))
    }

    fn layer_norm(&self, exprs: &mut Exprs) -> Option<Value> {
        let x = exprs.rows(self.named("input")?)?;
        let (gain, width) = exprs.vector(self.named("weight")?)?;
        let gain = gain.to_string();
        let bias = exprs.vector(self.named("bias")?)?.0.to_string();
        let eps = self.float("eps").unwrap_or(1e-5);
        let fits = width == exprs.width(x);
        fits.then(|| self.result(exprs, Kind::LayerNorm { x, gain, bias, eps }))
    }

    /// `0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`.
    fn gelu_by_hand(&self, exprs: &mut Exprs) -> Option<Value> {
        self.both_ways()?.into_iter().find_map(|(half, rest)| {
            let x = scaled_rows(exprs, half, 0.5)?;
            let tanh = plus(exprs, rest, 1.0)?;
            let inner = &exprs.pending(tanh, "tanh")?.first()?.value;
            let sum = with_scale(inner, GELU_INNER)?;
            let [a, b] = exprs.pending(&sum, "add")? else { return None };
            let found =
                [(&a.value, &b.value), (&b.value, &a.value)].into_iter().any(|(plain, cubic)| {
                    let is_x = |value: &Value| exprs.rows(value) == Some(x);
                    let cube = with_scale(cubic, GELU_CUBIC);
                    let cube = cube.as_ref().and_then(|cube| exprs.pending(cube, "pow"));
                    let third = |operands: &[Operand]| match operands {
                        [base, exponent] => {
                            is_x(&base.value) && single(&exponent.value) == Some(3.0)
                        }
                        _ => false,
                    };
                    is_x(plain) && cube.is_some_and(third)
                });
            found.then(|| self.result(exprs, Kind::Gelu { x, tanh: true }))
        })
    }
}

/// The epsilon, if `root` is `rsqrt(mean(x²) + epsilon)`.
fn eps_of_root(exprs: &Exprs, root: &Value, x: Id) -> Option<f64> {
    let sum = &exprs.pending(root, "rsqrt")?.first()?.value;
    let [mean, eps] = exprs.pending(sum, "add")? else { return None };
    let square = &exprs.pending(&mean.value, "mean")?.first()?.value;
    let squared = match exprs.pending(square, "pow") {
        Some([base, exponent]) if single(&exponent.value) == Some(2.0) => &base.value,
        _ => match exprs.pending(square, "mul")? {
            [a, b] if exprs.rows(&a.value) == exprs.rows(&b.value) => &a.value,
            _ => return None,
        },
    };
    if exprs.rows(squared) == Some(x) { single(&eps.value) } else { None }
}

/// The view without a factor of about `scale`.
fn with_scale(value: &Value, scale: f64) -> Option<Value> {
    match value {
        Value::View(view) if is_about(view.scale, scale) => {
            Some(Value::View(View { scale: 1.0, ..view.clone() }))
        }
        _ => None,
    }
}

fn scaled_rows(exprs: &Exprs, value: &Value, scale: f64) -> Option<Id> {
    exprs.rows(&with_scale(value, scale)?)
}

/// The other operand of a sum with `number`.
fn plus<'e>(exprs: &'e Exprs, value: &Value, number: f64) -> Option<&'e Value> {
    let [a, b] = exprs.pending(value, "add")? else { return None };
    if single(&b.value) == Some(number) {
        Some(&a.value)
    } else {
        (single(&a.value) == Some(number)).then_some(&b.value)
    }
}
