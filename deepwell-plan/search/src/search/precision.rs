//! The fastest precision of a cluster's plan.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{SearchRequest, search};

/// Predicted time of a step with linear layers in a precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrecisionTime {
    /// `bf16`, `mxfp8` or `nvfp4`.
    pub precision: String,
    /// Seconds of the best plan's step; `None` if no plan fits.
    pub seconds: Option<f64>,
}

impl fmt::Display for PrecisionTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seconds {
            Some(seconds) => write!(f, "{} {seconds:.3} s", self.precision),
            None => write!(f, "{} without a plan that fits", self.precision),
        }
    }
}

impl SearchRequest {
    /// Sets the precision with the least predicted time on all GPUs of the request, of those that
    /// its tensor cores multiply in: BF16, MXFP8 with FP8 units, NVFP4 with units that are faster
    /// than FP8. Returns the times of all.
    ///
    /// The times are those of the closed form, which needs no programs.
    ///
    /// ```
    /// use deepwell_search::gpu_model::GpuModel;
    /// use deepwell_search::search::{Machines, SearchRequest};
    /// use deepwell_search::ModelShape;
    ///
    /// let shape = ModelShape::known("llama-3-70b").unwrap();
    /// let machines = Machines::of_gpus(GpuModel::gb200(), 64);
    /// let mut request = SearchRequest::new(shape, 8192, 64, machines);
    /// let times = request.take_fastest_precision();
    /// assert_eq!(times.len(), 3);
    /// assert!(request.nvfp4);
    /// ```
    pub fn take_fastest_precision(&mut self) -> Vec<PrecisionTime> {
        let gpu = &self.machines.gpu;
        let units = [
            ("bf16", [false, false], true),
            ("mxfp8", [true, false], gpu.fp8_flops > gpu.bf16_flops),
            ("nvfp4", [true, true], gpu.nvfp4_flops > gpu.fp8_flops),
        ];
        let most = SearchRequest {
            gpus: self.gpus.first().copied().into_iter().collect(),
            ..self.clone()
        };
        let mut times = Vec::new();
        let mut least = f64::INFINITY;
        for (precision, [fp8, nvfp4], _) in units.into_iter().filter(|(_, _, has)| *has) {
            let found = search(&SearchRequest { fp8, nvfp4, ..most.clone() }).ok();
            let seconds = found.map(|found| found.step.seconds);
            // Fewer bits at the same time, or where nothing fits, take less memory.
            if seconds.unwrap_or(f64::INFINITY) <= least {
                least = seconds.unwrap_or(least);
                (self.fp8, self.nvfp4) = (fp8, nvfp4);
            }
            times.push(PrecisionTime { precision: precision.to_string(), seconds });
        }
        times
    }
}
