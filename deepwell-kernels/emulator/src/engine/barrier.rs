//! Barriers of CTAs and clusters.

use crate::error::Fault;

/// One of a CTA's 16 barriers.
#[derive(Clone, Debug, Default)]
struct CtaBarrier {
    /// Arrived threads.
    arrived: u32,
    /// Expected threads; `None` before the first arrival, `Some(None)` for all threads.
    expected: Option<Option<u32>>,
    /// Number of completed uses.
    generation: u64,
    /// True predicates in the current use.
    count: u32,
    /// False predicates in the current use.
    count_false: u32,
    /// Counts of true and false predicates in the last two uses, by generation modulo 2.
    results: [(u32, u32); 2],
    /// Waiting warps and lanes of the current use.
    waiters: Vec<(u32, u32)>,
}

/// The barriers of one CTA.
#[derive(Clone, Debug, Default)]
pub(crate) struct CtaBarriers {
    all: [CtaBarrier; 16],
}

/// Arrival counts of a barrier, for reports.
pub(crate) struct Lacks {
    pub(crate) arrived: u32,
    pub(crate) expected: Option<u32>,
}

impl CtaBarriers {
    /// `threads` threads arrive at `barrier`; `predicates` counts true and false predicates.
    /// Returns the generation of the arrival, and whether it has completed.
    pub(crate) fn arrive(
        &mut self,
        barrier: u32,
        threads: u32,
        expected: Option<u32>,
        predicates: (u32, u32),
        live_threads: u32,
    ) -> Result<(u64, bool), Fault> {
        let Some(state) = self.all.get_mut(barrier as usize) else {
            return Err(Fault::new(
                "barrier-name-out-of-range",
                format!("barrier {barrier}: a CTA has barriers 0 to 15"),
            ));
        };
        if let Some(count) = expected
            && (count == 0 || !count.is_multiple_of(32))
        {
            return Err(Fault::new(
                "barrier-thread-count",
                format!("{count} threads at barrier {barrier}: expected a multiple of 32"),
            ));
        }
        match state.expected {
            Some(other) if other != expected => {
                let of = |count: Option<u32>| match count {
                    Some(count) => format!("{count} threads"),
                    None => "all threads".to_owned(),
                };
                return Err(Fault::new(
                    "barrier-thread-count-differs",
                    format!(
                        "barrier {barrier} is in use for {}, and warps come to it for {}",
                        of(other),
                        of(expected)
                    ),
                ));
            }
            _ => state.expected = Some(expected),
        }
        state.arrived += threads;
        state.count += predicates.0;
        state.count_false += predicates.1;
        let generation = state.generation;
        if let Some(expected) = expected
            && state.arrived > expected
        {
            return Err(Fault::new(
                "barrier-too-many-threads",
                format!("{} threads at barrier {barrier}, which is for {expected}", state.arrived),
            ));
        }
        let over = state.finish(live_threads);
        Ok((generation, over))
    }

    /// Adds waiting lanes of a warp to the current use of `barrier`.
    pub(crate) fn waits(&mut self, barrier: u32, warp: u32, lanes: u32) {
        if let Some(state) = self.all.get_mut(barrier as usize) {
            state.waiters.push((warp, lanes));
        }
    }

    /// Takes the warps and lanes that waited in the completed use.
    pub(crate) fn take_waiters(&mut self, barrier: u32) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.all[barrier as usize].waiters)
    }

    /// Whether use `generation` of `barrier` has completed.
    pub(crate) fn is_over(&self, barrier: u32, generation: u64) -> bool {
        self.all[barrier as usize].generation > generation
    }

    /// Returns the counts of true and false predicates in the completed use `generation`.
    pub(crate) fn predicates(&self, barrier: u32, generation: u64) -> (u32, u32) {
        self.all[barrier as usize].results[(generation % 2) as usize]
    }

    /// Called when threads exit, which may complete barriers for all threads. Returns the completed
    /// barriers, one bit each.
    pub(crate) fn threads_exited(&mut self, live_threads: u32) -> u32 {
        let mut over = 0;
        for (name, barrier) in self.all.iter_mut().enumerate() {
            if barrier.arrived > 0 && barrier.finish(live_threads) {
                over |= 1 << name;
            }
        }
        over
    }

    /// Returns the arrival counts of `barrier`.
    pub(crate) fn lacks(&self, barrier: u32) -> Lacks {
        let state = &self.all[barrier as usize];
        Lacks { arrived: state.arrived, expected: state.expected.flatten() }
    }
}

