//! Expert choices of the tokens of section `moe`, and tokens for which a router makes these
//! choices.

use deepwell_ir::DType;

use super::expert_gemms::Load;
use super::fill::{Fill, Pool};
use super::layer::MixtureSize;

/// The experts chosen by each token.
pub(super) struct Choices {
    /// Pairs of each expert.
    pub(super) load: Vec<usize>,
    /// `[tokens, top_k]`.
    pub(super) chosen: Vec<usize>,
}

impl Choices {
    /// Gives each expert as many tokens as `load` says. Experts take their tokens in turn from a
    /// list of all tokens, repeated, so that no expert gets a token twice; the list is shuffled,
    /// because neighbors need not choose the same expert.
    pub(super) fn of(load: Load, size: MixtureSize, tokens: usize) -> Choices {
        let load = load.pairs(size.experts, tokens, size.top_k);
        let of_slots = load.iter().enumerate().flat_map(|(expert, &n)| vec![expert; n]);
        let mut chosen = vec![0; tokens * size.top_k];
        // A step coprime to the number of tokens visits every token.
        let step = (tokens * 5 / 8..).find(|&step| gcd(step.max(1), tokens) == 1).unwrap_or(1);
        for (slot, expert) in of_slots.enumerate() {
            let token = slot % tokens * step.max(1) % tokens;
            chosen[token * size.top_k + slot / tokens] = expert;
        }
        Choices { load, chosen }
    }

    /// Tokens bf16 `[tokens, hidden]` whose first elements are their logits: at least 1 for chosen
    /// experts, less for the others.
    pub(super) fn tokens(&self, size: MixtureSize, pool: &Pool) -> Vec<u8> {
        let period = pool.period(Fill::Uniform, DType::F32);
        let uniform: &[f32] = bytemuck::cast_slice(&period);
        let tokens = self.chosen.len() / size.top_k;
        let mut data = vec![half::bf16::ZERO; tokens * size.hidden];
        for (token, row) in data.chunks_exact_mut(size.hidden).enumerate() {
            let chosen = &self.chosen[token * size.top_k..][..size.top_k];
            for (column, element) in row.iter_mut().enumerate() {
                let value = uniform[(token * size.hidden + column) % uniform.len()];
                // A gap of half a unit remains between chosen and other logits after any rounding.
                *element = half::bf16::from_f32(match chosen.contains(&column) {
                    true => 1.5 + 0.5 * value,
                    false if column < size.experts => 0.5 * value,
                    false => value,
                });
            }
        }
        bytemuck::cast_slice(&data).to_vec()
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_load_experts_as_they_should_and_no_token_twice() {
        let check = |text: &str, tokens: usize| {
            let size: MixtureSize = text.parse().unwrap();
            for load in Load::ALL {
                let Choices { load, chosen } = Choices::of(load, size, tokens);
                let mut counts = vec![0; size.experts];
                for of_token in chosen.chunks_exact(size.top_k) {
                    let mut once = of_token.to_vec();
                    once.sort_unstable();
                    once.dedup();
                    assert_eq!(once.len(), size.top_k, "{text} {of_token:?}");
                    once.iter().for_each(|&expert| counts[expert] += 1);
                }
                assert_eq!(counts, load, "{text}");
            }
        };
        check("8x64x128x2", 512);
        check("64x1408x2048x6", 16384);
        check("3x64x128x3", 7);
        check("5x64x128x1", 1);
    }
}
