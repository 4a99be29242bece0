//! Instructions that exchange data between lanes of a warp.

use super::cluster::ClusterState;
use super::execute::{Gathered, Next, gather_lanes};
use super::warp::{Wait, Warp, lanes};
use super::world::World;
use crate::decode::{
    Instruction, Match, ReductionOperation, Shuffle, ShuffleMode, Source, Type, Vote, VoteMode,
};
use crate::error::Fault;

/// Executes such an instruction.
pub(crate) fn run(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    if let Instruction::ActiveMask { destination } = instruction {
        let active = warp.active;
        warp.registers.set_row32(*destination, &[active; 32], mask);
        return Ok(Next::Advance);
    }
    let members = match instruction {
        Instruction::Shuffle(shuffle) => shuffle.mask,
        Instruction::Vote(vote) => vote.mask,
        Instruction::Match(matching) => matching.mask,
        Instruction::Elect { mask, .. }
        | Instruction::Redux { mask, .. }
        | Instruction::WarpBarrier { mask } => *mask,
        _ => Source::Immediate(u64::MAX),
    };
    // Common case: one mask for all lanes, and all of them are active.
    let first = mask.trailing_zeros() as usize;
    let needed = warp.registers.lane(members, first) as u32;
    let uniform = matches!(members, Source::Immediate(_))
        || lanes(mask).all(|lane| warp.registers.lane(members, lane) as u32 == needed);
    if needed & 1 << first == 0 {
        return Err(excluded(needed, first));
    }
    if matches!(instruction, Instruction::WarpBarrier { .. }) {
        return warp_barrier(warp, cluster, world, members, mask, uniform.then_some(needed));
    }
    if uniform {
        if let Some(lane) = lanes(mask & !needed).next() {
            return Err(excluded(needed, lane));
        }
        return match gather_lanes(warp, world, mask, needed) {
            Gathered::All => {
                apply(instruction, warp, needed & mask)?;
                Ok(Next::Advance)
            }
            Gathered::Parked => Ok(Next::Select),
        };
    }
    // Several groups: complete groups run now, the others wait.
    warp.spread();
    super::control::leave(warp, mask);
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        let needed = warp.registers.lane(members, lane) as u32;
        if needed & 1 << lane == 0 {
            return Err(excluded(needed, lane));
        }
        let group = needed & warp.alive;
        if group & left == group {
            apply(instruction, warp, group)?;
            for lane in lanes(group) {
                warp.pcs[lane] = warp.pc + 1;
            }
            left &= !group;
            continue;
        }
        let here = lanes(left)
            .filter(|lane| warp.registers.lane(members, *lane) as u32 == needed)
            .fold(0, |all, lane| all | 1 << lane);
        let pc = warp.pc;
        let waiting = |parked: &super::warp::Parked| {
            parked.pc == pc && parked.wait == (Wait::Lanes { needed: group })
        };
        let there = (warp.parked.iter()).filter(|p| waiting(p)).fold(0, |all, p| all | p.lanes);
        if (here | there) & group == group {
            warp.parked.retain(|parked| !waiting(parked));
            warp.blocked &= !there;
            apply(instruction, warp, group)?;
            for lane in lanes(group) {
                warp.pcs[lane] = pc + 1;
            }
        } else {
            warp.park(here, pc, Wait::Lanes { needed: group }, world.instructions);
        }
        left &= !here;
    }
    Ok(Next::Select)
}

fn excluded(needed: u32, lane: usize) -> Fault {
    Fault::new(
        "sync-mask-without-own-lane",
        format!("lane {lane} runs a `.sync` instruction whose mask {needed:#010x} lacks it"),
    )
}

/// `bar.warp.sync`: lanes of a mask may arrive at different instructions.
fn warp_barrier(
    warp: &mut Warp,
    cluster: &ClusterState,
    world: &mut World<'_>,
    members: Source,
    mask: u32,
    uniform: Option<u32>,
) -> Result<Next, Fault> {
    if let Some(needed) = uniform
        && let Some(lane) = lanes(mask & !needed).next()
    {
        return Err(excluded(needed, lane));
    }
    if let Some(needed) = uniform
        && needed & warp.alive & !mask == 0
    {
        world.warp_synchronized(warp, cluster, mask);
        return Ok(Next::Advance);
    }
    warp.spread();
    super::control::leave(warp, mask);
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        let needed = warp.registers.lane(members, lane) as u32;
        if needed & 1 << lane == 0 {
            return Err(excluded(needed, lane));
        }
        let here = lanes(left)
            .filter(|lane| warp.registers.lane(members, *lane) as u32 == needed)
            .fold(0, |all, lane| all | 1 << lane);
        left &= !here;
        let waiting = |parked: &super::warp::Parked| parked.wait == Wait::WarpBarrier { needed };
        let there = (warp.parked.iter()).filter(|p| waiting(p)).fold(0, |all, p| all | p.lanes);
        let needed_alive = needed & warp.alive;
        if (here | there) & needed_alive == needed_alive {
            warp.parked.retain(|parked| !waiting(parked));
            warp.blocked &= !there;
            for lane in lanes(here) {
                warp.pcs[lane] = warp.pc + 1;
            }
            // Lanes that waited are still at their own `bar.warp.sync`.
            for lane in lanes(there) {
                warp.pcs[lane] += 1;
            }
            world.warp_synchronized(warp, cluster, here | there);
        } else {
            let pc = warp.pc;
            warp.park(here, pc, Wait::WarpBarrier { needed }, world.instructions);
        }
    }
    Ok(Next::Select)
}

