//! Tokens that take part in attention of a rank's queries to the keys of one rank.

use deepwell_ir::ops::{AttentionHeads, KeySource};

use super::cuda::{Sizes, UNIT, reject_sizes, reject_values};
use super::tensor_map_launch::row_boxes;
use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr, TensorMapSpec};
use crate::runtime::cuda::prepare::{CallView, Device, Step};

/// Threads of a CTA of the kernel for hidden rows.
const HIDDEN_THREADS: u32 = 256;

/// The queries of a rank that see keys of another rank, and these keys. All of the queries see all
/// of the keys; if causal, each sees those up to its own position.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartTokens {
    /// Sizes of the ranks' matrices.
    pub(super) sizes: Sizes,
    pub(super) batch: usize,
    pub(super) causal: bool,
    /// The queries are those of a sequence from this one on.
    pub(super) first_query: usize,
    /// The keys are the first so many of a sequence.
    pub(super) keys: usize,
}

/// Whether the mask is causal, the first query that sees keys, and the number of keys.
pub(super) fn seen_tokens(
    source: KeySource,
    heads: &AttentionHeads,
    seq: usize,
) -> (bool, usize, usize) {
    match source {
        KeySource::Own => (heads.causal, 0, seq),
        KeySource::Earlier => (false, 0, seq / 2),
        KeySource::Later => (false, seq / 2, seq),
    }
}

impl PartTokens {
    pub(super) fn of(source: KeySource, heads: &AttentionHeads, lse: &[usize]) -> PartTokens {
        let sizes = Sizes::new(heads, lse);
        let (causal, first_query, keys) = seen_tokens(source, heads, sizes.seq);
        // Queries that see no key do not take part.
        let first_query = if keys == 0 { sizes.seq } else { first_query };
        PartTokens { sizes, batch: lse[0], causal, first_query, keys }
    }

    /// Queries of a sequence that see keys.
    pub(super) fn queries(&self) -> usize {
        self.sizes.seq - self.first_query
    }

    /// Query heads per key head.
    pub(super) fn group(&self) -> usize {
        self.sizes.heads / self.sizes.kv_heads
    }

    /// `sizes` with another number of tokens of a sequence.
    pub(super) fn sizes_of(&self, seq: usize) -> Sizes {
        Sizes { seq, ..self.sizes }
    }

    /// Boxes of `rows` queries, of a matrix of all queries.
    pub(super) fn query_boxes(&self, tensor: &DeviceTensor, rows: usize) -> TensorMapSpec {
        let (sizes, tokens) = (&self.sizes, self.first_query..self.sizes.seq);
        row_boxes(tensor, sizes, sizes.heads, rows, tokens)
    }

    /// Boxes of `rows` keys, of a matrix of all keys.
    pub(super) fn key_boxes(&self, tensor: &DeviceTensor, rows: usize) -> TensorMapSpec {
        row_boxes(tensor, &self.sizes, self.sizes.kv_heads, rows, 0..self.keys)
    }

    /// Address of the first query's row in a matrix of all queries, as an argument.
    pub(super) fn query_rows(&self, tensor: &DeviceTensor, element_bytes: usize) -> Argument {
        let row_bytes = self.sizes.heads * self.sizes.head_dim * element_bytes;
        Argument::Pointer(tensor.pointer.offset(self.first_query * row_bytes))
    }

    /// The same in lse.
    pub(super) fn lse_rows(&self, lse: &DeviceTensor) -> Argument {
        Argument::Pointer(lse.pointer.offset(self.first_query * size_of::<f32>()))
    }

    /// Arguments of sizes: queries, keys, rows of a matrix, heads, key heads, elements of a head.
    pub(super) fn arguments(&self) -> [Argument; 6] {
        let Sizes { seq, heads, kv_heads, head_dim, .. } = self.sizes;
        [self.queries(), self.keys, seq, heads, kv_heads, head_dim]
            .map(|size| Argument::U32(size as u32))
    }

