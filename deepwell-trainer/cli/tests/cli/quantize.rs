//! `deepwell quantize`: what is in the files, there and back, and what is refused.

use std::collections::BTreeMap;

use deepwell_ckpt::hf::{WriteTensor, write};
use deepwell_ir::capture::Weights;
use deepwell_precision::{QuantFormat, nvfp4, packed, scale_tiles};
use half::{bf16, f16};
use safetensors::{SafeTensors, tensor::TensorView as Tensor};

use super::*;

const EXPERTS: [usize; 3] = [3, 130, 70];

fn values(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (i as f32 * 0.37).sin() * 2.0_f32.powi((i / 700 % 9) as i32)).collect()
}

/// Tensors of all types that are quantized, and some that are kept, in one file.
fn model(path: &str) {
    let bytes = |values: Vec<f32>, dtype: safetensors::Dtype| -> Vec<u8> {
        match dtype {
            safetensors::Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            safetensors::Dtype::BF16 => {
                values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
            }
            _ => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        }
    };
    use safetensors::Dtype::{BF16, F16, F32, I64};
    let tensors: Vec<(&str, _, Vec<usize>, Vec<u8>)> = vec![
        ("model.embed_tokens.weight", BF16, vec![10, 64], bytes(values(640), BF16)),
        ("layers.0.mlp.up_proj.weight", BF16, vec![300, 1000], bytes(values(300_000), BF16)),
        ("layers.0.mlp.down_proj.weight", F32, vec![33, 77], bytes(values(2541), F32)),
        ("layers.0.self_attn.q_proj.weight", F16, vec![40, 48], bytes(values(1920), F16)),
        ("layers.0.mlp.experts.up", BF16, EXPERTS.to_vec(), bytes(values(27_300), BF16)),
        ("layers.0.input_layernorm.weight", F32, vec![64], bytes(values(64), F32)),
        ("layers.0.positions", I64, vec![2], vec![7; 16]),
    ];
    let views: Vec<(String, Tensor<'_>)> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            let view = Tensor::new(*dtype, shape.clone(), bytes).expect("bytes of the shape");
            ((*name).to_owned(), view)
        })
        .collect();
    let metadata = Some(std::collections::HashMap::from([("format".into(), "pt".into())]));
    safetensors::serialize_to_file(views, metadata, Path::new(path)).expect("written");
}

/// Name, type, shape and bytes of all tensors, as the reference implementation reads them.
fn read(path: &str) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        (name, (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec()))
    });
    tensors.collect()
}

#[test]
fn there_and_back() {
    let folder = Folder::new();
    let input = folder.path("model.safetensors");
    model(&input);
    let before = read(&input);
    for (format, snr_min, bits) in
        [("mxfp8", 28.0, 8.25), ("mxfp6", 25.0, 6.25), ("mxfp4", 14.0, 4.25), ("nvfp4", 16.0, 4.5)]
    {
        let mut first: Option<Vec<u8>> = None;
        for layout in ["plain", "tiled"] {
            let small = folder.path(&format!("{format}-{layout}.safetensors"));
            let back = folder.path(&format!("{format}-{layout}-back.safetensors"));
            let args = ["quantize", &input, &small, "--format", format, "--layout", layout];
            let report = json_of(&[&args[..], &["--json"]].concat());
            let quantized: Vec<&Value> = report["tensors"]
                .as_array()
                .expect("tensors")
                .iter()
                .filter(|tensor| !tensor["quality"].is_null())
                .collect();
            assert_eq!(quantized.len(), 4, "{report}");
            for tensor in quantized {
                let snr = tensor["quality"]["snr_db"].as_f64().expect("a number");
                assert!(snr > snr_min && snr < snr_min + 14.0, "{format}: {tensor}");
                if tensor["name"] == "layers.0.mlp.up_proj.weight" && layout == "plain" {
                    let got = tensor["bytes_out"].as_f64().expect("a number") * 8.0 / 300_000.0;
                    assert!((got - bits).abs() < 0.02, "{format}: {got} bits");
                }
            }
            let stored = read(&small);
            for name in ["model.embed_tokens.weight", "layers.0.positions"] {
                assert_eq!(stored[name], before[name], "kept");
            }
            let command = ["quantize", &small, &back, "--dequantize", "--json"];
            assert_eq!(json_of(&command)["tensors"], 4);
            let after = read(&back);
            let shapes = |tensors: &BTreeMap<String, (String, Vec<usize>, Vec<u8>)>| {
                let shape = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.0.clone()));
                shape.collect::<Vec<_>>()
            };
            assert_eq!(shapes(&after), shapes(&before));
            // Both layouts hold the same numbers.
            let bytes = fs::read(&back).expect("a file");
            assert!(first.get_or_insert_with(|| bytes.clone()) == &bytes, "{format}");
        }
    }
}

