//! Evaluation of a model on a text.

use deepwell_ir::ops::IGNORED_TARGET;
use serde::Serialize;

use super::TextModel;
use crate::TrainError;
use crate::data::{Dataset, Split};

/// Result of an evaluation on a text. `Display` prints a small table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean loss in nats over the predicted tokens.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Bits for each byte of the text; none of token files and of conversations, where the text is
    /// not known or not predicted.
    pub bits_per_byte: Option<f64>,
    /// Predicted tokens: each token except the first; in conversations the tokens of answers.
    pub tokens_predicted: u64,
    /// Tokens of the text, including end-of-document tokens.
    pub tokens: u64,
    /// Tokens of a window.
    pub seq_len: usize,
    /// Tokens from the start of a window to the start of the next.
    pub stride: usize,
    /// Windows.
    pub windows: u64,
}

impl TextModel {
    /// Evaluates a model, opened to score, on the held-out part of `data`.
    ///
    /// A window is [`Forward::window`](super::Forward::window) tokens, and begins `stride` tokens
    /// after the previous window. Each token except the first is predicted once, in the first
    /// window that contains the preceding token, from the tokens of that window. `progress`
    /// receives the number of windows done and the total.
    ///
    /// # Errors
    /// The stride is 0 or more than a window, a token is outside the vocabulary, the text has
    /// nothing to predict, or the device fails.
    pub fn evaluate(
        &mut self,
        data: &Dataset,
        stride: Option<usize>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Evaluation, TrainError> {
        let seq = self.forward.window();
        let stride = stride.unwrap_or(seq);
        if stride == 0 || stride > seq {
            return Err(TrainError::Setting {
                setting: "stride",
                expected: format!("1 to {seq}, the tokens of a window"),
                got: stride.to_string(),
                hint: None,
            });
        }
        let tokens = data.tokens();
        tokens.check_vocab(self.forward.vocab_size() as u64)?;
        data.check_targets()?;
        let inputs_all = tokens.len(Split::Heldout) - 1;
        let more = inputs_all.saturating_sub(seq as u64).div_ceil(stride as u64);
        let windows = 1 + more;
        let (mut inputs, mut targets) = (vec![0; seq], vec![IGNORED_TARGET; seq]);
        let (mut nats, mut predicted, mut done) = (0.0, 0, 0);
        for window in 0..windows {
            progress(window, windows);
            let start = window * stride as u64;
            let len = (inputs_all - start).min(seq as u64) as usize;
            inputs.fill(0);
            targets.fill(IGNORED_TARGET);
            tokens.copy_i32(Split::Heldout, start, &mut inputs[..len]);
            tokens.copy_targets(Split::Heldout, start + 1, &mut targets[..len]);
            // Targets that an earlier window has predicted.
            let seen = (done - start) as usize;
            targets[..seen].fill(IGNORED_TARGET);
            done = start + len as u64;
            let count = targets.iter().filter(|&&target| target != IGNORED_TARGET).count();
            if count > 0 {
                nats += f64::from(self.forward.loss(&inputs, &targets)?) * count as f64;
                predicted += count as u64;
            }
        }
        progress(windows, windows);
        let loss = nats / predicted as f64;
        let summary = data.summary();
        let has_text = !data.has_token_files() && summary.conversations.is_none();
        let bits = nats / std::f64::consts::LN_2;
        Ok(Evaluation {
            loss,
            perplexity: loss.exp(),
            bits_per_byte: has_text.then(|| bits / summary.bytes as f64),
            tokens_predicted: predicted,
            tokens: inputs_all + 1,
            seq_len: seq,
            stride,
            windows,
        })
    }
}
