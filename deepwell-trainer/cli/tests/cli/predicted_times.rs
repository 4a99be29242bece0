//! Predicted times of steps beside those that GPUs took.

use super::json_of;

/// Predictions are the least time that calls take, so it is the ratio of two that is compared. The
/// tolerance is what small GEMMs and launches are worth, which no roof counts: llama-134m in MXFP8
/// is the farthest off.
const TOLERANCE: f64 = 0.13;

/// How much faster one run is than another, as measured (`benchmarks/train_h200_2026-11-27.md`,
/// `benchmarks/sm90_attention_part_2026-11-30.md`).
#[test]
fn ratios_of_steps_are_those_measured() {
    let tokens_per_s = |words: &str| {
        let args: Vec<&str> = words.split(' ').chain(["--json"]).collect();
        let predicted = json_of(&args);
        let number = |name: &str| predicted[name].as_f64().expect(name);
        number("tokens") / number("time_s")
    };
    let check = |model: &str, one: &str, other: &str, measured: f64| {
        let of = |options: &str| tokens_per_s(&format!("dryrun {model} {options}"));
        let found = of(other) / of(one);
        let is_near = (found / measured - 1.0).abs() <= TOLERANCE;
        assert!(is_near, "{model} {other} over {one}: {found}, measured {measured}");
    };
    let gpu = "--hardware h200-x1 --device cuda:0";
    let precision = |name: &str| format!("{gpu} --precision {name}");
    let [bf16, by_128] = ["bf16", "mxfp8-128"].map(precision);
    check("llama-1.1b --seq 2048 --batch 8", &bf16, &by_128, 95_230.0 / 74_974.0);
    check("llama-134m --seq 1024 --batch 32", &bf16, &by_128, 663_434.0 / 610_104.0);
    let context = "--hardware h200-x2 --devices cuda:0,cuda:1 --cp 2 --precision bf16";
    check("llama-1.1b --seq 8192 --batch 4", &bf16, context, 104_850.0 / 58_150.0);
}

/// With a scale for 32 elements Hopper multiplies in BF16, after it has dequantized.
#[test]
fn blocks_of_32_promise_nothing_on_hopper() {
    let model = ["dryrun", "llama-1.1b", "--seq", "2048", "--batch", "8", "--json"];
    let gpu = ["--hardware", "h200-x1", "--device", "cuda:0", "--precision"];
    let speedup = |precision: &str| {
        let predicted = json_of(&[&model[..], &gpu, &[precision]].concat());
        predicted["expected_speedup_over_bf16"].as_f64().expect("a speedup")
    };
    for precision in ["mxfp8", "mxfp8-floor", "mxfp8-2d"] {
        let found = speedup(precision);
        assert!(found <= 1.0, "{precision}: {found}");
    }
    assert!(speedup("mxfp8-128") > 1.2);
}

/// Ranks that have some of the experts each gather the tokens of all: buffers have room for several
/// times the rows that come, and GEMMs take no longer for it.
#[test]
fn gemms_of_experts_take_the_rows_that_come() {
    let gemms_s = |ranks: &[&str]| {
        let model = ["dryrun", "moe-1b-a300m", "--seq", "2048", "--batch", "32", "--json"];
        let gpus = ["--hardware", "h100-x4", "--devices", "cuda:0,cuda:1,cuda:2,cuda:3"];
        let predicted =
            json_of(&[&model[..], &gpus, &["--precision", "mxfp8-128"], ranks].concat());
        let ops = predicted["ranks"][0]["ops"].as_array().expect("ops").iter();
        let grouped = ops.filter(|op| op["op"] == "scaled_grouped_gemm");
        grouped.map(|op| op["time_s"].as_f64().expect("a time")).sum::<f64>()
    };
    let alone = gemms_s(&[]);
    for ranks in ["2", "4"] {
        let found = gemms_s(&["--ep", ranks]) / alone;
        assert!((0.95..1.15).contains(&found), "--ep {ranks}: {found}");
    }
}
