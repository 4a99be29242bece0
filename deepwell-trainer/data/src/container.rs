//! Container formats of text: reading these files as plain text would train on the container.

/// Returns the format of an unsupported file that starts with `start`, with a hint; `name` is in
/// lower case.
pub(crate) fn known(name: &str, start: &[u8]) -> Option<(&'static str, &'static str)> {
    let by_start = SIGNS
        .iter()
        .find(|sign| start.get(sign.offset..).is_some_and(|start| start.starts_with(sign.bytes)));
    if let Some(sign) = by_start {
        return Some((sign.format, sign.hint));
    }
    let is_pickle = matches!(start, [0x80, 2..=5, ..]);
    if is_pickle {
        return Some(("a Python pickle", SAVE_TEXT));
    }
    let is_safetensors = start.len() > 8 && start[8] == b'{' && start[4..8] == [0; 4];
    if is_safetensors {
        return Some(("a safetensors file", "`--model` takes weights; `--data` takes text"));
    }
    let ending = name.rsplit_once('.').map(|(_, ending)| ending)?;
    let (_, format, hint) = ENDINGS.iter().find(|(known, _, _)| *known == ending)?;
    Some((format, hint))
}

struct Sign {
    offset: usize,
    bytes: &'static [u8],
    format: &'static str,
    hint: &'static str,
}

const fn sign(bytes: &'static [u8], format: &'static str, hint: &'static str) -> Sign {
    Sign { offset: 0, bytes, format, hint }
}

const DECOMPRESS: &str = "decompress it; `.gz` and `.zst` are read as they are";
const UNPACK: &str = "unpack it and give the folder";
const SAVE_TEXT: &str = "save the text as `.txt`, `.jsonl` or `.parquet`";
const PARQUET: &str = "`datasets` writes Parquet with `to_parquet`, which is read";
const SAVE_TOKENS: &str = "token files of llm.c (`.bin` with its header) are read";

const SIGNS: [Sign; 22] = [
    sign(b"PK\x03\x04", "a zip archive", UNPACK),
    sign(b"PK\x05\x06", "a zip archive", UNPACK),
    Sign { offset: 257, bytes: b"ustar", format: "a tar archive", hint: UNPACK },
    sign(b"\xfd7zXZ\0", "an xz file", DECOMPRESS),
    Sign { offset: 4, bytes: b"1AY&SY", format: "a bzip2 file", hint: DECOMPRESS },
    sign(b"\x04\x22\x4d\x18", "an lz4 file", DECOMPRESS),
    sign(b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    sign(b"Rar!\x1a\x07", "a rar archive", UNPACK),
    sign(b"ARROW1\0\0", "an Arrow file", PARQUET),
    sign(b"\xff\xff\xff\xff", "an Arrow stream", PARQUET),
    sign(b"FEA1", "a Feather file", PARQUET),
    sign(b"Obj\x01", "an Avro file", SAVE_TEXT),
    sign(b"\x93NUMPY", "a NumPy array", SAVE_TOKENS),
    sign(b"\x89HDF\r\n\x1a\n", "an HDF5 file", SAVE_TEXT),
    sign(b"SQLite format 3\0", "an SQLite database", SAVE_TEXT),
    sign(b"%PDF-", "a PDF file", "extract the text, for example with `pdftotext`"),
    sign(b"{\\rtf", "an RTF file", SAVE_TEXT),
    sign(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file", SAVE_TEXT),
    sign(b"GGUF\x03\0\0\0", "a GGUF file", "`--model` takes weights; `--data` takes text"),
    sign(b"DWTOKENS", "a file of the token cache", "give the text that it was made of"),
    sign(b"MMIDIDX\0", "an index of Megatron's token files", SAVE_TOKENS),
    sign(b"\x7fELF", "a program", "give text"),
];

/// Formats without a magic number.
const ENDINGS: [(&str, &str, &str); 8] = [
    ("orc", "an ORC file", PARQUET),
    ("csv", "a table (CSV)", TABLE),
    ("tsv", "a table (TSV)", TABLE),
    ("pkl", "a Python pickle", SAVE_TEXT),
    ("npy", "a NumPy array", SAVE_TOKENS),
    ("npz", "NumPy arrays", SAVE_TOKENS),
    ("arrow", "an Arrow file", PARQUET),
    ("feather", "a Feather file", PARQUET),
];

const TABLE: &str =
    "save its text column as `.jsonl` or `.parquet`, or rename it to `.txt` to train on the table";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_known_by_their_start_or_ending() {
        let check = |name: &str, start: &[u8], expected: Option<&str>| {
            assert_eq!(known(name, start).map(|(format, _)| format), expected, "{name}");
        };
        check("a.txt", b"once upon a time", None);
        check("a", b"PK\x03\x04\x14\0", Some("a zip archive"));
        check("report.docx", b"PK\x03\x04\x14\0", Some("a zip archive"));
        let mut tar = vec![b'a'; 257];
        tar.extend(b"ustar\x0000");
        check("a.txt", &tar, Some("a tar archive"));
        check("a.txt", &tar[..260], None);
        check("x.pkl", b"\x80\x04\x95", Some("a Python pickle"));
        check("x.pkl", b"(lp0", Some("a Python pickle"));
        check("m", b"\x40\0\0\0\0\0\0\0{\"a\"", Some("a safetensors file"));
        check("a.csv", b"text,label\n", Some("a table (CSV)"));
        check("a.txt", b"text,label\n", None);
        check("a.pdf", b"%PDF-1.7", Some("a PDF file"));
        check("PKG", b"PKG", None);
    }
}
