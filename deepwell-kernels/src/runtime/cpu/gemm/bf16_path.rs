//! The tiers with BF16 panels: both operands are packed into panels, then multiplied panel by
//! panel.
//!
//! Data-race freedom: B is packed first, each panel by one task, in a parallel loop that ends
//! before any panel is read. Then each task multiplies one panel of A by a group of panels of B. If
//! there is a single group, the task packs its own panel of A; otherwise A is packed in a parallel
//! loop as B is. Tasks write disjoint 32 x 32 blocks of the output, and every block sums all of `k`
//! itself, so results do not depend on the number of threads.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use half::bf16;

use super::carve::{align, whole_elements};
use super::operand::{Operand, OperandData, Output};
use super::pack::{self, Form};
use super::{OUTER_BLOCK, Threads, Tier, amx, avx512};

/// Arguments of a kernel: 32 rows of A times 32 columns of B over `steps` steps of 32 along `k`.
pub(super) struct Block {
    /// Rows 0-15 of A at the first step: BF16, or FP32 if A is widened.
    pub(super) a_upper: *const u16,
    /// Rows 16-31 of A at the first step.
    pub(super) a_lower: *const u16,
    /// Bytes between rows of A.
    pub(super) a_row_bytes: usize,
    /// Bytes between steps of A.
    pub(super) a_step_bytes: usize,
    /// B's panel.
    pub(super) b: *const u16,
    /// Steps along `k`, at least one.
    pub(super) steps: usize,
    /// Destination of the 32 x 32 results.
    pub(super) c: *mut f32,
    /// Bytes between rows of the results.
    pub(super) c_row_bytes: usize,
}

/// The output, as a pointer to write blocks to.
#[derive(Clone, Copy)]
pub(super) enum Destination {
    F32 { data: *mut f32, accumulate: bool },
    Bf16 { data: *mut bf16 },
}

// SAFETY: tasks write disjoint blocks (see the module's comment).
unsafe impl Send for Destination {}
// SAFETY: as above; the pointer itself is only copied.
unsafe impl Sync for Destination {}

impl Destination {
    fn offset(self, elements: usize) -> Self {
        match self {
            Self::F32 { data, accumulate } => {
                Self::F32 { data: data.wrapping_add(elements), accumulate }
            }
            Self::Bf16 { data } => Self::Bf16 { data: data.wrapping_add(elements) },
        }
    }
}

/// State of one thread during the multiplication.
struct Worker {
    /// Held for its `Drop`.
    _tiles: Option<amx::TileConfig>,
    scratch: Scratch,
}

#[repr(align(64))]
struct Scratch([f32; 1024]);

/// Bytes of B's panels that one task multiplies by each panel of A. The group stays in the
/// second-level cache (1 to 2 MiB on CPUs with these instructions) from one panel of A to the next.
const B_BYTES_PER_TASK: usize = 512 * 1024;

/// Runs the GEMM. `tier` is available and not F32, no operand is F32, all arguments are validated,
/// and no size is zero.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub(super) fn run(
    tier: Tier,
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'_>,
    b: Operand<'_>,
    out: &mut Output<'_>,
    workspace: &mut [u8],
    threads: Threads,
) {
    let destination = match out {
        Output::F32 { data, accumulate } => {
            Destination::F32 { data: data.as_mut_ptr(), accumulate: *accumulate }
        }
        Output::Bf16 { data } => Destination::Bf16 { data: data.as_mut_ptr() },
    };
    let steps = k.div_ceil(32);
    let a_form = if tier == Tier::Avx512 { Form::WideByRow } else { Form::ByRow };
    let a_panel = steps * a_form.step();
    let b_panel = steps * Form::ByPair.step();
    let workspace: &mut [u16] = whole_elements(align(workspace));
    let (a_panels, rest) = workspace.split_at_mut(m.min(OUTER_BLOCK).div_ceil(32) * a_panel);
    let b_panels = &mut rest[..n.min(OUTER_BLOCK).div_ceil(32) * b_panel];
    let shape = Shape { m, n, k, steps };

    let a_panels = Panels::new(a_panels, a_panel, a_form);
    let b_panels = Panels::new(b_panels, b_panel, Form::ByPair);

    for column in (0..n).step_by(OUTER_BLOCK) {
        let columns = (n - column).min(OUTER_BLOCK);
        for row in (0..m).step_by(OUTER_BLOCK) {
            let rows = (m - row).min(OUTER_BLOCK);
            let a = Source { operand: &a, first: row, count: rows, outer: m };
            let b = Source { operand: &b, first: column, count: columns, outer: n };
            // B stays packed for all row blocks of its column block; A stays packed if all rows fit
            // one block.
            if row == 0 {
                pack_all(&shape, &b, &b_panels, threads);
            }
            let pack_a = column == 0 || m > OUTER_BLOCK;
            multiply(tier, &shape, &a, &a_panels, pack_a, &b, &b_panels, destination, threads);
        }
    }
}

