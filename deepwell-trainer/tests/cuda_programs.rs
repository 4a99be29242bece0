//! What training steps become on a GPU. None is needed: planning knows the kernels without one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deepwell_ir::capture::{Gpt2Config, LlamaConfig, ModelConfig, ModelFamily, Pt2Model};
use deepwell_ir::{Graph, Phase, Program, Recompute, Target};
use deepwell_kernels::cuda::Architecture;
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_plan::{
    OptimizerSpec, PlanError, PlanRequest, Planned, autoplan, lower_evaluation, lower_inference,
    usable_bytes,
};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;
use deepwell_trainer::Device;

fn request(precision: &str, seq: usize, global_batch: usize) -> PlanRequest {
    PlanRequest {
        seq,
        global_batch,
        policy: PrecisionPolicy::preset(precision).unwrap(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: None,
        recompute: None,
        saved_activations: Default::default(),
    }
}

fn plan(
    graph: &Graph,
    hardware: &Hardware,
    device: Device,
    request: &PlanRequest,
) -> Result<Planned, PlanError> {
    let (catalog, target) = (device.catalog(), device.target(hardware).unwrap());
    autoplan(graph, hardware, request, catalog.as_ref(), &target)
}

fn preset(name: &str, seq: usize) -> Graph {
    ModelConfig::preset(name).unwrap().capture(Some(seq)).unwrap()
}

/// The ops that quantize, and how often each is called.
fn quantizations(program: &Program) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for call in program.calls.iter().filter(|call| !call.quantizations().is_empty()) {
        *counts.entry(call.op.name().to_string()).or_default() += 1;
    }
    counts
}

#[test]
fn quantizations_ride_along_with_their_producers() {
    let hardware = Hardware::preset("h200-x2").unwrap();
    // Twelve layers of two norms; the first of all has no sum before it. The library's GEMMs of
    // granularity 128 take the sums.
    for (precision, norms, norms_of_sums) in [("mxfp8", 1, 23), ("mxfp8-128", 24, 0)] {
        let request = request(precision, 1024, 32);
        let graph = preset("llama-134m", 1024);
        let program = plan(&graph, &hardware, Device::Cuda(0), &request).unwrap().program;
        let found = quantizations(&program);
        let expected = [
            ("rms_norm_quantize", norms),
            ("add_rms_norm_quantize", norms_of_sums),
            // The last down projection stays in BF16.
            ("swiglu_quantize", 11),
            ("swiglu_backward_quantize", 12),
        ];
        for (name, count) in expected {
            assert_eq!(found.get(name).copied().unwrap_or(0), count, "{name}: {found:?}");
        }
    }
}

/// Tokens of a sequence of the models below.
const SEQ: usize = 16;

/// MXFP8 takes sizes that 32 divides.
const ANY: &[&str] = &["bf16", "mxfp8"];
const ODD: &[&str] = &["bf16"];

/// A model's name, its graph, and the precisions that its sizes allow.
type Model = (String, Graph, &'static [&'static str]);

/// MXFP8 with every way to share exponents.
const ALL: &[&str] = &["bf16", "mxfp8", "mxfp8-128", "mxfp8-2d"];

/// Small mixtures, plain and with all that training may add to them.
fn mixtures() -> Vec<Model> {
    let micro = LlamaConfig::preset("moe-micro").unwrap();
    let mixtral = LlamaConfig {
        family: ModelFamily::Mixtral,
        intermediate_size: micro.experts.as_ref().unwrap().intermediate_size,
        ..micro.clone()
    };
    let training = RouterTraining { balance: 0.01, z: 0.001, capacity_factor: Some(1.25) };
    let of = |config: LlamaConfig| ModelConfig::from(config).capture(Some(SEQ)).unwrap();
    let with_losses = with_router_training(&of(micro.clone()), &training).unwrap();
    vec![
        ("Qwen 3 with experts".to_string(), of(micro), ALL),
        ("Qwen 3 with experts, losses and a limit".to_string(), with_losses, ALL),
        ("Mixtral".to_string(), of(mixtral), ALL),
        ("DeepSeek-V3".to_string(), preset("deepseek-micro", SEQ), ALL),
        ("gpt-oss".to_string(), preset("gpt-oss-micro", SEQ), ALL),
    ]
}

