//! Settings that a device does not serve: an error, or a warning with a count, never nothing.

use super::*;

const MODEL: &str = "llama-micro";

/// `nvfp4` on a GPU without kernels for it trained in BF16 and exited with 0. The last blocks are
/// in MXFP8, which a GPU serves, and this does not change the answer.
#[test]
fn issue_31_a_policy_of_which_nothing_is_served_is_an_error() {
    let folder = Folder::new();
    let expected = [
        "expected formats that the device computes",
        "CUDA kernels for blackwell-sm100 take mxfp8, not nvfp4",
        "hint: `bf16` asks for what would run; `allow_fallback` (`--allow-fallback`)",
    ];
    let nvfp4 = ["--precision", "nvfp4", "--device", "emulated:sm100"];
    let train = folder.training(MODEL, "1");
    let train: Vec<&str> = train.iter().map(String::as_str).collect();
    check_error(&[&train[..], &nvfp4].concat(), 2, &expected);
    check_error(&[&["plan", MODEL], &nvfp4[..]].concat(), 2, &expected);
    check_error(&[&["dryrun", MODEL], &nvfp4[..]].concat(), 2, &expected);

    let output = deepwell(&[&["dryrun", MODEL, "--allow-fallback"], &nvfp4[..]].concat());
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    // The last block of two is in MXFP8.
    let said =
        "6 tensors in bf16, not nvfp4: CUDA kernels for blackwell-sm100 take mxfp8, not nvfp4";
    assert!(stderr.contains(&format!("warning: {said}")), "{stderr}");
}

/// In part it is a warning that counts, and the run goes on.
#[test]
fn issue_31_a_policy_of_which_a_part_is_served_is_told() {
    let folder = Folder::new();
    let policy = folder.file(
        "policy.toml",
        "precision = \"mxfp8\"\nkeep_first_last_bf16 = false\n[[rule]]\ntensors = \"*.up_proj.*\"\n\
         format = \"nvfp4\"\n",
    );
    let args = ["dryrun", MODEL, "--device", "emulated:sm100", "--policy", &policy];
    let output = deepwell(&args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("warning: 2 tensors in bf16, not nvfp4: "), "{stderr}");
}

/// Hopper has kernels for NVFP4, but not for experts, whose tensors are counted.
#[test]
fn nvfp4_on_hopper_is_served_for_all_but_experts() {
    let nvfp4 = ["--precision", "nvfp4", "--device", "emulated:sm90"];
    for (model, expected) in [(MODEL, None), ("moe-micro", Some("CUDA kernels of experts"))] {
        let output = deepwell(&[&["dryrun", model], &nvfp4[..]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert_eq!(stderr.contains(" in bf16, not nvfp4: "), expected.is_some(), "{stderr}");
        assert!(stderr.contains(expected.unwrap_or_default()), "{stderr}");
    }
}

/// On Hopper the default is a precision that its FP8 units compute, as in training.
#[test]
fn issue_31_plans_default_to_the_precision_of_the_device() {
    for (device, precision, expected) in [
        ("emulated:sm90", None, "128x128"),
        ("emulated:sm100", None, "1x32"),
        ("cpu", None, "1x32"),
        ("emulated:sm90", Some("mxfp8"), "1x32"),
    ] {
        let mut args = vec!["plan", MODEL, "--device", device, "--json"];
        args.extend(precision.into_iter().flat_map(|name| ["--precision", name]));
        let plan = json_of(&args);
        let policy = plan["plan"]["policy"].to_string();
        let wide = policy.contains("\"granularity\":\"128\"") || policy.contains("128");
        assert_eq!(wide, expected == "128x128", "{device} {precision:?}: {policy}");
    }
    check_error(
        &["plan", MODEL, "--precision", "fp8"],
        2,
        &["got `fp8`", "hint: eight bits are `mxfp8-128` on Hopper and `mxfp8` elsewhere"],
    );
}
