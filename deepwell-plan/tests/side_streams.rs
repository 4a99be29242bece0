//! Calls of a GPU that run beside those of the stream that computes: which ones, what that keeps in
//! memory, and what it is predicted to save.

#[path = "common/anywhere.rs"]
mod anywhere;
#[expect(dead_code, reason = "other tests want more of it")]
mod common;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Order, PrecisionPolicy, Program, Target, verify_program};
use deepwell_plan::{Scheduling, autoplan, dryrun, lower_scheduled};
use deepwell_probe::Hardware;

use anywhere::Anywhere;
use common::{Kernels, request};

fn program(layers: usize, arch: &str, in_turns: bool) -> Program {
    let model = LlamaConfig { num_layers: layers, ..LlamaConfig::preset("llama-micro").unwrap() };
    let graph = capture(&model).unwrap();
    let wanted = request(PrecisionPolicy::mxfp8(), 32, 2);
    let plan = autoplan(&graph, &common::hardware(), &wanted, &Kernels, &common::target());
    let plan = plan.unwrap().plan;
    let mut scheduling = Scheduling::of(&plan);
    if in_turns {
        scheduling.stream_of = Some(&|_| 0);
    }
    let target = Target { arch: arch.to_string(), gpu: Some(0), ..common::target() };
    let program = lower_scheduled(&graph, &plan, &scheduling, &Anywhere, &target).unwrap();
    verify_program(&program).unwrap();
    program
}

fn call(program: &Program, name: &str) -> usize {
    let found = program.calls.iter().position(|call| call.name == name);
    found.unwrap_or_else(|| {
        let names: Vec<&str> = program.calls.iter().map(|call| call.name.as_str()).collect();
        panic!("no call `{name}` in {names:#?}")
    })
}

#[test]
fn what_does_not_depend_on_each_other_runs_at_the_same_time() {
    let program = program(4, "sm_90a", false);
    let order = Order::of(&program.calls, &program.bodies).unwrap();
    for (a, b, expected) in [
        // Queries, keys and values, and their rotations.
        ("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj", true),
        ("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj", true),
        ("layers.1.self_attn.q_rope", "layers.1.self_attn.k_rope", true),
        ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", true),
        ("layers.1.mlp.up_proj", "layers.1.mlp.down_proj", false),
        // Gradients of weights beside what is behind them, as far as to the layer after the next.
        ("layers.2.mlp.down_proj.wgrad", "layers.2.mlp.down_proj.dgrad", true),
        ("layers.2.mlp.down_proj.wgrad", "layers.2.self_attn.attention.backward", true),
        ("layers.2.mlp.down_proj.wgrad", "layers.1.mlp.down_proj.dgrad", true),
        ("layers.2.mlp.down_proj.wgrad", "layers.0.mlp.down_proj.dgrad", false),
        ("layers.2.mlp.down_proj.wgrad", "layers.1.mlp.down_proj.wgrad", false),
    ] {
        let (a_at, b_at) = (call(&program, a), call(&program, b));
        let beside = !order.is_before(a_at, b_at) && !order.is_before(b_at, a_at);
        assert_eq!(beside, expected, "`{a}` and `{b}`");
    }
}

#[test]
fn a_processor_has_one_stream() {
    let program = program(4, "cpu", false);
    assert!(program.calls.iter().all(|call| call.stream == 0 && call.waits.is_empty()));
}

/// What gradients of weights read is kept for a layer longer, in however many layers.
#[test]
fn memory_grows_by_a_layer_of_many() {
    let grown = [4, 16].map(|layers| {
        let [beside, in_turns] = [false, true].map(|turns| program(layers, "sm_90a", turns));
        beside.arena.transient_bytes() - in_turns.arena.transient_bytes()
    });
    let layer = (program(5, "sm_90a", true).arena.transient_bytes())
        - program(4, "sm_90a", true).arena.transient_bytes();
    assert!(grown.iter().all(|&grown| grown <= layer), "{grown:?}, a layer {layer}");
}

/// Streams share a device: two of them do not compute in half of the time.
#[test]
fn streams_of_one_device_are_predicted_to_take_as_long_as_one() {
    let hardware = Hardware::preset("h200").unwrap();
    let [beside, in_turns] = [false, true]
        .map(|turns| dryrun(&[program(4, "sm_90a", turns)], &hardware).ranks[0].time_s);
    assert!((beside / in_turns - 1.0).abs() < 1e-9, "{beside} s, in turns {in_turns} s");
}
