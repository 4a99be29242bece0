//! Pictures of a step: a trace, a time line, and the memory of each stage over time.

use serde_json::{Value, json};
use svg::Document;
use svg::node::element::path::Data;
use svg::node::element::{Line, Path, Text, Title};

use super::{ClusterPlan, SearchRequest, cluster_plan};
use crate::memory::{StageMemory, chunk_activation_bytes};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::{OpRun, Pass, PipelineRun};

/// Largest number of ops of an SVG: SVG viewers fail on larger ones.
const SVG_OPS_MAX: usize = 200_000;
/// Largest number of stages in a memory plot.
const PLOT_STAGES_MAX: usize = 64;

/// A simulated step of a plan, for drawing.
#[derive(Clone, Debug)]
pub struct Pictures {
    run: PipelineRun,
    /// For each stage, pairs of time and bytes of a rank after each op.
    memory: Vec<Vec<(f64, f64)>>,
    limit_bytes: f64,
    /// Work after the pipeline, in seconds.
    tail: Vec<(&'static str, f64)>,
    title: String,
}

impl Pictures {
    /// Simulates the step of a plan.
    ///
    /// # Errors
    /// A pipeline too long for a simulation.
    pub fn new(request: &SearchRequest, plan: &ClusterPlan) -> Result<Pictures, PlanError> {
        let at = plan.strategy;
        let Some(run) = cluster_plan::pipeline(request, &at)? else {
            return Err(PlanError::Request {
                what: "time line",
                expected: "at most 2,000,000 passes of a step".to_string(),
                got: format!("{} stages x {} micro-batches", at.pp, at.micro_batches),
            });
        };
        let rules = request.memory_rules();
        let memory = plan
            .stages
            .iter()
            .zip(&run.stages)
            .map(|(stage, runs)| {
                let chunks =
                    chunk_activation_bytes(&request.shape, &at, &rules, request.seq, &stage.layers);
                over_time(&stage.memory, &chunks, runs)
            })
            .collect();
        let step = &plan.step;
        Ok(Pictures {
            run,
            memory,
            limit_bytes: request.memory_limit_bytes(),
            tail: vec![
                ("gradients and parameters", step.communication.data.exposed),
                ("optimizer", step.optimizer),
            ],
            title: format!(
                "{} on {} x {}: {at}",
                plan.model.name,
                at.gpus(),
                plan.machines.gpu.name
            ),
        })
    }

    /// The step in the trace event format of `chrome://tracing` and Perfetto: a thread for each
    /// stage, the work after the pipeline, and the bytes of a rank of each stage as counters.
    pub fn chrome_trace(&self) -> String {
        let mut events: Vec<Value> = self.run.trace_events(1.0);
        let mut start = self.run.makespan();
        for (name, seconds) in &self.tail {
            for stage in 0..self.run.stages.len() {
                events.push(json!({
                    "ph": "X", "pid": 0, "tid": stage, "name": name,
                    "ts": start * 1e6, "dur": seconds * 1e6,
                }));
            }
            start += seconds;
        }
        for (stage, points) in self.memory.iter().enumerate() {
            let name = format!("bytes of a rank of stage {stage}");
            events.extend(points.iter().map(|(time, bytes)| {
                json!({
                    "ph": "C", "pid": 0, "name": name, "ts": time * 1e6,
                    "args": { "allocated": bytes },
                })
            }));
        }
        json!({ "traceEvents": events, "otherData": { "plan": self.title } }).to_string()
    }

    /// The time line: a row for each stage, idle time left white.
    ///
    /// # Errors
    /// More ops than SVG viewers can show.
    pub fn time_line_svg(&self) -> Result<String, PlanError> {
        let ops: usize = self.run.stages.iter().map(Vec::len).sum();
        if ops > SVG_OPS_MAX {
            return Err(PlanError::Request {
                what: "time line as SVG",
                expected: format!("at most {SVG_OPS_MAX} ops\nhint: `--trace` takes any number"),
                got: ops.to_string(),
            });
        }
        Ok(self.run.svg())
    }

