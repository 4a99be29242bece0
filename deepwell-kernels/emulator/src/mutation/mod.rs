//! Programs with one small mistake.
//!
//! # Brief overview
//!
//! Mutation tests measure how well tests watch a kernel's synchronization. A mutation deletes a
//! wait, fence, commit or arrival, or changes the meaning of an instruction. If no test notices,
//! the instruction was not needed, or no launch of the kernel needed it, or the checks miss it.
//! [`mutations`] lists the possible mistakes of a program; [`mutant`] makes one of them.
//! [`Emulator::replace_program`](crate::launch::Emulator::replace_program) installs the mutant.
//!
//! [`Class::Deletion`] removes synchronization: barriers of CTAs, clusters and warps; all fences;
//! all mbarrier operations but `inval` and `pending_count`; commits, waits and arrivals of
//! asynchronous copies, of `wgmma` and of `tcgen05`; `griddepcontrol.wait`. Acquire and release of
//! loads, stores and atomics are weakened to `.relaxed`. `griddepcontrol.launch_dependents` stays,
//! because it only lets the next grid begin earlier, and hints stay. After a deleted wait, threads
//! continue immediately: a deleted `mbarrier.try_wait` reports the phase as complete. For an
//! arrival that expects bytes there are two mutations: without the arrival, and without the
//! expected bytes.
//!
//! The other classes edit a single operand or word of an instruction; see [`Class`].
//!
//! ```
//! use deepwell_emulator::mutation::{Class, mutant, mutations};
//! use deepwell_emulator::{decode, ptx};
//!
//! let text = "
//!     .version 9.0
//!     .target sm_90a
//!     .address_size 64
//!     .visible .entry k() { bar.sync 0, 64; ret; }";
//! let program = decode::decode(&ptx::parse(text)?, "k", &Default::default())?;
//! let found = mutations(&program);
//! let names: Vec<&str> = found.iter().map(|mutation| mutation.what).collect();
//! assert_eq!(names, ["bar.sync", "more threads of bar.sync"]);
//! assert_eq!((found[0].class, found[0].ptx_line), (Class::Deletion, 5));
//! let without = mutant(&program, &found[0]);
//! assert!(mutations(&without).is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod copies;
mod mma;
mod operands;
mod synchronizing;
#[cfg(test)]
mod tests;
mod words;

use crate::decode::{Instruction, PredicateSource, Program, Step};
use crate::launch::Counts;

use self::operands::Spare;

/// Classes of mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A synchronizing instruction, or its memory order, is removed.
    Deletion,
    /// A wait always tests the same parity; a wait on a constant parity tests the opposite one.
    Parity,
    /// Counts of arrivals, of threads at a barrier, and of groups that may stay pending.
    Count,
    /// Expected or copied bytes.
    Bytes,
    /// Acquire and release become relaxed, a scope is narrowed to the CTA, a proxy fence applies to
    /// another space.
    Order,
    /// One CTA of a multicast mask, or one lane of a warp's mask.
    Mask,
    /// Start coordinates or addresses of a copy.
    Coordinate,
    /// Fields of matrix descriptors and MMA instruction descriptors.
    Descriptor,
    /// `.cta_group`.
    Group,
}

impl Class {
    /// All classes.
    pub const ALL: [Class; 9] = [
        Class::Deletion,
        Class::Parity,
        Class::Count,
        Class::Bytes,
        Class::Order,
        Class::Mask,
        Class::Coordinate,
        Class::Descriptor,
        Class::Group,
    ];

    /// Returns the name of the class.
    pub fn name(self) -> &'static str {
        match self {
            Class::Deletion => "deletion",
            Class::Parity => "parity",
            Class::Count => "count",
            Class::Bytes => "bytes",
            Class::Order => "order",
            Class::Mask => "mask",
            Class::Coordinate => "coordinate",
            Class::Descriptor => "descriptor",
            Class::Group => "group",
        }
    }
}

/// A possible mistake at an instruction of the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Mutation {
    /// Class of the mistake.
    pub class: Class,
    /// The mistake: the name of a deleted instruction, such as `tcgen05.commit`, or of the changed
    /// part.
    pub what: &'static str,
    /// Line of the PTX text.
    pub ptx_line: u32,
    /// File (an index into [`crate::ptx::Module::files`]) and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// Positions in [`Program::steps`]; several if a function was inlined several times.
    steps: Vec<u32>,
}

impl Mutation {
    /// Whether a launch executed the instruction in a way that the mistake could affect. `counts`
    /// cover the whole program. A wait stuck at one parity must have tested the other parity.
    pub fn ran(&self, counts: &Counts) -> bool {
        let other_parity = match self.what {
            words::STUCK_AT_0 => 2,
            words::STUCK_AT_1 => 1,
            _ => 0,
        };
        let executed =
            |step: &u32| counts.executed.get(*step as usize).is_some_and(|count| *count > 0);
        self.steps.iter().any(executed) && self.parities(counts) & other_parity == other_parity
    }

    /// Returns the parities that the wait tested with success, in the format of
    /// [`Counts::parities`].
    pub fn parities(&self, counts: &Counts) -> u8 {
        let tested = |step: &u32| counts.parities.get(*step as usize).copied().unwrap_or(0);
        self.steps.iter().map(tested).fold(0, |all, one| all | one)
    }

