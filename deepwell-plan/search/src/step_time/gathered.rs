//! Weights gathered by data-parallel ranks, as lowered by Deepwell: FP32 masters, BF16 copies, or
//! quantized data with scales if the ranks' slices are whole blocks.

use super::Cost;
use crate::memory::StageLayers;
use deepwell_lower::counting::block_slice;

/// Bytes of quantized data and scales per element.
const PLANES: f64 = 1.0 + 1.0 / 32.0;

const COPIES: Gathered = Gathered { moved: 2.0, copied: 0.0 };
/// FP32 masters, from which each rank makes compute copies.
const MASTERS_OF_BF16: Gathered = Gathered { moved: 4.0, copied: 4.0 + 2.0 };
const MASTERS_OF_FP8: Gathered = Gathered { moved: 4.0, copied: 4.0 + 2.0 * PLANES };
/// NVFP4 has a scale of the whole tensor, so ranks gather masters in any ZeRO stage.
const MASTERS_OF_NVFP4: Gathered = Gathered { moved: 4.0, copied: 4.0 + 2.0 * (0.5 + 1.0 / 16.0) };

/// Bytes per parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Gathered {
    /// Bytes moved by the all-gather.
    pub(super) moved: f64,
    /// Bytes read and written by the kernels making copies of gathered weights.
    pub(super) copied: f64,
}

impl Gathered {
    pub(super) fn times(self, count: f64) -> Gathered {
        Gathered { moved: count * self.moved, copied: count * self.copied }
    }

    pub(super) fn plus(self, other: Gathered) -> Gathered {
        Gathered { moved: self.moved + other.moved, copied: self.copied + other.copied }
    }
}

impl Cost<'_> {
    /// Bytes for the layers of a stage: dense weights, and routed experts. `ranks` has the size of
    /// the gathering group of each.
    pub(super) fn gathered_layers(&self, held: &StageLayers, ranks: [usize; 2]) -> [Gathered; 2] {
        if self.rules.own_gather && self.rules.nvfp4.is_some() {
            return [MASTERS_OF_NVFP4; 2];
        }
        match (self.rules.own_gather, self.at.zero, self.rules.fp8) {
            (true, 0 | 1, false) => [MASTERS_OF_BF16; 2],
            (true, 0 | 1, true) => [MASTERS_OF_FP8; 2],
            (true, _, true) => [0, 1].map(|which| self.gathered_fp8(held, which, ranks[which])),
            _ => [COPIES; 2],
        }
    }

    /// Bytes for an embedding or the head, both in BF16.
    pub(super) fn gathered_table(&self) -> Gathered {
        let masters = self.rules.own_gather && self.at.zero < 2;
        if masters { MASTERS_OF_BF16 } else { COPIES }
    }

    /// Mean over the weights, weighted by parameters.
    fn gathered_fp8(&self, held: &StageLayers, which: usize, ranks: usize) -> Gathered {
        // Rowwise in the forward pass, columnwise in the backward pass.
        let planes = if self.at.zero >= 3 { PLANES } else { 2.0 * PLANES };
        let (dense, expert) = held.kinds(self.shape);
        let (mut sum, mut parameters) = (Gathered::default(), 0.0);
        for (layer, count) in [(0, dense), (self.shape.layers - 1, expert)] {
            for shape in &self.layer_weights(layer)[which] {
                let own = count as f64 * shape.iter().product::<usize>() as f64;
                let gathered = match block_slice(shape, ranks) {
                    Some(_) => Gathered { moved: planes, copied: planes },
                    None => MASTERS_OF_FP8,
                };
                sum = sum.plus(gathered.times(own));
                parameters += own;
            }
        }
        sum.times(1.0 / f64::max(parameters, 1.0))
    }

    /// Shapes of a layer's weights on one rank: dense weights, and stacks of routed experts.
    fn layer_weights(&self, layer: usize) -> [Vec<Vec<usize>>; 2] {
        let (shape, at) = (self.shape, self.at);
        let (hidden, tp) = (shape.hidden, at.tp);
        let gates = if shape.gated { 2 } else { 1 };
        let mut weights = match shape.latent {
            Some(latent) => {
                let q_in = if latent.q_rank > 0 { latent.q_rank } else { hidden };
                vec![
                    vec![latent.q_rank, hidden],
                    vec![shape.heads * (latent.qk_dim + latent.rope_dim) / tp, q_in],
                    vec![latent.kv_rank + latent.rope_dim, hidden],
                    vec![shape.heads * (latent.qk_dim + latent.v_dim) / tp, latent.kv_rank],
                    vec![hidden, shape.heads * latent.v_dim / tp],
                ]
            }
            None => {
                let of = |heads: usize| heads * shape.head_dim / tp;
                let kv = vec![of(shape.kv_heads), hidden];
                let (q, out) = (vec![of(shape.heads), hidden], vec![hidden, of(shape.heads)]);
                vec![q, kv.clone(), kv, out]
            }
        };
        let experts = shape.experts.filter(|_| shape.has_experts(layer));
        let ffn = experts.map_or(shape.ffn, |experts| experts.shared_ffn) / tp;
        weights.extend(std::iter::repeat_n(vec![ffn, hidden], gates));
        weights.push(vec![hidden, ffn]);
        let routed = experts.map_or_else(Vec::new, |experts| {
            let (held, ffn) = ((experts.experts / at.ep).max(1), experts.ffn / at.etp);
            let mut stacks = vec![vec![held, ffn, hidden]; gates];
            stacks.push(vec![held, hidden, ffn]);
            stacks
        });
        [weights, routed]
    }
}
