//! Settings that a device does not serve: an error, or a warning with a count, never nothing.

use super::*;

const MODEL: &str = "llama-micro";
const MIXTURE: &str = "moe-micro";

/// A policy with a scale rule for experts alone, which no GPU serves; `others` are earlier rules.
fn of_experts(folder: &Folder, others: &str) -> String {
    let operand = "{ scale_rule = \"min_error\" }";
    let operands = [("fprop", "activation"), ("dgrad", "gradient"), ("wgrad", "gradient")];
    let operands = operands.map(|(gemm, of)| format!("{gemm}.{of} = {operand}\n")).concat();
    folder.file(
        "policy.toml",
        format!(
            "precision = \"mxfp8\"\nkeep_first_last_bf16 = false\n{others}[[rule]]\n\
             tensors = \"*.experts.*\"\nformat = \"mxfp8\"\n{operands}"
        ),
    )
}

/// A format on a GPU without kernels for it trained in BF16 and exited with 0.
#[test]
fn issue_31_a_policy_of_which_nothing_is_served_is_an_error() {
    let folder = Folder::new();
    let expected = [
        "expected formats that the device computes",
        "CUDA kernels quantize by the scale rules rceil and floor, not min_error",
        "hint: `bf16` asks for what would run; `allow_fallback` (`--allow-fallback`)",
    ];
    let policy = of_experts(&folder, "[[rule]]\ntensors = \"*\"\nformat = \"bf16\"\n");
    let unserved = ["--policy", &policy, "--device", "emulated:sm90"];
    let train = folder.training(MIXTURE, "1");
    let train: Vec<&str> = train.iter().map(String::as_str).collect();
    check_error(&[&train[..], &unserved].concat(), 2, &expected);
    check_error(&[&["plan", MIXTURE], &unserved[..]].concat(), 2, &expected);
    check_error(&[&["dryrun", MIXTURE], &unserved[..]].concat(), 2, &expected);

    let output = deepwell(&[&["dryrun", MIXTURE, "--allow-fallback"], &unserved[..]].concat());
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let said = "6 tensors in bf16, not mxfp8: CUDA kernels quantize by the scale rules";
    assert!(stderr.contains(&format!("warning: {said}")), "{stderr}");
}

/// In part it is a warning that counts, and the run goes on.
#[test]
fn issue_31_a_policy_of_which_a_part_is_served_is_told() {
    let folder = Folder::new();
    let policy = of_experts(&folder, "");
    let args = ["dryrun", MIXTURE, "--device", "emulated:sm90", "--policy", &policy];
    let output = deepwell(&args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("warning: 6 tensors in bf16, not mxfp8: "), "{stderr}");
}

/// Every GPU has kernels for NVFP4, for experts, too.
#[test]
fn nvfp4_is_served_by_every_gpu() {
    let models = [MODEL, MIXTURE];
    for (model, device) in
        models.into_iter().flat_map(|it| ["sm90", "sm100", "sm103", "sm120"].map(|on| (it, on)))
    {
        let device = format!("emulated:{device}");
        let nvfp4 = ["--precision", "nvfp4", "--device", &device];
        let output = deepwell(&[&["dryrun", model], &nvfp4[..]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(!stderr.contains(" in bf16, not nvfp4: "), "{device}: {stderr}");
    }
}

/// MX formats beyond E4M3 have no kernels on a GPU: an error, or BF16 where that is allowed, with
/// the operand's format in the message.
#[test]
fn mx_formats_beyond_e4m3_are_for_the_cpu() {
    let not_served = |format: &str| format!("CUDA kernels take mxfp8 and nvfp4, not {format}");
    for (precision, format, own) in [
        ("mxfp8-hybrid", "mxfp8-e5m2", "mxfp8"),
        ("mxfp6", "mxfp6-e2m3", "mxfp6-e2m3"),
        ("mxfp6-e3m2", "mxfp6-e3m2", "mxfp6-e3m2"),
        ("mxfp4", "mxfp4", "mxfp4"),
    ] {
        for device in ["emulated:sm90", "emulated:sm100", "emulated:sm120"] {
            let dryrun = ["dryrun", MODEL, "--precision", precision, "--device", device];
            let expected = not_served(format);
            check_error(&dryrun, 2, &["expected formats that the device computes", &expected]);
        }
        let on_sm100 = ["--precision", precision, "--device", "emulated:sm100"];
        let output = deepwell(&[&["dryrun", MODEL, "--allow-fallback"], &on_sm100[..]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        let said = format!(" in bf16, not {own}: {}", not_served(format));
        assert!(stderr.contains(&said), "{precision}: {stderr}");
        let on_cpu = ["dryrun", MODEL, "--precision", precision, "--device", "cpu"];
        let output = deepwell(&on_cpu);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(!stderr.contains("in bf16"), "{stderr}");
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
