//! A simulated pipeline as a Chrome trace and as an SVG.

use serde_json::{Value, json};
use svg::Document;
use svg::node::element::{Rectangle, Title};

use super::{Pass, PipelineRun};

/// Name and colour of a pass.
const fn look(pass: Pass) -> (&'static str, &'static str) {
    match pass {
        Pass::Forward => ("F", "#4e79a7"),
        Pass::Dgrad => ("B", "#59a14f"),
        Pass::Wgrad => ("W", "#edc948"),
        Pass::Backward => ("BW", "#59a14f"),
    }
}

impl PipelineRun {
    /// The run in the trace event format of `chrome://tracing` and Perfetto, with a thread for each
    /// stage. `seconds` is the length of the run's time unit.
    pub fn chrome_trace(&self, seconds: f64) -> String {
        json!({ "traceEvents": self.trace_events(seconds) }).to_string()
    }

    /// The events of [`PipelineRun::chrome_trace`].
    pub fn trace_events(&self, seconds: f64) -> Vec<Value> {
        let mut events: Vec<Value> = Vec::new();
        for (stage, runs) in self.stages.iter().enumerate() {
            let name = format!("stage {stage}");
            events.push(json!({
                "ph": "M", "pid": 0, "tid": stage, "name": "thread_name", "args": { "name": name }
            }));
            for run in runs {
                let (pass, _) = look(run.op.pass);
                let microseconds = seconds * 1e6;
                events.push(json!({
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "name": format!("{pass}{}.{}", run.op.micro_batch, run.op.chunk),
                    "ts": run.start * microseconds,
                    "dur": (run.end - run.start) * microseconds,
                }));
            }
        }
        events
    }

    /// The run as a picture: a row for each stage, idle time left white.
    pub fn svg(&self) -> String {
        const WIDTH: f64 = 1200.0;
        const ROW: f64 = 18.0;
        let height = ROW * self.stages.len() as f64;
        let scale = WIDTH / self.makespan().max(f64::MIN_POSITIVE);
        let mut document = Document::new().set("viewBox", (0, 0, WIDTH, height));
        for (stage, runs) in self.stages.iter().enumerate() {
            let y = ROW * stage as f64 + 1.0;
            for run in runs {
                let (pass, color) = look(run.op.pass);
                let (x, width) = (run.start * scale, (run.end - run.start) * scale);
                let title = format!("stage {stage} {pass}{}.{}", run.op.micro_batch, run.op.chunk);
                document = document.add(
                    Rectangle::new()
                        .set("x", format!("{x:.2}"))
                        .set("y", y)
                        .set("width", format!("{width:.2}"))
                        .set("height", ROW - 2.0)
                        .set("fill", color)
                        .add(Title::new(title)),
                );
            }
        }
        format!("{document}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OpTimes, PipelineSchedule, orders, simulate};
    use super::*;

    fn run() -> PipelineRun {
        let times = OpTimes { forward: 1.0, dgrad: 2.0, wgrad: 1.0, p2p: 0.0 };
        let orders = orders(PipelineSchedule::ZbH1, 2, 3, 1).unwrap();
        simulate(&orders, 1, &[times; 2]).unwrap()
    }

    #[test]
    fn traces_hold_every_op() {
        let trace: Value = serde_json::from_str(&run().chrome_trace(1e-3)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let ops: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
        // Two stages, three micro-batches, F, B and W.
        assert_eq!(ops.len(), 18);
        assert_eq!(ops[0]["dur"], 1000.0);
        let last = ops.iter().map(|op| op["ts"].as_f64().unwrap() + op["dur"].as_f64().unwrap());
        assert!((last.fold(0.0, f64::max) - run().makespan() * 1e3).abs() < 1e-6);
    }

    #[test]
    fn pictures_hold_every_op() {
        let svg = run().svg();
        assert_eq!(svg.matches("<rect").count(), 18);
        assert!(svg.contains("stage 1 W2.0"));
    }
}
