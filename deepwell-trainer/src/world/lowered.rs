//! The plan and the programs of a world, before a device is open.

use deepwell_ir::{Graph, Program, Target};
use deepwell_plan::{Planned, lower_evaluation};
use deepwell_probe::Hardware;

use crate::engine::{Compiled, planned};
use crate::peers::Peers;
use crate::{Catalog, CompileOptions, TrainError};

/// A plan for the ranks of a world, and the programs of the requested classes.
pub(crate) struct Lowered {
    graph: Graph,
    hardware: Hardware,
    catalog: Catalog,
    target: Target,
    planned: Planned,
    /// Programs of the first rank of each class, for training and evaluation.
    classes: Vec<(Planned, Program)>,
}

impl Lowered {
    /// Plans a model for the ranks of `options`, and lowers the program of rank 0.
    ///
    /// # Errors
    /// Planning fails, or the ranks cannot split the batch evenly.
    pub(crate) fn of(
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<Lowered, TrainError> {
        let mut target = options.device.target(&hardware)?;
        if !options.parallel.is_single() {
            target = options.device.among_ranks(target);
        }
        let catalog = options.device.catalog();
        let planned = planned(&graph, &hardware, options, catalog.as_ref(), &target)?;
        Ok(Lowered { graph, hardware, catalog, target, planned, classes: Vec::new() })
    }

    pub(crate) fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// Least time of a step, in seconds.
    pub(crate) fn step_s(&self) -> f64 {
        self.planned.prediction.time_s
    }

    /// Sequences of a micro-batch, and of an evaluation.
    pub(crate) fn rows(&self) -> usize {
        self.planned.plan.micro_batch
    }

    /// The model and the hardware, to plan anew.
    pub(crate) fn into_inputs(self) -> (Graph, Hardware) {
        (self.graph, self.hardware)
    }

    /// Returns the programs and data to load for a rank.
    ///
    /// # Errors
    /// The rank's part of the model has no kernels.
    pub(crate) fn for_rank(&mut self, rank: usize, peers: Peers) -> Result<Compiled, TrainError> {
        let Lowered { graph, hardware, catalog, target, planned, classes } = self;
        let (catalog, parallel) = (&**catalog, planned.plan.parallel);
        let ranks = parallel.ranks(rank);
        let is_alike = |(first, _): &(Planned, Program)| {
            parallel.class(first.program.rank as usize) == parallel.class(rank)
        };
        let class = match classes.iter().position(is_alike) {
            Some(class) => class,
            None => {
                let planned = planned.of_rank(rank, graph, catalog, target)?;
                let Planned { plan, program, .. } = &planned;
                let target = target.clone().as_rank(ranks.clone());
                let evaluation = lower_evaluation(graph, plan, program, catalog, &target)?;
                classes.push((planned, evaluation));
                classes.len() - 1
            }
        };
        let (of_class, evaluation) = &classes[class];
        Ok(Compiled {
            graph: graph.clone(),
            hardware: hardware.clone(),
            evaluation: evaluation.for_rank(ranks),
            planned: of_class.of_rank(rank, graph, catalog, target)?,
            peers,
        })
    }
}
