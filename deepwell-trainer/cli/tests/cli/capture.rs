//! `deepwell capture` of exported models and mixtures, and what may be done with them.

use super::*;

fn exported(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deepwell-ir/tests/pt2");
    folder.join(name).display().to_string()
}

/// A Mixtral of tiny sizes.
fn mixture(folder: &Folder) -> String {
    let changes = json!({
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 256, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.02
    });
    folder.config("mixtral.json", changes)
}

#[test]
fn an_exported_model_as_a_table() {
    let table = stdout_of(&["capture", &exported("sine.pt2"), "--summary"]);
    let table: Vec<&str> = table.lines().skip(1).collect();
    insta::assert_snapshot!(table.join("\n"), @r"
    family      exported by PyTorch 2.15.0+cu132
    parameters  10,400 in 8 tensors
    layers      0
    weights     in the archive

    tag         nodes       parameters
    embed           1            3,072
    norm            1               64
    mlp             7            4,192
    head            1            3,072
    total          10           10,400

    opaque op                        tag         calls  first
    aten.sin.default                 mlp             1  sin
    aten.topk.default                mlp             1  getitem
    aten.sum.dim_IntList             mlp             1  sum_1
    aten.mul.Tensor                  mlp             1  mul
    ");
    let summary = json_of(&["capture", &exported("gpt2.pt2"), "--summary", "--json"]);
    assert_eq!(summary["family"], "pt2");
    assert_eq!(summary["opaque"], json!([]));
    assert_eq!(summary["layers"], 2);
    assert_eq!(summary["config"], Value::Null);
    let summary = json_of(&["capture", &exported("sine.pt2"), "--summary", "--json"]);
    assert_eq!(
        summary["opaque"][1],
        json!({"op": "aten.topk.default", "tag": "mlp", "calls": 1, "first": "getitem"})
    );
    // The graph itself, with what is opaque on stderr.
    let output = deepwell(&["capture", &exported("sine.pt2")]);
    assert!(text(&output.stdout).contains("= opaque(up) aten.sin.default"));
    assert!(text(&output.stderr).contains("`aten.sin.default` is not known and stays opaque"));
}

#[test]
fn a_mixture_is_counted_and_planned() {
    let folder = Folder::new();
    let model = mixture(&folder);
    let summary = json_of(&["capture", &model, "--summary", "--json"]);
    assert_eq!(summary["family"], "mixtral");
    let tags: Vec<&str> =
        summary["tags"].as_array().unwrap().iter().filter_map(|tag| tag["tag"].as_str()).collect();
    assert_eq!(tags, ["embed", "norm", "attn", "router", "experts", "head"]);
    assert_eq!(summary["keys_without_effect"], json!(["router_aux_loss_coef"]));
    let planned = json_of(&["plan", &model, "--seq", "32", "--json"]);
    assert!(planned["plan"].is_object(), "{planned}");
    let latent = json!({
        "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "kv_lora_rank": 16, "q_lora_rank": null, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1
    });
    let model = folder.file("deepseek.json", latent.to_string());
    // A latent of 24 columns has no blocks of 32.
    let planned = json_of(&["plan", &model, "--seq", "32", "--precision", "bf16", "--json"]);
    let kernels = planned["plan"]["kernels"].as_array().unwrap();
    for op in ["latent_key_value", "count_experts", "selection_bias_update"] {
        assert!(kernels.iter().any(|kernel| kernel["op"] == op), "{op}: {kernels:?}");
    }
}

/// GPT-2 by its name, and exported models with their weights, train like any other.
#[test]
fn gpt2_and_exported_models_train() {
    let folder = Folder::new();
    let data = folder.file("text.txt", "all work and no play makes a dull day. ".repeat(400));
    for (model, precision) in [("gpt2-micro".to_string(), "mxfp8"), (exported("gpt2.pt2"), "bf16")]
    {
        let planned = json_of(&["plan", &model, "--seq", "32", "--precision", precision, "--json"]);
        assert!(planned["plan"].is_object(), "{model}");
        let (out, cache) = (folder.path(precision), folder.path("cache"));
        let args = [
            "train",
            "--model",
            &model,
            "--data",
            &data,
            "--out",
            &out,
            "--cache-dir",
            &cache,
            "--steps",
            "2",
            "--seq-len",
            "32",
            "--batch-size",
            "2",
            "--precision",
            precision,
            "--eval-tokens",
            "64",
        ];
        let output = deepwell(&args);
        let stderr = text(&output.stderr);
        if model == "gpt2-micro" {
            assert_eq!(output.status.code(), Some(0), "{model}: {stderr}");
        } else {
            // Its vocabulary of 96 does not hold every byte.
            assert_eq!(output.status.code(), Some(2), "{model}: {stderr}");
            assert!(stderr.contains("96"), "{stderr}");
        }
    }
    check_error(&["plan", "gpt2-micro", "--seq", "1025"], 2, &["key `n_positions`", "1025"]);
}
