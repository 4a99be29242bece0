//! Registers that asynchronous operations of a warp read or write.

use std::collections::HashMap;

use super::{Access, Actor, Direction, Hazard, HazardKind, Severity, Site, Thread, Tracker, Unit};

/// Follows the registers of one warp that `wgmma` or `tcgen05.ld` use.
///
/// A `wgmma`'s accumulator, and A in registers, must not be touched until a `wgmma.wait_group`
/// covers it, and a `wgmma.fence` must lie between touching them and the next `wgmma`. Compilers
/// copy such registers by `mov` while they are in flight, which is how PTX names the same physical
/// register twice: a copy hands the state on and is no use.
///
/// What `tcgen05.ld` writes may be read at once: the ISA keeps the order of true register
/// dependencies (register dependencies, same thread, in the memory consistency model of tcgen05).
/// It is a warning only, once for each load. To write such a register that nobody read needs
/// `tcgen05.wait::ld`; so does all that is about the tensor memory that was read, which is
/// followed there.
///
/// Only instructions that touch a register in [`RegisterWatch::watches`] need be told, which the
/// engine can find when it loads the program: all registers of `wgmma` and `tcgen05.ld`, and of
/// `mov`s from and to them.
#[derive(Clone, Debug, Default)]
pub struct RegisterWatch {
    states: HashMap<u32, State>,
    /// Number of `wgmma.fence`s so far.
    fences: u64,
    /// `wgmma`s so far, and those in committed groups.
    wgmmas: u64,
    groups: Vec<u64>,
    loads: u64,
    loads_done: u64,
    /// The last load of which a register was read too early.
    load_read: u64,
    wgmmas_done: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Number of the last MMA that uses it, its step, and whether it writes it.
    wgmma: Option<(u64, u32, bool)>,
    /// Number of the load that writes it, its step, and whether a `mov` has read it since.
    load: Option<(u64, u32, bool)>,
    /// Fences before it was last touched, and by which step; `None` if never.
    touched: Option<(u64, u32)>,
}

/// What a register operation found: kind, step of the earlier instruction, register.
pub type RegisterHazard = (HazardKind, u32, u32);

impl RegisterWatch {
    /// Whether a register is in use by anything followed here.
    pub fn watches(&self, register: u32) -> bool {
        self.states.contains_key(&register)
    }

    /// An ordinary instruction reads or writes a register.
    pub fn touch(
        &mut self,
        register: u32,
        direction: Direction,
        step: u32,
    ) -> Option<RegisterHazard> {
        let fences = self.fences;
        let state = self.states.entry(register).or_default();
        state.touched = Some((fences, step));
        let wgmma = state.wgmma.filter(|(number, _, written)| {
            // Reading what an MMA only reads is harmless.
            *number > self.wgmmas_done && (*written || direction == Direction::Write)
        });
        // Who has the value has waited for it.
        let load = state.load.take().filter(|(number, ..)| *number > self.loads_done);
        if let Some((_, earlier, _)) = wgmma {
            return Some((HazardKind::RegisterInFlight, earlier, register));
        }
        let (number, earlier, is_read) = load?;
        if direction == Direction::Write {
            return (!is_read).then_some((HazardKind::RegisterInFlight, earlier, register));
        }
        let is_first = std::mem::replace(&mut self.load_read, number) != number;
        is_first.then_some((HazardKind::TensorLoadUnwaited, earlier, register))
    }

    /// `mov` of one register to another: the target is what the source is.
    pub fn copy(&mut self, from: u32, to: u32) {
        match self.states.get_mut(&from) {
            Some(state) => {
                let mut copy = *state;
                copy.load = state.load.take().map(|(number, step, _)| (number, step, true));
                self.states.insert(to, copy)
            }
            None => self.states.remove(&to),
        };
    }

    /// `wgmma.fence`.
    pub fn warp_group_fence(&mut self) {
        self.fences += 1;
    }

