//! The values of sharded parameters: whole gradients, and one slice of each bucket's masters and
//! moments.

use std::collections::{BTreeMap, HashMap};

use deepwell_ir::{
    DType, Gathered, GroupId, Master, MemoryKind, ParameterState, Shard, TensorId, ValueId,
};

use super::buckets::{Class, Classes, Member, buckets_of};
use super::state::{Bucket, Gathers, SLICE_ELEMENTS, Zero};
use crate::lower::builder::ProgramBuilder;
use crate::lower::parameters::Parameters;
use crate::lower::rank::RankContext;

/// The whole buffers of a bucket.
struct GatheredBucket {
    values: Vec<ValueId>,
    /// The tensors that `values` hold.
    tensors: Vec<TensorId>,
    /// The form of the weights in `values`.
    form: Gathered,
    quantized_by: Option<usize>,
    /// Whether the buffers live only while a layer needs them.
    is_freed_after_layer: bool,
}

impl Zero {
    /// Adds the values of all parameters, and plans the gathers and scatters.
    pub(in crate::lower) fn of<'a>(
        rank: RankContext<'a>,
        build: &mut ProgramBuilder<'a>,
        parameters: &mut Parameters,
    ) -> Zero {
        let graph = rank.graph;
        let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
        let classes = Classes::of(rank);
        let is_evaluated = gradients.is_empty();
        let mut members = Vec::new();
        let mut states = BTreeMap::new();
        // An evaluation leaves parameters out: indices of states are not those of the graph.
        let mut state = 0;
        for (index, (id, _)) in graph.parameters().enumerate() {
            let is_selection_bias = parameters.is_selection_bias[index];
            if is_evaluated && is_selection_bias {
                // The parameter is whole, and its value is made on first use.
                continue;
            }
            // An evaluation has the slices of the training program, but no gradients.
            let gradient = gradients.get(&id).copied().or(is_evaluated.then_some(id));
            match gradient.filter(|_| !is_selection_bias) {
                Some(gradient) => {
                    members.push(classes.member(parameters, index, state, (id, gradient)));
                }
                None => {
                    states.insert(state, Parameters::unsharded(&rank, build, id, gradient));
                }
            }
            state += 1;
        }
        let mut zero = Zero::default();
        for members in buckets_of(&members, rank.plan.bucket_bytes) {
            let number = zero.shards.len();
            let mut shard = ShardBuilder { rank, build, zero: &mut zero, number, is_evaluated };
            states.extend(shard.add(&members));
        }
        parameters.states = states.into_values().collect();
        zero.gathers = Gathers::plan(graph, build, &zero.buckets);
        zero
    }
}

/// Adds the values of one bucket.
struct ShardBuilder<'b, 'a> {
    rank: RankContext<'a>,
    build: &'b mut ProgramBuilder<'a>,
    zero: &'b mut Zero,
    /// The index of the bucket and of its shard.
    number: usize,
    is_evaluated: bool,
}

impl ShardBuilder<'_, '_> {
    /// Adds the values of a bucket: whole gradients and weights, and this rank's slices. Returns
    /// the state of each member, with its index.
    fn add(&mut self, members: &[Member]) -> Vec<(usize, ParameterState)> {
        let Class { decays, is_resident, split, is_tied_copy, stays_whole, .. } = members[0].class;
        let Some(group) = self.rank.zero_group_of(split) else { return Vec::new() };
        let ranks = group.1 as usize;
        let elements: usize = members.iter().map(Member::elements).sum();
        let slice = elements.div_ceil(ranks).next_multiple_of(SLICE_ELEMENTS);
        let padding = slice * ranks - elements;
        let scatters = self.rank.shards_gradients() && !stays_whole;
        let gradients = match (self.is_evaluated, scatters) {
            (true, _) => Vec::new(),
            (_, true) => {
                // CPU ranks pad a copy of the bucket instead.
                let padding = if self.rank.target.arch == "cpu" { 0 } else { padding };
                self.column(members, "grad.", MemoryKind::Activations, padding)
            }
            (_, false) => self.column(members, "grad.", MemoryKind::Gradients, padding),
        };
        let gathered = self.gathered(members, &gradients, padding);
        let states = self.states(members, &gradients, &gathered, is_resident);
        let scatters = scatters && !self.is_evaluated;
        let (shard, scattered) = self.slices(members, slice, scatters, group.0);
        self.zero.buckets.push(Bucket {
            gradients,
            gathered: gathered.values,
            parameters: members.iter().map(|member| member.id).collect(),
            gathered_as: gathered.tensors,
            quantized_by: gathered.quantized_by,
            master: shard.master,
            scattered,
            is_gathered: gathered.is_freed_after_layer,
            group,
            weight_decay: if decays { self.rank.plan.optimizer.weight_decay } else { 0.0 },
            split,
            is_tied_copy,
        });
        self.zero.shards.push(shard);
        states
    }