/// The bytes are those of the library, with tiles for each expert.
#[test]
fn bytes_are_those_of_the_library() {
    let folder = Folder::new();
    let (input, small) = (folder.path("model.safetensors"), folder.path("small.safetensors"));
    model(&input);
    stdout_of(&["quantize", &input, &small, "--format", "nvfp4", "--layout", "tiled"]);
    let stored = read(&small);
    let src: Vec<bf16> = values(27_300).into_iter().map(bf16::from_f32).collect();
    let [count, rows, cols] = EXPERTS;
    let mut data = vec![0; packed::fp4_len(count * rows, cols)];
    let mut scales = vec![0; nvfp4::scales_len(count * rows, cols)];
    let (format, common) = (QuantFormat::NVFP4, nvfp4::Common::nearest(nvfp4::amax(&src)));
    let (scale, _) =
        nvfp4::quantize_rows(&src, count * rows, cols, &format, &common, &mut data, &mut scales)
            .expect("fits");
    let mut tiles = vec![0; count * scale_tiles::tiled_len(rows, 5)];
    let of_experts = scales.chunks(rows * 5).zip(tiles.chunks_mut(scale_tiles::tiled_len(rows, 5)));
    for (scales, tiles) in of_experts {
        scale_tiles::to_tiles(scales, rows, 5, tiles).expect("fits");
    }
    let name = "layers.0.mlp.experts.up";
    assert_eq!(stored[name], ("U8".into(), vec![3, 130, 35], data));
    assert_eq!(stored[&format!("{name}_scale")], ("U8".into(), vec![3, 2048], tiles));
    let bytes = scale.to_le_bytes().to_vec();
    assert_eq!(stored[&format!("{name}_scale_2")], ("F32".into(), vec![], bytes));
}

#[test]
fn shards_and_policies() {
    let folder = Folder::new();
    fs::create_dir(folder.path("model")).expect("a folder");
    let shard = |index: usize, names: &[&str]| {
        let values = values(64 * 64);
        let tensors: Vec<WriteTensor<'_>> =
            names.iter().map(|name| WriteTensor::from_f32(name, &[64, 64], &values)).collect();
        write(&folder.0.path().join(format!("model/part-{index}.safetensors")), &tensors)
            .expect("written");
    };
    shard(1, &["layers.0.up.weight", "layers.0.down.weight"]);
    shard(2, &["layers.1.up.weight", "layers.1.down.weight", "lm_head.weight"]);
    let index = json!({ "weight_map": {
        "layers.0.up.weight": "part-1.safetensors", "layers.0.down.weight": "part-1.safetensors",
        "layers.1.up.weight": "part-2.safetensors", "layers.1.down.weight": "part-2.safetensors",
        "lm_head.weight": "part-2.safetensors",
    }});
    folder.file("model/model.safetensors.index.json", index.to_string());
    let policy = folder.file(
        "policy.toml",
        "keep_first_last_bf16 = false\n[[rule]]\ntensors = \"*.down.*\"\nformat = \"bf16\"\n\
         [[rule]]\ntensors = \"lm_head.*\"\nformat = \"mxfp8\"\n",
    );
    let (input, small, back) = (folder.path("model"), folder.path("small"), folder.path("back"));
    let args = ["quantize", &input, &small, "--format", "mxfp8", "--policy", &policy, "--json"];
    let report = json_of(&args);
    let quantized: Vec<&str> = report["tensors"]
        .as_array()
        .expect("tensors")
        .iter()
        .filter(|tensor| !tensor["quality"].is_null())
        .filter_map(|tensor| tensor["name"].as_str())
        .collect();
    assert_eq!(quantized, ["layers.0.up.weight", "layers.1.up.weight", "lm_head.weight"]);
    let opened = Weights::open(Path::new(&small)).expect("an index that fits its shards");
    assert_eq!(opened.tensors().len(), 5 + 3);
    stdout_of(&["quantize", &small, &back, "--dequantize"]);
    let opened = Weights::open(Path::new(&back)).expect("an index that fits its shards");
    let shapes: Vec<&[usize]> = opened.tensors().map(|tensor| &tensor.shape[..]).collect();
    assert_eq!(shapes, [[64, 64]; 5]);

    let wrong = folder.file("wrong.toml", "[[rule]]\ntensors = \"layer.*\"\nformat = \"bf16\"\n");
    let args = ["quantize", &input, &back, "--format", "mxfp8", "--force", "--policy", &wrong];
    check_error(&args, 2, &["layer.*"]);
}

