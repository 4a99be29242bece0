//! Register allocation: fewer rows of registers.
//!
//! The compiler gives nearly every value its own register, thousands of them, and relies on the
//! assembler to share registers. The registers of a warp would then exceed the cache. This pass
//! shares rows between registers with disjoint live intervals. Liveness is computed by standard
//! dataflow over the branches, with one interval per register. Diverged lanes do not interfere,
//! because each lane has its own value in a row.

use super::registers::visit_registers;
use super::watch::in_flight;
use crate::decode::{Instruction, Program, Register};

/// Shares rows between the registers of a program. Registers of `wgmma` and `tcgen05.ld` keep rows
/// of their own, because they are written after the instruction.
pub(crate) fn share_rows(program: &mut Program) {
    let words = program.word_count as usize;
    let count = words + program.long_count as usize;
    if count == 0 {
        return;
    }
    let intervals = lives(program, words, count);
    let mut kept = in_flight(program);
    kept.resize(count, false);
    let (rows_word, word_count) = assign(&intervals[..words], &kept[..words]);
    let (rows_long, long_count) = assign(&intervals[words..], &kept[words..]);
    for step in &mut program.steps {
        visit_registers(&mut step.instruction, &mut |register, _| match register {
            Register::Half(index) | Register::Word(index) => *index = rows_word[*index as usize],
            Register::Long(index) => *index = rows_long[*index as usize],
        });
    }
    (program.word_count, program.long_count) = (word_count, long_count);
}

/// Returns the number of a register over both classes.
fn number(register: Register, words: usize) -> usize {
    match register {
        Register::Half(index) | Register::Word(index) => index as usize,
        Register::Long(index) => words + index as usize,
    }
}

/// Live interval of a register: first and last position, inclusive.
type Interval = Option<(u32, u32)>;

fn lives(program: &mut Program, words: usize, count: usize) -> Vec<Interval> {
    let starts = block_starts(program);
    let blocks = starts.len();
    let length = program.steps.len();
    let end_of = |block: usize| starts.get(block + 1).map_or(length, |next| *next as usize);
    let mut block_of = vec![0u32; length + 1];
    for block in 0..blocks {
        block_of[starts[block] as usize..end_of(block)].fill(block as u32);
    }
    block_of[length] = blocks as u32;
    let sets = count.div_ceil(64);
    let mut used = vec![0u64; blocks * sets];
    let mut defined = vec![0u64; blocks * sets];
    let mut intervals: Vec<Interval> = vec![None; count];
    let mut successors: Vec<Vec<u32>> = vec![Vec::new(); blocks];
    let grow = |interval: &mut Interval, at: u32| {
        *interval = Some(interval.map_or((at, at), |(first, last)| (first.min(at), last.max(at))));
    };
    for block in 0..blocks {
        let set = block * sets..(block + 1) * sets;
        for at in starts[block] as usize..end_of(block) {
            let step = &mut program.steps[at];
            let guarded = step.guard.is_some();
            visit_registers(&mut step.instruction, &mut |register, is_write| {
                let index = number(*register, words);
                grow(&mut intervals[index], at as u32);
                let (word, bit) = (set.start + index / 64, 1u64 << (index % 64));
                if is_write && !guarded {
                    defined[word] |= bit;
                } else if defined[word] & bit == 0 {
                    // A guarded write keeps the old value in other lanes, so it does not end a
                    // life.
                    used[word] |= bit;
                }
            });
        }
        let last = end_of(block) - 1;
        let step = &program.steps[last];
        let next = block_of[last + 1];
        let mut falls = true;
        match &step.instruction {
            Instruction::Branch { target, .. } => {
                successors[block].push(block_of[(*target as usize).min(length)]);
                falls = step.guard.is_some();
            }
            Instruction::BranchIndexed { targets, .. } => {
                let to = targets.iter().map(|target| block_of[(*target as usize).min(length)]);
                successors[block].extend(to);
                falls = step.guard.is_some();
            }
            Instruction::Exit | Instruction::Trap => falls = step.guard.is_some(),
            _ => {}
        }
        if falls {
            successors[block].push(next);
        }
        successors[block].retain(|to| (*to as usize) < blocks);
    }
    let mut live_in = used;
    let mut live_out = vec![0u64; blocks * sets];
    let mut changed = true;
    while changed {
        changed = false;
        for block in (0..blocks).rev() {
            for at in 0..sets {
                let out = (successors[block].iter())
                    .fold(0, |all, to| all | live_in[*to as usize * sets + at]);
                let index = block * sets + at;
                live_out[index] |= out;
                let new = live_in[index] | (live_out[index] & !defined[index]);
                changed |= new != live_in[index];
                live_in[index] = new;
            }
        }
    }
    for block in 0..blocks {
        let ends = [(&live_in, starts[block]), (&live_out, end_of(block) as u32 - 1)];
        for (live, place) in ends {
            for at in 0..sets {
                let mut rest = live[block * sets + at];
                while rest != 0 {
                    let index = at * 64 + rest.trailing_zeros() as usize;
                    rest &= rest - 1;
                    grow(&mut intervals[index], place);
                }
            }
        }
    }
    intervals
}

