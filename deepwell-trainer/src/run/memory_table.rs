//! Predicted memory of a compiled run.

use deepwell_plan::format_bytes;

use crate::formats::quantized_formats;
use crate::{Engine, Settings, TrainError, World, checkpoint};

/// Ranks on a CPU or on emulated GPUs share its memory and threads.
pub(super) fn predicted_peak_bytes(world: &World) -> u64 {
    let of_rank = |engine: &Engine| {
        engine.predicted_peak_bytes() - engine.program().fixed_overhead_bytes as u64
    };
    let all: u64 = world.engines().iter().map(of_rank).sum();
    all + world.first().program().fixed_overhead_bytes as u64
}

/// Host bytes of each rank in this process for its copy of a checkpoint share.
pub(super) fn checkpoint_bytes(
    world: &mut World,
    settings: &Settings,
) -> Result<Vec<u64>, TrainError> {
    world.on_all(|engine| {
        let bytes = checkpoint::host_bytes(engine)? as u64;
        let is_copied = engine.is_asynchronous() || settings.async_checkpoints;
        let is_copied = is_copied && !settings.no_checkpoints;
        Ok(if is_copied { bytes } else { 0 })
    })
}

/// Layers of the stages of a pipeline.
fn stages(engine: &Engine) -> String {
    let layers: Vec<String> = engine.plan().stages.iter().map(usize::to_string).collect();
    if layers.is_empty() { String::new() } else { format!(" of {} layers", layers.join(", ")) }
}

pub(super) fn memory_table(world: &World, copies: &[u64]) -> String {
    let engine = world.first();
    let program = engine.program();
    let rank = &engine.prediction().ranks[0];
    let quantized = program.precision.iter().filter(|t| t.format.is_quantized()).count();
    let formats = quantized_formats(&program.precision).map_or_else(
        || "quantized".to_string(),
        |formats| format!("in {}", formats.to_uppercase()),
    );
    let mut text = format!(
        "model {}: {} parameters, {} of {} tensors {formats}\n\
         plan: {}{} micro-batches of {} x {} tokens, recompute {}\nmemory\n",
        program.name,
        engine.graph().parameter_count(),
        quantized,
        program.precision.len(),
        match world.size() {
            1 => String::new(),
            ranks => format!("{ranks} ranks ({}{}), each ", engine.plan().parallel, stages(engine)),
        },
        program.micro_batches,
        program.batch,
        program.seq,
        engine.plan().recompute
    );
    for (kind, bytes) in &rank.bytes_at_peak {
        text.push_str(&format!("  {kind:<12} {:>12}\n", format_bytes(*bytes)));
    }
    text.push_str(&format!(
        "  {:<12} {:>12} (arena {}, lower bound {})",
        "peak",
        format_bytes(engine.predicted_peak_bytes()),
        format_bytes(rank.arena_bytes),
        format_bytes(rank.arena_lower_bound_bytes)
    ));
    if rank.host_bytes > 0 {
        let bytes = format_bytes(rank.host_bytes);
        text.push_str(&format!("\n  offloaded    {bytes:>12} of optimizer state in host memory"));
    }
    if world.local_size() > 1 {
        text.push_str(&format!(
            "\n  {:<12} {:>12} of {} ranks, which exchange {} a step",
            "together",
            format_bytes(predicted_peak_bytes(world)),
            world.local_size(),
            format_bytes(rank.bytes_on_link)
        ));
    }
    if copies.iter().any(|&bytes| bytes > 0) {
        let bytes = format_bytes(copies.iter().sum());
        text.push_str(&format!("\n  pinned       {bytes:>12} of host memory, for checkpoints"));
    }
    text
}
