//! PTX text: parsed, and every kernel decoded.
#![no_main]

use deepwell_emulator::decode::{GlobalAddresses, decode, global_images, global_variables};
use deepwell_emulator::ptx::parse;
use deepwell_fuzz::{BASE_BYTES, within_memory};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    within_memory(BASE_BYTES, data.len(), || {
        let Ok(module) = parse(text) else { return };
        let variables = global_variables(&module);
        let bytes: u64 = variables.iter().map(|variable| variable.bytes).sum();
        let addresses: GlobalAddresses =
            variables.into_iter().map(|variable| (variable.name, 4096)).collect();
        // Whoever loads a module has to give its variables the memory that they declare.
        if bytes <= BASE_BYTES as u64 / 2 {
            let _ = global_images(&module, &addresses);
        }
        for kernel in module.kernels() {
            let _ = decode(&module, &kernel.name, &addresses);
        }
    });
});