/// Returns the starts of basic blocks.
fn block_starts(program: &Program) -> Vec<u32> {
    let length = program.steps.len();
    let mut is_start = vec![false; length + 1];
    is_start[0] = true;
    for (at, step) in program.steps.iter().enumerate() {
        let ends = match &step.instruction {
            Instruction::Branch { target, .. } => {
                is_start[(*target as usize).min(length)] = true;
                true
            }
            Instruction::BranchIndexed { targets, .. } => {
                for target in targets {
                    is_start[(*target as usize).min(length)] = true;
                }
                true
            }
            Instruction::Exit | Instruction::Trap => true,
            _ => false,
        };
        if ends {
            is_start[at + 1] = true;
        }
    }
    (0..length).filter(|at| is_start[*at]).map(|at| at as u32).collect()
}

/// Gives each interval a row that is free throughout the interval. Returns the rows and their
/// number.
fn assign(intervals: &[Interval], kept: &[bool]) -> (Vec<u32>, u32) {
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    order.sort_by_key(|index| intervals[*index].map_or(u32::MAX, |(first, _)| first));
    let mut rows = vec![0; intervals.len()];
    let mut free: Vec<u32> = Vec::new();
    let mut busy: std::collections::BinaryHeap<std::cmp::Reverse<(u32, u32)>> =
        std::collections::BinaryHeap::new();
    let mut count = 0;
    for index in order {
        let Some((first, last)) = intervals[index] else { continue };
        while let Some(std::cmp::Reverse((end, row))) = busy.peek().copied()
            && end < first
        {
            busy.pop();
            free.push(row);
        }
        let reused = if kept[index] { None } else { free.pop() };
        let row = reused.unwrap_or_else(|| {
            count += 1;
            count - 1
        });
        rows[index] = row;
        if !kept[index] {
            busy.push(std::cmp::Reverse((last, row)));
        }
    }
    (rows, count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode;
    use crate::ptx::parse;

    fn shared(body: &str) -> Program {
        let text = format!(
            ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {{\n\
             .reg .pred %p<4>;\n.reg .b32 %r<40>;\n{body}\nret;\n}}"
        );
        let module = parse(&text).expect("PTX");
        let mut program = decode(&module, "k", &Default::default()).expect("known forms");
        share_rows(&mut program);
        program
    }

    #[test]
    fn values_that_do_not_live_together_share_a_row() {
        let chain: String =
            (1..30).map(|i| format!("add.u32 %r{}, %r{i}, %r{i};\n", i + 1)).collect();
        let program = shared(&format!("mov.u32 %r1, 3;\n{chain}"));
        assert_eq!(program.word_count, 2);
    }

    #[test]
    fn what_a_loop_carries_lives_through_all_of_it() {
        // %r1 is written before the loop and read at the loop head: no register of the body may
        // share its row.
        let program = shared(
            "mov.u32 %r1, 3;\nmov.u32 %r2, 0;\nLOOP:\nadd.u32 %r3, %r2, %r1;\n\
             add.u32 %r4, %r3, 1;\nadd.u32 %r5, %r4, 1;\nmov.u32 %r2, %r5;\n\
             setp.lt.u32 %p1, %r2, 100;\n@%p1 bra LOOP;",
        );
        assert_eq!(program.word_count, 4);
    }

    #[test]
    fn a_guarded_write_does_not_end_a_life() {
        // Lanes with a false guard still need the old value of %r1.
        let program = shared(
            "mov.u32 %r1, 3;\nmov.u32 %r2, %tid.x;\nsetp.lt.u32 %p1, %r2, 5;\n\
             @%p1 mov.u32 %r1, 4;\nadd.u32 %r3, %r1, %r2;",
        );
        assert_eq!(program.word_count, 3);
    }

    #[test]
    fn registers_of_wgmmas_keep_their_rows() {
        let accumulator: Vec<String> = (1..5).map(|i| format!("%r{i}")).collect();
        let program = shared(&format!(
            ".reg .b64 %d<3>;\nmov.b64 %d1, 0;\nwgmma.fence.sync.aligned;\n\
             wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{{}}}, %d1, %d1, 1, 1, 1;\n\
             wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n\
             mov.u32 %r9, 1;\nadd.u32 %r10, %r9, 1;",
            accumulator.join(", ")
        ));
        let d = program.steps.iter().find_map(|step| match &step.instruction {
            Instruction::WarpGroupMma(mma) => Some(mma.d.to_vec()),
            _ => None,
        });
        let mut rows: Vec<usize> =
            d.expect("a wgmma").into_iter().map(|register| number(register, 0)).collect();
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 4);
        assert_eq!(program.word_count, 6);
    }
}
