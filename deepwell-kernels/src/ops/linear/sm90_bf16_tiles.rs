//! Shared by the callers of `sm90_bf16_gemm.cu`: tiles, split-K, predicted times, and launches.

use deepwell_ir::{DType, GemmKind, Target, Tile};

use crate::KernelError;
use crate::ops::scaled_gemm::sm90_mxfp8_gemm::{SHARED_BESIDE_STAGES, SHARED_LIMIT, THREADS};
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr, Launch, TensorMap};
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::launch::tcgen05::GemmSizes;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::TileSelection;
use crate::runtime::predict::Rates;

/// Elements along K of a stage, as in the source.
pub(crate) const STAGE_K: usize = 64;
/// Rows of a box of a K-major operand, as in the source.
pub(crate) const BOX_ROWS: usize = 128;

/// Bytes per cycle that an SM reads from shared memory, or writes to it.
const SHARED_BYTES_PER_CYCLE: usize = 128;
/// Bytes per cycle and requesting SM from the L2 cache: assumed, as for MXFP8.
const L2_BYTES_PER_CYCLE: usize = 64;
/// FLOP per cycle of an SM's tensor cores.
const FLOP_PER_CYCLE: usize = 4096;
/// Cycles for storing 64 rows of 128 results: assumed, as for MXFP8.
const RESULT_CYCLES: usize = 500;
/// Cycles of the model per second: 1.19e9 to 1.34e9 on an H200 under load, where the tensor cores
/// are idle for some of the time that the model counts as busy
/// (`benchmarks/sm90_gemms_2026-11-24.md`).
const CYCLES_PER_S: f64 = 1.28e9;

/// Largest number of split-K parts, and least number of stages per part: a CTA's prologue takes as
/// long as a few stages.
const PARTS_MAX: usize = 16;
const PART_STAGES_MIN: usize = 8;
/// Threads of a CTA that sums split-K parts, and elements per thread and step.
const SUM_THREADS: u32 = 256;
const SUM_ELEMENTS: usize = 4;

/// A tile, and the cluster of CTAs with one tile each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    /// Waves of 64 rows per consumer, for two consumers.
    waves: usize,
    columns: usize,
    /// CTAs stacked along M, which share columns of `b`.
    down: usize,
}

/// In order of preference, for equal predictions.
const SHAPES: [TileShape; 4] = [
    TileShape { waves: 1, columns: 256, down: 1 },
    TileShape { waves: 1, columns: 256, down: 2 },
    TileShape { waves: 2, columns: 128, down: 1 },
    TileShape { waves: 1, columns: 128, down: 1 },
];

impl TileShape {
    fn rows(self) -> usize {
        self.waves * 128
    }

    fn tile(self) -> Tile {
        let tile = Tile::new(self.rows(), self.columns, STAGE_K);
        Tile { cluster: [self.down, 1], ..tile }
    }

    /// Name in kernels' names.
    fn name(self) -> String {
        let tile = format!("{}x{}", self.rows(), self.columns);
        if self.down == 1 { tile } else { format!("{tile}_{}x1", self.down) }
    }

    fn stage_bytes(self) -> usize {
        (self.rows() + self.columns) * STAGE_K * 2
    }

    /// Dynamic shared memory, with as many stages as fit.
    fn shared_bytes(self) -> u32 {
        let stages = (SHARED_LIMIT - SHARED_BESIDE_STAGES) / self.stage_bytes();
        (SHARED_BESIDE_STAGES + stages * self.stage_bytes()) as u32
    }

    fn clusters(self, sizes: GemmSizes) -> usize {
        sizes.m.div_ceil(self.down * self.rows()) * sizes.n.div_ceil(self.columns)
    }

    /// Clusters that run concurrently.
    fn clusters_at_once(self, sms: usize) -> usize {
        (sms / self.down).max(1)
    }

    /// Modeled cycles of a GEMM: a stage takes the slowest of tensor cores, shared memory and the
    /// L2 cache; tiles are sequential, including their stores.
    fn cycles(self, sizes: GemmSizes, parts: usize, sms: usize) -> usize {
        // Each wgmma has 64 rows and reads both operands.
        let read_bytes = 2 * self.waves * (64 + self.columns) * STAGE_K * 2;
        let copied_bytes = (self.rows() + self.columns / self.down) * STAGE_K * 2;
        let stage_cycles = (2 * self.rows() * self.columns * STAGE_K / FLOP_PER_CYCLE)
            .max((read_bytes + self.stage_bytes()) / SHARED_BYTES_PER_CYCLE)
            .max(copied_bytes / L2_BYTES_PER_CYCLE);
        let results = self.waves * self.columns / 128 * RESULT_CYCLES;
        let tile_cycles = part_stages(sizes.k, parts) * stage_cycles + results;
        (self.clusters(sizes) * parts).div_ceil(self.clusters_at_once(sms)) * tile_cycles
    }

