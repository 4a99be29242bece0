//! The start and end tokens of a text, as named in the files of a model.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::ModelSource;
use crate::TrainError;

/// Keys of the decoder's configuration in a multimodal configuration.
const DECODERS: [&str; 3] = ["decoder", "generator", "text_config"];

/// The start and end tokens of a generated text.
///
/// As in transformers, `generation_config.json` decides. `config.json`, and its `text_config`, are
/// used if that file is missing or names no tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Token that replaces an empty prompt.
    pub begin: Option<u32>,
    /// Tokens that each end the text.
    pub ends: Vec<u32>,
}

impl SpecialTokens {
    /// The tokens of a model, from the files in the folder of its `config.json`. None if another
    /// tokenizer is named: the ids mean other tokens there.
    ///
    /// # Errors
    /// As [`SpecialTokens::of_folder`].
    pub fn of_model(
        model: &ModelSource,
        tokenizer: Option<&Path>,
    ) -> Result<SpecialTokens, TrainError> {
        let Some(folder) = model.folder().filter(|_| model.fits_tokenizer(tokenizer)) else {
            return Ok(SpecialTokens::default());
        };
        let config = Value::Object(folder.json.clone());
        SpecialTokens::of(model.generation_config(), Some((&folder.config_file, config)))
    }

    /// The tokens of the model files in a run's folder.
    ///
    /// # Errors
    /// A file is not JSON, or has values that are not tokens.
    pub fn of_folder(folder: &Path) -> Result<SpecialTokens, TrainError> {
        let [generation, config] = ["generation_config.json", "config.json"]
            .map(|name| Some(folder.join(name)).filter(|path| path.is_file()));
        let config = config.as_deref().map(read_json).transpose()?;
        SpecialTokens::of(generation, config)
    }

    /// The tokens that `generation_config.json` names, otherwise `config.json`.
    fn of(
        generation: Option<PathBuf>,
        config: Option<(&Path, Value)>,
    ) -> Result<SpecialTokens, TrainError> {
        let generation = generation.as_deref().map(read_json).transpose()?;
        let mut sources = Vec::new();
        for (path, json) in [generation, config].into_iter().flatten() {
            let decoder = DECODERS.iter().find_map(|key| json.get(key)).cloned();
            sources.push((path, json));
            sources.extend(decoder.map(|json| (path, json)));
        }
        let first = |key: &str| -> Result<Vec<u32>, TrainError> {
            for (path, json) in &sources {
                let special_tokens = tokens(path, key, &json[key])?;
                if !special_tokens.is_empty() {
                    return Ok(special_tokens);
                }
            }
            Ok(Vec::new())
        };
        let begin = first("bos_token_id")?.first().copied();
        Ok(SpecialTokens { begin, ends: first("eos_token_id")? })
    }
}

fn read_json(path: &Path) -> Result<(&Path, Value), TrainError> {
    let text = std::fs::read(path).map_err(TrainError::io(path))?;
    let json = serde_json::from_slice::<Value>(&text);
    Ok((path, json.map_err(std::io::Error::other).map_err(TrainError::io(path))?))
}

/// Parses a token, a list of tokens, or null for none. A negative number also means none.
fn tokens(path: &Path, key: &str, value: &Value) -> Result<Vec<u32>, TrainError> {
    let refuse = || TrainError::Setting {
        setting: "model",
        expected: format!("a token or a list of tokens under `{key}` of `{}`", path.display()),
        got: format!("`{value}`"),
        hint: None,
    };
    let token = |value: &Value| match value.as_i64() {
        Some(token) if token < 0 => Ok(None),
        Some(token) => u32::try_from(token).map(Some).map_err(|_| refuse()),
        None => Err(refuse()),
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(all) => Ok(all.iter().map(token).collect::<Result<Vec<_>, _>>()?)
            .map(|all| all.into_iter().flatten().collect()),
        one => Ok(token(one)?.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `generation_config.json`, `config.json`, and the expected result.
    fn check(generation: Value, config: Value, begin: Option<u32>, ends: &[u32]) {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in [("generation_config.json", &generation), ("config.json", &config)] {
            if !value.is_null() {
                std::fs::write(folder.path().join(name), value.to_string()).unwrap();
            }
        }
        let found = SpecialTokens::of_folder(folder.path()).unwrap();
        let expected = SpecialTokens { begin, ends: ends.to_vec() };
        assert_eq!(found, expected, "{generation} {config}");
    }

    #[test]
    fn end_tokens_are_numbers_or_lists_of_either_file() {
        let none = Value::Null;
        check(none.clone(), none.clone(), None, &[]);
        check(json!({"eos_token_id": [0, 206]}), json!({"eos_token_id": 2}), None, &[0, 206]);
        check(json!({"eos_token_id": 7}), none.clone(), None, &[7]);
        check(none.clone(), json!({"eos_token_id": [5, 6], "bos_token_id": 1}), Some(1), &[5, 6]);
        check(json!({"bos_token_id": 4}), json!({"eos_token_id": 6}), Some(4), &[6]);
        check(
            json!({"eos_token_id": null}),
            json!({"text_config": {"eos_token_id": 9}}),
            None,
            &[9],
        );
        check(
            json!({}),
            json!({"eos_token_id": 3, "text_config": {"eos_token_id": 9, "bos_token_id": 8}}),
            Some(8),
            &[3],
        );
        check(json!({"eos_token_id": [-1, 4]}), json!({"bos_token_id": -1}), None, &[4]);
    }

    #[test]
    fn what_is_no_token_is_an_error() {
        for value in [json!("2"), json!([1, "2"]), json!(1.5), json!({}), json!(1_u64 << 40)] {
            let folder = tempfile::tempdir().unwrap();
            let text = json!({ "eos_token_id": value }).to_string();
            std::fs::write(folder.path().join("config.json"), text).unwrap();
            let error = SpecialTokens::of_folder(folder.path()).unwrap_err().to_string();
            assert!(error.contains("a token or a list of tokens under `eos_token_id`"), "{error}");
        }
    }
}
