//! Shapes whose dimensions may depend on the batch and sequence sizes.
//!
//! A model is captured once; the planner then tries several micro-batch sizes. So a dimension is
//! a monomial `factor · B^batch · S^seq`, perhaps with a fixed number added, counted in groups and
//! rounded up to whole ones; [`Shape::bind`] turns it into numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Sizes that a captured graph leaves open.
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

/// One dimension: `multiple · ceil((factor · B^batch · S^seq + extra) / divisor)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dim {
    factor: usize,
    batch: u8,
    seq: u8,
    divisor: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    extra: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    multiple: usize,
    /// The divisor leaves no remainder; whoever knows the sizes checks that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_even: bool,
}

fn is_zero(size: &usize) -> bool {
    *size == 0
}

fn one() -> usize {
    1
}

fn is_one(size: &usize) -> bool {
    *size == 1
}

impl Dim {
    /// The micro-batch size `B`.
    pub const BATCH: Dim = Dim { batch: 1, ..Dim::fixed(1) };
    /// The sequence length `S`.
    pub const SEQ: Dim = Dim { seq: 1, ..Dim::fixed(1) };
    /// Tokens per micro-batch, `B·S`.
    pub const TOKENS: Dim = Dim { batch: 1, seq: 1, ..Dim::fixed(1) };

    /// A known size.
    pub const fn fixed(size: usize) -> Dim {
        Dim { factor: size, batch: 0, seq: 0, divisor: 1, extra: 0, multiple: 1, is_even: false }
    }

    /// The size, when it depends on neither `B` nor `S`.
    pub fn as_fixed(self) -> Option<usize> {
        (self.batch == 0 && self.seq == 0).then(|| self.of(self.factor))
    }

    /// Number of blocks of `size` that cover this dimension (the last one may be ragged).
    ///
    /// Exact, except where the dimension is rounded up to a multiple and neither that nor `size`
    /// divides the other: then it is an upper bound.
    pub fn blocks_of(self, size: usize) -> Dim {
        if let Some(n) = self.as_fixed() {
            return Dim::fixed(n.div_ceil(size));
        }
        let common = greatest_common_divisor(self.multiple, size);
        let divisor = self.divisor * (size / common);
        Dim { divisor, multiple: self.multiple / common, is_even: false, ..self }
    }

