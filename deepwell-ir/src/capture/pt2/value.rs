//! Values of tensors in an exported graph: known constants, or views of computed expressions.

use std::rc::Rc;

use super::constant::Constant;
use super::layout::{Atom, Layout};
use crate::ops::AttentionHeads;

/// Index of an [`Expr`].
pub(super) type Id = usize;

/// A range of columns in all rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) base: Id,
    pub(super) start: usize,
    pub(super) width: usize,
}

/// A weight and its storage order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Weight {
    pub(super) name: String,
    /// Whether the weight is stored as `[inputs, outputs]`.
    pub(super) transposed: bool,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// An operand of a pending call.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub(super) name: String,
    pub(super) value: Value,
}

/// Computation of an [`Expr`].
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// The token ids.
    Tokens,
    /// Another input from the caller.
    Input(String),
    Parameter(String),
    /// A stored tensor that is neither small nor trained.
    Buffer(String),
    Embedding {
        table: String,
        padding: Option<usize>,
    },
    /// Rows of a table by position.
    Positions {
        table: String,
    },
    AddPositions {
        x: Id,
        table: String,
    },
    Linear {
        x: Id,
        weight: Weight,
        bias: Option<String>,
    },
    RmsNorm {
        x: Id,
        gain: String,
        width: usize,
        eps: f64,
    },
    LayerNorm {
        x: Id,
        gain: String,
        bias: String,
        eps: f64,
    },
    Rope {
        x: Columns,
        heads: usize,
        frequencies: Vec<f32>,
        factor: f32,
    },
    Attention {
        q: Columns,
        k: Columns,
        v: Columns,
        heads: AttentionHeads,
    },
    SwiGlu {
        gate: Columns,
        up: Columns,
    },
    Gelu {
        x: Id,
        tanh: bool,
    },
    Relu {
        x: Id,
    },
    Add {
        a: Id,
        b: Id,
    },
    /// An unmatched call of the exported graph: bare op name, operands, and output index.
    Pending {
        op: String,
        operands: Rc<[Operand]>,
        output: usize,
    },
}

/// A computed expression.
#[derive(Clone, Debug)]
pub(super) struct Expr {
    pub(super) kind: Kind,
    /// Shape of the row-major elements.
    pub(super) shape: Vec<usize>,
    /// Exported node of the expression.
    pub(super) node: Option<usize>,
}

/// A view of an expression, times a number.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) base: Id,
    pub(super) layout: Layout,
    pub(super) scale: f64,
    /// The node that made the view, unless the view covers the base.
    pub(super) node: Option<usize>,
}

/// A tensor of the exported graph.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Known(Constant),
    View(View),
}

/// Sizes of the exported batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) seq: usize,
}

impl Sizes {
    pub(super) fn tokens(self) -> usize {
        self.batch * self.seq
    }

    /// Whether a shape has one row per token.
    pub(super) fn is_rows(self, shape: &[usize]) -> bool {
        shape.len() >= 2 && (shape[0] == self.tokens() || shape[..2] == [self.batch, self.seq])
    }
}

/// Heads next to one another in the columns of a base.
#[derive(Clone, Debug)]
pub(super) struct Heads {
    pub(super) columns: Columns,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    /// Number of repetitions of each head.
    pub(super) repeats: usize,
}

/// All expressions so far.
#[derive(Debug)]
pub(super) struct Exprs {
    pub(super) all: Vec<Expr>,
    pub(super) sizes: Sizes,
}

impl Exprs {
    pub(super) fn add(&mut self, kind: Kind, shape: Vec<usize>, node: Option<usize>) -> Id {
        self.all.push(Expr { kind, shape, node });
        self.all.len() - 1
    }

    pub(super) fn kind(&self, id: Id) -> &Kind {
        &self.all[id].kind
    }

    fn count(&self, id: Id) -> usize {
        self.all[id].shape.iter().product()
    }

    /// Number of columns of a base with one row per token.
    pub(super) fn width(&self, id: Id) -> usize {
        self.count(id) / self.sizes.tokens().max(1)
    }

    /// A view of a whole expression.
    pub(super) fn whole(&self, id: Id) -> Value {
        let layout = Layout::whole(&self.all[id].shape);
        Value::View(View { base: id, layout, scale: 1.0, node: None })
    }

    /// The expression of a value that covers all of it, in any shape.
    pub(super) fn base_of(&self, value: &Value) -> Option<Id> {
        match value {
            Value::View(view)
                if view.scale == 1.0 && view.layout.is_whole(self.count(view.base)) =>
            {
                Some(view.base)
            }
            _ => None,
        }
    }

    /// The expression of a value that covers all rows.
    pub(super) fn rows(&self, value: &Value) -> Option<Id> {
        self.base_of(value).filter(|&id| {
            let rows = self.sizes.is_rows(&self.all[id].shape);
            rows && !matches!(self.kind(id), Kind::Parameter(_) | Kind::Buffer(_) | Kind::Tokens)
        })
    }

