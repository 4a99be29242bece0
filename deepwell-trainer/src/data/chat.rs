//! Conversations to tokens: the chat template of a model's folder, and the loss on answers alone.
//!
//! A template is Jinja, rendered as transformers does it. The tokens that count are those of the
//! assistant's answers. Where they are is what the template says with `{% generation %}`; else an
//! answer is what a rendering that ends with it has behind a rendering that ends before it and
//! prompts for it. The second way holds for templates that render a message the same whatever
//! comes after it, which is checked for each answer.

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
    /// Without what would be put around a text, or trimmed off its places.
    tokenizer: Box<tokenizers::Tokenizer>,
}

/// Tokens, and which of them count in the loss.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// One for each token; none where all count.
    pub(crate) counts: Option<Vec<bool>>,
}

impl Chat {
    /// Reads the template beside a `tokenizer.json`.
    pub(crate) fn beside(
        path: &Path,
        tokenizer: &tokenizers::Tokenizer,
    ) -> Result<Chat, DataError> {
        let mut tokenizer = Box::new(tokenizer.clone());
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        Ok(Chat { template: Template::beside(path)?, tokenizer })
    }

    /// Changes whenever the same conversation may give other tokens.
    pub(crate) fn hash(&self) -> blake3::Hash {
        self.template.hash()
    }

    /// Tokens of a conversation; `path` is the file that holds it.
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
    /// Whether the template puts `end` behind each turn, and so within conversations.
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

/// Whether a token has a part of an answer. `offsets` are where it begins and ends.
fn counts((begin, end): (usize, usize), answers: &[Range<usize>]) -> bool {
    answers.iter().any(|answer| match begin == end {
        true => answer.start < begin && begin <= answer.end,
        false => end > answer.start && begin < answer.end,
    })
}

/// The folder whose template is looked for, for errors.
fn folder(tokenizer: &Path) -> PathBuf {
    match tokenizer.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests;
