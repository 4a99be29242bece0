//! `config.json` of a Hugging Face model.
#![no_main]

use deepwell_fuzz::{BASE_BYTES, json, within_memory};
use deepwell_ir::capture::ModelConfig;
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    within_memory(BASE_BYTES, data.len(), || {
        let Ok((config, _)) = ModelConfig::from_json(text, "config.json") else { return };
        // Models of many layers are as they should be, but slow to look at.
        if config.num_layers() <= 4 {
            let count = config.parameter_count();
            if let Ok(graph) = config.capture(None) {
                assert_eq!(graph.parameter_count(), count);
            }
            let written = config.to_json().to_string();
            let (again, _) = ModelConfig::from_json(&written, "again").expect("it can be read");
            assert_eq!(again, config);
        }
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    json::mutate(data, size, max_size, seed, 0)
});
