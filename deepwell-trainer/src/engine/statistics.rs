//! Quantization statistics of all ranks in a step, in the order of a single rank.

use std::cmp::Reverse;

use deepwell_ir::Phase;
use deepwell_precision::{ElementFormat, QuantStats};

use super::{Engine, ExpertLoad, OperandStats};
use crate::TrainError;

/// Phases, in the order of their codes between ranks.
const PHASES: [Phase; 5] =
    [Phase::Forward, Phase::Backward, Phase::WeightGradients, Phase::Optimizer, Phase::Weights];

/// Words per operand in a message, in addition to the GEMMs that read the operand.
const WORDS: usize = 13;

/// Statistics of an operand in a pass.
#[derive(Clone, Debug, PartialEq)]
struct Counted {
    micro_batch: u32,
    phase: Phase,
    /// Chunk of the stage.
    chunk: u32,
    operand: OperandStats,
}

impl Counted {
    fn to_words(&self) -> impl Iterator<Item = u64> {
        let Counted { micro_batch, phase, chunk, operand } = self;
        let OperandStats { gemms, element, has_tensor_scale, stats, is_transformed } = operand;
        let QuantStats { amax, elements, underflows, saturations, scale_clamps, nonfinite } =
            *stats;
        let phase = PHASES.iter().position(|it| it == phase).unwrap_or(0) as u64;
        let amax = u64::from(amax.to_bits());
        let place = [u64::from(*micro_batch), phase, u64::from(*chunk)];
        let element = ElementFormat::ALL.iter().position(|it| it == element).unwrap_or(0) as u64;
        let format = [element, u64::from(*has_tensor_scale)];
        let counters = [amax, elements, underflows, saturations, scale_clamps, nonfinite];
        let gemms = gemms.iter().map(|&gemm| gemm as u64);
        let rest = [u64::from(*is_transformed), gemms.len() as u64];
        place.into_iter().chain(counters).chain(format).chain(rest).chain(gemms)
    }

    /// Decodes a rank's message, operand by operand.
    fn all_of_words(mut words: &[u64]) -> Vec<Counted> {
        let mut all = Vec::new();
        while let Some((fields, rest)) = words.split_at_checked(WORDS) {
            let (gemms, rest) = rest.split_at((fields[12] as usize).min(rest.len()));
            let stats = QuantStats {
                amax: f32::from_bits(fields[3] as u32),
                elements: fields[4],
                underflows: fields[5],
                saturations: fields[6],
                scale_clamps: fields[7],
                nonfinite: fields[8],
            };
            let gemms = gemms.iter().map(|&gemm| gemm as usize).collect();
            all.push(Counted {
                micro_batch: fields[0] as u32,
                phase: PHASES[fields[1] as usize % PHASES.len()],
                chunk: fields[2] as u32,
                operand: OperandStats {
                    gemms,
                    element: ElementFormat::ALL[fields[9] as usize % ElementFormat::ALL.len()],
                    has_tensor_scale: fields[10] == 1,
                    stats,
                    is_transformed: fields[11] == 1,
                },
            });
            words = rest;
        }
        all
    }
}

/// Orders the statistics of pipeline stages like those of a single rank with all layers: forward in
/// the order of the stages, backward in reverse, micro-batch by micro-batch, and the weights at the
/// end, one by one. Chunk `c` of stage `s` is stage `c · stages + s` of the model.
fn as_one_rank(stages: Vec<Vec<Counted>>) -> Vec<Counted> {
    let count = stages.len();
    let of_stage = |(stage, counted): (usize, Vec<Counted>)| {
        let with_stage = move |it: Counted| (it.chunk as usize * count + stage, it);
        counted.into_iter().map(with_stage).collect::<Vec<_>>()
    };
    let mut all: Vec<(usize, Counted)> =
        stages.into_iter().enumerate().flat_map(of_stage).collect();
    all.sort_by_key(|(stage, it)| {
        let backwards = (it.phase == Phase::Backward).then_some(Reverse(*stage));
        let is_weights = it.phase == Phase::Weights;
        let weight = is_weights.then(|| it.operand.gemms.first().copied());
        (is_weights, weight, it.micro_batch, it.phase, backwards, *stage)
    });
    all.into_iter().map(|(_, it)| it).collect()
}

impl Engine {
    /// [`Engine::statistics`] of all ranks together, operand by operand, equal on all ranks.
    ///
    /// # Errors
    /// A rank has failed.
    pub fn statistics_of_ranks(&mut self) -> Result<Vec<OperandStats>, TrainError> {
        Ok(self.statistics_by_phase()?.into_iter().map(|(_, operand)| operand).collect())
    }

