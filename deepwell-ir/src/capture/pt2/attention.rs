//! Recognizes attention: as a single call, or as GEMMs around a softmax.

use super::constant::Constant;
use super::exported::Arg;
use super::layout::Layout;
use super::rules::Call;
use super::trace::arg;
use super::value::{Exprs, Heads, Kind, Operand, Value, View, single};
use crate::ops::AttentionHeads;

/// Largest value added to masked scores: `-inf`, or a number far below any score.
const MASKED_MAX: f64 = -1e4;

/// Kind of attention mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mask {
    All,
    Causal,
    /// Causal, with a sliding window.
    Window(usize),
}

/// `scaled_dot_product_attention`, or the variant of one backend.
pub(super) fn fused(call: &Call<'_>, exprs: &mut Exprs) -> Option<Value> {
    let view = |name: &str| match call.named(name)? {
        Value::View(view) => Some(view.clone()),
        Value::Known(_) => None,
    };
    let (q, k, v) = (view("query")?, view("key")?, view("value")?);
    let head_dim = *q.layout.shape().last()?;
    let scale = match arg(call.node, &["scale"]) {
        Some(Arg::Float(scale)) => *scale,
        Some(Arg::Int(scale)) => *scale as f64,
        _ => 1.0 / (head_dim as f64).sqrt(),
    };
    let mask = match (call.named("attn_mask"), arg(call.node, &["is_causal"])) {
        (Some(Value::Known(mask)), _) => mask_of(mask, exprs.sizes.seq)?,
        (Some(Value::View(_)), _) => return None,
        (None, Some(Arg::Bool(true))) => Mask::Causal,
        (None, _) => Mask::All,
    };
    attention(call, exprs, [q, k, v], scale, mask)
}

/// `softmax(q · kᵀ · scale + mask) · v`; `call` is the last GEMM.
pub(super) fn by_hand(
    call: &Call<'_>,
    exprs: &mut Exprs,
    weights: &Value,
    values: &Value,
) -> Option<Value> {
    let softmax =
        exprs.pending(weights, "_softmax").or_else(|| exprs.pending(weights, "softmax"))?;
    let scores = &softmax.first()?.value;
    let (q, k, scale, mask) = match product_on_mask(exprs, scores) {
        Some((q, k, mask)) => (q, k, 1.0, mask),
        None => {
            let (scores, mask) = masked(exprs, scores)?;
            let Value::View(scores) = scores else { return None };
            let product = Value::View(View { scale: 1.0, ..scores.clone() });
            let product =
                ["bmm", "matmul"].into_iter().find_map(|op| exprs.pending(&product, op))?;
            let [q, k] = product else { return None };
            (&q.value, &k.value, scores.scale, mask)
        }
    };
    let (Value::View(q), Value::View(k), Value::View(v)) = (q, k, values) else { return None };
    let batch = exprs.sizes.batch as i64;
    let by_head = |view: &View| -> Option<View> {
        let layout = match *view.layout.shape() {
            [_, _, _, _] => view.layout.clone(),
            [_, rows, columns] => {
                view.layout.reshaped(&[batch, -1, rows as i64, columns as i64])?
            }
            _ => return None,
        };
        Some(View { layout, ..view.clone() })
    };
    let (q, mut k, v) = (by_head(q)?, by_head(k)?, by_head(v)?);
    k.layout = k.layout.swapped(-1, -2)?;
    attention(call, exprs, [q, k, v], scale, mask)
}

/// Queries, keys and the mask of `baddbmm(mask, q, kᵀ)`, which `nn.MultiheadAttention` uses if
/// attention weights are requested.
fn product_on_mask<'e>(exprs: &'e Exprs, scores: &Value) -> Option<(&'e Value, &'e Value, Mask)> {
    let operands = exprs.pending(scores, "baddbmm")?;
    let of = |name: &str| operands.iter().find(|operand| operand.name == name);
    let is_one = |name: &str| of(name).is_none_or(|factor| single(&factor.value) == Some(1.0));
    let Value::Known(mask) = &of("self")?.value else { return None };
    let fits = is_one("alpha") && is_one("beta");
    let (q, k) = (&of("batch1")?.value, &of("batch2")?.value);
    fits.then_some((q, k, mask_of(mask, exprs.sizes.seq)?))
}

/// Separates scores and mask. The mask may be added to the scores, or applied by `masked_fill` or
/// `where`. `None` for an unknown mask.
fn masked<'e>(exprs: &'e Exprs, scores: &'e Value) -> Option<(&'e Value, Mask)> {
    let seq = exprs.sizes.seq;
    if let Some(operands) = exprs.pending(scores, "add") {
        let [a, b] = operands else { return None };
        return match (&a.value, &b.value) {
            (scores, Value::Known(mask)) | (Value::Known(mask), scores) => {
                Some((scores, mask_of(mask, seq)?))
            }
            _ => None,
        };
    }
    let is_masked = |value: &Value| match value {
        Value::Known(fill) => fill.values.iter().all(|&value| value <= MASKED_MAX),
        Value::View(_) => false,
    };
    let value = |operands: &'e [Operand], name: &str| {
        operands.iter().find(|operand| operand.name == name).map(|operand| &operand.value)
    };
    let (scores, counts, keeps) = if let Some(operands) = exprs.pending(scores, "masked_fill") {
        is_masked(value(operands, "value")?).then_some(())?;
        (value(operands, "self")?, value(operands, "mask")?, false)
    } else if let Some(operands) = exprs.pending(scores, "where") {
        let chosen = value(operands, "self")?;
        let other = value(operands, "other")?;
        let condition = value(operands, "condition")?;
        match (is_masked(chosen), is_masked(other)) {
            (false, true) => (chosen, condition, true),
            (true, false) => (other, condition, false),
            _ => return None,
        }
    } else {
        return Some((scores, Mask::All));
    };
    let Value::Known(condition) = counts else { return None };
    let counts = condition.mapped(false, |value| f64::from(u8::from((value != 0.0) == keeps)));
    Some((scores, mask_of(&counts, seq)?))
}

