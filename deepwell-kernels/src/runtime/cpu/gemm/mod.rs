//! The GEMM `op(A)[m, k] * op(B)[k, n]` of F32, BF16 and MX operands with FP32 accumulation.
//!
//! # Overview
//!
//! Both operands are matrices `[outer, k]` with two strides ([`Operand`]), so that one function
//! computes all three GEMMs of a linear layer: fprop (`x w^T`: both contiguous along `k`), dgrad
//! (`dy w`: B contiguous along `n`) and wgrad (`dy^T x`: both contiguous along the outer
//! dimension). The result is row-major `[m, n]` ([`Output`]).
//!
//! The arithmetic has four [`Tier`]s. [`Tier::AmxBf16`], [`Tier::Avx512Bf16`] and [`Tier::Avx512`]
//! pack the operands into BF16 panels and multiply them with a 32 x 32 kernel that sums in FP32;
//! MX operands are decoded, exactly, during packing. [`Tier::Avx512`] also widens BF16 to FP32:
//! A during packing, B in registers. [`Tier::F32`] converts to `f32` and calls the `gemm-f32`
//! crate. An F32 operand always takes the F32 tier, so inputs are never rounded.
//!
//! ```
//! use deepwell_kernels::cpu::gemm::{self, Operand, Output};
//! use half::bf16;
//!
//! // y[2, 3] = x[2, 4] * w[3, 4]^T
//! let x: Vec<bf16> = (0..8).map(|i| bf16::from_f32(i as f32)).collect();
//! let w = vec![bf16::ONE; 12];
//! let (a, b) = (Operand::rows_bf16(&x, 4), Operand::rows_bf16(&w, 4));
//!
//! let tier = gemm::best_tier();
//! let mut workspace = vec![0u8; gemm::workspace_bytes(tier, 2, 3, 4, a.kind(), b.kind())];
//! let mut y = vec![0.0; 6];
//! let out = Output::F32 { data: &mut y, accumulate: false };
//! gemm::gemm(tier, 2, 3, 4, a, b, out, &mut workspace)?;
//! assert_eq!(y, [6.0, 6.0, 6.0, 22.0, 22.0, 22.0]);
//! # Ok::<(), gemm::GemmError>(())
//! ```
//!
//! # Numerics
//!
//! Let `u = 2^-24` and `s = sum |a| |b|` of one output element over the exact operand values.
//! Products of two BF16 (or decoded MXFP8) values are exact in FP32, so only the sums round:
//!
//! | tier | order of the sum | error at most |
//! |---|---|---|
//! | AMX | even and odd `k` apart in each 32, then the 32s in order | `(18 + ceil(k/32)) u s` |
//! | AVX-512 | even, then odd `k` of each pair, pairs in order, each product fused | `k u s` |
//! | AVX512-BF16 | odd, then even `k` of each pair, pairs in order | `(k + 1) u s` |
//! | F32 | the `gemm-f32` crate's: fused, blocks of 512 or more in order | `(k + 2) u s` |
//!
//! An accumulating output adds the finished sum to its previous value, with one more rounding (on
//! the F32 tier one per block of 512, or per `k` if `k <= 2`); a BF16 output rounds once more, to
//! nearest even. Work is split over `m` and `n` only, never over `k`, at boundaries that depend on
//! the shape alone, so a result has the same bits at any number of threads.
//!
//! The BF16 instructions of AMX and AVX512-BF16 treat subnormal operands as zero and flush
//! subnormal results: per product an absolute error of at most `2^-126 * max(1, |a|, |b|)`. This is
//! irrelevant to training, but a difference from the other tiers. MXFP8 scales can leave BF16's
//! range, so the scale bytes are checked first: if a decoded value or a product could be subnormal,
//! or a decoded value overflow, the whole GEMM runs on the F32 tier. An E8M0 scale of `0xFF` and an
//! E4M3 code of `0x7F` or `0xFF` are NaN; every output element that includes such a value is NaN.
//!
//! # Memory
//!
//! All packing buffers are in the caller's workspace ([`workspace_bytes`]); the BF16 tiers allocate
//! nothing (rayon's own queues aside). The `gemm-f32` crate allocates scratch on the heap: at most
//! one packed copy of a `[m, kc]` and a `[n, kc]` slice of the operands in `f32`, `4 kc (m + n)`
//! bytes rounded up to whole kernel tiles, freed before the call returns. `kc` fits the crate's
//! tiles to the first-level cache: 512 for 48 KiB. Each thread also keeps one slab of the size of
//! the second-level cache.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16_path;
mod carve;
pub(crate) mod elements;
mod f32_path;
mod operand;
#[cfg(target_arch = "x86_64")]
mod pack;
mod scales;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

