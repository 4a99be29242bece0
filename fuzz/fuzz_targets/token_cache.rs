//! A file of the token cache, with the checksums of its header and its tokens put right unless the
//! first byte says not to.
#![no_main]

use std::cell::LazyCell;

use deepwell_fuzz::{BASE_BYTES, Scratch, within_memory};
use deepwell_trainer::data::{Key, Split, TokenCache};
use libfuzzer_sys::fuzz_target;

const KEY: Key = [7; 32];
const HEADER_BYTES: usize = 128;

thread_local! {
    static SCRATCH: LazyCell<Scratch> = const { LazyCell::new(Scratch::new) };
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, file)) = data.split_first() else { return };
    let mut file = file.to_vec();
    if mode % 4 > 0 && file.len() >= HEADER_BYTES {
        file[32..64].copy_from_slice(&KEY);
        let hash = blake3::hash(&file[HEADER_BYTES..]);
        file[64..96].copy_from_slice(hash.as_bytes());
        let crc = crc32c::crc32c(&file[..HEADER_BYTES - 4]);
        file[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
    let folder = SCRATCH.with(|scratch| {
        let name = "070707070707070707070707";
        // The other part is the same, with its mark.
        scratch.write(&format!("{name}.train.tokens"), &file);
        if let Some(part) = file.get_mut(28) {
            *part ^= 1;
        }
        if file.len() >= HEADER_BYTES {
            let crc = crc32c::crc32c(&file[..HEADER_BYTES - 4]);
            file[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
        }
        scratch.write(&format!("{name}.heldout.tokens"), &file);
        scratch.path("")
    });
    within_memory(BASE_BYTES, file.len(), || {
        let Ok(cache) = TokenCache::open(&folder, &KEY) else { return };
        let mut tokens = vec![0; cache.len(Split::Train) as usize];
        cache.copy_i32(Split::Train, 0, &mut tokens);
        let _ = cache.check_vocab(256);
    });
});