/// A small model of each dense family as it is published, and with what a configuration may choose.
fn dense_models() -> Vec<Model> {
    let mut models: Vec<Model> = Vec::new();
    let mut add = |name: String, config: ModelConfig, precisions| {
        models.push((name, config.capture(Some(SEQ)).unwrap(), precisions));
    };
    let is_dense = |family: &ModelFamily| {
        !family.has_experts() && !family.has_latent_attention() && !family.has_sinks()
    };
    for family in ModelFamily::ALL.into_iter().filter(is_dense) {
        let plain = LlamaConfig {
            family,
            attention_bias: family == ModelFamily::Qwen2,
            sliding_window: (family == ModelFamily::Mistral).then_some(SEQ),
            ..LlamaConfig::preset("llama-micro").unwrap()
        };
        let odd = LlamaConfig {
            hidden_size: 60,
            intermediate_size: 150,
            head_dim: 24,
            vocab_size: 259,
            tie_word_embeddings: true,
            ..plain.clone()
        };
        add(format!("{family:?} of odd sizes, tied"), odd.into(), ODD);
        add(format!("{family:?}"), plain.clone().into(), ANY);
        if family != ModelFamily::Llama {
            continue;
        }
        for head_dim in [8, 80, 96, 128] {
            let config = LlamaConfig { head_dim, num_heads: 4, num_kv_heads: 4, ..plain.clone() };
            add(format!("Llama with heads of {head_dim}"), config.into(), ANY);
        }
        let biased = LlamaConfig { attention_bias: true, mlp_bias: true, ..plain };
        add("Llama with biases".to_string(), biased.into(), ANY);
    }
    let gpt2 = Gpt2Config::preset("gpt2-micro").unwrap();
    for gelu_tanh in [true, false] {
        for tie_word_embeddings in [true, false] {
            let config = Gpt2Config { gelu_tanh, tie_word_embeddings, ..gpt2.clone() };
            let name = format!("gpt2, tangent {gelu_tanh}, tied {tie_word_embeddings}");
            add(name, config.into(), ANY);
        }
    }
    let odd = Gpt2Config { hidden_size: 72, intermediate_size: 90, num_heads: 3, ..gpt2 };
    add("gpt2 of odd sizes".to_string(), odd.into(), ODD);
    models
}

/// Graphs that PyTorch exported; none where the tests run without the fixtures.
fn exported_models() -> Vec<Model> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deepwell-ir/tests/pt2");
    // Not `mistral`: its window is shorter than its sequences, and windows have no backward yet.
    let names = ["gpt2", "gpt2_core", "llama", "llama_core", "llama_eager", "qwen3"];
    let open = |name: &str| {
        let path = folder.join(name).with_extension("pt2");
        let model = path.is_file().then(|| Pt2Model::open(&path).unwrap())?;
        Some((path.display().to_string(), model.graph, ODD))
    };
    names.into_iter().filter_map(open).collect()
}

