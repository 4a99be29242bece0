//! Collectives by definition: every rank's numbers in, every rank's numbers out.

use deepwell_ir::ops::{CollectiveKind, Reduction};

/// Returns each rank's result of a collective from each rank's input, in the order of the group. A
/// send or receive has no result here.
///
/// # Panics
///
/// If slices are not whole, or a place is not in the group.
pub fn exchange(kind: &CollectiveKind, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let ranks = inputs.len();
    let slice = |whole: &[f64], position: usize| {
        let elements = whole.len() / ranks;
        whole[position * elements..(position + 1) * elements].to_vec()
    };
    let of_each = |make: &dyn Fn(usize) -> Vec<f64>| (0..ranks).map(make).collect();
    match *kind {
        CollectiveKind::AllReduce { reduction } => {
            let whole = reduce(reduction, inputs);
            of_each(&|_| whole.clone())
        }
        CollectiveKind::ReduceScatter { reduction } => {
            let whole = reduce(reduction, inputs);
            of_each(&|position| slice(&whole, position))
        }
        CollectiveKind::AllGather => of_each(&|_| inputs.concat()),
        CollectiveKind::AllToAll => {
            of_each(&|position| inputs.iter().flat_map(|input| slice(input, position)).collect())
        }
        CollectiveKind::Broadcast { root } => of_each(&|_| inputs[root as usize].clone()),
        CollectiveKind::Shift { by } => {
            let ranks = inputs.len();
            of_each(&|position| inputs[(position + ranks - by as usize) % ranks].clone())
        }
        CollectiveKind::Send { .. } | CollectiveKind::Recv { .. } => of_each(&|_| Vec::new()),
    }
}

fn reduce(reduction: Reduction, inputs: &[Vec<f64>]) -> Vec<f64> {
    let join = |numbers: Vec<f64>| match reduction {
        Reduction::Sum => numbers.iter().sum(),
        Reduction::Max if numbers.iter().any(|number| number.is_nan()) => f64::NAN,
        Reduction::Max => numbers.into_iter().fold(f64::NEG_INFINITY, f64::max),
    };
    let elements = inputs.first().map_or(0, Vec::len);
    (0..elements).map(|index| join(inputs.iter().map(|input| input[index]).collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    /// The op's derivative is that of the sum of all ranks' losses.
    #[test]
    fn the_reverse_of_a_collective_is_its_gradient() {
        let sum = Reduction::Sum;
        let (all_reduce, all_gather) =
            (CollectiveKind::AllReduce { reduction: sum }, CollectiveKind::AllGather);
        let reduce_scatter = CollectiveKind::ReduceScatter { reduction: sum };
        for ranks in [1u32, 2, 3] {
            let (shift, back) =
                (CollectiveKind::Shift { by: ranks - 1 }, CollectiveKind::Shift { by: 1 % ranks });
            for (kind, reverse) in [
                (&all_reduce, &all_reduce),
                (&reduce_scatter, &all_gather),
                (&all_gather, &reduce_scatter),
                (&CollectiveKind::AllToAll, &CollectiveKind::AllToAll),
                (&shift, &back),
            ] {
                let ranks = ranks as usize;
                let x = varied(ranks * 6, 1);
                let parts = |x: &[f64]| -> Vec<Vec<f64>> {
                    x.chunks_exact(6).map(<[f64]>::to_vec).collect()
                };
                let outputs = exchange(kind, &parts(&x));
                let douts: Vec<Vec<f64>> = (outputs.iter().enumerate())
                    .map(|(rank, output)| varied(output.len(), 2 + rank as u64))
                    .collect();
                let dx = exchange(reverse, &douts).concat();
                check("dx", &x, &dx, |x| {
                    let outputs = exchange(kind, &parts(x));
                    outputs.iter().zip(&douts).map(|(out, dout)| dot(out, dout)).sum()
                });
            }
        }
    }
}
