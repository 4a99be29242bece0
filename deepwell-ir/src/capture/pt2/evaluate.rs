//! Evaluates ops whose operands are all known.

use std::rc::Rc;

use super::constant::{Constant, ELEMENTS_MAX, Kind, broadcast, for_each};
use super::exported::{Arg, AtenNode, Scalar};
use super::layout::axis;

/// Maximum number of buffers recorded per value.
const BUFFERS_MAX: usize = 16;

fn truth(value: bool) -> f64 {
    f64::from(u8::from(value))
}

/// A call whose tensor arguments are all known.
pub(super) struct Call<'a> {
    pub(super) node: &'a AtenNode,
    /// Value of a tensor argument.
    pub(super) known: &'a dyn Fn(&str) -> Option<Constant>,
}

impl Call<'_> {
    fn arg(&self, names: &[&str]) -> Option<&Arg> {
        self.node.args.iter().find(|(name, _)| names.contains(&name.as_str())).map(|(_, arg)| arg)
    }

    fn tensor(&self, names: &[&str]) -> Option<Constant> {
        match self.arg(names)? {
            Arg::Tensor(name) => (self.known)(name),
            Arg::Int(value) => Some(Constant::scalar(*value as f64, false)),
            Arg::Float(value) => Some(Constant::scalar(*value, true)),
            Arg::Bool(value) => Some(Constant::scalar(truth(*value), false)),
            _ => None,
        }
    }

    fn tensors(&self, names: &[&str]) -> Option<Vec<Constant>> {
        let Arg::Tensors(names) = self.arg(names)? else { return None };
        names.iter().map(|name| (self.known)(name.as_deref()?)).collect()
    }

    fn int(&self, names: &[&str]) -> Option<i64> {
        match self.arg(names)? {
            Arg::Int(value) => Some(*value),
            _ => None,
        }
    }

    fn ints(&self, names: &[&str]) -> Option<Vec<i64>> {
        match self.arg(names)? {
            Arg::Ints(values) => Some(values.clone()),
            Arg::Int(value) => Some(vec![*value]),
            _ => None,
        }
    }

    fn dtype(&self) -> Option<Scalar> {
        match self.arg(&["dtype"])? {
            Arg::Type(scalar) => Some(*scalar),
            _ => None,
        }
    }

    /// A new tensor of the call's size, filled with one value.
    fn filled(&self, value: Constant) -> Option<Constant> {
        let size = self.ints(&["size"])?;
        let shape: Vec<usize> =
            size.iter().map(|&size| usize::try_from(size).ok()).collect::<Option<_>>()?;
        value.expanded(&shape)
    }

    /// The result, if the op is known and sizes match.
    pub(super) fn evaluate(&self) -> Option<Constant> {
        let result = self.value()?;
        if result.count() > ELEMENTS_MAX {
            return None;
        }
        let mut buffers: Vec<String> = Vec::new();
        for (_, arg) in &self.node.args {
            let names: Vec<&String> = match arg {
                Arg::Tensor(name) => vec![name],
                Arg::Tensors(names) => names.iter().flatten().collect(),
                _ => Vec::new(),
            };
            for known in names.into_iter().filter_map(|name| (self.known)(name)) {
                buffers.extend(known.buffers);
            }
        }
        buffers.sort();
        buffers.dedup();
        // One buffer is enough to find a table's frequencies; unlimited lists would grow with each
        // op.
        buffers.truncate(BUFFERS_MAX);
        Some(Constant { buffers, ..result.rounded() })
    }

    fn value(&self) -> Option<Constant> {
        let x = || self.tensor(&["self", "input", "a"]);
        let y = || self.tensor(&["other"]);
        let float = self.dtype().map(Scalar::is_float);
        let arithmetic = |f: fn(f64, f64) -> f64| x()?.combined(&y()?, Kind::Arithmetic, f);
        let test =
            |f: fn(f64, f64) -> bool| x()?.combined(&y()?, Kind::Bool, |a, b| truth(f(a, b)));
        let function = |f: fn(f64) -> f64| Some(x()?.mapped(true, f));
        let name = self.node.target.strip_prefix("aten.")?;
        let (op, overload) = name.split_once('.').unwrap_or((name, ""));
        match op {
            "arange" => {
                let start = self.int(&["start"]).unwrap_or(0);
                let step = self.int(&["step"]).unwrap_or(1);
                let end = self.int(&["end"])?;
                let step = usize::try_from(step).ok().filter(|&step| step > 0)?;
                if end.checked_sub(start)? as usize / step > ELEMENTS_MAX {
                    return None;
                }
                let values: Vec<f64> = (start..end).step_by(step).map(|i| i as f64).collect();
                Some(Constant::new(vec![values.len()], values, float.unwrap_or(false)))
            }
            "add" | "sub" => {
                let factor = self.tensor(&["alpha"]).map_or(Some(1.0), |alpha| alpha.single())?;
                let sign = if op == "add" { factor } else { -factor };
                x()?.combined(&y()?, Kind::Arithmetic, |a, b| a + sign * b)
            }
            "mul" => arithmetic(|a, b| a * b),
            "div" if overload != "Tensor_mode" => x()?.combined(&y()?, Kind::Float, |a, b| a / b),
            "pow" => {
                let base = self.tensor(&["self"])?;
                let exponent = self.tensor(&["exponent"])?;
                base.combined(&exponent, Kind::Arithmetic, f64::powf)
            }
            "reciprocal" => function(|a| 1.0 / a),
            "cos" => function(f64::cos),
            "sin" => function(f64::sin),
            "exp" => function(f64::exp),
            "neg" => Some(x()?.mapped(x()?.is_float, |a| -a)),
            "eq" => test(|a, b| a == b),
            "ne" => test(|a, b| a != b),
            "lt" => test(|a, b| a < b),
            "le" => test(|a, b| a <= b),
            "gt" => test(|a, b| a > b),
            "ge" => test(|a, b| a >= b),
            "__and__" | "bitwise_and" | "logical_and" => test(|a, b| a != 0.0 && b != 0.0),
            "__or__" | "bitwise_or" | "logical_or" => test(|a, b| a != 0.0 || b != 0.0),
            "logical_not" | "bitwise_not" => Some(x()?.mapped(false, |a| truth(a == 0.0))),
            "where" => {
                let condition = self.tensor(&["condition"])?;
                let yes = self.tensor(&["self"])?;
                let no = self.tensor(&["other"])?;
                let shape = broadcast(&condition.shape, &broadcast(&yes.shape, &no.shape)?)?;
                let condition = condition.expanded(&shape)?;
                let (yes, no) = (yes.expanded(&shape)?, no.expanded(&shape)?);
                let pick = |at: usize| match condition.values[at] {
                    0.0 => no.values[at],
                    _ => yes.values[at],
                };
                let values = (0..condition.count()).map(pick).collect();
                Some(Constant::new(shape, values, yes.is_float || no.is_float))
            }
            "masked_fill" | "masked_fill_" => {
                let (x, mask) = (x()?, self.tensor(&["mask"])?);
                let value = self.tensor(&["value"])?.single()?;
                let mask = mask.expanded(&x.shape)?;
                let pick = |at: usize| if mask.values[at] == 0.0 { x.values[at] } else { value };
                let values = (0..x.count()).map(pick).collect();
                Some(Constant { values: Rc::new(values), ..x })
            }
            "tril" | "triu" => {
                let x = x()?;
                let diagonal = self.int(&["diagonal"]).unwrap_or(0);
                let rank = x.shape.len();
                let mut values = Vec::with_capacity(x.count());
                for_each(&x.shape, |at| {
                    let [.., row, column] = at else { return };
                    let above = *column as i64 - *row as i64;
                    let keep = if op == "tril" { above <= diagonal } else { above >= diagonal };
                    let value = x.values[values.len()];
                    values.push(if keep { value } else { 0.0 });
                });
                (rank >= 2).then(|| Constant { values: Rc::new(values), ..x })
            }
            "cumsum" => {
                let x = x()?;
                let (outer, size, inner) = x.around(axis(self.int(&["dim"])?, x.shape.len())?);
                let mut values = x.values.to_vec();
                for at in (0..outer * size * inner).filter(|at| at / inner % size > 0) {
                    values[at] += values[at - inner];
                }
                Some(Constant { values: Rc::new(values), ..x })
            }
            "diff" => {
                let (x, at) = (x()?, self.int(&["dim"]).unwrap_or(-1));
                let x = match self.tensor(&["prepend"]) {
                    Some(before) => Constant::joined(&[before, x], at)?,
                    None => x,
                };
                let later = x.sliced(at, 1, i64::MAX, 1)?;
                let earlier = x.sliced(at, 0, -1, 1)?;
                later.combined(&earlier, Kind::Arithmetic, |a, b| a - b)
            }
            "cat" => {
                Constant::joined(&self.tensors(&["tensors"])?, self.int(&["dim"]).unwrap_or(0))
            }
            "index" => x()?.indexed(&self.tensors(&["indices"])?),
            "matmul" | "bmm" | "mm" => {
                self.tensor(&["self"])?.matmul(&self.tensor(&["other", "mat2"])?)
            }
            "new_ones" | "ones" => self.filled(Constant::scalar(1.0, float.unwrap_or(true))),
            "new_zeros" | "zeros" => self.filled(Constant::scalar(0.0, float.unwrap_or(true))),
            "full" => self.filled(self.tensor(&["fill_value"])?),
            "full_like" => {
                let fill = self.tensor(&["fill_value"])?.single()?;
                Some(x()?.mapped(float.unwrap_or(x()?.is_float), |_| fill))
            }
            "ones_like" => Some(x()?.mapped(float.unwrap_or(x()?.is_float), |_| 1.0)),
            "zeros_like" => Some(x()?.mapped(float.unwrap_or(x()?.is_float), |_| 0.0)),
            "scalar_tensor" => {
                let value = self.tensor(&["s"])?;
                Some(Constant { is_float: float.unwrap_or(true), ..value })
            }
            "to" | "_to_copy" => {
                let x = x()?;
                match self.dtype() {
                    None => Some(x),
                    Some(Scalar::Bool) => Some(x.mapped(false, |a| truth(a != 0.0))),
                    Some(Scalar::Int { .. }) => Some(x.mapped(false, f64::trunc)),
                    Some(_) => Some(x.mapped(true, |a| a)),
                }
            }
            "unsqueeze" => {
                let x = x()?;
                let at = axis(self.int(&["dim"])?, x.shape.len() + 1)?;
                let mut shape = x.shape.clone();
                shape.insert(at, 1);
                Some(Constant { shape, ..x })
            }
            "squeeze" => {
                let x = x()?;
                let at = self.ints(&["dim"]).unwrap_or_default();
                let all: Vec<usize> =
                    at.iter().map(|&at| axis(at, x.shape.len())).collect::<Option<_>>()?;
                let drops = |index: usize| all.is_empty() || all.contains(&index);
                let sizes = x.shape.iter().enumerate();
                let kept = sizes.filter(|&(index, &size)| size != 1 || !drops(index));
                let shape = kept.map(|(_, &size)| size).collect();
                Some(Constant { shape, ..x })
            }
            "expand" => {
                let (x, size) = (x()?, self.ints(&["size"])?);
                let new = size.len().checked_sub(x.shape.len())?;
                let whole = |(at, &size): (usize, &i64)| match size {
                    -1 => at.checked_sub(new).map(|at| x.shape[at]),
                    size => usize::try_from(size).ok(),
                };
                let shape: Vec<usize> =
                    size.iter().enumerate().map(whole).collect::<Option<_>>()?;
                x.expanded(&shape)
            }
            "view" | "reshape" | "_unsafe_view" => x()?.reshaped(&self.ints(&["size", "shape"])?),
            "slice" => x()?.sliced(
                self.int(&["dim"]).unwrap_or(0),
                self.int(&["start"]).unwrap_or(0),
                self.int(&["end"]).unwrap_or(i64::MAX),
                self.int(&["step"]).unwrap_or(1),
            ),
            "select" => {
                let (x, index) = (x()?, self.int(&["index"])?);
                let at = axis(self.int(&["dim"])?, x.shape.len())?;
                let index = axis(index, x.shape[at])?;
                let mut one = x.sliced(at as i64, index as i64, index as i64 + 1, 1)?;
                one.shape.remove(at);
                Some(one)
            }
            "permute" => {
                let (x, order) = (x()?, self.ints(&["dims"])?);
                let order: Vec<usize> =
                    order.iter().map(|&at| axis(at, x.shape.len())).collect::<Option<_>>()?;
                let complete = (0..x.shape.len()).all(|at| order.contains(&at));
                (complete && order.len() == x.shape.len()).then(|| x.permuted(&order))
            }
            "transpose" | "t" => {
                let x = x()?;
                let at = |names: &[&str], default: i64| {
                    axis(self.int(names).unwrap_or(default), x.shape.len())
                };
                let mut order: Vec<usize> = (0..x.shape.len()).collect();
                order.swap(at(&["dim0"], 0)?, at(&["dim1"], 1)?);
                Some(x.permuted(&order))
            }
            "alias" | "clone" | "contiguous" | "detach" | "lift_fresh_copy" => x(),
            _ => None,
        }
    }
}
