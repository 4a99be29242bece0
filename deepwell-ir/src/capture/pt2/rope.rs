//! Recognizes rotary positions: `x · cos + rotate_half(x) · sin`, with tables computed by the
//! graph.

use std::collections::HashMap;

use super::constant::{Constant, for_each};
use super::layout::Layout;
use super::rules::Call;
use super::value::{Exprs, Heads, Kind, Value, View};

/// Tolerance between tables of the graph and tables of the detected frequencies: PyTorch computes
/// angles in F32, with an error of 2e-4 for position 4096.
const TABLE_TOLERANCE: f64 = 2e-3;

/// The rotated heads, if the sum is a rotation.
pub(super) fn apply(
    call: &Call<'_>,
    exprs: &mut Exprs,
    buffers: &HashMap<String, Constant>,
) -> Option<Value> {
    call.both_ways()?.into_iter().find_map(|(plain, turned)| {
        let (x, cos) = view_and_table(exprs, plain)?;
        let (parts, sin) = view_and_table(exprs, turned)?;
        if !is_turned(exprs, &x, &parts) {
            return None;
        }
        // [B, H, S, D], or [B, S, H, D] if heads are not moved first.
        let order = [0, 2, 1, 3];
        let moved = View { layout: x.layout.permuted(&order)?, ..x.clone() };
        let (heads, heads_first) = match exprs.heads(&x).filter(|heads| heads.repeats == 1) {
            Some(heads) => (heads, true),
            None => (exprs.heads(&moved).filter(|heads| heads.repeats == 1)?, false),
        };
        if x.scale != 1.0 {
            return None;
        }
        let seq_axis = if heads_first { 2 } else { 1 };
        let (frequencies, factor) = frequencies(&cos, &sin, seq_axis, &heads, buffers)?;
        let Heads { columns, heads, head_dim, .. } = heads;
        let sizes = exprs.sizes;
        let kind = Kind::Rope { x: columns, heads, frequencies, factor };
        let id = exprs.add(kind, vec![sizes.batch, sizes.seq, heads * head_dim], Some(call.index));
        let layout = Layout::whole(&[sizes.batch, sizes.seq, heads, head_dim]);
        let layout = if heads_first { layout.permuted(&order)? } else { layout };
        Some(Value::View(View { base: id, layout, scale: 1.0, node: Some(call.index) }))
    })
}

/// Operands of a product of a view and a known table.
fn view_and_table(exprs: &Exprs, value: &Value) -> Option<(View, Constant)> {
    let [a, b] = exprs.pending(value, "mul")? else { return None };
    match (&a.value, &b.value) {
        (Value::View(view), Value::Known(table)) | (Value::Known(table), Value::View(view)) => {
            Some((view.clone(), table.clone()))
        }
        _ => None,
    }
}

/// Whether `parts` is the negated second half of `x` concatenated with the first half.
fn is_turned(exprs: &Exprs, x: &View, parts: &View) -> bool {
    let matches_rotation = exprs.pending(&Value::View(parts.clone()), "cat").and_then(|operands| {
        // The axis is a number among the operands.
        let views: Vec<&View> = operands
            .iter()
            .filter_map(|operand| match &operand.value {
                Value::View(view) => Some(view),
                Value::Known(_) => None,
            })
            .collect();
        let &[high, low] = views.as_slice() else { return None };
        let head_dim = *x.layout.shape().last()? as i64;
        let half = |start: i64, end: i64| x.layout.sliced(-1, start, end);
        let fits = |view: &View, layout: Layout, scale: f64| {
            view.base == x.base && view.layout == layout && view.scale == scale
        };
        let middle = head_dim / 2;
        Some(
            head_dim % 2 == 0
                && fits(high, half(middle, head_dim)?, -x.scale)
                && fits(low, half(0, middle)?, x.scale),
        )
    });
    matches_rotation == Some(true)
}

/// Radians per position of each pair, and the common factor of both tables.
fn frequencies(
    cos: &Constant,
    sin: &Constant,
    seq_axis: usize,
    heads: &Heads,
    buffers: &HashMap<String, Constant>,
) -> Option<(Vec<f32>, f32)> {
    // Tables broadcast against [B, H, S, D] or [B, S, H, D] from the last axis.
    let from_back = 4 - seq_axis;
    let seq_at = cos.shape.len().checked_sub(from_back)?;
    let dim_at = cos.shape.len() - 1;
    if cos.shape != sin.shape || cos.shape[dim_at] != heads.head_dim {
        return None;
    }
    let half = heads.head_dim / 2;
    // At position 0, sine is 0 and cosine is 1.
    let factor = *cos.values.first()?;
    let stored = cos.buffers.iter().filter_map(|name| buffers.get(name));
    let mut candidates: Vec<Vec<f64>> = stored
        .filter(|buffer| buffer.count() == half)
        .map(|buffer| buffer.values.to_vec())
        .collect();
    if candidates.is_empty() {
        let mut position_1 = vec![None; half];
        let mut element = 0;
        for_each(&cos.shape, |at| {
            if at[seq_at] == 1 && at[dim_at] < half {
                let angle = sin.values[element].atan2(cos.values[element]);
                position_1[at[dim_at]].get_or_insert(angle);
            }
            element += 1;
        });
        candidates.push(position_1.into_iter().collect::<Option<_>>()?);
    }
    let matching = candidates.into_iter().find(|frequencies| {
        let mut element = 0;
        let mut fits = true;
        for_each(&cos.shape, |at| {
            let angle = at[seq_at] as f64 * frequencies[at[dim_at] % half];
            for (table, expected) in [(cos, angle.cos()), (sin, angle.sin())] {
                let off = (table.values[element] - factor * expected).abs();
                fits &= off <= TABLE_TOLERANCE * factor.abs();
            }
            element += 1;
        });
        fits
    })?;
    Some((matching.into_iter().map(|frequency| frequency as f32).collect(), factor as f32))
}