    /// `wgmma.mma_async` with these registers: D, written, and A, read.
    pub fn warp_group_mma(&mut self, d: &[u32], a: &[u32], step: u32) -> Option<RegisterHazard> {
        self.wgmmas += 1;
        let mut found = None;
        if self.fences == 0 {
            let register = d.first().or(a.first()).copied().unwrap_or(0);
            found = Some((HazardKind::MissingWarpGroupFence, step, register));
        }
        for (register, written) in
            d.iter().map(|at| (*at, true)).chain(a.iter().map(|at| (*at, false)))
        {
            let state = self.states.entry(register).or_default();
            if let Some((fences, earlier)) = state.touched
                && fences >= self.fences
            {
                found = found.or(Some((HazardKind::MissingWarpGroupFence, earlier, register)));
            }
            let written = written
                || state
                    .wgmma
                    .is_some_and(|(number, _, written)| number > self.wgmmas_done && written);
            state.wgmma = Some((self.wgmmas, step, written));
        }
        found
    }

    /// `wgmma.commit_group`.
    pub fn warp_group_commit(&mut self) {
        self.groups.push(self.wgmmas);
    }

    /// `wgmma.wait_group pending`.
    pub fn warp_group_wait(&mut self, pending: u32) {
        if let Some(done) = self.groups.iter().rev().nth(pending as usize) {
            self.wgmmas_done = self.wgmmas_done.max(*done);
        }
        let keep = self.groups.len().saturating_sub(pending as usize + 1);
        self.groups.drain(..keep);
    }

    /// `tcgen05.ld` to these registers.
    pub fn tensor_load(&mut self, registers: &[u32], step: u32) {
        self.loads += 1;
        for register in registers {
            self.states.entry(*register).or_default().load = Some((self.loads, step, false));
        }
    }

    /// `tcgen05.wait::ld`.
    pub fn tensor_wait_load(&mut self) {
        self.loads_done = self.loads;
    }
}

impl Tracker {
    /// Adds what a [`RegisterWatch`] found to the hazards. `thread.step` is the later
    /// instruction, `unit` what the earlier one is.
    pub fn report_register(
        &mut self,
        thread: Thread,
        unit: Unit,
        (kind, earlier_step, register): RegisterHazard,
    ) {
        if kind.severity() == Severity::Warning && !self.warns() {
            return;
        }
        let write = kind != HazardKind::TensorLoadUnwaited;
        let access = |site: Site, actor: Actor, write| Access { site, actor, write };
        let earlier =
            access(self.site(earlier_step), self.actor(thread.warp, thread.lanes, unit), true);
        let later = access(
            self.site(thread.step),
            self.actor(thread.warp, thread.lanes, Unit::Thread),
            write,
        );
        self.hazards.add(kind, earlier, later, None, || {
            let remedy = match (kind, unit) {
                (HazardKind::MissingWarpGroupFence, _) => {
                    "`wgmma.fence` after other instructions touch registers of a `wgmma`, and \
                     before the first `wgmma`"
                }
                (HazardKind::TensorLoadUnwaited, _) => {
                    "`tcgen05.wait::ld` before the registers are used; the ISA orders this read \
                     without it, and no other access"
                }
                (_, Unit::TensorLoad) => "`tcgen05.wait::ld` before the registers are written",
                _ => "`wgmma.wait_group` that covers the `wgmma` before its registers are used",
            };
            format!("{remedy} (register {register})")
        });
    }

    /// The kernel orders tensor memory by the acquire of its waits alone; of its first MMA and its
    /// first load.
    pub(crate) fn warn_of_tensor_fences(&mut self, mma: u32, load: u32) {
        if !self.rules.warnings {
            return;
        }
        let access = |step, unit, write| {
            let actor = Actor { cluster: 0, rank: 0, warp: 0, lanes: u32::MAX, unit };
            Access { site: self.site(step), actor, write }
        };
        let earlier = access(mma, Unit::TensorMma, true);
        let later = access(load, Unit::TensorLoad, false);
        self.hazards.add(HazardKind::TensorFencesLeftOut, earlier, later, None, || {
            "`tcgen05.fence::after_thread_sync` behind each wait whose mbarrier tells of tensor \
             memory; without any, only the acquire of the waits is followed"
                .to_owned()
        });
    }

    /// All hazards of a kind.
    pub fn hazards_of(&self, kind: HazardKind) -> impl Iterator<Item = &Hazard> {
        self.hazards().iter().filter(move |hazard| hazard.kind == kind)
    }
}
