//! Sorting chosen (token, expert) pairs by expert, with or without a capacity limit.
//!
//! Sources: expert capacity and dropping: Switch Transformers, arXiv 2101.03961, eq. 3, for `top_k`
//! pairs per token as in GShard, arXiv 2006.16668, section 2.2. Dropless: MegaBlocks, arXiv
//! 2211.15841.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{check_length, check_top_k};
use crate::{MoeError, Real, Routing};

/// Slot of a dropped pair.
pub const DROPPED: u32 = u32::MAX;

/// Row of a dropped pair, and pair of a row without one.
pub const NOWHERE: i32 = -1;

/// Output maps between pairs and rows; all elements are written.
#[derive(Debug)]
pub struct GroupedMaps<'a> {
    /// First row of each group, and the end of the last group, `[groups + 1]`.
    pub offsets: &'a mut [i32],
    /// Number of pairs that chose each expert, then number of these pairs with a row,
    /// `[2, experts]`.
    pub load: &'a mut [i32],
    /// Row of each pair, or [`NOWHERE`], `[tokens, top_k]`.
    pub rows: &'a mut [i32],
    /// Pair of each row, or [`NOWHERE`], `[rows]`.
    pub pairs: &'a mut [i32],
}

/// Limit on the tokens of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Capacity {
    /// No limit.
    Dropless,
    /// At most this multiple of an even share: `ceil(factor * tokens * top_k / experts)`.
    Factor(f64),
}

impl Capacity {
    /// Maximum number of tokens of one expert.
    ///
    /// # Errors
    ///
    /// A factor that is not a positive finite number.
    pub fn tokens_per_expert_max(
        self,
        tokens: usize,
        top_k: usize,
        experts: usize,
    ) -> Result<usize, MoeError> {
        match self {
            Capacity::Dropless => Ok(tokens),
            Capacity::Factor(factor) if factor.is_finite() && factor > 0.0 => {
                let share = factor * (tokens as f64) * (top_k as f64) / experts as f64;
                // At most all tokens can choose one expert.
                Ok((share.ceil() as usize).min(tokens))
            }
            Capacity::Factor(factor) => Err(MoeError::Setting {
                name: "capacity factor",
                expected: "a finite number above 0",
                value: factor,
            }),
        }
    }
}

/// The sorted positions of all chosen pairs in a buffer sorted by expert.
///
/// A pair is the `choice`-th expert of `token`, numbered `token * top_k + choice`. Kept pairs are
/// sorted by expert and then by number. Pairs are also dropped in order of their numbers, so a full
/// expert rejects later tokens.
///
/// ```text
/// slots   [tokens * top_k]  pair -> place in the buffer, or DROPPED
/// sources [kept]            place in the buffer -> pair (the token is source / top_k)
/// offsets [experts + 1]     expert e has the places offsets[e]..offsets[e + 1]
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    top_k: usize,
    capacity: usize,
    slots: Vec<u32>,
    sources: Vec<u32>,
    counts: Vec<usize>,
    counts_wanted: Vec<usize>,
    offsets: Vec<usize>,
}

