//! Values that an exported graph computes only from sizes and stored buffers: positions, masks,
//! tables of sines and cosines. Evaluating these during capture lets rules inspect the resulting
//! mask rather than the dozen ops that compute the mask.

use std::rc::Rc;

use super::layout::{axis, elements, resolved};

/// Maximum number of elements of an evaluated tensor, 128 MiB: the mask of sequences of 4096.
pub(super) const ELEMENTS_MAX: usize = 1 << 24;

/// Maximum number of multiply-adds of an evaluated GEMM: about a second.
const TERMS_MAX: usize = 1 << 28;

/// A small row-major tensor with at most [`ELEMENTS_MAX`] elements. Integers and booleans are
/// stored as f64 too: positions and sizes are far below 2^53.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Constant {
    pub(super) shape: Vec<usize>,
    pub(super) values: Rc<Vec<f64>>,
    /// Whether values are rounded to F32, as PyTorch computes them.
    pub(super) is_float: bool,
    /// Stored buffers that the value depends on.
    pub(super) buffers: Vec<String>,
}

/// Strides of a row-major tensor of shape `of` when broadcast to `shape`, aligned at the last axis;
/// 0 for broadcast axes.
fn steps(of: &[usize], shape: &[usize]) -> Option<Vec<usize>> {
    let new = shape.len().checked_sub(of.len())?;
    let mut steps = vec![0; shape.len()];
    let mut step = 1;
    for at in (0..of.len()).rev() {
        match (of[at], shape[new + at]) {
            (a, b) if a == b => steps[new + at] = step,
            (1, _) => {}
            _ => return None,
        }
        step *= of[at];
    }
    Some(steps)
}

/// Calls `f` with each coordinate of a shape, in row-major order.
pub(super) fn for_each(shape: &[usize], mut f: impl FnMut(&[usize])) {
    let mut at = vec![0; shape.len()];
    for _ in 0..shape.iter().product::<usize>() {
        f(&at);
        for axis in (0..at.len()).rev() {
            at[axis] += 1;
            if at[axis] < shape[axis] {
                break;
            }
            at[axis] = 0;
        }
    }
}

fn dot(at: &[usize], steps: &[usize]) -> usize {
    at.iter().zip(steps).map(|(index, step)| index * step).sum()
}

pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size =
        |shape: &[usize], at: usize| (at + shape.len()).checked_sub(rank).map_or(1, |at| shape[at]);
    (0..rank)
        .map(|at| match (size(a, at), size(b, at)) {
            (a, b) if a == b => Some(a),
            (1, b) => Some(b),
            (a, 1) => Some(a),
            _ => None,
        })
        .collect()
}

impl Constant {
    pub(super) fn new(shape: Vec<usize>, values: Vec<f64>, is_float: bool) -> Constant {
        Constant { shape, values: Rc::new(values), is_float, buffers: Vec::new() }
    }

    pub(super) fn scalar(value: f64, is_float: bool) -> Constant {
        Constant::new(Vec::new(), vec![value], is_float)
    }

    pub(super) fn count(&self) -> usize {
        self.values.len()
    }

    /// The value of a single-element tensor.
    pub(super) fn single(&self) -> Option<f64> {
        (self.count() == 1).then(|| self.values[0])
    }

    /// Rounds to F32 if PyTorch computes in F32.
    pub(super) fn rounded(self) -> Constant {
        if !self.is_float {
            return self;
        }
        let values = self.values.iter().map(|&value| f64::from(value as f32)).collect();
        Constant { values: Rc::new(values), ..self }
    }

    pub(super) fn expanded(&self, shape: &[usize]) -> Option<Constant> {
        elements(shape, ELEMENTS_MAX)?;
        if self.shape == shape {
            return Some(self.clone());
        }
        let steps = steps(&self.shape, shape)?;
        let mut values = Vec::with_capacity(shape.iter().product());
        for_each(shape, |at| values.push(self.values[dot(at, &steps)]));
        Some(Constant { shape: shape.to_vec(), values: Rc::new(values), ..self.clone() })
    }

    pub(super) fn reshaped(&self, shape: &[i64]) -> Option<Constant> {
        let shape = resolved(shape, self.count())?;
        elements(&shape, ELEMENTS_MAX)?;
        Some(Constant { shape, ..self.clone() })
    }

    pub(super) fn permuted(&self, order: &[usize]) -> Constant {
        let mut steps = vec![1; self.shape.len()];
        for at in (1..self.shape.len()).rev() {
            steps[at - 1] = steps[at] * self.shape[at];
        }
        let shape: Vec<usize> = order.iter().map(|&at| self.shape[at]).collect();
        let steps: Vec<usize> = order.iter().map(|&at| steps[at]).collect();
        let mut values = Vec::with_capacity(self.count());
        for_each(&shape, |at| values.push(self.values[dot(at, &steps)]));
        Constant { shape, values: Rc::new(values), ..self.clone() }
    }

    /// Outer size, size and inner size of an axis.
    pub(super) fn around(&self, at: usize) -> (usize, usize, usize) {
        let outer = self.shape[..at].iter().product();
        (outer, self.shape[at], self.shape[at + 1..].iter().product())
    }

