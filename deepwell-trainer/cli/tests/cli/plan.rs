//! `deepwell plan` and `deepwell replan` for clusters.

use std::fs;

use super::{Folder, check_error, json_of, stdout_of};

/// Pages are snapshots of deepwell-plan; here it is what the options do to them.
#[test]
fn options_of_a_plan_for_a_cluster() {
    let args = ["plan", "llama-3-70b", "--hardware", "h100:nodes=8", "--global-batch", "256"];
    // A schedule that the trainer does not have: no program of 64 ranks is lowered, which takes
    // long without optimization.
    let rule = ["--pin", "schedule=zb-h2"];
    let page = |options: &[&str], contains: &[&str]| {
        let page = stdout_of(&[&args[..], &rule, options].concat());
        for part in contains {
            assert!(page.contains(part), "{options:?}: expected `{part}` in: {page}");
        }
    };
    page(
        &["--tokens", "1T", "--price-per-gpu-hour", "3", "--explain"],
        &[
            "plan of \"llama-3-70b\" (70.6B) on 64 x h100 in 8 nodes",
            "linear layers MXFP8, the rest BF16",
            "run of 1,000,000,000,000 tokens: ",
            " at 3 for each",
            "second best: ",
            "best with one other number",
            "network 100.0 GB/s for each GPU",
        ],
    );
    page(&["--precision", "bf16", "--seq", "8192"], &["linear layers BF16", "256 x 8,192 tokens"]);
    page(
        &["--pin", "tp=4", "--pp", "4", "--forbid", "cp", "--as", "megatron"],
        &["TP4+SP PP4 ", "memory in GB as Megatron-LM counts it", "its theoretical report: "],
    );
    page(
        &["--layout", "Et*18|(t*21|)*2t*20L", "--pp", "4"],
        &[" PP4 ", " layers as given ", "layout        Et*18|(t*21|)*2t*20L\n"],
    );
    page(
        &["--pareto", "--max-gpus", "32", "--pin", "mbs=1", "--gpu-memory", "70GB"],
        &["on 32 x h100", "front of time, memory, GPUs and GPU hours", "70.0 may be used"],
    );
}

/// A search of a minute said nothing until its page came.
#[test]
fn a_search_says_on_stderr_what_it_looked_at() {
    let rule = ["--pin", "schedule=zb-h2", "--json"];
    let output =
        super::deepwell(&[&["plan", "llama-134m", "--hardware", "h200-x8"], &rule[..]].concat());
    let lines = super::text(&output.stderr);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let counts = ["considered", "fitting"].map(|name| plan["search"][name].as_u64().expect(name));
    let digits: String = lines.chars().filter(|c| *c != ',').collect();
    let expected = format!("plan: {} combinations {} fit\n", counts[0], counts[1]);
    assert!(digits.contains(&expected), "expected `{expected}` in: {lines}");
    let warning = "sequences among";
    assert!(!plan["plan"]["warnings"].to_string().contains(warning), "{plan}");
}

/// What the trainer runs comes with the plan of its program; degrees on the command line are pins.
#[test]
fn small_worlds_come_with_their_program() {
    let args = ["plan", "llama-134m", "--hardware", "h200-x2", "--seq", "512", "--batch", "32"];
    let degrees = ["--dp", "2", "--zero", "1", "--precision", "bf16"];
    let page = stdout_of(&[&args[..], &degrees].concat());
    assert!(page.contains("DP2 ZeRO-1"), "{page}");
    assert!(page.contains("the trainer   runs this plan"), "{page}");
    assert!(page.contains("each rank runs the plan of \"llama\" on cuda:0"), "{page}");
    assert!(page.contains("ranks         2 = data 2, ZeRO 1"), "{page}");
    let divided = stdout_of(&[&args[..], &["--pin", "zero=3", "--precision", "bf16"]].concat());
    assert!(divided.contains("the trainer   runs this plan"), "{divided}");
    assert!(divided.contains("ranks         2 = data 2, ZeRO 3"), "{divided}");
    let stages = ["--pp", "2", "--pin", "schedule=zb-h1", "--precision", "bf16"];
    let deferred = stdout_of(&[&args[..], &stages].concat());
    assert!(deferred.contains("the trainer   runs this plan"), "{deferred}");
    assert!(deferred.contains("ranks         2 = data 1, pipeline 2, zb-h1"), "{deferred}");
}

