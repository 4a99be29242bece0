//! `deepwell quantize`: what is in the files, there and back, and what is refused.

use std::collections::BTreeMap;

use deepwell_ckpt::hf::{WriteTensor, open_model_folder, write};
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
    let opened = open_model_folder(Path::new(&small)).expect("an index that fits its shards");
    assert_eq!(opened.tensors().len(), 5 + 3);
    stdout_of(&["quantize", &small, &back, "--dequantize"]);
    let opened = open_model_folder(Path::new(&back)).expect("an index that fits its shards");
    let shapes: Vec<&[usize]> = opened.tensors().map(|(_, tensor)| &tensor.shape[..]).collect();
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
