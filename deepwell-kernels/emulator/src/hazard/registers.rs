//! Registers that asynchronous operations of a warp read or write.

use std::collections::HashMap;

use super::{Access, Actor, Direction, Hazard, HazardKind, Site, Thread, Tracker, Unit};

/// Follows the registers of one warp that `wgmma` or `tcgen05.ld` use.
///
/// A `wgmma`'s accumulator, and A in registers, must not be touched until a `wgmma.wait_group`
/// covers it, and a `wgmma.fence` must lie between touching them and the next `wgmma`. What
/// `tcgen05.ld` writes is valid after `tcgen05.wait::ld`. Compilers copy such registers by `mov`
/// while they are in flight, which is how PTX names the same physical register twice: a copy
/// hands the state on and is no use.
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
    products: u64,
    groups: Vec<u64>,
    loads: u64,
    loads_done: u64,
    products_done: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Number of the last product that uses it, its step, and whether it writes it.
    product: Option<(u64, u32, bool)>,
    load: Option<(u64, u32)>,
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
        let product = state.product.filter(|(number, _, written)| {
            // Reading what a product only reads is harmless.
            *number > self.products_done && (*written || direction == Direction::Write)
        });
        let load = state.load.filter(|(number, _)| *number > self.loads_done);
        let found = product.map(|(_, step, _)| step).or(load.map(|(_, step)| step));
        found.map(|earlier| (HazardKind::RegisterInFlight, earlier, register))
    }

    /// `mov` of one register to another: the target is what the source is.
    pub fn copy(&mut self, from: u32, to: u32) {
        match self.states.get(&from).copied() {
            Some(state) => self.states.insert(to, state),
            None => self.states.remove(&to),
        };
    }

    /// `wgmma.fence`.
    pub fn warp_group_fence(&mut self) {
        self.fences += 1;
    }

    /// `wgmma.mma_async` with these registers: D, written, and A, read.
    pub fn warp_group_mma(&mut self, d: &[u32], a: &[u32], step: u32) -> Option<RegisterHazard> {
        self.products += 1;
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
            if let Some((number, earlier)) = state.load
                && number > self.loads_done
            {
                found = found.or(Some((HazardKind::RegisterInFlight, earlier, register)));
            }
            let written = written
                || state
                    .product
                    .is_some_and(|(number, _, written)| number > self.products_done && written);
            state.product = Some((self.products, step, written));
        }
        found
    }

    /// `wgmma.commit_group`.
    pub fn warp_group_commit(&mut self) {
        self.groups.push(self.products);
    }

    /// `wgmma.wait_group pending`.
    pub fn warp_group_wait(&mut self, pending: u32) {
        if let Some(done) = self.groups.iter().rev().nth(pending as usize) {
            self.products_done = self.products_done.max(*done);
        }
        let keep = self.groups.len().saturating_sub(pending as usize + 1);
        self.groups.drain(..keep);
    }

    /// `tcgen05.ld` to these registers.
    pub fn tensor_load(&mut self, registers: &[u32], step: u32) {
        self.loads += 1;
        for register in registers {
            self.states.entry(*register).or_default().load = Some((self.loads, step));
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
        let access = |site: Site, actor: Actor| Access { site, actor, write: true };
        let earlier = access(self.site(earlier_step), self.actor(thread.warp, thread.lanes, unit));
        let later =
            access(self.site(thread.step), self.actor(thread.warp, thread.lanes, Unit::Thread));
        self.hazards.add(kind, earlier, later, None, || {
            let remedy = match (kind, unit) {
                (HazardKind::MissingWarpGroupFence, _) => {
                    "`wgmma.fence` after other instructions touch registers of a `wgmma`, and \
                     before the first `wgmma`"
                }
                (_, Unit::TensorLoad) => "`tcgen05.wait::ld` before the registers are used",
                _ => "`wgmma.wait_group` that covers the `wgmma` before its registers are used",
            };
            format!("{remedy} (register {register})")
        });
    }

    /// All hazards of a kind.
    pub fn hazards_of(&self, kind: HazardKind) -> impl Iterator<Item = &Hazard> {
        self.hazards().iter().filter(move |hazard| hazard.kind == kind)
    }
}
