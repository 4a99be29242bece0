//! Attention for context parallelism, where each rank holds a part of each sequence: ring attention
//! (Liu et al., arXiv 2310.01889). Each rank holds one chunk from the beginning and one from the
//! end.
//!
//! The pass [`context_parallel`](crate::context_parallel) creates these ops from attention and
//! rotary positions, forward and backward, so none of them needs a derivative.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::attention::AttentionHeads;
use super::{Check, Rope, product};
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// Tokens of each sequence on a rank: of `2 · ranks` chunks, chunk `place` and chunk
/// `2 ranks - 1 - place`, so that under a causal mask all ranks compute equally many scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Zigzag {
    /// Place of the rank in the context-parallel group.
    pub place: usize,
    /// Number of ranks in the group.
    pub ranks: usize,
}

impl Zigzag {
    /// Position in the whole sequence of the rank's token `token`, out of `seq` tokens on the rank.
    ///
    /// ```
    /// use deepwell_ir::ops::Zigzag;
    ///
    /// let second_of_two = Zigzag { place: 1, ranks: 2 };
    /// let positions: Vec<usize> = (0..4).map(|token| second_of_two.position(token, 4)).collect();
    /// assert_eq!(positions, [2, 3, 4, 5]);
    /// ```
    pub fn position(&self, token: usize, seq: usize) -> usize {
        let half = seq / 2;
        match token.checked_sub(half) {
            None => self.place * half + token,
            Some(token) => (2 * self.ranks - 1 - self.place) * half + token,
        }
    }

    /// Positions of the first tokens of both chunks, for `seq` tokens on the rank.
    pub fn begins(&self, seq: usize) -> [usize; 2] {
        let half = seq / 2;
        [self.place * half, (2 * self.ranks - 1 - self.place) * half]
    }

    /// Number of the rank's tokens at positions before `position`, out of `seq` tokens on the rank.
    ///
    /// ```
    /// use deepwell_ir::ops::Zigzag;
    ///
    /// // Positions 0, 1, 6 and 7.
    /// let first_of_two = Zigzag { place: 0, ranks: 2 };
    /// let before = [0, 1, 2, 6, 7, 9].map(|position| first_of_two.tokens_before(position, 4));
    /// assert_eq!(before, [0, 1, 2, 2, 3, 4]);
    /// ```
    pub fn tokens_before(&self, position: usize, seq: usize) -> usize {
        let [low, high] = self.begins(seq);
        let half = seq / 2;
        position.saturating_sub(low).min(half) + position.saturating_sub(high).min(seq - half)
    }

    /// The rank's tokens of consecutive whole sequences of `seq` tokens.
    pub fn part_of<T: Copy>(&self, whole: &[T], seq: usize) -> Vec<T> {
        let own = seq / self.ranks.max(1);
        let of_sequence =
            |tokens: &[T]| (0..own).map(|at| tokens[self.position(at, own)]).collect::<Vec<T>>();
        whole.chunks_exact(seq.max(1)).flat_map(of_sequence).collect()
    }
}

/// Origin of the keys and values for a rank's queries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeySource {
    /// The rank itself, under the causal mask.
    #[default]
    Own,
    /// An earlier place: all queries attend to the first half of the keys.
    Earlier,
    /// A later place: the second half of the queries attends to all keys.
    Later,
}

impl KeySource {
    fn name(self) -> &'static str {
        match self {
            KeySource::Own => "own",
            KeySource::Earlier => "earlier",
            KeySource::Later => "later",
        }
    }

    /// Number of keys that query `token` attends to, out of `seq`; `causal` matters only for the
    /// rank's own keys.
    pub fn seen(self, token: usize, seq: usize, causal: bool) -> usize {
        match self {
            KeySource::Own if causal => token + 1,
            KeySource::Own => seq,
            KeySource::Earlier => seq / 2,
            KeySource::Later if token >= seq / 2 => seq,
            KeySource::Later => 0,
        }
    }
}

/// Places in the whole sequence of a part's queries and keys: a window is a distance of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PartPlaces {
    /// Tokens of the rank of the queries.
    pub queries: Zigzag,
    /// Place of the rank of the keys.
    pub keys: usize,
}

impl PartPlaces {
    /// Tokens of the rank of the keys.
    pub fn key_tokens(&self) -> Zigzag {
        Zigzag { place: self.keys, ranks: self.queries.ranks }
    }

