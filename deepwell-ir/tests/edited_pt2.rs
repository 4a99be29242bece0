//! Archives that somebody has edited: none ends the process, none takes memory that its bytes do
//! not warrant. Each row was a panic, an abort or a stack overflow once.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use deepwell_ir::capture::{CaptureError, Pt2Model};
use serde_json::{Value, json};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

const MODEL: &str = "sine/models/model.json";
const WEIGHTS: &str = "sine/data/weights/model_weights_config.json";

/// Opens the archive of `sine` with one of its JSON files changed, and reads all of its tensors.
fn open_edited(file: &str, edit: impl FnOnce(&mut Value)) -> Result<(), CaptureError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pt2/sine.pt2");
    let mut source = ZipArchive::new(File::open(path).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("edited.pt2");
    let mut target = ZipWriter::new(File::create(&path).unwrap());
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut edit = Some(edit);
    for index in 0..source.len() {
        let mut entry = source.by_index(index).unwrap();
        let name = entry.name().unwrap().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        if name == file {
            let mut value = serde_json::from_slice(&bytes).unwrap();
            (edit.take().unwrap())(&mut value);
            bytes = serde_json::to_vec(&value).unwrap();
        }
        target.start_file(name, options).unwrap();
        target.write_all(&bytes).unwrap();
    }
    target.finish().unwrap();
    assert!(edit.is_none(), "{file} is not in the archive");
    let mut model = Pt2Model::open(&path)?;
    let names: Vec<String> = model.graph.parameters().map(|(_, t)| t.name.clone()).collect();
    names.iter().try_for_each(|name| model.read(name).map(drop))
}

fn ints(list: &[i64]) -> Value {
    list.iter().map(|size| json!({ "as_int": size })).collect()
}

#[test]
fn stored_tensors_that_are_not_there_are_errors() {
    for (sizes, strides, offset, expected) in [
        ([1 << 40, 32], [0, 1], 0, "at most of one that repeats the 3072"),
        ([1 << 32, 1 << 32], [0, 0], 0, "`table.weight`"),
        ([96, 32], [1 << 62, 1], 0, "`table.weight`"),
        ([96, 32], [32, 1], i64::MAX, "bytes in `data/weights/weight_0`, got"),
        ([96, 32], [32, 1], 1 << 50, "bytes in `data/weights/weight_0`, got"),
        ([0, 32], [32, 1], 0, "`table.weight`"),
        ([96, -1], [32, 1], 0, "`table.weight`"),
    ] {
        let refused = open_edited(WEIGHTS, |table| {
            let meta = &mut table["config"]["table.weight"]["tensor_meta"];
            meta["sizes"] = ints(&sizes);
            meta["strides"] = ints(&strides);
            meta["storage_offset"] = json!({ "as_int": offset });
        });
        let error = refused.expect_err(expected).to_string();
        assert!(error.contains(expected), "expected `{expected}` in: {error}");
    }
}

fn tensor(name: &str) -> Value {
    json!({ "as_tensor": { "name": name } })
}

fn sizes(list: &[i64]) -> Value {
    json!({ "as_ints": list })
}

fn int(value: i64) -> Value {
    json!({ "as_int": value })
}

/// A call of the graph that gives tensors of these names.
fn call(op: &str, args: &[(&str, Value)], outputs: &[&str]) -> Value {
    let inputs: Vec<Value> =
        args.iter().map(|(name, arg)| json!({ "name": name, "arg": arg, "kind": 1 })).collect();
    let outputs: Vec<Value> = outputs.iter().map(|name| tensor(name)).collect();
    json!({
        "target": format!("torch.ops.aten.{op}.default"),
        "inputs": inputs, "outputs": outputs, "metadata": {},
    })
}

/// A tensor of ones.
fn full(size: &[i64], name: &str) -> Value {
    call("full", &[("size", sizes(size)), ("fill_value", int(1))], &[name])
}

/// The graph is taken as it is, whatever these calls before its own make of sizes.
fn check(what: &str, calls: &[Value]) {
    let opened = open_edited(MODEL, |model| {
        let nodes = model["graph_module"]["graph"]["nodes"].as_array_mut().unwrap();
        nodes.splice(0..0, calls.iter().cloned());
    });
    assert!(opened.is_ok(), "{what}: {opened:?}");
}

#[test]
fn values_of_impossible_sizes_are_not_worked_out() {
    const HUGE: i64 = 1 << 62;
    let joined = json!({ "as_tensors": [{ "name": "a" }, { "name": "b" }] });
    check("elements that wrap around", &[full(&[HUGE, HUGE, 4], "a")]);
    check(
        "empty, with strides that wrap around",
        &[
            full(&[0, HUGE, HUGE], "a"),
            call("permute", &[("self", tensor("a")), ("dims", sizes(&[2, 1, 0]))], &["b"]),
        ],
    );
    check(
        "a product larger than memory",
        &[
            full(&[1 << 20, 1], "a"),
            full(&[1, 1 << 20], "b"),
            call("mm", &[("self", tensor("a")), ("mat2", tensor("b"))], &["c"]),
        ],
    );
    check(
        "parts of other ranks",
        &[
            full(&[2, 2], "a"),
            full(&[2], "b"),
            call("cat", &[("tensors", joined), ("dim", int(1))], &["c"]),
        ],
    );
    check(
        "empty and wrapping when reshaped",
        &[
            full(&[0], "a"),
            call("view", &[("self", tensor("a")), ("size", sizes(&[HUGE, 0, HUGE]))], &["b"]),
        ],
    );
}

#[test]
fn views_of_impossible_sizes_are_no_views() {
    let of = |op: &str, args: &[(&str, Value)], outputs: &[&str]| {
        let mut all = vec![("self", tensor("p_table_weight"))];
        all.extend(args.iter().cloned());
        check(op, &[call(op, &all, outputs)]);
    };
    of("select", &[("dim", int(0)), ("index", int(i64::MAX))], &["a"]);
    of("split", &[("split_size", int(i64::MAX)), ("dim", int(0))], &["a", "b"]);
    let parts = sizes(&[1, i64::MAX, i64::MAX]);
    of("split_with_sizes", &[("split_sizes", parts), ("dim", int(0))], &["a", "b", "c"]);
    of("chunk", &[("chunks", int(i64::MAX)), ("dim", int(0))], &["a"]);
    of("flatten", &[("start_dim", int(1)), ("end_dim", int(0))], &["a"]);
    of("repeat_interleave", &[("repeats", int(i64::MAX)), ("dim", int(0))], &["a"]);
    of("expand", &[("size", sizes(&[1 << 62, 4, 96, 32]))], &["a"]);
    of("view", &[("size", sizes(&[1 << 62, 4]))], &["a"]);
}

#[test]
fn unknown_calls_on_each_other_do_not_exhaust_the_stack() {
    // A test's stack is 2 MiB, and a call within a call took more than 1 KiB of it.
    let links = 3000;
    let opened = open_edited(MODEL, |model| {
        let module = &mut model["graph_module"];
        let last = format!("link{links}");
        module["signature"]["output_specs"] = json!([{ "user_output": { "arg": tensor(&last) } }]);
        let nodes = module["graph"]["nodes"].as_array_mut().unwrap();
        for link in 1..=links {
            let before = if link == 1 { "sin".to_string() } else { format!("link{}", link - 1) };
            let name = format!("link{link}");
            nodes.push(call("cosh", &[("self", tensor(&before))], &[&name]));
        }
    });
    assert!(opened.is_ok(), "{opened:?}");
}
