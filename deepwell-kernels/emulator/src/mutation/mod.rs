//! Programs with one synchronizing instruction left out.
//!
//! # Brief overview
//!
//! A test of the tests: where a kernel's wait, fence, commit or arrival can be deleted and nobody
//! notices, either it was not needed, or the kernel was not run in a way that needs it, or what
//! watches it is blind. [`deletions`] lists what can be left out of a program, and [`without`]
//! makes the program that lacks one of them; the pair is used with
//! [`Emulator::replace_program`](crate::launch::Emulator::replace_program).
//!
//! What counts as synchronizing: barriers of blocks, clusters and warps; all fences;
//! everything of mbarriers but `inval` and `pending_count`; commits, waits and arrivals of
//! asynchronous copies, of `wgmma` and of `tcgen05`; `griddepcontrol.wait`; and the order that
//! loads, stores and atomics have beside what they do, which is weakened to `.relaxed`. Not among
//! them is `griddepcontrol.launch_dependents`, which only lets others begin earlier, nor are hints.
//!
//! A deleted wait lets its threads go on at once: `mbarrier.try_wait` says that the phase is
//! complete. An arrival that expects bytes is deleted whole, and once more without the bytes.
//!
//! ```
//! use deepwell_emulator::{decode, mutation, ptx};
//!
//! let text = "
//!     .version 9.0
//!     .target sm_90a
//!     .address_size 64
//!     .visible .entry k() { bar.sync 0; ret; }";
//! let program = decode::decode(&ptx::parse(text)?, "k", &Default::default())?;
//! let found = mutation::deletions(&program);
//! assert_eq!(found.len(), 1);
//! assert_eq!((found[0].what, found[0].ptx_line), ("bar.sync", 5));
//! let mutant = mutation::without(&program, &found[0]);
//! assert_eq!(mutation::deletions(&mutant), []);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod synchronizing;
#[cfg(test)]
mod tests;

use crate::decode::{Instruction, PredicateSource, Program};

use self::synchronizing::replacements;

/// A synchronizing instruction of the text that can be left out, or a part of one.
#[derive(Clone, Debug, PartialEq)]
pub struct Deletion {
    /// The instruction's name, `tcgen05.commit` for example, with what of it is deleted.
    pub what: &'static str,
    /// Line of the PTX text.
    pub ptx_line: u32,
    /// File (an index into [`crate::ptx::Module::files`]) and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// Positions in [`Program::steps`]: several where a function was inlined several times.
    steps: Vec<u32>,
}

impl Deletion {
    /// Whether a launch ran the instruction; `executed` is
    /// [`Counts::executed`](crate::launch::Counts::executed) of the whole program.
    pub fn ran(&self, executed: &[u64]) -> bool {
        self.steps.iter().any(|step| executed.get(*step as usize).is_some_and(|count| *count > 0))
    }
}

/// What stands in the place of an instruction.
#[derive(Clone, Debug, PartialEq)]
enum Replacement {
    Nothing,
    Other(Box<Instruction>),
}

/// All that can be left out, one at a time, in the order of the text.
pub fn deletions(program: &Program) -> Vec<Deletion> {
    let mut found: Vec<Deletion> = Vec::new();
    for (position, step) in program.steps.iter().enumerate() {
        if step.guard == Some(PredicateSource::Constant(false)) {
            continue;
        }
        for (what, _) in replacements(&step.instruction) {
            let known = found
                .iter_mut()
                .rfind(|known| known.ptx_line == step.ptx_line && known.what == what);
            match known {
                Some(known) => known.steps.push(position as u32),
                None => found.push(Deletion {
                    what,
                    ptx_line: step.ptx_line,
                    source: step.source,
                    steps: vec![position as u32],
                }),
            }
        }
    }
    found.sort_by_key(|deletion| deletion.ptx_line);
    found
}

/// The program without one of its [`deletions`]. Positions of the other instructions stay.
pub fn without(program: &Program, deletion: &Deletion) -> Program {
    let mut mutant = program.clone();
    for &position in &deletion.steps {
        let Some(step) = mutant.steps.get_mut(position as usize) else { continue };
        let replacement = replacements(&step.instruction)
            .into_iter()
            .find(|(what, _)| *what == deletion.what)
            .map(|(_, replacement)| replacement);
        match replacement {
            Some(Replacement::Nothing) => step.guard = Some(PredicateSource::Constant(false)),
            Some(Replacement::Other(instruction)) => step.instruction = *instruction,
            None => {}
        }
    }
    mutant
}
