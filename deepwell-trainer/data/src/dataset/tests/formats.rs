//! Records, compressed files, conversations, and what is none of them.

use std::io::Write;
use std::sync::Arc as Shared;

use deepwell_ir::ops::IGNORED_TARGET;
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use super::*;

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// A Parquet file with one column of texts, some of them null.
fn parquet_of(column: &str, texts: &[Option<&str>]) -> Vec<u8> {
    let schema = format!("message rows {{ optional binary {column} (UTF8); }}");
    let schema = Shared::new(parse_message_type(&schema).unwrap());
    let properties =
        WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
    let mut file = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut file, schema, Shared::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut values = group.next_column().unwrap().unwrap();
    let levels: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
    let bytes: Vec<ByteArray> = texts.iter().flatten().map(|text| ByteArray::from(*text)).collect();
    values.typed::<ByteArrayType>().write_batch(&bytes, Some(&levels), None).unwrap();
    values.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    file
}

/// All tokens of a data set as text, of bytes.
fn whole(folder: &Path, name: &str, content: &[u8], field: Option<&str>) -> Result<String, String> {
    write(folder, &[(name, content)]);
    let mut options = options(folder, &[name]);
    options.holds_out_all = true;
    options.text_field = field.map(str::to_owned);
    let dataset = Dataset::prepare(&options, &mut |_| {});
    let dataset = dataset.map_err(|error| error.to_string())?;
    assert_eq!(dataset.tokens().len(Split::Train), 0);
    Ok(text(&dataset, Split::Heldout).replace('\0', "|"))
}

/// JSON lines were trained on with braces and keys.
#[test]
fn issue_31_records_are_read_as_documents() {
    let folder = tempfile::tempdir().unwrap();
    let lines =
        "{\"text\": \"deep\\nwell\", \"id\": 1}\n\n{\"text\": \"water\"}\r\n{\"text\": \"\"}\n";
    let list = "[{\"text\": \"deep\\nwell\"},\n {\"text\": \"water\"}]";
    let expected = "deep\nwell|water|";
    let zstd = zstd::encode_all(lines.as_bytes(), 1).unwrap();
    let parquet = parquet_of("text", &[Some("deep\nwell"), Some("water"), Some("")]);
    for (name, content) in [
        ("a.jsonl", lines.as_bytes()),
        ("b.ndjson", lines.as_bytes()),
        ("c.jsonl.gz", &gzip(lines.as_bytes())),
        ("d.JSONL.ZST", &zstd),
        ("e.json", list.as_bytes()),
        ("f.json", lines.as_bytes()),
        ("g.parquet", &parquet),
        ("h.bin.parquet", &parquet),
    ] {
        assert_eq!(whole(folder.path(), name, content, None).as_deref(), Ok(expected), "{name}");
    }
    let body = "{\"body\": \"deep\", \"text\": \"no\"}\n{\"body\": \"well\"}\n";
    let of_body = whole(folder.path(), "i.jsonl", body.as_bytes(), Some("body"));
    assert_eq!(of_body.as_deref(), Ok("deep|well|"));
    let column = parquet_of("body", &[Some("deep"), Some("well")]);
    let of_column = whole(folder.path(), "j.parquet", &column, Some("body"));
    assert_eq!(of_column.as_deref(), Ok("deep|well|"));
    let text = b"deep well".as_slice();
    assert_eq!(whole(folder.path(), "k.txt.gz", &gzip(text), None).as_deref(), Ok("deep well"));
    let zstd = zstd::encode_all(text, 1).unwrap();
    assert_eq!(whole(folder.path(), "l.txt.zst", &zstd, None).as_deref(), Ok("deep well"));
    // Two members, as `cat a.gz b.gz` makes them.
    let two = [gzip(b"deep"), gzip(b" well")].concat();
    assert_eq!(whole(folder.path(), "m.gz", &two, None).as_deref(), Ok("deep well"));
}

#[test]
fn what_is_no_text_is_refused_by_its_name() {
    let check = |name: &str, content: &[u8], expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        let message = whole(folder.path(), name, content, None).unwrap_err();
        let message = message.replace(&format!("{}/", folder.path().display()), "");
        assert!(message.contains(&format!("`{name}`")), "{message}");
        assert!(message.contains(expected), "{name}: {message}");
        // In a folder it is passed over by its name.
        write(folder.path(), &[(&format!("d/{name}"), content), ("d/z.txt", b"deep well")]);
        let dataset = Dataset::prepare(&options(folder.path(), &["d"]), &mut |_| {});
        if let Ok(dataset) = dataset {
            let skipped = dataset.summary().skipped.to_string();
            assert!(skipped.contains(&format!("`d/{name}`")), "{skipped}");
        } else {
            assert!(name.ends_with("jsonl") || name.ends_with("parquet"), "{name} {dataset:?}");
        }
    };
    check("a.zip", b"PK\x03\x04\x14\0\0\0", "a zip archive\nhint: unpack it");
    check("a.docx", b"PK\x03\x04\x14\0\0\0", "a zip archive");
    check("a.csv", b"text,label\na,1\n", "a table (CSV)\nhint: save its text column");
    check("a.txt", b"%PDF-1.7 x", "a PDF file");
    check("a.dat", b"ab\0c", "not text: it holds a byte 0 at offset 2");
    check("a.npy", b"\x93NUMPY\x01\0", "a NumPy array");
    check("a.csv.gz", &gzip(b"text,label\na,1\n"), "a table (CSV)");
    let mut tar = vec![b'a'; 257];
    tar.extend(b"ustar\x0000");
    check("a.tar.gz", &gzip(&tar), "a tar archive");
    check("b.jsonl", b"{\"code\": \"x\", \"id\": 1}\n", "got the fields `code`, `id`");
    check("c.jsonl", b"{\"text\": \"x\"}\n{\"text\": \n", "line 2: EOF while parsing");
    check("d.jsonl", b"{\"text\": \"\xff\"}\n", "line 1: invalid unicode");
    check("e.parquet", &parquet_of("body", &[Some("x")]), "got the field `body`");
    check("f.parquet", &parquet_of("text", &[Some("x"), None]), "row 2: expected a text");
    check("g.parquet", b"PAR1 and no more", "Parquet");
}

