//! The prediction of programs.

use std::collections::BTreeMap;

use deepwell_ir::{Call, Instance, MemoryKind, Op, Program, Value};
use deepwell_probe::Hardware;

use super::experts::ExpertRoom;
use super::report::{Bound, DryRun, ExchangeTime, OpTime, RankReport};
use super::roof::Roof;
use crate::Parallel;

/// Predicts a step of `programs`, one per rank, on `hardware`, with the rates of the GPU of each
/// program's target, or of the CPU.
///
/// A call takes `max(FLOPs / rate, bytes / bandwidth, bytes to other ranks / link bandwidth)`. The
/// rate is the peak of the unit of the selected kernel, times the best share measured for the
/// kernel ([`Call::peak_share`]). Calls of a stream are serial, and streams wait for events of
/// other streams. Real programs run slower: kernels reach a smaller share in most shapes.
pub fn dryrun(programs: &[Program], hardware: &Hardware) -> DryRun {
    let ranks: Vec<RankReport> =
        programs.iter().map(|program| rank_report(program, programs, hardware)).collect();
    DryRun {
        tokens: programs.first().map_or(0, |program| program.tokens_per_step() as u64),
        time_s: ranks.iter().map(|rank| rank.time_s).fold(0.0, f64::max),
        ranks,
        bubble: None,
        chunks: 1,
        zero_bubble: None,
        expected_speedup_over_bf16: None,
    }
}

/// Predicts a step of ranks that all run `program` except for their rank numbers, at the cost of
/// one rank's prediction.
pub fn dryrun_world(program: &Program, parallel: Parallel, hardware: &Hardware) -> DryRun {
    let mut run = dryrun(std::slice::from_ref(program), hardware);
    run.tokens *= parallel.data as u64;
    if program.target.gpu.is_none() {
        // All ranks share the CPU.
        run.time_s *= parallel.world_size() as f64;
    }
    for rank in &mut run.ranks {
        rank.alike = (0..parallel.world_size() as u32).filter(|&it| it != rank.rank).collect();
    }
    run
}

/// Least time of the first run of one call of `program` on `hardware` by the datasheet, in seconds,
/// and the bound.
pub fn roofline(program: &Program, call: &Call, hardware: &Hardware) -> (f64, Bound) {
    Roof::of(hardware, program, &[]).datasheet_time(call, Instance::ONLY)
}

/// Sum over the calls of one op and kernel, and the time under each bound.
struct OpSum {
    op: OpTime,
    bound_s: BTreeMap<Bound, f64>,
}

fn rank_report(program: &Program, programs: &[Program], hardware: &Hardware) -> RankReport {
    let roof = Roof::of(hardware, program, programs);
    let mut sums: Vec<OpSum> = Vec::new();
    for (call, runs) in program.calls_with_runs().filter(|(_, runs)| *runs > 0) {
        let (time_s, bound) = roof.step_time(call, runs);
        let known = sums
            .iter()
            .position(|sum| sum.op.op == call.op.name() && sum.op.kernel == call.choice.kernel);
        let known = known.unwrap_or_else(|| {
            let (op, kernel) = (call.op.name().to_string(), call.choice.kernel.clone());
            let op = OpTime { op, kernel, calls: 0, flops: 0, bytes: 0, time_s: 0.0, bound };
            sums.push(OpSum { op, bound_s: BTreeMap::new() });
            sums.len() - 1
        });
        let OpSum { op, bound_s } = &mut sums[known];
        op.calls += runs;
        op.flops += call.cost.flops * runs as u64;
        op.bytes += call.bytes_in_step(runs);
        op.time_s += time_s;
        *bound_s.entry(bound).or_default() += time_s;
    }
    let with_bound = |OpSum { op, bound_s }: OpSum| {
        let most = bound_s.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        OpTime { bound: most.map_or(op.bound, |(bound, _)| bound), ..op }
    };
    let mut ops: Vec<OpTime> = sums.into_iter().map(with_bound).collect();
    ops.sort_by(|a, b| b.time_s.total_cmp(&a.time_s));
    let (bytes_at_peak, peak_call) = bytes_at_peak(program);
    let on_link = |counts: &dyn Fn(&Call) -> bool| -> u64 {
        let calls = program.calls_with_runs().filter(|(call, _)| counts(call));
        calls.map(|(call, runs)| call.cost.bytes_on_link * runs as u64).sum()
    };
    let arena_bytes = program.device_bytes() as u64;
    let host_bytes = program.arena.bytes as u64 - arena_bytes;
    RankReport {
        rank: program.rank,
        alike: Vec::new(),
        peak_bytes: arena_bytes + program.fixed_overhead_bytes as u64,
        arena_bytes,
        host_bytes,
        reserved_bytes: 0,
        arena_lower_bound_bytes: (program.arena.transient_offset
            + program.arena.transient_lower_bound_bytes) as u64
            - host_bytes,
        bytes_at_peak,
        peak_call,
        flops: program.flops(),
        bytes: program.bytes_moved(),
        bytes_on_link: on_link(&|call| !is_host_copy(call)),
        bytes_to_host: on_link(&is_host_copy),
        time_s: roof.program_time_s(program),
        exchanges: exchanges_of(&roof, program),
        expert_room: ExpertRoom::of(program),
        ops,
    }
}

