//! Conversations to tokens: the chat template of a model's folder, with the loss on answers only.
//!
//! A template is Jinja, rendered as in transformers. Only the tokens of the assistant's answers
//! count as targets. A template may mark the answers with `{% generation %}`. Otherwise an answer
//! is the difference of two renderings: the messages up to the answer, and the messages before the
//! answer with a generation prompt. The second way needs templates that render a message
//! independently of later messages; this is checked for each answer.

mod jinja;
mod template;

use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::Value;
use tokenizers::PostProcessorWrapper;

use super::DataError;
use super::records::{Conversation, Turn};
use template::Template;

/// Turns conversations into tokens.
#[derive(Debug)]
pub(crate) struct Chat {
    template: Template,
    /// The tokenizer without its post-processor, which would add special tokens and trim offsets.
    tokenizer: Box<tokenizers::Tokenizer>,
}

/// Tokens, with flags that say whether a token counts in the loss.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// A flag for each token; none if all tokens count.
    pub(crate) counts: Option<Vec<bool>>,
}

impl Chat {
    /// Reads the chat template in the folder of a `tokenizer.json`.
    pub(crate) fn beside(
        path: &Path,
        tokenizer: &tokenizers::Tokenizer,
    ) -> Result<Chat, DataError> {
        let mut tokenizer = Box::new(tokenizer.clone());
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        Ok(Chat { template: Template::beside(path)?, tokenizer })
    }

    /// A hash that changes whenever the same conversation may give other tokens.
    pub(crate) fn hash(&self) -> blake3::Hash {
        self.template.hash()
    }

    /// Tokenizes a conversation; `path` is its file.
    pub(crate) fn encode(
        &self,
        path: &Path,
        conversation: &Conversation,
    ) -> Result<Encoded, DataError> {
        let fail = |message: String| DataError::Chat {
            path: path.to_owned(),
            place: conversation.place.clone(),
            message,
        };
        let (text, answers) = self.template.answers(conversation).map_err(fail)?;
        let encode = || self.tokenizer.encode(text.as_str(), false);
        let encoding = super::tokenizer::guarded(encode).map_err(fail)?;
        let counts = encoding.get_offsets().iter().map(|&offsets| counts(offsets, &answers));
        Ok(Encoded { tokens: encoding.get_ids().to_vec(), counts: Some(counts.collect()) })
    }
}

impl Chat {
    /// Whether the template puts `end` after each turn, and so inside conversations.
    pub(crate) fn ends_turns_with(&self, end: u32) -> bool {
        let turn = |role: &str| {
            let fields = [("role", Value::from(role)), ("content", Value::from("a"))];
            Turn(Value::from_pairs(fields))
        };
        let conversation = Conversation {
            turns: ["user", "assistant", "user", "assistant"].map(turn).into(),
            tools: Value::default(),
            place: "probe".to_owned(),
        };
        let encoded = self.encode(Path::new("probe"), &conversation).unwrap_or_default();
        encoded.tokens.iter().filter(|&&token| token == end).count() > 1
    }
}

/// Whether a token overlaps an answer. The pair is the start and end of the token.
fn counts((begin, end): (usize, usize), answers: &[Range<usize>]) -> bool {
    answers.iter().any(|answer| match begin == end {
        true => answer.start < begin && begin <= answer.end,
        false => end > answer.start && begin < answer.end,
    })
}

/// The folder with the template, for errors.
fn folder(tokenizer: &Path) -> PathBuf {
    match tokenizer.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests;