#[test]
fn what_is_refused() {
    let folder = Folder::new();
    let (input, small) = (folder.path("model.safetensors"), folder.path("small.safetensors"));
    model(&input);
    stdout_of(&["quantize", &input, &small, "--format", "mxfp4"]);
    let out = folder.path("out.safetensors");
    let broken = folder.file("broken.safetensors", "12345678 is not a length");
    let text = fs::read(&small).expect("a file");
    let cut = folder.file("cut.safetensors", &text[..text.len() - 1]);
    let norms = folder.path("norms.safetensors");
    let tensor = WriteTensor::from_f32("norm.weight", &[2], &[1.0, 2.0]);
    write(Path::new(&norms), &[tensor]).expect("written");
    let empty = folder.path("empty");
    fs::create_dir(&empty).expect("a folder");
    let before = fs::read_dir(folder.path(".")).expect("the folder").count();
    for (args, contains) in [
        (vec![&input, &small, "--format", "mxfp8"], vec!["exists already", "hint: `--force`"]),
        (vec![&input, &input, "--format", "mxfp8", "--force"], vec!["is also the input"]),
        (vec![&small, &out, "--format", "mxfp8"], vec!["holds mxfp4 already", "hint:"]),
        (vec![&input, &out, "--dequantize"], vec!["has not been written by"]),
        (vec![&broken, &out, "--format", "mxfp8"], vec!["is not valid"]),
        (vec![&cut, &out, "--dequantize"], vec!["is not valid"]),
        (vec![&norms, &out, "--format", "nvfp4"], vec!["no tensor", "hint:"]),
        (vec![&empty, &out, "--format", "nvfp4"], vec!["no model in"]),
        (vec!["nothing-there", &out, "--format", "nvfp4"], vec!["cannot open"]),
        (vec![&input, &out], vec!["--format"]),
        (vec![&input, &out, "--format", "int8"], vec!["mxfp6"]),
        (vec![&small, &out, "--dequantize", "--layout", "tiled"], vec!["cannot be used with"]),
    ] {
        check_error(&[&["quantize"], &args[..]].concat(), 2, &contains);
        let after = fs::read_dir(folder.path(".")).expect("the folder").count();
        assert_eq!(before, after, "{args:?}: nothing is left behind");
    }
}

/// Writes a safetensors file of F32 tensors.
fn weights(path: &str, tensors: &[(&str, &[usize])]) -> BTreeMap<String, Vec<f32>> {
    let values: BTreeMap<String, Vec<f32>> = tensors
        .iter()
        .map(|&(name, shape)| {
            // A column of large values: in blocks with it all others vanish.
            let (elements, outputs) = (shape.iter().product::<usize>(), shape[shape.len() - 1]);
            let value = |i: usize| if i % outputs == 3 { 100.0 } else { 0.01 + i as f32 * 1e-7 };
            (name.to_owned(), (0..elements).map(value).collect())
        })
        .collect();
    let all: Vec<WriteTensor<'_>> = tensors
        .iter()
        .map(|&(name, shape)| WriteTensor::from_f32(name, shape, &values[name]))
        .collect();
    write(Path::new(path), &all).expect("written");
    values
}

