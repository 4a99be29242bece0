//! Cost model of a GEMM on tcgen05: bytes through each level of memory, cycles of each unit, and
//! the total cycles. No Blackwell has been timed: rates are published or assumed, and marked as
//! such.

use super::tcgen05::{CTA_ROWS, GemmSizes, TileShape};

/// BF16 multiply-adds per cycle of an SM: a B200's peak of 2250 TFLOP/s over 148 SMs at 1.855 GHz.
/// The rate is twice as high for one-byte elements, and four times for elements of four bits: as
/// many elements as a stage has along K.
const BF16_FMAS_PER_CYCLE: u64 = 4096;
const BF16_STAGE_K: u64 = 64;
/// Bytes of operands per cycle that a tensor core reads from shared memory, and that copies write
/// there: assumed, as on Hopper.
const SHARED_BYTES_PER_CYCLE: u64 = 128;
/// Bytes per cycle that the L2 cache delivers to each SM: assumed. Multicast data counts once.
const L2_BYTES_PER_CYCLE: u64 = 64;
/// Bytes of device memory per cycle of the whole device: 7.7 TB/s at this clock. A test compares
/// both numbers with the datasheet in `deepwell-probe`.
const DEVICE_BYTES_PER_CYCLE: u64 = 4149;
/// Bytes of operands that stay in the L2 cache (126 MB, shared with results): assumed.
const L2_BYTES: u64 = 64 << 20;
/// Cycles in which a CTA writes a column of 128 results: assumed.
const CYCLES_PER_RESULT_COLUMN: u64 = 8;
/// Additional cycles per column of 128: for accumulators that pass through shared memory once more;
/// for GELU and its gradient, each with the normal distribution or the hyperbolic tangent; and for
/// each MXFP8 operand. Counted in the instructions of the kernels for sm_100a: each quarter of an
/// SM issues an instruction per cycle for its epilogue warp.
const CYCLES_OF_FUSED: u64 = 5;
const CYCLES_OF_GELU: [[u64; 2]; 2] = [[32, 17], [35, 29]];
const CYCLES_OF_QUANTIZE: u64 = 7;
/// Rows of the result that concurrent tiles cover at most, as in the source.
const GROUP_ROWS: usize = 2048;

/// Cost of the epilogue of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResultCost {
    /// Cycles in which a CTA processes a column of 128 accumulators.
    pub(crate) column_cycles: u64,
    /// Bytes of device memory per result, written or read in addition to the operands.
    pub(crate) bytes: u64,
}

impl Default for ResultCost {
    /// A plain result of two bytes.
    fn default() -> Self {
        ResultCost { column_cycles: CYCLES_PER_RESULT_COLUMN, bytes: 2 }
    }
}

impl ResultCost {
    /// Cost of an epilogue. `activation` is GELU or its gradient (which reads another matrix), as
    /// (gradient, hyperbolic tangent); `stored` counts BF16 matrices, `quantized` MXFP8 operands.
    pub(crate) fn fused(
        activation: Option<(bool, bool)>,
        stored: u64,
        quantized: u64,
    ) -> ResultCost {
        let (activation_cycles, read) = activation.map_or((0, 0), |(gradient, tanh)| {
            let cycles = CYCLES_OF_GELU[usize::from(gradient)][usize::from(tanh)];
            (cycles, u64::from(gradient))
        });
        ResultCost {
            column_cycles: CYCLES_PER_RESULT_COLUMN
                + CYCLES_OF_FUSED
                + activation_cycles
                + CYCLES_OF_QUANTIZE * quantized,
            bytes: 2 * (stored + read) + quantized,
        }
    }
}

/// Factor on the model's accumulation cycles in predictions that are compared with other kernels.
/// No kernel on tcgen05 has been timed. The most compute-heavy of our timed kernels on Hopper reach
/// 39 % of the roofline (`benchmarks/bench_h200_2026-11-21.md`, attention), so no timed kernel
/// loses against the model alone.
const UNTIMED: u64 = 2;
/// Clock at which the multiply-adds of all SMs give the peak, see [`BF16_FMAS_PER_CYCLE`].
const CLOCK_HZ: f64 = 1.855e9;

/// Cost of a GEMM with tiles of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Number of tiles that each CTA computes.
    pub(crate) waves: u64,
    /// Bytes of device memory read for operands and written for results.
    pub(crate) device_bytes: u64,
    /// Bytes of operands delivered by the L2 cache.
    pub(crate) l2_bytes: u64,
    /// Cycles of the tensor cores per tile.
    pub(crate) mma_cycles: u64,
    /// Cycles per tile of the slowest unit until the accumulators are full.
    pub(crate) tile_cycles: u64,
    /// Cycles to write a tile.
    pub(crate) result_cycles: u64,
    /// Total cycles.
    pub(crate) cycles: u64,
    /// Share of the device's peak, in thousandths.
    pub(crate) peak_thousandths: u64,
}