pub(crate) use carve::{Carver, carved_bytes};
pub use operand::{DataKind, GemmError, MxPart, Operand, OperandData, Output};

/// Environment variable with the name of the highest tier to use. Results differ between tiers in
/// the order of sums, so runs on two CPUs have equal bits only on the same tier.
pub const TIER_VARIABLE: &str = "DEEPWELL_CPU_TIER";

/// Instructions of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The `gemm-f32` crate on operands converted to `f32`; available on every machine.
    F32,
    /// FP32 fused multiply-add on 512-bit vectors, with BF16 widened to FP32.
    Avx512,
    /// `vdpbf16ps` on 512-bit vectors.
    Avx512Bf16,
    /// `tdpbf16ps` on AMX tiles.
    AmxBf16,
}

impl Tier {
    /// Every tier, from the most to the least widely available.
    pub const ALL: [Tier; 4] = [Tier::F32, Tier::Avx512, Tier::Avx512Bf16, Tier::AmxBf16];

    /// Whether this process can run the tier: the CPU has the instructions and, for AMX, the
    /// kernel grants the tile state (asked for once per process, on the first call). Tiers above
    /// the limit of [`TIER_VARIABLE`] are not available.
    #[must_use]
    pub fn is_available(self) -> bool {
        static LIMIT: OnceLock<Option<Tier>> = OnceLock::new();
        let limit = LIMIT.get_or_init(|| Tier::limit().unwrap_or_default());
        limit.is_none_or(|limit| self <= limit) && self.is_supported()
    }

    /// The highest tier that [`TIER_VARIABLE`] allows; `None` if the variable is unset.
    ///
    /// # Errors
    /// An unknown name, which [`Tier::is_available`] ignores.
    pub fn limit() -> Result<Option<Tier>, GemmError> {
        let set = std::env::var_os(TIER_VARIABLE).filter(|name| !name.is_empty());
        let Some(name) = set else { return Ok(None) };
        let is_named = |tier: &Tier| name == tier.name();
        let unknown = || GemmError::UnknownTier {
            variable: TIER_VARIABLE,
            expected: Tier::ALL.map(Tier::name).join("`, `"),
            got: name.to_string_lossy().into_owned(),
        };
        Tier::ALL.into_iter().find(is_named).ok_or_else(unknown).map(Some)
    }

    /// Whether the CPU and the operating system offer the tier.
    fn is_supported(self) -> bool {
        match self {
            Tier::F32 => true,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 => avx512::is_available(),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Bf16 => avx512::has_bf16(),
            #[cfg(target_arch = "x86_64")]
            Tier::AmxBf16 => avx512::has_bf16() && amx::is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Tier::F32 => "f32",
            Tier::Avx512 => "avx512",
            Tier::Avx512Bf16 => "avx512-bf16",
            Tier::AmxBf16 => "amx-bf16",
        }
    }
}

/// The fastest tier for BF16 that this process can run: AMX, else AVX512-BF16 except on Intel, else
/// AVX-512, else F32.
///
/// Intel's CPUs start a 512-bit `vdpbf16ps` only every other cycle (measured on Sapphire Rapids:
/// 108 GFLOP/s per core at 3.6 GHz, where the F32 tier reaches 160), AMD's one or more per cycle.
#[must_use]
pub fn best_tier() -> Tier {
    static BEST: OnceLock<Tier> = OnceLock::new();
    *BEST.get_or_init(|| {
        if Tier::AmxBf16.is_available() {
            Tier::AmxBf16
        } else if Tier::Avx512Bf16.is_available() && !is_intel() {
            Tier::Avx512Bf16
        } else if Tier::Avx512.is_available() {
            Tier::Avx512
        } else {
            Tier::F32
        }
    })
}

/// Whether the CPU's vendor is Intel.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = core::arch::x86_64::__cpuid(0);
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Outer rows that are packed at a time, which bounds the workspace of very large GEMMs.
const OUTER_BLOCK: usize = 1024;

/// Alignment of the buffers inside the workspace: one cache line, one 512-bit vector.
pub(crate) const ALIGNMENT: usize = 64;

