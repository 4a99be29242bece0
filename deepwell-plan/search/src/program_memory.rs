//! Memory of the programs of a plan, by lowering a few of its layers.
//!
//! Every layer of a kind adds the same bytes to a program: persistent values, and activations kept
//! by each micro-batch in flight. So a stage's program is lowered with a few layers of each kind,
//! and once more with additional layers of each kind; the differences are extrapolated to all
//! layers and to the micro-batches in flight. The lowered programs do not depend on the length of
//! the pipeline, and are cached for other plans.

mod few_layers;
mod landmarks;
mod layers;
mod parts;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use deepwell_ir::{Graph, IrError, KernelCatalog, PrecisionPolicy, Recompute, Target, keep_layers};

use self::few_layers::{Chunks, FewLayers, More};
use self::layers::Layers;
pub use self::parts::ProgramBytes;
use self::parts::{InFlight, Parts};
use crate::memory::StageLayers;
use crate::{ModelShape, Strategy};
use deepwell_lower::SharedGraph;
use deepwell_lower::counting::base_plan;
use deepwell_lower::counting::orders_of;
use deepwell_lower::counting::{Counted, Differentiated, fallback_plan};
use deepwell_lower::schedule::{handovers, in_flight};
use deepwell_lower::{Parallel, Plan, PlanError, PlanRequest};

/// Micro-batches per stage after which a schedule has reached its maximum in flight.
const MICRO_BATCHES_OF_STAGE: usize = 4;

/// Lowers programs of few layers, and caches their memory.
pub struct ProgramMemory<'a> {
    /// The model.
    pub graph: &'a Graph,
    /// Sequences, policy and optimizer; micro-batch and recomputation are given by each plan.
    pub request: &'a PlanRequest,
    /// The kernels.
    pub catalog: &'a dyn KernelCatalog,
    /// The device of a single rank.
    pub alone: Target,
    /// The device of a rank in a group.
    pub among_ranks: Target,
    layers: Layers,
    /// Models with few layers, by the layers kept.
    models: RefCell<HashMap<Vec<usize>, Rc<FewLayersModel>>>,
    lowered: RefCell<HashMap<Key, Rc<LoweredStages>>>,
    known: RefCell<HashMap<(Key, bool), Known>>,
    in_flight: RefCell<HashMap<Pipeline, Rc<Vec<InFlight>>>>,
}

type Known = Result<Rc<Growth>, Rc<PlanError>>;

/// Pipeline degrees and schedule only, and micro-batches.
type Pipeline = (Parallel, usize);

/// Everything that determines the programs of few layers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    parallel: Parallel,
    stage: usize,
    /// Number of layers of each kind, for each chunk.
    chunks: Vec<Vec<usize>>,
    micro_batch: usize,
    micro_batches: usize,
    recompute: Recompute,
    one_stream: bool,
    on_host: bool,
    growing: Vec<Option<More>>,
}

/// Memory of a stage with few layers, and the increase for additional layers of each kind.
struct Growth {
    base: Parts,
    /// The stage's layers of each kind, by chunk.
    layers: Vec<Vec<usize>>,
    /// For each kind: the additional layers, and the memory with these.
    more: Vec<Option<(More, Parts)>>,
}

/// Programs of a stage with few layers, and with additional layers of each kind.
struct LoweredStages {
    base: LoweredStage,
    layers: Vec<Vec<usize>>,
    more: Vec<Option<(More, LoweredStage)>>,
}

/// The model with few layers, and its policy.
struct FewLayersModel {
    graph: Graph,
    policy: PrecisionPolicy,
}

/// Inputs of a lowered program, reused to lower the BF16 fallback.
struct LoweredStage {
    model: Rc<FewLayersModel>,
    differentiated: Rc<Differentiated>,
    plan: Plan,
    target: Target,
    counted: Counted,
}

