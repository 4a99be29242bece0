//! Tests of the search.

use std::collections::HashMap;

use super::*;
use crate::ModelShape;
use crate::gpu_model::GpuModel;
use deepwell_lower::schedule::PipelineSchedule;

fn request(model: &str, seq: usize, batch: usize, gpu: GpuModel, gpus: usize) -> SearchRequest {
    let shape = ModelShape::known(model).unwrap();
    SearchRequest::new(shape, seq, batch, Machines::of_gpus(gpu, gpus))
}

fn page(request: &SearchRequest, found: &Found) -> String {
    let plan = ClusterPlan::new(request, found, Some(1e12)).unwrap();
    let text = format!("{plan}{}{}", explanation(found, &[]), found.front_table(request));
    // What the trainer runs is another test's subject.
    let lines = text.lines().filter(|line| !line.starts_with("  the trainer "));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn eight_gpus_and_eight_experts() {
    for gpu in [GpuModel::h200(), GpuModel::b200()] {
        let name = format!("mixtral_{}_x8", gpu.name);
        let mut request = request("mixtral-8x7b", 16384, 64, gpu, 8);
        request.machines.price_per_gpu_hour = Some(2.5);
        let found = search(&request).unwrap();
        insta::assert_snapshot!(name, page(&request, &found));
    }
}

/// What a search of the largest worlds takes is in proportion to what it looks at; docs/planner.md
/// has the seconds.
#[test]
fn large_worlds_are_searched_whole() {
    let mut text = String::new();
    for (model, seq) in [("llama-3.1-405b", 8192), ("deepseek-v3", 4096)] {
        let request = request(model, seq, 16384, GpuModel::h100(), 16384);
        let found = search(&request).unwrap();
        let (considered, fitting) = (found.considered, found.fitting);
        text += &format!("{model}: {considered} looked at, {fitting} fit: {}\n", found.best.at);
        assert_eq!(found.best.at.gpus(), 16384);
        let plan = ClusterPlan::new(&request, &found, None).unwrap();
        assert_eq!(plan.stages.len(), found.best.at.pp);
        assert!(plan.memory_bytes() <= request.memory_limit_bytes(), "{}", plan.memory_bytes());
    }
    insta::assert_snapshot!("large_worlds", text);
}

#[test]
fn pins_hold_and_lose() {
    let free = request("llama-3-70b", 8192, 256, GpuModel::h100(), 64);
    let best = search(&free).unwrap().best;
    let check = |pin: Pin, holds: fn(&Strategy) -> bool| {
        let pinned = SearchRequest { pins: vec![pin], ..free.clone() };
        let found = search(&pinned).unwrap().best;
        assert!(holds(&found.at), "{pin:?}: {}", found.at);
        assert!(found.seconds >= best.seconds * 0.98, "{pin:?}: {}", found.seconds);
    };
    let pin = |text: &str| text.parse::<Pin>().unwrap();
    check(pin("tp=2"), |at| at.tp == 2);
    check(pin("pp=4"), |at| at.pp == 4);
    check(pin("recompute=norms"), |at| at.recompute == crate::ActivationRecompute::Norms);
    check(pin("recompute=full"), |at| at.recompute == crate::ActivationRecompute::Full);
    check(pin("schedule!=1f1b"), |at| at.schedule != PipelineSchedule::OneFOneB);
    check(Pin::forbid("cp").unwrap(), |at| at.cp == 1);
    // Values that are not looked at otherwise.
    check(pin("vpp=10"), |at| at.vpp == 10);
    let both = SearchRequest {
        pins: vec![pin("pp=2"), pin("zero=3"), pin("schedule=1f1b")],
        ..free.clone()
    };
    // Each micro-batch gathers and reduces all of a stage.
    let (three, one) = (
        search(&both).unwrap(),
        search(&SearchRequest {
            pins: vec![pin("pp=2"), pin("zero=1"), pin("schedule=1f1b")],
            ..free.clone()
        })
        .unwrap(),
    );
    assert_eq!((three.best.at.pp, three.best.at.zero), (2, 3));
    let gathered = |found: &Found| found.step.communication.data.seconds;
    assert!(gathered(&three) > 4.0 * gathered(&one), "{:?} {:?}", three.step, one.step);
    check(Pin::forbid("tp=8").unwrap(), |at| at.tp != 8);
    for wrong in ["tp", "xp=4", "tp=four", "schedule=fast"] {
        assert!(wrong.parse::<Pin>().is_err(), "{wrong}");
    }
    for wrong in ["xp", "gpus", "tp=four"] {
        assert!(Pin::forbid(wrong).is_err(), "{wrong}");
    }
}

/// States of 70 billion parameters are more than eight GPUs have; those of the optimizer alone are
/// two thirds of them. An optimizer on the host takes longer, so that it is asked for.
#[test]
fn the_host_takes_the_optimizer_where_it_is_pinned() {
    let mut request = request("llama-3-70b", 8192, 8, GpuModel::h100(), 8);
    let error = search(&request).unwrap_err();
    assert!(matches!(error, PlanError::NothingFits { .. }));
    let message = error.to_string();
    assert!(message.contains("with `--pin offload=1` there is a plan: TP"), "{message}");
    request.pins = vec!["offload=1".parse().unwrap()];
    let found = search(&request).unwrap();
    let plan = ClusterPlan::new(&request, &found, None).unwrap();
    let memory = plan.stages[0].memory;
    assert!(memory.optimizer == 0.0 && memory.host_optimizer > 80e9, "{memory:?}");
    assert!(plan.not_run_yet.is_none() && plan.step.optimizer > 1.0, "{:?}", plan.step);
    request.pins = vec!["offload=0".parse().unwrap()];
    assert!(matches!(search(&request), Err(PlanError::NothingFits { .. })));
}

/// Seconds of the best plan, infinite where there is none.
fn best_seconds(request: &SearchRequest) -> f64 {
    search(request).map_or(f64::INFINITY, |found| found.best.seconds)
}

/// More memory gave a slower plan: 43.2 s with 22 GB, 322.7 s with 24 GB, as an optimizer on the
/// host was taken only where nothing else fitted.
#[test]
fn more_memory_is_never_slower() {
    let check = |model: &str, gpu: GpuModel, gpus: usize| {
        let request = SearchRequest { fp8: true, ..request(model, 4096, 1024, gpu, gpus) };
        let mut before = f64::INFINITY;
        for gigabytes in [18.0, 22.0, 24.0, 27.0, 32.0, 40.0, 55.0, 64.0, 80.0, 141.0, 280.0] {
            let gpu_memory_bytes = Some(gigabytes * 1e9);
            let seconds = best_seconds(&SearchRequest { gpu_memory_bytes, ..request.clone() });
            assert!(seconds <= before, "{model}, {gigabytes} GB: {seconds} s, {before} with less");
            before = seconds;
        }
        assert!(before.is_finite());
    };
    check("llama-3-70b", GpuModel::h100(), 64);
    check("mixtral-8x7b", GpuModel::h200(), 16);
    check("llama-3-8b", GpuModel::b200(), 8);
}

#[test]
fn more_bandwidth_is_never_slower() {
    let check = |model: &str, gpus: usize| {
        let request =
            SearchRequest { fp8: true, ..request(model, 4096, 256, GpuModel::h100(), gpus) };
        for of_network in [true, false] {
            let mut before = f64::INFINITY;
            for times in [0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0] {
                let mut faster = request.clone();
                match of_network {
                    true => faster.machines.fabric.nic_gbps *= times,
                    false => faster.machines.fabric.nvlink_share *= times,
                }
                let seconds = best_seconds(&faster);
                let what = if of_network { "network" } else { "NVLink" };
                assert!(seconds <= before, "{model}, {what} x {times}: {seconds} s, {before} s");
                before = seconds;
            }
        }
    };
    check("llama-3-8b", 16);
    check("mixtral-8x7b", 16);
}

/// Twelve nodes were compared with eight alone, which may be slower than eleven or ten.
#[test]
fn more_gpus_are_never_slower() {
    let check = |model: &str, batch: usize, nodes: &[usize]| {
        let mut known: HashMap<usize, f64> = HashMap::new();
        let mut seconds_on = |gpus: usize| {
            *known.entry(gpus).or_insert_with(|| {
                let request = request(model, 4096, batch, GpuModel::h100(), gpus);
                best_seconds(&SearchRequest { fp8: true, ..request })
            })
        };
        let mut before = (f64::INFINITY, 0);
        for &nodes in nodes {
            let machines = Machines::of_gpus(GpuModel::h100(), 8 * nodes);
            let tried = machines.counts(8 * nodes).into_iter();
            let seconds = tried.map(&mut seconds_on).fold(f64::INFINITY, f64::min);
            assert!(seconds <= before.0, "{model}, {nodes} nodes: {seconds} s, {before:?} before");
            before = (seconds, nodes);
        }
        assert!(before.0.is_finite());
    };
    let all: Vec<usize> = (1..=16).collect();
    check("llama-3-8b", 256, &all);
    check("llama-3-70b", 360, &all[7..]);
    check("mixtral-8x7b", 256, &all[1..6]);
    check("llama-3-8b", 1024, &[16, 18, 20, 22, 24]);
}

/// With four layers on each of eight stages the last one has the head as well, which is as much to
/// compute as two layers of this model.
#[test]
fn ends_as_layers_balance_the_stages() {
    let mut request = request("llama-3-8b", 8192, 128, GpuModel::h100(), 16);
    let pins = ["pp=8", "tp=2", "cp=1", "vpp=1", "schedule=1f1b", "mbs=1", "recompute=selective"];
    request.pins = pins.map(|pin| pin.parse().unwrap()).to_vec();
    let free = search(&request).unwrap().best;
    assert_eq!(free.at.split, crate::LayerSplit::Ends);
    let with = |request: &SearchRequest, split: &str| {
        let pins = [request.pins.clone(), vec![format!("split={split}").parse().unwrap()]].concat();
        search(&SearchRequest { pins, ..request.clone() }).unwrap().best
    };
    let (ends, even) = (with(&request, "ends"), with(&request, "even"));
    assert!(even.seconds > 1.05 * ends.seconds, "{} {}", even.seconds, ends.seconds);
    assert_eq!(ends, free);
    // With two layers less a stage of four is left with two beside the head.
    let mut fewer = request.clone();
    fewer.shape.layers = 30;
    let (ends, balanced) = (with(&fewer, "ends"), search(&fewer).unwrap().best);
    assert_eq!(balanced.at.split, crate::LayerSplit::Balanced);
    assert!(ends.seconds > 1.1 * balanced.seconds, "{} {}", ends.seconds, balanced.seconds);
    // The same stages as a layout; one with a stage that is twice as long takes longer.
    let mut given = request.clone();
    let layout = crate::memory::layout(&given.shape, &free.at);
    given.shape.chunk_layers = crate::memory::parse_layout(&layout, 32).unwrap();
    let same = search(&given).unwrap().best;
    assert_eq!((same.seconds, same.memory_bytes), (free.seconds, free.memory_bytes), "{layout}");
    given.shape.chunk_layers = vec![4, 8, 4, 4, 4, 4, 2, 2];
    let long = search(&given).unwrap().best;
    assert!(long.seconds > 1.5 * free.seconds, "{} {}", long.seconds, free.seconds);
    given.shape.chunk_layers = vec![16, 16];
    given.pins.clear();
    assert_eq!(search(&given).unwrap().best.at.pp, 2);
    request.pins.push("split=even".parse().unwrap());
    request.pins.push("sp=0".parse().unwrap());
    let without = search(&request).unwrap().best;
    assert!(!without.at.sp && without.memory_bytes > even.memory_bytes, "{}", without.at);
}

/// What is made again is not held: each op less memory and more time, all of them most of both.
#[test]
fn ops_are_recomputed_one_by_one() {
    let mut request = request("deepseek-v3", 4096, 2048, GpuModel::h200(), 2048);
    let pins = ["pp=16", "tp=1", "cp=1", "vpp=1", "schedule=1f1b", "ep=8", "mbs=1", "split=even"];
    request.pins = pins.map(|pin| pin.parse().unwrap()).to_vec();
    let of = |rule: &str| {
        let mut request = request.clone();
        request.gpu_memory_bytes = Some(1e12);
        request.pins.push(format!("recompute={rule}").parse().unwrap());
        let best = search(&request).unwrap().best;
        (best.seconds, best.memory_bytes)
    };
    let (none, norms, activations) = (of("none"), of("norms"), of("activations"));
    let (selective, full) = (of("selective"), of("full"));
    for (less, more) in
        [(none, norms), (none, activations), (norms, selective), (activations, selective)]
    {
        assert!(more.0 > less.0 && more.1 < less.1, "{less:?} {more:?}");
    }
    assert!(full.0 > selective.0 && full.1 < selective.1, "{selective:?} {full:?}");
}

/// A plan that the trainer does not run was the page's, and one that it runs was an aside.
#[test]
fn plans_that_the_trainer_runs_come_first() {
    let mut request = request("mixtral-8x7b", 16384, 64, GpuModel::h200(), 8);
    request.by_trainer = ByTrainer::First;
    let found = search(&request).unwrap();
    assert!(found.best.at.parallel().is_ok(), "{}", found.best.at);
    let faster = found.faster.clone().unwrap();
    assert!(faster.at.parallel().is_err() && faster.seconds < found.best.seconds, "{faster:?}");
    let what_if = found.what_if.iter().find(|(dimension, _)| *dimension == Dimension::Tp);
    assert!(what_if.is_some_and(|(_, other)| other.at.parallel().is_ok()), "{what_if:?}");
    let page = ClusterPlan::new(&request, &found, None).unwrap().to_string();
    assert!(page.contains(&format!("\n  not run yet   {}: ", faster.at)), "{page}");
    // To insist on it changes nothing where there is one.
    request.by_trainer = ByTrainer::Only;
    let only = search(&request).unwrap();
    assert_eq!((only.best, only.faster), (found.best, found.faster));
    // Where there is none, the best of the others is taken, or that is an error.
    request.pins = ["pp=4", "schedule=zb-h2"].map(|pin| pin.parse().unwrap()).to_vec();
    assert!(matches!(search(&request), Err(PlanError::NoPlan { .. })));
    request.by_trainer = ByTrainer::First;
    let found = search(&request).unwrap();
    assert!(found.best.at.parallel().is_err() && found.faster.is_none(), "{found:?}");
    request.by_trainer = ByTrainer::Only;
    let pins = ["pp=4", "vpp=1", "schedule=zb-h1"];
    request.pins = pins.map(|pin| pin.parse().unwrap()).to_vec();
    let found = search(&request).unwrap();
    assert_eq!(found.best.at.parallel().unwrap().schedule, PipelineSchedule::ZbH1);
    // Too large for eight GPUs but with an optimizer on the host, which is not run yet.
    let mut large = super::tests::request("llama-3-70b", 8192, 8, GpuModel::h100(), 8);
    large.by_trainer = ByTrainer::Only;
    assert!(matches!(search(&large), Err(PlanError::NoPlan { .. })));
}

/// Small models want more sequences at a time than large ones, and batches have other divisors than
/// powers of two.
#[test]
fn micro_batches_are_as_large_as_is_good() {
    let mut small = request("llama-134m", 1024, 96, GpuModel::h200(), 1);
    let best = search(&small).unwrap().best;
    assert!(best.at.micro_batch >= 16, "{}", best.at);
    small.pins = vec!["mbs=24".parse().unwrap()];
    assert_eq!(search(&small).unwrap().best.at.micro_batches, 4);
}

/// "No plan fits into 75.7 GiB" stood above reasons that were not memory.
#[test]
fn headings_of_no_plan_name_the_reason() {
    let check = |pins: &[&str], gigabytes: f64, by_trainer: ByTrainer, heading: &str, why: &str| {
        let mut request = request("llama-3-70b", 8192, 8, GpuModel::h100(), 8);
        request.gpu_memory_bytes = Some(gigabytes * 1e9);
        request.pins = pins.iter().map(|pin| pin.parse().unwrap()).collect();
        request.by_trainer = by_trainer;
        let error = search(&request).unwrap_err();
        assert!(error.is_no_plan());
        let message = error.to_string();
        assert!(message.starts_with(heading), "{message}");
        assert!(message.contains(why) && message.contains("\nhint: "), "{message}");
    };
    let too_large = "needs more memory than a GPU has";
    check(&[], 20.0, ByTrainer::Whatever, "no plan fits into 18.6 GiB of memory", too_large);
    let of_trainer = "no plan that the trainer runs fits into 18.6 GiB of memory";
    check(&[], 20.0, ByTrainer::Only, of_trainer, too_large);
    let none = "no plan for 8 GPUs and 8 sequences";
    check(&["dp=3"], 70.0, ByTrainer::Whatever, none, "forbidden by a pin");
    let twice = ["pp=4", "schedule=zb-h2"];
    check(&twice, 70.0, ByTrainer::Only, none, "the trainer does not run it yet");
}

/// That 72 does not divide the batch was not said, and half of the speed was lost.
#[test]
fn batches_that_gpus_do_not_divide_are_named() {
    let check = |batch: usize, gpus: usize, expected: Option<&str>| {
        let request = request("llama-3-8b", 4096, batch, GpuModel::h100(), gpus);
        let plan = ClusterPlan::new(&request, &search(&request).unwrap(), None).unwrap();
        let warning = plan.warnings.iter().find(|warning| warning.contains(" share a batch of "));
        assert_eq!(warning.map(String::as_str), expected, "{batch} {gpus}");
    };
    check(
        1024,
        72,
        Some(
            "72 GPUs share a batch of 1,024 sequences among 8 data-parallel ranks at most; with \
             `--batch 1008` or `--batch 1080` among 72",
        ),
    );
    check(1080, 72, None);
    check(1024, 64, None);
    // Fewer sequences than GPUs: as many ranks as have a sequence each.
    check(16, 64, None);
    check(
        12,
        32,
        Some(
            "32 GPUs share a batch of 12 sequences among 4 data-parallel ranks at most; with \
             `--batch 8` or `--batch 16` among 8",
        ),
    );
}

/// A table of 64 ranks with their own numbers in each column filled the page.
#[test]
fn ranks_are_listed_where_the_table_says_more_than_their_number() {
    let check = |at: Strategy, expected: bool| {
        let map = RankMap::new(&at, &Machines::of_gpus(GpuModel::h100(), at.gpus()));
        assert_eq!(map.to_string().contains("\nrank  node  domain"), expected, "{at}");
        assert_eq!(map.places.len(), at.gpus());
    };
    check(Strategy { dp: 8, ..Strategy::SINGLE }, false);
    check(Strategy { pp: 8, ..Strategy::SINGLE }, false);
    check(Strategy { dp: 8, ep: 8, ..Strategy::SINGLE }, false);
    check(Strategy { dp: 8, ep: 4, ..Strategy::SINGLE }, true);
    check(Strategy { dp: 4, tp: 2, ..Strategy::SINGLE }, true);
}

/// The parts of a step are the step; the stages' memory is the candidate's.
#[test]
fn plans_add_up() {
    for (model, gpus, pins) in [
        ("mixtral-8x7b", 16, &["ep=8"][..]),
        ("llama-3-70b", 64, &["pp=4", "tp=4"]),
        ("llama-3-8b", 16, &["zero=3", "pp=1"]),
        ("llama-3-8b", 16, &["cp=4"]),
    ] {
        let mut request = request(model, 8192, 128, GpuModel::h100(), gpus);
        request.pins = pins.iter().map(|pin| pin.parse().unwrap()).collect();
        let found = search(&request).unwrap();
        let plan = ClusterPlan::new(&request, &found, Some(1e12)).unwrap();
        let step = &plan.step;
        let parts = [step.compute(), step.bubble_s, step.optimizer];
        assert!(parts.iter().all(|part| *part >= 0.0), "{model}: {step:?}");
        for (name, overlap) in step.communication.kinds() {
            assert!((0.0..=overlap.seconds * 1.001).contains(&overlap.exposed), "{model} {name}");
        }
        let ranks: usize = plan.stages.iter().map(|stage| stage.ranks.len()).sum();
        let layers: usize = plan.stages.iter().map(|stage| stage.layers.count()).sum();
        assert_eq!((ranks, layers), (gpus, plan.model.layers));
        // The search takes a closed form, the plan the order of the ops.
        let (exact, closed) = (plan.memory_bytes(), found.best.memory_bytes);
        assert!((exact / closed - 1.0).abs() < 0.03, "{model}: {exact} {closed}");
        let run = plan.run.unwrap();
        assert!((run.gpu_hours / run.hours - gpus as f64).abs() < 1e-6);
    }
}

#[test]
fn bubbles_come_with_a_cure() {
    let mut request = request("llama-3-70b", 4096, 64, GpuModel::h100(), 64);
    request.pins = ["pp=8", "vpp=1", "schedule=1f1b", "tp=4"].map(|p| p.parse().unwrap()).to_vec();
    let found = search(&request).unwrap();
    assert!(found.step.bubble > BUBBLE_MAX, "{}", found.step.bubble);
    let plan = ClusterPlan::new(&request, &found, None).unwrap();
    let warning = &plan.warnings[0];
    let batch = warning.split("--batch ").nth(1).and_then(|rest| rest.split('`').next());
    // With the batch that the warning names the same degrees have a small bubble.
    request.global_batch = batch.expect(warning).parse().unwrap();
    let at = found.best.at;
    for pin in [format!("mbs={}", at.micro_batch), format!("cp={}", at.cp)] {
        request.pins.push(pin.parse().unwrap());
    }
    let cured = search(&request).unwrap();
    assert!(cured.step.bubble <= BUBBLE_MAX * 1.1, "{warning}: {}", cured.step.bubble);
}

#[test]
fn other_numbers_do_what_they_should() {
    let request = request("llama-3-70b", 8192, 512, GpuModel::h100(), 128);
    let found = search(&request).unwrap();
    let all = what_if(&request, &found, &SearchAids::default()).unwrap();
    let change = |part: &str| {
        all.iter().find(|what| what.change.starts_with(part)).and_then(|what| what.time_change)
    };
    assert!(change("network 25.0").unwrap() >= 0.0);
    assert!(change("network 100.0").unwrap() <= 0.0);
    assert!(change("NVLink 185 GB/s").unwrap() >= 0.0);
    assert!(change("NVLink 742 GB/s").unwrap() <= 0.0);
    assert!(change("linear layers in MXFP8").unwrap() < 0.0);
    assert!(all.len() == 8 && change("batch 1024").is_some(), "{all:?}");
}

/// More rows on the busiest rank take more time there. Buffers have room for any routing anyway.
#[test]
fn imbalance_costs_time() {
    let mut request = request("mixtral-8x7b", 8192, 64, GpuModel::h200(), 8);
    request.pins = ["ep=8", "cp=1", "tp=1", "mbs=1", "recompute=none", "zero=1"]
        .map(|pin| pin.parse().unwrap())
        .to_vec();
    request.gpu_memory_bytes = Some(1e12);
    let of = |times: f64| {
        let request = SearchRequest { expert_imbalance: times, ..request.clone() };
        search(&request).map(|found| (found.best.seconds, found.best.memory_bytes))
    };
    let (even, twice) = (of(1.0).unwrap(), of(2.0).unwrap());
    assert!(twice.0 > 1.3 * even.0 && twice.1 == even.1, "{even:?} {twice:?}");
    assert!(of(0.5).is_err() && of(f64::NAN).is_err());
    let found = search(&request).unwrap();
    let all = what_if(&request, &found, &SearchAids::default()).unwrap();
    let worse = all.iter().find(|what| what.change == "experts imbalanced by 1.20").unwrap();
    assert!(worse.time_change.unwrap() > 0.0);
}

/// Of eight ranks with an expert each, tokens can send a rank four times the mean of rows.
#[test]
fn a_capacity_limits_time_and_memory() {
    let dense = request("llama-3-8b", 8192, 128, GpuModel::h200(), 8);
    let mut request = request("mixtral-8x7b", 8192, 64, GpuModel::h200(), 8);
    request.pins = ["ep=8", "cp=1", "tp=1", "mbs=1", "recompute=none", "zero=1"]
        .map(|pin| pin.parse().unwrap())
        .to_vec();
    request.gpu_memory_bytes = Some(1e12);
    let of = |factor: f64| {
        let request = SearchRequest { capacity_factor: Some(factor), ..request.clone() };
        search(&request).map(|found| (found.best.seconds, found.best.memory_bytes))
    };
    let costs = [0.5, 1.0, 2.0, 4.0].map(|factor| of(factor).unwrap());
    assert!(costs.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1), "{costs:?}");
    assert_eq!(of(4.0).unwrap(), of(100.0).unwrap());
    assert!(of(0.0).is_err() && of(f64::INFINITY).is_err());
    let dense = SearchRequest { capacity_factor: Some(1.0), ..dense };
    let error = search(&dense).unwrap_err().to_string();
    assert!(error.contains("expected a model with experts"), "{error}");
}

