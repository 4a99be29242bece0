//! Choice of the next token: the largest logit, or a random token by probability.

use std::cmp::Ordering;

use deepwell_precision::Philox;

use crate::TrainError;

/// Parameters of sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the largest logit, the first of equal ones.
    pub temperature: f64,
    /// Number of most probable tokens to sample from.
    pub top_k: Option<usize>,
    /// Samples only from the smallest set of most probable tokens whose sum reaches this
    /// probability.
    pub top_p: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    /// Samples from all tokens with the probabilities of the model.
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: None, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Always takes the largest logit.
    pub fn greedy() -> Sampling {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// The first invalid number.
    pub fn check(&self) -> Result<(), TrainError> {
        let refuse = |setting, expected: &str, got: String, hint: Option<&str>| {
            let expected = expected.to_string();
            let hint = hint.map(str::to_string);
            Err(TrainError::Setting { setting, expected, got, hint })
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            let hint = Some("0 takes the most probable token, 1 the model's own probabilities");
            return refuse("temperature", "0 or more", self.temperature.to_string(), hint);
        }
        if self.top_k == Some(0) {
            let hint = Some("1 takes the most probable token");
            return refuse("top-k", "at least 1", "0".to_string(), hint);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let hint = Some("1 leaves no token out");
            return refuse("top-p", "above 0 and at most 1", self.top_p.to_string(), hint);
        }
        Ok(())
    }

    /// Chooses the `index`-th token after the prompt from its logits. The same logits, seed and
    /// index give the same token on every machine with the same exponential function.
    ///
    /// ```
    /// use deepwell_trainer::generate::Sampling;
    ///
    /// let logits = [0.5, 2.0, 2.0, -1.0];
    /// assert_eq!(Sampling::greedy().pick(&logits, 0)?, 1);
    /// let two = Sampling { top_k: Some(2), ..Sampling::default() };
    /// assert!([1, 2].contains(&two.pick(&logits, 7)?));
    /// # Ok::<(), deepwell_trainer::TrainError>(())
    /// ```
    ///
    /// # Errors
    /// No logits, or a logit that is NaN or infinite.
    pub fn pick(&self, logits: &[f32], index: u64) -> Result<u32, TrainError> {
        if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(TrainError::Setting {
                setting: "model",
                expected: "finite logits".to_string(),
                got: format!("{} for token {token}", logits[token]),
                hint: Some("the weights are damaged; `deepwell ckpt verify` looks".to_string()),
            });
        }
        let numbered = logits.iter().enumerate().map(|(token, &logit)| (token as u32, logit));
        let Some((first, largest)) = numbered.clone().min_by(by_logit) else {
            return Err(TrainError::Setting {
                setting: "model",
                expected: "a vocabulary".to_string(),
                got: "no logits".to_string(),
                hint: None,
            });
        };
        if self.temperature == 0.0 {
            return Ok(first);
        }
        let mut candidates: Vec<(u32, f32)> = numbered.collect();
        if let Some(kept) = self.top_k.filter(|&kept| kept < candidates.len()) {
            candidates.select_nth_unstable_by(kept, by_logit);
            candidates.truncate(kept);
        }
        candidates.sort_unstable_by(by_logit);
        let weight = |logit: f32| (f64::from(logit - largest) / self.temperature).exp();
        let weights: Vec<f64> = candidates.iter().map(|&(_, logit)| weight(logit)).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = weights.len();
        let mut reached = 0.0;
        for (position, weight) in weights.iter().enumerate().take_while(|_| self.top_p < 1.0) {
            reached += weight;
            if reached >= self.top_p * total {
                kept = position + 1;
                break;
            }
        }
        let (candidates, weights) = (&candidates[..kept], &weights[..kept]);
        let mut left = self.uniform(index) * weights.iter().sum::<f64>();
        for (&(token, _), weight) in candidates.iter().zip(weights) {
            left -= weight;
            if left < 0.0 {
                return Ok(token);
            }
        }
        // Rounding may leave a small remainder, assigned to the last token.
        Ok(candidates[kept - 1].0)
    }

    /// A number of [0, 1) with 53 random bits.
    fn uniform(&self, index: u64) -> f64 {
        let stream = Philox { seed: self.seed, stream: 0 };
        let word = |offset: u64| u64::from(stream.word(index.wrapping_mul(2).wrapping_add(offset)));
        ((word(0) << 21) ^ (word(1) >> 11)) as f64 / (1u64 << 53) as f64
    }
}

