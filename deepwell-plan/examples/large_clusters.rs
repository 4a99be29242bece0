//! Times a search over 16,384 GPUs, and the simulation of the best plan.
//!
//! `cargo run --release -p deepwell-plan --example large_clusters`

use std::error::Error;
use std::io::Write;
use std::time::Instant;

use deepwell_plan::ModelShape;
use deepwell_plan::search::{ClusterPlan, Machines, Pictures, SearchRequest, search};
use deepwell_probe::Cluster;

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    for (model, seq, batch) in [("llama-3.1-405b", 8192, 2048), ("deepseek-v3", 4096, 16384)] {
        let machines = Machines::of_cluster(&Cluster::from_name("h100:nodes=2048")?)?;
        let shape = ModelShape::known(model).ok_or("a known model")?;
        let request =
            SearchRequest { fp8: true, ..SearchRequest::new(shape, seq, batch, machines) };
        let start = Instant::now();
        let found = search(&request)?;
        let searched = start.elapsed();
        let start = Instant::now();
        let plan = ClusterPlan::new(&request, &found, Some(15e12))?;
        let trace = Pictures::new(&request, &plan)?.chrome_trace();
        let simulated = start.elapsed();
        writeln!(
            out,
            "{model}: {} combinations in {:.3} s; plan with its trace of {} bytes in {:.3} s",
            found.considered,
            searched.as_secs_f64(),
            trace.len(),
            simulated.as_secs_f64()
        )?;
        writeln!(out, "  {}: {:.3} s a step", found.best.at, found.best.seconds)?;
    }
    Ok(())
}