#[test]
fn a_damaged_file_under_a_decompressor_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut content = gzip(&b"deep well ".repeat(1000));
    content.truncate(content.len() - 9);
    let message = whole(folder.path(), "a.txt.gz", &content, None).unwrap_err();
    assert!(message.contains("cannot read") && message.contains("a.txt.gz"), "{message}");
}

#[test]
fn a_byte_that_is_no_utf_8_is_named_by_its_offset() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::from_file(&write_word_level(folder.path())).unwrap();
    let mut content = b"deep well\r\n".repeat(200_000);
    content[2_000_001] = 0xe9;
    write(folder.path(), &[("latin1.txt", &content)]);
    let options = DataOptions { tokenizer, ..options(folder.path(), &["latin1.txt"]) };
    let message = Dataset::prepare(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(message.contains("see the byte at offset 2000001"), "{message}");
}

#[test]
fn whole_records_are_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<String> = (0..40).map(|i| format!("{{\"text\": \"<{i:02}>\"}}\n")).collect();
    write(folder.path(), &[("a.jsonl", lines.concat().as_bytes())]);
    let mut options = options(folder.path(), &["a.jsonl"]);
    for (least, heldout) in [(0, 2), (14, 3), (1_000_000, 20)] {
        options.heldout_tokens_min = least;
        let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
        let parts = [Split::Train, Split::Heldout].map(|split| text(&dataset, split));
        let [train, held] = parts.each_ref().map(|part| part.split_terminator('\0').count());
        assert_eq!((train, held), (40 - heldout, heldout), "{least}");
        let mut records: Vec<&str> =
            parts.iter().flat_map(|part| part.split_terminator('\0')).collect();
        records.sort_unstable();
        assert!(records.into_iter().eq((0..40).map(|i| format!("<{i:02}>"))), "{least}");
        let summary = dataset.summary();
        assert_eq!((summary.files, summary.records), (1, Some(40)));
        assert_eq!(summary.files_heldout, heldout as u64);
    }
}

#[test]
fn data_to_evaluate_on_is_held_out_whole() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("a.txt", b"deep well"), ("b.txt", b"water"), ("d/c.txt", b"sea")]);
    let mut options = options(folder.path(), &["a.txt", "b.txt"]);
    options.heldout_inputs = vec![folder.path().join("d"), folder.path().join("b.txt")];
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    assert_eq!(text(&dataset, Split::Train), "deep well\0");
    assert_eq!(text(&dataset, Split::Heldout), "water\0sea\0");
}

#[test]
fn answers_alone_are_targets() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_word_level(folder.path());
    let template = "{% for m in messages %}{{ 'let ' if m.role == 'user' else 'deep ' }}\
        {{ m.content }} {% endfor %}{% if add_generation_prompt %}deep {% endif %}";
    let config = serde_json::json!({"eos_token": "</s>", "chat_template": template});
    write(folder.path(), &[("tokenizer_config.json", config.to_string().as_bytes())]);
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let record = serde_json::json!({"messages": [
        message("user", "water"), message("assistant", "well water"),
        message("user", "well"), message("assistant", "water")]});
    let second = serde_json::json!({"text": "let water"});
    let lines = format!("{record}\n{second}\n");
    write(folder.path(), &[("a.jsonl", lines.as_bytes())]);
    let mut options = options(folder.path(), &["a.jsonl"]);
    options.holds_out_all = true;
    options.tokenizer = Tokenizer::from_file(&tokenizer).unwrap();
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    // let 1, well 2, deep 3, water 4, </s> 5.
    assert_eq!(all(&dataset, Split::Heldout), [1, 4, 3, 2, 4, 1, 2, 3, 4, 5, 1, 4, 5]);
    let mut targets = [0; 13];
    dataset.tokens().copy_targets(Split::Heldout, 0, &mut targets);
    let none = IGNORED_TARGET;
    assert_eq!(targets, [none, none, none, 2, 4, none, none, none, 4, none, 1, 4, 5]);
    let summary = dataset.summary();
    assert_eq!((summary.conversations, summary.targets_heldout), (Some(1), 6));

    // Another template makes other tokens: the cache of the first is not taken.
    write(folder.path(), &[("chat_template.jinja", b"{{ messages[-1].content }}")]);
    options.tokenizer = Tokenizer::from_file(&tokenizer).unwrap();
    let message = Dataset::prepare(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(message.contains("line 1: the chat template: the template renders"), "{message}");

    options.tokenizer = Tokenizer::bytes();
    let message = Dataset::prepare(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(message.contains("need a tokenizer with a chat template"), "{message}");
}
