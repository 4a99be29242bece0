//! One mbarrier object.

use crate::error::Fault;

/// The largest expected, pending and transaction count (PTX ISA 9.7.13.15.2).
pub const COUNT_MAX: u32 = (1 << 20) - 1;

/// Top bits of the state word that an arrival returns. A register that never held a state is
/// detected by a wrong tag.
const STATE_TAG: u64 = 0xB;

/// The phase that a wait tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PhaseTest {
    /// The phase of the arrival that returned this state.
    State(u64),
    /// The current or the immediately preceding phase, whichever has this parity.
    Parity(u32),
}

/// Effect of an operation that may complete a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The phase in which the operation counted.
    pub phase: u64,
    /// Whether it completed that phase.
    pub completed: bool,
    /// The opaque state before the operation, for the destination of `mbarrier.arrive`.
    pub state: u64,
}

/// State of one mbarrier object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mbarrier {
    phase: u64,
    expected: u32,
    pending: u32,
    transactions: i64,
}

impl Mbarrier {
    pub(super) fn new(count: u32) -> Mbarrier {
        Mbarrier { phase: 0, expected: count, pending: count, transactions: 0 }
    }

    /// Returns the current, incomplete phase.
    pub fn phase(&self) -> u64 {
        self.phase
    }

    /// Returns the pending arrivals of the current phase.
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Returns the expected arrivals of every later phase.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// Returns expected minus arrived bytes of the current phase.
    pub fn transactions(&self) -> i64 {
        self.transactions
    }

    /// Describes the phase and its missing arrivals and bytes.
    pub fn describe(&self) -> String {
        let mut lacks = Vec::new();
        if self.pending > 0 {
            lacks.push(format!("{} of {} arrivals", self.pending, self.expected));
        }
        if self.transactions > 0 {
            lacks.push(format!("{} bytes of copies", self.transactions));
        }
        if self.transactions < 0 {
            lacks.push(format!("an expect-tx for {} bytes that came", -self.transactions));
        }
        let phase = format!("phase {} (parity {})", self.phase, self.phase & 1);
        format!("{phase} lacks {}", lacks.join(" and "))
    }

    pub(super) fn expect_tx(&mut self, bytes: u32) -> Result<Arrival, Fault> {
        let before = self.here();
        self.transact(i64::from(bytes))?;
        Ok(self.complete_if_due(before))
    }

    pub(super) fn complete_tx(&mut self, bytes: u32) -> Result<Arrival, Fault> {
        let before = self.here();
        self.transact(-i64::from(bytes))?;
        self.check_surplus()?;
        Ok(self.complete_if_due(before))
    }

