//! Quantized model folders: names, types, bytes and configuration of both conventions, and what
//! reading them back gives. Expected bytes are those of deepwell-precision on whole matrices.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepwell_ckpt::hf::{WriteTensor, write};
use deepwell_precision::{BlockShape, QuantFormat, nvfp4, packed, quantize_rows, ue4m3};
use deepwell_quantize_file::{
    AssignedWeight, Convention, FolderFormat, QuantizeFileError, QuantizeFolderOptions, dequantize,
    quantize_folder,
};
use half::bf16;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use Convention::{CompressedTensors, Modelopt};
use FolderFormat::{Mxfp8, Nvfp4};

const LAYER: &str = "model.layers.0";

/// Shape and magnitude of each weight of a small model.
const WEIGHTS: [(&str, [usize; 2], f32); 7] = [
    ("self_attn.q_proj", [64, 64], 1.0),
    ("self_attn.k_proj", [32, 64], 0.25),
    ("self_attn.v_proj", [32, 64], 3.0),
    ("self_attn.o_proj", [64, 64], 0.0),
    ("mlp.gate_proj", [96, 64], 0.5),
    ("mlp.up_proj", [96, 64], 2.0),
    ("mlp.down_proj", [64, 96], 1.0),
];

fn values(count: usize, magnitude: f32) -> Vec<f32> {
    (0..count).map(|i| magnitude * (i as f32 * 0.37).sin() * (1.0 + (i % 7) as f32)).collect()
}

fn weight(name: &str) -> ([usize; 2], Vec<f32>) {
    let (_, shape, magnitude) = WEIGHTS.iter().find(|row| row.0 == name).expect("a weight");
    (*shape, values(shape[0] * shape[1], *magnitude))
}

fn config(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "dtype": "float32"
    })
}

/// Writes the model as one file or, with queries, keys and values apart, as two shards.
fn model(folder: &Path, is_sharded: bool) {
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join("config.json"), config("llama").to_string()).expect("written");
    fs::write(folder.join("tokenizer.json"), "{}").expect("written");
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = WEIGHTS
        .iter()
        .map(|(name, shape, magnitude)| {
            let data = values(shape[0] * shape[1], *magnitude);
            (format!("{LAYER}.{name}.weight"), shape.to_vec(), data)
        })
        .collect();
    for (name, shape) in [
        ("model.embed_tokens", vec![32, 64]),
        ("model.norm", vec![64]),
        ("model.layers.0.input_layernorm", vec![64]),
        ("model.layers.0.post_attention_layernorm", vec![64]),
        ("lm_head", vec![32, 64]),
    ] {
        let data = values(shape.iter().product(), 1.0);
        tensors.push((format!("{name}.weight"), shape, data));
    }
    let file = |name: &str, of: &[(String, Vec<usize>, Vec<f32>)]| {
        let all: Vec<WriteTensor<'_>> =
            of.iter().map(|(name, shape, data)| WriteTensor::from_f32(name, shape, data)).collect();
        write(&folder.join(name), &all).expect("written");
    };
    if !is_sharded {
        return file("model.safetensors", &tensors);
    }
    let shards = tensors.split_at(1);
    let mut map = BTreeMap::new();
    for (name, of) in [("model-1.safetensors", shards.0), ("model-2.safetensors", shards.1)] {
        file(name, of);
        map.extend(of.iter().map(|tensor| (tensor.0.clone(), name)));
    }
    let index = json!({ "metadata": {}, "weight_map": map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
}

fn options(root: &Path, format: FolderFormat, convention: Convention) -> QuantizeFolderOptions {
    QuantizeFolderOptions {
        input: root.join("plain"),
        output: root.join("small"),
        format,
        convention,
        policy: None,
        assigned: None,
        input_amax: BTreeMap::new(),
        keeps_as_bf16: true,
        keeps_f32: [format!("{LAYER}.input_layernorm.weight")].into(),
    }
}

type Tensor = (String, Vec<usize>, Vec<u8>);

/// All tensors of a folder, as the reference implementation reads them.
fn read(folder: &Path) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = fs::read(&path).expect("a file");
        for (name, view) in SafeTensors::deserialize(&bytes).expect("safetensors").tensors() {
            let (dtype, shape) = (view.dtype().to_string(), view.shape().to_vec());
            assert!(all.insert(name, (dtype, shape, view.data().to_vec())).is_none());
        }
    }
    all
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON")
}

