//! The header of a safetensors file, by each of the two that read one.
//!
//! Input: two bytes, the length of what follows the header, then the header. A file of another form
//! is behind two bytes 0xff.
#![no_main]

use std::cell::LazyCell;
use std::path::Path;

use deepwell_fuzz::{BASE_BYTES, Scratch, json, within_memory};
use deepwell_ir::capture::{ModelFolder, Weights};
use deepwell_trainer::quantize_file::{FileFormat, QuantizeFileOptions, dequantize, quantize};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

/// The model that the first seed holds.
const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 4, "hidden_size": 2,
    "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1,
    "tie_word_embeddings": true}"#;

thread_local! {
    static SCRATCH: LazyCell<Scratch> = LazyCell::new(|| {
        let scratch = Scratch::new();
        scratch.write("config.json", CONFIG.as_bytes());
        scratch
    });
}

fuzz_target!(|data: &[u8]| {
    let Some((tail, header)) = data.split_first_chunk::<2>() else { return };
    let file = match u16::from_le_bytes(*tail) {
        u16::MAX => header.to_vec(),
        tail => {
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend_from_slice(header);
            file.resize(file.len() + usize::from(tail), 0);
            file
        }
    };
    let (folder, path, output) = SCRATCH.with(|scratch| {
        let path = scratch.write("model.safetensors", &file);
        (scratch.path(""), path, scratch.path("output.safetensors"))
    });
    within_memory(BASE_BYTES, file.len(), || {
        let _ = ModelFolder::open(&folder);
        if let Ok(weights) = Weights::open(Path::new(&folder)) {
            for tensor in weights.tensors() {
                let _ = weights.read_f32(&tensor.name, &tensor.shape);
            }
        }
        let _ = dequantize(&path, &output, true);
        let format = if tail[0] % 2 == 0 { FileFormat::Mxfp8 } else { FileFormat::Nvfp4 };
        let options = QuantizeFileOptions::new(path, output.clone(), format);
        let _ = quantize(&QuantizeFileOptions { force: true, ..options });
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    json::mutate(data, size, max_size, seed, 2)
});
