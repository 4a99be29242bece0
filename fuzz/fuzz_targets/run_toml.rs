//! The settings of a run.
#![no_main]

use deepwell_fuzz::{BASE_BYTES, within_memory};
use deepwell_trainer::Settings;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = within_memory(BASE_BYTES, data.len(), || Settings::from_toml(text, "run.toml"));
});
