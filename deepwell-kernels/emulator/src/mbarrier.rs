//! Barriers in shared memory that count arrivals and bytes.
//!
//! # Brief overview
//!
//! An mbarrier object is 8 opaque bytes of shared memory. The emulator keeps objects outside of
//! shared memory: an [`MbarrierTable`] holds one [`Mbarrier`] per object of a cluster. Any use of
//! ordinary bytes as a barrier, or of a barrier's bytes as data, is therefore detected.
//!
//! A barrier is in one *phase* at a time, counted from 0. The phase completes when no arrival is
//! pending and the transaction count is zero; then the next phase begins, with all expected
//! arrivals pending. Every operation that may complete a phase returns an [`Arrival`] with the
//! phase in which it counted, for the hazard tracker.
//!
//! ```
//! use deepwell_emulator::mbarrier::{MbarrierTable, PhaseTest};
//!
//! let mut table = MbarrierTable::new(1);
//! table.init(0, 64, 1).unwrap();
//! let arrival = table.arrive_expect_tx(0, 64, 16384).unwrap();
//! assert!(!arrival.completed);
//! assert!(!table.test(0, 64, PhaseTest::Parity(0)).unwrap());
//! assert!(table.complete_tx(0, 64, 16384).unwrap().completed);
//! assert!(table.test(0, 64, PhaseTest::Parity(0)).unwrap());
//! ```
//!
//! The requirements of each operation are in PTX ISA 9.7.13.15. Every violation is a [`Fault`] with
//! a rule name of the form `mbarrier-...`.

use std::collections::HashMap;

use crate::error::Fault;

mod live;
mod object;
#[cfg(test)]
mod tests;

use live::LiveWords;
pub use object::{Arrival, COUNT_MAX, Mbarrier, PhaseTest};

/// Size of an mbarrier object, in bytes; also its alignment.
pub const MBARRIER_BYTES: u32 = 8;

/// All mbarrier objects of one cluster.
#[derive(Clone, Debug, Default)]
pub struct MbarrierTable {
    objects: HashMap<(u32, u32), Mbarrier>,
    /// Words of each CTA's shared memory that hold a live object. Every ordinary access checks
    /// this.
    live: Vec<LiveWords>,
}

impl MbarrierTable {
    /// Creates a table for a cluster of `ctas` CTAs, without objects.
    pub fn new(ctas: u32) -> MbarrierTable {
        MbarrierTable {
            objects: HashMap::new(),
            live: (0..ctas).map(|_| LiveWords::default()).collect(),
        }
    }

