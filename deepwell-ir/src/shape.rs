//! Shapes whose dimensions may depend on the batch and sequence sizes.
//!
//! A model is captured once; the planner then tries several micro-batch sizes. A dimension is
//! therefore a monomial `factor · B^batch · S^seq`, optionally plus a constant, divided into blocks
//! and rounded up to a multiple, or the minimum of two such numbers. [`Shape::bind`] evaluates
//! dimensions.

mod size;

use std::fmt;

use serde::{Deserialize, Serialize};

use self::size::Size;

/// Sizes that a captured graph leaves symbolic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Binding {
    /// Sequences per micro-batch, `B`.
    pub batch: usize,
    /// Tokens per sequence, `S`.
    pub seq: usize,
}

impl Binding {
    /// Tokens per micro-batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }
}

/// One dimension: `multiple · ceil(repeats · ceil((factor · B^batch · S^seq + extra) / divisor) /
/// per)`, or the minimum of two such numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dim {
    #[serde(flatten)]
    size: Size,
    /// Upper limit of the dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<Size>,
}

impl Dim {
    /// The micro-batch size `B`.
    pub const BATCH: Dim = Dim { size: Size::power(1, 0), limit: None };
    /// The sequence length `S`.
    pub const SEQ: Dim = Dim { size: Size::power(0, 1), limit: None };
    /// Tokens per micro-batch, `B·S`.
    pub const TOKENS: Dim = Dim { size: Size::power(1, 1), limit: None };

    /// A constant size.
    pub const fn fixed(size: usize) -> Dim {
        Dim { size: Size::fixed(size), limit: None }
    }

    /// The size if independent of `B` and `S`.
    pub fn as_fixed(self) -> Option<usize> {
        self.size.as_fixed().filter(|_| self.limit.is_none())
    }

    /// Minimum of this dimension and `limit`. A dimension has one limit: an earlier limit of either
    /// operand is dropped, and the result is an upper bound.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim};
    ///
    /// let rows = Dim::TOKENS.times(2).at_most(Dim::TOKENS.blocks_of(4).times(32));
    /// assert_eq!(rows.to_string(), "min(2*B*S, 32*ceil(B*S/4))");
    /// let of = |seq| rows.bind(&Binding { batch: 1, seq });
    /// assert_eq!((of(1), of(33)), (2, 66));
    /// ```
    pub fn at_most(self, limit: Dim) -> Dim {
        match (self.size.as_fixed(), limit.size.as_fixed()) {
            (Some(size), Some(limit)) => Dim::fixed(size.min(limit)),
            _ if self.size == limit.size => Dim { size: self.size, limit: None },
            _ => Dim { size: self.size, limit: Some(limit.size) },
        }
    }

    /// This dimension without the limit of [`Dim::at_most`].
    pub fn without_limit(self) -> Dim {
        Dim { limit: None, ..self }
    }

    /// Applies `of` to the size and to the limit. Every operation on sizes is monotonic, so the
    /// minimum of the results is the result for the minimum.
    fn map(self, of: impl Fn(Size) -> Size) -> Dim {
        let one = |size| Dim { size: of(size), limit: None };
        self.limit.map_or(one(self.size), |limit| one(self.size).at_most(one(limit)))
    }

    /// [`Dim::map`] for an operation that may fail.
    fn try_map(self, of: impl Fn(Size) -> Option<Size>) -> Option<Dim> {
        let one = |size| Some(Dim { size: of(size)?, limit: None });
        let whole = one(self.size)?;
        self.limit.map_or(Some(whole), |limit| Some(whole.at_most(one(limit)?)))
    }

    /// Number of blocks of `size` that cover this dimension (the last block may be ragged).
    ///
    /// Exact for a dimension that was counted in blocks at most once. Otherwise an upper bound if
    /// neither `multiple` nor `size` divides the other.
    pub fn blocks_of(self, size: usize) -> Dim {
        self.map(|it| it.blocks_of(size))
    }

    /// One of `parts` equal parts of this dimension.
    ///
    /// `None` for a fixed size that `parts` does not divide. A symbolic size may turn out not to be
    /// divisible once bound: see [`Collective::check`](crate::ops::Collective::check).
    ///
    /// ```
    /// use deepwell_ir::Dim;
    ///
    /// let part = Dim::TOKENS.part_of(8);
    /// assert_eq!(part.map(|part| part.to_string()).as_deref(), Some("B*S:8"));
    /// assert_eq!(part.map(|part| part.times(8)), Some(Dim::TOKENS));
    /// assert_eq!(Dim::fixed(12).part_of(8), None);
    /// ```
    pub fn part_of(self, parts: usize) -> Option<Dim> {
        self.try_map(|it| it.part_of(parts))
    }

    /// `factor` times this dimension.
    pub fn times(self, factor: usize) -> Dim {
        self.map(|it| it.times(factor))
    }

    /// This dimension times `numerator / denominator`, rounded up.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim};
    ///
    /// let share = Dim::TOKENS.share(10, 16);
    /// assert_eq!(share.to_string(), "5*B*S/8");
    /// assert_eq!(share.bind(&Binding { batch: 3, seq: 33 }), 62);
    /// ```
    pub fn share(self, numerator: usize, denominator: usize) -> Dim {
        self.map(|it| it.share(numerator, denominator))
    }

