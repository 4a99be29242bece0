//! Registers in use by asynchronous operations of a warp.

use std::collections::HashMap;

use super::{Access, Actor, Direction, Hazard, HazardKind, Severity, Site, Thread, Tracker, Unit};

/// Tracks the registers of one warp that `wgmma` or `tcgen05.ld` use.
///
/// The accumulator of a `wgmma`, and A in registers, must not be touched until a `wgmma.wait_group`
/// covers the `wgmma`. A `wgmma.fence` must separate such accesses from the next `wgmma`. Compilers
/// copy registers in flight by `mov`, which gives the same physical register a second name in PTX:
/// a copy therefore transfers the state and does not count as a use.
///
/// A result of `tcgen05.ld` may be read immediately: the ISA preserves true register dependencies
/// (register dependencies, same thread, in the memory consistency model of tcgen05). Such a read is
/// only a warning, once for each load. Overwriting a result that was never read needs
/// `tcgen05.wait::ld`. The tensor memory that was read is tracked separately.
///
/// Only instructions that touch a register in [`RegisterWatch::watches`] must be reported. The
/// engine determines these registers when it loads the program: all registers of `wgmma` and
/// `tcgen05.ld`, and of `mov`s from and to such registers.
#[derive(Clone, Debug, Default)]
pub struct RegisterWatch {
    states: HashMap<u32, State>,
    /// Number of `wgmma.fence`s so far.
    fences: u64,
    /// Number of `wgmma`s so far; `groups` holds this number for each committed group.
    wgmmas: u64,
    groups: Vec<u64>,
    loads: u64,
    loads_done: u64,
    /// The last load with a register that was read too early.
    load_read: u64,
    wgmmas_done: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Number of the last MMA that uses the register, its step, and whether it writes the register.
    wgmma: Option<(u64, u32, bool)>,
    /// Number of the load that writes the register, its step, and whether a `mov` has read it
    /// since.
    load: Option<(u64, u32, bool)>,
    /// Number of fences before the last access, and its step; `None` if never accessed.
    touched: Option<(u64, u32)>,
}

/// Kind of the hazard, step of the earlier instruction, register.
pub type RegisterHazard = (HazardKind, u32, u32);

impl RegisterWatch {
    /// Whether a tracked operation uses the register.
    pub fn watches(&self, register: u32) -> bool {
        self.states.contains_key(&register)
    }

    /// Reports that an ordinary instruction reads or writes a register.
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
            // Reading an operand that an MMA only reads is harmless.
            *number > self.wgmmas_done && (*written || direction == Direction::Write)
        });
        // After this access the load has completed, so its state is dropped.
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

    /// `mov` of one register to another: the target gets the state of the source.
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

    /// `wgmma.mma_async` that writes registers D and reads registers A.
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

    /// `tcgen05.ld` that writes these registers.
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
    /// Adds a hazard of a [`RegisterWatch`]. `thread.step` is the later instruction, `unit` the
    /// kind of the earlier one.
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

    /// Warns that the kernel orders tensor memory only by the acquire of its waits. `mma` and
    /// `load` are the steps of the first MMA and the first load.
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

    /// Returns all hazards of a kind.
    pub fn hazards_of(&self, kind: HazardKind) -> impl Iterator<Item = &Hazard> {
        self.hazards().iter().filter(move |hazard| hazard.kind == kind)
    }
}
