//! The head against the f64 oracle on the numbers that the kernel was given.

use half::bf16;

use super::*;
use crate::ops::linear_cross_entropy::oracle;
use crate::runtime::cpu::test_support::{
    Random, assert_close_each, for_thread_counts, poisoned, to_f64,
};

struct Case<E> {
    hidden: usize,
    vocab: usize,
    x: Vec<E>,
    w: Vec<E>,
    targets: Vec<i32>,
    loss_scale: f32,
}

impl<E: Element> Case<E> {
    fn random(tokens: usize, hidden: usize, vocab: usize) -> Self {
        let mut random = Random::new((tokens * 31 + hidden * 7 + vocab) as u64);
        let targets = (0..tokens)
            .map(|token| if token % 5 == 3 { IGNORED_TARGET } else { random.below(vocab) as i32 })
            .collect();
        Self {
            hidden,
            vocab,
            x: random.normals(tokens * hidden),
            w: (0..vocab * hidden).map(|_| E::from_f32(0.3 * random.normal() as f32)).collect(),
            targets,
            loss_scale: 1.0 / 64.0,
        }
    }

    /// Loss, dx and dw after a call that accumulates over the given loss and dw.
    fn grad(&self, tier: Tier, before: Option<f32>) -> (f32, Vec<E>, Vec<f32>) {
        let mut loss = before.unwrap_or(f32::NAN);
        let mut dx = poisoned(self.x.len());
        let mut dw = vec![before.unwrap_or(f32::NAN); self.w.len()];
        let gradients = HeadGradients { dx: &mut dx, dw: &mut dw };
        self.run(tier, &mut loss, Some(gradients), before.is_some()).unwrap();
        (loss, dx, dw)
    }

    fn loss(&self, tier: Tier, before: Option<f32>) -> f32 {
        let mut loss = before.unwrap_or(f32::NAN);
        self.run(tier, &mut loss, None, before.is_some()).unwrap();
        loss
    }

    fn run(
        &self,
        tier: Tier,
        loss: &mut f32,
        gradients: Option<HeadGradients<'_, E>>,
        accumulate: bool,
    ) -> Result<(), CrossEntropyError> {
        let tokens = self.targets.len();
        let hidden = self.hidden;
        let vocab = self.vocab;
        let bytes = workspace_bytes::<E>(tokens, hidden, vocab, gradients.is_some());
        linear_cross_entropy_on(
            tier,
            &self.x,
            &self.w,
            &self.targets,
            hidden,
            self.loss_scale,
            loss,
            gradients,
            accumulate,
            &mut vec![0xff; bytes],
        )
    }
}

fn tiers() -> impl Iterator<Item = Tier> {
    Tier::ALL.into_iter().filter(|tier| tier.is_available())
}

fn check<E: Element>(tokens: usize, hidden: usize, vocab: usize) {
    let case = Case::<E>::random(tokens, hidden, vocab);
    let (x, w) = (to_f64(&case.x), to_f64(&case.w));
    let scale = f64::from(case.loss_scale);
    let expected_loss = oracle::forward(&x, &w, &case.targets, hidden, scale);
    let expected = oracle::backward(&x, &w, &case.targets, hidden, scale);

    // The logits err by their sums, (hidden + 2) 2^-24 of sum |x| |w|, and exp, ln and the
    // sum over the vocabulary by a few units more; a logit's error moves the probabilities
    // by as much relatively, and the loss absolutely. Then dlogits is rounded to E.
    let unit = 2f64.powi(-24);
    let product_size = (0..tokens)
        .flat_map(|token| (0..vocab).map(move |word| (token, word)))
        .map(|(token, word)| {
            let x = &x[token * hidden..][..hidden];
            let w = &w[word * hidden..][..hidden];
            x.iter().zip(w).map(|(x, w)| (x * w).abs()).sum::<f64>()
        })
        .fold(1.0, f64::max);
    let logit_error = (hidden as f64 + 2.0) * unit * product_size;
    let softmax_error = 2.0 * logit_error + 16.0 * unit;
    let rounding = if E::NAME == "bf16" { f64::from(E::UNIT_ROUNDOFF) } else { 0.0 };
    // Per dlogit: the softmax's error (of probabilities up to 1), the rounding to E.
    let dlogit_error = |dlogit: f64| scale * softmax_error + rounding * dlogit.abs();
    let mut dx_error = vec![0.0; x.len()];
    let mut dw_error = vec![0.0; w.len()];
    for token in (0..tokens).filter(|&token| case.targets[token] != IGNORED_TARGET) {
        for word in 0..vocab {
            let dlogit = expected.dlogits[token * vocab + word];
            // The products' own sums: (terms + 2) units of the size of the terms.
            let sum_error = |terms: usize| (terms as f64 + 2.0) * unit * dlogit.abs();
            for d in 0..hidden {
                let (i, j) = (token * hidden + d, word * hidden + d);
                dx_error[i] += (dlogit_error(dlogit) + sum_error(vocab)) * w[j].abs();
                dw_error[j] += (dlogit_error(dlogit) + sum_error(tokens)) * x[i].abs();
            }
        }
    }
    let live = case.targets.iter().filter(|target| **target != IGNORED_TARGET).count();
    let loss_error = scale * live as f64 * (softmax_error + 8.0 * unit);
    let dx_relative = rounding + unit;

    for tier in tiers() {
        let (loss, dx, dw) = case.grad(tier, None);
        let close = |got: f32, expected: f64| {
            (f64::from(got) - expected).abs() <= loss_error + 2.0 * unit * expected.abs()
        };
        assert!(close(loss, expected_loss), "{tier:?}: loss {loss}, expected {expected_loss}");
        assert_close_each("dx", &dx, &expected.dx, dx_relative, &dx_error);
        assert_close_each("dw", &dw, &expected.dw, unit, &dw_error);
        assert_eq!(case.loss(tier, None).to_bits(), loss.to_bits(), "{tier:?}: forward alone");

        // Accumulating, to a loss and a dw of 2.
        let (loss, accumulated_dx, dw) = case.grad(tier, Some(2.0));
        assert!(close(loss, expected_loss + 2.0), "{tier:?}: accumulated loss {loss}");
        assert!(close(case.loss(tier, Some(2.0)), expected_loss + 2.0), "{tier:?}");
        assert_eq!(accumulated_dx, dx, "dx must not accumulate");
        let expected_dw: Vec<f64> = expected.dw.iter().map(|dw| dw + 2.0).collect();
        // One rounding per chunk, or per step of the F32 tier where it has few.
        let roundings = 2.0 + tokens.div_ceil(chunk_tokens(tokens, vocab)) as f64;
        assert_close_each("dw", &dw, &expected_dw, 2.0 * roundings * unit, &dw_error);
    }
}