    /// Rounds up to the next multiple of `multiple`: rows of a group padded to whole tiles.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim};
    ///
    /// let rows = Dim::TOKENS.times(2).blocks_of(8).round_up_to(16);
    /// assert_eq!(rows.to_string(), "16*ceil(2*B*S/128)");
    /// assert_eq!(rows.bind(&Binding { batch: 3, seq: 33 }), 32);
    /// ```
    pub fn round_up_to(self, multiple: usize) -> Dim {
        self.map(|it| it.round_up_to(multiple))
    }

    /// This dimension plus `extra`: rows of several groups plus padding of each group to a
    /// multiple. `None` for a dimension already counted in blocks.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim};
    ///
    /// // All tokens, sorted by expert, each of 8 experts' rows padded to a multiple of 16.
    /// let rows = Dim::TOKENS.plus(8 * 15).map(|rows| rows.round_up_to(16));
    /// assert_eq!(rows.map(|rows| rows.bind(&Binding { batch: 3, seq: 33 })), Some(224));
    /// ```
    pub fn plus(self, extra: usize) -> Option<Dim> {
        self.try_map(|it| it.plus(extra))
    }

    /// Whether every possible value of the dimension is a multiple of `size`.
    pub fn is_multiple_of(self, size: usize) -> bool {
        let is_multiple = |it: Size| it.is_multiple_of(size);
        is_multiple(self.size) && self.limit.is_none_or(is_multiple)
    }

    /// The size under `binding`.
    pub fn bind(self, binding: &Binding) -> usize {
        let size = self.size.bind(binding);
        self.limit.map_or(size, |limit| size.min(limit.bind(binding)))
    }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::fixed(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            None => write!(f, "{}", self.size),
            Some(limit) => write!(f, "min({}, {limit})", self.size),
        }
    }
}

/// The dimensions of a tensor, outermost first, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub Vec<Dim>);

impl Shape {
    /// A shape from anything that turns into dimensions.
    pub fn new<D: Into<Dim>>(dims: impl IntoIterator<Item = D>) -> Shape {
        Shape(dims.into_iter().map(Into::into).collect())
    }

