//! Buffers of mixtures with more than 2^31 elements: rows of pairs, and matrices of experts.
//!
//! Only what is looked at is written, so that the emulator runs them too where it is asked to and
//! there are 6 GB of memory (`DEEPWELL_TEST_DEVICE=emulated:sm90`).

use deepwell_ir::DType;
use deepwell_ir::ops::{GroupedGemm, GroupedRows, Permute, Unpermute};
use half::bf16;

use crate::harness::{Gpu, HostTensor};

/// Elements that a 32-bit index with a sign cannot name.
const FAR: usize = 1 << 31;
/// Columns of rows; what is behind [`FAR`] are then the last [`BEHIND`] rows.
const COLUMNS: usize = 8192;
const BEHIND: usize = 64;
const ROWS: usize = FAR / COLUMNS + BEHIND;
const TOKENS: usize = 2;
const TOP_K: usize = 2;

/// Whole numbers from -3 to 3, exact in BF16 and in every sum here.
fn whole(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 7 + index / 5 + seed * 11) % 7) as f32 - 3.0).collect()
}

fn to_bf16(bytes: &[u8]) -> Vec<f32> {
    bytemuck::pod_collect_to_vec::<u8, bf16>(bytes).iter().map(|value| value.to_f32()).collect()
}

trial!(rows_of_pairs_beyond_2_31_elements);
fn rows_of_pairs_beyond_2_31_elements() {
    let mut gpu = Gpu::open();
    // Pairs have the last four rows, in another order.
    let rows: Vec<i32> = [1, 3, 2, 4].iter().map(|back| (ROWS - back) as i32).collect();
    let y = whole(4 * COLUMNS, 1);
    let maps = [(DType::I32, vec![TOKENS, TOP_K]), (DType::I32, vec![ROWS])];
    let [of_pairs, of_rows] = maps.clone();
    let inputs = [(DType::Bf16, vec![ROWS, COLUMNS]), of_pairs, of_rows];
    let first = ROWS - 4;
    let parts = [
        (0, first * COLUMNS, &HostTensor::bf16(&[4, COLUMNS], &y)),
        (1, 0, &HostTensor::i32(&[TOKENS, TOP_K], &rows)),
    ];
    let output = [(DType::Bf16, vec![TOKENS, COLUMNS])];
    let all = (0, 2 * TOKENS * COLUMNS);
    let got = to_bf16(&gpu.run_far(Unpermute {}, (&inputs, &output), &parts, all));
    for token in 0..TOKENS {
        let of = |choice: usize, column: usize| {
            y[(rows[token * TOP_K + choice] as usize - first) * COLUMNS + column]
        };
        for column in 0..COLUMNS {
            let expected = of(0, column) + of(1, column);
            assert_eq!(got[token * COLUMNS + column], expected, "token {token}, {column}");
        }
    }

    // Tokens as many as there were rows, of which a few have pairs.
    let count = 32;
    let tokens: Vec<usize> = (0..count).map(|row| ROWS - 1 - 2 * row).collect();
    let mut rows = vec![-1; ROWS];
    tokens.iter().enumerate().for_each(|(row, &token)| rows[token] = row as i32);
    let pairs: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let x = whole(BEHIND * COLUMNS, 2);
    let inputs = [
        (DType::Bf16, vec![ROWS, COLUMNS]),
        (DType::I32, vec![ROWS, 1]),
        (DType::I32, vec![count]),
    ];
    let first = ROWS - BEHIND;
    let parts = [
        (0, first * COLUMNS, &HostTensor::bf16(&[BEHIND, COLUMNS], &x)),
        (1, 0, &HostTensor::i32(&[ROWS, 1], &rows)),
        (2, 0, &HostTensor::i32(&[count], &pairs)),
    ];
    let output = [(DType::Bf16, vec![count, COLUMNS])];
    let got = gpu.run_far(Permute {}, (&inputs, &output), &parts, (0, 2 * count * COLUMNS));
    for (row, values) in to_bf16(&got).chunks_exact(COLUMNS).enumerate() {
        let expected = &x[(tokens[row] - first) * COLUMNS..][..COLUMNS];
        assert!(values == expected, "row {row}");
    }
}

trial!(matrices_of_experts_beyond_2_31_elements);
fn matrices_of_experts_beyond_2_31_elements() {
    let mut gpu = Gpu::open();
    let (n, k, rows) = (256, 8192, 32);
    let experts = FAR / (n * k) + 8;
    // The last expert has everything.
    let mut offsets = vec![0; experts + 1];
    offsets[experts] = rows as i32;
    let (x, w) = (whole(rows * k, 3), whole(n * k, 4));
    let grouped = GroupedRows::new(experts, 32);
    let inputs = [
        (DType::Bf16, vec![rows, k]),
        (DType::Bf16, vec![experts, n, k]),
        (DType::I32, vec![experts + 1]),
    ];
    let parts = [
        (0, 0, &HostTensor::bf16(&[rows, k], &x)),
        (1, (experts - 1) * n * k, &HostTensor::bf16(&[n, k], &w)),
        (2, 0, &HostTensor::i32(&[experts + 1], &offsets)),
    ];
    let output = [(DType::Bf16, vec![rows, n])];
    let got = gpu.run_far(GroupedGemm { grouped }, (&inputs, &output), &parts, (0, 2 * rows * n));
    for (index, got) in to_bf16(&got).into_iter().enumerate() {
        let (row, column) = (index / n, index % n);
        let products = x[row * k..][..k].iter().zip(&w[column * k..][..k]);
        let sum: f32 = products.map(|(x, w)| x * w).sum();
        assert_eq!(got, bf16::from_f32(sum).to_f32(), "row {row}, column {column}");
    }
}