    /// The first key in the window of the query `token`, out of `seq` tokens on each rank. A
    /// rank's tokens are in the order of their positions, so the keys of a window are consecutive.
    ///
    /// ```
    /// use deepwell_ir::ops::{PartPlaces, Zigzag};
    ///
    /// // Queries at positions 2 to 5, keys at 0, 1, 6 and 7.
    /// let places = PartPlaces { queries: Zigzag { place: 1, ranks: 2 }, keys: 0 };
    /// assert_eq!([0, 1, 2].map(|query| places.first_in_window(query, 3, 4)), [0, 1, 2]);
    /// ```
    pub fn first_in_window(&self, token: usize, window: usize, seq: usize) -> usize {
        let begin = (self.queries.position(token, seq) + 1).saturating_sub(window);
        self.key_tokens().tokens_before(begin, seq)
    }
}

/// Keys of a rank that the query `token` of a rank sees, out of `seq` tokens on each rank.
pub fn seen_keys(
    heads: &AttentionHeads,
    keys: KeySource,
    places: Option<PartPlaces>,
    token: usize,
    seq: usize,
) -> Range<usize> {
    let end = keys.seen(token, seq, heads.causal);
    let begin = match (heads.window, places) {
        (Some(window), Some(places)) => places.first_in_window(token, window, seq),
        (Some(window), None) => (token + 1).saturating_sub(window),
        (None, _) => 0,
    };
    begin.min(end)..end
}

/// [`AttentionHeads::gemm_flops`] for a rank's queries and a rank's keys.
fn part_flops(
    heads: &AttentionHeads,
    keys: KeySource,
    places: Option<PartPlaces>,
    lse: &[usize],
    width: usize,
) -> u64 {
    let (rows, seq) = (lse[0] * lse[1], lse[2]);
    let seen = |token| seen_keys(heads, keys, places, token, seq).len();
    2 * (rows * (0..seq).map(seen).sum::<usize>() * width) as u64
}

/// Checks that a part with a window has places, and that no part has documents.
fn check_mask(
    check: &Check<'_>,
    heads: &AttentionHeads,
    places: Option<PartPlaces>,
) -> Result<(), OpError> {
    if heads.documents {
        return Err(check.error("joined documents on context-parallel ranks", "several"));
    }
    match (heads.window, places) {
        (Some(window), None) => {
            Err(check.error("places of queries and keys", format!("a window of {window} alone")))
        }
        _ => Ok(()),
    }
}

/// Text of the places, after the other attributes.
fn places_text(places: Option<PartPlaces>) -> String {
    places.map_or_else(String::new, |PartPlaces { queries: Zigzag { place, ranks }, keys }| {
        format!(" places={place},{keys}/{ranks}")
    })
}

fn attention_unit(operands: &[DType]) -> MathUnit {
    if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
}

/// q `[T, H·D]`, k `[T, KV·D]`, v `[T, KV·V]` of one rank (, sinks f32 `[H]`) → o f32 `[T, H·V]`,
/// lse f32 `[B, H, S]`: attention to these keys only. A query without keys gets zeros, and -∞ as
/// lse. Of all parts of an attention, one has the sinks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionPart {
    /// Heads and mask of the whole attention.
    pub heads: AttentionHeads,
    /// Origin of the keys.
    pub keys: KeySource,
    /// Where queries and keys are; only with a window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub places: Option<PartPlaces>,
}

impl OpRule for AttentionPart {
    fn name(&self) -> &'static str {
        "attention_part"
    }

    fn attributes(&self) -> String {
        let (keys, places) = (self.keys.name(), places_text(self.places));
        format!("{} keys={keys}{places}", self.heads.text())
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &self.heads.names(&["q", "k", "v"]))?;
        check.same_float(&[0, 1, 2])?;
        check_mask(&check, &self.heads, self.places)?;
        self.heads.check_tokens_first(&check)?;
        let out = self.heads.check(&check, 0, 3)?;
        Ok(vec![
            OutputType::statistic("", out, DType::F32),
            OutputType::statistic("lse", self.heads.lse_shape(), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let width = self.heads.head_dim + self.heads.value_dim();
        // lse is the last operand.
        let lse = shapes.last().map_or(&[0, 0, 0][..], Vec::as_slice);
        part_flops(&self.heads, self.keys, self.places, lse, width)
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        attention_unit(operands)
    }
}

/// dout, q, k, v, o, lse (, sinks) → dq, dk, dv (, dsinks f32 `[H]` `(+)=`), all f32: contributions
/// of one rank's queries and one rank's keys. o and lse are from the whole attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionPartBackward {
    /// Heads and mask of the whole attention.
    pub heads: AttentionHeads,
    /// Origin of the keys.
    pub keys: KeySource,
    /// Where queries and keys are; only with a window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub places: Option<PartPlaces>,
}