    /// [`Engine::statistics_of_ranks`] with the phase that quantized each operand.
    ///
    /// # Errors
    /// A rank has failed.
    pub(crate) fn statistics_by_phase(&mut self) -> Result<Vec<(Phase, OperandStats)>, TrainError> {
        let passes = self.passes_of_statistics().iter();
        let local = self.statistics().iter().cloned().zip(passes);
        if self.peers.world_size() == 1 {
            return Ok(local.map(|(operand, &(_, phase, _))| (phase, operand)).collect());
        }
        let local = local.map(|(operand, &(micro_batch, phase, chunk))| Counted {
            micro_batch,
            phase,
            chunk,
            operand,
        });
        let words: Vec<u64> =
            local.flat_map(|counted| counted.to_words().collect::<Vec<_>>()).collect();
        let parallel = self.plan.parallel;
        let mut stages: Vec<Vec<Counted>> = vec![Vec::new(); parallel.pipeline];
        for (rank, words) in self.peers.gather_any(&words)?.iter().enumerate() {
            let of_stage = &mut stages[parallel.pipeline_place(rank)];
            let theirs = Counted::all_of_words(words);
            if of_stage.is_empty() {
                *of_stage = theirs;
                continue;
            }
            for (sum, other) in of_stage.iter_mut().zip(theirs) {
                sum.operand.stats.merge(&other.operand.stats);
            }
        }
        Ok(as_one_rank(stages).into_iter().map(|it| (it.phase, it.operand)).collect())
    }

    /// [`Engine::expert_loads`] of all stages of this rank's pipeline, by layer.
    ///
    /// # Errors
    /// A rank has failed.
    pub(crate) fn expert_loads_of_stages(&mut self) -> Result<Vec<ExpertLoad>, TrainError> {
        let own = self.expert_loads().to_vec();
        let parallel = self.plan.parallel;
        if parallel.pipeline == 1 {
            return Ok(own);
        }
        let words = |load: &ExpertLoad| -> Vec<u64> {
            let ExpertLoad { layer, chosen, dropped, rows_used, rows_planned } = load;
            let count = chosen.len() as u64;
            let head = [u64::from(*layer), *dropped, *rows_used, *rows_planned, count];
            head.into_iter().chain(chosen.iter().copied()).collect()
        };
        let own: Vec<u64> = own.iter().flat_map(words).collect();
        let rank = self.rank();
        let is_of_pipeline = |other: &usize| {
            parallel.data_place(*other) == parallel.data_place(rank)
                && parallel.tensor_place(*other) == parallel.tensor_place(rank)
        };
        let mut loads = Vec::new();
        let all = self.peers.gather_any(&own)?;
        for (_, words) in all.iter().enumerate().filter(|(other, _)| is_of_pipeline(other)) {
            let mut rest = words.as_slice();
            while let [layer, dropped, rows_used, rows_planned, count, others @ ..] = rest {
                let (chosen, behind) = others.split_at((*count as usize).min(others.len()));
                let (layer, chosen) = (*layer as u32, chosen.to_vec());
                let (dropped, rows_used, rows_planned) = (*dropped, *rows_used, *rows_planned);
                loads.push(ExpertLoad { layer, chosen, dropped, rows_used, rows_planned });
                rest = behind;
            }
        }
        Ok(loads)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn stages_count_as_one_rank_does() {
        let counted = |phase, micro_batch, gemm: usize| Counted {
            micro_batch,
            phase,
            chunk: 0,
            operand: OperandStats {
                gemms: Arc::from([gemm, gemm + 7]),
                element: ElementFormat::ALL[gemm % ElementFormat::ALL.len()],
                has_tensor_scale: gemm % 2 == 1,
                stats: QuantStats { elements: 1 + gemm as u64, ..QuantStats::default() },
                is_transformed: gemm == 1,
            },
        };
        let [forward, backward, weights] = [Phase::Forward, Phase::Backward, Phase::Weights];
        // The first stage is one micro-batch ahead.
        let first = vec![
            counted(forward, 0, 0),
            counted(forward, 1, 0),
            counted(backward, 0, 0),
            counted(backward, 1, 0),
            counted(weights, 0, 0),
        ];
        let second = vec![
            counted(forward, 0, 1),
            counted(forward, 0, 2),
            counted(backward, 0, 2),
            counted(backward, 0, 1),
            counted(forward, 1, 1),
            counted(backward, 1, 1),
            counted(weights, 0, 1),
        ];
        let got: Vec<(Phase, u32, usize)> = as_one_rank(vec![first.clone(), second])
            .iter()
            .map(|it| (it.phase, it.micro_batch, it.operand.gemms[0]))
            .collect();
        let expected = [
            (forward, 0, 0),
            (forward, 0, 1),
            (forward, 0, 2),
            (backward, 0, 2),
            (backward, 0, 1),
            (backward, 0, 0),
            (forward, 1, 0),
            (forward, 1, 1),
            (backward, 1, 1),
            (backward, 1, 0),
            (weights, 0, 0),
            (weights, 0, 1),
        ];
        assert_eq!(got, expected);
        let words: Vec<u64> = first.iter().flat_map(Counted::to_words).collect();
        assert_eq!(Counted::all_of_words(&words), first);
    }
}
