//! A Hugging Face `tokenizer.json`, and what it makes of a text.
#![no_main]

use std::cell::LazyCell;

use deepwell_fuzz::{BASE_BYTES, Scratch, json, within_memory};
use deepwell_trainer::data::Tokenizer;
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

thread_local! {
    static SCRATCH: LazyCell<Scratch> = const { LazyCell::new(Scratch::new) };
}

// The library that reads them panics on some, which is caught and must not end the process at once.
// A panic that is not caught still does.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |data: &[u8]| {
    let path = SCRATCH.with(|scratch| scratch.write("tokenizer.json", data));
    within_memory(BASE_BYTES, data.len(), || {
        let Ok(tokenizer) = Tokenizer::from_file(&path) else { return };
        let Ok(tokens) = tokenizer.encode_prompt("Hello  wörld 123\n") else { return };
        let mut stream = tokenizer.text_stream(&tokens);
        for token in tokens {
            let _ = stream.push(token);
        }
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    json::mutate(data, size, max_size, seed, 0)
});
