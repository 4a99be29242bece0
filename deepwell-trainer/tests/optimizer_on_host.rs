//! An optimizer whose state lies in host memory: the bits are those of an optimizer on the device,
//! and the device holds no master weights and moments of matrices.

mod kernels_needed;

use deepwell_ir::capture::{LlamaConfig, ModelConfig};
use deepwell_ir::ops::MomentFormat;
use deepwell_ir::{Graph, MemoryKind, Op, Program};
use deepwell_kernels::cuda::Architecture;
use deepwell_plan::OptimizerSpec;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Device, Engine, compile};

use crate::kernels_needed::need_kernels;

const SEQ: usize = 32;
const ROWS: usize = 4;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph(model: &str) -> Graph {
    let config = ModelConfig::preset(model).expect("a preset");
    config.capture(Some(SEQ)).expect("a graph")
}

/// A step's plan apart from the model.
#[derive(Clone, Debug)]
struct Case {
    precision: &'static str,
    optimizer: OptimizerSpec,
    micro_batch: usize,
    device: Device,
}

impl Case {
    fn new(precision: &'static str) -> Case {
        let optimizer = OptimizerSpec::default();
        Case { precision, optimizer, micro_batch: ROWS, device: Device::Cpu }
    }

    fn engine(&self, graph: &Graph, on_host: bool) -> Engine {
        let policy = PrecisionPolicy::preset(self.precision).expect("a preset");
        let options = CompileOptions {
            micro_batch: Some(self.micro_batch),
            optimizer: OptimizerSpec { on_host, ..self.optimizer.clone() },
            device: self.device,
            ..CompileOptions::new(policy, SEQ, ROWS)
        };
        let mut engine = compile(graph.clone(), hardware(), &options).expect("an engine");
        engine.initialize(5).expect("weights");
        engine
    }
}

/// Bits of losses and gradient norms, and the program.
fn steps(mut engine: Engine) -> (Vec<(u32, u32)>, Program) {
    let step = |step: usize| {
        let token = |at: usize| ((step * 7919 + at * at * 31 + at * 7) % 256) as i32;
        let inputs: Vec<i32> = (0..ROWS * SEQ).map(token).collect();
        let targets: Vec<i32> = (0..ROWS * SEQ).map(|at| token(at + 1)).collect();
        let outcome = engine.step(&inputs, &targets, 1e-2, 1.0).expect("a step");
        (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
    };
    ((0..4).map(step).collect(), engine.program().clone())
}

fn bytes_of(program: &Program, kind: MemoryKind) -> usize {
    program.values_of(kind).map(|value| value.range.bytes).sum()
}

/// Trains with the state on the device and on the host, and compares.
fn check(graph: &Graph, case: &Case) {
    let what = format!("{}, {case:?}", graph.name);
    let (expected, before) = steps(case.engine(graph, false));
    let (got, after) = steps(case.engine(graph, true));
    assert_eq!(got, expected, "{what}");
    let offloaded = bytes_of(&after, MemoryKind::Offloaded);
    let moved = bytes_of(&before, MemoryKind::Optimizer) - bytes_of(&after, MemoryKind::Optimizer);
    assert_eq!(moved, offloaded, "{what}");
    // Small tensors stay, and parameters that passes read in FP32.
    assert!(offloaded * 2 > bytes_of(&before, MemoryKind::Optimizer), "{what}: {offloaded}");
    let copies = after.calls.iter().filter(|call| matches!(call.op, Op::HostCopy(_))).count();
    assert!(copies > 0, "{what}");
    if case.device != Device::Cpu {
        assert!(after.device_bytes() < before.device_bytes(), "{what}");
    }
}

#[test]
fn the_bits_are_those_of_an_optimizer_on_the_device() {
    for model in ["llama-micro", "gpt2-micro", "moe-micro"] {
        let graph = graph(model);
        for precision in ["bf16", "mxfp8", "nvfp4"] {
            check(&graph, &Case::new(precision));
        }
        let fp8 = OptimizerSpec { moments: MomentFormat::Fp8, ..OptimizerSpec::default() };
        check(&graph, &Case { optimizer: fp8.clone(), ..Case::new("mxfp8") });
        check(&graph, &Case { micro_batch: 1, ..Case::new("mxfp8") });
        let in_backward = OptimizerSpec { in_backward: true, ..fp8 };
        check(&graph, &Case { optimizer: in_backward, ..Case::new("mxfp8") });
    }
}

#[test]
fn the_emulated_gpu_copies_between_two_memories() {
    need_kernels((9, 0));
    let config = LlamaConfig {
        hidden_size: 128,
        intermediate_size: 256,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 64,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    let graph = ModelConfig::from(config).capture(Some(SEQ)).expect("a graph");
    let device = Device::Emulated(Architecture::Sm90a);
    for in_backward in [false, true] {
        let optimizer = OptimizerSpec { in_backward, ..OptimizerSpec::default() };
        check(&graph, &Case { optimizer, device, ..Case::new("mxfp8") });
    }
}
