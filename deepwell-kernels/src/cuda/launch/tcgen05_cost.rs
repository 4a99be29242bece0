//! What a GEMM on tcgen05 costs, by a model: bytes through each level of memory, cycles of each
//! unit, and with them the cycles of the whole. No Blackwell has been timed: rates are what is
//! published, or assumed and named so.

use super::tcgen05::{CTA_ROWS, GemmSizes, TileShape};

/// Multiply-adds of BF16 that an SM makes in a cycle: a B200's peak of 2250 TFLOP/s over 148 SMs at
/// 1.855 GHz. One-byte elements are two a lane.
const BF16_FMAS_PER_CYCLE: u64 = 4096;
/// Bytes of operands that a tensor core reads from shared memory in a cycle, and that copies write
/// there: assumed, as it is on Hopper.
const SHARED_BYTES_PER_CYCLE: u64 = 128;
/// Bytes that the L2 cache gives in a cycle for each SM that asks: assumed. What a CTA copies to
/// several is given once.
const L2_BYTES_PER_CYCLE: u64 = 64;
/// Bytes of device memory in a cycle of the whole device: 7.7 TB/s at that clock. A test holds both
/// numbers to the datasheet that `deepwell-probe` has.
const DEVICE_BYTES_PER_CYCLE: u64 = 4149;
/// Bytes of operands that stay in the L2 cache (126 MB, of which results take a part): assumed.
const L2_BYTES: u64 = 64 << 20;
/// Cycles in which a CTA writes a column of 128 results: assumed.
const CYCLES_PER_RESULT_COLUMN: u64 = 8;
/// Cycles of a column of 128 more: of sums that pass shared memory once more and are looked at
/// there, of GELU and of its gradient, each by the normal distribution or the hyperbolic tangent,
/// and of each MXFP8 operand. Counted in the instructions of the kernels for sm_100a, of which each
/// quarter of an SM issues one in a cycle for its warp of the epilogue.
const CYCLES_OF_FUSED: u64 = 5;
const CYCLES_OF_GELU: [[u64; 2]; 2] = [[32, 17], [35, 29]];
const CYCLES_OF_QUANTIZE: u64 = 7;
/// Rows of the result that tiles of one wave cover at most, as in the source.
const GROUP_ROWS: usize = 2048;

/// What becomes of the sums of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResultCost {
    /// Cycles in which a CTA turns a column of 128 sums into what it writes.
    pub(crate) column_cycles: u64,
    /// Bytes of device memory that are written, and read beside the operands, for each.
    pub(crate) bytes: u64,
}

impl Default for ResultCost {
    /// Results of two bytes.
    fn default() -> Self {
        ResultCost { column_cycles: CYCLES_PER_RESULT_COLUMN, bytes: 2 }
    }
}

impl ResultCost {
    /// Of GELU or its gradient, which reads another matrix, in the form with the hyperbolic tangent
    /// or the other, if any; of `stored` matrices of BF16; of so many MXFP8 operands.
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

/// Cycles that the sums of a tile are taken to need for each of the model's, where a time is
/// compared with that of other kernels. No kernel on tcgen05 has been timed; of ours on Hopper
/// those that multiply most reach 39 % of the roofline (`benchmarks/bench_h200_2026-11-21.md`,
/// attention), so nothing that has been timed gives way to the model's word alone.
const UNTIMED: u64 = 2;
/// Clock at which multiply-adds of all SMs make the peak, see [`BF16_PRODUCTS_PER_CYCLE`].
const CLOCK_HZ: f64 = 1.855e9;

/// Cost of a GEMM with tiles of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Times that each CTA computes a tile.
    pub(crate) waves: u64,
    /// Bytes that are read of device memory for operands, and written for a result of two bytes.
    pub(crate) device_bytes: u64,
    /// Bytes of operands that the L2 cache gives.
    pub(crate) l2_bytes: u64,
    /// Cycles of the tensor cores for one tile.
    pub(crate) mma_cycles: u64,
    /// Cycles for one tile of what is slowest until its sums are there.
    pub(crate) tile_cycles: u64,
    /// Cycles that writing a tile takes.
    pub(crate) result_cycles: u64,
    /// Cycles of all.
    pub(crate) cycles: u64,
    /// Share of the device's peak, in thousandths.
    pub(crate) peak_thousandths: u64,
}