    /// The launch that sets hidden queries' rows of `out` to zeros and of `lse` to -inf, if there
    /// are any.
    pub(super) fn hide_queries(
        &self,
        device: &mut Device<'_>,
        out: &DeviceTensor,
        lse: Option<&DeviceTensor>,
    ) -> Result<Option<Step>, KernelError> {
        let lse = lse.map_or(DevicePtr(0), |lse| lse.pointer);
        let rows = [out.pointer, DevicePtr(0), lse];
        self.hide(device, rows, [0, self.first_query, self.sizes.heads])
    }

    /// The launch that sets hidden keys' rows of gradients to zeros, if there are any.
    pub(super) fn hide_keys(
        &self,
        device: &mut Device<'_>,
        [dk, dv]: [&DeviceTensor; 2],
    ) -> Result<Option<Step>, KernelError> {
        let count = self.sizes.seq - self.keys;
        let rows = [dk.pointer, dv.pointer, DevicePtr(0)];
        self.hide(device, rows, [self.keys, count, self.sizes.kv_heads])
    }

    fn hide(
        &self,
        device: &mut Device<'_>,
        rows: [DevicePtr; 3],
        [first, count, heads]: [usize; 3],
    ) -> Result<Option<Step>, KernelError> {
        if count == 0 {
            return Ok(None);
        }
        let name = "sm90_attention_part_hidden";
        let function = device.function("sm90_attention_part", name, 0)?;
        let mut arguments = rows.map(Argument::Pointer).to_vec();
        let sizes = [first, count, self.sizes.seq, heads, self.sizes.head_dim];
        arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
        let ctas = (self.batch * count) as u32;
        Ok(Some(Device::launch(function, ctas, HIDDEN_THREADS, 0, arguments)))
    }
}

/// Reason for refusing heads or sizes, for kernels of heads of at most `most` elements.
pub(super) fn reject_part(heads: &AttentionHeads, lse: &[usize], most: usize) -> Option<String> {
    if let Some(got) = (AttentionHeads { value_dim: None, ..heads.clone() }).extension() {
        return Some(format!("takes attention without windows, sinks and documents, not {got}"));
    }
    let width = heads.head_dim;
    let is_taken = width > 0 && width.is_multiple_of(UNIT) && width <= most;
    reject_values(heads)
        .or_else(|| {
            (!is_taken).then(|| {
                format!(
                    "takes heads of {UNIT} to {most} elements, a multiple of {UNIT}, not of {width}"
                )
            })
        })
        .or_else(|| reject_sizes(heads, lse))
}

/// Refuses a call of another op.
pub(super) fn other_op(call: &CallView<'_>, expected: &str) -> KernelError {
    call.refuse(format!("expected `{expected}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens agree with the op for each query.
    #[test]
    fn queries_see_what_the_op_says() {
        let heads = AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            causal: true,
            ..AttentionHeads::default()
        };
        for seq in [1, 2, 6, 7, 130] {
            for source in [KeySource::Own, KeySource::Earlier, KeySource::Later] {
                let tokens = PartTokens::of(source, &heads, &[3, 4, seq]);
                for query in 0..seq {
                    let mask = if tokens.causal { query + 1 } else { seq };
                    let is_hidden = query < tokens.first_query;
                    let got = if is_hidden { 0 } else { mask.min(tokens.keys) };
                    assert_eq!(got, source.seen(query, seq, true), "{source:?} {query} of {seq}");
                }
                assert!(tokens.queries() > 0 || seq == 1, "{source:?} of {seq}");
            }
        }
    }

    #[test]
    fn heads_are_refused_with_a_reason() {
        let of = |head_dim, value_dim, window| AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim,
            value_dim,
            window,
            scale: 0.1,
            causal: true,
            ..AttentionHeads::default()
        };
        for (heads, expected) in [
            (of(64, None, None), None),
            (of(128, None, None), None),
            (of(136, None, None), Some("takes heads of 8 to 128 elements")),
            (of(60, None, None), Some("takes heads of 8 to 128 elements")),
            (of(64, Some(32), None), Some("takes values as wide as keys")),
            (of(64, None, Some(3)), Some("takes attention without windows")),
        ] {
            let got = reject_part(&heads, &[1, 4, 64], 128);
            let is_same = match (&got, expected) {
                (Some(got), Some(expected)) => got.starts_with(expected),
                (got, expected) => got.is_none() && expected.is_none(),
            };
            assert!(is_same, "{got:?}, expected {expected:?}");
        }
    }
}