/// Larger logits first, equal logits by token.
fn by_logit(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of each of four tokens in many draws.
    fn shares(sampling: Sampling, logits: &[f32; 4]) -> [f64; 4] {
        const DRAWS: u64 = 20_000;
        let mut counts = [0.0; 4];
        for index in 0..DRAWS {
            counts[sampling.pick(logits, index).unwrap() as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_should() {
        let logits = [1.0f32, 0.0, 2.0, 0.5].map(|p| p.max(1e-9)).map(f32::ln);
        // With 20,000 draws the standard deviation of a share is at most 0.0035; four deviations
        // occur once in 16,000.
        let check = |sampling: Sampling, expected: [f64; 4]| {
            let got = shares(sampling, &logits);
            for (got, expected) in got.iter().zip(expected) {
                assert!((got - expected).abs() < 0.014, "{sampling:?}: {got} for {expected}");
            }
        };
        let all = Sampling::default();
        check(all, [1.0 / 3.5, 0.0, 2.0 / 3.5, 0.5 / 3.5]);
        check(Sampling { seed: 7, ..all }, [1.0 / 3.5, 0.0, 2.0 / 3.5, 0.5 / 3.5]);
        check(Sampling { temperature: 0.5, ..all }, [1.0 / 5.25, 0.0, 4.0 / 5.25, 0.25 / 5.25]);
        check(Sampling { top_k: Some(2), ..all }, [1.0 / 3.0, 0.0, 2.0 / 3.0, 0.0]);
        check(Sampling { top_k: Some(9), ..all }, [1.0 / 3.5, 0.0, 2.0 / 3.5, 0.5 / 3.5]);
        check(Sampling { top_p: 0.5, ..all }, [0.0, 0.0, 1.0, 0.0]);
        check(Sampling { top_p: 0.6, ..all }, [1.0 / 3.0, 0.0, 2.0 / 3.0, 0.0]);
        check(Sampling { top_k: Some(1), ..all }, [0.0, 0.0, 1.0, 0.0]);
        check(Sampling::greedy(), [0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens() {
        let logits: Vec<f32> = (0..100).map(|token| (token as f32 * 0.37).sin()).collect();
        let draw = |seed: u64| -> Vec<u32> {
            let sampling = Sampling { seed, ..Sampling::default() };
            (0..50).map(|index| sampling.pick(&logits, index).unwrap()).collect()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        // The first of equal logits.
        assert_eq!(Sampling::greedy().pick(&[0.0, 1.0, 1.0], 5).unwrap(), 1);
    }

    #[test]
    fn what_cannot_be() {
        let check = |sampling: Sampling, expected: &str| {
            let error = sampling.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let all = Sampling::default();
        assert!(all.check().is_ok() && Sampling::greedy().check().is_ok());
        for temperature in [-1.0, f64::NAN, f64::INFINITY] {
            check(Sampling { temperature, ..all }, "temperature: expected 0 or more, got ");
        }
        check(Sampling { top_k: Some(0), ..all }, "top-k: expected at least 1, got 0");
        for top_p in [0.0, 1.5, f64::NAN] {
            check(Sampling { top_p, ..all }, "top-p: expected above 0 and at most 1, got ");
        }
        for logits in [&[][..], &[0.0, f32::NAN], &[f32::INFINITY, 0.0]] {
            for sampling in [all, Sampling::greedy()] {
                assert!(sampling.pick(logits, 0).is_err(), "{logits:?}");
            }
        }
    }
}