    /// Predicted seconds of a GEMM, including the sum of its split-K parts.
    fn predicted_s(self, sizes: GemmSizes, parts: usize, target: &Target) -> f64 {
        let rates = Rates::of(target);
        let gemm_s = self.cycles(sizes, parts, target.workers.max(1)) as f64 / CYCLES_PER_S;
        let sum_s = match parts {
            1 => 0.0,
            // Each part is read once; the result is written, and also read when accumulating.
            _ => rates.bytes_s((parts_bytes(sizes, parts + 2)) as f64) + rates.launch_s(),
        };
        gemm_s + rates.launch_s() + sum_s
    }
}

/// Stages of every part except the last.
fn part_stages(k: usize, parts: usize) -> usize {
    k.div_ceil(STAGE_K).div_ceil(parts)
}

/// Bytes of the partial sums of split-K.
fn parts_bytes(sizes: GemmSizes, parts: usize) -> usize {
    parts * sizes.m * sizes.n * size_of::<f32>()
}

/// Numbers of split-K parts for which no part is empty.
fn counts(k: usize) -> impl Iterator<Item = usize> {
    let stages = k.div_ceil(STAGE_K);
    (1..=PARTS_MAX).filter(move |&parts| {
        let of_part = stages.div_ceil(parts);
        parts == 1 || (of_part >= PART_STAGES_MIN && stages.div_ceil(of_part) == parts)
    })
}