fn f32_of(tensor: &Tensor) -> f32 {
    f32::from_le_bytes(tensor.2[..].try_into().expect("one number"))
}

/// The amax that a weight's tensor scale is computed from: of all modules that engines merge.
fn merged_amax(name: &str) -> f32 {
    let group: &[&str] = match name.rsplit_once('.').expect("a path").1 {
        "q_proj" | "k_proj" | "v_proj" => {
            &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        }
        "gate_proj" | "up_proj" => &["mlp.gate_proj", "mlp.up_proj"],
        _ => &[name],
    };
    group.iter().map(|name| nvfp4::amax(&weight(name).1)).fold(0.0, f32::max)
}

/// Data, block scales and reciprocal of the tensor scale of a weight, quantized as a whole.
fn nvfp4_of(name: &str) -> (Vec<u8>, Vec<u8>, f32) {
    let ([rows, cols], source) = weight(name);
    let amax = merged_amax(name);
    let mut data = vec![0; packed::fp4_len(rows, cols)];
    let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
    let (format, common) = (QuantFormat::NVFP4, nvfp4::Common::nearest(amax));
    nvfp4::quantize_rows(&source, rows, cols, &format, &common, &mut data, &mut scales)
        .expect("quantized");
    (data, scales, nvfp4::encode_scale(amax, nvfp4::ScaleBound::Max448))
}

#[test]
fn nvfp4_folders_have_the_names_and_bytes_of_each_convention() {
    for (convention, is_sharded, has_inputs) in [
        (Modelopt, false, true),
        (Modelopt, true, false),
        (CompressedTensors, false, false),
        (CompressedTensors, true, true),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        model(&root.join("plain"), is_sharded);
        let mut options = options(root, Nvfp4, convention);
        if has_inputs {
            let amax = |(index, row): (usize, &(&str, _, _))| {
                (format!("{LAYER}.{}.weight", row.0), 20.0 - index as f32)
            };
            options.input_amax = WEIGHTS.iter().enumerate().map(amax).collect();
        }
        let done = quantize_folder(&options, &mut |_, _| {}).expect("quantized");
        assert_eq!(done.activations, if has_inputs { "static" } else { "none" });
        let mut stored = read(&root.join("small"));
        for (name, shape, _) in WEIGHTS {
            let module = format!("{LAYER}.{name}");
            let mut take = |suffix: &str| {
                let name = format!("{module}.{suffix}");
                stored.remove(&name).unwrap_or_else(|| panic!("{name} is missing"))
            };
            let (data, scales, encode) = nvfp4_of(name);
            let (data_name, scale_name, input_name) = match convention {
                Modelopt => ("weight", "weight_scale_2", "input_scale"),
                CompressedTensors => ("weight_packed", "weight_global_scale", "input_global_scale"),
            };
            assert_eq!(
                take(data_name),
                ("U8".into(), vec![shape[0], shape[1] / 2], data),
                "{name}"
            );
            let expected = ("F8_E4M3".into(), vec![shape[0], shape[1] / 16], scales);
            assert_eq!(take("weight_scale"), expected, "{name}");
            // A zero weight has the scale 1 in both.
            let scalars = |encode: f32| match convention {
                Modelopt => (vec![], 1.0 / encode),
                CompressedTensors => (vec![1], encode),
            };
            let scale = take(scale_name);
            assert_eq!((scale.1.clone(), f32_of(&scale)), scalars(encode), "{name}");
            if has_inputs {
                // The largest of the merged modules, which read one activation.
                let amax = match name.rsplit_once('.').expect("a path").1 {
                    "q_proj" | "k_proj" | "v_proj" => 20.0,
                    "o_proj" => 17.0,
                    "gate_proj" | "up_proj" => 16.0,
                    _ => 14.0,
                };
                let input = take(input_name);
                assert_eq!((input.1.clone(), f32_of(&input)), scalars(2688.0 / amax), "{name}");
            }
        }
        // The rest is kept: BF16, but for the tensor that stays F32.
        let rest: Vec<(&str, &str)> =
            stored.iter().map(|(name, tensor)| (name.as_str(), tensor.0.as_str())).collect();
        let kept = [
            ("lm_head.weight", "BF16"),
            ("model.embed_tokens.weight", "BF16"),
            ("model.layers.0.input_layernorm.weight", "F32"),
            ("model.layers.0.post_attention_layernorm.weight", "BF16"),
            ("model.norm.weight", "BF16"),
        ];
        assert_eq!(rest, kept, "{convention:?}");
        let head: Vec<u8> =
            values(32 * 64, 1.0).iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        assert_eq!(stored["lm_head.weight"].2, head);
        check_config(&root.join("small"), convention, has_inputs);
    }
}

