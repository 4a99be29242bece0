//! `--precision auto` of plans: which linear layers a GPU computes in which format.

use super::{Folder, deepwell, json_of, text};

/// GPT-2 of the width of the encoders in `benchmarks/train_h200_2026-11-27.md`.
fn encoder(folder: &Folder, width: usize) -> String {
    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 256, "n_positions": 512, "n_embd": width,
        "n_layer": 4, "n_head": width / 64,
    });
    folder.file("config.json", config.to_string())
}

/// Linear layers by what they got: quantized, in BF16 as they are not predicted faster, in BF16 as
/// the first or the last.
fn counts(model: &str, options: &[&str]) -> [usize; 3] {
    let args = [&["plan", model, "--device", "cuda:0", "--json"], options].concat();
    let plan = json_of(&args);
    let tensors = plan["plan"]["precision"].as_array().expect("tensors").iter();
    let reason = |it: &'_ serde_json::Value| it["reason"].as_str().expect("text").to_string();
    let reasons: Vec<String> = tensors.map(reason).collect();
    let count = |parts: &[&str]| {
        let is_one = |reason: &&String| parts.iter().any(|part| reason.contains(part));
        reasons.iter().filter(is_one).count()
    };
    [
        count(&["default of precision"]),
        // Without a layer that is faster the policy is that of BF16.
        count(&["not predicted faster", "precision `bf16` applies"]),
        count(&["linear tensor in execution order"]),
    ]
}

/// On the H200 a forward pass of the encoders took 1.91 and 1.60 times as long in MXFP8 as in BF16,
/// a step of llama-134m and of llama-1.1b 0.92 and 0.79 times.
#[test]
fn layers_are_quantized_where_that_is_faster() {
    let folder = Folder::new();
    let check = |model: &str, options: &str, is_quantized: bool| {
        let options: Vec<&str> = options.split(' ').collect();
        let [quantized, in_bf16, ends] = counts(model, &options);
        match is_quantized {
            true => assert!(quantized > 4 * (in_bf16 + ends), "{model}: {quantized} {in_bf16}"),
            false => assert_eq!((quantized, ends), (0, 0), "{model}: {in_bf16}"),
        }
    };
    let on_h200 = |sizes: &str| format!("--hardware h200-x1 {sizes}");
    check(&encoder(&folder, 256), &on_h200("--seq 128 --batch 4"), false);
    check(&encoder(&folder, 512), &on_h200("--seq 256 --batch 4"), false);
    check("llama-134m", &on_h200("--seq 1024 --batch 32"), true);
    check("llama-1.1b", &on_h200("--seq 2048 --batch 8"), true);
    // Named, the precision holds for all.
    check("llama-micro", &on_h200("--seq 128 --batch 8 --precision mxfp8-128"), true);
    check("llama-micro", &on_h200("--seq 128 --batch 8"), false);
}

/// Formats differ within a model where its layers do: key and value projections of few heads are
/// narrow. The rules of the policy reach these layers alone.
#[test]
fn narrow_layers_stay_in_bf16_beside_wide_ones() {
    let sizes = ["--seq", "2048", "--batch", "8"];
    let on = |hardware: &'static str| [&["--hardware", hardware][..], &sizes].concat();
    // 22 layers of seven; key and value projections have 256 rows.
    assert_eq!(counts("llama-1.1b", &on("h200-x1")), [152, 0, 2]);
    // The last four blocks are in MXFP8 by the recipe of NVFP4, but for their narrow layers.
    assert_eq!(counts("llama-1.1b", &on("b200-x1")), [89, 44, 2]);
    let [quantized, in_bf16, ends] = counts("moe-1b-a300m", &on("h200-x1"));
    assert!(quantized > 0 && in_bf16 > 0, "{quantized} {in_bf16} {ends}");
}

/// Hopper has no tensor cores for four bits, and a model may be too small for any format. The plan
/// has what was chosen, so that a run of the plan trains in the same formats.
#[test]
fn each_gpu_takes_the_fastest_format_of_its_tensor_cores() {
    let check = |model: &str, options: &str, format: &str, in_nvfp4: usize| {
        let options: Vec<&str> = options.split(' ').collect();
        let args = [&["plan", model, "--device", "cuda:0", "--json"], &options[..]].concat();
        let plan = json_of(&args)["plan"].take();
        assert_eq!(plan["policy"]["format"], format, "{model} {options:?}");
        let tensors = plan["precision"].as_array().expect("tensors").iter();
        let count = tensors.filter(|tensor| tensor["format"] == "nvfp4").count();
        assert_eq!(count, in_nvfp4, "{model} {options:?}");
        let stderr = text(&deepwell(&args).stderr);
        let times = stderr.split(": all layers in ").nth(1).unwrap_or_default();
        let of_gpu = if options.contains(&"h200-x1") { "mxfp8-128 " } else { "nvfp4 " };
        assert!(times.starts_with("bf16 ") && times.contains(of_gpu), "{stderr}");
    };
    check("llama-1.1b", "--hardware h200-x1 --seq 2048 --batch 8", "mxfp8", 0);
    check("llama-1.1b", "--hardware b200-x1 --seq 2048 --batch 8", "nvfp4", 89);
    // No multiple of the tokens that the recipe transforms together.
    check("llama-1.1b", "--hardware b200-x1 --seq 2040 --batch 8", "mxfp8", 0);
    // Experts are faster in MXFP8: quantization to NVFP4 reads them twice.
    check("moe-1b-a300m", "--hardware b200-x1 --seq 2048 --batch 8", "mxfp8", 0);
    check("llama-micro", "--hardware b200-x1 --seq 128 --batch 8", "bf16", 0);
}

/// The processor shows the numerics of MXFP8, whatever it takes; so does a GPU that it emulates.
#[test]
fn a_processor_keeps_the_preset() {
    let precision = |device: &str| {
        let plan = json_of(&["plan", "llama-micro", "--device", device, "--json"]);
        plan["plan"]["policy"]["format"].as_str().map(str::to_string)
    };
    assert_eq!(precision("cpu").as_deref(), Some("mxfp8"));
    assert_eq!(precision("emulated:sm90").as_deref(), Some("mxfp8"));
}
