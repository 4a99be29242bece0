//! Sorts pairs of token and expert, as [`deepwell_moe`] defines.

use deepwell_ir::Op;
use deepwell_ir::ops::{Dispatch, DispatchToRanks, RowsOf};
use deepwell_moe::{Capacity, GroupedMaps, MoeError, RankMaps, group_from_ranks};

use crate::KernelError;
use crate::runtime::cpu::operands::{Operands, Run};

/// Sorts the pairs `chosen` `[tokens, top_k]` by expert.
///
/// # Errors
///
/// For an expert that does not exist, a bad capacity factor, or maps of another length.
pub fn dispatch(
    op: &Dispatch,
    chosen: &[i32],
    top_k: usize,
    maps: GroupedMaps<'_>,
) -> Result<(), MoeError> {
    if matches!(op.rows_of, RowsOf::Sent { .. }) {
        return group_from_ranks(chosen, op.grouped.groups, op.grouped.align, maps);
    }
    // A negative number becomes the number of a nonexistent expert.
    let chosen: Vec<u32> = chosen.iter().map(|&expert| expert as u32).collect();
    let capacity = op.capacity_factor.map_or(Capacity::Dropless, Capacity::Factor);
    let sorted = deepwell_moe::Dispatch::new(&chosen, top_k, op.experts(), capacity)?;
    sorted.write_grouped_here(op.here(), op.grouped.align, maps)
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Dispatch(op) = op else { return Err(operands.unknown_kernel()) };
    let (op, top_k) = (op.clone(), operands.shape(0)[1]);
    let chosen = operands.input::<i32>(0)?;
    let [offsets, load, rows, pairs] = [
        operands.target::<i32>(1)?,
        operands.target::<i32>(2)?,
        operands.target::<i32>(3)?,
        operands.target::<i32>(4)?,
    ];
    Ok(Box::new(move |arena| {
        let maps = GroupedMaps {
            offsets: offsets.of(arena),
            load: load.of(arena),
            rows: rows.of(arena),
            pairs: pairs.of(arena),
        };
        dispatch(&op, chosen.of(arena), top_k, maps).map_err(|error| error.to_string())
    }))
}

/// Sorts the pairs `chosen` `[tokens, top_k]` by the rank of their experts.
///
/// # Errors
///
/// For an expert that does not exist, a bad capacity factor, or maps of another length.
pub fn dispatch_to_ranks(
    op: &DispatchToRanks,
    chosen: &[i32],
    top_k: usize,
    maps: RankMaps<'_>,
) -> Result<(), MoeError> {
    let chosen: Vec<u32> = chosen.iter().map(|&expert| expert as u32).collect();
    let capacity = op.capacity_factor.map_or(Capacity::Dropless, Capacity::Factor);
    let sorted = deepwell_moe::Dispatch::new(&chosen, top_k, op.experts, capacity)?;
    sorted.write_for_ranks(op.ranks, maps)
}

