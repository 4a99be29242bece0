//! Optimizer state sharded over the data-parallel ranks (ZeRO, Rajbhandari et al., arXiv
//! 1910.02054).
//!
//! A rank holds one slice of each bucket's master weights and moments. Gradients are whole on each
//! rank during the backward pass and reduce-scattered before the update. Their memory is then idle:
//! the masters are gathered there, for the calls making the compute copies of the weights. Masters
//! read by calls of other bodies have their own memory.
//!
//! Ranks with the same parameters share state: for experts the ranks with the same experts, for all
//! other parameters the ranks that split the batch.
//!
//! With ZeRO 2 and 3 fewer buffers are whole, and for a shorter time: see [`super::zero3_gather`].
//! If calls read a bucket only as BF16 copies, each rank casts its slice, and the casts are
//! gathered into the copies: half the bytes, and the same bits. If a quantized weight can be cut
//! between its blocks, the ranks gather data and scales: see [`super::quantized_all_gather`]. With
//! ZeRO 1 masters are whole between steps.
//!
//! A step gives the same bits as without shards, because sums over ranks keep their order and AdamW
//! is elementwise. Only the norm differs: squares are summed by slice instead of by parameter, in
//! `f64`, and rounded to `f32`.

use std::collections::{HashMap, HashSet};

use deepwell_ir::ops::{AdamW, Cast, Collective, CollectiveKind, Reduction};
use deepwell_ir::{
    DType, GroupId, MemoryKind, Op, ParameterState, Phase, ProcessGroup, Shard, SplitOver,
    TensorId, ValueId,
};

use super::Lowering;
use super::optimizer::{read, update, write};
use super::tensor::NormTerms;
use crate::PlanError;
use crate::arena::align;

/// FP32 elements per alignment unit.
const ALIGNED_ELEMENTS: usize = deepwell_ir::ALIGNMENT_BYTES / size_of::<f32>();

/// Slices are a multiple of this many elements, so that each is aligned in BF16 too.
pub(super) const SLICE_ELEMENTS: usize = deepwell_ir::ALIGNMENT_BYTES / 2;

/// A bucket of parameters during a step.
pub(super) struct Bucket {
    /// Gradients, and the padding of the last slices.
    pub(super) gradients: Vec<ValueId>,
    /// The gathered masters, copies or quantized data, with padding.
    pub(super) gathered: Vec<ValueId>,
    /// The parameters of the bucket.
    pub(super) parameters: Vec<TensorId>,
    /// The gathered tensors: the parameters, their BF16 copies, or the quantized data of one
    /// parameter.
    pub(super) gathered_as: Vec<TensorId>,
    /// For a bucket of one parameter whose quantized data and scales are gathered: the quantizing
    /// node, by index in the graph.
    pub(super) quantized_by: Option<usize>,
    /// This rank's slice of the masters.
    pub(super) master: ValueId,
    /// This rank's slice of the gradients, if these are reduce-scattered during the backward pass.
    pub(super) scattered: Option<ValueId>,
    /// Whether the bucket is gathered per layer, into memory shared by lifetime.
    pub(super) is_gathered: bool,
    /// The group sharing the bucket, with the group's size.
    pub(super) group: (GroupId, u32),
    weight_decay: f32,
    split: Option<SplitOver>,
    /// Whether another pipeline stage counts the bucket in the norm.
    is_copy: bool,
}

/// A parameter of a bucket.
#[derive(Clone)]
struct Member {
    /// Index of the parameter's state among all parameters.
    state: usize,
    id: TensorId,
    gradient: TensorId,
    name: String,
    shape: Vec<usize>,
    class: Class,
}

/// Properties that all parameters of a bucket have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Class {
    /// Whether weight decay applies.
    decays: bool,
    /// Whether other bodies read the master.
    is_resident: bool,
    /// The kind of ranks over which the parameter is split.
    split: Option<SplitOver>,
    /// Whether another pipeline stage counts the parameter in the norm.
    is_copy: bool,
    /// Whether the gradient stays whole until the update, because the call that writes the loss
    /// writes it too, or because another stage's gradient is added.
    stays_whole: bool,
    /// The unit of gathers and scatters: a layer, or a parameter outside of layers.
    unit: Option<(Option<u32>, usize)>,
}

/// The whole buffers of a bucket.
struct Gathered {
    values: Vec<ValueId>,
    /// The tensors that `values` hold.
    tensors: Vec<TensorId>,
    quantized_by: Option<usize>,
    /// Whether the buffers live only while a layer needs them.
    passes: bool,
}