    /// All columns of rows, or a range of columns of a linear layer.
    pub(super) fn columns(&self, value: &Value) -> Option<Columns> {
        if let Some(base) = self.rows(value) {
            return Some(Columns { base, start: 0, width: self.width(base) });
        }
        let Value::View(view) = value else { return None };
        let (tokens, width) = (self.sizes.tokens(), self.width(view.base));
        if view.scale != 1.0 || !matches!(self.kind(view.base), Kind::Linear { .. }) {
            return None;
        }
        let flat = view.layout.flat();
        let [steps @ .., Atom { size, stride: 1 }] = flat.as_slice() else { return None };
        let one_row = steps.is_empty() && tokens == 1;
        let fits = one_row || *steps == [Atom { size: tokens, stride: width }];
        let start = view.layout.offset;
        (fits && start + size <= width).then_some(Columns { base: view.base, start, width: *size })
    }

    /// Heads of a view `[B, H, S, D]`, ignoring the scale.
    pub(super) fn heads(&self, view: &View) -> Option<Heads> {
        let shape = view.layout.shape();
        let &[batch, all, seq, head_dim] = shape.as_slice() else { return None };
        if (batch, seq) != (self.sizes.batch, self.sizes.seq) {
            return None;
        }
        if !self.sizes.is_rows(&self.all[view.base].shape) {
            return None;
        }
        let width = self.width(view.base);
        let is = |axis: usize, size: usize, stride: usize| {
            let expected = [Atom { size, stride }];
            view.layout.atoms(axis) == if size == 1 { &expected[1..] } else { &expected[..] }
        };
        if !is(0, batch, seq * width) || !is(2, seq, width) || !is(3, head_dim, 1) {
            return None;
        }
        let (heads, repeats) = match *view.layout.atoms(1) {
            [] => (1, 1),
            [Atom { size, stride: 0 }] => (1, size),
            [Atom { size, stride }] if stride == head_dim => (size, 1),
            [Atom { size, stride }, Atom { size: repeats, stride: 0 }] if stride == head_dim => {
                (size, repeats)
            }
            _ => return None,
        };
        debug_assert_eq!(heads * repeats, all);
        let start = view.layout.offset;
        let columns = Columns { base: view.base, start, width: heads * head_dim };
        let is_part = columns.width != width;
        if is_part && !matches!(self.kind(view.base), Kind::Linear { .. }) {
            return None;
        }
        (start + columns.width <= width).then_some(Heads { columns, heads, head_dim, repeats })
    }

    /// Name and shape of a parameter used whole and as stored.
    pub(super) fn parameter(&self, value: &Value) -> Option<(&str, &[usize])> {
        let id = self.base_of(value)?;
        match self.kind(id) {
            Kind::Parameter(name) => Some((name, &self.all[id].shape)),
            _ => None,
        }
    }

    /// Name and length of a parameter that is a vector.
    pub(super) fn vector(&self, value: &Value) -> Option<(&str, usize)> {
        match self.parameter(value)? {
            (name, &[length]) => Some((name, length)),
            _ => None,
        }
    }

    /// A weight whose view is `[outputs, inputs]`, or `[inputs, outputs]` if `turned`. Leading
    /// broadcast axes are ignored.
    pub(super) fn weight(&self, value: &Value, turned: bool) -> Option<Weight> {
        let Value::View(view) = value else { return None };
        let Kind::Parameter(name) = self.kind(view.base) else { return None };
        let stored = &self.all[view.base].shape;
        if view.scale != 1.0 || stored.len() != 2 {
            return None;
        }
        let mut layout = view.layout.clone();
        while layout.rank() > 2 && layout.atoms(0).iter().all(|atom| atom.stride == 0) {
            layout = layout.selected(0, 0)?;
        }
        let whole = Layout::whole(stored);
        let swapped = layout == whole.swapped(0, 1)?;
        // Strides reveal the transposition of a square matrix.
        if layout != whole && !swapped {
            return None;
        }
        let transposed = swapped != turned;
        let [first, second] = [stored[0], stored[1]];
        let (outputs, inputs) = if transposed { (second, first) } else { (first, second) };
        Some(Weight { name: name.clone(), transposed, outputs, inputs })
    }

    /// Operands of a pending call, if the value covers the call's whole result.
    pub(super) fn pending(&self, value: &Value, op: &str) -> Option<&[Operand]> {
        let id = self.base_of(value)?;
        self.pending_of(id, op)
    }

    pub(super) fn pending_of(&self, id: Id, op: &str) -> Option<&[Operand]> {
        match self.kind(id) {
            Kind::Pending { op: found, operands, .. } if found == op => Some(operands),
            _ => None,
        }
    }
}

/// The value of a known single number.
pub(super) fn single(value: &Value) -> Option<f64> {
    match value {
        Value::Known(constant) => constant.single(),
        Value::View(_) => None,
    }
}
