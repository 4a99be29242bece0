//! Ranks that have weights in slices gather quantized ones as data and scales, in place of FP32
//! masters: the bits of ranks that have them whole, over fewer bytes.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Call, Op, Phase, Program};
use deepwell_trainer::{CompileOptions, Parallel, World};

use crate::ranks::reference::SEED;
use crate::train::{compile, options, run, step, wide};

const STEPS: usize = 3;

fn world(precision: &str, zero: u8, ranks: usize) -> World {
    compile(&wide(), &options(precision, zero, ranks, 1))
}

/// Names of the gathers of weights.
fn gathers(program: &Program) -> Vec<&Call> {
    let is_gather = |call: &&Call| {
        matches!(&call.op, Op::Collective(_)) && call.name.starts_with("all_gather.")
    };
    program.calls.iter().filter(is_gather).filter(|call| call.phase != Phase::Optimizer).collect()
}

#[test]
fn quantized_weights_train_as_those_of_whole_masters_do() {
    for (precision, ranks) in
        [("mxfp8", 2), ("mxfp8", 4), ("mxfp8-128", 2), ("mxfp8-2d", 2), ("mxfp8-floor", 2)]
    {
        let expected = run(world(precision, 0, ranks), 0, STEPS);
        for zero in [2, 3] {
            let world = world(precision, zero, ranks);
            let scales = gathers(world.first().program());
            assert!(scales.iter().any(|call| call.name.contains(".planes.")));
            let got = run(world, zero, STEPS);
            let what = format!("ZeRO {zero}, {precision}, {ranks} ranks");
            assert_eq!(
                (&got.steps, got.evaluated),
                (&expected.steps, expected.evaluated),
                "{what}"
            );
            assert!(got.masters == expected.masters, "{what}: masters");
        }
    }
}

/// Four bytes an element of what comes as masters; one and a thirty-second of what comes quantized:
/// in ZeRO 2 along both axes, in ZeRO 3 along that which a pass reads.
#[test]
fn planes_that_a_pass_reads_are_gathered() {
    let listed = |zero: u8| {
        let program = world("mxfp8", zero, 2).first().program().clone();
        let gathers = gathers(&program).into_iter().filter(|call| call.layer.is_none());
        let is_quantized = |call: &&Call| !call.name.starts_with("all_gather.weights.");
        let listed = gathers.filter(is_quantized).map(|call| {
            let names = call.outputs().iter().map(|it| &*program.value(it.value).name);
            let names: Vec<&str> = names.collect();
            format!("{} {} {}", call.name, call.cost.bytes_on_link, names.join(" "))
        });
        listed.collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!("zero_2", listed(2));
    insta::assert_snapshot!("zero_3", listed(3));
}

/// Of a stack of experts ranks have whole matrices, which arrive where they lie along both axes.
#[test]
fn experts_train_as_those_of_whole_masters_do() {
    let graph = capture(&LlamaConfig::preset("moe-micro").unwrap()).unwrap();
    for (ranks, expert) in [(2, 1), (4, 2)] {
        let world = |zero: u8| {
            let options = options("mxfp8", zero, ranks, 1);
            let parallel = Parallel { expert, ..options.parallel };
            let options = CompileOptions { parallel, ..options };
            compile(&graph, &options)
        };
        let steps = |zero: u8| {
            let ends = world(zero).on_all(|engine| {
                engine.initialize(SEED)?;
                (0..STEPS).map(|at| step(engine, at)).collect::<Result<Vec<_>, _>>()
            });
            ends.unwrap()
        };
        let expected = steps(0);
        for zero in [2, 3] {
            let program = world(zero).first().program().clone();
            let of_experts = |call: &&Call| {
                let mut slices = call.inputs().iter().map(|it| program.value(it.value));
                call.name.contains(".planes.") && slices.any(|slice| slice.name.contains("experts"))
            };
            assert!(gathers(&program).iter().any(of_experts), "{ranks} ranks");
            let joins = program.calls.iter().filter(|call| matches!(call.op, Op::JoinParts(_)));
            assert_eq!(joins.filter(|call| call.name.contains("experts")).count(), 0);
            assert_eq!(steps(zero), expected, "ZeRO {zero}, {ranks} ranks, expert {expert}");
        }
    }
}

/// What is not gathered so says why.
#[test]
fn masters_are_gathered_for_a_reason() {
    let program = world("mxfp8", 3, 4).first().program().clone();
    let of_masters = gathers(&program).into_iter().filter(|it| it.name.contains(".masters."));
    let reasons: Vec<String> = of_masters.map(|call| call.rejected[0].reason.clone()).collect();
    assert!(!reasons.is_empty());
    for reason in reasons {
        let expected = "on 4 ranks are not whole blocks of E4M3: they are with a multiple of 128";
        assert!(reason.contains(expected), "{reason}");
    }
}