impl<'a> ProgramMemory<'a> {
    /// Memory of programs of `graph` on `among_ranks`, or on `alone` for a single rank.
    pub fn new(
        graph: &'a Graph,
        request: &'a PlanRequest,
        catalog: &'a dyn KernelCatalog,
        [alone, among_ranks]: [Target; 2],
    ) -> ProgramMemory<'a> {
        let layers = Layers::of(graph, &request.policy);
        let (models, lowered, known, in_flight) = Default::default();
        ProgramMemory {
            graph,
            request,
            catalog,
            alone,
            among_ranks,
            layers,
            models,
            lowered,
            known,
            in_flight,
        }
    }

    /// The trainer's plan for a strategy.
    ///
    /// # Errors
    /// A strategy unsupported by the trainer, as [`Strategy::parallel`].
    pub fn plan_of(&self, shape: &ModelShape, at: &Strategy) -> Result<Plan, PlanError> {
        let parallel = at.parallel()?;
        let recompute = at.recompute.of_trainer();
        let (micro_batch, micro_batches) = (at.micro_batch, at.micro_batches);
        let stages = at.layers_of_stages(shape);
        let mut base = base_plan(self.graph, self.request, self.target(parallel));
        base.optimizer.on_host = at.offload;
        Ok(Plan { parallel, recompute, micro_batch, micro_batches, stages, ..base })
    }

    /// Bytes of the first rank of each stage of a strategy; `None` if a stage exceeds
    /// `limit_bytes`. On a device with streams, one stream is used if several streams exceed the
    /// limit.
    ///
    /// # Errors
    /// A strategy unsupported by the trainer, or a model without lowerable programs.
    pub fn of_strategy(
        &self,
        shape: &ModelShape,
        at: &Strategy,
        limit_bytes: u64,
    ) -> Result<Option<Vec<ProgramBytes>>, PlanError> {
        let plan = self.plan_of(shape, at)?;
        // Smallest memory first: most requested plans do not fit.
        let one_stream = Plan { one_stream: true, ..plan.clone() };
        if limit_bytes < u64::MAX && self.within(&one_stream, limit_bytes, false)?.is_none() {
            return Ok(None);
        }
        if !plan.has_one_stream() && self.alone.arch != "cpu" {
            let on_several = self.within(&plan, limit_bytes, true)?;
            if on_several.is_some() {
                return Ok(on_several);
            }
        }
        self.within(&one_stream, limit_bytes, true)
    }

    /// Transient bytes of the layers on the first stage of a strategy, with room for BF16 fallback.
    /// Fast, because all plans with the same division of layers share the programs.
    ///
    /// # Errors
    /// As [`ProgramMemory::of_strategy`].
    pub fn within_step(&self, shape: &ModelShape, at: &Strategy) -> Result<f64, PlanError> {
        let layers = self.layers.kinds.len();
        if layers < 6 {
            return Ok(0.0);
        }
        let plan = self.plan_of(shape, at)?;
        let Parallel { context, tensor, expert, .. } = plan.parallel;
        // The fewest ranks with this division of layers.
        let data = (context..=context * expert)
            .step_by(context)
            .find(|data| (data * tensor).is_multiple_of(expert));
        let data = data.unwrap_or(context * expert);
        let parallel = Parallel { context, tensor, expert, pipeline: 3, ..Parallel::data(data) };
        // A middle stage, without embedding and head.
        let parts = |own: usize| -> Result<Rc<Growth>, PlanError> {
            let first = (layers - own) / 2;
            let stages = vec![first, own, layers - own - first];
            let (micro_batch, micro_batches, one_stream) = (1, 6, true);
            let small =
                Plan { parallel, stages, micro_batch, micro_batches, one_stream, ..plan.clone() };
            self.growth(&small, 1, &Chunks::of(&small, 1, &self.layers), true)
        };
        let (two, three) = (parts(2)?, parts(3)?);
        let own = Chunks::of(&plan, 0, &self.layers);
        let largest = own.counts.iter().map(|counts| counts.iter().sum::<usize>()).max();
        let further = largest.unwrap_or(0).saturating_sub(2);
        let mut parts = two.base.clone();
        parts.grow(&two.base, &three.base, [0, further], 1);
        let slots = self.in_flight(&plan)?[0].slots;
        Ok(parts.within_step(&InFlight { slots, places: 0 }) as f64 * plan.micro_batch as f64)
    }

    /// `with_fallback` adds room for GEMMs with BF16 fallback.
    fn within(
        &self,
        plan: &Plan,
        limit_bytes: u64,
        with_fallback: bool,
    ) -> Result<Option<Vec<ProgramBytes>>, PlanError> {
        let in_flight = self.in_flight(plan)?;
        let mut stages = Vec::with_capacity(plan.parallel.pipeline);
        for (stage, in_flight) in in_flight.iter().enumerate() {
            let chunks = Chunks::of(plan, stage, &self.layers);
            let growth = self.growth(plan, stage, &chunks, with_fallback)?;
            let bytes = growth.extended(&chunks).bytes(in_flight);
            if bytes.peak() > limit_bytes {
                return Ok(None);
            }
            stages.push(bytes);
        }
        Ok(Some(stages))
    }

    fn target(&self, parallel: Parallel) -> &Target {
        if parallel.is_single() { &self.alone } else { &self.among_ranks }
    }

    /// Micro-batches and received messages in flight on each stage.
    fn in_flight(&self, plan: &Plan) -> Result<Rc<Vec<InFlight>>, PlanError> {
        let Parallel { pipeline, chunks, schedule, .. } = plan.parallel;
        let micro_batches = plan.micro_batches.min(MICRO_BATCHES_OF_STAGE * pipeline);
        let parallel = Parallel { pipeline, chunks, schedule, ..Parallel::data(1) };
        if let Some(known) = self.in_flight.borrow().get(&(parallel, micro_batches)) {
            return Ok(known.clone());
        }
        let orders = orders_of(parallel, micro_batches)?;
        let places: Vec<usize> = match pipeline {
            1 => vec![0],
            _ => handovers(&orders, chunks)?.iter().map(|handover| handover.places).collect(),
        };
        let of_stage = |(order, &places): (&Vec<_>, &usize)| {
            // A single stage completes each micro-batch before the next.
            let slots = if pipeline == 1 { 1 } else { in_flight(order).max(1) };
            InFlight { slots, places }
        };
        let found: Rc<Vec<InFlight>> = Rc::new(orders.iter().zip(&places).map(of_stage).collect());
        self.in_flight.borrow_mut().insert((parallel, micro_batches), found.clone());
        Ok(found)
    }

    fn growth(
        &self,
        plan: &Plan,
        stage: usize,
        chunks: &Chunks,
        with_fallback: bool,
    ) -> Result<Rc<Growth>, PlanError> {
        let few = FewLayers::of(plan, stage, chunks);
        let key = Key {
            parallel: few.parallel,
            stage: few.stage,
            chunks: few.counts.clone(),
            micro_batch: plan.micro_batch,
            micro_batches: few.micro_batches,
            recompute: plan.recompute,
            one_stream: plan.one_stream,
            on_host: plan.optimizer.on_host,
            growing: few.growing.clone(),
        };
        let with_fallback = with_fallback && self.alone.arch != "cpu";
        let known = self.known.borrow().get(&(key.clone(), with_fallback)).cloned();
        let known = known.unwrap_or_else(|| {
            let lowered = self.lowered(plan, &few, &key);
            let found = lowered.and_then(|lowered| lowered.growth(self.catalog, with_fallback));
            let found = found.map(Rc::new).map_err(Rc::new);
            self.known.borrow_mut().insert((key, with_fallback), found.clone());
            found
        });
        known.map_err(|error| PlanError::Request {
            what: "plan",
            expected: "one whose programs can be lowered".to_string(),
            got: error.to_string(),
        })
    }

    /// Programs of few layers, cached. Most plans do not fit anyway, so fallbacks are lowered
    /// later.
    fn lowered(
        &self,
        plan: &Plan,
        few: &FewLayers,
        key: &Key,
    ) -> Result<Rc<LoweredStages>, PlanError> {
        if let Some(known) = self.lowered.borrow().get(key) {
            return Ok(known.clone());
        }
        let more = few.growing.iter().enumerate().map(|(kind, more)| {
            let Some(more) = *more else { return Ok(None) };
            Ok(Some((more, self.lower(plan, few, Some((kind, more)))?)))
        });
        let lowered = Rc::new(LoweredStages {
            base: self.lower(plan, few, None)?,
            layers: few.counts.clone(),
            more: more.collect::<Result<_, PlanError>>()?,
        });
        self.lowered.borrow_mut().insert(key.clone(), lowered.clone());
        Ok(lowered)
    }

    /// Lowers a stage with few layers, and additional layers of a kind.
    fn lower(
        &self,
        plan: &Plan,
        few: &FewLayers,
        more: Option<(usize, More)>,
    ) -> Result<LoweredStage, PlanError> {
        let (kept, stages) = few.kept(self.graph.layer_count(), &self.layers.kinds, more);
        let model = self.model(kept)?;
        let FewLayers { parallel, micro_batches, .. } = *few;
        let policy = model.policy.clone();
        let plan = Plan { parallel, micro_batches, stages, policy, ..plan.clone() };
        let rank = few.stage * parallel.world_size() / parallel.pipeline;
        let target = self.target(parallel).clone().as_rank(parallel.ranks(rank));
        let shared = SharedGraph::of(&model.graph, &plan, self.catalog, &target)?;
        let counted = shared.count_stage(self.catalog, &target)?;
        let differentiated = shared.differentiated();
        Ok(LoweredStage { model, differentiated, plan, target, counted })
    }

    fn model(&self, kept: Vec<usize>) -> Result<Rc<FewLayersModel>, PlanError> {
        if let Some(known) = self.models.borrow().get(&kept) {
            return Ok(known.clone());
        }
        let graph = keep_layers(self.graph, &kept)?;
        let names: Vec<&str> = graph.parameters().map(|(_, it)| it.name.as_str()).collect();
        let policy = layers::with_blocks_by_name(self.graph, &self.request.policy);
        let policy = policy.of_part(&names).map_err(IrError::from)?;
        let model = Rc::new(FewLayersModel { graph, policy });
        self.models.borrow_mut().insert(kept, model.clone());
        Ok(model)
    }
}

