//! Rates and latencies of an SM. The source of each number stands beside it.
//!
//! Sources: SA = SemiAnalysisAI/microbench-blackwell@9a068d8 (B200, measured). GUIDE = CUDA C++
//! programming guide, table of arithmetic throughput, compute capabilities 9.0 and 10.0. QK =
//! Dao-AILab/quack@c8ec317 (measured). H200 = measured here, benchmarks/cycles_2026-11-29.md.
//! FA4 = arXiv 2603.05451. *Assumed* numbers have no public source.

/// Which bound of an unknown rate or latency holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bound {
    /// The faster.
    Fast,
    /// The slower.
    Slow,
}

/// An SM, in clocks and bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Clocks of one warp instruction in the FMA, ALU and MUFU lanes of an SM's quarter.
    pub fma_clocks: f64,
    /// The same for `f32x2` arithmetic.
    pub fma_pair_clocks: f64,
    /// Integers, comparisons, conversions, logic.
    pub alu_clocks: f64,
    /// `ex2`, `rcp` and other functions.
    pub mufu_clocks: f64,
    /// Which clocks of [`Work::alone`](super::record::Work::alone) count.
    pub bound: Bound,
    /// Bytes that shared memory reads or writes in a clock.
    pub shared_bytes: f64,
    /// Whether copies write through the port that MMAs read through.
    pub copies_share_port: bool,
    /// Bytes that copies bring into an SM in a clock, and take out of it.
    pub copy_bytes: f64,
    /// Clocks from the issue of a copy to its first byte.
    pub copy_latency: f64,
    /// Clocks from an arrival at an mbarrier to the next instruction of a waiter.
    pub wake_latency: f64,
    /// The same for barriers of a CTA or a cluster.
    pub barrier_latency: f64,
    /// Clocks of a wait for an mbarrier phase that is complete.
    pub wait_latency: f64,
    /// Clocks from the end of an MMA to the next instruction of a thread that waits for its
    /// `tcgen05.commit`: one CTA, a pair. For `wgmma`, of `wait_group`.
    pub mma_latency: [f64; 2],
    /// Clocks from the issue of a first MMA to its start in the tensor core.
    pub mma_start: f64,
    /// Clocks of `tcgen05.ld` and `.st` until their wait, beyond the transfer.
    pub tensor_memory_latency: f64,
    /// Bytes that a quarter reads or writes in tensor memory in a clock.
    pub tensor_memory_bytes: f64,
    /// Multiply-adds of 16-bit operands of an SM's tensor cores in a clock. 8-bit operands have
    /// twice the rate, 4-bit operands four times.
    pub multiply_adds: f64,
}

impl Machine {
    /// Returns the machine of a target, such as `sm_100a`.
    pub fn of(target: &str, bound: Bound) -> Option<Machine> {
        let slow = bound == Bound::Slow;
        let range = |fast: f64, slow_value: f64| if slow { slow_value } else { fast };
        let common = Machine {
            fma_clocks: 1.0, // GUIDE: 128 lanes of an SM in a clock, 32 of a quarter
            // GUIDE has no row for `f32x2`: two lanes each, or one wide lane (unknown).
            fma_pair_clocks: range(1.0, 2.0),
            alu_clocks: 2.0,  // GUIDE: 64 lanes of an SM in a clock
            mufu_clocks: 8.0, // GUIDE, FA4: 16 lanes of an SM in a clock
            bound,
            shared_bytes: 128.0, // QK, SA
            // Unknown: the sum of reads and writes is 128 bytes, or each.
            copies_share_port: slow,
            // An H200's (below), assumed; SA: 16 KiB more of one copy take 352 clocks.
            copy_bytes: range(90.0, 46.0),
            // An H200's from the L2 cache, assumed; SA: 900 for 512 bytes to a thread that waits.
            copy_latency: range(180.0, 750.0),
            // No public figure: an H200's (below), and half of it.
            wake_latency: range(70.0, 150.0),
            barrier_latency: range(23.0, 46.0),
            wait_latency: range(21.0, 42.0),
            mma_latency: range_of(slow, [104.0, 130.0], [136.0, 170.0]), // SA
            mma_start: 12.0,                                             // SA
            tensor_memory_latency: range(20.0, 60.0),                    // no public figure
            // 32 lanes of 4 bytes; arXiv 2512.02189 has twice as much for reads (contested).
            tensor_memory_bytes: range(256.0, 128.0),
            multiply_adds: 4096.0, // NVIDIA: 2250 TFLOP/s over 148 SMs at 1.855 GHz; SA
        };
        match target.trim_end_matches('a').trim_end_matches('f') {
            "sm_100" => Some(common),
            // FA4: MUFU doubled.
            "sm_103" => Some(Machine { mufu_clocks: 4.0, ..common }),
            "sm_90" => Some(Machine {
                // NVIDIA: 989 TFLOP/s over 132 SMs at 1.83 GHz.
                multiply_adds: 2048.0,
                // H200: one `wgmma` of 64 x 128 x 16 takes 119 clocks to its wait, each more 64.
                mma_latency: [54.0, 54.0],
                // H200, copies of 16 KiB from the L2 cache, all SMs: the same bytes at a time for
                // 33 SMs, other bytes for each.
                copy_bytes: range(90.0, 37.0),
                // H200: 332 clocks for 512 bytes to a thread that waits, from the L2 cache; from
                // device memory: as on a B200.
                copy_latency: range(180.0, 750.0),
                // H200, two warps by turns: 142 with `test_wait`, 150 with `try_wait`.
                wake_latency: range(142.0, 150.0),
                // H200: `bar.sync` of two warps, and `bar.arrive` to `bar.sync`.
                barrier_latency: range(39.0, 46.0),
                wait_latency: 42.0, // H200
                ..common
            }),
            _ => None,
        }
    }

    /// Clocks between two `tcgen05.mma`s of this shape: multiplication, or the operands from
    /// shared memory of each CTA (SA's measurements are a test).
    pub fn mma_clocks(&self, mma: &crate::observe::TensorMma) -> f64 {
        let [a, b] = operand_bytes(mma);
        self.multiply_clocks(mma).max((a + b) / self.shared_bytes)
    }

    /// Clocks of the multiplication alone: 128 rows of a CTA at the peak rate, and fewer rows as
    /// long, except 64 rows of each CTA of a pair.
    pub fn multiply_clocks(&self, mma: &crate::observe::TensorMma) -> f64 {
        let halves = if mma.group == 2 && mma.m == 128 { 2.0 } else { 1.0 };
        f64::from(mma.n) * 128.0 * 16.0 / self.multiply_adds / halves
    }
}

fn range_of(slow: bool, fast: [f64; 2], slow_values: [f64; 2]) -> [f64; 2] {
    if slow { slow_values } else { fast }
}

/// Bytes of A and B that each CTA of an MMA reads from shared memory; 32 bytes are one K step.
pub(super) fn operand_bytes(mma: &crate::observe::TensorMma) -> [f64; 2] {
    let of_cta = |rows: u32| f64::from(rows / mma.group) * 32.0;
    [if mma.a_in_shared { of_cta(mma.m) } else { 0.0 }, of_cta(mma.n)]
}
