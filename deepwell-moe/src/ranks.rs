//! Transfer of (token, expert) pairs between ranks that split the experts: rows of the sender for
//! all ranks, and groups of the receiver.

use crate::error::check_length;
use crate::{Capacity, Dispatch, GroupedMaps, MoeError, NOWHERE};

/// Output maps between pairs and rows for all ranks; all elements are written.
#[derive(Debug)]
pub struct RankMaps<'a> {
    /// Row of each pair, or [`NOWHERE`], `[tokens, top_k]`.
    pub rows: &'a mut [i32],
    /// Number of pairs that chose each expert, then number of these pairs with a row,
    /// `[2, experts]`.
    pub load: &'a mut [i32],
    /// Pair of each row, or [`NOWHERE`], `[ranks * capacity]`.
    pub pairs: &'a mut [i32],
    /// Expert of each row, counted from the first expert of its rank, in the column of its pair's
    /// choice, and [`NOWHERE`] in the other columns, `[ranks * capacity, top_k]`.
    pub wanted: &'a mut [i32],
}

impl Dispatch {
    /// Writes the maps for `ranks` ranks with equal numbers of experts, as in the op
    /// [`DispatchToRanks`](deepwell_ir::ops::DispatchToRanks).
    ///
    /// # Errors
    ///
    /// A wrong length, or more pairs for a rank than rows.
    pub fn write_for_ranks(&self, ranks: usize, maps: RankMaps<'_>) -> Result<(), MoeError> {
        let RankMaps { rows, load, pairs, wanted } = maps;
        let (experts, top_k) = (self.counts().len(), self.top_k());
        check_length("rows", "[tokens, top_k]", rows, self.slots().len())?;
        check_length("load", "[2, experts]", load, 2 * experts)?;
        check_length("wanted", "[rows, top_k]", wanted, pairs.len() * top_k)?;
        for (load, counts) in
            load.chunks_exact_mut(experts).zip([self.counts_wanted(), self.counts()])
        {
            for (load, &count) in load.iter_mut().zip(counts) {
                *load = count as i32;
            }
        }
        for map in [&mut *rows, &mut *pairs, &mut *wanted] {
            map.fill(NOWHERE);
        }
        let (of_rank, slab) = (experts / ranks, pairs.len() / ranks);
        for rank in 0..ranks {
            let experts = rank * of_rank..(rank + 1) * of_rank;
            let places = self.offsets()[experts.start]..self.offsets()[experts.end];
            if places.len() > slab {
                let (name, layout) = ("pairs", "rows of a rank");
                return Err(MoeError::Length { name, layout, expected: places.len(), got: slab });
            }
            let first = rank * slab;
            for expert in experts.clone() {
                for place in self.offsets()[expert]..self.offsets()[expert + 1] {
                    let row = first + place - places.start;
                    let pair = self.sources()[place] as usize;
                    rows[pair] = row as i32;
                    pairs[row] = pair as i32;
                    wanted[row * top_k + pair % top_k] = (expert - experts.start) as i32;
                }
            }
        }
        Ok(())
    }
}