impl LoweredStage {
    /// The program all in BF16, if any tensor is quantized and guards may move its GEMMs.
    fn fallback(&self, catalog: &dyn KernelCatalog) -> Result<Option<Counted>, PlanError> {
        let LoweredStage { model, differentiated, plan, target, counted } = self;
        if !plan.moves_gemms() {
            return Ok(None);
        }
        let Some(in_bf16) = fallback_plan(plan, &counted.program) else { return Ok(None) };
        let shared =
            SharedGraph::in_precision(differentiated, &model.graph, &in_bf16, catalog, target)?;
        Ok(Some(shared.count_stage(catalog, target)?))
    }
}

impl LoweredStages {
    /// The memory of the programs, with room for fallbacks if requested.
    fn growth(
        &self,
        catalog: &dyn KernelCatalog,
        with_fallback: bool,
    ) -> Result<Growth, PlanError> {
        let parts = |lowered: &LoweredStage| -> Result<Parts, PlanError> {
            let fallback = if with_fallback { lowered.fallback(catalog)? } else { None };
            Ok(Parts::of(&lowered.counted, fallback.as_ref()))
        };
        let more = self.more.iter().map(|more| {
            let Some((more, lowered)) = more else { return Ok(None) };
            Ok(Some((*more, parts(lowered)?)))
        });
        Ok(Growth {
            base: parts(&self.base)?,
            layers: self.layers.clone(),
            more: more.collect::<Result<_, PlanError>>()?,
        })
    }
}