/// A buffer of panels that tasks write and read by index.
struct Panels<'a> {
    data: *mut u16,
    count: usize,
    /// Elements of a panel.
    panel: usize,
    form: Form,
    owner: PhantomData<&'a mut [u16]>,
}

// SAFETY: callers of `pack_at` guarantee one task per panel, and callers of `at` that no task
// writes the panel.
unsafe impl Sync for Panels<'_> {}

impl<'a> Panels<'a> {
    fn new(data: &'a mut [u16], panel: usize, form: Form) -> Self {
        let count = data.len() / panel;
        Self { data: data.as_mut_ptr(), count, panel, form, owner: PhantomData }
    }

    fn at(&self, index: usize) -> *const u16 {
        assert!(index < self.count);
        self.data.wrapping_add(index * self.panel)
    }

    /// Packs panel `index` of the source.
    ///
    /// # Safety
    ///
    /// The CPU has AVX-512, and no other task uses this panel during the call.
    unsafe fn pack_at(&self, index: usize, source: &Source<'_>, k: usize) {
        assert!(index < self.count && index < source.panels());
        // SAFETY: the panel lies inside the buffer and is not in use (the caller's promise); the
        // operand was validated, and has a row at the beginning of each of its panels.
        unsafe {
            let panel = self.data.add(index * self.panel);
            let panel = core::slice::from_raw_parts_mut(panel, self.panel);
            let first = source.first + index * 32;
            pack::pack_panel(source.operand, source.outer, k, first, self.form, panel);
        }
    }
}

struct Shape {
    m: usize,
    n: usize,
    k: usize,
    steps: usize,
}

/// Outer rows `first..first + count` of an operand with `outer` outer rows.
struct Source<'a> {
    operand: &'a Operand<'a>,
    first: usize,
    count: usize,
    outer: usize,
}

impl Source<'_> {
    fn panels(&self) -> usize {
        self.count.div_ceil(32)
    }

    /// Number of leading panels of A that need no packing: BF16 that is contiguous along a `k` of
    /// whole steps already has the layout of A's panels, with another row stride. Only full panels
    /// count, because tiles read all 32 rows.
    fn direct_panels(&self, k: usize) -> usize {
        let contiguous = matches!(self.operand.data, OperandData::Bf16(_))
            && self.operand.k_stride == 1
            && k.is_multiple_of(32);
        if contiguous { self.count / 32 } else { 0 }
    }
}

/// Packs every panel of a source.
fn pack_all(shape: &Shape, source: &Source<'_>, panels: &Panels<'_>, threads: Threads) {
    threads.for_each(
        source.panels(),
        || (),
        // SAFETY: the tier is available, which includes AVX-512; each task has its own index.
        |(), index| unsafe { panels.pack_at(index, source, shape.k) },
    );
}