    pub(super) fn arrive(&mut self, count: u32, no_complete: bool) -> Result<Arrival, Fault> {
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(Fault::new(
                "mbarrier-count-out-of-range",
                format!("an arrival counts 1..={COUNT_MAX}, got {count}"),
            ));
        }
        if count > self.pending {
            return Err(Fault::new(
                "mbarrier-arrived-too-often",
                format!(
                    "{count} arrivals where phase {} lacks {} of {}; the count given to \
                     `mbarrier.init` is too small, or somebody arrives twice",
                    self.phase, self.pending, self.expected
                ),
            ));
        }
        let before = self.here();
        self.pending -= count;
        self.check_surplus()?;
        let arrival = self.complete_if_due(before);
        if no_complete && arrival.completed {
            return Err(Fault::new(
                "mbarrier-no-complete-completed",
                format!("an arrival with `.noComplete` completed phase {}", arrival.phase),
            ));
        }
        Ok(arrival)
    }

    pub(super) fn arrive_expect_tx(&mut self, bytes: u32) -> Result<Arrival, Fault> {
        let state = self.state();
        self.transact(i64::from(bytes))?;
        Ok(Arrival { state, ..self.arrive(1, false)? })
    }

    pub(super) fn arrive_drop(
        &mut self,
        count: u32,
        bytes: u32,
        no_complete: bool,
    ) -> Result<Arrival, Fault> {
        if count > self.expected {
            return Err(Fault::new(
                "mbarrier-arrived-too-often",
                format!("`arrive_drop` of {count} where {} are expected", self.expected),
            ));
        }
        let state = self.state();
        self.expected -= count;
        self.transact(i64::from(bytes))?;
        Ok(Arrival { state, ..self.arrive(count, no_complete)? })
    }

    pub(super) fn add_pending(&mut self, count: u32) -> Result<(), Fault> {
        if self.pending + count > COUNT_MAX {
            return Err(Fault::new(
                "mbarrier-count-out-of-range",
                format!("pending arrivals {} + {count} exceed {COUNT_MAX}", self.pending),
            ));
        }
        self.pending += count;
        Ok(())
    }

    pub(super) fn test(&self, phase: PhaseTest) -> Result<bool, Fault> {
        match phase {
            PhaseTest::Parity(parity @ 0..=1) => Ok(self.phase & 1 != u64::from(parity)),
            PhaseTest::Parity(parity) => Err(Fault::new(
                "mbarrier-parity-out-of-range",
                format!("a phase parity is 0 or 1, got {parity}"),
            )),
            PhaseTest::State(state) => {
                let of = state_phase(state)?;
                // The state holds 32 bits of the phase; no launch reaches more phases.
                let age = (self.phase as u32).wrapping_sub(of);
                match age {
                    0 => Ok(false),
                    1 => Ok(true),
                    _ => Err(Fault::new(
                        "mbarrier-state-outdated",
                        format!(
                            "a wait tests the state of phase {of} in phase {}; only the current \
                             and the preceding phase may be tested",
                            self.phase
                        ),
                    )),
                }
            }
        }
    }

    fn here(&self) -> Arrival {
        Arrival { phase: self.phase, completed: false, state: self.state() }
    }

    /// Packs tag, phase and pending count: 4, 32 and 28 bits.
    fn state(&self) -> u64 {
        STATE_TAG << 60 | (self.phase & 0xffff_ffff) << 28 | u64::from(self.pending)
    }

    fn transact(&mut self, bytes: i64) -> Result<(), Fault> {
        let count = self.transactions + bytes;
        if count.unsigned_abs() > u64::from(COUNT_MAX) {
            return Err(Fault::new(
                "mbarrier-transactions-out-of-range",
                format!("transaction count {count} is outside -{COUNT_MAX}..={COUNT_MAX}"),
            ));
        }
        self.transactions = count;
        Ok(())
    }

    /// Checks that the arrived bytes were expected. No arrival is left that could expect more.
    fn check_surplus(&self) -> Result<(), Fault> {
        if self.pending > 0 || self.transactions >= 0 {
            return Ok(());
        }
        Err(Fault::new(
            "mbarrier-more-bytes-than-expected",
            format!(
                "all arrivals of phase {} are there and {} bytes came more than were expected; \
                 the count given to expect-tx is too small",
                self.phase, -self.transactions
            ),
        ))
    }

    fn complete_if_due(&mut self, before: Arrival) -> Arrival {
        let completed = self.pending == 0 && self.transactions == 0;
        if completed {
            self.phase += 1;
            self.pending = self.expected;
        }
        Arrival { completed, ..before }
    }
}

pub(super) fn pending_count(state: u64) -> Result<u32, Fault> {
    state_phase(state)?;
    Ok((state & 0xfff_ffff) as u32)
}

fn state_phase(state: u64) -> Result<u32, Fault> {
    if state >> 60 != STATE_TAG {
        return Err(Fault::new(
            "mbarrier-no-state",
            format!("{state:#x} is not a state that `mbarrier.arrive` returned"),
        ));
    }
    Ok((state >> 28 & 0xffff_ffff) as u32)
}