    pub(super) fn sliced(&self, at: i64, start: i64, end: i64, step: i64) -> Option<Constant> {
        let at = axis(at, self.shape.len())?;
        let (outer, size, inner) = self.around(at);
        let bound = |index: i64| {
            let index = if index < 0 { index + size as i64 } else { index };
            index.clamp(0, size as i64) as usize
        };
        let step = usize::try_from(step).ok().filter(|&step| step > 0)?;
        let chosen: Vec<usize> = (bound(start)..bound(end)).step_by(step).collect();
        let mut values = Vec::with_capacity(outer * chosen.len() * inner);
        for block in 0..outer {
            for &index in &chosen {
                let from = (block * size + index) * inner;
                values.extend_from_slice(&self.values[from..from + inner]);
            }
        }
        let mut shape = self.shape.clone();
        shape[at] = chosen.len();
        Some(Constant { shape, values: Rc::new(values), ..self.clone() })
    }

    pub(super) fn joined(parts: &[Constant], at: i64) -> Option<Constant> {
        let first = parts.first()?;
        let at = axis(at, first.shape.len())?;
        let (outer, _, inner) = first.around(at);
        if parts.iter().any(|part| part.shape.len() != first.shape.len()) {
            return None;
        }
        let mut shape = first.shape.clone();
        shape[at] = parts.iter().map(|part| part.shape[at]).sum();
        let mut values = Vec::with_capacity(elements(&shape, ELEMENTS_MAX)?);
        for block in 0..outer {
            for part in parts {
                let (part_outer, size, part_inner) = part.around(at);
                if (part_outer, part_inner) != (outer, inner) {
                    return None;
                }
                let from = block * size * inner;
                values.extend_from_slice(&part.values[from..from + size * inner]);
            }
        }
        Some(Constant { shape, values: Rc::new(values), ..first.clone() })
    }

    pub(super) fn mapped(&self, is_float: bool, f: impl Fn(f64) -> f64) -> Constant {
        let values = self.values.iter().map(|&value| f(value)).collect();
        Constant { values: Rc::new(values), is_float, ..self.clone() }
    }

    pub(super) fn combined(
        &self,
        other: &Constant,
        kind: Kind,
        f: impl Fn(f64, f64) -> f64,
    ) -> Option<Constant> {
        let shape = broadcast(&self.shape, &other.shape)?;
        let (a, b) = (self.expanded(&shape)?, other.expanded(&shape)?);
        let values = a.values.iter().zip(b.values.iter()).map(|(&a, &b)| f(a, b)).collect();
        let is_float = match kind {
            Kind::Bool => false,
            Kind::Arithmetic => self.is_float || other.is_float,
            Kind::Float => true,
        };
        Some(Constant::new(shape, values, is_float))
    }

    /// Batched matrix multiplication with equal leading axes.
    pub(super) fn matmul(&self, other: &Constant) -> Option<Constant> {
        let (a, b) = (self.shape.len(), other.shape.len());
        if a < 2 || a != b || self.shape[..a - 2] != other.shape[..b - 2] {
            return None;
        }
        let (rows, k, columns) = (self.shape[a - 2], self.shape[a - 1], other.shape[b - 1]);
        if other.shape[b - 2] != k {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[a - 1] = columns;
        let count = elements(&shape, ELEMENTS_MAX)?;
        // Graphs multiply positions by frequencies, with K = 1.
        if count.checked_mul(k).is_none_or(|terms| terms > TERMS_MAX) {
            return None;
        }
        let batch: usize = self.shape[..a - 2].iter().product();
        let mut values = Vec::with_capacity(count);
        for matrix in 0..batch {
            for row in 0..rows {
                for column in 0..columns {
                    let term = |along: usize| {
                        self.values[(matrix * rows + row) * k + along]
                            * other.values[(matrix * k + along) * columns + column]
                    };
                    values.push((0..k).map(term).sum());
                }
            }
        }
        Some(Constant::new(shape, values, true))
    }

    /// `self[i, j, …]`, with one index tensor per axis.
    pub(super) fn indexed(&self, indices: &[Constant]) -> Option<Constant> {
        if indices.len() != self.shape.len() {
            return None;
        }
        let mut shape = Vec::new();
        for index in indices {
            shape = broadcast(&shape, &index.shape)?;
        }
        let wide: Vec<Constant> =
            indices.iter().map(|index| index.expanded(&shape)).collect::<Option<_>>()?;
        let mut values = Vec::new();
        elements(&shape, ELEMENTS_MAX)?;
        for at in 0..shape.iter().product::<usize>() {
            let mut element = 0;
            for (index, &size) in wide.iter().zip(&self.shape) {
                let value = index.values[at];
                let value = if value < 0.0 { value + size as f64 } else { value };
                if value < 0.0 || value >= size as f64 {
                    return None;
                }
                element = element * size + value as usize;
            }
            values.push(self.values[element]);
        }
        Some(Constant { shape, values: Rc::new(values), ..self.clone() })
    }
}

/// Result type of a binary operation.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Bool,
    Arithmetic,
    Float,
}