    /// The sizes under `binding`.
    pub fn bind(&self, binding: &Binding) -> Vec<usize> {
        self.0.iter().map(|dim| dim.bind(binding)).collect()
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The sizes if none depends on `B` or `S`.
    pub fn as_fixed(&self) -> Option<Vec<usize>> {
        self.0.iter().map(|dim| dim.as_fixed()).collect()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.0.iter().map(Dim::to_string).collect();
        write!(f, "[{}]", dims.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_bind_and_print() {
        let binding = Binding { batch: 3, seq: 33 };
        for (dim, size, text) in [
            (Dim::fixed(7), 7, "7"),
            (Dim::TOKENS, 99, "B*S"),
            (Dim::TOKENS.blocks_of(32), 4, "B*S/32"),
            (Dim::fixed(33).blocks_of(32), 2, "2"),
            (Dim::BATCH, 3, "B"),
            (Dim::TOKENS.times(4), 396, "4*B*S"),
            (Dim::TOKENS.blocks_of(32).times(3), 12, "3*ceil(B*S/32)"),
            (Dim::TOKENS.round_up_to(32), 128, "32*ceil(B*S/32)"),
            (Dim::TOKENS.round_up_to(32).blocks_of(128), 1, "B*S/128"),
            (Dim::TOKENS.round_up_to(128).blocks_of(32), 4, "4*ceil(B*S/128)"),
            (Dim::TOKENS.round_up_to(16).round_up_to(8), 112, "16*ceil(B*S/16)"),
            (Dim::TOKENS.times(64).round_up_to(32), 6336, "64*B*S"),
            (Dim::fixed(33).round_up_to(32), 64, "64"),
            (Dim::TOKENS.plus(56).unwrap(), 155, "(B*S+56)"),
            (Dim::TOKENS.plus(56).unwrap().times(2), 310, "(2*B*S+112)"),
            (Dim::TOKENS.plus(56).unwrap().round_up_to(8), 160, "8*ceil((B*S+56)/8)"),
            (Dim::fixed(7).plus(2).unwrap(), 9, "9"),
            (Dim::TOKENS.part_of(3).unwrap().plus(5).unwrap(), 38, "(B*S+15):3"),
            (Dim::TOKENS.part_of(9).unwrap().times(2).plus(5).unwrap(), 27, "(2*B*S+45):9"),
            (Dim::TOKENS.part_of(9).unwrap().times(2).blocks_of(4), 6, "2*B*S/36"),
            (Dim::TOKENS.blocks_of(4).times(3).blocks_of(32), 3, "3*ceil(B*S/4)/32"),
            (Dim::TOKENS.blocks_of(4).times(6).round_up_to(32), 160, "32*ceil(3*ceil(B*S/4)/16)"),
            (
                Dim::TOKENS.blocks_of(4).times(3).round_up_to(32).blocks_of(128),
                1,
                "3*ceil(B*S/4)/128",
            ),
            (Dim::TOKENS.share(10, 16), 62, "5*B*S/8"),
            (Dim::fixed(99).share(10, 16), 62, "62"),
            (Dim::fixed(99).at_most(Dim::fixed(98)), 98, "98"),
            (Dim::TOKENS.at_most(Dim::TOKENS), 99, "B*S"),
            (smaller(), 99, "min(B*S, 4*ceil(B*S/3))"),
            (smaller().times(2), 198, "min(2*B*S, 8*ceil(B*S/3))"),
            (smaller().blocks_of(8), 13, "min(B*S/8, B*S/6)"),
            (smaller().round_up_to(8), 104, "min(8*ceil(B*S/8), 8*ceil(B*S/6))"),
            (smaller().share(1, 2), 50, "min(B*S/2, 2*ceil(B*S/3))"),
            (larger(), 66, "min(B*S, 2*ceil(B*S/3))"),
            (larger().times(2), 132, "min(2*B*S, 4*ceil(B*S/3))"),
            (larger().at_most(Dim::fixed(7)), 7, "min(B*S, 7)"),
            (larger().without_limit(), 99, "B*S"),
        ] {
            assert_eq!(dim.bind(&binding), size, "{text}");
            assert_eq!(dim.to_string(), text);
            let json = serde_json::to_string(&dim).unwrap();
            assert_eq!(serde_json::from_str::<Dim>(&json).unwrap(), dim, "{json}");
        }
        assert_eq!(Dim::TOKENS.blocks_of(4).plus(1), None);
        assert_eq!(larger().plus(1), None);
        assert_eq!(larger().as_fixed(), None);
    }

    /// All tokens, limited to more.
    fn smaller() -> Dim {
        Dim::TOKENS.at_most(Dim::TOKENS.blocks_of(3).times(4))
    }

    /// All tokens, limited to fewer.
    fn larger() -> Dim {
        Dim::TOKENS.at_most(Dim::TOKENS.blocks_of(3).times(2))
    }

    #[test]
    fn equal_parts_make_the_whole_again() {
        let tokens = Dim::TOKENS;
        for (dim, parts, text) in [
            (tokens, 8, Some("B*S:8")),
            (tokens.times(8), 8, Some("B*S")),
            (tokens.times(6), 4, Some("3*B*S:2")),
            (tokens.round_up_to(32), 8, Some("4*ceil(B*S/32)")),
            (tokens.round_up_to(32), 3, None),
            (tokens.blocks_of(32), 2, None),
            (Dim::fixed(12), 4, Some("3")),
            (Dim::fixed(12), 5, None),
            (Dim::fixed(12), 0, None),
            (tokens, 1, Some("B*S")),
            (
                tokens.times(8).at_most(tokens.blocks_of(5).times(16)),
                8,
                Some("min(B*S, 2*ceil(B*S/5))"),
            ),
            (tokens.times(8).at_most(tokens.blocks_of(5).times(4)), 8, None),
        ] {
            let part = dim.part_of(parts);
            assert_eq!(part.map(|part| part.to_string()).as_deref(), text, "{dim} in {parts}");
            if let Some(part) = part {
                assert_eq!(part.times(parts), dim);
            }
        }
        // Gathered by more ranks than the number of parts, then cut among the gathering ranks
        // again.
        let quarter = tokens.part_of(4).unwrap();
        for ranks in [2, 3, 4, 6, 8, 12] {
            assert_eq!(quarter.times(ranks).part_of(ranks), Some(quarter), "{ranks}");
        }
        let eighth = tokens.part_of(8).unwrap();
        assert_eq!(eighth.part_of(2).unwrap().to_string(), "B*S:16");
        assert_eq!(eighth.times(2).to_string(), "B*S:4");
        assert_eq!(eighth.times(24), tokens.times(3));
        assert_eq!(eighth.times(3).to_string(), "3*ceil(B*S:8)");
        assert_eq!(eighth.blocks_of(32).to_string(), "B*S/256");
        assert_eq!(eighth.bind(&Binding { batch: 4, seq: 16 }), 8);
    }

    /// Binding a padded dimension equals padding the bound size, for every size.
    #[test]
    fn padding_commutes_with_binding() {
        for seq in 0..70 {
            let binding = Binding { batch: 3, seq };
            for multiple in [1, 2, 3, 8, 32] {
                for factor in [1, 2, 6] {
                    let dim = Dim::TOKENS.times(factor);
                    let size = dim.bind(&binding);
                    let padded = dim.round_up_to(multiple);
                    assert_eq!(padded.bind(&binding), size.next_multiple_of(multiple));
                    assert!(padded.is_multiple_of(multiple), "{padded}");
                    let blocks = padded.blocks_of(2 * multiple).bind(&binding);
                    assert_eq!(blocks, size.div_ceil(2 * multiple));
                }
            }
        }
        assert!(!Dim::TOKENS.is_multiple_of(2) && !Dim::TOKENS.blocks_of(2).is_multiple_of(2));
        assert!(!Dim::TOKENS.times(2).plus(1).unwrap().is_multiple_of(2));
    }
}
