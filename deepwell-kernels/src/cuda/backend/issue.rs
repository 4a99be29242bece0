//! Enqueues prepared calls: call by call, or as a recording with the edges between its streams.

use std::collections::HashMap;

use deepwell_ir::{EventId, StreamId};

use super::{CudaBackend, Prepared};
use crate::KernelError;
use crate::backend::{Issue, PreparedCall, Recording};
use crate::runtime::cuda::comm::ExchangePlan;
use crate::runtime::cuda::driver::{
    CapturedGraph, DevicePtr, DriverError, Event, Priority, Stream,
};
use crate::runtime::cuda::prepare::Step;

impl CudaBackend {
    /// Enqueues the steps of a call; within a capture, several steps of a call become one node.
    pub(super) fn issue(
        &mut self,
        index: usize,
        stream: Stream,
        capturing: bool,
    ) -> Result<(), KernelError> {
        let Some(prepared) = self.prepared.get(index) else {
            return Err(KernelError::Run {
                call: format!("prepared call {index}"),
                what: "there is no such call".to_string(),
            });
        };
        // A library may launch several kernels for one GEMM or collective.
        let is_several = |steps: &[Step]| {
            steps.len() > 1 || matches!(steps, [Step::Matmul(_) | Step::Exchange(_)])
        };
        let grouped = capturing && is_several(&prepared.steps);
        let driver = self.driver.as_mut();
        let mut run = || -> Result<(), DriverError> {
            driver.expect_outputs(&prepared.outputs);
            if grouped {
                driver.begin_group(stream)?;
            }
            let is_exchange = |step: &Step| matches!(step, Step::Exchange(_));
            let together = |a: &Step, b: &Step| is_exchange(a) && is_exchange(b);
            for steps in prepared.steps.chunk_by(together) {
                let step = match steps {
                    [step] => step,
                    several => {
                        let plans = several.iter().filter_map(|step| match step {
                            Step::Exchange(plan) => Some(*plan),
                            _ => None,
                        });
                        let plans: Vec<ExchangePlan> = plans.collect();
                        match &mut self.comm {
                            Some(comm) => comm.run_together(&plans, stream)?,
                            None => return Err(DriverError::new("exchange", "no other ranks")),
                        }
                        continue;
                    }
                };
                match step {
                    Step::Launch(launch) => driver.launch(launch, stream)?,
                    Step::Matmul(plan) => match &mut self.blas {
                        Some(blas) => blas.run(*plan, stream)?,
                        None => return Err(DriverError::new("cublasLt", "no library")),
                    },
                    Step::Exchange(plan) => match &mut self.comm {
                        Some(comm) => comm.run(*plan, stream)?,
                        None => return Err(DriverError::new("exchange", "no other ranks")),
                    },
                    Step::Copy { target, source, bytes } => {
                        driver.copy(*target, *source, *bytes, stream)?;
                    }
                    Step::Fill { target, byte, bytes } => {
                        driver.fill(*target, *byte, *bytes, stream)?;
                    }
                }
            }
            if grouped {
                driver.end_group(stream)?;
            }
            Ok(())
        };
        run().map_err(|error| KernelError::Run {
            call: prepared.name.clone(),
            what: error.to_string(),
        })
    }

    /// CTAs of a call's largest launch divided by the SMs, at most 1; `None` if a library hides the
    /// grid of a step, or if the call launches no kernel.
    pub(super) fn grid_fill(&self, call: PreparedCall) -> Option<f64> {
        let mut ctas_max: Option<f64> = None;
        for step in self.steps(call) {
            match step {
                Step::Launch(launch) => {
                    let ctas = launch.grid.iter().map(|&size| f64::from(size)).product();
                    ctas_max = Some(ctas_max.map_or(ctas, |known: f64| known.max(ctas)));
                }
                Step::Matmul(_) | Step::Exchange(_) => return None,
                Step::Copy { .. } | Step::Fill { .. } => {}
            }
        }
        let sm_count = f64::from(self.driver.properties().sm_count.max(1));
        ctas_max.map(|ctas| (ctas / sm_count).min(1.0))
    }

    /// Stores a captured graph as a recording.
    pub(super) fn keep(&mut self, graph: CapturedGraph) -> Result<Recording, KernelError> {
        self.graphs.push(graph);
        if self.comm.is_some() {
            // The library may upload data of the recorded work on a stream of its own.
            self.wait(|driver| driver.synchronize_device())?;
        }
        Ok(Recording(self.graphs.len() - 1))
    }

