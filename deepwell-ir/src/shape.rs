//! Shapes whose dimensions may depend on the batch and sequence sizes.
//!
//! A model is captured once; the planner then tries several micro-batch sizes. So a dimension is
//! a monomial `factor · B^batch · S^seq` (plus a ceiling division for block counts), and
//! [`Shape::bind`] turns it into numbers.

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

/// One dimension: `ceil(factor · B^batch · S^seq / divisor)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dim {
    factor: usize,
    batch: u8,
    seq: u8,
    divisor: usize,
}

impl Dim {
    /// The micro-batch size `B`.
    pub const BATCH: Dim = Dim { factor: 1, batch: 1, seq: 0, divisor: 1 };
    /// The sequence length `S`.
    pub const SEQ: Dim = Dim { factor: 1, batch: 0, seq: 1, divisor: 1 };
    /// Tokens per micro-batch, `B·S`.
    pub const TOKENS: Dim = Dim { factor: 1, batch: 1, seq: 1, divisor: 1 };

    /// A known size.
    pub const fn fixed(size: usize) -> Dim {
        Dim { factor: size, batch: 0, seq: 0, divisor: 1 }
    }

    /// The size, when it depends on neither `B` nor `S`.
    pub fn as_fixed(self) -> Option<usize> {
        (self.batch == 0 && self.seq == 0).then(|| self.factor.div_ceil(self.divisor))
    }

    /// Number of blocks of `size` that cover this dimension (the last one may be ragged).
    pub fn blocks_of(self, size: usize) -> Dim {
        match self.as_fixed() {
            Some(n) => Dim::fixed(n.div_ceil(size)),
            None => Dim { divisor: self.divisor * size, ..self },
        }
    }

    /// This dimension `factor` times over.
    ///
    /// Exact unless it counts blocks (see [`Dim::blocks_of`]).
    pub fn times(self, factor: usize) -> Dim {
        Dim { factor: self.factor * factor, ..self }
    }

    /// The size under `binding`.
    pub fn bind(self, binding: &Binding) -> usize {
        let product = self.factor
            * binding.batch.pow(u32::from(self.batch))
            * binding.seq.pow(u32::from(self.seq));
        product.div_ceil(self.divisor)
    }
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
        write!(f, "{}", parts.join("*"))?;
        if self.divisor != 1 {
            write!(f, "/{}", self.divisor)?;
        }
        Ok(())
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
        ] {
            assert_eq!(dim.bind(&binding), size);
            assert_eq!(dim.to_string(), text);
        }
    }
}
