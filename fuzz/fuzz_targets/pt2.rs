//! An archive of `torch.export.save`.
//!
//! Input: a JSON object with what is in each file of the archive: an object is written as JSON, a
//! number is so many zeros, a text is itself. What is not such an object is an archive.
#![no_main]

use std::cell::LazyCell;
use std::io::{Cursor, Write};

use deepwell_fuzz::{Scratch, json, within_memory};
use deepwell_ir::capture::Pt2Model;
use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use serde_json::{Map, Value};
use zip::CompressionMethod::Stored;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// Masks of positions are worked out up to 512 MiB whatever the input; the next is then being made
/// from two that are broadcast.
const BASE_BYTES: usize = 1 << 30;

thread_local! {
    static SCRATCH: LazyCell<Scratch> = const { LazyCell::new(Scratch::new) };
}

fuzz_target!(|data: &[u8]| {
    let file = match serde_json::from_slice::<Map<String, Value>>(data) {
        Ok(entries) => archive(&entries),
        Err(_) => data.to_vec(),
    };
    let path = SCRATCH.with(|scratch| scratch.write("model.pt2", &file));
    within_memory(BASE_BYTES, file.len(), || {
        let Ok(mut model) = Pt2Model::open(&path) else { return };
        let names: Vec<String> = model.graph.parameters().map(|(_, t)| t.name.clone()).collect();
        for name in names {
            let _ = model.read(&name);
        }
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    json::mutate(data, size, max_size, seed, 0)
});

fn archive(entries: &Map<String, Value>) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(Stored);
    for (name, value) in entries {
        let bytes = match value {
            Value::Number(bytes) => vec![0; bytes.as_u64().unwrap_or(0).min(1 << 16) as usize],
            Value::String(text) => text.clone().into_bytes(),
            value => value.to_string().into_bytes(),
        };
        // Two files of one name are refused by the writer; the second is left out.
        if zip.start_file(name.as_str(), options).is_ok() {
            zip.write_all(&bytes).expect("memory can be written");
        }
    }
    zip.finish().expect("memory can be written").into_inner()
}