#[test]
fn agrees_with_the_oracle() {
    // Sizes around vectors, tiles and chunks (256 tokens); one token; one word.
    for (tokens, hidden, vocab) in
        [(1, 1, 1), (1, 32, 2), (5, 33, 31), (64, 48, 65), (257, 16, 40), (600, 8, 33)]
    {
        check::<f32>(tokens, hidden, vocab);
        check::<bf16>(tokens, hidden, vocab);
    }
}

#[test]
fn no_tokens_or_none_that_count() {
    for tier in tiers() {
        let none = Case::<bf16>::random(0, 8, 5);
        assert_eq!(none.grad(tier, None), (0.0, vec![], vec![0.0; 40]));
        assert_eq!(none.grad(tier, Some(3.0)), (3.0, vec![], vec![3.0; 40]));
        let mut ignored = Case::<bf16>::random(4, 8, 5);
        ignored.targets.fill(IGNORED_TARGET);
        let (loss, dx, dw) = ignored.grad(tier, None);
        assert_eq!((loss, dw), (0.0, vec![0.0; 40]));
        assert!(dx.iter().all(|dx| dx.to_f32() == 0.0));
    }
}

#[test]
fn large_logits_do_not_overflow() {
    // Logits of +-3e4: the likely token costs nothing, the unlikely one their distance.
    let mut case = Case::<f32>::random(2, 1, 2);
    (case.x, case.w) = (vec![100.0, 100.0], vec![300.0, -300.0]);
    case.loss_scale = 1.0;
    for tier in tiers() {
        for (targets, expected) in [([0, 0], 0.0), ([1, 0], 60000.0)] {
            case.targets = targets.to_vec();
            assert_eq!(case.loss(tier, None), expected);
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let case = Case::<bf16>::random(700, 64, 100);
    for tier in tiers() {
        for_thread_counts(|| {
            let (loss, dx, dw) = case.grad(tier, Some(1.5));
            (loss.to_bits(), dx, dw)
        });
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let case = Case::<f32>::random(4, 3, 5);
    let run = |targets: &[i32], bytes: usize| {
        let mut loss = 7.0;
        let mut workspace = vec![0; bytes];
        let result = linear_cross_entropy(
            &case.x,
            &case.w,
            targets,
            3,
            1.0,
            &mut loss,
            None,
            false,
            &mut workspace,
        );
        assert_eq!(loss, 7.0, "nothing may be written");
        result.unwrap_err().to_string()
    };
    for (targets, expected) in [
        (vec![0, 1, 5, 9], "target of token 2: expected 0 to 4 or -100, got 5"),
        (vec![0, -1, 5, 9], "target of token 1: expected 0 to 4 or -100, got -1"),
        (vec![0, -100, 4], "tensor `x`: expected 9 elements, got 12"),
    ] {
        let message = run(&targets, 1 << 20);
        assert!(message.contains(expected), "{message}");
    }
    let message = run(&[0; 4], 10);
    assert!(message.contains("workspace: expected at least"), "{message}");
    for hidden in [0, 3] {
        let (mut loss, none) = (0.0, [0.0f32; 0]);
        let (targets, workspace) = ([], &mut [0; 4096]);
        let result = linear_cross_entropy(
            &none, &none, &targets, hidden, 1.0, &mut loss, None, false, workspace,
        );
        assert_eq!(result, Err(CrossEntropyError::Empty { vocab: 0, hidden }));
    }
}