/// Multiplies every panel of A with every panel of B. Packs A's panels first if `pack_a`.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
fn multiply(
    tier: Tier,
    shape: &Shape,
    a: &Source<'_>,
    a_panels: &Panels<'_>,
    pack_a: bool,
    b: &Source<'_>,
    b_panels: &Panels<'_>,
    destination: Destination,
    threads: Threads,
) {
    let is_wide = a_panels.form == Form::WideByRow;
    let a_direct = if is_wide { 0 } else { a.direct_panels(shape.k) };
    let group = (B_BYTES_PER_TASK / (b_panels.panel * size_of::<u16>())).clamp(1, b.panels());
    let groups = b.panels().div_ceil(group);
    // With one group each panel of A has one task, which packs the panel into its own cache.
    let pack_in_task = pack_a && groups == 1;
    if pack_a && !pack_in_task && a_direct < a.panels() {
        pack_all(shape, a, a_panels, threads);
    }

    let worker = || Worker {
        // SAFETY: the tier is available; a worker lives within one run of indices on one thread,
        // and no other code of this crate runs there in the meantime.
        _tiles: (tier == Tier::AmxBf16).then(|| unsafe { amx::TileConfig::load() }),
        scratch: Scratch([0.0; 1024]),
    };
    threads.for_each(groups * a.panels(), worker, |worker, index| {
        let (group_index, a_index) = (index / a.panels(), index % a.panels());
        let rows = (a.count - a_index * 32).min(32);
        let row = a.first + a_index * 32;
        let (a_upper, a_row_bytes, a_step_bytes) = if a_index < a_direct {
            let OperandData::Bf16(data) = a.operand.data else { unreachable!("direct is BF16") };
            let stride = a.operand.outer_stride;
            (data[row * stride..].as_ptr().cast::<u16>(), stride * size_of::<bf16>(), 64)
        } else {
            if pack_in_task {
                // SAFETY: the tier is available, which includes AVX-512; with one group no other
                // task uses this panel of A.
                unsafe { a_panels.pack_at(a_index, a, shape.k) };
            }
            let step_bytes = a_panels.form.step() * size_of::<u16>();
            (a_panels.at(a_index), step_bytes / 32, step_bytes)
        };
        for b_index in group_index * group..((group_index + 1) * group).min(b.panels()) {
            let columns = (b.count - b_index * 32).min(32);
            let column = b.first + b_index * 32;
            let target = destination.offset(row * shape.n + column);
            let is_full_block = rows == 32 && columns == 32;
            let (c, c_row_bytes, via_scratch) = match target {
                Destination::F32 { data, accumulate: false } if is_full_block => {
                    (data, shape.n * size_of::<f32>(), false)
                }
                _ => (worker.scratch.0.as_mut_ptr(), 32 * size_of::<f32>(), true),
            };
            let block = Block {
                a_upper,
                // In a packed panel, too, the lower half begins 16 rows after the upper half.
                a_lower: a_upper.wrapping_byte_add(16 * a_row_bytes),
                a_row_bytes,
                a_step_bytes,
                b: b_panels.at(b_index),
                steps: shape.steps,
                c,
                c_row_bytes,
            };
            debug_assert!(row + rows <= shape.m && column + columns <= shape.n);
            // SAFETY: the tier is available and, for AMX, the worker holds the configuration.
            // A packed panel holds `steps` steps of two tiles; a direct one has 32 rows of
            // `32 steps` validated elements. The block is inside the output, or in the scratch,
            // and belongs to this task.
            unsafe {
                match tier {
                    Tier::AmxBf16 => amx::multiply_block(&block),
                    Tier::Avx512Bf16 => avx512::multiply_block(&block),
                    _ => avx512::multiply_wide_block(&block),
                }
                if via_scratch {
                    let region = avx512::BlockRegion { block: &worker.scratch.0, rows, columns };
                    match tier {
                        Tier::Avx512 => avx512::store_rounded(region, target, shape.n),
                        _ => avx512::store_block(region, target, shape.n),
                    }
                }
            }
        }
    });
}
