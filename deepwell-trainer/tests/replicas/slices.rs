//! Memory, statistics and other properties of ranks that have a part of the state each.

use deepwell_ir::MemoryKind;
use deepwell_ir::capture::{LlamaConfig, capture};

use crate::ranks::graph;
use crate::ranks::reference::SEED;
use crate::shard_slices::{masters, slices};
use crate::train::{bits, compile, options, step, wide, world};

/// What is gathered is in BF16 where calls read nothing else, and half as long.
#[test]
fn copies_in_bf16_are_gathered_in_place_of_masters() {
    for zero in [2, 3] {
        let bytes = |precision: &str| {
            let program = world(precision, zero, 2, 1).first().program().clone();
            let gathers = program.calls.iter().filter(|call| call.name.starts_with("all_gather."));
            gathers.map(|call| call.cost.bytes_on_link).sum::<u64>()
        };
        let [f32, bf16, mxfp8] = ["f32", "bf16", "mxfp8"].map(bytes);
        assert!(f32.abs_diff(2 * bf16) < f32 / 50, "ZeRO {zero}: {bf16} and {f32}");
        // Blocks are quantized from FP32; embedding and head are not quantized.
        assert!(bf16 < mxfp8 && mxfp8 < f32, "ZeRO {zero}: {mxfp8} and {bf16} and {f32}");
    }
}

/// Coins are those of whole parameters, whoever has which slice.
#[test]
fn slices_are_perturbed_as_whole_masters_are() {
    let perturbed = |zero: u8| {
        let mut world = world("bf16", zero, 3, 1);
        let program = world.first().program().clone();
        let ends = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let before = slices(engine)?;
            engine.perturb_weights(5)?;
            Ok((before, slices(engine)?))
        });
        let (before, after): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
        (masters(&program, &before), masters(&program, &after))
    };
    let expected = perturbed(1);
    assert!(expected.0 != expected.1);
    for zero in [2, 3] {
        assert!(perturbed(zero) == expected, "ZeRO {zero}");
    }
}

#[test]
fn statistics_are_those_of_all_ranks() {
    let mut world = world("mxfp8", 0, 2, 1);
    let ends = world.on_all(|engine| {
        engine.initialize(SEED)?;
        step(engine, 0)?;
        let own = engine.statistics().to_vec();
        let all = engine.statistics_of_ranks()?;
        assert_eq!(own.len(), all.len());
        let elements = |stats: &[deepwell_trainer::OperandStats]| -> u64 {
            stats.iter().map(|it| it.stats.elements).sum()
        };
        // Activations and gradients are counted on both, as are the copies of the same weights.
        assert_eq!(elements(&all), 2 * elements(&own));
        engine.fall_back(&[7, 9, 12], "a test")?;
        let last = step(engine, 1)?;
        Ok((all, last, bits(engine)?))
    });
    let ends = ends.unwrap();
    assert!(ends[0] == ends[1], "both ranks saw the same and did the same");
}

/// GEMMs that fall back keep the slices of their weight's state, and gather casts of them.
#[test]
fn ranks_fall_back_together() {
    for graph in [graph(), wide()] {
        let train = |zero: u8| {
            let ends = compile(&graph, &options("mxfp8", zero, 2, 1)).on_all(|engine| {
                engine.initialize(SEED)?;
                step(engine, 0)?;
                // Queries, values and the last matrix of the second layer.
                engine.fall_back(&[7, 9, 13], "a test")?;
                step(engine, 1)
            });
            let ends = ends.unwrap();
            assert_eq!(ends[0], ends[1]);
            ends[0]
        };
        let expected = train(0);
        assert_eq!([train(2), train(3)], [expected; 2]);
    }
}

/// What is counted of a weight's slices is of the layer that reads it, and of all of it.
#[test]
fn slices_are_counted_as_whole_weights_are() {
    let counted = |zero: u8| {
        let ends = compile(&wide(), &options("mxfp8", zero, 2, 1)).on_all(|engine| {
            engine.initialize(SEED)?;
            step(engine, 0)?;
            engine.statistics_of_ranks()
        });
        let mut counted: Vec<(std::sync::Arc<[usize]>, u32)> =
            (ends.unwrap().remove(0).into_iter())
                .map(|it| (it.gemms, it.stats.amax.to_bits()))
                .collect();
        counted.sort_unstable();
        counted
    };
    let expected = counted(0);
    assert!(expected.len() > 20);
    assert_eq!(counted(2), expected);
}

/// Of a model of many layers each stage takes less: gradients are slices, then weights are.
#[test]
fn memory_falls_with_each_stage() {
    let config = LlamaConfig { num_layers: 12, ..LlamaConfig::preset("llama-micro").unwrap() };
    let bytes = |zero: u8| {
        let world = compile(&capture(&config).unwrap(), &options("bf16", zero, 4, 1));
        let program = world.first().program().clone();
        let of = |kind| program.values_of(kind).map(|value| value.range.bytes).sum::<usize>();
        (of(MemoryKind::Gradients), of(MemoryKind::Weights), program.arena.bytes)
    };
    let [whole, state, gradients, weights] = [0, 1, 2, 3].map(bytes);
    // A slice of four, each filled up to whole 64 bytes.
    assert!(gradients.0 < whole.0 / 4 + whole.0 / 50, "{gradients:?}, {whole:?}");
    assert_eq!(weights.1, 0);
    assert!(state.2 < whole.2 && gradients.2 < state.2 && weights.2 < gradients.2);
}
