//! Detects weights in unsupported forms and rejects them by name, so that nobody accidentally
//! trains from fresh weights instead.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::capture::CaptureError;

/// File types that always hold weights.
const TYPES: [&str; 17] = [
    "safetensors",
    "bin",
    "pt",
    "pt2",
    "pth",
    "ckpt",
    "pkl",
    "pickle",
    "msgpack",
    "h5",
    "hdf5",
    "gguf",
    "ggml",
    "onnx",
    "distcp",
    "ot",
    "tflite",
];
/// File types that hold weights if the name contains one of [`WORDS`].
const TYPES_BY_NAME: [&str; 12] =
    ["npz", "npy", "zip", "tar", "gz", "tgz", "zst", "xz", "bz2", "part", "incomplete", "tmp"];
/// Words in names of weights.
const WORDS: [&str; 6] = ["model", "weight", "safetensors", "consolidated", "param", "checkpoint"];
/// Name prefixes of files of these types without weights, written by PyTorch trainers.
const NO_WEIGHTS: [&str; 7] = [
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "scaler",
    "random_states",
    "tokenizer",
];
/// Maximum number of names in one message.
const SHOWN_MAX: usize = 3;

/// Rejects a folder with weights under other names or in other formats.
pub(super) fn refuse(folder: &Path, names: &[String]) -> Result<(), CaptureError> {
    let mut foreign: Vec<String> =
        names.iter().filter(|name| is_weights(&folder.join(name), name)).cloned().collect();
    if foreign.is_empty() {
        foreign = in_folders(folder, names);
    }
    let Some(first) = foreign.first() else { return Ok(()) };
    let mut shown: Vec<String> =
        foreign.iter().take(SHOWN_MAX).map(|name| format!("`{name}`")).collect();
    if foreign.len() > SHOWN_MAX {
        shown.push(format!("{} more", foreign.len() - SHOWN_MAX));
    }
    let config = folder.join("config.json");
    Err(CaptureError::UnreadWeights {
        folder: folder.to_path_buf(),
        found: shown.join(", "),
        hint: format!(
            "{}; or name `{}`, which begins from fresh weights",
            way_on(first, foreign.len()),
            config.display()
        ),
    })
}

/// Finds weights in subfolders, such as Meta's `original` or a trainer's `checkpoint-500`.
fn in_folders(folder: &Path, names: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for name in names.iter().filter(|name| !name.starts_with('.')) {
        let inner = folder.join(name);
        let Ok(entries) = std::fs::read_dir(&inner) else { continue };
        for entry in entries.flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            let lower = file.to_lowercase();
            // Without such a word, files of these types are common in other folders.
            let is_named = WORDS.iter().any(|word| lower.contains(word));
            if is_named && entry.path().is_file() && is_weights(&entry.path(), &file) {
                found.push(format!("{name}/{file}"));
            }
        }
    }
    found.sort();
    found
}

/// Whether a file or a dangling link holds weights, judging by its name.
fn is_weights(path: &Path, name: &str) -> bool {
    let name = name.to_lowercase();
    if name.starts_with('.') || path.is_dir() {
        return false;
    }
    if NO_WEIGHTS.iter().any(|other| name.starts_with(other)) {
        return false;
    }
    if name.ends_with(".index.json") {
        return true;
    }
    let Some((_, kind)) = name.rsplit_once('.') else { return false };
    let is_named = WORDS.iter().any(|word| name.contains(word));
    if TYPES_BY_NAME.contains(&kind) {
        return is_named;
    }
    TYPES.contains(&kind) && !(kind == "bin" && holds_tokens(path))
}

/// Whether a `.bin` file holds tokens in the format of `llm.c`; such files may be next to a model.
fn holds_tokens(path: &Path) -> bool {
    const MAGICS: [i32; 2] = [20_240_520, 20_240_801];
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && MAGICS.contains(&i32::from_le_bytes(magic))
}

/// Advice for a file of this name.
fn way_on(name: &str, files: usize) -> String {
    let lower = name.to_lowercase();
    let kind = lower.rsplit_once('.').map_or("", |(_, kind)| kind);
    let text = match kind {
        _ if lower.contains("adapter") => {
            "an adapter is no model: merge it into its model in peft (`merge_and_unload`) and save \
             that with `save_pretrained`"
        }
        "safetensors" if name.contains('/') => "name the folder that holds the weights",
        "safetensors" if files == 1 => {
            "if it holds the whole model, rename it to `model.safetensors`"
        }
        "safetensors" => {
            "name shards `model-00001-of-0000N.safetensors` and so on, or write their \
             `model.safetensors.index.json`"
        }
        "bin" | "pt" | "pth" | "ckpt" | "pkl" | "pickle" => {
            "pickles of PyTorch are not read: load the model in transformers and save it again \
             with `save_pretrained`, which writes safetensors"
        }
        "pt2" => "name the archive itself",
        "gguf" | "ggml" => {
            "GGUF is not read: take the folder with safetensors that the file was made from"
        }
        "msgpack" | "h5" | "hdf5" | "ot" | "tflite" => {
            "weights of Flax and TensorFlow are not read: load the model in transformers and save \
             it again with `save_pretrained`, which writes safetensors"
        }
        "part" | "incomplete" | "tmp" => "finish the download",
        "zip" | "tar" | "gz" | "tgz" | "zst" | "xz" | "bz2" => "unpack the archive",
        _ if name.ends_with(".index.json") => "download the shards that the index lists",
        _ => "convert the weights to `model.safetensors`",
    };
    text.to_string()
}