impl Growth {
    /// The memory of a stage with all layers of its chunks.
    fn extended(&self, chunks: &Chunks) -> Parts {
        let mut parts = self.base.clone();
        let kept = |counts: &[usize]| -> i64 {
            let kinds = counts.iter().zip(&self.more);
            let of_kind = |(&count, more): (&usize, &Option<(More, Parts)>)| {
                let each = |(more, parts): &(More, Parts)| {
                    (parts.kept() - self.base.kept()) / more.layers as i64
                };
                count as i64 * more.as_ref().map_or(0, each)
            };
            kinds.map(of_kind).sum()
        };
        // A slot must hold the activations of the largest chunk.
        let Some(largest) = chunks.counts.iter().max_by_key(|counts| kept(counts)) else {
            return parts;
        };
        for (kind, more) in self.more.iter().enumerate() {
            let Some((More { chunk, layers }, grown)) = more else { continue };
            let lowered: usize = self.layers.iter().map(|counts| counts[kind]).sum();
            let further = [
                chunks.all(kind) - lowered,
                largest[kind].saturating_sub(self.layers[*chunk][kind]),
            ];
            parts.grow(&self.base, grown, further, *layers);
        }
        parts
    }
}

impl Strategy {
    /// Layers of each stage of the trainer's pipeline: the first chunk of all ranks, then the
    /// second; empty for one stage.
    pub fn layers_of_stages(&self, shape: &ModelShape) -> Vec<usize> {
        if self.pp == 1 {
            return Vec::new();
        }
        let stages: Vec<StageLayers> =
            (0..self.pp).map(|stage| StageLayers::of(shape, self, stage)).collect();
        let of_chunk = |chunk: usize| stages.iter().map(move |stage| stage.chunks[chunk].len());
        (0..self.vpp).flat_map(of_chunk).collect()
    }
}
