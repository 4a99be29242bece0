//! Grouped rows by their definition: for each expert all pairs are looked at, in order.

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

/// Groups the pairs `chosen` `[tokens, top_k]`, at most `capacity` for an expert, into `rows` rows.
pub fn forward(
    chosen: &[i32],
    experts: usize,
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
        for pair in (0..chosen.len()).filter(|&pair| chosen[pair] as usize == expert) {
            grouped.load[expert] += 1;
            if grouped.load[expert] as usize <= capacity {
                grouped.load[experts + expert] += 1;
                grouped.rows[pair] = grouped.pairs.len() as i32;
                grouped.pairs.push(pair as i32);
            }
        }
        while grouped.pairs.len() % align != 0 {
            grouped.pairs.push(-1);
        }
        grouped.offsets.push(grouped.pairs.len() as i32);
    }
    grouped.pairs.resize(rows, -1);
    grouped
}