    /// The plans of calls, each of which is a single collective, send or receive.
    pub(super) fn exchanges_of(
        &self,
        calls: &[PreparedCall],
    ) -> Result<Vec<ExchangePlan>, KernelError> {
        let exchange = |call: &PreparedCall| match self.prepared.get(call.0) {
            Some(Prepared { steps, .. }) if let [Step::Exchange(plan)] = steps[..] => Ok(plan),
            other => Err(KernelError::Run {
                call: other.map_or_else(|| format!("{call:?}"), |it| it.name.clone()),
                what: "expected a call that exchanges, and does nothing else".to_string(),
            }),
        };
        calls.iter().map(exchange).collect()
    }

    /// Enqueues concurrent sends and receives, followed by copies, on the main stream during its
    /// capture.
    pub(super) fn issue_exchanges(
        &mut self,
        exchanges: &[ExchangePlan],
        copies: &[(DevicePtr, DevicePtr, usize)],
    ) -> Result<(), DriverError> {
        let compute = self.compute;
        if !exchanges.is_empty() {
            self.driver.expect_outputs(&[]);
            self.driver.begin_group(compute)?;
            match &mut self.comm {
                Some(comm) => comm.run_together(exchanges, compute)?,
                None => return Err(DriverError::new("exchange", "no other ranks")),
            }
            self.driver.end_group(compute)?;
        }
        for &(source, target, bytes) in copies {
            self.driver.copy(target, source, bytes, compute)?;
        }
        Ok(())
    }

    /// Returns the stream of a recording's calls, created on first use. A stream with collectives
    /// has high priority, since other ranks wait for them.
    fn stream(&mut self, id: StreamId, calls: &[Issue]) -> Result<Stream, DriverError> {
        match self.sides.get(&id) {
            _ if id == 0 => Ok(self.compute),
            Some(&stream) => Ok(stream),
            None => {
                let steps = calls
                    .iter()
                    .filter(|issue| issue.stream == id)
                    .filter_map(|issue| self.prepared.get(issue.call?.0))
                    .flat_map(|prepared| &prepared.steps);
                let has_exchange = { steps }.any(|step| matches!(step, Step::Exchange(_)));
                let priority = if has_exchange { Priority::High } else { Priority::Low };
                let stream = self.driver.stream(priority)?;
                self.sides.insert(id, stream);
                Ok(stream)
            }
        }
    }

    /// Returns the event of edge `index`, created on first use.
    fn edge(&mut self, index: usize) -> Result<Event, DriverError> {
        while self.edges.len() <= index {
            self.edges.push(self.driver.event(false)?);
        }
        Ok(self.edges[index])
    }

    /// Enqueues calls on their streams while the main stream is captured: side streams fork from it
    /// first and join it last.
    pub(super) fn issue_all(&mut self, calls: &[Issue]) -> Result<(), KernelError> {
        let mut sides: Vec<StreamId> =
            calls.iter().map(|issue| issue.stream).filter(|&stream| stream != 0).collect();
        sides.sort_unstable();
        sides.dedup();
        let (compute, mut edges) = (self.compute, 0..);
        let mut edge = move || edges.next().unwrap_or(usize::MAX);
        if !sides.is_empty() {
            let fork = self.edge(edge())?;
            self.driver.record(fork, compute)?;
            for &side in &sides {
                let side = self.stream(side, calls)?;
                self.driver.wait(side, fork)?;
            }
        }
        let mut recorded: HashMap<EventId, Event> = HashMap::new();
        for issue in calls {
            let stream = self.stream(issue.stream, calls)?;
            for id in &issue.waits {
                let Some(&event) = recorded.get(id) else {
                    return Err(KernelError::Run {
                        call: format!("prepared call {:?}", issue.call),
                        what: format!("waits for event {id}, which no call before it records"),
                    });
                };
                self.driver.wait(stream, event)?;
            }
            if let Some(call) = issue.call {
                self.issue(call.0, stream, true)?;
            }
            if let Some(id) = issue.records {
                let event = self.edge(edge())?;
                self.driver.record(event, stream)?;
                recorded.insert(id, event);
            }
        }
        for side in sides {
            let stream = self.stream(side, calls)?;
            let join = self.edge(edge())?;
            self.driver.record(join, stream)?;
            self.driver.wait(compute, join)?;
        }
        Ok(())
    }
}