/// Executes an instruction for the lanes of `group`, all of which have arrived.
fn apply(instruction: &Instruction, warp: &mut Warp, group: u32) -> Result<(), Fault> {
    match instruction {
        Instruction::Shuffle(shuffle) => shuffle_lanes(shuffle, warp, group),
        Instruction::Vote(vote) => vote_lanes(vote, warp, group),
        Instruction::Match(matching) => match_lanes(matching, warp, group),
        Instruction::Elect { destination, predicate, .. } => {
            let elected = group.trailing_zeros();
            if let Some(destination) = destination {
                warp.registers.set_row32(*destination, &[elected; 32], group);
            }
            if let Some(predicate) = predicate {
                warp.registers.set_predicate(*predicate, 1 << elected, group);
            }
        }
        Instruction::Redux {
            destination,
            source,
            operation,
            value_type,
            absolute,
            propagate_nan,
            ..
        } => {
            let row = warp.registers.row32(*source);
            let value = redux(&row, group, *operation, *value_type, *absolute, *propagate_nan);
            warp.registers.set_row32(*destination, &[value; 32], group);
        }
        _ => {}
    }
    Ok(())
}

fn shuffle_lanes(shuffle: &Shuffle, warp: &mut Warp, group: u32) {
    let values = warp.registers.row32(shuffle.source);
    let mut result = values;
    let mut in_range = 0u32;
    for lane in lanes(group) {
        let distance = warp.registers.lane(shuffle.lane, lane) as u32 & 31;
        let control = warp.registers.lane(shuffle.control, lane) as u32;
        let (clamp, segment) = (control & 31, control >> 8 & 31);
        let lane = lane as u32;
        let limit = (lane & segment) | (clamp & !segment);
        let lowest = lane & segment;
        let (from, inside) = match shuffle.mode {
            ShuffleMode::Up => {
                let from = lane.wrapping_sub(distance);
                (from, (from as i32) >= limit as i32)
            }
            ShuffleMode::Down => (lane + distance, lane + distance <= limit),
            ShuffleMode::Butterfly => (lane ^ distance, lane ^ distance <= limit),
            ShuffleMode::Index => {
                let from = lowest | (distance & !segment);
                (from, from <= limit)
            }
        };
        let from = if inside { from } else { lane };
        // The value of a lane outside of the group is undefined: use poison.
        result[lane as usize] =
            if group >> (from & 31) & 1 == 1 { values[(from & 31) as usize] } else { u32::MAX };
        in_range |= u32::from(inside) << lane;
    }
    if let Some(destination) = shuffle.destination {
        warp.registers.set_row32(destination, &result, group);
    }
    if let Some(predicate) = shuffle.in_range {
        warp.registers.set_predicate(predicate, in_range, group);
    }
}

fn vote_lanes(vote: &Vote, warp: &mut Warp, group: u32) {
    let truths = warp.registers.predicate(vote.predicate) & group;
    let all = |value: bool| if value { u32::MAX } else { 0 };
    match vote.mode {
        VoteMode::All(to) => warp.registers.set_predicate(to, all(truths == group), group),
        VoteMode::Any(to) => warp.registers.set_predicate(to, all(truths != 0), group),
        VoteMode::Uniform(to) => {
            warp.registers.set_predicate(to, all(truths == 0 || truths == group), group);
        }
        VoteMode::Ballot(to) => warp.registers.set_row32(to, &[truths; 32], group),
    }
}

fn match_lanes(matching: &Match, warp: &mut Warp, group: u32) {
    let values = warp.registers.row64(matching.source);
    let first = group.trailing_zeros() as usize;
    let mut result = [0u32; 32];
    let mut equal = true;
    for lane in lanes(group) {
        equal &= values[lane] == values[first];
        result[lane] = lanes(group)
            .filter(|other| values[*other] == values[lane])
            .fold(0, |all, other| all | 1 << other);
    }
    if matching.all {
        result = [if equal { group } else { 0 }; 32];
        if let Some(predicate) = matching.predicate {
            warp.registers.set_predicate(predicate, if equal { u32::MAX } else { 0 }, group);
        }
    }
    if let Some(destination) = matching.destination {
        warp.registers.set_row32(destination, &result, group);
    }
}

fn redux(
    row: &[u32; 32],
    group: u32,
    operation: ReductionOperation,
    value_type: Type,
    absolute: bool,
    propagate_nan: bool,
) -> u32 {
    use ReductionOperation as R;
    let mut values = lanes(group).map(|lane| row[lane]);
    let first = values.next().unwrap_or(0);
    if value_type == Type::F32 {
        let read = |bits: u32| {
            let value = f32::from_bits(bits);
            if absolute { value.abs() } else { value }
        };
        let mut best = read(first);
        let mut nan = best.is_nan();
        for value in values.map(read) {
            nan |= value.is_nan();
            best = if operation == R::Min { best.min(value) } else { best.max(value) };
        }
        return if best.is_nan() || (propagate_nan && nan) { 0x7FFF_FFFF } else { best.to_bits() };
    }
    let signed = value_type.is_signed();
    values.fold(first, |a, b| match operation {
        R::Add => a.wrapping_add(b),
        R::And => a & b,
        R::Or => a | b,
        R::Xor => a ^ b,
        R::Min if signed => (a as i32).min(b as i32) as u32,
        R::Max if signed => (a as i32).max(b as i32) as u32,
        R::Min => a.min(b),
        R::Max => a.max(b),
    })
}