#[test]
fn another_world_says_what_moves() {
    let plan = |gpus: usize| {
        let request = request("llama-3-8b", 8192, 128, GpuModel::h200(), gpus);
        ClusterPlan::new(&request, &search(&request).unwrap(), None).unwrap()
    };
    let (sixteen, eight) = (plan(16), plan(8));
    let moves = replan(&sixteen, &eight);
    assert!(moves.changes.iter().any(|change| change.dimension == Dimension::Gpus));
    assert!(moves.moved_bytes > 0.0 && moves.moved_bytes <= moves.state_bytes);
    assert!(moves.rank_bytes_max * 8.0 >= moves.moved_bytes);
    let same = replan(&eight, &eight);
    assert!(same.changes.is_empty() && same.moved_bytes == 0.0, "{same:?}");
    // A plan goes through JSON and stays what it is.
    let text = serde_json::to_string(&sixteen).unwrap();
    let read: ClusterPlan = serde_json::from_str(&text).unwrap();
    assert_eq!(read.strategy, sixteen.strategy);
    assert_eq!(replan(&read, &eight), moves);
}

#[test]
fn memory_as_others_count_it() {
    let mut request = request("llama-3-8b", 8192, 64, GpuModel::h100(), 8);
    let of = |request: &SearchRequest| {
        ClusterPlan::new(request, &search(request).unwrap(), None).unwrap()
    };
    let plan = of(&request);
    let megatron = Count::of(&plan, Accounting::Megatron).unwrap();
    assert_eq!(megatron.stages.len(), plan.strategy.pp);
    // Neither context nor NCCL.
    assert!(megatron.stages[0].outside == 0.0 && megatron.theoretical.is_some());
    request.pins = ["zero=3", "pp=1", "tp=1"].map(|pin| pin.parse().unwrap()).to_vec();
    let plan = of(&request);
    let fsdp = Count::of(&plan, Accounting::Fsdp).unwrap();
    let memory = &fsdp.stages[0];
    let states = memory.parameters + memory.gradients + memory.optimizer;
    // 16 bytes of each parameter over all ranks.
    let expected = 16.0 * plan.model.parameters() / 8.0;
    assert!((states / expected - 1.0).abs() < 0.001, "{states} {expected}");
    request.pins = vec!["pp=2".parse().unwrap()];
    let message = Count::of(&of(&request), Accounting::Fsdp).unwrap_err().to_string();
    assert!(message.contains("hint: add `--pin zero=3"), "{message}");
}

#[test]
fn the_front_has_nothing_beaten() {
    let mut request = request("llama-3-8b", 8192, 128, GpuModel::h200(), 16);
    request.gpus = vec![16, 8, 4];
    let front = search(&request).unwrap().front;
    assert!(front.iter().any(|one| one.at.gpus() == 4));
    for (at, a) in front.iter().enumerate() {
        for b in &front[at + 1..] {
            let beaten = a.seconds <= b.seconds
                && a.memory_bytes <= b.memory_bytes
                && a.at.gpus() <= b.at.gpus()
                && a.gpu_seconds() <= b.gpu_seconds();
            assert!(!beaten, "{} beats {}", a.at, b.at);
        }
    }
}
