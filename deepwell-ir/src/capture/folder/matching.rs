//! Compares the tensors of weight files with the tensors that a configuration requires.

use std::collections::BTreeMap;
use std::path::Path;

use super::{StoredTensor, Weights};
use crate::capture::{CaptureError, StoredDType, StoredElement};

/// The output head, which may be stored instead of a tied token table.
pub(in crate::capture) const HEAD: &str = "lm_head.weight";

/// The tensors of weight files, of which a model takes its own.
pub(in crate::capture) struct Matching<'a> {
    folder: &'a Path,
    rest: BTreeMap<&'a str, &'a StoredTensor>,
    /// Whether the token table is also the output head.
    is_tied: bool,
    /// Tensors of the model.
    pub(in crate::capture) tensors: Vec<&'a StoredTensor>,
    /// Names in the files that differ from the names of parts, by part name.
    pub(in crate::capture) stored_names: BTreeMap<String, String>,
    /// Remarks on ignored tensors, as sentences.
    pub(in crate::capture) remarks: Vec<String>,
}

impl<'a> Matching<'a> {
    pub(super) fn new(files: &'a Weights, is_tied: bool) -> Matching<'a> {
        Matching {
            folder: &files.folder,
            rest: files.tensors().map(|tensor| (tensor.name.as_str(), tensor)).collect(),
            is_tied,
            tensors: Vec::new(),
            stored_names: BTreeMap::new(),
            remarks: Vec::new(),
        }
    }

    /// Names of the tensors that are not taken.
    pub(in crate::capture) fn names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.rest.keys().copied()
    }

    /// Whether a tensor of this name is not taken.
    pub(in crate::capture) fn has(&self, name: &str) -> bool {
        self.rest.contains_key(name)
    }

    /// Whether a tensor of this name was taken.
    pub(in crate::capture) fn is_taken(&self, name: &str) -> bool {
        self.tensors.iter().any(|tensor| tensor.name == name)
    }

    /// Takes the tensor `name`, which holds the part `part` and must have this shape and type.
    pub(in crate::capture) fn take(
        &mut self,
        part: &str,
        name: &str,
        shape: &[usize],
        element: StoredElement,
    ) -> Result<(), CaptureError> {
        let stored = self.rest.remove(name).ok_or_else(|| self.missing(name, shape))?;
        stored.check(shape, element)?;
        self.tensors.push(stored);
        if name != part {
            self.stored_names.insert(part.to_string(), name.to_string());
        }
        Ok(())
    }

    /// Takes all other tensors, in the order of their names.
    pub(in crate::capture) fn take_rest(&mut self) -> Vec<&'a StoredTensor> {
        std::mem::take(&mut self.rest).into_values().collect()
    }

    pub(in crate::capture) fn note_tied_head(&mut self) {
        self.remarks.push(format!("`{HEAD}` is stored but tied: the token table is used for it"));
    }

    /// Error for a missing tensor, with a hint if the files hold a similar tensor.
    fn missing(&self, name: &str, shape: &[usize]) -> CaptureError {
        let longer = |other: &&str| other.strip_suffix(name).is_some_and(|it| it.ends_with('.'));
        let hint = if let Some(other) = self.names().find(longer) {
            format!("the files hold `{other}`: take what stands before its name off all names")
        } else if name == HEAD && !self.is_tied {
            "the files hold no output head: if it is the token table, set `tie_word_embeddings` to \
             true in config.json, else save the model with its head"
                .to_string()
        } else if self.rest.is_empty() {
            "the files hold no other tensor: they are incomplete".to_string()
        } else {
            "config.json and the weights are of different models, or a file is incomplete"
                .to_string()
        };
        CaptureError::MissingTensor {
            name: name.to_string(),
            expected: format!("shape {shape:?}"),
            folder: self.folder.to_path_buf(),
            hint,
        }
    }
}

impl StoredTensor {
    /// Checks shape and element type.
    pub(in crate::capture) fn check(
        &self,
        shape: &[usize],
        element: StoredElement,
    ) -> Result<(), CaptureError> {
        if self.shape != shape {
            let (expected, got) = (format!("shape {shape:?}"), format!("shape {:?}", self.shape));
            let hint = "config.json and the weights are of different models";
            return Err(self.mismatch(&expected, &got, hint));
        }
        let dtype = StoredDType::of(self.dtype);
        let (fits, expected, hint) = match element {
            StoredElement::Float => (
                dtype.is_some_and(|dtype| !matches!(dtype, StoredDType::E4m3 | StoredDType::U8)),
                "F32, BF16 or F16",
                "save the model unquantized, in one of these types",
            ),
            StoredElement::Exactly(expected) => (
                dtype == Some(expected),
                expected.safetensors_name(),
                "`quantization_config` and the weights are of different models",
            ),
        };
        if fits {
            return Ok(());
        }
        Err(self.mismatch(expected, &self.dtype.to_string(), hint))
    }

    /// Error for a tensor of another shape or type than expected.
    pub(super) fn mismatch(&self, expected: &str, got: &str, hint: &str) -> CaptureError {
        CaptureError::TensorMismatch {
            name: self.name.clone(),
            path: self.file.clone(),
            expected: expected.to_string(),
            got: got.to_string(),
            hint: hint.to_string(),
        }
    }

    /// Error for a tensor that is not part of the model.
    pub(in crate::capture) fn unexpected(&self) -> CaptureError {
        let hint = if self.name.ends_with(".bias") {
            "set `attention_bias` or `mlp_bias` in config.json if the model has biases"
        } else {
            "config.json and the weights are of different models"
        };
        CaptureError::UnexpectedTensor {
            name: self.name.clone(),
            path: self.file.clone(),
            hint: hint.to_string(),
        }
    }
}