/// Matrices through MXFP4 and back, blocks along the last dimension or, `turned`, the one before.
fn by_the_library(values: &[f32], shape: &[usize], turned: bool) -> Vec<f32> {
    let (rows, cols) = (shape[shape.len() - 2], shape[shape.len() - 1]);
    let (outer, k) = if turned { (cols, rows) } else { (rows, cols) };
    let place = |o: usize, i: usize| if turned { i * cols + o } else { o * cols + i };
    let format = QuantFormat::mx(deepwell_precision::ElementFormat::E2M1);
    let mut back = Vec::new();
    for matrix in values.chunks(rows * cols) {
        let all = || (0..outer).flat_map(|o| (0..k).map(move |i| (o, i)));
        let source: Vec<f32> = all().map(|(o, i)| matrix[place(o, i)]).collect();
        let mut data = vec![0; source.len()];
        let mut scales = vec![0; deepwell_precision::scales_len(outer, k)];
        let mut decoded = vec![0.0_f32; source.len()];
        deepwell_precision::quantize_rows(&source, outer, k, &format, &mut data, &mut scales)
            .expect("fits");
        deepwell_precision::dequantize_rows(&data, &scales, outer, k, &format, &mut decoded)
            .expect("fits");
        let mut matrix = vec![0.0; source.len()];
        all().zip(decoded).for_each(|((o, i), value)| matrix[place(o, i)] = value);
        back.extend(matrix);
    }
    back
}