    /// Adds this rank's slices of masters and moments, and of gradients if they are scattered.
    fn slices(
        &mut self,
        members: &[Member],
        slice: usize,
        scatters: bool,
        group: GroupId,
    ) -> (Shard, Option<ValueId>) {
        let block_slice = match members {
            [member] => self.rank.block_slice_of(&member.shape, member.class.split),
            _ => None,
        };
        let shape = block_slice.unwrap_or_else(|| vec![slice]);
        let moments = self.rank.plan.optimizer.moments.stored(&shape);
        let mut add = |name: &str, (dtype, shape): (DType, Vec<usize>), memory| {
            self.build.add(format!("{name}.shard.{}", self.number), dtype, shape, memory)
        };
        let whole = || (DType::F32, shape.clone());
        let master = add("master", whole(), MemoryKind::Optimizer);
        let [first_moment, second_moment] =
            ParameterState::MOMENTS.map(|name| add(name, moments.clone(), MemoryKind::Optimizer));
        let scattered = scatters.then(|| add("grad", whole(), MemoryKind::Gradients));
        let group = self.rank.target.ranks.group(group).map(|group| group.name.clone());
        let mut first = 0;
        let mut place = |member: &Member| {
            first += member.elements();
            (member.state, first - member.elements())
        };
        let shard = Shard {
            group: group.unwrap_or_default(),
            master,
            first_moment,
            second_moment,
            parameters: members.iter().map(&mut place).collect(),
        };
        (shard, scattered)
    }

    /// Makes a bucket's whole values those of its tensors. Returns the states of its parameters.
    fn states(
        &mut self,
        members: &[Member],
        gradients: &[ValueId],
        gathered: &GatheredBucket,
        is_resident: bool,
    ) -> Vec<(usize, ParameterState)> {
        let mut states = Vec::with_capacity(members.len());
        for (place, member) in members.iter().enumerate() {
            let (gradient, weight) = (gradients.get(place).copied(), gathered.values[place]);
            if let Some(gradient) = gradient {
                self.build.store(member.gradient, gradient);
            }
            if is_resident {
                self.build.store(member.id, weight);
            }
            let (shard, form) = (self.number, gathered.form);
            let state = ParameterState {
                name: member.name.clone(),
                master: Master::Sharded { shard, gathered: weight, form },
                first_moment: None,
                second_moment: None,
                gradient,
                split: self.rank.split_of(&member.name),
            };
            states.push((member.state, state));
        }
        states
    }

    /// Where the whole bucket lies: in its own memory if calls of other bodies read masters, in the
    /// BF16 or quantized copies if calls read nothing else, in transient memory, or in the
    /// gradients' memory.
    fn gathered(
        &mut self,
        members: &[Member],
        gradients: &[ValueId],
        padding: usize,
    ) -> GatheredBucket {
        let masters = || members.iter().map(|member| member.id).collect::<Vec<_>>();
        let bucket = |values, tensors, form, is_freed_after_layer| GatheredBucket {
            values,
            tensors,
            form,
            quantized_by: None,
            is_freed_after_layer,
        };
        if members[0].class.is_resident {
            let values = self.column(members, "", MemoryKind::Weights, padding);
            return bucket(values, masters(), Gathered::Kept, false);
        }
        let shards_weights = self.rank.shards_weights();
        if let &[Member { id, ref shape, class, .. }] = members
            && let Some(node) = self.rank.quantization_of(id, shape, class.split)
        {
            // Values of the other planes are made on first use.
            let data = self.rank.graph.nodes[node].outputs[0];
            self.zero.gathered_copies.extend(&self.rank.graph.nodes[node].outputs);
            let values = vec![self.build.value(data)];
            let bucket = bucket(values, vec![data], Gathered::Quantized, shards_weights);
            return GatheredBucket { quantized_by: Some(node), ..bucket };
        }
        if let Some(copies) = self.rank.bf16_copies_of(members) {
            let mut values: Vec<ValueId> =
                copies.iter().map(|&copy| self.build.value(copy)).collect();
            if padding > 0 {
                let memory = self.build.values[values[0].index()].memory;
                let name = format!("copy.filling.{}", self.number);
                values.push(self.build.add(name, DType::Bf16, vec![padding], memory));
            }
            self.zero.gathered_copies.extend(&copies);
            return bucket(values, copies, Gathered::Bf16, shards_weights);
        }
        if self.rank.shards_gradients() {
            let values = self.column(members, "gathered.", MemoryKind::Activations, padding);
            return bucket(values, masters(), Gathered::Fp32, true);
        }
        bucket(gradients.to_vec(), masters(), Gathered::Kept, false)
    }

    /// Adds one value for each parameter of a bucket, in order, and one for the padding of slices.
    fn column(
        &mut self,
        members: &[Member],
        prefix: &str,
        memory: MemoryKind,
        padding: usize,
    ) -> Vec<ValueId> {
        let mut column: Vec<ValueId> = members
            .iter()
            .map(|it| {
                self.build.add(format!("{prefix}{}", it.name), DType::F32, it.shape.clone(), memory)
            })
            .collect();
        if padding > 0 {
            let name = format!("{prefix}filling.{}", self.number);
            column.push(self.build.add(name, DType::F32, vec![padding], memory));
        }
        column
    }
}
