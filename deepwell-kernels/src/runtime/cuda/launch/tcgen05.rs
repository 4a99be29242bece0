//! Shared by launchers of GEMMs on tcgen05 (`mma/sm100_tile.cuh`): tile shapes, their memory,
//! selection of the tile, and the launch.

use deepwell_ir::{KernelRequest, Target, Tile};

use super::tcgen05_cost::{Cost, ResultCost};
use super::tensor_maps::{Operands, SCALE_TILE_BYTES, STAGE_ROW_BYTES};
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, Function, Launch};
use crate::runtime::cuda::prepare::{CallView, Step};
use crate::runtime::cuda::spec::TileSelection;
use crate::runtime::predict::Rates;

/// Threads per CTA, as in the source.
const THREADS: u32 = 256;
/// Rows of a result computed by a CTA, as in the source.
pub(crate) const CTA_ROWS: usize = 128;
/// Shared memory of a CTA, and the part not used for stages: alignment of the stages, staging of
/// results, mbarriers.
const SHARED_LIMIT: usize = 227 << 10;
const SHARED_BESIDE_STAGES: usize = 1024 + 4 * 32 * 128 + 256;

/// A 1-CTA or 2-CTA tile, and the cluster of tiles with shared operand rows. Each CTA of a pair has
/// half of the rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    pub(crate) operands: Operands,
    pub(crate) ctas: usize,
    pub(crate) columns: usize,
    /// Tiles of the cluster down and across. Tiles above each other share rows of `b`, tiles side
    /// by side share rows of `a`.
    pub(crate) cluster: [usize; 2],
}

/// SMs of a group (GPC); a cluster stays within a group. Assumed, as in a full group of Hopper.
/// Clusters of four leave two of 18 SMs idle.
const GROUP: usize = 18;

/// Tiles in clusters of a single tile: CTAs, columns.
const ALONE: [(usize, usize); 4] = [(2, 256), (2, 128), (1, 256), (1, 128)];
/// Tiles of clusters of two CTA pairs: columns, and the cluster. Each pair copies half of the
/// shared rows, rows of `a` where `a` is the larger operand. Clusters of two 1-CTA tiles are left
/// out: they would read as much as a CTA pair, which has room for more stages.
const SHARING: [(usize, [usize; 2]); 2] = [(256, [2, 1]), (128, [1, 2])];