fn is_host_copy(call: &Call) -> bool {
    matches!(call.op, Op::HostCopy(_))
}

/// Time of the collectives, if they have their own stream.
fn exchanges_of(roof: &Roof, program: &Program) -> Option<ExchangeTime> {
    let is_exchange = |call: &Call| matches!(call.op, Op::Collective(_));
    program.calls.iter().find(|call| is_exchange(call) && call.stream != 0)?;
    let exchanges = program.calls_with_runs().filter(|(call, _)| is_exchange(call));
    let time_s = exchanges.map(|(call, runs)| roof.step_time(call, runs).0).sum();
    let exposed_s = roof.program_time_s(program) - roof.computing_time_s(program);
    Some(ExchangeTime { time_s, exposed_s })
}

/// Bytes by kind at the call with the largest sum of transient values, and the call's name.
fn bytes_at_peak(program: &Program) -> (BTreeMap<String, u64>, String) {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; program.values.len()];
    for (index, call) in program.calls.iter().enumerate() {
        for operand in &call.operands {
            lives[operand.value.index()].get_or_insert((index, index)).1 = index;
        }
    }
    // With several chunks a slot holds the kept values of one chunk, and the order of calls does
    // not show which chunk. So all slots are counted in full.
    let has_chunks = program.bodies.iter().any(|body| body.chunk > 0);
    let is_in_slots = |value: &Value| value.slot_stride_bytes > 0 && !value.memory.is_persistent();
    let mut activations = vec![0i64; program.calls.len() + 1];
    for (value, life) in program.values.iter().zip(lives) {
        if has_chunks && is_in_slots(value) {
            continue;
        }
        if let (MemoryKind::Activations, Some((first, last))) = (value.memory, life) {
            activations[first] += value.range.bytes as i64;
            activations[last + 1] -= value.range.bytes as i64;
        }
    }
    // Each further micro-batch in flight has its own copy of the values that live across bodies.
    let in_slots = || program.values.iter().filter(|value| is_in_slots(value));
    let slots = program.slots as usize;
    let in_other_slots = match has_chunks {
        true => in_slots().map(|value| value.slot_stride_bytes).max().unwrap_or(0) * slots,
        false => {
            let of_slot: usize = in_slots().map(|value| value.range.bytes).sum();
            // A value living from forward to backward may share memory with a value living from
            // backward to the weight gradients.
            let room = in_slots().map(|value| value.slot_stride_bytes).max().unwrap_or(0);
            of_slot.min(room) * slots.saturating_sub(1)
        }
    };
    let mut peak = (0, 0, 0);
    let mut alive = in_other_slots as i64;
    for (index, call) in program.calls.iter().enumerate() {
        alive += activations[index];
        let workspace = call.workspace.bytes as i64;
        if alive + workspace > peak.0 + peak.1 {
            peak = (alive, workspace, index);
        }
    }
    let mut by_kind: BTreeMap<String, u64> = MemoryKind::ALL
        .into_iter()
        .filter(|kind| kind.is_persistent() && *kind != MemoryKind::Offloaded)
        .map(|kind| {
            let bytes: usize = program.values_of(kind).map(|value| value.range.bytes).sum();
            (kind.name().to_string(), bytes as u64)
        })
        .collect();
    by_kind.insert(MemoryKind::Activations.name().to_string(), peak.0 as u64);
    by_kind.insert(MemoryKind::Workspace.name().to_string(), peak.1 as u64);
    by_kind.insert("backend".to_string(), program.fixed_overhead_bytes as u64);
    (by_kind, program.calls.get(peak.2).map_or_else(String::new, |call| call.name.clone()))
}