/// Ranks the tiles for these sizes, best first, each with its best number of parts.
fn ranked(sizes: GemmSizes, target: &Target) -> Vec<(f64, TileShape, usize)> {
    let best = |shape: TileShape| {
        let of = |parts| (shape.predicted_s(sizes, parts, target), shape, parts);
        // For equal predictions the smaller number of parts wins; one part is always possible.
        counts(sizes.k).map(of).reduce(|a, b| if b.0 < a.0 { b } else { a })
    };
    let mut all: Vec<_> = SHAPES.into_iter().filter_map(best).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// Selects a tile.
pub(crate) fn select_tile(sizes: GemmSizes, target: &Target) -> TileSelection {
    let ranked = ranked(sizes, target);
    let [(least_s, chosen, _), others @ ..] = ranked.as_slice() else {
        return TileSelection { tile: SHAPES[0].tile(), rejected: Vec::new() };
    };
    let name = chosen.tile();
    let reason = |predicted_s: f64| match predicted_s > *least_s {
        true => format!(
            "predicted {:.4} us by a model, {name} {:.4} us",
            predicted_s * 1e6,
            least_s * 1e6
        ),
        false => format!("is as good as {name} by a model"),
    };
    let rejected =
        others.iter().map(|&(predicted_s, shape, _)| (shape.tile(), reason(predicted_s)));
    TileSelection { tile: name, rejected: rejected.collect() }
}

/// Predicted seconds with the selected tile.
pub(crate) fn predicted_s(sizes: GemmSizes, target: &Target) -> f64 {
    ranked(sizes, target).first().map_or(f64::INFINITY, |&(predicted_s, _, _)| predicted_s)
}

/// Workspace of the split-K parts for the selected tile; zero for a single part.
pub(crate) fn workspace_bytes(sizes: GemmSizes, target: &Target) -> usize {
    match ranked(sizes, target).first() {
        Some(&(_, _, parts)) if parts > 1 => parts_bytes(sizes, parts),
        _ => 0,
    }
}

/// Number of split-K parts in a planned workspace.
fn parts_of(sizes: GemmSizes, workspace_bytes: usize) -> usize {
    (workspace_bytes / parts_bytes(sizes, 1).max(1)).clamp(1, PARTS_MAX)
}

/// Arguments of a GEMM on this kernel.
#[derive(Clone, Debug)]
pub(crate) struct Gemm {
    pub(crate) kind: GemmKind,
    pub(crate) sizes: GemmSizes,
    pub(crate) maps: [TensorMap; 2],
    /// Scales of both tensors, FP32 factors of the sums; null for operands without.
    pub(crate) tensor_scales: [DevicePtr; 2],
    /// `[n]`, of the result's dtype, or null.
    pub(crate) bias: DevicePtr,
    pub(crate) out: DeviceTensor,
    pub(crate) accumulate: bool,
    /// Workspace of split-K parts, 16-byte aligned, and its length.
    pub(crate) workspace: (DevicePtr, usize),
}

impl Gemm {
    /// One launch, and a second launch if split-K parts must be summed.
    ///
    /// # Errors
    /// For a tile that the kernel does not support, or a kernel that was not compiled.
    pub(crate) fn steps(
        self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
    ) -> Result<Vec<Step>, KernelError> {
        let tile = call.call.choice.tile;
        let Some(shape) = SHAPES.into_iter().find(|shape| Some(shape.tile()) == tile) else {
            let tiles = SHAPES.map(|shape| shape.tile().to_string()).join(", ");
            let got = tile.map_or("none".to_string(), |tile| tile.to_string());
            return Err(call.refuse(format!("takes a tile of {tiles}, not {got}; plan again")));
        };
        let sizes = self.sizes;
        let parts = parts_of(sizes, self.workspace.1);
        let has_parts = parts > 1;
        let is_bf16 = self.out.dtype == DType::Bf16;
        // Sums of a weight gradient are always in FP32.
        let of_kind = match (self.kind, is_bf16 && !has_parts) {
            (GemmKind::Fprop, true) => "linear",
            (GemmKind::Fprop, false) => "linear_f32",
            (GemmKind::Dgrad, true) => "dgrad",
            (GemmKind::Dgrad, false) => "dgrad_f32",
            (GemmKind::Wgrad, _) => "wgrad",
        };
        let name = format!("sm90_bf16_gemm_{of_kind}_{}", shape.name());
        let function = device.function("sm90_bf16_gemm", &name, shape.shared_bytes())?;
        let [a_map, b_map] = self.maps;
        let (bias, out) = match has_parts {
            true => (DevicePtr(0), self.workspace.0),
            false => (self.bias, self.out.pointer),
        };
        let arguments = vec![
            Argument::TensorMap(a_map),
            Argument::TensorMap(b_map),
            Argument::Pointer(bias),
            Argument::Pointer(out),
            Argument::I32(sizes.m as i32),
            Argument::I32(sizes.n as i32),
            Argument::I32(sizes.k as i32),
            Argument::U32((self.accumulate && !has_parts).into()),
            Argument::I32(parts as i32),
            Argument::I32(part_stages(sizes.k, parts) as i32),
            Argument::Pointer(self.tensor_scales[0]),
            Argument::Pointer(self.tensor_scales[1]),
        ];
        let at_once = shape.clusters_at_once(device.sm_count() as usize);
        let ctas = (shape.clusters(sizes) * parts).min(at_once) * shape.down;
        let mut steps = vec![Step::Launch(Launch {
            function,
            grid: [ctas as u32, 1, 1],
            block: [THREADS, 1, 1],
            cluster: [shape.down as u32, 1, 1],
            shared_bytes: shape.shared_bytes(),
            programmatic: false,
            arguments,
        })];
        if has_parts {
            steps.push(self.sum(parts, is_bf16, device)?);
        }
        Ok(steps)
    }

    /// Launches the sum of split-K parts.
    fn sum(
        &self,
        parts: usize,
        is_bf16: bool,
        device: &mut Device<'_>,
    ) -> Result<Step, KernelError> {
        let name = if is_bf16 { "sum_parts_bf16" } else { "sum_parts_f32" };
        let function = device.function("sum_parts", name, 0)?;
        let elements = self.sizes.m * self.sizes.n;
        let arguments = vec![
            Argument::Pointer(self.workspace.0),
            Argument::Pointer(self.bias),
            Argument::Pointer(self.out.pointer),
            Argument::U64(elements as u64),
            Argument::I32(self.sizes.n as i32),
            Argument::I32(parts as i32),
            Argument::U32(self.accumulate.into()),
        ];
        let threads = elements.div_ceil(SUM_ELEMENTS);
        let ctas = grid_of(threads, SUM_THREADS, device.sm_count());
        Ok(Device::launch(function, ctas, SUM_THREADS, 0, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::architecture::Architecture;
    use crate::runtime::cuda::architecture::cuda_target;

    fn h200() -> Target {
        cuda_target(Architecture::Sm90a, 132, &[])
    }

    #[test]
    fn stages_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_bf16_gemm.cu");
        for (shape, name, stages) in [
            (SHAPES[0], "128x256", 4),
            (SHAPES[1], "128x256_2x1", 4),
            (SHAPES[2], "256x128", 4),
            (SHAPES[3], "128x128", 6),
        ] {
            let TileShape { waves, columns, down } = shape;
            assert_eq!(shape.name(), name);
            let bytes = SHARED_BESIDE_STAGES + stages * shape.stage_bytes();
            assert_eq!(shape.shared_bytes() as usize, bytes, "{name}");
            let line = format!("GEMMS({name}, {waves}, {columns}, {down})");
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn tiles_and_parts_fill_the_device() {
        for ((m, n, k), expected) in [
            ((16384, 2048, 2048), ("128x256", 1)),
            ((4096, 4096, 4096), ("128x256", 1)),
            // Waves that larger tiles would not fill.
            ((1024, 2048, 2048), ("128x128", 1)),
            // One tile of a short sum.
            ((1, 1, 128), ("128x128", 1)),
            // 16 tiles of long sums.
            ((256, 2048, 16384), ("128x256", 8)),
        ] {
            let sizes = GemmSizes { m, n, k };
            let (_, shape, parts) = ranked(sizes, &h200())[0];
            assert_eq!((shape.name().as_str(), parts), expected, "{m} {n} {k}");
            // The planned workspace determines the number of parts.
            let bytes = workspace_bytes(sizes, &h200());
            assert_eq!(parts_of(sizes, bytes), parts);
            assert_eq!(bytes, if parts == 1 { 0 } else { 4 * parts * m * n });
        }
    }

    #[test]
    fn no_part_is_empty() {
        for k in [8, 64, 1000, 1024, 1088, 4096 + 8, 16384] {
            for parts in counts(k) {
                let stages = k.div_ceil(STAGE_K);
                let each = part_stages(k, parts);
                assert!(each * (parts - 1) < stages && each * parts >= stages, "{k} {parts}");
            }
        }
    }
}
