//! Models that PyTorch exported (`scripts/make_pt2_fixtures.py`), and archives that are broken.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use deepwell_ir::capture::{OpaqueCall, Pt2Model};
use deepwell_ir::{Graph, Op, Tag, differentiate};
use zip::read::{ArchiveOffset, Config};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pt2").join(format!("{name}.pt2"))
}

fn open(name: &str) -> Pt2Model {
    Pt2Model::open(fixture(name)).unwrap()
}

fn tags(graph: &Graph) -> String {
    let mut tags: BTreeMap<String, usize> = BTreeMap::new();
    for node in &graph.nodes {
        *tags.entry(node.tag.to_string()).or_insert(0) += 1;
    }
    let parts: Vec<String> =
        tags.into_iter().map(|(tag, count)| format!("{tag} {count}")).collect();
    parts.join(" ")
}

/// Counts are sums over the sizes in the script: vocabulary 96, width 32, 4 heads of 8 on 2 of keys
/// and values (of 16 in qwen3), feed-forward 48; GPT-2 with 32 positions and feed-forward 128.
#[test]
fn exported_models_are_graphs_of_known_ops() {
    let llama_layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32;
    let llama = |layers: u64| 2 * 96 * 32 + 32 + layers * llama_layer;
    let biases = 2 * 32 + 2 * 16 + 2 * 48 + 32;
    let qwen3_layer = 2 * 64 * 32 + 2 * 32 * 32 + 2 * 16 + 3 * 48 * 32 + 2 * 32;
    let gpt2_layer = 4 * 32 * 32 + 4 * 32 + 2 * 128 * 32 + 128 + 32 + 4 * 32;
    let gpt2 = |layers: u64| 96 * 32 + 32 * 32 + 2 * 32 + layers * gpt2_layer;
    let one_layer = "attn 8 embed 1 head 1 mlp 5 norm 3";
    for (name, count, expected) in [
        ("llama", llama(2), "attn 16 embed 1 head 1 mlp 10 norm 5"),
        ("llama_core", llama(1), one_layer),
        ("llama_eager", llama(1), one_layer),
        ("llama_scaled", llama(1) + biases, one_layer),
        ("mistral", llama(1), one_layer),
        ("qwen3", 2 * 96 * 32 + 32 + qwen3_layer, "attn 8 embed 1 head 1 mlp 5 norm 5"),
        ("gpt2", gpt2(2), "attn 12 embed 2 head 1 mlp 8 norm 5"),
        ("gpt2_core", gpt2(1), "attn 6 embed 2 head 1 mlp 4 norm 3"),
    ] {
        let model = open(name);
        assert_eq!(model.opaque(), [], "{name}");
        assert_eq!(model.remarks, Vec::<String>::new(), "{name}");
        assert_eq!(model.exported_for, (2, 12), "{name}");
        assert_eq!(model.graph.name, name);
        assert_eq!(model.graph.parameter_count(), count, "{name}");
        assert_eq!(tags(&model.graph), expected, "{name}");
        assert_eq!(Graph::from_json(&model.graph.to_json()).unwrap(), model.graph, "{name}");
        let layers = model.graph.nodes.iter().filter_map(|node| node.layer).max().unwrap() + 1;
        assert_eq!(layers, if matches!(name, "llama" | "gpt2") { 2 } else { 1 }, "{name}");
        differentiate(&model.graph).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// Phi-3 stores the projections of attention, and gate and up, in one tensor each; `maskfill` has
/// attention as GEMMs around a masked softmax, and `maskcore` is the same in Core ATen. Sizes are
/// those of the test above.
#[test]
fn fused_projections_and_masked_softmax_are_found_and_counted_once() {
    let phi3 = 2 * 96 * 32 + 32 + 64 * 32 + 32 * 32 + 96 * 32 + 48 * 32 + 2 * 32;
    let by_hand = 2 * 96 * 32 + 32 * 32 + 2 * 32 + 96 * 32 + 96 + 32 * 32 + 32;
    for (name, count, expected, row, attention) in [
        ("phi3", phi3, "attn 8 embed 1 head 1 mlp 5 norm 3", 0, (4, 2)),
        ("maskfill", by_hand, "attn 6 embed 2 head 1 norm 1", 3, (4, 4)),
        ("maskcore", by_hand, "attn 6 embed 2 head 1 norm 1", 3, (4, 4)),
    ] {
        let model = open(name);
        assert_eq!(model.opaque(), [], "{name}");
        assert_eq!(model.graph.parameter_count(), count, "{name}");
        assert_eq!(tags(&model.graph), expected, "{name}");
        assert_eq!(model.remarks, [""; 0], "{name}");
        let padding = model.graph.nodes.iter().find_map(|node| match &node.op {
            Op::Embedding(op) => op.padding,
            _ => None,
        });
        assert_eq!(padding, Some(row), "{name}");
        let heads = model.graph.nodes.iter().find_map(|node| match &node.op {
            Op::Attention(op) => Some(op.heads.clone()),
            _ => None,
        });
        let heads = heads.unwrap();
        assert_eq!((heads.heads, heads.kv_heads), attention, "{name}");
        assert!(heads.causal && (heads.scale - 8f64.powf(-0.5)).abs() < 1e-7, "{name}: {heads:?}");
    }
}

/// `nn.TransformerEncoder` and `nn.MultiheadAttention`, by sequences and by tokens first, with a
/// mask, with `is_causal` and with neither, asked for weights and not: width 16, 2 heads of 8,
/// feed-forward 24, vocabulary 32, 32 positions.
#[test]
fn modules_of_pytorch_are_graphs_of_known_ops() {
    let attention = 48 * 16 + 48 + 16 * 16 + 16;
    let encoder = 2 * 32 * 16 + attention + 2 * 24 * 16 + 24 + 16 + 4 * 16 + 32 * 16;
    let block = 32 * 16 + 2 * 16 + attention + 32 * 16;
    for (name, count, expected, activation, causal) in [
        ("encoder", encoder, "attn 6 embed 2 head 1 mlp 4 norm 2", Some("relu"), true),
        ("encoder_both_ways", encoder, "attn 6 embed 2 head 1 mlp 4 norm 2", Some("gelu"), false),
        ("mha", block, "attn 6 embed 1 head 1 norm 1", None, true),
        ("mha_core", block, "attn 6 embed 1 head 1 norm 1", None, true),
    ] {
        let model = open(name);
        assert_eq!(model.opaque(), [], "{name}");
        assert_eq!(model.remarks, [""; 0], "{name}");
        assert_eq!(model.graph.parameter_count(), count, "{name}");
        assert_eq!(tags(&model.graph), expected, "{name}");
        let activations = model.graph.nodes.iter().map(|node| node.op.name().to_string());
        let activations: Vec<String> =
            activations.filter(|name| ["relu", "gelu"].contains(&name.as_str())).collect();
        assert_eq!(activations, Vec::from_iter(activation), "{name}");
        let heads = model.graph.nodes.iter().find_map(|node| match &node.op {
            Op::Attention(op) => Some(op.heads.clone()),
            _ => None,
        });
        let heads = heads.unwrap();
        assert_eq!((heads.heads, heads.head_dim, heads.causal), (2, 8, causal), "{name}");
        assert!((heads.scale - 8f64.powf(-0.5)).abs() < 1e-7, "{name}: {heads:?}");
        differentiate(&model.graph).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// The mask of `maskfill` as the file has it, but with another triangle: not causal.
#[test]
fn a_mask_that_is_none_of_the_known_is_no_attention() {
    let mut all = entries("maskfill");
    let table = all.iter().find(|entry| entry.0 == "data/weights/model_weights_config.json");
    let table: serde_json::Value = serde_json::from_slice(&table.unwrap().1).unwrap();
    let file = table["config"]["mask"]["path_name"].as_str().unwrap().to_string();
    let mask = all.iter_mut().find(|entry| entry.0 == format!("data/weights/{file}")).unwrap();
    // Row 2 no longer sees column 1.
    mask.1[(2 * 32 + 1) * 4..][..4].copy_from_slice(&0f32.to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    let model = Pt2Model::open(written(&folder, "model", &all)).unwrap();
    let targets: Vec<String> = model.opaque().into_iter().map(|call| call.target).collect();
    assert!(targets.contains(&"aten.masked_fill.Scalar".to_string()), "{targets:?}");
}

#[test]
fn parameters_that_pytorch_would_not_train_are_named() {
    assert_eq!(open("maskfill").frozen, Vec::<String>::new());
    assert_eq!(open("maskcore").frozen, ["positions.weight"]);
    // Of a tensor that is several parameters here, each is.
    let mut all = entries("gpt2_core");
    let graph = all.iter_mut().find(|entry| entry.0 == "models/model.json").unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&graph.1).unwrap();
    let name = "p_transformer_h_0_attn_c_attn_weight";
    let flag = &mut json["graph_module"]["graph"]["tensor_values"][name]["requires_grad"];
    assert_eq!(std::mem::replace(flag, false.into()), true);
    graph.1 = serde_json::to_vec(&json).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let model = Pt2Model::open(written(&folder, "model", &all)).unwrap();
    let parts = ["q", "k", "v"].map(|part| format!("transformer.h.0.attn.c_attn.{part}.weight"));
    assert_eq!(model.frozen, parts);
}

/// PyTorch writes the 76 bytes of ZIP64 records between the list of entries and the end, whether
/// needed or not. Left to itself, the zip crate then looks for the list 76 bytes too late, and
/// believes what it finds there if the first line of the list has 76 bytes: with a name of eight
/// letters, as `maskfill` has.
#[test]
fn an_archive_begins_where_its_file_begins() {
    let bytes = std::fs::read(fixture("maskfill")).unwrap();
    let end = bytes.len() - 22;
    let list = u32::from_le_bytes(bytes[end + 16..end + 20].try_into().unwrap()) as usize;
    for line in [list, list + 76] {
        assert_eq!(&bytes[line..line + 4], b"PK\x01\x02", "no longer shows the mistake");
    }
    assert!(Pt2Model::open(fixture("maskfill")).is_ok());
}

/// Frequencies of `theta^(-2i/d)` for theta 10000 and heads of 8, and a window of 5.
#[test]
fn rotations_windows_and_scales_are_found() {
    let mut found = 0;
    for name in ["llama", "llama_core", "llama_eager"] {
        for node in &open(name).graph.nodes {
            match &node.op {
                Op::Rope(rope) => {
                    assert_eq!(rope.attention_factor, 1.0);
                    for (pair, &frequency) in rope.inverse_frequencies.iter().enumerate() {
                        let expected = 10000f64.powf(-(pair as f64) / 4.0) as f32;
                        assert!((frequency / expected - 1.0).abs() < 1e-6, "{name}: {frequency}");
                        found += 1;
                    }
                }
                Op::Attention(op) => {
                    let heads = (op.heads.heads, op.heads.kv_heads, op.heads.head_dim);
                    assert_eq!((heads, op.heads.causal), ((4, 2, 8), true), "{name}");
                    assert!((op.heads.scale - 8f64.powf(-0.5)).abs() < 1e-7, "{name}");
                }
                _ => {}
            }
        }
    }
    assert_eq!(found, (2 + 1 + 1) * 2 * 4);
    let graph = open("mistral").graph;
    let window = graph.nodes.iter().find_map(|node| match &node.op {
        Op::Attention(op) => op.heads.window,
        _ => None,
    });
    assert_eq!(window, Some(5));
    let norms = open("qwen3").graph;
    let heads = norms.nodes.iter().filter(|node| matches!(node.op, Op::HeadRmsNorm(_)));
    assert!(heads.clone().all(|node| node.tag == Tag::Norm) && heads.count() == 2);
}

#[test]
fn calls_that_are_not_known_stay_by_name() {
    let model = open("sine");
    let call = |node: &str, target: &str| OpaqueCall {
        node: node.to_string(),
        target: target.to_string(),
        tag: Tag::Mlp,
    };
    assert_eq!(
        model.opaque(),
        [
            call("sin", "aten.sin.default"),
            call("getitem", "aten.topk.default"),
            call("sum_1", "aten.sum.dim_IntList"),
            call("mul", "aten.mul.Tensor"),
        ]
    );
    let text = model.graph.to_string();
    assert!(text.contains("getitem.1: i64[B*S, 8] = opaque(sin) aten.topk.default k=8"), "{text}");
    assert!(
        text.contains("= opaque(getitem) aten.sum.dim_IntList dim=[-1] keepdim=true"),
        "{text}"
    );
    // What is around them is read: four linear layers' worth of parameters, and the head.
    assert_eq!(model.graph.parameter_count(), 2 * 96 * 32 + 2 * 32 * 64 + 64 + 32 + 2 * 32);
    assert_eq!(
        differentiate(&model.graph).unwrap_err().to_string(),
        "node `mul`: op `aten.mul.Tensor` has no backward rule\n\
         hint: a model that holds this op can be captured and counted, not trained yet"
    );
}

/// All entries of a fixture, without the folder that they are in.
fn entries(name: &str) -> Vec<(String, Vec<u8>)> {
    let config = Config { archive_offset: ArchiveOffset::Known(0) };
    let mut zip = ZipArchive::with_config(config, File::open(fixture(name)).unwrap()).unwrap();
    (0..zip.len())
        .map(|index| {
            let mut entry = zip.by_index(index).unwrap();
            let name = entry.name().unwrap().split_once('/').unwrap().1.to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (name, bytes)
        })
        .collect()
}

#[test]
fn parts_of_packed_weights_are_read_as_they_lie() {
    let mut model = open("gpt2");
    let all: BTreeMap<String, Vec<u8>> = entries("gpt2").into_iter().collect();
    let table: serde_json::Value =
        serde_json::from_slice(&all["data/weights/model_weights_config.json"]).unwrap();
    let stored = |name: &str| -> Vec<f32> {
        let file = table["config"][name]["path_name"].as_str().unwrap();
        let bytes = all[&format!("data/weights/{file}")].chunks_exact(4);
        bytes.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    // Stored as [inputs 32, outputs 96]; of keys, output 3 from input 5.
    let packed = stored("transformer.h.1.attn.c_attn.weight");
    let keys = model.read("transformer.h.1.attn.c_attn.k.weight").unwrap();
    assert_eq!((keys.len(), keys[3 * 32 + 5]), (32 * 32, packed[5 * 96 + 32 + 3]));
    let packed = stored("transformer.h.1.attn.c_attn.bias");
    let values = model.read("transformer.h.1.attn.c_attn.v.bias").unwrap();
    assert_eq!(values, packed[64..]);
    // A table and a norm as they are.
    for name in ["transformer.wpe.weight", "transformer.ln_f.bias", "lm_head.weight"] {
        assert_eq!(model.read(name).unwrap(), stored(name), "{name}");
    }
    // A projection of one input by many outputs, turned.
    let up = stored("transformer.h.0.mlp.c_fc.weight");
    assert_eq!(
        model.read("transformer.h.0.mlp.c_fc.weight").unwrap()[100 * 32 + 7],
        up[7 * 128 + 100]
    );
    let error = model.read("lm_head.bias").unwrap_err().to_string();
    assert!(error.contains("there is no parameter `lm_head.bias`"), "{error}");
}

/// Writes an archive whose entries lie in a folder of the archive's name.
fn written(folder: &tempfile::TempDir, stem: &str, entries: &[(String, Vec<u8>)]) -> PathBuf {
    let path = folder.path().join(format!("{stem}.pt2"));
    let mut zip = ZipWriter::new(File::create(&path).unwrap());
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in entries {
        zip.start_file(format!("{stem}/{name}"), options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap();
    path
}

/// Writes an archive and gives the error of opening it, without the path.
fn refused(entries: &[(String, Vec<u8>)]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = written(&folder, "model", entries);
    let error = Pt2Model::open(&path).unwrap_err().to_string();
    error.replace(&format!("{}", path.display()), "PATH")
}

#[test]
fn broken_archives_are_refused_in_these_words() {
    let replaced = |name: &str, change: &dyn Fn(String) -> String| {
        let mut all = entries("gpt2_core");
        let entry = all.iter_mut().find(|entry| entry.0 == name).unwrap();
        entry.1 = change(String::from_utf8(entry.1.clone()).unwrap()).into_bytes();
        refused(&all)
    };
    let json = |from: &'static str, to: &'static str| {
        replaced("models/model.json", &move |text: String| {
            assert!(text.contains(from), "{from}");
            text.replacen(from, to, 1)
        })
    };
    let without = |name: &str| {
        refused(&entries("gpt2_core").into_iter().filter(|e| e.0 != name).collect::<Vec<_>>())
    };
    let again = "hint: save it again with torch.export.save of PyTorch 2.9 or later";
    for (message, expected) in [
        (
            without("archive_format"),
            format!(
                "PATH: expected a .pt2 archive, got a zip file without `archive_format`\n{again}"
            ),
        ),
        (
            refused(&[("serialized_exported_program.json".to_string(), Vec::new())]),
            format!(
                "PATH: expected a .pt2 archive, got an export of PyTorch 2.8 or earlier, whose \
                 weights are pickled\n{again}"
            ),
        ),
        (
            replaced("byteorder", &|_| "big".to_string()),
            "PATH: `byteorder`: expected `little`, got `big`\n\
             hint: export it on a little-endian machine"
                .to_string(),
        ),
        (
            without("models/model.json"),
            format!("PATH: expected a graph `models/….json`, got none\n{again}"),
        ),
        (
            json("\"major\": 8", "\"major\": 99"),
            "PATH (models/model.json): expected schema version 8, got 99\n\
             hint: export it again with PyTorch 2.9 or later"
                .to_string(),
        ),
        (
            json("\"nodes\"", "\"nods\""),
            "PATH (models/model.json): expected a list `nodes`\n\
             hint: the file is not as torch.export.save writes it; export it again"
                .to_string(),
        ),
        (
            json(
                "{\"user_output\": {\"arg\": {\"as_tensor\"",
                "{\"user_output\": {\"arg\": {\"as_int\"",
            ),
            "PATH (models/model.json): the program gives no tensor\n\
             hint: export a model that gives its logits"
                .to_string(),
        ),
        (
            replaced("data/weights/model_weights_config.json", &|text: String| {
                text.replacen("\"use_pickle\": false", "\"use_pickle\": true", 1)
            }),
            "PATH: tensor `transformer.wte.weight` is pickled\n\
             hint: pickled tensors are not read; export plain tensors, not subclasses of them"
                .to_string(),
        ),
    ] {
        assert_eq!(message, expected);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt2");
    std::fs::write(&path, "no zip file").unwrap();
    let error = Pt2Model::open(&path).unwrap_err().to_string();
    assert!(error.contains("not a zip file"), "{error}");
    let error = Pt2Model::open(folder.path().join("none.pt2")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read `"), "{error}");
}

#[test]
fn weights_that_are_cut_off_or_gone_are_refused() {
    for (change, expected) in [("cut", "expected 12288 bytes in"), ("gone", "not in the archive")] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt2");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for (name, bytes) in entries("gpt2_core") {
            let is_first = name == "data/weights/weight_0";
            if is_first && change == "gone" {
                continue;
            }
            zip.start_file(format!("model/{name}"), options).unwrap();
            zip.write_all(if is_first { &bytes[..100] } else { &bytes }).unwrap();
        }
        zip.finish().unwrap();
        let mut model = Pt2Model::open(&path).unwrap();
        let table = model.graph.parameters().last().map(|(_, tensor)| tensor.name.clone());
        let name = table.unwrap();
        let error = model.read(&name).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
}
