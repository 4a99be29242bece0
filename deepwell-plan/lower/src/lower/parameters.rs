//! The parameters of a rank with their masters, moments and gradients.

use std::collections::HashMap;
use std::ops::Range;

use deepwell_ir::{DType, Graph, Master, MemoryKind, ParameterState, SplitOver, TensorId, ValueId};

use super::builder::ProgramBuilder;
use super::rank::RankContext;

/// Parameters in canonical order.
pub(super) struct Parameters {
    pub(super) states: Vec<ParameterState>,
    /// For each parameter, whether it is a selection bias: updated by counts, not by AdamW.
    pub(super) is_selection_bias: Vec<bool>,
    /// For each parameter, whether weight decay applies.
    pub(super) decays: Vec<bool>,
    /// Ranges of parameters whose whole gradients are summed and updated together.
    pub(super) buckets: Vec<Range<usize>>,
}

impl Parameters {
    /// The parameters of a graph, without states.
    pub(super) fn of(graph: &Graph) -> Parameters {
        let (selection_biases, decaying) = (graph.selection_biases(), graph.decaying());
        Parameters {
            states: Vec::new(),
            is_selection_bias: graph
                .parameters()
                .map(|(id, _)| selection_biases.contains(&id))
                .collect(),
            decays: graph.parameters().map(|(id, _)| decaying.contains(&id)).collect(),
            buckets: Vec::new(),
        }
    }

    /// Whether the gradient of a parameter includes the tokens of the whole expert-parallel group.
    pub(super) fn is_of_expert_rank(&self, index: usize) -> bool {
        self.states[index].split.is_some_and(|split| split.over == SplitOver::Expert)
    }

    /// Adds the masters, without moments and gradients.
    pub(super) fn add_masters(&mut self, rank: &RankContext<'_>, build: &mut ProgramBuilder<'_>) {
        for (id, tensor) in rank.graph.parameters() {
            let (name, shape) = (tensor.name.clone(), tensor.shape.bind(&rank.binding));
            let master = build.add(name.clone(), tensor.dtype, shape, MemoryKind::Optimizer);
            build.store(id, master);
            self.states.push(ParameterState {
                name,
                master: Master::Whole(master),
                first_moment: None,
                second_moment: None,
                gradient: None,
                split: None,
            });
        }
    }

    /// Adds whole parameters, their state and gradients in canonical order, so that a program
    /// compiled under another policy has them at the same offsets.
    pub(super) fn add_whole(&mut self, rank: &RankContext<'_>, build: &mut ProgramBuilder<'_>) {
        let graph = rank.graph;
        let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
        let parameters: Vec<_> = graph
            .parameters()
            .map(|(id, tensor)| (id, tensor.name.clone(), tensor.shape.bind(&rank.binding)))
            .collect();
        let stored_as = |id: TensorId| graph.tensor(id).dtype;
        let [first, second] = ParameterState::MOMENTS.map(|moment| format!("{moment}."));
        let mut columns = [Vec::new(), Vec::new(), Vec::new()];
        for (column, prefix) in ["", &first, &second].iter().enumerate() {
            for (index, (id, name, shape)) in parameters.iter().enumerate() {
                // Parameters not updated by AdamW have no moments.
                let is_there = column == 0 || !self.is_selection_bias[index];
                columns[column].push(is_there.then(|| {
                    let name = format!("{prefix}{name}");
                    let (dtype, shape) = match column {
                        0 => (stored_as(*id), shape.clone()),
                        _ => rank.plan.optimizer.moments.stored(shape),
                    };
                    build.add(name, dtype, shape, MemoryKind::Optimizer)
                }));
            }
        }
        for (index, (id, name, shape)) in parameters.iter().enumerate() {
            let [Some(master), first_moment, second_moment] =
                columns.each_ref().map(|column| column[index])
            else {
                unreachable!("every parameter has a master");
            };
            build.store(*id, master);
            let gradient = gradients.get(id).map(|&gradient| {
                let name = graph.tensor(gradient).name.clone();
                let memory = match rank.updates_in_backward() && !self.is_selection_bias[index] {
                    true => MemoryKind::Activations,
                    false => MemoryKind::Gradients,
                };
                let value = build.add(name, DType::F32, shape.clone(), memory);
                build.store(gradient, value);
                value
            });
            self.states.push(ParameterState {
                name: name.clone(),
                master: Master::Whole(master),
                first_moment,
                second_moment,
                gradient,
                split: rank.split_of(name),
            });
        }
    }

    /// Adds the values of a parameter that is not trained, or of a selection bias with its counts.
    pub(super) fn unsharded(
        rank: &RankContext<'_>,
        build: &mut ProgramBuilder<'_>,
        id: TensorId,
        counts: Option<TensorId>,
    ) -> ParameterState {
        let tensor = rank.graph.tensor(id);
        let (name, shape) = (tensor.name.clone(), tensor.shape.bind(&rank.binding));
        let mut add = |prefix: &str, (dtype, shape): (DType, Vec<usize>), memory| {
            build.add(format!("{prefix}{name}"), dtype, shape, memory)
        };
        let weight = add("", (tensor.dtype, shape.clone()), MemoryKind::Optimizer);
        let gradient =
            counts.map(|_| add("grad.", (DType::F32, shape.clone()), MemoryKind::Gradients));
        let stored = rank.plan.optimizer.moments.stored(&shape);
        let [first_moment, second_moment] = ParameterState::MOMENTS.map(|moment| {
            let prefix = format!("{moment}.");
            counts.is_none().then(|| add(&prefix, stored.clone(), MemoryKind::Optimizer))
        });
        build.store(id, weight);
        for (counts, gradient) in counts.into_iter().zip(gradient) {
            build.store(counts, gradient);
        }
        let (split, master) = (rank.split_of(&name), Master::Whole(weight));
        ParameterState { name, master, first_moment, second_moment, gradient, split }
    }

    /// Groups consecutive parameters to buckets with at most `limit_bytes` of gradients. A larger
    /// parameter has its own bucket, and so has a parameter not updated by AdamW.
    pub(super) fn group_to_buckets(&mut self, build: &ProgramBuilder<'_>, limit_bytes: usize) {
        let mut buckets: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for (index, state) in self.states.iter().enumerate() {
            let Some(gradient) = state.gradient else { continue };
            let gradient_bytes = build.values[gradient.index()].range.bytes;
            bytes += gradient_bytes;
            let joins = |bucket: &Range<usize>| {
                bucket.end == index
                    && bytes <= limit_bytes
                    && !self.is_selection_bias[index]
                    && !self.is_selection_bias[bucket.start]
                    && self.is_of_expert_rank(index) == self.is_of_expert_rank(bucket.start)
            };
            match buckets.last_mut() {
                Some(bucket) if joins(bucket) => bucket.end += 1,
                _ => {
                    buckets.push(index..index + 1);
                    bytes = gradient_bytes;
                }
            }
        }
        self.buckets = buckets;
    }

    /// The gradients of some parameters, without those that have none.
    pub(super) fn gradients(&self, parameters: impl IntoIterator<Item = usize>) -> Vec<ValueId> {
        parameters.into_iter().filter_map(|index| self.states[index].gradient).collect()
    }
}