/// Checks the configuration of an NVFP4 folder.
fn check_config(folder: &Path, convention: Convention, has_inputs: bool) {
    let config = read_json(&folder.join("config.json"));
    assert_eq!((&config["dtype"], &config["hidden_size"]), (&json!("bfloat16"), &json!(64)));
    assert!(folder.join("tokenizer.json").is_file());
    let quantization = &config["quantization_config"];
    let ignore = json!([
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.norm"
    ]);
    assert_eq!(
        (&quantization["ignore"], &quantization["quant_method"]),
        (&ignore, &json!(convention.name()))
    );
    let file = folder.join("hf_quant_config.json");
    if convention == Modelopt {
        let algorithm = json!(if has_inputs { "NVFP4" } else { "W4A16_NVFP4" });
        let expected = (&algorithm, &json!(16));
        assert_eq!((&quantization["quant_algo"], &quantization["group_size"]), expected);
        let of_file = read_json(&file)["quantization"].clone();
        assert_eq!((&of_file["quant_algo"], &of_file["group_size"]), expected);
        assert_eq!(of_file["exclude_modules"], ignore);
        return;
    }
    assert!(!file.exists());
    assert_eq!(quantization["format"], json!("nvfp4-pack-quantized"));
    let group = &quantization["config_groups"]["group_0"];
    let weights = json!({
        "num_bits": 4, "type": "float", "symmetric": true, "strategy": "tensor_group",
        "group_size": 16, "dynamic": false, "scale_dtype": "torch.float8_e4m3fn"
    });
    assert_eq!((&group["weights"], &group["targets"]), (&weights, &json!(["Linear"])));
    let inputs = &group["input_activations"];
    match has_inputs {
        true => assert_eq!(inputs["dynamic"], json!("local")),
        false => assert_eq!(inputs, &Value::Null),
    }
}

#[test]
fn mxfp8_folders_have_the_bytes_of_the_library() {
    for convention in [Modelopt, CompressedTensors] {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        model(&root.join("plain"), false);
        let options = options(root, Mxfp8, convention);
        let done = quantize_folder(&options, &mut |_, _| {}).expect("quantized");
        assert_eq!(done.activations, "dynamic");
        let stored = read(&root.join("small"));
        assert_eq!(stored.len(), 5 + 2 * WEIGHTS.len());
        for (name, shape, _) in WEIGHTS {
            let source = weight(name).1;
            let [rows, cols] = shape;
            let (mut data, mut scales) = (vec![0; rows * cols], vec![0; rows * cols / 32]);
            quantize_rows(&source, rows, cols, &QuantFormat::MXFP8, &mut data, &mut scales)
                .expect("quantized");
            let module = format!("{LAYER}.{name}");
            let expected = ("F8_E4M3".into(), shape.to_vec(), data);
            assert_eq!(stored[&format!("{module}.weight")], expected, "{name}");
            let expected = ("U8".into(), vec![rows, cols / 32], scales);
            assert_eq!(stored[&format!("{module}.weight_scale")], expected, "{name}");
        }
        let config = read_json(&root.join("small/config.json"));
        let quantization = &config["quantization_config"];
        match convention {
            Modelopt => assert_eq!(quantization["quant_algo"], json!("MXFP8")),
            CompressedTensors => {
                assert_eq!(quantization["format"], json!("mxfp8-quantized"));
                let group = &quantization["config_groups"]["group_0"];
                assert_eq!(group["input_activations"]["dynamic"], json!(true));
                assert_eq!(group["weights"]["scale_dtype"], json!("torch.uint8"));
            }
        }
    }
}

