//! Layers that section `moe` times: a mixture of experts, and a dense feed-forward block with the
//! same FLOPs.

use std::fmt;
use std::str::FromStr;

use deepwell_ir::ops::{
    self, Embedding, ExpertActivation, Experts, LinearCrossEntropy, Route, RouteScore, RouterLogits,
};
use deepwell_ir::{
    Dim, Graph, GraphBuilder, Init, IrError, KernelCatalog, PrecisionPolicy, Program, Recompute,
    Role, Shape, Tag, Target, TensorId,
};
use deepwell_plan::{OptimizerSpec, Parallel, Plan, lower};
use serde::{Deserialize, Serialize};

use deepwell_trainer::TrainError;

/// Standard deviation of the weights.
const STD: f64 = 0.02;
/// Size of the vocabulary.
const VOCABULARY: usize = 64;
/// Index of the layer; calls outside of the layer have no index.
const LAYER: u32 = 0;
/// Prefix of the names of parameters that a policy quantizes.
const GEMM: &str = "gemm";

/// The sizes of a mixture of experts, as text `EXPERTSxWIDTHxHIDDENxTOP_K`.
///
/// ```
/// use deepwell_bench::MixtureSize;
///
/// let size: MixtureSize = "64x1408x2048x6".parse()?;
/// assert_eq!((size.experts, size.width, size.hidden, size.top_k), (64, 1408, 2048, 6));
/// assert_eq!(size.to_string(), "64x1408x2048x6");
/// assert!("8x64x32x9".parse::<MixtureSize>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixtureSize {
    /// Experts.
    pub experts: usize,
    /// Width of an expert.
    pub width: usize,
    /// Width of a token.
    pub hidden: usize,
    /// Experts of a token.
    pub top_k: usize,
}

impl fmt::Display for MixtureSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}x{}", self.experts, self.width, self.hidden, self.top_k)
    }
}

impl FromStr for MixtureSize {
    type Err = String;

    fn from_str(text: &str) -> Result<MixtureSize, String> {
        let sizes: Option<Vec<usize>> =
            text.split('x').map(|size| size.parse().ok().filter(|&size| size > 0)).collect();
        let expected = "expected EXPERTSxWIDTHxHIDDENxTOP_K, such as 64x1408x2048x6";
        let Some(&[experts, width, hidden, top_k]) = sizes.as_deref() else {
            return Err(format!("{expected}, got `{text}`"));
        };
        // The first elements of a token are its logits here.
        if top_k > experts || experts > hidden {
            return Err(format!(
                "{expected}, with TOP_K at most EXPERTS and these at most HIDDEN, got `{text}`"
            ));
        }
        Ok(MixtureSize { experts, width, hidden, top_k })
    }
}

impl MixtureSize {
    /// Sizes of DeepSeek-V2-Lite, Qwen3-30B-A3B and Mixtral-8x7B; on a CPU one small size.
    pub fn defaults(is_gpu: bool) -> Vec<MixtureSize> {
        let size = |experts, width, hidden, top_k| MixtureSize { experts, width, hidden, top_k };
        match is_gpu {
            true => vec![size(64, 1408, 2048, 6), size(128, 768, 2048, 8), size(8, 14336, 4096, 2)],
            false => vec![size(8, 64, 128, 2)],
        }
    }
}

/// A feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    /// Router and experts.
    Mixture,
    /// One block as wide as the experts of a token together: the same FLOPs except the router's.
    Dense,
}

impl Layer {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Layer::Mixture => "moe layer",
            Layer::Dense => "dense layer",
        }
    }
}