/// Training, evaluation, and the forward pass that generates.
#[test]
fn models_have_kernels_on_every_gpu() {
    let hardware = Hardware::preset("h200-x2").unwrap();
    let mut devices: Vec<Device> = Architecture::ALL.map(Device::Emulated).to_vec();
    // With the vendor's library.
    devices.push(Device::Cuda(0));
    let mut missing = Vec::new();
    for (name, graph, precisions) in
        dense_models().into_iter().chain(mixtures()).chain(exported_models())
    {
        for (&device, precision) in
            devices.iter().flat_map(|device| precisions.iter().map(move |&name| (device, name)))
        {
            let (catalog, target) = (device.catalog(), device.target(&hardware).unwrap());
            let request = PlanRequest {
                micro_batch: Some(2),
                recompute: Some(Recompute::None),
                memory_limit_bytes: Some(u64::MAX),
                ..request(precision, SEQ, 4)
            };
            let found = plan(&graph, &hardware, device, &request).and_then(|planned| {
                let (plan, program) = (&planned.plan, &planned.program);
                lower_evaluation(&graph, plan, program, catalog.as_ref(), &target)?;
                lower_inference(&graph, &request.policy, SEQ, catalog.as_ref(), &target)
            });
            if let Err(error) = found {
                missing.push(format!("{name} in {precision} on {device}: {error}"));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn every_preset_has_kernels() {
    let hardware = Hardware::preset("h200-x2").unwrap();
    // All but the one whose eighty layers take as long as the others together.
    for name in ModelConfig::presets().filter(|&name| name != "llama-3-70b") {
        let request = PlanRequest {
            micro_batch: Some(1),
            recompute: Some(Recompute::None),
            memory_limit_bytes: Some(u64::MAX),
            ..request("bf16", 128, 1)
        };
        let device = Device::Emulated(Architecture::Sm90a);
        let graph = preset(name, 128);
        if let Err(error) = plan(&graph, &hardware, device, &request) {
            panic!("{name}: {error}");
        }
    }
}

/// A machine with an H200 and a B200.
fn two_kinds() -> Hardware {
    let mut hardware = Hardware::preset("h200-x2").unwrap();
    hardware.gpus[1] = Hardware::preset("b200").unwrap().gpus.remove(0);
    hardware
}

#[test]
fn each_gpu_is_planned_for_by_its_own_memory_and_peaks() {
    let (graph, request) = (preset("llama-micro", 32), request("bf16", 32, 4));
    let hardware = two_kinds();
    let times = [0, 1].map(|index| {
        let planned = plan(&graph, &hardware, Device::Cuda(index), &request).unwrap();
        assert_eq!(planned.plan.device, format!("cuda:{index}"));
        assert_eq!(planned.plan.arch, ["hopper-sm90", "blackwell-sm100"][index]);
        // The same as of a machine that has this GPU alone.
        let alone = Hardware { gpus: vec![hardware.gpus[index].clone()], ..hardware.clone() };
        let expected = plan(&graph, &alone, Device::Cuda(0), &request).unwrap();
        assert_eq!(planned.prediction, expected.prediction);
        planned.prediction.time_s
    });
    assert!(times[1] < times[0], "{times:?}");
    for index in [0, 1] {
        let mut full = hardware.clone();
        full.gpus[index].memory_free_bytes = 1 << 20;
        for device in [0, 1] {
            let planned = plan(&graph, &full, Device::Cuda(device), &request);
            assert_eq!(planned.is_ok(), device != index, "{device} with {index} full");
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_lists_those_that_are() {
    let (graph, request) = (preset("llama-micro", 32), request("bf16", 32, 4));
    let hardware = two_kinds();
    let error = Device::Cuda(2).target(&hardware).unwrap_err().to_string();
    assert!(error.contains("use `cuda:0` (NVIDIA H200) or `cuda:1` (NVIDIA B200)"), "{error}");
    let device = Device::Cuda(0);
    let target = Target { gpu: Some(2), ..device.target(&hardware).unwrap() };
    let result = autoplan(&graph, &hardware, &request, device.catalog().as_ref(), &target);
    let error = result.unwrap_err().to_string();
    assert_eq!(error, "GPU: expected one of 0 (NVIDIA H200), 1 (NVIDIA B200), got 2");
}

/// Whatever GPUs the machine has: an emulated one is in the processor's memory, without a context.
#[test]
fn an_emulated_gpu_has_the_memory_of_the_processor() {
    let graph = preset("llama-micro", 32);
    let request = PlanRequest {
        micro_batch: Some(4),
        recompute: Some(Recompute::None),
        ..request("bf16", 32, 4)
    };
    let device = Device::Emulated(Architecture::Sm90a);
    let mut hardware = two_kinds();
    hardware.cpu.memory_available_bytes = 1 << 30;
    hardware.gpus[0].memory_free_bytes = 0;
    let planned = plan(&graph, &hardware, device, &request).unwrap();
    assert_eq!(planned.plan.device, "emulated:sm90");
    let rank = &planned.prediction.ranks[0];
    // Constants and counters, 2 MiB.
    assert_eq!(rank.bytes_at_peak["backend"], 2 << 20);
    hardware.cpu.memory_available_bytes = rank.peak_bytes;
    assert!(plan(&graph, &hardware, device, &request).is_err_and(|error| {
        matches!(error, PlanError::NothingFits { limit_bytes, .. }
            if limit_bytes == usable_bytes(rank.peak_bytes))
    }));
}

/// Streams take memory for time: where it is short, a plan leaves them out before it recomputes.
#[test]
fn passes_have_one_stream_where_memory_is_short() {
    let hardware = Hardware::preset("h200").unwrap();
    let graph = preset("llama-134m", 1024);
    let planned = |limit_bytes: Option<u64>, micro_batch: Option<usize>| {
        let request = PlanRequest {
            memory_limit_bytes: limit_bytes,
            micro_batch,
            recompute: Some(Recompute::Full),
            ..request("mxfp8-128", 1024, 32)
        };
        plan(&graph, &hardware, Device::Cuda(0), &request)
    };
    let with_streams = planned(None, Some(32)).unwrap();
    let peak = |planned: &Planned| planned.prediction.peak_bytes();
    assert!(!with_streams.plan.one_stream);
    let streams = |planned: &Planned| {
        let passes = planned.program.calls.iter().filter(|call| call.phase != Phase::Weights);
        passes.map(|call| call.stream).max()
    };
    assert!(streams(&with_streams) > Some(0));

    let short = planned(Some(peak(&with_streams) - 1), Some(32)).unwrap();
    assert!(short.plan.one_stream && peak(&short) < peak(&with_streams), "{}", short.plan);
    assert_eq!(streams(&short), Some(0));
    assert!(short.rejected[0].starts_with("micro-batch 32 x 1, recompute full: needs"));
    assert!(short.plan.to_string().contains("streams       one for each pass"), "{}", short.plan);
    assert!(planned(Some(peak(&short) - 1), Some(32)).is_err());

    // Half of the sequences at a time on several streams take less time than all of them on one.
    let free = planned(Some(peak(&with_streams) - 1), None).unwrap();
    let (sizes, ways) = ((free.plan.micro_batch, free.plan.one_stream), &free.rejected);
    assert!(matches!(sizes, (16, false) | (32, true)), "{sizes:?}");
    let other = if sizes.1 { "micro-batch 16 x 2" } else { "recompute full, one stream: at least" };
    assert!(ways.iter().any(|rejected| rejected.contains(other)), "{ways:?}");
}
