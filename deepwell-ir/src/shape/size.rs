//! One monomial of batch and sequence size, with division and rounding.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Binding;

/// `multiple · ceil(repeats · ceil((factor · B^batch · S^seq + extra) / divisor) / per)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Size {
    factor: usize,
    batch: u8,
    seq: u8,
    divisor: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    extra: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    repeats: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    per: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    multiple: usize,
    /// `divisor` leaves no remainder; checked where the sizes are bound.
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

impl Size {
    pub(super) const fn fixed(size: usize) -> Size {
        Size {
            factor: size,
            batch: 0,
            seq: 0,
            divisor: 1,
            extra: 0,
            repeats: 1,
            per: 1,
            multiple: 1,
            is_even: false,
        }
    }

    /// `B^batch · S^seq`.
    pub(super) const fn power(batch: u8, seq: u8) -> Size {
        Size { batch, seq, ..Size::fixed(1) }
    }

    pub(super) fn as_fixed(self) -> Option<usize> {
        (self.batch == 0 && self.seq == 0).then(|| self.of(self.factor))
    }

    pub(super) fn blocks_of(self, size: usize) -> Size {
        if let Some(n) = self.as_fixed() {
            return Size::fixed(n.div_ceil(size));
        }
        // Division without remainder: move `multiple` into the numerator.
        let Size { factor, extra, multiple, .. } = self;
        let elements = match self.is_even {
            true => {
                Size { factor: factor * multiple, extra: extra * multiple, multiple: 1, ..self }
            }
            false => self,
        };
        let elements = Size { is_even: false, ..elements };
        let common = greatest_common_divisor(elements.multiple, size);
        let (multiple, size) = (elements.multiple / common, size / common);
        let is_counted_once = elements.repeats == 1 && elements.per == 1;
        match (multiple, size) {
            (1, _) if is_counted_once => {
                Size { divisor: elements.divisor * size, multiple, ..elements }
            }
            (_, 1) => Size { multiple, ..elements },
            _ if is_counted_once => Size { repeats: multiple, per: size, multiple: 1, ..elements },
            _ => Size { per: elements.per * size, multiple, ..elements },
        }
    }

    pub(super) fn part_of(self, parts: usize) -> Option<Size> {
        if parts == 0 {
            return None;
        }
        if let Some(n) = self.as_fixed() {
            return n.is_multiple_of(parts).then(|| Size::fixed(n / parts));
        }
        // Divide `multiple` first.
        let common = greatest_common_divisor(self.multiple, parts);
        let (whole, parts) = (Size { multiple: self.multiple / common, ..self }, parts / common);
        let Size { factor, extra, divisor, multiple, is_even, .. } = whole;
        if parts == 1 {
            return Some(whole);
        }
        if divisor == 1 && factor.is_multiple_of(parts) && extra.is_multiple_of(parts) {
            return Some(Size { factor: factor / parts, extra: extra / parts, ..whole });
        }
        if multiple != 1 || (divisor != 1 && !is_even) {
            return None;
        }
        // Reduce the fraction, so that a part of a gathered dimension equals the original part.
        let divisor = divisor * parts;
        let common = greatest_common_divisor(greatest_common_divisor(factor, extra), divisor);
        let (factor, extra, divisor) = (factor / common, extra / common, divisor / common);
        Some(Size { factor, extra, divisor, is_even: divisor > 1, ..whole })
    }

    pub(super) fn times(self, factor: usize) -> Size {
        match self.as_fixed() {
            Some(n) => Size::fixed(n * factor),
            None if self.is_even => {
                let common = greatest_common_divisor(self.divisor, factor);
                let divisor = self.divisor / common;
                let whole = Size { divisor, is_even: divisor > 1, ..self };
                match factor / common {
                    1 => whole,
                    rest if divisor == 1 => whole.times(rest),
                    rest => Size { multiple: whole.multiple * rest, ..whole },
                }
            }
            None if self.divisor == 1 && self.multiple == 1 => {
                Size { factor: self.factor * factor, extra: self.extra * factor, ..self }
            }
            None => Size { multiple: self.multiple * factor, ..self },
        }
    }

    pub(super) fn share(self, numerator: usize, denominator: usize) -> Size {
        let common = greatest_common_divisor(numerator, denominator).max(1);
        self.times(numerator / common).blocks_of(denominator / common)
    }

    pub(super) fn round_up_to(self, multiple: usize) -> Size {
        match self.as_fixed() {
            Some(n) => Size::fixed(n.next_multiple_of(multiple)),
            None if self.is_multiple_of(multiple) => self,
            None => self.blocks_of(multiple).times(multiple),
        }
    }

    pub(super) fn plus(self, extra: usize) -> Option<Size> {
        match self.as_fixed() {
            Some(n) => Some(Size::fixed(n + extra)),
            None if self.divisor == 1 && self.multiple == 1 => {
                Some(Size { extra: self.extra + extra, ..self })
            }
            // Division without remainder: move factors into the numerator.
            None if self.is_even => Some(Size {
                factor: self.multiple * self.factor,
                extra: self.multiple * self.extra + extra * self.divisor,
                multiple: 1,
                ..self
            }),
            None => None,
        }
    }

    pub(super) fn is_multiple_of(self, size: usize) -> bool {
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

    pub(super) fn bind(self, binding: &Binding) -> usize {
        let monomial = self.factor
            * binding.batch.pow(u32::from(self.batch))
            * binding.seq.pow(u32::from(self.seq));
        self.of(monomial)
    }

    /// Evaluates the formula for a value of the monomial.
    fn of(self, monomial: usize) -> usize {
        let blocks = (monomial + self.extra).div_ceil(self.divisor);
        self.multiple * (self.repeats * blocks).div_ceil(self.per)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl fmt::Display for Size {
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
        if (self.repeats, self.per) != (1, 1) {
            text = format!("{}*ceil({text})/{}", self.repeats, self.per);
        }
        match self.multiple {
            1 => f.write_str(&text),
            multiple => write!(f, "{multiple}*ceil({text})"),
        }
    }
}
