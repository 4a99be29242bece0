//! What commands print, whole. The machine is a described one, so that numbers are the same
//! everywhere.

use std::fs;

use super::{Folder, stdout_of};

/// Snapshots a table without the temporary folder's name.
fn check(name: &str, folder: &Folder, args: &[&str]) {
    let here = fs::canonicalize(folder.0.path()).expect("the folder is there");
    let output = stdout_of(args)
        .replace(&here.display().to_string(), "FOLDER")
        .replace(&folder.0.path().display().to_string(), "FOLDER");
    // How long it took is another number each time.
    insta::with_settings!({ filters => vec![(r"(?m)^  time .*$", "  time [times]")] }, {
        insta::assert_snapshot!(name, output);
    });
}

#[test]
fn tables_of_each_command() {
    let folder = Folder::new();
    folder.checkpoints();
    let checkpoints = folder.path("checkpoints");
    let machine = ["--hardware", "cpu", "--seq", "32", "--batch", "2"];
    let of_model = |command: &'static str| [&[command, "llama-micro"], &machine[..]].concat();
    check("dryrun", &folder, &of_model("dryrun"));
    check("plan_explain", &folder, &[&of_model("plan")[..], &["--explain"]].concat());
    check("probe_hardware", &folder, &["probe", "--hardware", "h200-x2"]);
    check("probe_cluster", &folder, &["probe", "--cluster", "gb300-nvl72-x2"]);
    check("capture_summary", &folder, &["capture", "gpt2-micro", "--summary"]);
    check("ckpt_inspect", &folder, &["ckpt", "inspect", &checkpoints, "--tensors"]);
    check("ckpt_verify", &folder, &["ckpt", "verify", &checkpoints]);
    folder.training("llama-micro", "1");
    let (data, out) = (folder.path("data.txt"), folder.path("tokenizer.json"));
    let tokenizer = ["tokenizer", "train", "--data", &data, "--vocab-size", "300", "--out", &out];
    check("tokenizer_train", &folder, &tokenizer);
}

/// A cluster from a file, and what is none.
#[test]
fn clusters_from_files() {
    let folder = Folder::new();
    let text = "rails = 8\n[[nodes]]\ncount = 16\npreset = \"h200-x8\"\nnics = 8\n\
                nic_gbit_per_s = 400\n";
    let racks = folder.file("racks.toml", text);
    let summary = super::json_of(&["probe", "--cluster", &racks, "--json"]);
    assert_eq!((&summary["nodes"], &summary["gpus"]), (&16.into(), &128.into()));
    assert_eq!(summary["kinds"][0]["network_gbps_per_gpu"], 50.0);
    assert_eq!(summary["peak_tflops"]["bf16"], 128.0 * 989.0);
    let broken = folder.file("broken.toml", text.replace("16", "0"));
    let check = |args: &[&str], contains: &[&str]| {
        super::check_error(&[&["probe"], args].concat(), 2, contains);
    };
    check(&["--cluster", &broken], &["broken.toml", "line 3", "got `0`"]);
    check(&["--cluster", "hgx-h20"], &["got `hgx-h20`", "gb200-nvl72"]);
    check(&["--hardware", "h20"], &["got `h20`", "hint: "]);
    check(&["--hardware", "h200-x2", "--measure"], &["cannot be used with"]);
}

/// `--check` fails where the fixes of the refusals are to be made first.
#[test]
fn machines_that_training_is_refused_on() {
    let folder = Folder::new();
    let mut machine = super::json_of(&["probe", "--hardware", "h200-x2", "--json"]);
    let sound = folder.file("sound.json", machine.to_string());
    assert_eq!(super::deepwell(&["probe", "--check", "--hardware", &sound]).status.code(), Some(0));
    machine["gpus"][1]["mig"] = true.into();
    let divided = folder.file("divided.json", machine.to_string());
    let output = super::deepwell(&["probe", "--check", "--hardware", &divided]);
    let stderr = super::text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("refused: gpu1: divided into MIG instances\nhint: "), "{stderr}");
}

/// What is measured stands beside the hardware, which `--hardware` takes as before.
#[test]
fn measurements_of_this_machine() {
    let folder = Folder::new();
    let probed = super::json_of(&["probe", "--measure", "--json"]);
    let cpu = &probed["measured"]["cpu"];
    assert_eq!(cpu["copy_gbps"], probed["cpu"]["memory_gbps"]);
    for (gemm, format) in cpu["gemms"].as_array().unwrap().iter().zip(["fp32", "bf16"]) {
        assert_eq!(gemm["format"], format);
        assert!(gemm["tflops"].as_f64() > Some(0.0), "{gemm}");
    }
    let machine = folder.file("machine.json", probed.to_string());
    stdout_of(&["plan", "llama-micro", "--hardware", &machine, "--seq", "32", "--json"]);
    let table = stdout_of(&["probe", "--measure"]);
    for part in ["\nmeasured\nCPU              copy ", "  fp32 ", "  bf16 ", "1024 x 1024 x 1024"] {
        assert!(table.contains(part), "expected `{part}` in: {table}");
    }
}

/// What differs from machine to machine is the matrix instructions that kernels run on.
#[test]
fn a_plan_as_a_table() {
    let plan = stdout_of(&["plan", "llama-micro", "--seq", "32", "--batch", "2"]);
    insta::with_settings!({ filters => vec![(r"_(amx|avx512|f32)\b", "_[tier]")] }, {
        insta::assert_snapshot!(plan, @r#"
        plan of "llama" on cpu
          batch         2 x 32 tokens = 1 micro-batches of 2
          recompute     none
          optimizer     in buckets of 160.0 MiB of gradients
          embedding                     1 x cpu_embedding
          rms_norm                      1 x cpu_rms_norm
          quantize                     31 x cpu_quantize
          linear                        2 x cpu_linear_[tier]
          scaled_gemm                  36 x cpu_scaled_gemm_[tier]
          rope                          4 x cpu_rope
          attention                     2 x cpu_attention_[tier]
          add_rms_norm                  4 x cpu_add_rms_norm
          swiglu                        2 x cpu_swiglu
          linear_cross_entropy_grad     1 x cpu_linear_cross_entropy_grad_[tier]
          rms_norm_backward             5 x cpu_rms_norm_backward
          linear_wgrad                  2 x cpu_linear_wgrad_[tier]
          linear_dgrad                  2 x cpu_linear_dgrad_[tier]
          swiglu_backward               2 x cpu_swiglu_backward
          add                           6 x cpu_add
          attention_backward            2 x cpu_attention_backward_[tier]
          rope_backward                 4 x cpu_rope_backward
          embedding_backward            1 x cpu_embedding_backward
          grad_norm                     1 x cpu_grad_norm
          adamw_coefficients            1 x cpu_adamw_coefficients
          adamw                         1 x cpu_adamw
          cast                          9 x cpu_cast
             1 tensors  bf16: role `embedding` stays `bf16`
             5 tensors  bf16: role `norm` stays `bf16`
             1 tensors  bf16: first linear tensor in execution order stays `bf16`
            12 tensors  mxfp8: default of precision `mxfp8`
             1 tensors  bf16: last linear tensor in execution order stays `bf16`
             1 tensors  bf16: role `head` stays `bf16`
        "#);
    });
}
