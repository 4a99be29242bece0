//! A token file as llm.c writes it.
//!
//! Input: the first three fields of the header, then the tokens.
#![no_main]

use std::path::Path;

use deepwell_fuzz::{BASE_BYTES, within_memory};
use deepwell_trainer::data::bin::{HEADER_BYTES, decode, has_magic, parse_header};
use libfuzzer_sys::fuzz_target;

const FIELDS_BYTES: usize = 12;

fuzz_target!(|data: &[u8]| {
    let (fields, tokens) = data.split_at(FIELDS_BYTES.min(data.len()));
    let mut file = fields.to_vec();
    if file.len() == FIELDS_BYTES {
        file.resize(HEADER_BYTES as usize, 0);
        file.extend_from_slice(tokens);
    }
    within_memory(BASE_BYTES, file.len(), || {
        let Ok(header) = parse_header(Path::new("a.bin"), &file, file.len() as u64) else { return };
        assert!(has_magic(&file));
        let tokens = decode(&file[HEADER_BYTES as usize..], header.width);
        assert_eq!(tokens.len() as u64, header.tokens);
    });
});