    /// One of `parts` equal parts: `parts` of them are this dimension again.
    ///
    /// `None` for a known size that `parts` do not divide. One that depends on the batch may turn
    /// out so once it is bound: see [`Collective::check`](crate::ops::Collective::check).
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
        if parts == 0 {
            return None;
        }
        if let Some(n) = self.as_fixed() {
            return n.is_multiple_of(parts).then(|| Dim::fixed(n / parts));
        }
        // What is counted several times over is cut first.
        let common = greatest_common_divisor(self.multiple, parts);
        let (whole, parts) = (Dim { multiple: self.multiple / common, ..self }, parts / common);
        let Dim { factor, extra, divisor, multiple, is_even, .. } = whole;
        if parts == 1 {
            return Some(whole);
        }
        if divisor == 1 && factor.is_multiple_of(parts) && extra.is_multiple_of(parts) {
            return Some(Dim { factor: factor / parts, extra: extra / parts, ..whole });
        }
        if multiple != 1 || (divisor != 1 && !is_even) {
            return None;
        }
        // In lowest terms, so that parts of a gather are what was gathered.
        let divisor = divisor * parts;
        let common = greatest_common_divisor(greatest_common_divisor(factor, extra), divisor);
        let (factor, extra, divisor) = (factor / common, extra / common, divisor / common);
        Some(Dim { factor, extra, divisor, is_even: divisor > 1, ..whole })
    }

    /// This dimension `factor` times over.
    pub fn times(self, factor: usize) -> Dim {
        match self.as_fixed() {
            Some(n) => Dim::fixed(n * factor),
            None if self.is_even => {
                let common = greatest_common_divisor(self.divisor, factor);
                let divisor = self.divisor / common;
                let whole = Dim { divisor, is_even: divisor > 1, ..self };
                match factor / common {
                    1 => whole,
                    rest if divisor == 1 => whole.times(rest),
                    rest => Dim { multiple: whole.multiple * rest, ..whole },
                }
            }
            None if self.divisor == 1 && self.multiple == 1 => {
                Dim { factor: self.factor * factor, extra: self.extra * factor, ..self }
            }
            None => Dim { multiple: self.multiple * factor, ..self },
        }
    }

    /// The next multiple of `multiple`: rows of a group that is padded to whole tiles.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim};
    ///
    /// let rows = Dim::TOKENS.times(2).blocks_of(8).round_up_to(16);
    /// assert_eq!(rows.to_string(), "16*ceil(2*B*S/128)");
    /// assert_eq!(rows.bind(&Binding { batch: 3, seq: 33 }), 32);
    /// ```
    pub fn round_up_to(self, multiple: usize) -> Dim {
        match self.as_fixed() {
            Some(n) => Dim::fixed(n.next_multiple_of(multiple)),
            None if self.is_multiple_of(multiple) => self,
            None => self.blocks_of(multiple).times(multiple),
        }
    }

    /// This dimension and `extra` more, which is the room that several groups, each padded to a
    /// multiple, want beside their rows; `None` for one that is counted in blocks already.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim};
    ///
    /// // All tokens, sorted by expert, each of 8 experts' rows padded to a multiple of 16.
    /// let rows = Dim::TOKENS.plus(8 * 15).map(|rows| rows.round_up_to(16));
    /// assert_eq!(rows.map(|rows| rows.bind(&Binding { batch: 3, seq: 33 })), Some(224));
    /// ```
    pub fn plus(self, extra: usize) -> Option<Dim> {
        match self.as_fixed() {
            Some(n) => Some(Dim::fixed(n + extra)),
            None if self.divisor == 1 && self.multiple == 1 => {
                Some(Dim { extra: self.extra + extra, ..self })
            }
            // Without a remainder, factors go into the fraction.
            None if self.is_even => Some(Dim {
                factor: self.multiple * self.factor,
                extra: self.multiple * self.extra + extra * self.divisor,
                multiple: 1,
                ..self
            }),
            None => None,
        }
    }

    /// Whether every size that this can be is a multiple of `size`.
    pub fn is_multiple_of(self, size: usize) -> bool {
        match self.as_fixed() {
            Some(n) => n.is_multiple_of(size),
            None if self.multiple.is_multiple_of(size) => true,
            None => {
                self.divisor == 1
                    && (self.multiple * self.factor).is_multiple_of(size)
                    && (self.multiple * self.extra).is_multiple_of(size)
            }
        }
    }

    /// The size under `binding`.
    pub fn bind(self, binding: &Binding) -> usize {
        let monomial = self.factor
            * binding.batch.pow(u32::from(self.batch))
            * binding.seq.pow(u32::from(self.seq));
        self.of(monomial)
    }

    /// What this makes of its monomial.
    fn of(self, monomial: usize) -> usize {
        self.multiple * (monomial + self.extra).div_ceil(self.divisor)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::fixed(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(n) = self.as_fixed() {
            return write!(f, "{n}");
        }
        let mut parts = Vec::new();
        if self.factor != 1 {
            parts.push(self.factor.to_string());
        }
        parts.extend(std::iter::repeat_n("B".to_string(), usize::from(self.batch)));
        parts.extend(std::iter::repeat_n("S".to_string(), usize::from(self.seq)));
        let mut text = parts.join("*");
        if self.extra != 0 {
            text = format!("({text}+{})", self.extra);
        }
        match (self.divisor, self.is_even) {
            (1, _) => {}
            (divisor, true) => text = format!("{text}:{divisor}"),
            (divisor, false) => text = format!("{text}/{divisor}"),
        }
        match self.multiple {
            1 => f.write_str(&text),
            multiple => write!(f, "{multiple}*ceil({text})"),
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

    /// The sizes, when none depends on `B` or `S`.
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
        ] {
            assert_eq!(dim.bind(&binding), size, "{text}");
            assert_eq!(dim.to_string(), text);
            let json = serde_json::to_string(&dim).unwrap();
            assert_eq!(serde_json::from_str::<Dim>(&json).unwrap(), dim, "{json}");
        }
        assert_eq!(Dim::TOKENS.blocks_of(4).plus(1), None);
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
        ] {
            let part = dim.part_of(parts);
            assert_eq!(part.map(|part| part.to_string()).as_deref(), text, "{dim} in {parts}");
            if let Some(part) = part {
                assert_eq!(part.times(parts), dim);
            }
        }
        // Gathered by more ranks than those that have parts, and cut among these again.
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

    /// Padding binds to what padding of the bound size gives, for every size.
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