pub(super) fn prepare_to_ranks(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::DispatchToRanks(op) = op else { return Err(operands.unknown_kernel()) };
    let (op, top_k) = (op.clone(), operands.shape(0)[1]);
    let chosen = operands.input::<i32>(0)?;
    let [rows, load, pairs, wanted] = [
        operands.target::<i32>(1)?,
        operands.target::<i32>(2)?,
        operands.target::<i32>(3)?,
        operands.target::<i32>(4)?,
    ];
    Ok(Box::new(move |arena| {
        let maps = RankMaps {
            rows: rows.of(arena),
            load: load.of(arena),
            pairs: pairs.of(arena),
            wanted: wanted.of(arena),
        };
        dispatch_to_ranks(&op, chosen.of(arena), top_k, maps).map_err(|error| error.to_string())
    }))
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::GroupedRows;
    use deepwell_ir::{DType, Dim, OpRule, Shape, TensorType};
    use proptest::prelude::*;

    use super::*;
    use crate::ops::dispatch::oracle::{self, Grouped};
    use crate::runtime::cpu::test_support::Random;

    fn sort(op: &Dispatch, chosen: &[i32], top_k: usize) -> Grouped {
        let tokens = Dim::fixed(chosen.len() / top_k);
        let types =
            [TensorType { shape: Shape(vec![tokens, Dim::fixed(top_k)]), dtype: DType::I32 }];
        let outputs = op.infer(&types).unwrap();
        let length =
            |index: usize| -> usize { outputs[index].shape.as_fixed().unwrap().iter().product() };
        let [mut offsets, mut load, mut rows, mut pairs] =
            [0, 1, 2, 3].map(|index| vec![7; length(index)]);
        let maps = GroupedMaps {
            offsets: &mut offsets,
            load: &mut load,
            rows: &mut rows,
            pairs: &mut pairs,
        };
        dispatch(op, chosen, top_k, maps).unwrap();
        Grouped { offsets, load, rows, pairs }
    }

    /// The most pairs of an expert. The factors are multiplied in the order of the definition,
    /// because the rounding of the result depends on the order.
    fn capacity(factor: Option<f64>, tokens: usize, top_k: usize, experts: usize) -> usize {
        let share = |factor: f64| factor * tokens as f64 * top_k as f64 / experts as f64;
        factor.map_or(usize::MAX, |factor| share(factor).ceil() as usize)
    }

    /// Compares with the oracle, with a buffer of the op's length.
    fn check(chosen: &[i32], top_k: usize, experts: usize, align: usize, factor: Option<f64>) {
        let grouped = GroupedRows::new(experts, align);
        let op = Dispatch { grouped, capacity_factor: factor, rows_of: RowsOf::All };
        let got = sort(&op, chosen, top_k);
        let rows = got.pairs.len();
        assert!(rows.is_multiple_of(align));
        let capacity = capacity(factor, chosen.len() / top_k, top_k, experts);
        assert_eq!(got, oracle::forward(chosen, experts, align, capacity, rows));
    }

    /// [`check`] for ranks with some of the experts each.
    fn check_here(chosen: &[i32], top_k: usize, experts: usize, align: usize) {
        for ranks in [1, 2, 3, 4].into_iter().filter(|&ranks| experts.is_multiple_of(ranks)) {
            let grouped = GroupedRows::new(experts / ranks, align);
            for first in (0..experts).step_by(grouped.groups) {
                let rows_of = RowsOf::Here { first, experts };
                let op = Dispatch { grouped, capacity_factor: None, rows_of };
                let got = sort(&op, chosen, top_k);
                let expected = oracle::here(chosen, experts, op.here(), align, got.pairs.len());
                assert_eq!(got, expected, "{experts} {top_k} {align}: {:?}", op.here());
            }
        }
    }

    #[test]
    fn matches_the_oracle() {
        for (experts, top_k) in [(1, 1), (3, 2), (8, 2), (33, 6)] {
            for tokens in [0, 1, 31, 32, 33, 127, 129] {
                let mut random = Random::new(tokens as u64);
                let mut token = || {
                    let first = random.below(experts);
                    (0..top_k).map(move |choice| ((first + choice) % experts) as i32)
                };
                let spread: Vec<i32> = (0..tokens).flat_map(|_| token()).collect();
                // All on the first expert, all on the last; with one expert between, both stay
                // empty.
                let all_on = |expert: usize| -> Vec<i32> {
                    let of_token = (0..top_k).map(|choice| ((expert + choice) % experts) as i32);
                    of_token.cycle().take(tokens * top_k).collect()
                };
                for chosen in [spread, all_on(0), all_on(experts - 1), all_on(experts / 2)] {
                    for align in [1, 32, 128] {
                        for factor in [None, Some(0.3), Some(1.0), Some(2.0)] {
                            check(&chosen, top_k, experts, align, factor);
                        }
                        check_here(&chosen, top_k, experts, align);
                    }
                }
            }
        }
    }

    #[test]
    fn rows_for_ranks_match_the_oracle() {
        for (experts, top_k, ranks) in [(8, 2, 2), (8, 3, 4), (4, 2, 4), (6, 1, 3)] {
            for (tokens, spread) in [(0, 1), (1, 8), (33, 1), (33, 8), (127, 3)] {
                let mut random = Random::new(tokens as u64);
                let mut token = || {
                    let first = random.below(spread);
                    (0..top_k).map(move |choice| ((first + choice) % experts) as i32)
                };
                let chosen: Vec<i32> = (0..tokens).flat_map(|_| token()).collect();
                for factor in [None, Some(0.3), Some(1.0)] {
                    let op = DispatchToRanks { experts, ranks, capacity_factor: factor };
                    check_sent(&op, &chosen, top_k, 32);
                }
            }
        }
    }

    /// For ranks with the same `chosen` `[tokens, top_k]`: checks how the first rank sorts the rows
    /// that all ranks send to it.
    fn check_sent(op: &DispatchToRanks, chosen: &[i32], top_k: usize, align: usize) {
        let DispatchToRanks { experts, ranks, capacity_factor } = *op;
        let tokens = Dim::fixed(chosen.len() / top_k);
        let rows = op.rows(tokens, top_k).as_fixed().unwrap();
        let capacity = capacity(capacity_factor, chosen.len() / top_k, top_k, experts);
        let slab = rows / ranks;
        let sent = oracle::to_ranks(chosen, top_k, experts, ranks, capacity, slab);
        let mut got = oracle::ForRanks {
            rows: vec![7; chosen.len()],
            load: vec![7; 2 * experts],
            pairs: vec![7; rows],
            wanted: vec![7; rows * top_k],
        };
        let maps = RankMaps {
            rows: &mut got.rows,
            load: &mut got.load,
            pairs: &mut got.pairs,
            wanted: &mut got.wanted,
        };
        dispatch_to_ranks(op, chosen, top_k, maps).unwrap();
        assert_eq!(got, sent);
        let received = sent.wanted[..slab * top_k].repeat(ranks);
        let rows_of = RowsOf::Sent { of_expert: op.capacity(tokens, top_k).times(ranks) };
        let grouped = GroupedRows::new(experts / ranks, align);
        let of_received = Dispatch { grouped, capacity_factor: None, rows_of };
        let got = sort(&of_received, &received, top_k);
        let buffer = got.pairs.len();
        assert_eq!(got, oracle::forward(&received, experts / ranks, align, usize::MAX, buffer));
    }

    proptest! {
        /// With a capacity, a buffer has rows for all kept pairs for any choices of the tokens, and
        /// the dropped pairs are those of the oracle, which asserts that the rows suffice.
        #[test]
        fn limited_buffers_are_long_enough(
            tokens in 0_usize..200,
            (experts, top_k, ranks) in prop::sample::select(vec![
                (1, 1, 1), (8, 1, 2), (8, 2, 4), (8, 8, 8), (6, 4, 2), (33, 6, 3),
            ]),
            factor in prop_oneof![0.001..0.2, 0.2..3.0, 3.0..100.0, Just(1.0), Just(1.1)],
            align in prop::sample::select(vec![1, 32, 128]),
            // A token's first choice is among this many experts.
            spread in 1_usize..34,
            seed in any::<u64>(),
        ) {
            let mut random = Random::new(seed);
            let mut token = || {
                let first = random.below(spread);
                (0..top_k).map(move |choice| ((first + choice) % experts) as i32)
            };
            let chosen: Vec<i32> = (0..tokens).flat_map(|_| token()).collect();
            check(&chosen, top_k, experts, align, Some(factor));
            let op = DispatchToRanks { experts, ranks, capacity_factor: Some(factor) };
            check_sent(&op, &chosen, top_k, align);
        }
    }

    #[test]
    fn an_expert_that_does_not_exist_is_refused() {
        let grouped = GroupedRows::new(2, 1);
        for expert in [-1, 2] {
            let maps = GroupedMaps {
                offsets: &mut [0; 3],
                load: &mut [0; 4],
                rows: &mut [0; 2],
                pairs: &mut [0; 2],
            };
            let op = Dispatch { grouped, capacity_factor: None, rows_of: RowsOf::All };
            let error = dispatch(&op, &[0, expert], 1, maps);
            assert!(matches!(error, Err(MoeError::ExpertOutOfRange { index: 1, .. })), "{error:?}");
        }
    }
}