/// Sorts received rows by expert. In `wanted` `[rows, top_k]`, written by
/// [`Dispatch::write_for_ranks`], each number other than [`NOWHERE`] is a pair.
///
/// # Errors
///
/// An invalid expert, or maps of wrong lengths.
pub fn group_from_ranks(
    wanted: &[i32],
    experts: usize,
    align: usize,
    maps: GroupedMaps<'_>,
) -> Result<(), MoeError> {
    let GroupedMaps { offsets, load, rows, pairs } = maps;
    check_length("rows", "[rows, top_k]", rows, wanted.len())?;
    let sent: Vec<usize> = (0..wanted.len()).filter(|&pair| wanted[pair] != NOWHERE).collect();
    // Any other negative number becomes an invalid expert index.
    let chosen: Vec<u32> = sent.iter().map(|&pair| wanted[pair] as u32).collect();
    let mut rows_of_sent = vec![NOWHERE; sent.len()];
    let of_sent = GroupedMaps { offsets, load, rows: &mut rows_of_sent, pairs: &mut *pairs };
    Dispatch::new(&chosen, 1, experts, Capacity::Dropless)?.write_grouped(align, of_sent)?;
    for pair in pairs.iter_mut() {
        if let Ok(index) = usize::try_from(*pair) {
            *pair = sent[index] as i32;
        }
    }
    rows.fill(NOWHERE);
    for (&pair, row) in sent.iter().zip(rows_of_sent) {
        rows[pair] = row;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sent {
        rows: Vec<i32>,
        load: Vec<i32>,
        pairs: Vec<i32>,
        wanted: Vec<i32>,
    }

    fn send(chosen: &[u32], top_k: usize, experts: usize, ranks: usize, slab: usize) -> Sent {
        let dispatch = Dispatch::new(chosen, top_k, experts, Capacity::Dropless).unwrap();
        let mut sent = Sent {
            rows: vec![7; chosen.len()],
            load: vec![7; 2 * experts],
            pairs: vec![7; ranks * slab],
            wanted: vec![7; ranks * slab * top_k],
        };
        let maps = RankMaps {
            rows: &mut sent.rows,
            load: &mut sent.load,
            pairs: &mut sent.pairs,
            wanted: &mut sent.wanted,
        };
        dispatch.write_for_ranks(ranks, maps).unwrap();
        sent
    }

    #[test]
    fn rows_by_hand() {
        // Three tokens, two experts each, on two ranks with two of four experts each.
        let sent = send(&[3, 0, 0, 1, 2, 3], 2, 4, 2, 6);
        assert_eq!(sent.load, [2, 1, 1, 2, 2, 1, 1, 2]);
        assert_eq!(sent.rows, [7, 0, 1, 2, 6, 8]);
        assert_eq!(sent.pairs, [1, 2, 3, -1, -1, -1, 4, 0, 5, -1, -1, -1]);
        let first = [-1, 0, 0, -1, -1, 1, -1, -1, -1, -1, -1, -1];
        let second = [0, -1, 1, -1, -1, 1, -1, -1, -1, -1, -1, -1];
        assert_eq!(sent.wanted, [first, second].concat());
    }

    /// A slab that is too short is an error.
    #[test]
    fn more_pairs_than_rows_are_refused() {
        let dispatch = Dispatch::new(&[0, 0, 0], 1, 2, Capacity::Dropless).unwrap();
        let maps = RankMaps {
            rows: &mut [0; 3],
            load: &mut [0; 4],
            pairs: &mut [0; 4],
            wanted: &mut [0; 4],
        };
        let error = dispatch.write_for_ranks(2, maps).unwrap_err();
        assert!(matches!(error, MoeError::Length { name: "pairs", .. }), "{error}");
    }

    /// Two ranks that receive rows of two ranks sort the rows in the same order as a single rank
    /// with all tokens: equal tokens per expert, including empty experts and an idle rank.
    #[test]
    fn receivers_sort_as_one_rank_does() {
        const TOKENS: usize = 40;
        for (experts, top_k, ranks) in [(8, 2, 2), (4, 2, 4), (8, 3, 4), (2, 1, 2)] {
            for spread in [1, experts / 2, experts] {
                let of_pair = |source: usize, pair: usize| {
                    let (token, choice) = (pair / top_k, pair % top_k);
                    let first = (token * 5 + source * 3) % spread.max(top_k);
                    ((first + choice) % spread.max(top_k)) as u32
                };
                let chosen = |source: usize| -> Vec<u32> {
                    (0..TOKENS * top_k).map(|pair| of_pair(source, pair)).collect()
                };
                let all: Vec<u32> = (0..ranks).flat_map(chosen).collect();
                let one = Dispatch::new(&all, top_k, experts, Capacity::Dropless).unwrap();
                let of_rank = experts / ranks;
                let slab = TOKENS * top_k.min(of_rank);
                let sent: Vec<Sent> = (0..ranks)
                    .map(|source| send(&chosen(source), top_k, experts, ranks, slab))
                    .collect();
                for rank in 0..ranks {
                    let own = rank * slab * top_k..(rank + 1) * slab * top_k;
                    let wanted: Vec<i32> =
                        sent.iter().flat_map(|it| it.wanted[own.clone()].to_vec()).collect();
                    let mut offsets = vec![7; of_rank + 1];
                    let mut rows = vec![7; wanted.len()];
                    let mut pairs = vec![7; ranks * slab + 32 * of_rank];
                    let maps = GroupedMaps {
                        offsets: &mut offsets,
                        load: &mut vec![7; 2 * of_rank],
                        rows: &mut rows,
                        pairs: &mut pairs,
                    };
                    group_from_ranks(&wanted, of_rank, 32, maps).unwrap();
                    for expert in 0..of_rank {
                        let group = offsets[expert] as usize..offsets[expert + 1] as usize;
                        let got: Vec<usize> = (pairs[group].iter())
                            .filter_map(|&pair| usize::try_from(pair).ok())
                            .map(|pair| {
                                let row = pair / top_k;
                                let (source, row) = (row / slab, rank * slab + row % slab);
                                source * TOKENS * top_k + sent[source].pairs[row] as usize
                            })
                            .collect();
                        let places = one.offsets()[rank * of_rank + expert]
                            ..one.offsets()[rank * of_rank + expert + 1];
                        let expected: Vec<usize> =
                            one.sources()[places].iter().map(|&pair| pair as usize).collect();
                        assert_eq!(got, expected, "{experts} {top_k} {ranks}: {rank} {expert}");
                    }
                    for (pair, &row) in rows.iter().enumerate() {
                        assert_eq!(row == NOWHERE, wanted[pair] == NOWHERE);
                        assert!(row == NOWHERE || pairs[row as usize] == pair as i32);
                    }
                }
            }
        }
    }
}