/// Reading back gives the values in the arithmetic of each convention, in the type of the folder.
#[test]
fn folders_come_back() {
    for (convention, is_sharded, dtype) in [
        (Modelopt, true, "BF16"),
        (Modelopt, false, "F32"),
        (CompressedTensors, false, "BF16"),
        (CompressedTensors, true, "F32"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        model(&root.join("plain"), is_sharded);
        let keeps_as_bf16 = dtype == "BF16";
        let options = QuantizeFolderOptions { keeps_as_bf16, ..options(root, Nvfp4, convention) };
        quantize_folder(&options, &mut |_, _| {}).expect("quantized");
        let (small, back) = (root.join("small"), root.join("back"));
        let report = dequantize(&small, &back, false).expect("dequantized");
        assert_eq!(report.tensors, WEIGHTS.len());
        let stored = read(&back);
        assert_eq!(stored.len(), 5 + WEIGHTS.len());
        for (name, shape, _) in WEIGHTS {
            let (data, scales, encode) = nvfp4_of(name);
            let [rows, cols] = shape;
            let mut expected = vec![0.0f32; rows * cols];
            let ones = vec![0x38; scales.len()];
            nvfp4::dequantize_rows(&data, &ones, 1.0, rows, cols, &mut expected).expect("values");
            for (block, &scale) in expected.chunks_mut(16).zip(&scales) {
                let scale = ue4m3::decode(scale);
                for x in block {
                    *x = match convention {
                        Modelopt => *x * scale * (1.0 / encode),
                        CompressedTensors => *x * (scale / encode),
                    };
                }
            }
            let bytes: Vec<u8> = match dtype {
                "F32" => expected.iter().flat_map(|x| x.to_le_bytes()).collect(),
                _ => expected.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            };
            let expected = (dtype.into(), shape.to_vec(), bytes);
            assert_eq!(stored[&format!("{LAYER}.{name}.weight")], expected, "{name}");
        }
        let config = read_json(&back.join("config.json"));
        assert_eq!(config.get("quantization_config"), None);
        assert!(back.join("tokenizer.json").is_file());
        assert!(!back.join("hf_quant_config.json").exists());
    }
}

/// Formats of a run: square blocks over the cuts of a large tensor, rows that are not whole blocks,
/// and modules that engines merge.
#[test]
fn formats_of_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    let plain = root.join("plain");
    model(&plain, false);
    let square = QuantFormat::NVFP4.with_shape(BlockShape::Square);
    // More elements than a piece, whose rows would end within a block.
    let (rows, cols) = (300, 992);
    let source = values(rows * cols, 1.0);
    let down = values(992 * 304, 1.0);
    let mut tensors: Vec<WriteTensor<'_>> = Vec::new();
    let shapes = [("q_proj", [64, 64]), ("k_proj", [32, 64]), ("v_proj", [32, 64])];
    let attention: Vec<(String, [usize; 2], Vec<f32>)> = shapes
        .iter()
        .map(|(name, shape)| {
            (
                format!("{LAYER}.self_attn.{name}.weight"),
                *shape,
                weight(&format!("self_attn.{name}")).1,
            )
        })
        .collect();
    for (name, shape, data) in &attention {
        tensors.push(WriteTensor::from_f32(name, shape, data));
    }
    let (up, gate) =
        (format!("{LAYER}.mlp.up_proj.weight"), format!("{LAYER}.mlp.gate_proj.weight"));
    let down_name = format!("{LAYER}.mlp.down_proj.weight");
    tensors.push(WriteTensor::from_f32(&up, &[rows, cols], &source));
    tensors.push(WriteTensor::from_f32(&gate, &[rows, cols], &source));
    tensors.push(WriteTensor::from_f32(&down_name, &[992, 304], &down));
    write(&plain.join("model.safetensors"), &tensors).expect("written");

    let assigned = |format| AssignedWeight { format, reason: "the policy".to_owned() };
    let formats = [
        (attention[0].0.clone(), Some(square)),
        (attention[1].0.clone(), None),
        (attention[2].0.clone(), Some(square)),
        (up.clone(), Some(square)),
        (gate, Some(square)),
        (down_name.clone(), Some(QuantFormat::MXFP8)),
    ];
    let all = formats.into_iter().map(|(name, format)| (name, assigned(format)));
    let options = QuantizeFolderOptions {
        assigned: Some(all.collect()),
        ..options(root, Nvfp4, CompressedTensors)
    };
    let done = quantize_folder(&options, &mut |_, _| {}).expect("quantized");
    assert!(
        done.report.notes.iter().any(|note| note.contains("2 weights")),
        "{:?}",
        done.report.notes
    );
    let stored = read(&root.join("small"));
    let mut data = vec![0; packed::fp4_len(rows, cols)];
    let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
    let common = nvfp4::Common::nearest(nvfp4::amax(&source));
    nvfp4::quantize_rows(&source, rows, cols, &square, &common, &mut data, &mut scales)
        .expect("quantized");
    assert!(stored[&format!("{up}_packed")].2 == data, "blocks of 16 x 16");
    assert!(stored[&format!("{up}_scale")].2 == scales, "scales of 16 x 16");
    // One of three merged modules is in BF16, so all are.
    for (name, ..) in &attention {
        assert_eq!(stored[name].0, "BF16", "{name}");
    }
    // 304 elements are no whole blocks of 32.
    assert_eq!(stored[&down_name].0, "BF16");
    let quantization = &read_json(&root.join("small/config.json"))["quantization_config"];
    assert_eq!(quantization["format"], json!("nvfp4-pack-quantized"));
    let ignored = quantization["ignore"].as_array().expect("a list");
    assert_eq!(ignored.len(), 5, "{ignored:?}");
}

