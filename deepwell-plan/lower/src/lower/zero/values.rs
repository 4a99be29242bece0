//! The values of sharded parameters: whole gradients, and one slice of each bucket's masters and
//! moments.

use std::collections::HashMap;

use deepwell_ir::{DType, Gathered, Master, MemoryKind, ParameterState, Shard, TensorId, ValueId};

use super::buckets::{Class, Classes, Member, buckets_of};
use super::state::Bucket;
use super::state::Gathers;
use super::state::SLICE_ELEMENTS;
use crate::lower::lowering::Lowering;

/// The whole buffers of a bucket.
struct GatheredBucket {
    values: Vec<ValueId>,
    /// The tensors that `values` hold.
    tensors: Vec<TensorId>,
    /// The form of the weights in `values`.
    form: Gathered,
    quantized_by: Option<usize>,
    /// Whether the buffers live only while a layer needs them.
    passes: bool,
}

impl Lowering<'_> {
    /// Adds the values of all parameters, and plans the gathers and scatters.
    pub(in crate::lower) fn sharded_values(&mut self) {
        let graph = self.rank.graph;
        let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
        let classes = Classes::of(self.rank);
        let is_evaluated = gradients.is_empty();
        let mut members = Vec::new();
        for (index, (id, tensor)) in graph.parameters().enumerate() {
            let is_counted = self.parameters.is_counted[index];
            if is_evaluated && is_counted {
                // The parameter is whole, and its value is made on first use.
                continue;
            }
            // An evaluation has the slices of the training program, but no gradients.
            let gradient = gradients.get(&id).copied().or(is_evaluated.then_some(id));
            let Some(gradient) = gradient.filter(|_| !is_counted) else {
                self.parameters.add_unsharded(&self.rank, &mut self.build, id, gradient);
                continue;
            };
            // An evaluation leaves parameters out, so `index` may differ from the index of the
            // state.
            let state = self.parameters.states.len();
            members.push(classes.member(&self.parameters, index, state, (id, gradient)));
            self.parameters.states.push(ParameterState {
                name: tensor.name.clone(),
                // The bucket fills in the values.
                master: Master::Whole(ValueId(u32::MAX)),
                first_moment: None,
                second_moment: None,
                gradient: None,
                split: self.rank.split_of(&tensor.name),
            });
        }
        for members in buckets_of(&members, self.rank.plan.bucket_bytes) {
            self.shard(&members, is_evaluated);
        }
        self.zero.gathers = Gathers::plan(self.rank.graph, &self.build, &self.zero.buckets);
    }

    /// Adds the values of a bucket: whole gradients and weights, and this rank's slices.
    fn shard(&mut self, members: &[Member], is_evaluated: bool) {
        let number = self.zero.shards.len();
        let Class { decays, is_resident, split, is_copy, stays_whole, .. } = members[0].class;
        let Some(group) = self.rank.sharing_of(split) else { return };
        let ranks = group.1 as usize;
        let elements: usize = members.iter().map(Member::elements).sum();
        let slice = elements.div_ceil(ranks).next_multiple_of(SLICE_ELEMENTS);
        let filling = slice * ranks - elements;
        let scatters = self.rank.scatters() && !stays_whole;
        let gradients = match (is_evaluated, scatters) {
            (true, _) => Vec::new(),
            (_, true) => {
                // CPU ranks pad a copy of the bucket instead.
                let filling = if self.rank.target.arch == "cpu" { 0 } else { filling };
                self.column(members, "grad.", MemoryKind::Activations, filling)
            }
            (_, false) => self.column(members, "grad.", MemoryKind::Gradients, filling),
        };
        let gathered = self.gathered(members, &gradients, filling);
        let parameters = self.store_members(members, &gradients, &gathered, is_resident);
        let GatheredBucket { values, tensors, quantized_by, passes: is_gathered, .. } = gathered;
        let block_slice = match members {
            [member] => self.rank.block_slice_of(&member.shape, split),
            _ => None,
        };
        let shape = block_slice.unwrap_or_else(|| vec![slice]);
        let moments = self.rank.plan.optimizer.moments.stored(&shape);
        let mut add = |name: &str, (dtype, shape): (DType, Vec<usize>), memory| {
            self.build.add(format!("{name}.shard.{number}"), dtype, shape, memory)
        };
        let whole = || (DType::F32, shape.clone());
        let master = add("master", whole(), MemoryKind::Optimizer);
        let [first_moment, second_moment] =
            ParameterState::MOMENTS.map(|name| add(name, moments.clone(), MemoryKind::Optimizer));
        let scattered =
            (scatters && !is_evaluated).then(|| add("grad", whole(), MemoryKind::Gradients));
        let name = self.rank.target.ranks.group(group.0).map(|group| group.name.clone());
        let of_group = name.unwrap_or_default();
        self.zero.shards.push(Shard {
            group: of_group,
            master,
            first_moment,
            second_moment,
            parameters,
        });
        self.zero.buckets.push(Bucket {
            gradients,
            gathered: values,
            parameters: members.iter().map(|member| member.id).collect(),
            gathered_as: tensors,
            quantized_by,
            master,
            scattered,
            is_gathered,
            group,
            weight_decay: if decays { self.rank.plan.optimizer.weight_decay } else { 0.0 },
            split,
            is_copy,
        });
    }

    /// Enters a bucket's whole values in the states of its parameters. Returns the states with the
    /// first element of each in the bucket.
    fn store_members(
        &mut self,
        members: &[Member],
        gradients: &[ValueId],
        gathered: &GatheredBucket,
        is_resident: bool,
    ) -> Vec<(usize, usize)> {
        let mut next = 0;
        let mut places = Vec::with_capacity(members.len());
        for (place, member) in members.iter().enumerate() {
            let (gradient, weight) = (gradients.get(place).copied(), gathered.values[place]);
            if let Some(gradient) = gradient {
                self.build.store(member.gradient, gradient);
            }
            if is_resident {
                self.build.store(member.id, weight);
            }
            let state = &mut self.parameters.states[member.state];
            let (shard, form) = (self.zero.shards.len(), gathered.form);
            state.master = Master::Sharded { shard, gathered: weight, form };
            state.gradient = gradient;
            places.push((member.state, next));
            next += member.elements();
        }
        places
    }

    /// Where the whole bucket lies: in its own memory if calls of other bodies read masters, in the
    /// BF16 or quantized copies if calls read nothing else, in transient memory, or in the
    /// gradients' memory.
    fn gathered(
        &mut self,
        members: &[Member],
        gradients: &[ValueId],
        filling: usize,
    ) -> GatheredBucket {
        let masters = || members.iter().map(|member| member.id).collect::<Vec<_>>();
        if members[0].class.is_resident {
            let values = self.column(members, "", MemoryKind::Weights, filling);
            return GatheredBucket {
                values,
                tensors: masters(),
                form: Gathered::Kept,
                quantized_by: None,
                passes: false,
            };
        }
        if let &[Member { id, ref shape, class, .. }] = members
            && let Some(node) = self.rank.quantization_of(id, shape, class.split)
        {
            // Values of the other planes are made on first use.
            let data = self.rank.graph.nodes[node].outputs[0];
            let (values, tensors, passes) =
                (vec![self.build.value(data)], vec![data], self.rank.gathers());
            self.zero.gathered_copies.extend(&self.rank.graph.nodes[node].outputs);
            let form = Gathered::Quantized;
            return GatheredBucket { values, tensors, form, quantized_by: Some(node), passes };
        }
        if let Some(copies) = self.rank.bf16_copies_of(members) {
            let (passes, number) = (self.rank.gathers(), self.zero.shards.len());
            let mut values: Vec<ValueId> =
                copies.iter().map(|&copy| self.build.value(copy)).collect();
            if filling > 0 {
                let memory = self.build.values[values[0].index()].memory;
                let name = format!("copy.filling.{number}");
                values.push(self.build.add(name, DType::Bf16, vec![filling], memory));
            }
            self.zero.gathered_copies.extend(&copies);
            let form = Gathered::Bf16;
            return GatheredBucket { values, tensors: copies, form, quantized_by: None, passes };
        }
        let (values, form, passes) = match self.rank.scatters() {
            true => {
                let memory = MemoryKind::Activations;
                (self.column(members, "gathered.", memory, filling), Gathered::Fp32, true)
            }
            false => (gradients.to_vec(), Gathered::Kept, false),
        };
        GatheredBucket { values, tensors: masters(), form, quantized_by: None, passes }
    }

    /// Adds one value for each parameter of a bucket, in order, and one for the padding of slices.
    fn column(
        &mut self,
        members: &[Member],
        prefix: &str,
        memory: MemoryKind,
        filling: usize,
    ) -> Vec<ValueId> {
        let number = self.zero.shards.len();
        let mut column: Vec<ValueId> = members
            .iter()
            .map(|it| {
                self.build.add(format!("{prefix}{}", it.name), DType::F32, it.shape.clone(), memory)
            })
            .collect();
        if filling > 0 {
            let name = format!("{prefix}filling.{number}");
            column.push(self.build.add(name, DType::F32, vec![filling], memory));
        }
        column
    }
}