impl Dispatch {
    /// Sorts the pairs `chosen` `[tokens, top_k]`, given as expert indices.
    ///
    /// # Errors
    ///
    /// `top_k` of zero or above `experts`, a length that is not a multiple of `top_k`, an invalid
    /// expert, an invalid capacity factor, or more pairs than a `u32` can number.
    pub fn new(
        chosen: &[u32],
        top_k: usize,
        experts: usize,
        capacity: Capacity,
    ) -> Result<Self, MoeError> {
        check_top_k(top_k, experts)?;
        if !chosen.len().is_multiple_of(top_k) {
            return Err(MoeError::PartialRow { name: "chosen", columns: top_k, got: chosen.len() });
        }
        if chosen.len() >= DROPPED as usize {
            return Err(MoeError::TooManyAssignments { got: chosen.len() });
        }
        if let Some(index) = chosen.iter().position(|&expert| expert as usize >= experts) {
            return Err(MoeError::ExpertOutOfRange { index, expert: chosen[index], experts });
        }
        let tokens = chosen.len() / top_k;
        let capacity = match capacity {
            // Received pairs may name an expert twice for one token; all are kept.
            Capacity::Dropless => chosen.len(),
            limited => limited.tokens_per_expert_max(tokens, top_k, experts)?,
        };

        let mut counts_wanted = vec![0; experts];
        for &expert in chosen {
            counts_wanted[expert as usize] += 1;
        }
        let counts: Vec<usize> = counts_wanted.iter().map(|&count| capacity.min(count)).collect();
        let mut offsets = Vec::with_capacity(experts + 1);
        offsets.push(0);
        for count in &counts {
            offsets.push(offsets[offsets.len() - 1] + count);
        }

        let mut slots = vec![DROPPED; chosen.len()];
        let mut sources = vec![0; offsets[experts]];
        let mut next = offsets.clone();
        for (pair, &expert) in chosen.iter().enumerate() {
            let expert = expert as usize;
            let place = next[expert];
            if place < offsets[expert + 1] {
                slots[pair] = place as u32;
                sources[place] = pair as u32;
                next[expert] += 1;
            }
        }
        Ok(Dispatch { top_k, capacity, slots, sources, counts, counts_wanted, offsets })
    }

    /// Sorts the pairs of a [`Routing`].
    ///
    /// # Errors
    ///
    /// An invalid capacity factor, or more pairs than a `u32` can number.
    pub fn of_routing<T: Real>(routing: &Routing<T>, capacity: Capacity) -> Result<Self, MoeError> {
        let config = routing.settings();
        Dispatch::new(routing.experts(), config.top_k, config.experts, capacity)
    }

    /// Number of experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Position of each pair in the buffer, `[tokens * top_k]`; [`DROPPED`] for dropped pairs.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Pair at each position of the buffer, `[kept]`.
    pub fn sources(&self) -> &[u32] {
        &self.sources
    }

    /// Token at a position of the buffer.
    ///
    /// # Panics
    ///
    /// If the position is out of range.
    pub fn token_at(&self, place: usize) -> usize {
        self.sources[place] as usize / self.top_k
    }

    /// Number of kept pairs per expert, `[experts]`.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// Number of pairs that chose each expert, kept or dropped, `[experts]`.
    pub fn counts_wanted(&self) -> &[usize] {
        &self.counts_wanted
    }

    /// First position of each expert, then the number of positions: `[experts + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Maximum number of pairs per expert.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of kept pairs.
    pub fn kept_count(&self) -> usize {
        self.sources.len()
    }

    /// Number of dropped pairs.
    pub fn dropped_count(&self) -> usize {
        self.slots.len() - self.sources.len()
    }

    /// Writes the maps of rows grouped by expert, each group padded to a multiple of `align` rows,
    /// as in the op [`Dispatch`](deepwell_ir::ops::Dispatch).
    ///
    /// # Errors
    ///
    /// A wrong length, or fewer rows than the pairs need.
    pub fn write_grouped(&self, align: usize, maps: GroupedMaps<'_>) -> Result<(), MoeError> {
        self.write_grouped_here(0..self.counts.len(), align, maps)
    }