/// GPT-2 and the experts of gpt-oss store weights as [inputs, outputs]: blocks lay along the
/// outputs, and masks were quantized.
#[test]
fn issue_31_blocks_lie_along_the_inputs_of_every_family() {
    let gpt2 = json!({ "model_type": "gpt2", "vocab_size": 96, "n_embd": 64, "n_layer": 1,
                       "n_head": 2, "n_positions": 32 });
    let gpt_oss = json!({ "model_type": "gpt_oss", "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "layer_types": ["full_attention"], "sliding_window": 128,
        "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000, "attention_bias": true,
        "max_position_embeddings": 4096, "tie_word_embeddings": false,
        "rope_scaling": { "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 128, "truncate": false } });
    let (gate_up, down) =
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj");
    // A configuration, tensors, those with inputs first, those that are quantized as they lie.
    let check = |config: Option<&Value>,
                 tensors: &[(&str, &[usize])],
                 turned: &[&str],
                 straight: &[&str],
                 said: &str| {
        let folder = Folder::new();
        let input = folder.path("model.safetensors");
        if let Some(config) = config {
            folder.file("config.json", config.to_string());
        }
        let before = weights(&input, tensors);
        for layout in ["plain", "tiled"] {
            let (small, back) = (folder.path(&format!("{layout}.st")), folder.path("back.st"));
            let args = ["quantize", &input, &small, "--format", "mxfp4", "--layout", layout];
            let report = json_of(&[&args[..], &["--json"]].concat());
            assert!(report["notes"].to_string().contains(said), "{said}: {}", report["notes"]);
            for tensor in report["tensors"].as_array().expect("tensors") {
                let name = tensor["name"].as_str().expect("a name");
                let is_turned = turned.contains(&name);
                let is_quantized = is_turned || straight.contains(&name);
                assert_eq!(tensor["quality"].is_null(), !is_quantized, "{tensor}");
                assert!(!is_quantized || tensor["inputs_first"] == is_turned, "{tensor}");
            }
            stdout_of(&["quantize", &small, &back, "--dequantize", "--force"]);
            let after = read(&back);
            for &(name, shape) in tensors {
                let values: Vec<f32> = bytemuck::pod_collect_to_vec(&after[name].2);
                let expected = match (turned.contains(&name), straight.contains(&name)) {
                    (false, false) => before[name].clone(),
                    (is_turned, _) => by_the_library(&before[name], shape, is_turned),
                };
                assert_eq!(after[name].1, shape, "{name}");
                assert!(values == expected, "{name} {layout}");
            }
        }
    };
    let [attn, proj] = ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight"];
    let kept: [(&str, &[usize]); 3] =
        [("h.0.attn.bias", &[1, 1, 32, 32]), ("wte.weight", &[96, 64]), ("wpe.weight", &[32, 64])];
    let gpt2_tensors = [&[(attn, &[64, 192][..]), (proj, &[64, 64])][..], &kept[..]].concat();
    check(Some(&gpt2), &gpt2_tensors, &[attn, proj], &[], "[]");
    // The square projection alone, by its name.
    check(None, &[(proj, &[64, 64]), kept[0]], &[proj], &[], "names are those of GPT-2");
    let prefixed = "transformer.h.0.mlp.c_fc.weight";
    check(Some(&gpt2), &[(prefixed, &[64, 256])], &[prefixed], &[], "[]");
    // The same names as linear layers, which the biases tell: GPT-BigCode, nanoGPT.
    let bias = ("h.0.attn.c_attn.bias", &[192][..]);
    let linear = [(attn, &[192, 64][..]), bias, (proj, &[64, 64])];
    check(None, &linear, &[], &[attn, proj], "[]");
    check(Some(&gpt2), &linear, &[], &[attn, proj], "of another model");

    let query = "model.layers.0.self_attn.q_proj.weight";
    let router = "model.layers.0.mlp.router.weight";
    let gate_up_bias = "model.layers.0.mlp.experts.gate_up_proj_bias";
    let experts = [
        (gate_up, &[2, 64, 128][..]),
        (gate_up_bias, &[2, 128]),
        (down, &[2, 64, 64]),
        (query, &[64, 64]),
        (router, &[2, 64]),
        ("lm_head.weight", &[96, 64]),
    ];
    check(Some(&gpt_oss), &experts, &[gate_up, down], &[query], "[]");
    check(None, &experts, &[gate_up, down], &[query], "[]");
    check(None, &[(down, &[2, 64, 64])], &[down], &[], "gpt-oss");
    check(None, &[("up.weight", &[64, 96])], &[], &["up.weight"], "taken as [outputs, inputs]");
    let bert = json!({ "model_type": "bert" });
    check(Some(&bert), &[("up.weight", &[64, 96])], &[], &["up.weight"], "is not used");
}

/// The largest numbers of each type came back as infinity: rounding went past the type.
#[test]
fn issue_31_the_largest_numbers_come_back_finite() {
    let folder = Folder::new();
    let (input, small, back) = (folder.path("in.st"), folder.path("small.st"), folder.path("back"));
    let one = |i: usize| if i.is_multiple_of(2) { 1.0_f32 } else { -1.0 };
    let wide: Vec<u8> = (0..128).flat_map(|i| (one(i) * f32::MAX).to_le_bytes()).collect();
    let narrow: Vec<u8> =
        (0..128).flat_map(|i| bf16::from_f32(one(i) * bf16::MAX.to_f32()).to_le_bytes()).collect();
    let half: Vec<u8> =
        (0..128).flat_map(|i| f16::from_f32(one(i) * f16::MAX.to_f32()).to_le_bytes()).collect();
    use safetensors::Dtype::{BF16, F16, F32};
    let views = [("a.weight", F32, &wide), ("b.weight", BF16, &narrow), ("c.weight", F16, &half)]
        .map(|(name, dtype, bytes)| (name, Tensor::new(dtype, vec![2, 64], bytes).expect("fits")));
    safetensors::serialize_to_file(views, None, Path::new(&input)).expect("written");
    for format in ["mxfp8", "mxfp6", "mxfp4", "nvfp4"] {
        for rule in ["rceil", "floor", "min-error"] {
            let to = ["--format", format, "--scale-rule", rule, "--force"];
            stdout_of(&[&["quantize", &input, &small], &to[..]].concat());
            stdout_of(&["quantize", &small, &back, "--dequantize", "--force"]);
            for (name, (dtype, _, bytes)) in read(&back) {
                let values: Vec<f32> = match dtype.as_str() {
                    "F32" => bytemuck::pod_collect_to_vec(&bytes),
                    "BF16" => bytes
                        .as_chunks()
                        .0
                        .iter()
                        .map(|&x| bf16::from_le_bytes(x).to_f32())
                        .collect(),
                    _ => bytes
                        .as_chunks()
                        .0
                        .iter()
                        .map(|&x| f16::from_le_bytes(x).to_f32())
                        .collect(),
                };
                let is_right = |(i, x): (usize, &f32)| x.is_finite() && x * one(i) > 0.0;
                assert!(values.iter().enumerate().all(is_right), "{format} {rule} {name}");
            }
        }
    }
}
