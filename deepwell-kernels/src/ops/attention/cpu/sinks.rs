//! Gradients of sinks.
//!
//! A sink `s` has the weight `exp(s - lse)` in each row of its head and a value of zero. Its
//! gradient is therefore minus this weight times `delta = sum over value_dim of dout * out`, summed
//! over all rows.

use rayon::prelude::*;

use super::{AttentionError, AttentionShape, Head};
use crate::runtime::cpu::element::Element;

/// Writes the gradient of each head's sink to `dsinks`, or accumulates it; layouts as in the
/// [module](super)'s table. `out` and `lse` are the forward's results.
///
/// A head's sum runs in f64 in the order of the tokens, so that results have the same bits at any
/// number of threads.
///
/// # Errors
///
/// If the heads do not divide, or a slice does not fit the shape.
pub fn sink_gradients<E: Element>(
    shape: &AttentionShape,
    dout: &[E],
    out: &[E],
    lse: &[f32],
    sinks: &[f32],
    accumulate: bool,
    dsinks: &mut [f32],
) -> Result<(), AttentionError> {
    shape.check(&[
        ("dout", dout.len(), shape.out_len()),
        ("out", out.len(), shape.out_len()),
        ("lse", lse.len(), shape.lse_len()),
        ("sinks", sinks.len(), shape.heads),
        ("dsinks", dsinks.len(), shape.heads),
    ])?;
    let width = shape.value_dim;
    let of_head = |head: usize| {
        let mut sum = 0.0f64;
        for batch in 0..shape.batch {
            let of_batch = Head { batch, head, kv_head: head / shape.group() };
            for token in 0..shape.seq {
                let first = of_batch.out_offset(shape, token);
                let pairs = dout[first..][..width].iter().zip(&out[first..][..width]);
                let delta: f64 =
                    pairs.map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
                let lse = lse[of_batch.lse_offset(shape) + token];
                sum -= f64::from(sinks[head] - lse).exp() * delta;
            }
        }
        sum as f32
    };
    dsinks.par_iter_mut().enumerate().for_each(|(head, target)| {
        let before = if accumulate { *target } else { 0.0 };
        *target = before + of_head(head);
    });
    Ok(())
}