    /// [`Dispatch::write_grouped`] for the experts `here`, one group each. Pairs of other experts
    /// have no row, and the counts of these experts in the second row of `load` are zero.
    ///
    /// # Errors
    ///
    /// As for [`Dispatch::write_grouped`], and an invalid expert.
    pub fn write_grouped_here(
        &self,
        here: Range<usize>,
        align: usize,
        maps: GroupedMaps<'_>,
    ) -> Result<(), MoeError> {
        let GroupedMaps { offsets, load, rows, pairs } = maps;
        let experts = self.counts.len();
        if here.start > here.end || here.end > experts {
            let (index, expert) = (0, here.end.max(here.start) as u32);
            return Err(MoeError::ExpertOutOfRange { index, expert, experts });
        }
        for (name, layout, expected, got) in [
            ("offsets", "[groups + 1]", here.len() + 1, offsets.len()),
            ("load", "[2, experts]", 2 * experts, load.len()),
            ("rows", "[tokens, top_k]", self.slots.len(), rows.len()),
        ] {
            if expected != got {
                return Err(MoeError::Length { name, layout, expected, got });
            }
        }
        let padded = |count: usize| count.next_multiple_of(align.max(1));
        let needed: usize = self.counts[here.clone()].iter().map(|&count| padded(count)).sum();
        if pairs.len() < needed {
            let (name, layout, got) = ("pairs", "rows of all groups", pairs.len());
            return Err(MoeError::Length { name, layout, expected: needed, got });
        }
        pairs.fill(NOWHERE);
        rows.fill(NOWHERE);
        let (wanted, kept) = load.split_at_mut(experts);
        for (wanted, &count) in wanted.iter_mut().zip(&self.counts_wanted) {
            *wanted = count as i32;
        }
        kept.fill(0);
        offsets[0] = 0;
        let mut first = 0;
        for (group, expert) in here.enumerate() {
            let places = self.offsets[expert]..self.offsets[expert + 1];
            for (row, &pair) in (first..).zip(&self.sources[places]) {
                pairs[row] = pair as i32;
                rows[pair as usize] = row as i32;
            }
            first += padded(self.counts[expert]);
            offsets[group + 1] = first as i32;
            kept[expert] = self.counts[expert] as i32;
        }
        Ok(())
    }