/// Plans the training step of a model of only this layer, between an embedding and an output head.
///
/// # Errors
/// The precision is unknown, or the layer has no kernels on `target`.
pub(super) fn step(
    layer: Layer,
    size: MixtureSize,
    tokens: usize,
    precision: &str,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, TrainError> {
    // The only layer is both the first and the last linear layer; the policy treats it as neither.
    let policy = PrecisionPolicy::preset(precision)?;
    let policy = policy.clone().with_rule(&format!("{GEMM}.*"), policy.format())?;
    let plan = Plan {
        model: layer.name().to_string(),
        device: target.arch.clone(),
        arch: target.arch.clone(),
        seq: tokens,
        micro_batch: 1,
        micro_batches: 1,
        recompute: Recompute::None,
        saved_activations: Default::default(),
        policy,
        precision: Vec::new(),
        kernels: Vec::new(),
        optimizer: OptimizerSpec::default(),
        bucket_bytes: Plan::BUCKET_BYTES,
        capacity_factor: None,
        measures_products: false,
        one_stream: false,
        parallel: Parallel::default(),
        stages: Vec::new(),
        tuned: Vec::new(),
    };
    Ok(lower(&graph(layer, size)?, &plan, catalog, target)?)
}

/// Whether a call belongs to the layer.
pub(super) fn is_of_layer(call: &deepwell_ir::Call) -> bool {
    call.layer == Some(LAYER)
}

fn graph(layer: Layer, size: MixtureSize) -> Result<Graph, IrError> {
    let MixtureSize { experts, width, hidden, top_k } = size;
    let init = Init::Normal { std: STD };
    let mut b = GraphBuilder::new(layer.name());
    let tokens = b.tokens();
    let targets = b.targets();
    let loss_scale = b.loss_scale();
    let of_ends = |rows: usize| Shape::new([rows, hidden]);
    let table = b.parameter("embedding", of_ends(VOCABULARY), init, Role::Embedding);
    let head = b.parameter("head", of_ends(VOCABULARY), init, Role::Head);
    let x = b.op("embed", Embedding::default(), &[tokens, table])?[0];
    let weight = |b: &mut GraphBuilder, name: &str, shape: &[usize], role| -> TensorId {
        let shape = Shape(shape.iter().map(|&size| Dim::fixed(size)).collect());
        b.parameter(name, shape, init, role)
    };
    let y = match layer {
        Layer::Mixture => {
            b.scope(Tag::Router, Some(LAYER));
            let router = weight(&mut b, "router", &[experts, hidden], Role::Router);
            let logits = b.op("logits", RouterLogits { bias: false }, &[x, router])?[0];
            let route = Route {
                experts,
                top_k,
                score: RouteScore::Softmax,
                normalize: true,
                scaling: 1.0,
                groups: None,
                selection_bias: false,
            };
            let chosen = b.op("route", route, &[logits])?;
            b.scope(Tag::Experts, Some(LAYER));
            let mut inputs = vec![x, chosen[0], chosen[1]];
            for (name, rows, columns) in
                [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)]
            {
                let name = format!("{GEMM}.{name}");
                inputs.push(weight(&mut b, &name, &[experts, rows, columns], Role::Expert));
            }
            let activation = ExpertActivation::SwiGlu;
            let op = Experts { activation, bias: false, capacity_factor: None };
            b.op("experts", op, &inputs)?[0]
        }
        Layer::Dense => {
            b.scope(Tag::Mlp, Some(LAYER));
            let width = width * top_k;
            let linear = |b: &mut GraphBuilder, name: &str, x, rows, columns| {
                let weight = weight(b, &format!("{GEMM}.{name}"), &[rows, columns], Role::Linear);
                b.op(name, ops::Linear { bias: false }, &[x, weight])
            };
            let gate = linear(&mut b, "gate", x, width, hidden)?[0];
            let up = linear(&mut b, "up", x, width, hidden)?[0];
            let activated = b.op("swiglu", ops::SwiGlu {}, &[gate, up])?[0];
            linear(&mut b, "down", activated, hidden, width)?[0]
        }
    };
    b.scope(Tag::Head, None);
    b.op("loss", LinearCrossEntropy {}, &[y, head, targets, loss_scale])?;
    b.finish()
}
