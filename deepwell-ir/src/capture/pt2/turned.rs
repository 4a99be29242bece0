//! Rows in the order of `nn.MultiheadAttention`: `[S, B, W]` (all first tokens, then all second
//! tokens) instead of `[B, S, W]`.
//!
//! A module with `batch_first=False` uses this order throughout. A module with `batch_first=True`
//! transposes its input, projects and transposes the result back. A row-wise op gives the same rows
//! in either order: rules see operands transposed to `[B, S, W]`, and the result is transposed
//! back.

use std::collections::HashMap;

use super::constant::Constant;
use super::rules::Call;
use super::value::{Exprs, Operand, Value, View};

/// Row-wise ops.
const BY_ROW: [&str; 12] = [
    "add",
    "addmm",
    "bmm",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "mm",
    "mul",
    "native_layer_norm",
    "relu",
    "rms_norm",
];

/// The result of a rule, if operands are transposed rows.
pub(super) fn apply(
    call: &Call<'_>,
    exprs: &mut Exprs,
    buffers: &HashMap<String, Constant>,
) -> Option<Value> {
    if !BY_ROW.contains(&call.op) {
        return None;
    }
    let mut is_turned = false;
    let mut operands = Vec::with_capacity(call.operands.len());
    for Operand { name, value } in call.operands {
        let value = match by_sequences(exprs, value) {
            Some(value) => {
                is_turned = true;
                value
            }
            // Operands in different orders would be another op.
            None if exprs.columns(value).is_some() => return None,
            None => value.clone(),
        };
        operands.push(Operand { name: name.clone(), value });
    }
    if !is_turned {
        return None;
    }
    let mut shape = call.shape.to_vec();
    if shape.len() > 2 {
        shape.swap(0, 1);
    }
    let result = Call { operands: &operands, shape: &shape, ..*call }.apply(exprs, buffers)?;
    let Value::View(view) = result else { return None };
    turned_from(&view, exprs.sizes.batch, exprs.sizes.seq)
}

/// Transposed rows, or columns of such rows, in `[B, S, W]` order.
pub(super) fn by_sequences(exprs: &Exprs, value: &Value) -> Option<Value> {
    let Value::View(view) = value else { return None };
    let turned = turned_from(view, exprs.sizes.seq, exprs.sizes.batch)?;
    exprs.columns(&turned).is_some().then_some(turned)
}

/// A view of `first · second` rows, transposed to `second · first`.
fn turned_from(view: &View, first: usize, second: usize) -> Option<Value> {
    let layout = match *view.layout.shape() {
        [rows, width] if rows == first * second => view
            .layout
            .reshaped(&[first as i64, second as i64, width as i64])?
            .swapped(0, 1)?
            .reshaped(&[rows as i64, width as i64])?,
        [a, b, _, ..] if (a, b) == (first, second) => view.layout.swapped(0, 1)?,
        _ => return None,
    };
    Some(Value::View(View { layout, ..view.clone() }))
}