impl OpRule for AttentionPartBackward {
    fn name(&self) -> &'static str {
        "attention_part_backward"
    }

    fn attributes(&self) -> String {
        let (keys, places) = (self.keys.name(), places_text(self.places));
        format!("{} keys={keys}{places}", self.heads.text())
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = self.heads.names(&["dout", "q", "k", "v", "o", "lse"]);
        let check = Check::count(self.name(), inputs, &names)?;
        check.same_float(&[0, 1, 2, 3, 4])?;
        check.dtype(5, DType::F32)?;
        check_mask(&check, &self.heads, self.places)?;
        let out = self.heads.check(&check, 1, 6)?;
        check.shape(0, &out)?;
        check.shape(4, &out)?;
        check.shape(5, &self.heads.lse_shape())?;
        let gradient =
            |suffix, of: usize| OutputType::statistic(suffix, inputs[of].shape.clone(), DType::F32);
        let mut outputs = vec![gradient("dq", 1), gradient("dk", 2), gradient("dv", 3)];
        if self.heads.sinks {
            outputs.push(OutputType::accumulator("dsinks", inputs[6].shape.clone()));
        }
        Ok(outputs)
    }

    fn result_count(&self) -> usize {
        if self.heads.sinks { 4 } else { 3 }
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let width = 3 * self.heads.head_dim + 2 * self.heads.value_dim();
        part_flops(&self.heads, self.keys, self.places, &shapes[5], width)
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        attention_unit(operands)
    }
}

/// (o f32 `[T, H·V]`, lse f32 `[B, H, S]`) for each of several sets of keys → o `[T, H·V]`, lse f32
/// for all keys together: `lse = ln Σ exp(lse_i)`, `o = Σ exp(lse_i - lse) o_i`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MergeAttention {
    /// Query heads.
    pub heads: usize,
    /// Element type of o.
    pub dtype: DType,
}

impl OpRule for MergeAttention {
    fn name(&self) -> &'static str {
        "merge_attention"
    }

    fn attributes(&self) -> String {
        format!("heads={} to={}", self.heads, self.dtype)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = ["o", "lse"].repeat(inputs.len().div_ceil(2).max(1));
        let check = Check::count(self.name(), inputs, &names)?;
        for index in 0..inputs.len() {
            check.dtype(index, DType::F32)?;
            check.shape(index, &inputs[index % 2].shape)?;
        }
        let lse = check.rank(1, 3)?;
        let width = check.fixed(0, 1)?;
        if self.heads == 0 || lse[1].as_fixed() != Some(self.heads) || width % self.heads != 0 {
            let expected = format!("rows and sums of {} heads", self.heads);
            return Err(check.error(expected, format!("rows of {width}, sums {}", inputs[1].shape)));
        }
        if !self.dtype.is_high_precision() {
            return Err(check.error("a result in f32 or bf16", self.dtype.name()));
        }
        Ok(vec![
            OutputType::activation("", inputs[0].shape.clone(), self.dtype),
            OutputType::statistic("lse", inputs[1].shape.clone(), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let parts = (shapes.len() as u64).saturating_sub(2) / 2;
        2 * parts * product(&shapes[0])
    }
}

/// [`Rope`] or its backward for the token positions of a part of the sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeOfPart {
    /// The rotation of the forward op.
    pub rope: Rope,
    /// Whether to rotate back.
    pub back: bool,
    /// Tokens of the rank.
    pub part: Zigzag,
}

impl OpRule for RopeOfPart {
    fn name(&self) -> &'static str {
        "rope_of_part"
    }

    fn attributes(&self) -> String {
        let Zigzag { place, ranks } = self.part;
        let back = if self.back { " back" } else { "" };
        format!("{} part={place}/{ranks}{back}", self.rope.text())
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let shape: Shape = self.rope.check(self.name(), inputs)?;
        Ok(vec![OutputType::activation("", shape, inputs[0].dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }
}