/// Removes a `where` that zeroes fully masked rows of a softmax. No such rows exist, because every
/// token attends to itself.
pub(super) fn without_guard(call: &Call<'_>, exprs: &Exprs) -> Option<Value> {
    let is_zero = |value: &Value| match value {
        Value::Known(zeros) => zeros.values.iter().all(|&value| value == 0.0),
        Value::View(view) => exprs
            .pending_of(view.base, "full_like")
            .or_else(|| exprs.pending_of(view.base, "zeros_like"))
            .is_some_and(|operands| match operands.get(1) {
                None => true,
                Some(fill) => single(&fill.value) == Some(0.0),
            }),
    };
    let zeros = call.named("self").filter(|value| is_zero(value));
    let kept = call.named("other")?;
    let is_softmax =
        exprs.pending(kept, "_softmax").or_else(|| exprs.pending(kept, "softmax")).is_some();
    let guards = exprs.pending(call.named("condition")?, "logical_not").is_some();
    (zeros.is_some() && is_softmax && guards).then(|| kept.clone())
}

fn attention(
    call: &Call<'_>,
    exprs: &mut Exprs,
    [q, k, v]: [View; 3],
    scale: f64,
    mask: Mask,
) -> Option<Value> {
    let scale = scale * q.scale * k.scale;
    let of = |view: &View| exprs.heads(view);
    let q = of(&q)?;
    let k = of(&k)?;
    let v = if v.scale == 1.0 { of(&v)? } else { return None };
    let Heads { heads, head_dim, .. } = q;
    let alike = (k.heads, k.head_dim, k.repeats) == (v.heads, v.head_dim, v.repeats);
    // The call itself may repeat keys and values.
    let repeats = if k.repeats == 1 { heads / k.heads.max(1) } else { k.repeats };
    if !alike || q.repeats != 1 || k.heads * repeats != heads || k.head_dim != head_dim {
        return None;
    }
    let window = match mask {
        Mask::Window(window) => Some(window),
        Mask::All | Mask::Causal => None,
    };
    let kind = Kind::Attention {
        heads: AttentionHeads {
            heads,
            kv_heads: k.heads,
            head_dim,
            scale,
            causal: mask != Mask::All,
            window,
            ..AttentionHeads::default()
        },
        q: q.columns,
        k: k.columns,
        v: v.columns,
    };
    let sizes = exprs.sizes;
    let id = exprs.add(kind, vec![sizes.batch, sizes.seq, heads * head_dim], Some(call.index));
    let layout = Layout::whole(&[sizes.batch, sizes.seq, heads, head_dim]);
    let shape: Vec<i64> = call.shape.iter().map(|&size| size as i64).collect();
    let layout = layout.permuted(&[0, 2, 1, 3])?.reshaped(&shape)?;
    Some(Value::View(View { base: id, layout, scale: 1.0, node: Some(call.index) }))
}

/// Classifies a mask; `None` for an unknown mask.
fn mask_of(mask: &Constant, seq: usize) -> Option<Mask> {
    let rank = mask.shape.len();
    if mask.count() == 0 || rank < 2 || mask.shape[rank - 2..] != [seq, seq] {
        return None;
    }
    let allowed: Vec<bool> = mask
        .values
        .iter()
        .map(|&value| match (mask.is_float, value) {
            (false, value) => Some(value != 0.0),
            (true, 0.0) => Some(true),
            (true, value) => (value <= MASKED_MAX).then_some(false),
        })
        .collect::<Option<_>>()?;
    // Number of tokens that the last token attends to; a short sequence does not reveal a window.
    let last = &allowed[(seq - 1) * seq..seq * seq];
    let seen = last.iter().rev().take_while(|&&counts| counts).count();
    let window = if seen == seq { usize::MAX } else { seen };
    let is = |rule: &dyn Fn(usize, usize) -> bool| {
        allowed.chunks(seq * seq).all(|square| {
            let at = |index: usize| (index / seq, index % seq);
            square.iter().enumerate().all(|(index, &counts)| {
                let (row, column) = at(index);
                counts == rule(row, column)
            })
        })
    };
    if is(&|row, column| column <= row && row - column < window) {
        Some(if window == usize::MAX { Mask::Causal } else { Mask::Window(window) })
    } else if is(&|_, _| true) {
        Some(Mask::All)
    } else {
        None
    }
}