/// The sizes of a GEMM: out[m, n] = a[m, k] · b[n, k]ᵀ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmSizes {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl TileShape {
    /// Shapes that every source has, preferred shapes first among equals.
    pub(crate) fn alone(operands: Operands) -> Vec<TileShape> {
        let shape = |(ctas, columns)| TileShape { operands, ctas, columns, cluster: [1, 1] };
        ALONE.map(shape).to_vec()
    }

    /// All shapes, including clusters that share operands.
    pub(crate) fn all(operands: Operands) -> Vec<TileShape> {
        let shape = |(columns, cluster)| TileShape { operands, ctas: 2, columns, cluster };
        let mut all = TileShape::alone(operands);
        all.extend(SHARING.map(shape));
        all
    }

    /// Rows of a tile.
    pub(crate) fn rows(self) -> usize {
        self.ctas * CTA_ROWS
    }

    /// Rows and columns of the tiles of a cluster.
    pub(crate) fn cluster_extents(self) -> [usize; 2] {
        let [down, across] = self.cluster;
        [self.rows() * down, self.columns * across]
    }

    /// CTAs per cluster.
    pub(crate) fn cluster_ctas(self) -> usize {
        self.cluster.iter().product::<usize>() * self.ctas
    }

    /// Number of clusters that run concurrently.
    pub(crate) fn clusters_at_once(self, sm_count: usize) -> usize {
        let ctas = self.cluster_ctas();
        let in_groups = sm_count / GROUP * (GROUP / ctas);
        (in_groups + sm_count % GROUP / ctas).max(1)
    }

    /// Rows of `b` that the MMAs of a CTA read.
    fn b_rows(self) -> usize {
        self.columns / self.ctas
    }

    /// Rows of `a` and of `b` that a CTA copies, including multicast.
    pub(crate) fn copied_rows(self) -> [usize; 2] {
        let [down, across] = self.cluster;
        [CTA_ROWS / across, self.b_rows() / down]
    }

    /// The shape in the spelling of kernel names.
    pub(crate) fn name(self) -> String {
        let tile = format!("{}x{}", self.rows(), self.columns);
        match self.cluster {
            [1, 1] => tile,
            [down, across] => format!("{tile}_{down}x{across}"),
        }
    }

    /// Bytes of operands per stage of a CTA.
    fn operand_bytes(self) -> usize {
        (CTA_ROWS + self.b_rows()) * STAGE_ROW_BYTES
    }

    /// Bytes of scales per stage of a CTA.
    fn scale_bytes(self) -> usize {
        self.operands.scale_tiles(self.columns) * SCALE_TILE_BYTES
    }

    /// Bytes of operands and scales per stage of a CTA.
    pub(crate) fn stage_bytes(self) -> usize {
        self.operand_bytes() + self.scale_bytes()
    }

    /// Bytes per stage that the CTA copies itself.
    pub(crate) fn copied_bytes(self) -> usize {
        self.copied_rows().iter().sum::<usize>() * STAGE_ROW_BYTES + self.scale_bytes()
    }

    /// Dynamic shared memory, with as many stages as fit.
    pub(crate) fn shared_bytes(self) -> u32 {
        let stage = self.stage_bytes();
        let stages = (SHARED_LIMIT - SHARED_BESIDE_STAGES) / stage;
        (SHARED_BESIDE_STAGES + stages * stage) as u32
    }

    /// Bytes of `elements` of a row, in whole bytes.
    pub(crate) fn row_bytes(self, elements: usize) -> usize {
        elements * STAGE_ROW_BYTES / self.operands.stage_k()
    }

    /// Elements of K per stage.
    pub(crate) fn stage_k(self) -> usize {
        self.operands.stage_k()
    }

    /// Clusters that cover a result; tiles of the last clusters may be outside of the result.
    pub(crate) fn clusters(self, sizes: GemmSizes) -> usize {
        let [rows, columns] = self.cluster_extents();
        sizes.m.div_ceil(rows) * sizes.n.div_ceil(columns)
    }

    /// The tile as in plans.
    pub(crate) fn tile(self) -> Tile {
        let (m, n, k) = (self.rows(), self.columns, self.operands.stage_k());
        Tile { m, n, k, cluster: self.cluster }
    }

    /// Selects the shape with the fewest cycles, and among equals the least computation beyond the
    /// edges; returns reasons against the other shapes.
    pub(crate) fn select(
        shapes: Vec<TileShape>,
        sizes: GemmSizes,
        results: ResultCost,
        target: &Target,
    ) -> TileSelection {
        TileShape::select_by(shapes, |_| sizes, results, target)
    }

    /// [`TileShape::select`] for GEMMs whose sizes depend on the tile.
    pub(crate) fn select_by(
        shapes: Vec<TileShape>,
        sizes: impl Fn(TileShape) -> GemmSizes,
        results: ResultCost,
        target: &Target,
    ) -> TileSelection {
        let sm_count = target.workers as u64;
        let rank = |shape: TileShape| {
            let sizes = sizes(shape);
            let computed =
                shape.clusters(sizes) * shape.cluster_extents().iter().product::<usize>();
            (Cost::new(shape, sizes, results, sm_count).cycles, computed, shape)
        };
        let mut ranked: Vec<_> = shapes.into_iter().map(rank).collect();
        ranked.sort_by_key(|&(cycles, computed, _)| (cycles, computed));
        let (fewest, least, chosen) = ranked.remove(0);
        let name = chosen.tile();
        let reason = |cycles: u64, computed: usize| match (cycles > fewest, computed > least) {
            (true, _) => {
                format!("takes {cycles} cycles by a model, {name} takes {fewest}")
            }
            (_, true) => format!("computes {computed} results, {name} computes {least}"),
            _ => format!("is as good as {name} by a model"),
        };
        TileSelection {
            tile: chosen.tile(),
            rejected: ranked
                .into_iter()
                .map(|(cycles, computed, shape)| (shape.tile(), reason(cycles, computed)))
                .collect(),
        }
    }

    /// Predicted seconds of `request` with the shape that [`TileShape::select`] selects; at least
    /// the roofline time.
    pub(crate) fn predicted_s(
        shapes: Vec<TileShape>,
        sizes: GemmSizes,
        results: ResultCost,
        request: &KernelRequest<'_>,
        target: &Target,
    ) -> f64 {
        TileShape::predicted_by(shapes, |_| sizes, results, request, target)
    }

    /// [`TileShape::predicted_s`] for [`TileShape::select_by`].
    pub(crate) fn predicted_by(
        shapes: Vec<TileShape>,
        sizes: impl Fn(TileShape) -> GemmSizes,
        results: ResultCost,
        request: &KernelRequest<'_>,
        target: &Target,
    ) -> f64 {
        let tile = TileShape::select_by(shapes.clone(), &sizes, results, target).tile;
        let costs = shapes.into_iter().filter(|shape| shape.tile() == tile);
        let rates = Rates::of(target);
        let seconds = costs
            .map(|shape| {
                Cost::new(shape, sizes(shape), results, target.workers as u64).predicted_s()
            })
            .fold(0.0, f64::max);
        rates.roofline_s(request, 1.0).max(seconds + rates.launch_s())
    }

    /// The shape with the tile of a planned call.
    ///
    /// # Errors
    /// A plan without a tile, or with a tile that the kernels do not have.
    pub(crate) fn of_call(
        call: &CallView<'_>,
        shapes: &[TileShape],
    ) -> Result<TileShape, KernelError> {
        let tile = call.call.choice.tile;
        let found = shapes.iter().find(|shape| Some(shape.tile()) == tile);
        found.copied().ok_or_else(|| {
            let with_k = |tile: Tile| format!("{tile} with {} along K", tile.k);
            let known: Vec<_> = shapes.iter().map(|shape| with_k(shape.tile())).collect();
            let known = known.join(", ");
            let got = tile.map_or("none".to_string(), with_k);
            call.refuse(format!("takes a tile of {known}, not {got}; make the plan again"))
        })
    }

    /// Number of CTAs of the grid.
    fn grid(self, clusters: usize, sm_count: u32) -> u32 {
        let at_once = self.clusters_at_once(sm_count as usize);
        (clusters.min(at_once) * self.cluster_ctas()) as u32
    }

    /// Builds the launch of a kernel of this shape.
    pub(crate) fn launch(
        self,
        function: Function,
        sizes: GemmSizes,
        sm_count: u32,
        arguments: Vec<Argument>,
    ) -> Step {
        self.launch_clusters(function, self.clusters(sizes), sm_count, arguments)
    }

    /// Builds the launch for `clusters` clusters of tiles, which may be an upper bound.
    pub(crate) fn launch_clusters(
        self,
        function: Function,
        clusters: usize,
        sm_count: u32,
        arguments: Vec<Argument>,
    ) -> Step {
        Step::Launch(Launch {
            function,
            grid: [self.grid(clusters, sm_count), 1, 1],
            block: [THREADS, 1, 1],
            cluster: [self.cluster_ctas() as u32, 1, 1],
            shared_bytes: self.shared_bytes(),
            programmatic: false,
            arguments,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::architecture::{Architecture, cuda_target};

    const B200: usize = 148;

    fn sizes((m, n, k): (usize, usize, usize)) -> GemmSizes {
        GemmSizes { m, n, k }
    }

    #[test]
    fn shapes_fill_the_device() {
        let bf16 = TileShape::all(Operands::Bf16);
        let mx = TileShape::all(Operands::Mx);
        for (shapes, gemm, expected) in [
            // A single tile: the smallest if K is short; in a pair each CTA reads half of b.
            (&mx, (1, 1, 16), "128x128"),
            (&bf16, (1, 1, 16), "128x128"),
            // Of two pairs each reads half of a for both, though the second has nothing to compute.
            (&mx, (128, 128, 4096), "256x128 in clusters of 1x2"),
            // Many waves: the largest tile needs the least L2 bandwidth.
            (&mx, (16384, 16384, 4096), "256x256"),
            (&bf16, (16384, 16384, 4096), "256x256"),
            // Partial waves: smaller tiles waste less if the L2 bandwidth suffices.
            (&bf16, (4096, 4096, 4096), "256x128 in clusters of 1x2"),
            // 148 tiles of 128 rows, without neighbours to share operands.
            (&mx, (128 * 148, 128, 8192), "256x128"),
            (&bf16, (128 * 148, 128, 8192), "256x128"),
        ] {
            let target = cuda_target(Architecture::Sm100a, B200, &[]);
            let plain = ResultCost::default();
            let selection = TileShape::select(shapes.clone(), sizes(gemm), plain, &target);
            assert_eq!(selection.tile.to_string(), expected, "{gemm:?}");
            assert_eq!(selection.rejected.len(), shapes.len() - 1);
        }
    }

    #[test]
    fn other_shapes_are_rejected_with_the_reason() {
        let target = cuda_target(Architecture::Sm100a, 4, &[]);
        let plain = ResultCost::default();
        let shapes = TileShape::all(Operands::Bf16);
        let selection = TileShape::select(shapes, sizes((100, 200, 64)), plain, &target);
        let reasons: Vec<_> =
            selection.rejected.iter().map(|(tile, reason)| format!("{tile} {reason}")).collect();
        assert_eq!(
            reasons,
            [
                "256x128 computes 65536 results, 128x128 computes 32768",
                "256x128 in clusters of 1x2 computes 65536 results, 128x128 computes 32768",
                "128x256 takes 4096 cycles by a model, 128x128 takes 2048",
                "256x256 takes 4096 cycles by a model, 128x128 takes 2048",
                "256x256 in clusters of 2x1 takes 4096 cycles by a model, 128x128 takes 2048",
            ]
        );
    }

    #[test]
    fn stages_fit_and_grids_cover() {
        let (bf16, mx, nvfp4) = (Operands::Bf16, Operands::Mx, Operands::Nvfp4);
        for (operands, index, shared_bytes, name, grid) in [
            (mx, 0, 223_488, "256x256", 4),
            (mx, 1, 222_464, "256x128", 4),
            (mx, 2, 220_416, "128x256", 4),
            (mx, 3, 220_416, "128x128", 4),
            (nvfp4, 0, 212_224, "256x256", 4),
            (nvfp4, 1, 218_368, "256x128", 4),
            (nvfp4, 2, 183_552, "128x256", 4),
            (nvfp4, 3, 201_984, "128x128", 4),
            (bf16, 0, 214_272, "256x256", 4),
            (bf16, 1, 214_272, "256x128", 4),
            (bf16, 2, 214_272, "128x256", 4),
            (bf16, 3, 214_272, "128x128", 4),
            (bf16, 4, 214_272, "256x256_2x1", 4),
            (bf16, 5, 214_272, "256x128_1x2", 4),
        ] {
            let shape = TileShape::all(operands)[index];
            assert_eq!(shape.shared_bytes(), shared_bytes, "{shape:?}");
            assert_eq!(shape.name(), name);
            let (large, small) = (sizes((1000, 1000, 64)), sizes((1, 1, 64)));
            assert_eq!(shape.grid(shape.clusters(large), 4), grid, "{shape:?}");
            assert_eq!(
                shape.grid(shape.clusters(small), 4),
                shape.cluster_ctas() as u32,
                "{shape:?}"
            );
        }
    }

    #[test]
    fn clusters_stay_within_groups() {
        let all = TileShape::all(Operands::Bf16);
        // 148 SMs: eight groups and four more SMs.
        for (index, sm_count, expected) in
            [(0, 148, 74), (2, 148, 148), (4, 148, 33), (4, 4, 1), (4, 3, 1), (5, 132, 29)]
        {
            let found = all[index].clusters_at_once(sm_count);
            assert_eq!(found, expected, "{} on {sm_count}", all[index].name());
        }
    }

    #[test]
    fn ctas_copy_what_nobody_else_does() {
        // Rows of `a` and `b` that a CTA copies, in KiB of a stage.
        let rows = TileShape::all(Operands::Bf16).into_iter().map(|shape| {
            let [a, b] = shape.copied_rows();
            (shape.name(), a, b, shape.copied_bytes() >> 10)
        });
        let expected = [
            ("256x256", 128, 128, 32),
            ("256x128", 128, 64, 24),
            ("128x256", 128, 256, 48),
            ("128x128", 128, 128, 32),
            ("256x256_2x1", 128, 64, 24),
            ("256x128_1x2", 64, 64, 16),
        ];
        assert_eq!(
            rows.collect::<Vec<_>>(),
            expected.map(|(name, a, b, kib)| (name.into(), a, b, kib))
        );
    }
}