impl Cost {
    /// The cost of a GEMM with tiles of `shape` on `sm_count` SMs.
    ///
    /// Waves of clusters run in sequence; a tile takes the time of the slowest of tensor cores,
    /// shared memory and L2 cache. Writing results overlaps with the next tile, except for the last
    /// tile. Device memory may bound the total. Filling the pipeline is not counted.
    pub(crate) fn new(
        shape: TileShape,
        sizes: GemmSizes,
        results: ResultCost,
        sm_count: u64,
    ) -> Cost {
        let GemmSizes { m, n, k } = sizes;
        let clusters = shape.clusters(sizes) as u64;
        let at_once = shape.clusters_at_once(sm_count as usize) as u64;
        let waves = clusters.div_ceil(at_once);
        let stages = k.div_ceil(shape.stage_k()) as u64;

        let fmas_per_cycle = BF16_FMAS_PER_CYCLE * shape.stage_k() as u64 / BF16_STAGE_K;
        let stage_fmas = (CTA_ROWS * shape.columns * shape.stage_k()) as u64;
        let mma_cycles = stages * stage_fmas / fmas_per_cycle;
        let shared_cycles = stages * shape.stage_bytes() as u64 / SHARED_BYTES_PER_CYCLE;
        let copied_bytes = stages * shape.copied_bytes() as u64;
        let l2_cycles = copied_bytes / L2_BYTES_PER_CYCLE;
        let tile_cycles = mma_cycles.max(shared_cycles).max(l2_cycles);
        let result_cycles = results.column_cycles * shape.columns as u64;

        // Bytes read by the clusters of a wave, which go down the rows of a group before the next
        // column.
        let [cluster_rows, cluster_columns] = shape.cluster_extents();
        let row_bytes = shape.row_bytes(k) as u64;
        let operand_bytes = (m + n) as u64 * row_bytes;
        let group = m.min(GROUP_ROWS).div_ceil(cluster_rows) as u64;
        let wave_columns = at_once.div_ceil(group) * cluster_columns as u64;
        let wave_rows = (group.min(at_once) * cluster_rows as u64).min(m as u64);
        let wave_bytes = (wave_rows + wave_columns.min(n as u64)) * row_bytes;
        let read_bytes = match operand_bytes <= L2_BYTES {
            true => operand_bytes,
            false => operand_bytes.max(waves * wave_bytes),
        };
        let device_bytes = read_bytes + results.bytes * (m * n) as u64;
        let device_cycles = device_bytes / DEVICE_BYTES_PER_CYCLE;

        let cycles = (waves * tile_cycles.max(result_cycles) + result_cycles).max(device_cycles);
        let fmas = (m * n) as u64 * k as u64;
        let ideal_cycles = fmas / (fmas_per_cycle * sm_count.max(1));
        Cost {
            waves,
            device_bytes,
            l2_bytes: clusters * shape.cluster_ctas() as u64 * copied_bytes,
            mma_cycles,
            tile_cycles,
            result_cycles,
            cycles,
            peak_thousandths: 1000 * ideal_cycles / cycles.max(1),
        }
    }
}

