//! Text from a trained model, token by token.
//!
//! A [`TextModel`] is opened from a checkpoint of a run, with the run's tokenizer, precision and
//! sequence length, or from a Hugging Face folder; [`TextModel::generate`] continues a prompt. Each
//! token runs the forward program over a whole window (there is no KV cache). [`Sampling`] depends
//! only on the logits, the seed and the token's index: the same request gives the same text.

mod evaluate;
mod forward;
mod sampling;
mod text_model;

use std::io::{self, ErrorKind};
use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use self::evaluate::Evaluation;
pub use self::forward::Forward;
pub use self::sampling::Sampling;
pub(crate) use self::text_model::load_masters;
pub use self::text_model::{OpenOptions, TextModel};
use crate::TrainError;

/// A request for text.
#[derive(Clone, Debug)]
pub struct Request {
    /// Text to continue. An empty prompt starts with the special tokens of the tokenizer's
    /// template; without these with `bos_token_id` of the model's files, otherwise with the token
    /// that separates documents.
    pub prompt: String,
    /// Maximum number of new tokens.
    pub tokens_max: usize,
    /// Sampling method.
    pub sampling: Sampling,
    /// Continue after the model ends the document.
    pub ignores_end: bool,
}

/// Why a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// As many tokens as were asked for.
    TokensMax,
    /// The model ended the text, with the tokenizer's end-of-text token or a token named by
    /// `generation_config.json` or `config.json`.
    EndOfText,
    /// The reader has closed the pipe.
    ReaderGone,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Tokens of the prompt.
    pub prompt_tokens: Vec<u32>,
    /// New tokens, without the end-of-text token.
    pub tokens: Vec<u32>,
    /// Text of the new tokens; bytes that are not UTF-8 are replaced.
    pub text: String,
    /// Reason for the end.
    pub stop: Stop,
    /// Seconds from the first token to the last.
    pub time_s: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
}

impl TextModel {
    /// Continues a prompt. `on_text` receives the bytes of each new token; a broken pipe error from
    /// `on_text` ends the generation.
    ///
    /// Once prompt and new tokens exceed the model's window, the oldest tokens are dropped.
    ///
    /// # Errors
    /// The prompt is longer than the window, contains a token without a row in the model, or is
    /// empty with no known start token; the sampling is invalid; or the device fails.
    pub fn generate(
        &mut self,
        request: &Request,
        on_text: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<Generation, TrainError> {
        request.sampling.check()?;
        let prompt_tokens = self.prompt_tokens(&request.prompt)?;
        let vocab_size = (self.tokenizer.vocab_size() as usize).min(self.forward.vocab_size());
        let ends: Vec<u32> = match request.ignores_end {
            true => Vec::new(),
            false => self.special.ends.iter().copied().chain(self.tokenizer.separator()).collect(),
        };
        let mut stream = self.tokenizer.text_stream(&prompt_tokens);
        let mut tokens = prompt_tokens.clone();
        let mut text = Vec::new();
        let mut stop = Stop::TokensMax;
        let started = Instant::now();
        for index in 0..request.tokens_max {
            // Ignore rows of the head beyond the tokenizer's vocabulary.
            let logits = &self.forward.logits(&tokens)?[..vocab_size];
            let token = request.sampling.pick(logits, index as u64)?;
            if ends.contains(&token) {
                stop = Stop::EndOfText;
                break;
            }
            tokens.push(token);
            let piece = stream.push(token)?;
            text.extend_from_slice(&piece);
            match on_text(&piece) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    stop = Stop::ReaderGone;
                    break;
                }
                Err(error) => return Err(TrainError::io("standard output")(error)),
            }
        }
        let time_s = started.elapsed().as_secs_f64();
        let tokens = tokens.split_off(prompt_tokens.len());
        Ok(Generation {
            tokens_per_s: if time_s > 0.0 { tokens.len() as f64 / time_s } else { 0.0 },
            prompt_tokens,
            tokens,
            text: String::from_utf8_lossy(&text).into_owned(),
            stop,
            time_s,
        })
    }

    fn prompt_tokens(&self, prompt: &str) -> Result<Vec<u32>, TrainError> {
        let refuse = |expected: String, got: String, hint: String| {
            Err(TrainError::Setting { setting: "prompt", expected, got, hint: Some(hint) })
        };
        let mut tokens = self.tokenizer.encode_prompt(prompt)?;
        if tokens.is_empty() {
            tokens.extend(self.special.begin.or(self.tokenizer.separator()));
        }
        if tokens.is_empty() {
            let hint = "neither tokenizer nor configuration names a token that begins a text; give \
                        `--prompt` a text";
            return refuse("at least one token".to_string(), "none".to_string(), hint.to_string());
        }
        let rows = self.forward.vocab_size();
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= rows) {
            let text = self.tokenizer.token_text(*token).unwrap_or_default();
            return refuse(
                format!("tokens below {rows}, for which the model has rows"),
                format!("token {token}, `{text}`"),
                "`--tokenizer` names the one that the model was trained with".to_string(),
            );
        }
        let window = self.forward.window();
        if tokens.len() > window {
            let hint = match self.window_max {
                Some(max) if max < tokens.len() => {
                    format!("the model is made for {max} tokens at most; give it less text")
                }
                _ => format!("`--window {}` looks at all of it", tokens.len().next_multiple_of(32)),
            };
            let expected = format!("at most {window} tokens, the window");
            return refuse(expected, tokens.len().to_string(), hint);
        }
        Ok(tokens)
    }
}