/// A page is of a plan that is lowered, rank by rank, and names a faster one that is not run yet.
#[test]
fn plans_that_the_trainer_runs() {
    let small = ["plan", "llama-134m", "--hardware", "h200-x8", "--pp", "2"];
    let rules = ["--forbid", "recompute=none", "--forbid", "recompute=full"];
    let first = stdout_of(&[&small[..], &rules].concat());
    let both = "\n  the trainer   runs this plan\n  not run yet   TP";
    assert!(first.contains(both) && first.contains(" less time and its memory"), "{first}");
    // To insist on such a plan changes nothing where there is one.
    assert_eq!(stdout_of(&[&small[..], &rules, &["--runnable"]].concat()), first);
    let args = ["mixtral-8x7b", "--hardware", "h200-x8", "--seq", "4096", "--batch", "256"];
    let page =
        |command: &str, options: &[&str]| stdout_of(&[&[command], &args[..], options].concat());
    let zero_bubble = page("plan", &["--pin", "schedule=zb-h2", "--pp", "8"]);
    assert!(zero_bubble.contains("does not run this plan yet: schedule"), "{zero_bubble}");
    // There is none that it runs: a pin holds for those, too.
    assert!(!zero_bubble.contains("\n  not run yet "), "{zero_bubble}");
    let stages = ["--runnable", "--pp", "8", "--tokens", "1T"];
    let plan = page("plan", &stages);
    for part in [
        "the trainer   runs this plan",
        "pipeline 8",
        "lowered, a program for each class of ranks",
        "\n  7 ",
        " s predicted; bubble ",
    ] {
        assert!(plan.contains(part), "expected `{part}` in: {plan}");
    }
    // Layers of stages and the micro-batch are those of the search.
    assert!(plan.contains("256 micro-batches of 1\n  ranks "), "{plan}");
    let folder = Folder::new();
    let memory = folder.path("memory.svg");
    assert_eq!(page("dryrun", &[&stages[..], &["--memory-svg", &memory]].concat()), plan);
    assert!(fs::read_to_string(&memory).expect("a picture").contains("stage 7: "));
    check_error(&["dryrun", "llama-micro", "--runnable"], 2, &["--runnable: expected a cluster"]);
}