/// Returns the bytes that [`gemm()`] and [`gemm_serial`] need for this GEMM, at any number of
/// threads.
///
/// The tiers with BF16 panels need a BF16 copy of at most 1024 rows of each operand; on AVX-512 the
/// copy of A is `f32`. MX operands may have to fall back, so they need at least as much as on
/// the F32 tier. The F32 tier needs an `f32` copy of at most 1024 rows of each operand that is not
/// F32, and of a block of the output, which may be BF16. (If both operands and the output are F32,
/// an empty workspace suffices.)
#[must_use]
pub fn workspace_bytes(
    tier: Tier,
    m: usize,
    n: usize,
    k: usize,
    a: DataKind,
    b: DataKind,
) -> usize {
    let f32_bytes = f32_path::workspace_bytes(m, n, k, a, b);
    if takes_f32_tier(tier, a, b) {
        return f32_bytes;
    }
    let packed_bytes = |outer: usize| {
        outer.min(OUTER_BLOCK).next_multiple_of(32) * k.next_multiple_of(32) * size_of::<u16>()
    };
    let a_widths = if tier == Tier::Avx512 { 2 } else { 1 };
    let bf16_bytes = a_widths * packed_bytes(m) + packed_bytes(n) + ALIGNMENT;
    if a == DataKind::Mx || b == DataKind::Mx { bf16_bytes.max(f32_bytes) } else { bf16_bytes }
}

/// Writes `op(A)[m, k] * op(B)[k, n]` to `out`, row-major `[m, n]`, on rayon's current pool.
///
/// `b` has shape `[n, k]`, like a weight of `n` output features. Any size may be zero; `k = 0`
/// gives zeros, or leaves an accumulating output unchanged.
///
/// # Errors
///
/// [`GemmError`] if an operand, the output or the workspace is shorter than the sizes require, an
/// MX operand is not contiguous along `k`, or this process cannot run `tier`. In these cases
/// nothing is written.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn gemm(
    tier: Tier,
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'_>,
    b: Operand<'_>,
    out: Output<'_>,
    workspace: &mut [u8],
) -> Result<(), GemmError> {
    run(tier, m, n, k, a, b, out, workspace, Threads::Pool)
}

/// [`gemm()`] on the calling thread only, for GEMMs inside a task: the same bits, workspace and
/// errors.
///
/// # Errors
///
/// As [`gemm()`].
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn gemm_serial(
    tier: Tier,
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'_>,
    b: Operand<'_>,
    out: Output<'_>,
    workspace: &mut [u8],
) -> Result<(), GemmError> {
    run(tier, m, n, k, a, b, out, workspace, Threads::One)
}

/// The threads that run a GEMM.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Threads {
    One,
    Pool,
}

impl Threads {
    /// Runs `task` on every index below `count`, with one `state` per run of indices.
    fn for_each<S>(
        self,
        count: usize,
        state: impl Fn() -> S + Send + Sync,
        task: impl Fn(&mut S, usize) + Send + Sync,
    ) {
        if count == 0 {
            return;
        }
        if self == Threads::One || count == 1 {
            let mut state = state();
            (0..count).for_each(|index| task(&mut state, index));
        } else {
            use rayon::prelude::*;
            (0..count).into_par_iter().for_each_init(state, task);
        }
    }
}

/// GEMMs of at most this many multiplications (about 5 us of AMX) are not worth waking a thread.
const SERIAL_FMAS_MAX: usize = 1 << 21;

#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
fn run(
    tier: Tier,
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'_>,
    b: Operand<'_>,
    mut out: Output<'_>,
    workspace: &mut [u8],
    threads: Threads,
) -> Result<(), GemmError> {
    if !tier.is_available() {
        return Err(GemmError::TierUnavailable { tier: tier.name(), best: best_tier().name() });
    }
    a.validate("A", m, k)?;
    b.validate("B", n, k)?;
    out.validate(m, n)?;
    // With F32 operands and output the F32 tier converts nothing, so no workspace is needed.
    let converts = (a.kind(), b.kind()) != (DataKind::F32, DataKind::F32)
        || matches!(out, Output::Bf16 { .. });
    let needed = if converts { workspace_bytes(tier, m, n, k, a.kind(), b.kind()) } else { 0 };
    if workspace.len() < needed {
        return Err(GemmError::WorkspaceTooSmall { needed, got: workspace.len() });
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        out.add_nothing();
        return Ok(());
    }
    let fmas = m.saturating_mul(n).saturating_mul(k);
    let threads = if fmas <= SERIAL_FMAS_MAX { Threads::One } else { threads };

    #[cfg(target_arch = "x86_64")]
    if !takes_f32_tier(tier, a.kind(), b.kind()) && scales::fit_bf16(&a, m, &b, n, k) {
        bf16_path::run(tier, m, n, k, a, b, &mut out, workspace, threads);
        return Ok(());
    }
    f32_path::run(m, n, k, a, b, &mut out, workspace, threads);
    Ok(())
}

/// Whether the GEMM runs on the F32 tier for any scales.
fn takes_f32_tier(tier: Tier, a: DataKind, b: DataKind) -> bool {
    tier == Tier::F32 || a == DataKind::F32 || b == DataKind::F32
}
