//! A precision policy.
#![no_main]

use deepwell_fuzz::{BASE_BYTES, within_memory};
use deepwell_precision::PrecisionPolicy;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    within_memory(BASE_BYTES, data.len(), || {
        let Ok(policy) = PrecisionPolicy::from_toml(text, "policy.toml") else { return };
        let again = PrecisionPolicy::from_toml(&policy.to_toml(), "again").expect("it can be read");
        assert_eq!(again.to_toml(), policy.to_toml());
    });
});