impl CtaBarrier {
    fn finish(&mut self, live_threads: u32) -> bool {
        let expected = self.expected.flatten().unwrap_or(live_threads);
        if self.arrived < expected {
            return false;
        }
        self.results[(self.generation % 2) as usize] = (self.count, self.count_false);
        self.generation += 1;
        (self.arrived, self.count, self.count_false, self.expected) = (0, 0, 0, None);
        true
    }
}

/// The barrier of a cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterBarrier {
    arrived: u32,
    /// Number of completed uses.
    pub(crate) generation: u64,
}

impl ClusterBarrier {
    /// Counts arrivals. Returns the generation of the arrivals.
    pub(crate) fn arrive(&mut self, threads: u32, live_threads: u32) -> u64 {
        let generation = self.generation;
        self.arrived += threads;
        self.finish(live_threads);
        generation
    }

    /// Called when threads exit, `had_arrived` of them after their arrival in this generation.
    /// Exited threads count neither as arrived nor as expected. Returns whether the barrier
    /// completes.
    pub(crate) fn exit(&mut self, had_arrived: u32, live_threads: u32) -> bool {
        self.arrived -= had_arrived.min(self.arrived);
        self.finish(live_threads)
    }

    fn finish(&mut self, live_threads: u32) -> bool {
        let over = self.arrived > 0 && self.arrived >= live_threads;
        if over {
            self.arrived = 0;
            self.generation += 1;
        }
        over
    }

    /// Number of arrived threads.
    pub(crate) fn arrived(&self) -> u32 {
        self.arrived
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_of_all_counts_those_that_live() {
        let mut barriers = CtaBarriers::default();
        let (generation, over) = barriers.arrive(0, 32, None, (1, 31), 96).unwrap();
        assert!(!over && !barriers.is_over(0, generation));
        assert!(!barriers.arrive(0, 32, None, (2, 30), 96).unwrap().1);
        assert_eq!(barriers.threads_exited(64), 1);
        assert!(barriers.is_over(0, generation));
        assert_eq!(barriers.predicates(0, generation), (3, 61));
    }

    #[test]
    fn a_cluster_does_not_wait_for_those_that_arrived_and_left() {
        let mut barrier = ClusterBarrier::default();
        assert_eq!(barrier.arrive(64, 128), 0);
        // 62 of the 64 arrived threads exit: 2 of the 66 live threads have arrived.
        assert!(!barrier.exit(62, 66));
        assert_eq!((barrier.arrived(), barrier.generation), (2, 0));
        assert_eq!(barrier.arrive(63, 66), 0);
        assert_eq!(barrier.generation, 0);
        // The last thread exits without arriving.
        assert!(barrier.exit(0, 65));
        assert_eq!((barrier.arrived(), barrier.generation), (0, 1));
    }

    #[test]
    fn a_barrier_of_some() {
        let mut barriers = CtaBarriers::default();
        assert!(!barriers.arrive(3, 32, Some(64), (0, 0), 256).unwrap().1);
        let rule = |result: Result<_, Fault>| result.map(|_: (u64, bool)| ()).unwrap_err().rule;
        assert_eq!(rule(barriers.arrive(3, 32, None, (0, 0), 256)), "barrier-thread-count-differs");
        assert_eq!(rule(barriers.arrive(3, 64, Some(64), (0, 0), 256)), "barrier-too-many-threads");
        assert_eq!(rule(barriers.arrive(16, 32, None, (0, 0), 256)), "barrier-name-out-of-range");
        assert_eq!(rule(barriers.arrive(4, 32, Some(33), (0, 0), 256)), "barrier-thread-count");
    }
}
