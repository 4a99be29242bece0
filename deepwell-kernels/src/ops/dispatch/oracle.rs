//! Grouped rows by definition: for each expert, a scan over all pairs in order.

use std::ops::Range;

/// The maps of grouped rows, see [`deepwell_ir::ops::Dispatch`].
#[derive(Clone, Debug, PartialEq)]
pub struct Grouped {
    /// `[experts + 1]`.
    pub offsets: Vec<i32>,
    /// `[2, experts]`.
    pub load: Vec<i32>,
    /// `[tokens, top_k]`.
    pub rows: Vec<i32>,
    /// `[rows]`.
    pub pairs: Vec<i32>,
}

/// Groups the pairs `chosen` `[tokens, top_k]`, at most `capacity` per expert, into `rows` rows.
pub fn forward(
    chosen: &[i32],
    experts: usize,
    align: usize,
    capacity: usize,
    rows: usize,
) -> Grouped {
    group(chosen, (experts, 0..experts), align, capacity, rows)
}

/// Groups the pairs that chose one of the experts in `here`, of `experts` in all.
pub fn here(
    chosen: &[i32],
    experts: usize,
    here: Range<usize>,
    align: usize,
    rows: usize,
) -> Grouped {
    group(chosen, (experts, here), align, usize::MAX, rows)
}

fn group(
    chosen: &[i32],
    (experts, here): (usize, Range<usize>),
    align: usize,
    capacity: usize,
    rows: usize,
) -> Grouped {
    let mut grouped = Grouped {
        offsets: vec![0],
        load: vec![0; 2 * experts],
        rows: vec![-1; chosen.len()],
        pairs: Vec::with_capacity(rows),
    };
    for expert in 0..experts {
        let is_here = here.contains(&expert);
        for pair in (0..chosen.len()).filter(|&pair| chosen[pair] as usize == expert) {
            grouped.load[expert] += 1;
            if is_here && grouped.load[expert] as usize <= capacity {
                grouped.load[experts + expert] += 1;
                grouped.rows[pair] = grouped.pairs.len() as i32;
                grouped.pairs.push(pair as i32);
            }
        }
        while !grouped.pairs.len().is_multiple_of(align) {
            grouped.pairs.push(-1);
        }
        if is_here {
            grouped.offsets.push(grouped.pairs.len() as i32);
        }
    }
    assert!(grouped.pairs.len() <= rows, "{rows} rows are too few");
    grouped.pairs.resize(rows, -1);
    grouped
}

/// The maps of rows for ranks, see [`deepwell_ir::ops::DispatchToRanks`].
#[derive(Clone, Debug, PartialEq)]
pub struct ForRanks {
    /// `[tokens, top_k]`.
    pub rows: Vec<i32>,
    /// `[2, experts]`.
    pub load: Vec<i32>,
    /// `[ranks * slab]`.
    pub pairs: Vec<i32>,
    /// `[ranks * slab, top_k]`.
    pub wanted: Vec<i32>,
}

/// Assigns to each of `ranks` the pairs `chosen` `[tokens, top_k]` of its experts, at most
/// `capacity` per expert, in `slab` rows.
pub fn to_ranks(
    chosen: &[i32],
    top_k: usize,
    experts: usize,
    ranks: usize,
    capacity: usize,
    slab: usize,
) -> ForRanks {
    let mut maps = ForRanks {
        rows: vec![-1; chosen.len()],
        load: vec![0; 2 * experts],
        pairs: vec![-1; ranks * slab],
        wanted: vec![-1; ranks * slab * top_k],
    };
    let of_rank = experts / ranks;
    for rank in 0..ranks {
        let mut row = rank * slab;
        for own in 0..of_rank {
            let expert = rank * of_rank + own;
            for pair in (0..chosen.len()).filter(|&pair| chosen[pair] as usize == expert) {
                maps.load[expert] += 1;
                if maps.load[expert] as usize <= capacity {
                    maps.load[experts + expert] += 1;
                    maps.rows[pair] = row as i32;
                    maps.pairs[row] = pair as i32;
                    maps.wanted[row * top_k + pair % top_k] = own as i32;
                    row += 1;
                }
            }
        }
        assert!(row <= (rank + 1) * slab, "the slab of rank {rank} is too short");
    }
    maps
}