impl Bucket {
    /// Whether BF16 copies are gathered in place of masters.
    pub(super) fn gathers_copies(&self) -> bool {
        self.gathered_as != self.parameters
    }
}

impl Member {
    /// Elements in a bucket, with alignment.
    fn elements(&self) -> usize {
        let elements: usize = self.shape.iter().product();
        elements.next_multiple_of(ALIGNED_ELEMENTS)
    }
}

impl Lowering<'_> {
    /// The group whose ranks share the optimizer state, if any do.
    pub(super) fn sharing(&self) -> Option<(GroupId, u32)> {
        self.plan.parallel.shares().then(|| self.sharing_of(None))?
    }

    /// The group whose ranks share the optimizer state of parameters with this split.
    pub(super) fn sharing_of(&self, split: Option<SplitOver>) -> Option<(GroupId, u32)> {
        let name = match split {
            Some(SplitOver::Expert) => ProcessGroup::EXPERT_DATA,
            _ => ProcessGroup::DATA,
        };
        let (id, group) = self.target.ranks.named(name)?;
        Some((id, group.ranks.len() as u32))
    }

    /// Adds whole gradients, and one slice of each bucket's masters and moments.
    pub(super) fn sharded_values(&mut self) {
        let graph = self.graph;
        let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
        let other_bodies = graph.nodes.iter().filter(|node| node.phase != Phase::Weights);
        let resident: HashSet<TensorId> =
            other_bodies.flat_map(|node| node.inputs.iter().copied()).collect();
        let layers = if self.scatters() { self.layers_of_parameters() } else { HashMap::new() };
        let beside_loss =
            if self.scatters() { self.gradients_written_with_loss() } else { HashSet::new() };
        let is_evaluated = self.graph.parameter_gradients().is_empty();
        let mut members = Vec::new();
        for (index, (id, tensor)) in graph.parameters().enumerate() {
            let (name, shape) = (tensor.name.clone(), tensor.shape.bind(&self.binding));
            if is_evaluated && self.is_counted[index] {
                // The parameter is whole, and its value is made on first use.
                continue;
            }
            // An evaluation has the slices of the training program, but no gradients.
            let gradient = gradients.get(&id).copied().or(is_evaluated.then_some(id));
            let Some(gradient) = gradient.filter(|_| !self.is_counted[index]) else {
                let state = self.whole_parameter(id, name, shape, gradient);
                self.parameters.push(state);
                continue;
            };
            // The bucket fills in the values.
            let master = ValueId(u32::MAX);
            // An evaluation leaves parameters out, so `index` may differ from the index of the
            // state.
            let state = self.parameters.len();
            self.parameters.push(ParameterState {
                name: name.clone(),
                master,
                first_moment: None,
                second_moment: None,
                gradient: None,
                split: self.splits.get(&name).copied(),
            });
            let split = self.splits.get(&name).map(|split| split.over);
            let class = Class {
                decays: self.decays[index],
                is_resident: resident.contains(&id) && !self.gathers(),
                split,
                is_copy: self.is_copy(&name),
                stays_whole: beside_loss.contains(&gradient) || self.is_shared(&name),
                unit: self.scatters().then(|| match layers.get(&id) {
                    // A parameter that is cut between blocks has a bucket of its own.
                    Some(&layer) if self.block_slice_of(&shape, split).is_none() => {
                        (Some(layer), 0)
                    }
                    _ => (None, index),
                }),
            };
            members.push(Member { state, id, gradient, name, shape, class });
        }
        for members in buckets_of(&members, self.plan.bucket_bytes) {
            self.shard(&members, is_evaluated);
        }
        self.plan_gathers();
    }

    /// Adds a parameter that is not trained, or a selection bias with its counts.
    fn whole_parameter(
        &mut self,
        id: TensorId,
        name: String,
        shape: Vec<usize>,
        counts: Option<TensorId>,
    ) -> ParameterState {
        let mut add = |prefix: &str, memory| {
            self.add(format!("{prefix}{name}"), DType::F32, shape.clone(), memory)
        };
        let master = add("", MemoryKind::Optimizer);
        let gradient = counts.map(|_| add("grad.", MemoryKind::Gradients));
        let [first_moment, second_moment] = ["moment1.", "moment2."]
            .map(|prefix| counts.is_none().then(|| add(prefix, MemoryKind::Optimizer)));
        for (tensor, value) in [(Some(id), Some(master)), (counts, gradient)] {
            let (Some(tensor), Some(value)) = (tensor, value) else { continue };
            self.value_of.insert(tensor, value);
            self.values[value.index()].tensor = Some(tensor);
        }
        let split = self.splits.get(&name).copied();
        ParameterState { name, master, first_moment, second_moment, gradient, split }
    }

    fn shard(&mut self, members: &[Member], is_evaluated: bool) {
        let number = self.shards.len();
        let Some(group) = self.sharing_of(members[0].class.split) else { return };
        let ranks = group.1 as usize;
        let elements: usize = members.iter().map(Member::elements).sum();
        let slice = elements.div_ceil(ranks).next_multiple_of(SLICE_ELEMENTS);
        let filling = slice * ranks - elements;
        let Class { decays, is_resident, split, is_copy, stays_whole, .. } = members[0].class;
        let scatters = self.scatters() && !stays_whole;
        let gradients = match (is_evaluated, scatters) {
            (true, _) => Vec::new(),
            (_, true) => {
                // CPU ranks pad a copy of the bucket instead.
                let filling = if self.target.arch == "cpu" { 0 } else { filling };
                self.column(members, "grad.", MemoryKind::Activations, filling)
            }
            (_, false) => self.column(members, "grad.", MemoryKind::Gradients, filling),
        };
        let Gathered { values: gathered, tensors: gathered_as, quantized_by, passes: is_gathered } =
            self.gathered(members, &gradients, filling);
        let mut next = 0;
        let mut places = Vec::with_capacity(members.len());
        for (place, member) in members.iter().enumerate() {
            let (gradient, master) = (gradients.get(place).copied(), gathered[place]);
            if let Some(gradient) = gradient {
                self.value_of.insert(member.gradient, gradient);
                self.values[gradient.index()].tensor = Some(member.gradient);
            }
            if is_resident {
                self.value_of.insert(member.id, master);
                self.values[master.index()].tensor = Some(member.id);
            }
            let state = &mut self.parameters[member.state];
            (state.master, state.gradient) = (master, gradient);
            places.push((member.state, next));
            next += member.elements();
        }
        let block_slice = match members {
            [member] => self.block_slice_of(&member.shape, split),
            _ => None,
        };
        let shape = block_slice.unwrap_or_else(|| vec![slice]);
        let [master, first_moment, second_moment] =
            ["master.shard", "moment1.shard", "moment2.shard"].map(|name| {
                let name = format!("{name}.{number}");
                self.add(name, DType::F32, shape.clone(), MemoryKind::Optimizer)
            });
        let scattered = (scatters && !is_evaluated).then(|| {
            let name = format!("grad.shard.{number}");
            self.add(name, DType::F32, shape, MemoryKind::Gradients)
        });
        let name = self.target.ranks.group(group.0).map(|group| group.name.clone());
        let of_group = name.unwrap_or_default();
        let parameters = places;
        self.shards.push(Shard {
            group: of_group,
            master,
            first_moment,
            second_moment,
            parameters,
        });
        let weight_decay = if decays { self.plan.optimizer.weight_decay } else { 0.0 };
        let parameters = members.iter().map(|member| member.id).collect();
        self.shared.push(Bucket {
            gradients,
            gathered,
            parameters,
            gathered_as,
            quantized_by,
            master,
            scattered,
            is_gathered,
            group,
            weight_decay,
            split,
            is_copy,
        });
    }

    /// Where the whole bucket lies: in its own memory if calls of other bodies read masters, in the
    /// BF16 or quantized copies if calls read nothing else, in transient memory, or in the
    /// gradients' memory.
    fn gathered(&mut self, members: &[Member], gradients: &[ValueId], filling: usize) -> Gathered {
        let masters = || members.iter().map(|member| member.id).collect::<Vec<_>>();
        if members[0].class.is_resident {
            let values = self.column(members, "", MemoryKind::Weights, filling);
            return Gathered { values, tensors: masters(), quantized_by: None, passes: false };
        }
        if let &[Member { id, ref shape, class, .. }] = members
            && let Some(node) = self.quantization_of(id, shape, class.split)
        {
            // Values of the other planes are made on first use.
            let data = self.graph.nodes[node].outputs[0];
            let (values, tensors, passes) = (vec![self.value(data)], vec![data], self.gathers());
            self.gathered_copies.extend(&self.graph.nodes[node].outputs);
            return Gathered { values, tensors, quantized_by: Some(node), passes };
        }
        if let Some(copies) = self.copies_of(members) {
            let (passes, number) = (self.gathers(), self.shards.len());
            let mut values: Vec<ValueId> = copies.iter().map(|&copy| self.value(copy)).collect();
            if filling > 0 {
                let memory = self.values[values[0].index()].memory;
                let name = format!("copy.filling.{number}");
                values.push(self.add(name, DType::Bf16, vec![filling], memory));
            }
            self.gathered_copies.extend(&copies);
            return Gathered { values, tensors: copies, quantized_by: None, passes };
        }
        let tensors = masters();
        match self.scatters() {
            true => {
                let memory = MemoryKind::Activations;
                let values = self.column(members, "gathered.", memory, filling);
                Gathered { values, tensors, quantized_by: None, passes: true }
            }
            false => {
                let values = gradients.to_vec();
                Gathered { values, tensors, quantized_by: None, passes: false }
            }
        }
    }

    /// The BF16 copies of parameters, if gradients are scattered, calls read each parameter only
    /// through its copy, and every copy ends at an alignment boundary.
    fn copies_of(&self, members: &[Member]) -> Option<Vec<TensorId>> {
        if !self.scatters() {
            return None;
        }
        let copy_of = |member: &Member| {
            let mut readers =
                self.graph.nodes.iter().filter(|node| node.inputs.contains(&member.id));
            let (reader, others) = (readers.next()?, readers.next());
            let to_bf16 = matches!(&reader.op, Op::Cast(Cast { to: DType::Bf16 }));
            let is_copy = reader.phase == Phase::Weights && to_bf16 && others.is_none();
            let elements: usize = member.shape.iter().product();
            (is_copy && elements.is_multiple_of(SLICE_ELEMENTS)).then(|| reader.outputs[0])
        };
        members.iter().map(copy_of).collect()
    }

    /// Adds one value for each parameter of a bucket, in order, and one for the padding of slices.
    fn column(
        &mut self,
        members: &[Member],
        prefix: &str,
        memory: MemoryKind,
        filling: usize,
    ) -> Vec<ValueId> {
        let number = self.shards.len();
        let mut column: Vec<ValueId> = members
            .iter()
            .map(|it| {
                self.add(format!("{prefix}{}", it.name), DType::F32, it.shape.clone(), memory)
            })
            .collect();
        if filling > 0 {
            let name = format!("{prefix}filling.{number}");
            column.push(self.add(name, DType::F32, vec![filling], memory));
        }
        column
    }

    /// The gradients of a bucket that is whole on every tensor-parallel rank, or this rank's slice
    /// if they are reduce-scattered during the backward pass.
    pub(super) fn whole_bucket(&self, index: usize) -> Option<Vec<ValueId>> {
        let bucket = self.shared.get(index).filter(|bucket| bucket.split.is_none())?;
        Some(bucket.scattered.map_or_else(|| bucket.gradients.clone(), |slice| vec![slice]))
    }

    /// Returns each rank's slice of the gradients, summed over all ranks, and computes their norm.
    pub(super) fn scatter_gradients(&mut self) -> Result<Vec<ValueId>, PlanError> {
        let mut slices = Vec::with_capacity(self.shared.len());
        for index in 0..self.shared.len() {
            if let Some(own) = self.shared[index].scattered {
                slices.push(own);
                continue;
            }
            let own = match self.reduction.slice(index) {
                Some(own) => own,
                None => self.scatter_bucket(index, Phase::Optimizer)?,
            };
            slices.push(own);
        }
        let counted = slices.iter().zip(&self.shared).filter(|(_, bucket)| !bucket.is_copy);
        let counted: Vec<_> = counted.map(|(&slice, bucket)| (slice, bucket.split)).collect();
        let gradients = counted.into_iter().map(|(slice, split)| self.counted(slice, split));
        let gradients = vec![gradients.collect()];
        let groups = self.sharing().into_iter().collect();
        self.norm_of_terms(NormTerms { gradients, groups })?;
        Ok(slices)
    }

    /// Reduce-scatters a bucket of gradients; returns this rank's slice.
    pub(super) fn scatter_bucket(
        &mut self,
        index: usize,
        phase: Phase,
    ) -> Result<ValueId, PlanError> {
        let Bucket { master, group: (group, ranks), .. } = self.shared[index];
        let gradients = self.shared[index].gradients.clone();
        let (name, shape) =
            (format!("grad.shard.{index}"), self.values[master.index()].shape.clone());
        let own = self.add(name, DType::F32, shape, MemoryKind::Activations);
        let kind = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
        let op = Collective::of_bucket(kind, group, ranks, gradients.len());
        let inputs = gradients.into_iter().map(read).collect();
        let name = format!("reduce_scatter.gradients.{index}");
        self.phase_call(phase, &name, op.into(), inputs, vec![write(own)])?;
        Ok(own)
    }

    /// Updates this rank's slices.
    pub(super) fn update_shards(
        &mut self,
        coefficients: ValueId,
        gradients: &[ValueId],
    ) -> Result<(), PlanError> {
        for (index, &gradient) in gradients.iter().enumerate() {
            let Shard { master, first_moment, second_moment, .. } = self.shards[index].clone();
            let state = [master, first_moment, second_moment].map(update);
            let operands = [read(coefficients), read(gradient)].into_iter().chain(state).collect();
            let weight_decay = vec![self.shared[index].weight_decay];
            let op = AdamW { parameters: index..index + 1, weight_decay, copies: Vec::new() };
            self.optimizer_call(&format!("adamw.{index}"), op.into(), operands, Vec::new())?;
        }
        Ok(())
    }

    /// Gathers the masters that the following weight-copy calls read, or the casts of each rank's
    /// slice.
    pub(super) fn gather_masters(&mut self) -> Result<(), PlanError> {
        // The join of parts overlaps with the next all-gather.
        let (mut taken, mut arriving) = (Vec::new(), Vec::new());
        for index in 0..self.shared.len() {
            let Bucket { gathered, gathered_as, is_gathered, quantized_by, .. } =
                &self.shared[index];
            if *is_gathered {
                continue;
            }
            if quantized_by.is_some() {
                self.gather_quantized(index, (Phase::Weights, None))?;
                taken.push(index);
                if self.gathered_plane_bytes() >= self.plan.bucket_bytes {
                    self.gather_planes(Phase::Weights)?;
                    for before in std::mem::replace(&mut arriving, std::mem::take(&mut taken)) {
                        self.join_parts(before, (Phase::Weights, None))?;
                    }
                }
                continue;
            }
            let (gathered, gathered_as) = (gathered.clone(), gathered_as.clone());
            self.value_of.extend(gathered_as.into_iter().zip(gathered.iter().copied()));
            self.gather_bucket(index, gathered, (Phase::Weights, None), "")?;
        }
        self.gather_planes(Phase::Weights)?;
        let mut last = arriving.into_iter().chain(taken);
        last.try_for_each(|bucket| self.join_parts(bucket, (Phase::Weights, None)))
    }

    /// Gathers a bucket from the slices of all ranks: masters, or BF16 casts of them.
    pub(super) fn gather_bucket(
        &mut self,
        index: usize,
        gathered: Vec<ValueId>,
        (phase, layer): (Phase, Option<u32>),
        suffix: &str,
    ) -> Result<(), PlanError> {
        let Bucket { group: (group, ranks), master: mut own, .. } = self.shared[index];
        let (mut what, whole) = ("masters", self.why_not_quantized(index));
        if self.shared[index].gathers_copies() {
            what = "weights";
            let name = format!("bf16.shard.{index}{suffix}");
            let shape = self.values[own.index()].shape.clone();
            let copy = self.add(name, DType::Bf16, shape, MemoryKind::Activations);
            let (name, op) = (format!("cast.shard.{index}{suffix}"), Cast { to: DType::Bf16 });
            self.phase_call(phase, &name, op.into(), vec![read(own)], vec![write(copy)])?;
            // The cast overlaps with the calls of this layer.
            self.calls.last_mut().into_iter().for_each(|call| call.layer = layer);
            own = copy;
        }
        let op = Collective::of_bucket(CollectiveKind::AllGather, group, ranks, gathered.len());
        let outputs = gathered.into_iter().map(write).collect();
        let name = format!("all_gather.{what}.{index}{suffix}");
        self.phase_call(phase, &name, op.into(), vec![read(own)], outputs)?;
        if let (Some(call), Some(why)) = (self.calls.last_mut(), whole) {
            call.rejected.push(why);
        }
        Ok(())
    }
}

/// Parameters grouped by class, in order, with at most `limit_bytes` of gradients per bucket; a
/// larger parameter has a bucket of its own.
fn buckets_of(members: &[Member], limit_bytes: usize) -> Vec<Vec<Member>> {
    let mut buckets: Vec<Vec<Member>> = Vec::new();
    let mut open: HashMap<Class, (usize, usize)> = HashMap::new();
    for member in members {
        let bytes = align(member.elements() * size_of::<f32>());
        match open.get_mut(&member.class) {
            Some((bucket, filled)) if *filled + bytes <= limit_bytes => {
                *filled += bytes;
                buckets[*bucket].push(member.clone());
            }
            _ => {
                open.insert(member.class, (buckets.len(), bytes));
                buckets.push(vec![member.clone()]);
            }
        }
    }
    buckets
}