    /// Bytes of a rank over time: a plot for each stage, the limit as a dashed line.
    ///
    /// # Errors
    /// Too many stages for a picture, or more ops than SVG viewers can show.
    pub fn memory_svg(&self) -> Result<String, PlanError> {
        const WIDTH: f64 = 1200.0;
        const HEIGHT: f64 = 90.0;
        let points: usize = self.memory.iter().map(Vec::len).sum();
        if self.memory.len() > PLOT_STAGES_MAX || points > SVG_OPS_MAX {
            return Err(PlanError::Request {
                what: "plot of memory",
                expected: format!("at most {PLOT_STAGES_MAX} stages and {SVG_OPS_MAX} ops"),
                got: format!("{} stages and {points} ops", self.memory.len()),
            });
        }
        let height = HEIGHT * self.memory.len() as f64;
        let peak = self.memory.iter().flatten().map(|point| point.1).fold(0.0, f64::max);
        let top = peak.max(self.limit_bytes);
        let scale = WIDTH / self.run.makespan().max(f64::MIN_POSITIVE);
        let mut document = Document::new()
            .set("viewBox", (0, 0, WIDTH, height))
            .set("font-family", "sans-serif")
            .set("font-size", 11)
            .add(Title::new(self.title.as_str()));
        for (stage, points) in self.memory.iter().enumerate() {
            let bottom = HEIGHT * (stage + 1) as f64 - 4.0;
            let y = |bytes: f64| bottom - bytes / top * (HEIGHT - 20.0);
            let mut data = Data::new().move_to((0.0, tenths(bottom)));
            for (time, bytes) in points {
                data = data
                    .horizontal_line_to(tenths(time * scale))
                    .vertical_line_to(tenths(y(*bytes)));
            }
            let data =
                data.horizontal_line_to(WIDTH as f32).vertical_line_to(tenths(bottom)).close();
            let peak = points.iter().map(|point| point.1).fold(0.0, f64::max);
            let limit = y(self.limit_bytes);
            let label = format!(
                "stage {stage}: {:.1} GB at most, {:.1} GB may be used",
                peak / 1e9,
                self.limit_bytes / 1e9
            );
            document = document
                .add(Path::new().set("d", data).set("fill", "#4e79a7").set("fill-opacity", 0.6))
                .add(
                    Line::new()
                        .set("x1", 0)
                        .set("x2", WIDTH)
                        .set("y1", format!("{limit:.1}"))
                        .set("y2", format!("{limit:.1}"))
                        .set("stroke", "#e15759")
                        .set("stroke-dasharray", "4 3"),
                )
                .add(Text::new(label).set("x", 4).set("y", format!("{:.1}", limit - 3.0)));
        }
        Ok(format!("{document}\n"))
    }
}

/// A coordinate with one decimal: more would enlarge the file, not change the picture.
fn tenths(coordinate: f64) -> f32 {
    ((coordinate * 10.0).round() / 10.0) as f32
}

/// Bytes of a rank after each op. Logits and gathered parameters are counted at all times, as in
/// the peak.
fn over_time(memory: &StageMemory, chunks: &[f64], runs: &[OpRun]) -> Vec<(f64, f64)> {
    let base = memory.device() - memory.activations;
    let mut live = 0.0;
    let mut points = vec![(0.0, base)];
    for run in runs {
        let bytes = chunks.get(run.op.chunk as usize).copied().unwrap_or(0.0);
        match run.op.pass {
            // Live from the begin of the pass to the end of the last reader.
            Pass::Forward => {
                live += bytes;
                points.push((run.start, base + live));
            }
            Pass::Backward | Pass::Wgrad => {
                live -= bytes;
                points.push((run.end, base + live));
            }
            Pass::Dgrad => {}
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::super::{Machines, search};
    use super::*;
    use crate::ModelShape;
    use crate::gpu_model::GpuModel;

    fn pictures() -> (Pictures, ClusterPlan) {
        let shape = ModelShape::known("llama-3-8b").unwrap();
        let machines = Machines::of_gpus(GpuModel::h100(), 8);
        let mut request = SearchRequest::new(shape, 4096, 32, machines);
        request.pins =
            ["pp=4", "mbs=1", "vpp=1", "tp=1", "cp=1"].map(|pin| pin.parse().unwrap()).to_vec();
        let found = search(&request).unwrap();
        let plan = ClusterPlan::new(&request, &found, None).unwrap();
        (Pictures::new(&request, &plan).unwrap(), plan)
    }

    #[test]
    fn traces_hold_passes_tail_and_memory() {
        let (pictures, plan) = pictures();
        let trace: Value = serde_json::from_str(&pictures.chrome_trace()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        let passes: usize = pictures.run.stages.iter().map(Vec::len).sum();
        // Two more on each of four stages follow the pipeline.
        assert_eq!(count("X"), passes + 8);
        let end = |event: &Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
        let last = events.iter().filter(|event| event["ph"] == "X").map(end).fold(0.0, f64::max);
        assert!((last / 1e6 / plan.step.seconds - 1.0).abs() < 0.05, "{last}");
        assert!(count("C") > 4);
    }

    /// The highest point of each stage's plot equals the peak in the plan's table.
    #[test]
    fn plots_reach_the_peak() {
        let (pictures, plan) = pictures();
        for (stage, points) in plan.stages.iter().zip(&pictures.memory) {
            let peak = points.iter().map(|point| point.1).fold(0.0, f64::max);
            let expected = stage.memory.device();
            assert!((peak / expected - 1.0).abs() < 0.01, "{}: {peak} {expected}", stage.stage);
        }
        let svg = pictures.memory_svg().unwrap();
        assert_eq!(svg.matches("<path").count(), 4);
        assert!(svg.contains("stage 3: ") && svg.ends_with("</svg>\n"));
        assert_eq!(pictures.time_line_svg().unwrap().matches("<svg").count(), 1);
    }
}
