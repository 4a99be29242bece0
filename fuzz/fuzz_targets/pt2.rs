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
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Deserializer;
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
    let file = entries(data).map_or_else(|| data.to_vec(), |entries| archive(&entries));
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

/// The members of a JSON object with the text of each value, which is not read any further: what
/// reads the archive does that.
fn entries(data: &[u8]) -> Option<Vec<(String, &[u8])>> {
    let mut entries = Vec::new();
    let mut rest = data.strip_prefix(b"{")?;
    loop {
        let name = value::<String>(&mut rest)?.0;
        rest = rest.strip_prefix(b":")?;
        entries.push((name, value::<IgnoredAny>(&mut rest)?.1));
        rest = match rest.split_first()? {
            (b',', rest) => rest,
            (b'}', []) => return Some(entries),
            _ => return None,
        };
    }
}

/// The JSON value that a text begins with, and its own text.
fn value<'d, T: Deserialize<'d>>(rest: &mut &'d [u8]) -> Option<(T, &'d [u8])> {
    let mut values = Deserializer::from_slice(rest).into_iter::<T>();
    let value = values.next()?.ok()?;
    let (text, behind) = rest.split_at(values.byte_offset());
    *rest = behind;
    Some((value, text))
}

fn archive(entries: &[(String, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(Stored);
    for (name, text) in entries {
        let bytes = match text {
            [b'"', ..] => serde_json::from_slice::<String>(text).unwrap_or_default().into_bytes(),
            [b'0'..=b'9', ..] => {
                let count = serde_json::from_slice::<u64>(text).unwrap_or(0);
                vec![0; count.min(1 << 16) as usize]
            }
            text => text.to_vec(),
        };
        // Two files of one name are refused by the writer; the second is left out.
        if zip.start_file(name.as_str(), options).is_ok() {
            zip.write_all(&bytes).expect("memory can be written");
        }
    }
    zip.finish().expect("memory can be written").into_inner()
}
