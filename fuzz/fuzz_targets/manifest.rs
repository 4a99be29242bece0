//! The manifest of a checkpoint, with a checksum that fits it. Shards of a few bytes are there.
#![no_main]

use std::cell::LazyCell;

use deepwell_fuzz::{BASE_BYTES, Scratch, json, within_memory};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

thread_local! {
    static SCRATCH: LazyCell<Scratch> = LazyCell::new(|| {
        let scratch = Scratch::new();
        scratch.write("a", &[0; 64]);
        scratch.write("b", &[0; 4096]);
        scratch
    });
}

fuzz_target!(|data: &[u8]| {
    let path = SCRATCH.with(|scratch| {
        scratch.write("manifest.json", data);
        let checksum = blake3::hash(data).to_hex();
        scratch.write("manifest.blake3", checksum.as_bytes());
        scratch.path("")
    });
    within_memory(BASE_BYTES, data.len(), || {
        let Ok(checkpoint) = deepwell_ckpt::load(&path) else { return };
        for tensor in checkpoint.tensors() {
            let _ = checkpoint.read(tensor.section, &tensor.name);
        }
        let _ = deepwell_ckpt::verify(&path);
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    json::mutate(data, size, max_size, seed, 0)
});