fn assigned(format: impl Fn(&str) -> QuantFormat) -> Option<BTreeMap<String, AssignedWeight>> {
    let of = |format| AssignedWeight { format: Some(format), reason: "the policy".to_owned() };
    let all = WEIGHTS.iter().map(|(name, ..)| (format!("{LAYER}.{name}.weight"), of(format(name))));
    Some(all.collect())
}

/// Weights in formats that engines do not read get the format asked for, and the reason says so.
#[test]
fn weights_in_other_mx_formats() {
    for (asked, own) in [(Nvfp4, "mxfp4"), (Mxfp8, "mxfp8-e5m2"), (Mxfp8, "mxfp6-e2m3")] {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        let plain = options(root, asked, CompressedTensors);
        model(&plain.input, false);
        quantize_folder(&plain, &mut |_, _| {}).expect("quantized");
        let output = root.join("by policy");
        let assigned = assigned(|_| QuantFormat::named(own).expect("a format"));
        let by_policy = QuantizeFolderOptions { output, assigned, ..plain };
        let report = quantize_folder(&by_policy, &mut |_, _| {}).expect("quantized").report;
        let reason = format!("the policy; engines read no {own}");
        assert_eq!(report.tensors.iter().filter(|it| it.reason == reason).count(), 7, "{own}");
        assert!(read(&root.join("small")) == read(&root.join("by policy")), "{asked:?} {own}");
    }
}

#[test]
fn exceptions_in_mxfp8() {
    for convention in [Modelopt, CompressedTensors] {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        model(&root.join("plain"), false);
        let assigned = assigned(|name| match name {
            "mlp.down_proj" => QuantFormat::MXFP8,
            _ => QuantFormat::NVFP4,
        });
        let mixed = QuantizeFolderOptions { assigned, ..options(root, Nvfp4, convention) };
        quantize_folder(&mixed, &mut |_, _| {}).expect("quantized");
        let quantization = &read_json(&root.join("small/config.json"))["quantization_config"];
        let down = format!("{LAYER}.mlp.down_proj");
        match convention {
            // Engines do not read MXFP8 in mixed precision of ModelOpt.
            Modelopt => {
                assert_eq!(quantization["quant_algo"], json!("W4A16_NVFP4"));
                assert!(quantization["ignore"].as_array().expect("a list").contains(&json!(down)));
                assert_eq!(read(&root.join("small"))[&format!("{down}.weight")].0, "BF16");
            }
            CompressedTensors => {
                assert_eq!(quantization["format"], json!("mixed-precision"));
                let groups = &quantization["config_groups"];
                assert_eq!(groups["group_1"]["targets"], json!([down]));
                assert_eq!(groups["group_1"]["format"], json!("mxfp8-quantized"));
                assert_eq!(groups["group_0"]["targets"].as_array().map(Vec::len), Some(6));
            }
        }
        // MXFP8 is asked for: nothing is less precise.
        let (output, format) = (root.join("all-mxfp8"), Mxfp8);
        let all = QuantizeFolderOptions { output, format, ..mixed };
        quantize_folder(&all, &mut |_, _| {}).expect("quantized");
        let stored = read(&root.join("all-mxfp8"));
        assert!(stored.values().all(|tensor| tensor.0 != "F8_E4M3" || tensor.2.len() > 1024));
        assert!(!stored.keys().any(|name| name.contains("scale_2") || name.contains("global")));
    }
}

