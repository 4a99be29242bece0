//! `--precision auto` of plans: which linear layers a GPU computes in which format.

use super::{Folder, json_of};

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
    assert_eq!(counts("llama-1.1b", &on("b200-x1")), [108, 44, 2]);
    let [quantized, in_bf16, ends] = counts("moe-1b-a300m", &on("h200-x1"));
    assert!(quantized > 0 && in_bf16 > 0, "{quantized} {in_bf16} {ends}");
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