impl Cost {
    /// Of a GEMM with tiles of `shape` on so many SMs.
    ///
    /// Waves of clusters run one after the other; a tile takes what the slowest of tensor cores,
    /// shared memory and the L2 cache takes. Writing results hides behind the next tile, but for
    /// the last one. Device memory may be what bounds all of it. Filling the pipeline is not
    /// counted.
    pub(crate) fn new(
        shape: TileShape,
        sizes: GemmSizes,
        results: ResultCost,
        sm_count: u64,
    ) -> Cost {
        let GemmSizes { m, n, k } = sizes;
        let element_bytes = shape.element_bytes() as u64;
        let clusters = shape.clusters(sizes) as u64;
        let at_once = shape.clusters_at_once(sm_count as usize) as u64;
        let waves = clusters.div_ceil(at_once);
        let stages = k.div_ceil(shape.stage_k()) as u64;

        let fmas_per_cycle = BF16_FMAS_PER_CYCLE * 2 / element_bytes;
        let stage_fmas = (CTA_ROWS * shape.columns * shape.stage_k()) as u64;
        let mma_cycles = stages * stage_fmas / fmas_per_cycle;
        let shared_cycles = stages * shape.stage_bytes() as u64 / SHARED_BYTES_PER_CYCLE;
        let copied_bytes = stages * shape.copied_bytes() as u64;
        let l2_cycles = copied_bytes / L2_BYTES_PER_CYCLE;
        let tile_cycles = mma_cycles.max(shared_cycles).max(l2_cycles);
        let result_cycles = results.column_cycles * shape.columns as u64;

        // What clusters of a wave read, when they run down the rows of a group before they go on.
        let [cluster_rows, cluster_columns] = shape.cluster_extents();
        let row_bytes = k as u64 * element_bytes;
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
    /// Seconds to compare with those of other kernels: sums of a tile are made while the results of
    /// the one before are written, and what is shorter of both shows once.
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

    use super::super::tcgen05::Operands;
    use super::*;

    const B200: u64 = 148;

    #[test]
    fn what_bounds_a_gemm() {
        let (bf16, mx) = (Operands::Bf16, Operands::Mx);
        // Operands, number of the tile, sizes: waves, cycles of MMAs and of a tile, share of peak.
        for (operands, index, (m, n, k), expected) in [
            // MMAs and the L2 cache take the same, and scales a little more; the last wave is not
            // full.
            (bf16, 0, (4096, 4096, 4096), (4, 32768, 32768, 851)),
            (mx, 0, (4096, 4096, 4096), (4, 16384, 17152, 802)),
            // The cache is what is slowest.
            (bf16, 1, (4096, 4096, 4096), (7, 16384, 24576, 655)),
            (bf16, 3, (4096, 4096, 4096), (7, 16384, 32768, 492)),
            // It gives less where pairs share, and MMAs take longest again.
            (bf16, 5, (4096, 4096, 4096), (8, 16384, 16384, 858)),
            // A short sum: writing results to device memory takes longest.
            (bf16, 0, (8192, 8192, 64), (14, 512, 512, 215)),
            // One tile.
            (bf16, 3, (1, 1, 8), (1, 256, 512, 0)),
            // A cluster, for one tile.
            (bf16, 5, (1, 1, 8), (1, 256, 256, 0)),
        ] {
            let shape = TileShape::all(operands)[index];
            let sizes = GemmSizes { m, n, k };
            let cost = Cost::new(shape, sizes, ResultCost::default(), B200);
            let found = (cost.waves, cost.mma_cycles, cost.tile_cycles, cost.peak_thousandths);
            assert_eq!(found, expected, "{shape:?} {m} {n} {k}: {cost:?}");
        }
    }

    /// What follows a GEMM takes time that a longer sum hides: the documentation's second table.
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
        let text = include_str!("../../../../docs/tcgen05.md");
        assert!(text.contains(&table), "docs/tcgen05.md should have these rows:\n{table}");
    }

    /// At the clock at which multiply-adds of all SMs make the peak.
    #[test]
    fn rates_are_those_of_the_datasheet() {
        let b200 = &Hardware::preset("b200").unwrap().gpus[0];
        let sms = u64::from(b200.sm_count.unwrap());
        let tflops = b200.peak_tflops(NumberFormat::Bf16).unwrap();
        assert_eq!(sms, B200);
        let hz = tflops * 1e12 / (2 * BF16_FMAS_PER_CYCLE * sms) as f64;
        assert_eq!((b200.hbw_gbps * 1e9 / hz) as u64, DEVICE_BYTES_PER_CYCLE);
        // Not another clock that happens to fit: below the highest that the driver shows.
        assert!((1.8e9..1.965e9).contains(&hz), "{hz}");
    }

    /// The table in the documentation is what the model gives.
    #[test]
    fn the_table_in_the_documentation() {
        let mut table = String::from(
            "| operands | M, N, K | tile | waves | device GB | L2 GB | cycles of a tile: MMA \
             | slowest | results | cycles of all | share of peak |\n\
             |---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        for (shapes, operands) in
            [(TileShape::all(Operands::Bf16), "BF16"), (TileShape::all(Operands::Mx), "MXFP8")]
        {
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
                        "| {operands} | {m}, {n}, {k} | {} | {} | {:.2} | {:.2} | {} \
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
        let text = include_str!("../../../../docs/tcgen05.md");
        assert!(text.contains(&table), "docs/tcgen05.md should have this table:\n{table}");
    }
}