#[test]
fn what_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    let quantize = |options: &QuantizeFolderOptions| {
        quantize_folder(options, &mut |_, _| {}).map(|_| ()).map_err(|error| error.to_string())
    };
    let plain = root.join("plain");
    model(&plain, false);
    let given = options(root, Nvfp4, Modelopt);
    let remade = |name: &str, shape: &[usize], value: f32| {
        let data = vec![value; shape.iter().product()];
        write(&plain.join("model.safetensors"), &[WriteTensor::from_f32(name, shape, &data)])
            .expect("written");
        quantize(&given)
    };
    for (name, shape, parts) in [
        // Of gpt-oss.
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            &[2, 64, 128][..],
            ["a matrix for each expert", "gpt-oss"],
        ),
        // Of GPT-2.
        ("h.0.attn.c_attn.weight", &[64, 192], ["[outputs, inputs]", "Conv1D"]),
    ] {
        let error = remade(name, shape, 1.0).expect_err("refused");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    assert!(!root.join("small").exists(), "nothing is left after an error");
    let narrow = remade("model.layers.0.mlp.up_proj.weight", &[64, 24], 1.0);
    assert!(narrow.expect_err("refused").contains("no tensor of the model is to be quantized"));
    model(&plain, false);
    quantize(&given).expect("quantized");
    let small = QuantizeFolderOptions {
        input: root.join("small"),
        output: root.join("again"),
        ..given.clone()
    };
    assert!(quantize(&small).expect_err("refused").contains("already"));
    assert!(quantize(&given).expect_err("refused").contains("exists already"));
    fs::remove_file(plain.join("config.json")).expect("removed");
    assert!(quantize(&given).expect_err("refused").contains("expected `config.json`"));
    let error = dequantize(&plain, &root.join("back"), false).expect_err("refused");
    assert!(matches!(error, QuantizeFileError::NotQuantized { .. }), "{error}");
}

/// Experts have tensors of their own, one tensor scale for the gate and up projection of each, and
/// one format in a layer: a kept down projection keeps all, as one module too.
#[test]
fn experts() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    let plain = root.join("plain");
    model(&plain, false);
    let name = |layer: usize, expert: usize, proj: &str| {
        format!("model.layers.{layer}.mlp.experts.{expert}.{proj}.weight")
    };
    let mut data = Vec::new();
    for (layer, expert) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for (index, proj) in ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate() {
            let magnitude = 1.0 + (3 * expert + index) as f32;
            data.push((name(layer, expert, proj), values(32 * 32, magnitude)));
        }
    }
    let router = values(2 * 32, 1.0);
    let mut tensors: Vec<WriteTensor<'_>> =
        data.iter().map(|(name, data)| WriteTensor::from_f32(name, &[32, 32], data)).collect();
    tensors.push(WriteTensor::from_f32("model.layers.0.mlp.gate.weight", &[2, 32], &router));
    write(&plain.join("model.safetensors"), &tensors).expect("written");
    let assigned = data.iter().map(|(name, _)| {
        let is_kept = name.contains("layers.1.") && name.contains("down_proj");
        let format = (!is_kept).then_some(QuantFormat::NVFP4);
        (name.clone(), AssignedWeight { format, reason: "the policy".to_owned() })
    });
    let assigned = Some(assigned.collect());
    let options = QuantizeFolderOptions { assigned, ..options(root, Nvfp4, Modelopt) };
    quantize_folder(&options, &mut |_, _| {}).expect("quantized");
    let stored = read(&root.join("small"));
    let scale = |expert: usize, proj: &str| {
        let weight = name(0, expert, proj);
        (
            f32_of(&stored[&format!("{weight}_scale_2")]),
            &data.iter().find(|it| it.0 == weight).expect("a weight").1,
        )
    };
    for expert in [0, 1] {
        let (gate, up, down) =
            (scale(expert, "gate_proj"), scale(expert, "up_proj"), scale(expert, "down_proj"));
        let encode = |values: &[f32]| {
            1.0 / nvfp4::encode_scale(nvfp4::amax(values), nvfp4::ScaleBound::Max448)
        };
        assert_eq!((gate.0, up.0, down.0), (encode(up.1), encode(up.1), encode(down.1)));
        assert_eq!(stored[&name(1, expert, "gate_proj")].0, "BF16", "merged with a kept module");
    }
    let ignore = &read_json(&root.join("small/config.json"))["quantization_config"]["ignore"];
    for module in ["model.layers.1.mlp.experts", "model.layers.0.mlp.gate"] {
        assert!(ignore.as_array().expect("a list").contains(&json!(module)), "{ignore}");
    }
    assert!(!ignore.as_array().expect("a list").contains(&json!("model.layers.0.mlp.experts")));
}
