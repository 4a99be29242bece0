//! The chat template of a model's folder, and the positions of answers in rendered text.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::{Environment, Value};

use super::super::DataError;
use super::super::records::{Conversation, Turn};
use super::folder;
use super::jinja::{BEGIN, END, environment, with_marks};

/// A template with its variables.
pub(super) struct Template {
    environment: Environment<'static>,
    /// Whether the template marks answers.
    has_marks: bool,
    /// Special tokens by name, such as `bos_token`.
    variables: Vec<(String, Value)>,
    hash: blake3::Hash,
}

const NAME: &str = "chat";

impl Template {
    /// Reads the template in the folder of a `tokenizer.json`: `chat_template.jinja`, otherwise
    /// `chat_template` of `tokenizer_config.json`.
    pub(super) fn beside(tokenizer: &Path) -> Result<Template, DataError> {
        let folder = folder(tokenizer);
        let config_path = folder.join("tokenizer_config.json");
        let config: Value = match read(&config_path)? {
            None => Value::from(()),
            Some(text) => serde_json::from_str(&text).map_err(|error| DataError::ChatTemplate {
                path: config_path.clone(),
                message: error.to_string(),
            })?,
        };
        let file = folder.join("chat_template.jinja");
        let (source, path) = match read(&file)? {
            Some(text) => (Some(text), file),
            None => (of_config(&config), config_path),
        };
        let Some(source) = source else { return Err(DataError::NoChatTemplate { folder }) };
        Template::new(&source, &config).map_err(|message| DataError::ChatTemplate { path, message })
    }

    /// `config` names the special tokens.
    pub(super) fn new(source: &str, config: &Value) -> Result<Template, String> {
        let (marked, has_marks) = with_marks(source);
        let mut environment = environment();
        environment.add_template_owned(NAME, marked).map_err(|error| describe(&error))?;
        let keys = config.try_iter().into_iter().flatten().filter_map(|key| {
            let name = key.as_str()?.to_owned();
            name.ends_with("_token").then_some(name)
        });
        let variables = keys.filter_map(|name| {
            let value = config.get_attr(&name).ok()?;
            let content = value.get_attr("content").unwrap_or_default();
            let text = value.as_str().or_else(|| content.as_str())?;
            Some((name, Value::from(text)))
        });
        let variables: Vec<(String, Value)> = variables.collect();
        let mut hasher = blake3::Hasher::new();
        for text in variables
            .iter()
            .flat_map(|(name, value)| [name.as_str(), value.as_str().unwrap_or_default()])
            .chain([source])
        {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        Ok(Template { environment, has_marks, variables, hash: hasher.finalize() })
    }

    pub(super) fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Renders a conversation, and returns the text with the ranges of its answers.
    pub(super) fn answers(
        &self,
        conversation: &Conversation,
    ) -> Result<(String, Vec<Range<usize>>), String> {
        let turns = &conversation.turns;
        let Some(last) = turns.iter().rposition(Turn::is_answer) else {
            return Err("expected a message of the role `assistant`, got none".to_owned());
        };
        let rendered = self.render(turns, conversation, false)?;
        if self.has_marks {
            return split_marks(&rendered);
        }
        let mut answers = Vec::new();
        for index in (0..=last).filter(|&index| turns[index].is_answer()) {
            let before = self.render(&turns[..index], conversation, true)?;
            let after = match index + 1 == turns.len() {
                true => rendered.clone(),
                false => self.render(&turns[..=index], conversation, false)?,
            };
            if !after.starts_with(&before) || !rendered.starts_with(&after) {
                return Err(format!(
                    "the template renders what is before message {} differently once more \
                     messages follow, so that where the answer begins is not known\nhint: a \
                     template with `{{% generation %}}` around answers says so",
                    index + 1
                ));
            }
            answers.push(before.len()..after.len());
        }
        Ok((rendered, answers))
    }

    fn render(
        &self,
        turns: &[Turn],
        conversation: &Conversation,
        prompts: bool,
    ) -> Result<String, String> {
        let messages: Value = turns.iter().map(|turn| turn.0.clone()).collect();
        let tools = match conversation.tools.is_undefined() {
            true => Value::from(()),
            false => conversation.tools.clone(),
        };
        let own = [
            ("messages".to_owned(), messages),
            ("tools".to_owned(), tools),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(prompts)),
        ];
        let variables = Value::from_pairs(self.variables.iter().cloned().chain(own));
        let template = self.environment.get_template(NAME).map_err(|error| describe(&error))?;
        template.render(variables).map_err(|error| describe(&error))
    }
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("hash", &self.hash).finish_non_exhaustive()
    }
}

/// Removes the marks from a rendering, and returns the text with the ranges between marks.
fn split_marks(marked: &str) -> Result<(String, Vec<Range<usize>>), String> {
    let mut text = String::with_capacity(marked.len());
    let mut answers = Vec::new();
    let mut begin = None;
    for c in marked.chars() {
        match c {
            BEGIN if begin.is_none() => begin = Some(text.len()),
            END if begin.is_some() => answers.push(begin.take().unwrap_or_default()..text.len()),
            BEGIN | END => return Err("`{% generation %}` blocks within each other".to_owned()),
            c => text.push(c),
        }
    }
    match answers.is_empty() {
        true => Err("the template has `{% generation %}`, and renders no answer".to_owned()),
        false => Ok((text, answers)),
    }
}

/// Returns `chat_template` of a `tokenizer_config.json`: a text, or the default of a list of named
/// templates.
fn of_config(config: &Value) -> Option<String> {
    let template = config.get_attr("chat_template").ok()?;
    if let Some(text) = template.as_str() {
        return Some(text.to_owned());
    }
    let mut named = template.try_iter().ok()?;
    let default = named
        .find(|one| one.get_attr("name").is_ok_and(|name| name.as_str() == Some("default")))?;
    default.get_attr("template").ok()?.as_str().map(str::to_owned)
}

fn read(path: &PathBuf) -> Result<Option<String>, DataError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(source) => Err(DataError::Read { path: path.clone(), source }),
    }
}

/// Describes an error without the template's source lines.
fn describe(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the chat template)"),
        None => what,
    }
}