impl Cost {
    /// Predicted seconds, comparable with other kernels: accumulation of a tile overlaps with
    /// writing the previous tile, so the shorter of the two counts only once.
    pub(crate) fn predicted_s(&self) -> f64 {
        let (sums, results) = (UNTIMED * self.tile_cycles, self.result_cycles);
        let device_cycles = self.device_bytes / DEVICE_BYTES_PER_CYCLE;
        let cycles = self.waves * sums.max(results) + sums.min(results);
        cycles.max(device_cycles) as f64 / CLOCK_HZ
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use deepwell_probe::{Hardware, NumberFormat};

    use super::super::tensor_maps::Operands;
    use super::*;

    const B200: u64 = 148;

    #[test]
    fn what_bounds_a_gemm() {
        let (bf16, mx, nvfp4) = (Operands::Bf16, Operands::Mx, Operands::Nvfp4);
        // Operands, index of the tile, sizes: waves, cycles of MMAs and of a tile, share of peak.
        for (operands, index, (m, n, k), expected) in [
            // MMAs and the L2 cache take equally long, and scales a little longer; the last wave is
            // partial.
            (bf16, 0, (4096, 4096, 4096), (4, 32768, 32768, 851)),
            (mx, 0, (4096, 4096, 4096), (4, 16384, 17152, 802)),
            // Scales take a sixth of the copies, and MMAs half as long.
            (nvfp4, 0, (4096, 4096, 4096), (4, 8192, 9728, 691)),
            // The L2 cache is the slowest unit.
            (bf16, 1, (4096, 4096, 4096), (7, 16384, 24576, 655)),
            (bf16, 3, (4096, 4096, 4096), (7, 16384, 32768, 492)),
            // Clusters load less from the L2 cache, and MMAs are the slowest again.
            (bf16, 5, (4096, 4096, 4096), (8, 16384, 16384, 858)),
            // A short K: writing results to device memory takes longest.
            (bf16, 0, (8192, 8192, 64), (14, 512, 512, 215)),
            // One tile.
            (bf16, 3, (1, 1, 8), (1, 256, 512, 0)),
            // A cluster for a single tile.
            (bf16, 5, (1, 1, 8), (1, 256, 256, 0)),
        ] {
            let shape = TileShape::all(operands)[index];
            let sizes = GemmSizes { m, n, k };
            let cost = Cost::new(shape, sizes, ResultCost::default(), B200);
            let found = (cost.waves, cost.mma_cycles, cost.tile_cycles, cost.peak_thousandths);
            assert_eq!(found, expected, "{shape:?} {m} {n} {k}: {cost:?}");
        }
    }

    /// An epilogue is hidden by a longer K: the documentation's second table.
    #[test]
    fn what_an_epilogue_costs() {
        let shape = TileShape::alone(Operands::Mx)[0];
        let mut table = String::new();
        let fused = ResultCost::fused;
        for (what, results) in [
            ("none", ResultCost::default()),
            (
                "GELU by its tangent form, GEMM output stored, quantized both ways",
                fused(Some((false, true)), 1, 2),
            ),
            ("GELU, GEMM output stored, quantized both ways", fused(Some((false, false)), 1, 2)),
            ("GELU gradient, stored, quantized both ways", fused(Some((true, false)), 1, 2)),
        ] {
            let share = |k| {
                let sizes = GemmSizes { m: 8192, n: 8192, k };
                Cost::new(shape, sizes, results, B200).peak_thousandths as f64 / 10.0
            };
            let ResultCost { column_cycles, bytes } = results;
            let (long, short) = (share(4096), share(1024));
            writeln!(table, "| {what} | {column_cycles} | {bytes} | {long:.1} % | {short:.1} % |")
                .unwrap();
        }
        let text = include_str!("../../../../../docs/tcgen05.md");
        assert!(text.contains(&table), "docs/tcgen05.md should have these rows:\n{table}");
    }

    /// At the clock at which the multiply-adds of all SMs give the peak.
    #[test]
    fn rates_are_those_of_the_datasheet() {
        let b200 = &Hardware::preset("b200").unwrap().gpus[0];
        let sms = u64::from(b200.sm_count.unwrap());
        let tflops = b200.peak_tflops(NumberFormat::Bf16).unwrap();
        assert_eq!(sms, B200);
        let hz = tflops * 1e12 / (2 * BF16_FMAS_PER_CYCLE * sms) as f64;
        assert_eq!((b200.hbw_gbps * 1e9 / hz) as u64, DEVICE_BYTES_PER_CYCLE);
        // The clock is plausible: below the highest clock that the driver shows.
        assert!((1.8e9..1.965e9).contains(&hz), "{hz}");
    }

    /// The table in the documentation matches the model.
    #[test]
    fn the_table_in_the_documentation() {
        let mut table = String::from(
            "| operands | M, N, K | tile | waves | device GB | L2 GB | cycles of a tile: MMA \
             | slowest | results | cycles of all | share of peak |\n\
             |---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        for (operands, name) in
            [(Operands::Bf16, "BF16"), (Operands::Mx, "MXFP8"), (Operands::Nvfp4, "NVFP4")]
        {
            let shapes = TileShape::all(operands);
            for (m, n, k) in [
                (4096, 4096, 4096),
                (8192, 8192, 8192),
                (16384, 4096, 4096),
                (8192, 14336, 4096),
                (8192, 4096, 14336),
            ] {
                for &shape in &shapes {
                    let sizes = GemmSizes { m, n, k };
                    let cost = Cost::new(shape, sizes, ResultCost::default(), B200);
                    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
                    writeln!(
                        table,
                        "| {name} | {m}, {n}, {k} | {} | {} | {:.2} | {:.2} | {} \
                         | {} | {} | {} | {:.1} % |",
                        shape.tile(),
                        cost.waves,
                        gigabytes(cost.device_bytes),
                        gigabytes(cost.l2_bytes),
                        cost.mma_cycles,
                        cost.tile_cycles,
                        cost.result_cycles,
                        cost.cycles,
                        cost.peak_thousandths as f64 / 10.0,
                    )
                    .unwrap();
                }
            }
        }
        let text = include_str!("../../../../../docs/tcgen05.md");
        assert!(text.contains(&table), "docs/tcgen05.md should have this table:\n{table}");
    }
}