/// `--runnable` printed plans whose programs do not fit, with exit code 0; where there is none, it
/// names the nearest request that has one.
#[test]
fn runnable_plans_fit_or_say_what_would() {
    let args = ["plan", "llama-134m", "--hardware", "h200-x2", "--seq", "512", "--batch", "64"];
    let with = |memory: &str| {
        let limit = ["--gpu-memory", memory, "--runnable", "--pin", "mbs=8"];
        super::deepwell(&[&args[..], &limit].concat())
    };
    let fits = with("4GB");
    let page = super::text(&fits.stdout);
    assert_eq!(fits.status.code(), Some(0), "{page}");
    assert!(page.contains("the trainer   runs this plan"), "{page}");
    // The memory of the page is that of the programs, which the search counts alike.
    let row = page.lines().find(|line| line.starts_with("  0-1 ")).expect("a class of ranks");
    let columns: Vec<f64> = row.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    assert!(columns[0] <= 4.0 && (columns[1] / columns[0] - 1.0).abs() < 0.05, "{row}");
    let too_large = with("3GB");
    let message = super::text(&too_large.stderr);
    assert_eq!(too_large.status.code(), Some(1), "{message}");
    for part in ["no plan that the trainer runs fits into 2.8 GiB", "  on 4 GPUs: TP", " s a step"]
    {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

#[test]
fn plans_as_files() {
    let folder = Folder::new();
    let (trace, svg, memory) =
        (folder.path("trace.json"), folder.path("step.svg"), folder.path("memory.svg"));
    let machine = ["--hardware", "h100:nodes=2", "--seq", "4096", "--global-batch", "256"];
    let pictures = ["--trace", &trace, "--svg", &svg, "--memory-svg", &memory, "--json"];
    let model = ["plan", "llama-3-8b"];
    let json = stdout_of(&[&model[..], &machine, &["--pin", "pp=4"], &pictures].concat());
    let read = |path: &str| fs::read_to_string(path).expect("a file was written");
    let events: serde_json::Value = serde_json::from_str(&read(&trace)).expect("a trace");
    assert!(events["traceEvents"].as_array().is_some_and(|events| events.len() > 4 * 3));
    assert!(read(&svg).starts_with("<svg") && read(&memory).contains("stage 3: "));

    let plan = folder.file("plan.json", json);
    let replanned = json_of(&["replan", &plan, "--hardware", "h100:nodes=1", "--json"]);
    assert_eq!(replanned["plan"]["machines"]["gpus"], 8);
    assert!(replanned["moves"]["moved_bytes"].as_f64() > Some(0.0), "{replanned}");
    let page = stdout_of(&["replan", &plan, "--hardware", "h100:nodes=1", "--pin", "pp=4"]);
    for part in ["\nwhat moves\n", "  gpus          16 to 8", "of master weights and moments"] {
        assert!(page.contains(part), "expected `{part}` in: {page}");
    }
    // What a machine measured takes the place of what its kind of GPU reaches.
    let mut machine = json_of(&["probe", "--hardware", "h200-x8", "--json"]);
    let gemm = serde_json::json!({
        "format": "bf16", "shape": [8192, 8192, 8192], "kernel": "any", "tflops": 300.0
    });
    machine["measured"] = serde_json::json!({ "gpus": [{ "gemms": [gemm] }] });
    let machine = folder.file("machine.json", machine.to_string());
    let page = stdout_of(&["plan", "llama-3-8b", "--hardware", &machine, "--precision", "bf16"]);
    assert!(page.contains("BF16 GEMMs measured by `deepwell probe --measure`; the rest"), "{page}");

    // Predictions over measurements as a picture, and a table that is not text.
    let picture = folder.path("scores.svg");
    stdout_of(&["score", "--svg", &picture]);
    assert!(read(&picture).contains("megatron_small_memory"));
    let broken = folder.path("broken.csv");
    fs::write(&broken, b"a,b\n1,\xff\n").expect("a table was written");
    check_error(&["score", &broken], 2, &["broken.csv, line 2: expected UTF-8 text"]);

    let small = folder.file("small.json", stdout_of(&["plan", "llama-micro", "--json"]));
    check_error(
        &["replan", &small, "--hardware", "h100-x8"],
        2,
        &["expected a plan for a cluster", "hint: `deepwell plan MODEL --hardware CLUSTER --json`"],
    );
}

#[test]
fn clusters_that_cannot_be_planned_for() {
    let folder = Folder::new();
    let two = "[[nodes]]\ncount = 1\npreset = \"h100-x8\"\nnics = 8\nnic_gbit_per_s = 400\n\
               [[nodes]]\ncount = 1\npreset = \"h200-x8\"\nnics = 8\nnic_gbit_per_s = 400\n";
    let mixed = folder.file("mixed.toml", two);
    let check = |options: &[&str], code: i32, contains: &[&str]| {
        check_error(&[&["plan", "llama-3-8b"], options].concat(), code, contains);
    };
    check(&["--pin", "tp=2"], 2, &["--pin: expected a cluster to plan for", "hint: "]);
    check(&["--hardware", "h100:nodes=x"], 2, &["`nodes`: expected 1 to", "got `x`"]);
    check(&["--hardware", "h100:racks=2"], 2, &["expected the keys `nodes`", "got `racks`"]);
    check(&["--hardware", &mixed], 2, &["machines of one kind", "h100-x8 and h200-x8"]);
    check(&["--hardware", "rtx5090-x2"], 2, &["cluster: expected A100", "GeForce"]);
    let on = |options: &[&'static str]| [&["--hardware", "h100-x8"], options].concat();
    check(&on(&["--pin", "xp=2"]), 2, &["pin: expected one of pp, vpp", "xp=2"]);
    check(&on(&["--forbid", "gpus"]), 2, &["dimension to forbid: expected pp", "`gpus`"]);
    check(&on(&["--layout", "t|t"]), 2, &["layout: expected E, then t for each layer", "`t|t`"]);
    check(&on(&["--layout", "Et*9|t*9L"]), 2, &["the 32 layers of the model, got 18"]);
    check(&on(&["--as", "torch"]), 2, &["accounting: expected `megatron` or `fsdp`"]);
    check(&on(&["--as", "fsdp", "--pin", "pp=2"]), 2, &["hint: add `--pin zero=3"]);
    check(&on(&["--precision", "nvfp4"]), 2, &["expected bf16 or mxfp8, as h100 has no NVFP4"]);
    check(&on(&["--precision", "f32"]), 2, &["expected bf16, mxfp8, nvfp4 or auto, got `f32`"]);
    check(&on(&["--tokens", "many"]), 2, &["expected tokens such as 15T", "many"]);
    check(&on(&["--max-gpus", "0"]), 2, &["--max-gpus: expected at least 1"]);
    check(&on(&["--seq", "0"]), 2, &["--seq: expected at least 1, got 0"]);
    check(&on(&["--gpu-memory", "8GB"]), 1, &["no plan fits", "more memory than a GPU has"]);
}

/// A run that is given a plan trains as one that says the same by hand, and takes nothing that
/// contradicts the plan.
#[test]
fn a_run_keeps_to_its_plan() {
    let folder = Folder::new();
    let corpus: String = (0..2000).map(|line| format!("line {line} says {}\n", line % 7)).collect();
    let (data, cache) = (folder.file("corpus.txt", corpus), folder.path("cache"));
    let sizes = ["--micro-batch", "1", "--precision", "bf16"];
    let ranks = ["--devices", "cpu:2", "--pp", "2", "--pp-layers", "1,1"];
    let batch = ["--seq", "32", "--batch", "4", "--recompute", "full"];
    let plan_of = |name: &str, options: &[&[&str]]| {
        let args = [&["plan", "llama-micro", "--json"], &options.concat()[..]].concat();
        folder.file(name, stdout_of(&args))
    };
    let plan = plan_of("plan.json", &[&sizes, &ranks, &batch]);
    let out = |name: &str| folder.path(name);
    let common = ["train", "--data", &data, "--cache-dir", &cache, "--eval-tokens", "128"];
    let train = |name: &str, options: &[&[&str]]| {
        let out = out(name);
        let args = [&common[..], &["--steps", "2", "--json", "--out", &out], &options.concat()];
        let summary = json_of(&args.concat());
        assert_eq!(summary["ranks"], 2, "{summary}");
        let record = fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics");
        let lines = record.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        let lines: Vec<serde_json::Value> = lines.collect();
        lines.iter().map(|it| [&it["loss"], &it["val_loss"]].map(Clone::clone)).collect::<Vec<_>>()
    };
    let planned = train("planned", &[&["--plan", &plan]]);
    let by_hand = ["--model", "llama-micro", "--seq-len", "32", "--batch-size", "4"];
    let by_hand = train("by-hand", &[&by_hand, &sizes, &ranks, &["--recompute", "full"]]);
    assert_eq!(planned, by_hand);
    let run = fs::read_to_string(format!("{}/run.json", out("planned"))).expect("run.json");
    for part in ["\"seq_len\": 32", "\"batch_size\": 4", "\"format\": \"bf16\""] {
        assert!(run.contains(part), "expected `{part}` in: {run}");
    }

    let refused = |options: &[&str], contains: &[&str]| {
        let new = out("refused");
        check_error(&[&common[..], &["--out", &new], options].concat(), 2, contains);
        assert!(!std::path::Path::new(&new).exists(), "{options:?} left a folder");
    };
    let kept = "hint: leave it to the plan, or make another plan";
    refused(&["--plan", &plan, "--seq-len", "64"], &["seq_len: expected 32, as the plan", kept]);
    refused(&["--plan", &plan, "--precision", "mxfp8"], &["precision: expected", "got \"mxfp8\""]);
    refused(&["--plan", &plan, "--device", "emulated:sm90"], &["device: expected", kept]);
    refused(&["--plan", &plan, "--devices", "cpu:4"], &["ranks: expected 2, as the plan", kept]);
    refused(&["--plan", &plan, "--model", "gpt2-micro"], &["model: expected \"llama-micro\""]);
    let other = plan_of("other.json", &[&["--seq", "32"]]);
    let renamed = fs::read_to_string(&other).unwrap().replace("\"llama-micro\"", "\"gpt2-micro\"");
    let renamed = folder.file("renamed.json", renamed);
    refused(&["--plan", &renamed], &["plan: expected one of this model, got one of `gpt2-micro`"]);
    refused(&["--plan", &data], &["expected what `deepwell plan MODEL --json` prints"]);
    let rules = ["--pin", "schedule=zb-h2", "--json"];
    let cluster = [&["plan", "llama-134m", "--hardware", "h200-x8"], &rules[..]].concat();
    let cluster = folder.file("cluster.json", stdout_of(&cluster));
    refused(&["--plan", &cluster], &["does not run yet: schedule: expected 1f1b or zb-h1"]);
    // `auto` has some of its layers in BF16, by name: programs of few layers do without most.
    let smaller = ["replan", &cluster, "--hardware", "h200-x4", "--json"];
    let smaller = folder.file("smaller.json", stdout_of(&smaller));
    refused(&["--plan", &smaller, "--device", "cpu"], &["device: expected Cuda(0)", kept]);
}

/// What `deepwell replan --json` prints is a plan that trains, with the precision of the old plan.
#[test]
fn a_plan_that_was_made_again_trains() {
    let folder = Folder::new();
    let data = folder.file("text.txt", "a plan is made again for fewer ranks; ".repeat(400));
    let (cache, out) = (folder.path("cache"), folder.path("run"));
    let policy = folder.file("policy.toml", "precision = \"mxfp8\"\nkeep_first_last_bf16 = false");
    let batch = ["--seq", "32", "--batch", "8", "--pin", "zero=1", "--pin", "gpus=4"];
    let cluster = [&["plan", "llama-micro", "--hardware", "h200-x4"], &batch[..]].concat();
    let mut plan = json_of(&[&cluster[..], &["--precision", "mxfp8-128", "--json"]].concat());
    // As if each tensor had been given its precision: it stays when ranks go.
    let args = ["plan", "llama-micro", "--policy", &policy, "--json"];
    plan["program"]["policy"] = json_of(&args)["plan"]["policy"].clone();
    let plan = folder.file("plan.json", plan.to_string());
    let smaller = ["replan", &plan, "--hardware", "h200-x2", "--pin", "dp=2", "--runnable"];
    let text = stdout_of(&[&smaller[..], &["--json"]].concat());
    let on_gpus = folder.file("smaller.json", &text);
    let common = ["train", "--data", &data, "--cache-dir", &cache, "--eval-tokens", "128"];
    let args = [&common[..], &["--steps", "2", "--json", "--out", &out]].concat();
    check_error(&[&args[..], &["--plan", &on_gpus]].concat(), 2, &["GPU"]);
    // The ranks of the plan are threads here.
    let on_cpu = folder.file("cpu.json", text.replace("\"cuda:0\"", "\"cpu\""));
    let summary = json_of(&[&args[..], &["--plan", &on_cpu]].concat());
    assert_eq!((&summary["ranks"], &summary["settings"]["seq_len"]), (&2.into(), &32.into()));
    let tensors = summary["precision"].as_array().expect("tensors");
    let first = tensors.iter().find(|it| it["tensor"].as_str().unwrap().contains("q_proj"));
    let first = first.expect("a query projection");
    assert_eq!(first["reason"], "default of precision `mxfp8`", "{first}");
}

/// A plan with a capacity factor has fewer rows, and a run takes the factor from it.
#[test]
fn a_capacity_factor_is_part_of_a_plan() {
    let folder = Folder::new();
    let sizes = ["--seq", "64", "--batch", "4", "--micro-batch", "2", "--precision", "bf16"];
    let ranks = ["--devices", "cpu:2", "--ep", "2"];
    let of = |command: &str, options: &[&str]| {
        stdout_of(&[&[command, "moe-micro"], &sizes[..], &ranks, options].concat())
    };
    let factor = ["--capacity-factor", "1.25"];
    // Four of eight experts on a rank, two for each of 2 x 128 tokens, or 1.25 x 32 from each rank.
    let rooms = ["640 rows of a layer have room, 256 where", "384 rows of a layer have room, 256"];
    for command in ["plan", "dryrun"] {
        for (options, room) in [&[][..], &factor].into_iter().zip(rooms) {
            let page = of(command, options);
            assert!(page.contains(room), "expected `{room}` in: {page}");
        }
    }
    assert!(of("plan", &factor).contains("capacity      1.25 times the even share of an expert"));
    let corpus: String = (0..2000).map(|line| format!("line {line} says {}\n", line % 7)).collect();
    let (data, cache) = (folder.file("corpus.txt", corpus), folder.path("cache"));
    let plan = folder.file("plan.json", of("plan", &[&factor[..], &["--json"]].concat()));
    let run = |name: &str, options: &[&str]| {
        let out = folder.path(name);
        let common = ["train", "--data", &data, "--cache-dir", &cache, "--eval-tokens", "128"];
        let rest = ["--steps", "1", "--json", "--out", &out];
        let summary = json_of(&[&common[..], &rest, options].concat());
        summary["fit"]["expert_rows"][0]["planned"].clone()
    };
    assert_eq!(run("planned", &["--plan", &plan]), 384);
    let whose = ["--plan", &plan, "--capacity-factor", "2"];
    let out = folder.path("other");
    let args = [&["train", "--data", &data, "--out", &out], &whose[..]].concat();
    check_error(&args, 2, &["router.capacity_factor: expected Some(1.25), as the plan has it"]);

    let refused = |model: &str, options: &[&str], contains: &[&str]| {
        check_error(&[&["plan", model], options].concat(), 2, contains);
    };
    refused("moe-micro", &["--capacity-factor=-1"], &["--capacity-factor: expected a number over"]);
    let hint = "hint: leave `--capacity-factor` out";
    refused("llama-micro", &factor, &["expected a mixture of experts", hint]);
    let cluster = ["--hardware", "h200-x8", "--capacity-factor", "1"];
    refused("llama-3-8b", &cluster, &["capacity factor of experts: expected a model with experts"]);
}

/// A checkpoint of one rank loads under plans of others, and not under one of a wider model.
#[test]
fn whether_a_checkpoint_fits_a_plan() {
    let folder = Folder::new();
    let corpus: String = (0..2000).map(|line| format!("line {line} says {}\n", line % 7)).collect();
    let (data, cache) = (folder.file("corpus.txt", corpus), folder.path("cache"));
    let out = folder.path("run");
    let run = ["train", "--model", "llama-micro", "--seq-len", "32", "--batch-size", "4"];
    let rest = ["--data", &data, "--cache-dir", &cache, "--steps", "1", "--eval-tokens", "128"];
    stdout_of(&[&run[..], &rest, &["--out", &out]].concat());
    let plan_of = |name: &str, options: &[&str]| {
        let args = [&["plan", "--json", "--seq", "32", "--batch", "4"], options].concat();
        folder.file(name, stdout_of(&args))
    };
    let micro = |name: &str, options: &[&str]| plan_of(name, &[&["llama-micro"], options].concat());
    let alone = micro("alone.json", &[]);
    let shares = micro("shares.json", &["--devices", "cpu:4", "--zero", "1"]);
    let stages = micro("stages.json", &["--devices", "cpu:2", "--pp", "2"]);
    let fit = |plan: &str| json_of(&["ckpt", "fits", &out, "--plan", plan, "--json"]);
    let of_alone = fit(&alone);
    assert_eq!(of_alone["fits"], true, "{of_alone}");
    let tensors = |rank: &serde_json::Value| rank["tensors"].as_u64().expect("a count");
    let all = tensors(&of_alone["ranks"][0]);
    let of_shares = fit(&shares);
    assert_eq!(of_shares["fits"], true, "{of_shares}");
    // Its slices of the moments.
    let bytes = |fit: &serde_json::Value| fit["ranks"][0]["bytes"].as_u64().expect("bytes");
    assert!(tensors(&of_shares["ranks"][0]) < all, "{of_shares}");
    assert!((bytes(&of_alone) / 3..bytes(&of_alone) * 2 / 3).contains(&bytes(&of_shares)));
    assert_eq!(of_shares["ranks"][0]["alike"].as_array().map(Vec::len), Some(3));
    let of_stages = fit(&stages);
    let ranks = of_stages["ranks"].as_array().expect("ranks");
    assert_eq!((ranks.len(), ranks.iter().map(tensors).sum::<u64>()), (2, all), "{of_stages}");
    let page = stdout_of(&["ckpt", "fits", &out, "--plan", &shares]);
    assert!(page.contains("rank 0 and 3 like it: peak "), "{page}");

    let config = fs::read_to_string(format!("{out}/model/config.json")).expect("the run's model");
    let wider = config.replace("\"intermediate_size\": 160", "\"intermediate_size\": 192");
    assert_ne!(wider, config);
    let wider = folder.file("wider.json", wider);
    let wider = plan_of("wider-plan.json", &[&wider]);
    let output = super::deepwell(&["ckpt", "fits", &out, "--plan", &wider]);
    assert_eq!(output.status.code(), Some(1));
    let page = String::from_utf8_lossy(&output.stdout);
    for part in ["does not load: step 1", "the plan has [192, 64] F32, the checkpoint [160, 64]"] {
        assert!(page.contains(part), "expected `{part}` in: {page}");
    }
}

/// What cannot be split is said before the data is looked at, with the degrees that can be had.
#[test]
fn heads_that_ranks_do_not_divide_are_refused_before_data_is_read() {
    let folder = Folder::new();
    let (nowhere, out) = (folder.path("nowhere.txt"), folder.path("run"));
    let ranks = ["--devices", "cpu:2", "--tp", "2"];
    let says = ["expected key-value heads that they divide, got 1"];
    let train = ["train", "--model", "llama-micro", "--data", &nowhere, "--out", &out];
    check_error(&[&train[..], &ranks].concat(), 2, &says);
    assert!(!std::path::Path::new(&out).exists());
    check_error(&[&["plan", "llama-micro"], &ranks[..]].concat(), 2, &says);
}