    /// `mbarrier.init`: creates an object in phase 0 that expects `count` arrivals per phase.
    ///
    /// # Errors
    /// A misaligned address, a count outside of 1..=[`COUNT_MAX`], or a live object at the address.
    pub fn init(&mut self, rank: u32, offset: u32, count: u32) -> Result<(), Fault> {
        aligned(rank, offset)?;
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(Fault::new(
                "mbarrier-count-out-of-range",
                format!("`mbarrier.init` takes a count in 1..={COUNT_MAX}, got {count}"),
            ));
        }
        if let Some(object) = self.objects.get(&(rank, offset)) {
            return Err(Fault::new(
                "mbarrier-reinitialized",
                format!(
                    "`mbarrier.init` of shared {offset:#x} of CTA {rank}, which holds a live \
                     mbarrier ({}); `mbarrier.inval` it first",
                    object.describe()
                ),
            ));
        }
        self.objects.insert((rank, offset), Mbarrier::new(count));
        self.live_of(rank).set(offset);
        Ok(())
    }

    /// `mbarrier.inval`: makes the object's bytes ordinary memory again.
    ///
    /// # Errors
    /// No live object at the address.
    pub fn inval(&mut self, rank: u32, offset: u32) -> Result<(), Fault> {
        self.object("mbarrier.inval", rank, offset)?;
        self.objects.remove(&(rank, offset));
        self.live_of(rank).clear(offset);
        Ok(())
    }

    /// `mbarrier.expect_tx`: the current phase expects `bytes` more bytes.
    ///
    /// # Errors
    /// No live object, or a transaction count out of range.
    pub fn expect_tx(&mut self, rank: u32, offset: u32, bytes: u32) -> Result<Arrival, Fault> {
        self.object("mbarrier.expect_tx", rank, offset)?.expect_tx(bytes).map_err(at(rank, offset))
    }

    /// `mbarrier.complete_tx`, or the completion of a bulk copy: `bytes` bytes arrived.
    ///
    /// # Errors
    /// No live object, a transaction count out of range, or more bytes than the phase expects when
    /// no arrival is left that could expect more.
    pub fn complete_tx(&mut self, rank: u32, offset: u32, bytes: u32) -> Result<Arrival, Fault> {
        self.object("complete-tx", rank, offset)?.complete_tx(bytes).map_err(at(rank, offset))
    }

    /// `mbarrier.arrive` with `count` arrivals; also the arrival of `tcgen05.commit` (count 1).
    /// With `no_complete`, the phase must not complete.
    ///
    /// # Errors
    /// No live object, a count of zero or out of range, more arrivals than are pending, or a
    /// completed phase under `no_complete`.
    pub fn arrive(
        &mut self,
        rank: u32,
        offset: u32,
        count: u32,
        no_complete: bool,
    ) -> Result<Arrival, Fault> {
        self.object("mbarrier.arrive", rank, offset)?
            .arrive(count, no_complete)
            .map_err(at(rank, offset))
    }

    /// `mbarrier.arrive.expect_tx`: expects `bytes` bytes, then arrives once.
    ///
    /// # Errors
    /// As [`Self::expect_tx`] and [`Self::arrive`].
    pub fn arrive_expect_tx(
        &mut self,
        rank: u32,
        offset: u32,
        bytes: u32,
    ) -> Result<Arrival, Fault> {
        self.object("mbarrier.arrive.expect_tx", rank, offset)?
            .arrive_expect_tx(bytes)
            .map_err(at(rank, offset))
    }

    /// `mbarrier.arrive_drop`: lowers the arrival count of later phases by `count`, then arrives
    /// `count` times. `bytes` is nonzero only in the `.expect_tx` form.
    ///
    /// # Errors
    /// As [`Self::arrive`], or a count above the expected arrivals.
    pub fn arrive_drop(
        &mut self,
        rank: u32,
        offset: u32,
        count: u32,
        bytes: u32,
        no_complete: bool,
    ) -> Result<Arrival, Fault> {
        self.object("mbarrier.arrive_drop", rank, offset)?
            .arrive_drop(count, bytes, no_complete)
            .map_err(at(rank, offset))
    }

    /// The first half of `cp.async.mbarrier.arrive` without `.noinc`: adds a pending arrival to
    /// this phase. The second half is [`Self::arrive`] when the copies are complete.
    ///
    /// # Errors
    /// No live object, or a pending count out of range.
    pub fn add_pending(&mut self, rank: u32, offset: u32, count: u32) -> Result<(), Fault> {
        self.object("cp.async.mbarrier.arrive", rank, offset)?
            .add_pending(count)
            .map_err(at(rank, offset))
    }

    /// `mbarrier.test_wait` and one attempt of `mbarrier.try_wait`: whether the phase is complete.
    ///
    /// # Errors
    /// No live object, a parity above 1, or a state of a phase other than the current one and its
    /// predecessor.
    pub fn test(&mut self, rank: u32, offset: u32, phase: PhaseTest) -> Result<bool, Fault> {
        self.object("mbarrier.try_wait", rank, offset)?.test(phase).map_err(at(rank, offset))
    }

    /// `mbarrier.pending_count` of a state returned by [`Self::arrive`].
    ///
    /// # Errors
    /// A value that is not a state.
    pub fn pending_count(state: u64) -> Result<u32, Fault> {
        object::pending_count(state)
    }

    /// Returns the live object at an address, if any.
    pub fn get(&self, rank: u32, offset: u32) -> Option<&Mbarrier> {
        self.objects.get(&(rank, offset))
    }

    /// Checks that an ordinary access does not touch a live object (PTX ISA 9.7.13.15: only
    /// mbarrier operations may). Fast enough for every access.
    ///
    /// # Errors
    /// The bytes overlap a live object.
    #[inline]
    pub fn check_access(
        &self,
        rank: u32,
        offset: u32,
        bytes: u32,
        write: bool,
    ) -> Result<(), Fault> {
        match self.live.get(rank as usize).and_then(|live| live.first_in(offset, bytes)) {
            None => Ok(()),
            Some(object) => Err(overlap(rank, object, write)),
        }
    }

    /// Describes an object for reports of deadlocks, such as ``mbarrier at shared 0x40 of CTA 0:
    /// phase 3 (parity 1) lacks 1 of 2 arrivals``.
    pub fn describe(&self, rank: u32, offset: u32) -> String {
        match self.get(rank, offset) {
            Some(object) => {
                format!("mbarrier at shared {offset:#x} of CTA {rank}: {}", object.describe())
            }
            None => format!("no mbarrier at shared {offset:#x} of CTA {rank}"),
        }
    }

    /// Describes a wait on `parity` that does not end.
    pub fn describe_wait(&self, rank: u32, offset: u32, parity: u32) -> String {
        format!("waits for parity {parity} of {}", self.describe(rank, offset))
    }

    /// Returns all live objects of a CTA, by offset.
    pub fn live_objects(&self, rank: u32) -> Vec<(u32, &Mbarrier)> {
        let mut found: Vec<_> = (self.objects.iter())
            .filter(|((of, _), _)| *of == rank)
            .map(|((_, offset), object)| (*offset, object))
            .collect();
        found.sort_by_key(|(offset, _)| *offset);
        found
    }

    /// Removes all objects, when a new cluster takes the place of this one.
    pub fn reset(&mut self) {
        self.objects.clear();
        self.live.iter_mut().for_each(LiveWords::reset);
    }

    fn live_of(&mut self, rank: u32) -> &mut LiveWords {
        if self.live.len() <= rank as usize {
            self.live.resize_with(rank as usize + 1, LiveWords::default);
        }
        &mut self.live[rank as usize]
    }

    fn object(&mut self, operation: &str, rank: u32, offset: u32) -> Result<&mut Mbarrier, Fault> {
        aligned(rank, offset)?;
        self.objects.get_mut(&(rank, offset)).ok_or_else(|| {
            Fault::new(
                "mbarrier-uninitialized",
                format!(
                    "`{operation}` on shared {offset:#x} of CTA {rank}, which holds no \
                     mbarrier; `mbarrier.init` must come first"
                ),
            )
        })
    }
}

fn aligned(rank: u32, offset: u32) -> Result<(), Fault> {
    if offset.is_multiple_of(MBARRIER_BYTES) {
        return Ok(());
    }
    Err(Fault::new(
        "mbarrier-misaligned",
        format!("an mbarrier is 8-byte aligned, got shared {offset:#x} of CTA {rank}"),
    ))
}

#[cold]
fn overlap(rank: u32, object: u32, write: bool) -> Fault {
    let (rule, verb) =
        if write { ("mbarrier-overwritten", "write") } else { ("mbarrier-read", "read") };
    Fault::new(
        rule,
        format!(
            "ordinary {verb} of the live mbarrier at shared {object:#x} of CTA {rank}; only \
             mbarrier operations may touch it, `mbarrier.inval` frees its bytes"
        ),
    )
}

/// Adds the address of the object to a fault.
fn at(rank: u32, offset: u32) -> impl Fn(Fault) -> Fault {
    move |fault| {
        Fault::new(
            fault.rule,
            format!("mbarrier at shared {offset:#x} of CTA {rank}: {}", fault.message),
        )
    }
}