    /// Sets the values of dropped pairs to zero: gate weights before use, or their gradients.
    /// `values` is `[tokens, top_k]`.
    ///
    /// # Errors
    ///
    /// A wrong length.
    pub fn zero_dropped<T: Real>(&self, values: &mut [T]) -> Result<(), MoeError> {
        check_length("values", "[tokens, top_k]", values, self.slots.len())?;
        for (value, &slot) in values.iter_mut().zip(&self.slots) {
            if slot == DROPPED {
                *value = T::from_f64(0.0);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_batch_by_hand() {
        // Four tokens, two choices each, three experts.
        let chosen = [0, 1, 0, 2, 0, 1, 2, 0];
        let all = Dispatch::new(&chosen, 2, 3, Capacity::Dropless).unwrap();
        assert_eq!(all.counts(), [4, 2, 2]);
        assert_eq!(all.offsets(), [0, 4, 6, 8]);
        assert_eq!(all.slots(), [0, 4, 1, 6, 2, 5, 7, 3]);
        assert_eq!(all.sources(), [0, 2, 4, 7, 1, 5, 3, 6]);
        assert_eq!((all.kept_count(), all.dropped_count()), (8, 0));
        assert_eq!(
            (0..8).map(|place| all.token_at(place)).collect::<Vec<_>>(),
            [0, 1, 2, 3, 0, 2, 1, 3]
        );

        // ceil(1.0 * 4 * 2 / 3) = 3: expert 0 drops the last of its pairs.
        let limited = Dispatch::new(&chosen, 2, 3, Capacity::Factor(1.0)).unwrap();
        assert_eq!(limited.capacity(), 3);
        assert_eq!(limited.counts(), [3, 2, 2]);
        assert_eq!(limited.counts_wanted(), [4, 2, 2]);
        assert_eq!(limited.offsets(), [0, 3, 5, 7]);
        assert_eq!(limited.slots(), [0, 3, 1, 5, 2, 4, 6, DROPPED]);
        let mut gates = [1.0f32; 8];
        limited.zero_dropped(&mut gates).unwrap();
        assert_eq!(gates, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn capacity_is_the_share_rounded_up() {
        for (factor, tokens, top_k, experts, expected) in [
            (1.0, 8, 1, 4, 2),
            (1.25, 8, 1, 4, 3),
            (1.0, 9, 1, 4, 3),
            (1.0, 8, 2, 4, 4),
            (0.01, 8, 1, 4, 1),
            (100.0, 8, 1, 4, 8),
            (1.0, 0, 1, 4, 0),
        ] {
            let capacity = Capacity::Factor(factor);
            let got = capacity.tokens_per_expert_max(tokens, top_k, experts).unwrap();
            assert_eq!(got, expected, "{factor} {tokens} {top_k} {experts}");
        }
        assert_eq!(Capacity::Dropless.tokens_per_expert_max(8, 1, 4), Ok(8));
    }

    #[test]
    fn groups_are_padded() {
        // Counts of 4, 2 and 2; with a capacity of 3 pairs 3, 2 and 2; the fourth expert is empty.
        let chosen = [0, 1, 0, 2, 0, 1, 2, 0];
        let grouped = |experts: usize, align: usize, capacity, length: usize| {
            let (mut offsets, mut load) = (vec![9; experts + 1], vec![9; 2 * experts]);
            let (mut rows, mut pairs) = (vec![9; 8], vec![9; length]);
            let maps = GroupedMaps {
                offsets: &mut offsets,
                load: &mut load,
                rows: &mut rows,
                pairs: &mut pairs,
            };
            let sorted = Dispatch::new(&chosen, 2, experts, capacity).unwrap();
            sorted.write_grouped(align, maps).map(|()| (offsets, load, rows, pairs))
        };
        let (offsets, load, rows, pairs) = grouped(4, 4, Capacity::Dropless, 14).unwrap();
        assert_eq!(offsets, [0, 4, 8, 12, 12]);
        assert_eq!(load, [4, 2, 2, 0, 4, 2, 2, 0]);
        assert_eq!(rows, [0, 4, 1, 8, 2, 5, 9, 3]);
        assert_eq!(pairs, [0, 2, 4, 7, 1, 5, -1, -1, 3, 6, -1, -1, -1, -1]);
        let (offsets, load, rows, pairs) = grouped(3, 1, Capacity::Factor(1.0), 7).unwrap();
        assert_eq!((offsets, load), (vec![0, 3, 5, 7], vec![4, 2, 2, 3, 2, 2]));
        assert_eq!((rows, pairs), (vec![0, 3, 1, 5, 2, 4, 6, -1], vec![0, 2, 4, 1, 5, 3, 6]));
        let error = grouped(3, 4, Capacity::Dropless, 11).unwrap_err().to_string();
        assert!(error.contains("`pairs`: expected 12 numbers"), "{error}");
    }

    /// Ranks with different experts each sort the same tokens: every pair has a row on one rank,
    /// and each expert has its pairs in the same order as on a single rank.
    #[test]
    fn ranks_sort_what_is_theirs() {
        let chosen = [3, 0, 0, 1, 2, 3, 3, 1];
        let here = |here: Range<usize>, length: usize| {
            let (mut offsets, mut load) = (vec![9; here.len() + 1], vec![9; 8]);
            let (mut rows, mut pairs) = (vec![9; 8], vec![9; length]);
            let maps = GroupedMaps {
                offsets: &mut offsets,
                load: &mut load,
                rows: &mut rows,
                pairs: &mut pairs,
            };
            let sorted = Dispatch::new(&chosen, 2, 4, Capacity::Dropless).unwrap();
            sorted.write_grouped_here(here, 2, maps).map(|()| (offsets, load, rows, pairs))
        };
        let (offsets, load, rows, pairs) = here(0..2, 6).unwrap();
        assert_eq!(offsets, [0, 2, 4]);
        assert_eq!(load, [2, 2, 1, 3, 2, 2, 0, 0]);
        assert_eq!(rows, [-1, 0, 1, 2, -1, -1, -1, 3]);
        assert_eq!(pairs, [1, 2, 3, 7, -1, -1]);
        let (offsets, load, rows, pairs) = here(2..4, 6).unwrap();
        assert_eq!(offsets, [0, 2, 6]);
        assert_eq!(load, [2, 2, 1, 3, 0, 0, 1, 3]);
        assert_eq!(rows, [2, -1, -1, -1, 0, 3, 4, -1]);
        assert_eq!(pairs, [4, -1, 0, 5, 6, -1]);
        assert_eq!(here(2..2, 0).unwrap().0, [0]);
        let error = here(2..4, 5).unwrap_err().to_string();
        assert!(error.contains("`pairs`: expected 6 numbers"), "{error}");
        let error = here(3..5, 6).unwrap_err().to_string();
        assert!(error.contains("names expert 5, but there are 4"), "{error}");
    }

    #[test]
    fn nothing_to_sort_is_fine() {
        let empty = Dispatch::new(&[], 1, 3, Capacity::Factor(1.0)).unwrap();
        assert_eq!(empty.offsets(), [0, 0, 0, 0]);
        assert_eq!(empty.kept_count(), 0);
    }

    #[test]
    fn wrong_arguments_are_named() {
        let dispatch = |chosen: &[u32], top_k, factor| {
            Dispatch::new(chosen, top_k, 3, Capacity::Factor(factor))
        };
        for (error, expected) in [
            (dispatch(&[0, 1, 2], 4, 1.0), "expected `top_k` between 1 and the 3 experts, got 4"),
            (dispatch(&[0, 1, 2], 2, 1.0), "`chosen`: expected rows of 2 numbers, got 3"),
            (dispatch(&[0, 3], 1, 1.0), "assignment 1 names expert 3, but there are 3"),
            (dispatch(&[0, 1], 1, 0.0), "expected a finite number above 0, got 0"),
            (dispatch(&[0, 1], 1, -1.0), "got -1"),
            (dispatch(&[0, 1], 1, f64::NAN), "got NaN"),
            (dispatch(&[0, 1], 1, f64::INFINITY), "got inf"),
        ] {
            let message = error.unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let sorted = dispatch(&[0, 1], 1, 1.0).unwrap();
        assert!(matches!(
            sorted.zero_dropped(&mut [0.0f64; 3]),
            Err(MoeError::Length { expected: 2, got: 3, .. })
        ));
    }

    proptest! {
        #[test]
        fn every_kept_pair_has_a_place_of_its_own(
            (experts, top_k, chosen) in (1usize..9).prop_flat_map(|experts| {
                (Just(experts), 1..=experts).prop_flat_map(|(experts, top_k)| {
                    let all: Vec<u32> = (0..experts as u32).collect();
                    let token = proptest::sample::subsequence(all, top_k).prop_shuffle();
                    (Just(experts), Just(top_k), prop::collection::vec(token, 0..40))
                })
            }),
            factor in prop::option::of(0.1f64..3.0),
        ) {
            let chosen: Vec<u32> = chosen.concat();
            let tokens = chosen.len() / top_k;
            let capacity = factor.map_or(Capacity::Dropless, Capacity::Factor);
            let sorted = Dispatch::new(&chosen, top_k, experts, capacity).unwrap();
            let limit = capacity.tokens_per_expert_max(tokens, top_k, experts).unwrap();

            prop_assert_eq!(sorted.counts_wanted().iter().sum::<usize>(), tokens * top_k);
            prop_assert_eq!(sorted.counts().iter().sum::<usize>(), sorted.kept_count());
            prop_assert_eq!(sorted.kept_count() + sorted.dropped_count(), chosen.len());
            if factor.is_none() {
                prop_assert_eq!(sorted.dropped_count(), 0);
            }
            for expert in 0..experts {
                let places = sorted.offsets()[expert]..sorted.offsets()[expert + 1];
                prop_assert_eq!(places.len(), sorted.counts()[expert]);
                prop_assert!(places.len() <= limit);
                // Pairs are kept while there is room.
                prop_assert_eq!(places.len(), limit.min(sorted.counts_wanted()[expert]));
                let sources = &sorted.sources()[places.clone()];
                prop_assert!(sources.is_sorted_by(|a, b| a < b));
                for &pair in sources {
                    prop_assert_eq!(chosen[pair as usize] as usize, expert);
                }
                // Dropped pairs come after kept pairs.
                let last_kept = sources.last().copied();
                for (pair, &slot) in sorted.slots().iter().enumerate() {
                    if chosen[pair] as usize == expert && slot == DROPPED {
                        prop_assert!(last_kept.is_none_or(|last| last < pair as u32));
                    }
                }
            }
            let mut taken = vec![false; sorted.kept_count()];
            for (pair, &slot) in sorted.slots().iter().enumerate() {
                if slot != DROPPED {
                    prop_assert!(!std::mem::replace(&mut taken[slot as usize], true));
                    prop_assert_eq!(sorted.sources()[slot as usize] as usize, pair);
                }
            }
            prop_assert!(taken.into_iter().all(|taken| taken));
        }
    }
}
