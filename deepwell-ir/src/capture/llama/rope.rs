//! Rotary position embedding: frequencies with the scaling rules of Hugging Face's
//! `modeling_rope_utils.py` (version 5); each rule names its function there.
//!
//! All arithmetic is in f64 and rounded once. transformers computes in f32, so values differ in the
//! last bits.

use std::f64::consts::PI;

/// Base and scaling rule of the rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: pair `i` of a head of width `d` rotates `theta^(-2i/d)` radians per
    /// position before scaling.
    pub theta: f64,
    /// Change of the frequencies for longer sequences.
    pub scaling: RopeScaling,
}

/// Rule for changing the frequencies, `rope_type` in a `config.json`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Unchanged: `default`.
    None,
    /// All frequencies divided by one factor (`_compute_linear_scaling_rope_parameters`).
    Linear {
        /// The divisor, 1 or more.
        factor: f64,
    },
    /// The base grows with sequences longer than `max_position_embeddings`
    /// (`_compute_dynamic_ntk_parameters`).
    Dynamic {
        /// Growth, 1 or more.
        factor: f64,
    },
    /// Low frequencies divided, high frequencies kept, a ramp between
    /// (`_compute_llama3_parameters`).
    Llama3 {
        /// Divisor for long wavelengths.
        factor: f64,
        /// Wavelengths over `original_max_position_embeddings / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_position_embeddings / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Original sequence length of pretraining.
        original_max_position_embeddings: usize,
    },
    /// A ramp over the pairs of a head, and larger scores (`_compute_yarn_parameters`; Peng et
    /// al., arXiv 2309.00071).
    Yarn(YarnScaling),
}

/// Parameters of [`RopeScaling::Yarn`].
#[derive(Clone, Debug, PartialEq)]
pub struct YarnScaling {
    /// Divisor for slow pairs.
    pub factor: f64,
    /// Original sequence length of pretraining.
    pub original_max_position_embeddings: usize,
    /// Factor on sine and cosine; derived from `factor` if `None`.
    pub attention_factor: Option<f64>,
    /// Pairs with more rotations over the original length are kept.
    pub beta_fast: f64,
    /// Pairs with fewer rotations over the original length are divided.
    pub beta_slow: f64,
    /// With `mscale_all_dim`, derives the attention factor as a quotient.
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
    /// Whether the ends of the ramp are rounded outwards to whole pairs.
    pub truncate: bool,
}

impl Rope {
    /// Radians per position for the `head_dim / 2` pairs, for sequences of `seq_len` tokens (used
    /// only by [`RopeScaling::Dynamic`]). `max_position_embeddings` is from the config.
    pub fn inverse_frequencies(
        &self,
        head_dim: usize,
        max_position_embeddings: usize,
        seq_len: usize,
    ) -> Vec<f32> {
        let unscaled = plain_frequencies(self.theta, head_dim);
        let scaled = match &self.scaling {
            RopeScaling::None => unscaled,
            RopeScaling::Linear { factor } => unscaled.iter().map(|f| f / factor).collect(),
            RopeScaling::Dynamic { factor } => {
                let longest = max_position_embeddings as f64;
                let length = longest.max(seq_len as f64);
                let growth = factor * length / longest - (factor - 1.0);
                let d = head_dim as f64;
                plain_frequencies(self.theta * growth.powf(d / (d - 2.0)), head_dim)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let original = *original_max_position_embeddings as f64;
                unscaled
                    .iter()
                    .map(|&f| {
                        let turns = original * f / (2.0 * PI);
                        if turns > *high_freq_factor {
                            f
                        } else if turns < *low_freq_factor {
                            f / factor
                        } else {
                            let kept =
                                (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                            (1.0 - kept) * f / factor + kept * f
                        }
                    })
                    .collect()
            }
            RopeScaling::Yarn(yarn) => yarn.frequencies(self.theta, &unscaled),
        };
        scaled.into_iter().map(|f| f as f32).collect()
    }

    /// Factor on sine and cosine, so its square multiplies scores: 1 except for yarn.
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.effective_attention_factor() as f32,
            _ => 1.0,
        }
    }
}

/// `theta^(-2i/d)` for each pair `i`.
fn plain_frequencies(theta: f64, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect()
}

impl YarnScaling {
    /// Fractional index of the pair that rotates `rotations` times over the original length.
    fn pair_of(&self, rotations: f64, theta: f64, head_dim: f64) -> f64 {
        let positions = self.original_max_position_embeddings as f64;
        head_dim * (positions / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
    }

    fn frequencies(&self, theta: f64, unscaled: &[f64]) -> Vec<f64> {
        let head_dim = 2.0 * unscaled.len() as f64;
        let mut first = self.pair_of(self.beta_fast, theta, head_dim);
        let mut last = self.pair_of(self.beta_slow, theta, head_dim);
        if self.truncate {
            first = first.floor();
            last = last.ceil();
        }
        first = first.max(0.0);
        last = last.min(head_dim - 1.0);
        if first == last {
            // As in the source: avoids a division by zero.
            last += 0.001;
        }
        unscaled
            .iter()
            .enumerate()
            .map(|(i, &f)| {
                let divided = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                f / self.factor * divided + f * (1.0 - divided)
            })
            .collect()
    }

    /// Growth of scores for sequences `factor` times longer, for one `mscale`.
    pub(super) fn factor_of(&self, mscale: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * self.factor.ln() + 1.0 }
    }

    /// The configured attention factor, or the factor derived from `factor`, `mscale` and
    /// `mscale_all_dim`.
    fn effective_attention_factor(&self) -> f64 {
        let scale = |mscale: f64| self.factor_of(mscale);
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), _, _) => given,
            // Zero counts as absent, as in Python.
            (None, Some(part), Some(all)) if part != 0.0 && all != 0.0 => scale(part) / scale(all),
            _ => scale(1.0),
        }
    }
}