    /// Adds the instructions of another mutation, so that one mutant has the same mistake in all
    /// copies that unrolling made of a statement.
    pub fn join(&mut self, other: Mutation) {
        self.steps.extend(other.steps);
        self.steps.sort_unstable();
    }

    /// Whether the mistake is a wait whose parity is stuck.
    pub fn tests_parity(&self) -> bool {
        matches!(self.what, words::STUCK_AT_0 | words::STUCK_AT_1)
    }

    /// Whether the mistake is a wait stuck at parity 0. Each wait with a variable parity has
    /// exactly one.
    pub fn is_parity_0(&self) -> bool {
        self.what == words::STUCK_AT_0
    }
}

/// One possible mistake at an instruction.
#[derive(Clone, Debug, PartialEq)]
struct Edit {
    class: Class,
    what: &'static str,
    replacement: Replacement,
}

impl Edit {
    fn new(class: Class, what: &'static str, instruction: Instruction) -> Edit {
        Edit { class, what, replacement: Replacement::Steps(vec![instruction]) }
    }
}

/// Replacement of an instruction.
#[derive(Clone, Debug, PartialEq)]
enum Replacement {
    Nothing,
    /// The last instruction has the guard of the original; the instructions before it compute an
    /// operand.
    Steps(Vec<Instruction>),
}

fn edits(instruction: &Instruction, spare: Spare) -> Vec<Edit> {
    let mut found: Vec<Edit> = synchronizing::replacements(instruction)
        .into_iter()
        .map(|(what, replacement)| Edit { class: Class::Deletion, what, replacement })
        .collect();
    words::edits(instruction, spare, &mut found);
    words::masks(instruction, spare, &mut found);
    copies::edits(instruction, spare, &mut found);
    mma::edits(instruction, spare, &mut found);
    found
}

/// Returns all possible mistakes, in the order of the text.
pub fn mutations(program: &Program) -> Vec<Mutation> {
    let spare = Spare::of(program);
    let has_pairs = has_cta_pairs(&program.target);
    let mut found: Vec<Mutation> = Vec::new();
    for (position, step) in program.steps.iter().enumerate() {
        if step.guard == Some(PredicateSource::Constant(false)) {
            continue;
        }
        for Edit { class, what, .. } in edits(&step.instruction, spare) {
            if class == Class::Group && !has_pairs {
                continue;
            }
            let known = found
                .iter_mut()
                .rfind(|known| known.ptx_line == step.ptx_line && known.what == what);
            match known {
                Some(known) => known.steps.push(position as u32),
                None => found.push(Mutation {
                    class,
                    what,
                    ptx_line: step.ptx_line,
                    source: step.source,
                    steps: vec![position as u32],
                }),
            }
        }
    }
    found.sort_by_key(|mutation| mutation.ptx_line);
    found
}

/// Whether the target has CTA pairs. Before `sm_100`, `.cta_group` is an error of the assembler.
fn has_cta_pairs(target: &str) -> bool {
    let digits: String = target.chars().filter(char::is_ascii_digit).collect();
    digits.parse().is_ok_and(|version: u32| (100..120).contains(&version))
}

/// Returns the program with a mistake from [`mutations`].
pub fn mutant(program: &Program, mutation: &Mutation) -> Program {
    let spare = Spare::of(program);
    let mut mutant = program.clone();
    let mut inserted: Vec<(u32, Vec<Step>)> = Vec::new();
    for &position in &mutation.steps {
        let Some(step) = mutant.steps.get_mut(position as usize) else { continue };
        let replacement = edits(&step.instruction, spare)
            .into_iter()
            .find(|edit| edit.what == mutation.what)
            .map(|edit| edit.replacement);
        match replacement {
            Some(Replacement::Nothing) => step.guard = Some(PredicateSource::Constant(false)),
            Some(Replacement::Steps(mut instructions)) => {
                if let Some(last) = instructions.pop() {
                    step.instruction = last;
                }
                let before: Vec<Step> = instructions
                    .into_iter()
                    .map(|instruction| Step { guard: None, instruction, ..step.clone() })
                    .collect();
                if !before.is_empty() {
                    inserted.push((position, before));
                }
            }
            None => {}
        }
    }
    if !inserted.is_empty() {
        spare.take(&mut mutant);
        insert(&mut mutant, inserted);
    }
    mutant
}

/// Inserts steps before other steps, and adjusts branch targets.
fn insert(program: &mut Program, inserted: Vec<(u32, Vec<Step>)>) {
    let moved = |target: u32| {
        let before = inserted.iter().filter(|(position, _)| *position < target);
        target + before.map(|(_, steps)| steps.len() as u32).sum::<u32>()
    };
    for step in &mut program.steps {
        match &mut step.instruction {
            Instruction::Branch { target, .. } => *target = moved(*target),
            Instruction::BranchIndexed { targets, .. } => {
                targets.iter_mut().for_each(|target| *target = moved(*target));
            }
            _ => {}
        }
    }
    let mut inserted = inserted.into_iter().peekable();
    let steps = std::mem::take(&mut program.steps);
    for (position, step) in steps.into_iter().enumerate() {
        if let Some((_, before)) = inserted.next_if(|(at, _)| *at as usize == position) {
            program.steps.extend(before);
        }
        program.steps.push(step);
    }
}
