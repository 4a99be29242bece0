//! A training step checked call by call against slow definitions.
//!
//! # Brief overview
//!
//! [`Audit`] is an observer of one or more steps. After each call it compares the outputs in the
//! arena with the results that the call's definition gives for the inputs in the arena:
//!
//! | call | compared |
//! |---|---|
//! | quantization, of activations, gradients and weights | every code and every scale byte |
//! | cast of a weight, dequantization, rounding at random | every element |
//! | GEMM of a linear layer | [`SAMPLES`] outputs, with dot products in `f64` |
//! | gradient norm | the number |
//! | AdamW | the coefficients of a step and its counters |
//! | AdamW of a bucket | [`SAMPLES`] elements of every parameter and of both its moments |
//!
//! Quantized weights are compared with the current master weights, also at the start of a step, so
//! that stale copies are found. The quantized operands of a GEMM must be unchanged since their
//! quantization wrote them. [`Audit::new`] also checks the program itself: [`audit_provenance`] and
//! [`audit_counts`]. Attention, norms, rotations, embedding and loss are not checked. If a kernel
//! quantizes a high-precision tensor that it does not store, the quantized data are checked only
//! for being unchanged.
//!
//! On the CPU only the samples are copied; tensors are read in place, so the audit does not raise
//! the peak memory, which is often measured in the same run. If the host cannot see the device's
//! memory, the operands of one call at a time are copied to the host.
//!
//! ```
//! use deepwell_audit::Audit;
//! use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
//! use deepwell_ir::PrecisionPolicy;
//! use deepwell_kernels::{CpuCatalog, cpu_target};
//! use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LlamaConfig::preset("llama-micro").ok_or("no such preset")?;
//! let graph = capture_for_sequence(&config, 32)?;
//! let hardware = deepwell_probe::probe();
//! let request = PlanRequest {
//!     seq: 32,
//!     global_batch: 1,
//!     policy: PrecisionPolicy::mxfp8(),
//!     optimizer: OptimizerSpec::default(),
//!     memory_limit_bytes: None,
//!     micro_batch: None,
//!     recompute: None,
//!     saved_activations: Default::default(),
//! };
//! let planned = autoplan(&graph, &hardware, &request, &CpuCatalog, &cpu_target(1))?;
//! // The program itself: `Executor::run_observed` takes the audit to check its calls as they run.
//! let report = Audit::new(&planned.program).finish();
//! assert!(report.is_clean(), "{report}");
//! # Ok(())
//! # }
//! ```

mod emulated;
mod gemms;
mod moments;
mod planes;
mod quantized;
mod report;
mod stochastic;
mod structure;
mod update;
mod view;

use std::collections::HashMap;

use deepwell_ir::{ByteRange, Call, Instance, Op, Phase, Program};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};

pub use report::{AuditReport, FINDINGS_KEPT, Finding};
pub use structure::{audit_counts, audit_provenance};
pub use view::SAMPLES;

use planes::Tables;
use update::{BeforeUpdate, StepCoefficients};
use view::{Memory, fingerprint, view};

/// Values read before a call for use after the call.
enum Pending {
    /// Sampled outputs of a GEMM that accumulates.
    Accumulator(Vec<f32>),
    /// Coefficients of the optimizer's step.
    Coefficients(StepCoefficients),
    /// Sampled parameters, moments and gradients of a bucket.
    Update(BeforeUpdate),
}

/// Observes steps and collects findings, see the module documentation.
pub struct Audit {
    report: AuditReport,
    tables: Tables,
    pending: Option<Pending>,
    /// Fingerprints of data and scales as written by their quantization, by byte range.
    written: HashMap<ByteRange, u64>,
}

impl Audit {
    /// Checks the program itself; steps are checked when they run under this observer.
    pub fn new(program: &Program) -> Audit {
        let mut report = AuditReport::default();
        for finding in audit_counts(program).into_iter().chain(audit_provenance(program)) {
            report.add(&finding.call, finding.what);
        }
        Audit { report, tables: Tables::new(), pending: None, written: HashMap::new() }
    }

    /// Returns the counts and findings.
    pub fn finish(self) -> AuditReport {
        self.report
    }

    /// Checks the quantized and cast weights that the previous step left for this one.
    fn start_of_step(
        &mut self,
        program: &Program,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        for call in program.calls.iter().filter(|call| call.phase == Phase::Weights) {
            let memory = Memory::of_call(program, call, Instance::ONLY, backend)?;
            self.check_conversion(program, call, &memory, "at the start of the step, ")?;
        }
        Ok(())
    }

    /// Casts and quantizations. `moment` opens the findings.
    fn check_conversion(
        &mut self,
        program: &Program,
        call: &Call,
        memory: &Memory<'_>,
        moment: &str,
    ) -> Result<(), KernelError> {
        let report = &mut self.report;
        for cast in call.casts() {
            quantized::check_cast(report, program, call, cast, memory, moment)?;
        }
        for quantization in call.quantizations() {
            quantized::check_quantize(report, program, call, &quantization, memory, moment)?;
            for operand in quantization.quantized_operands() {
                let bytes = view(program, operand.value, memory)?.bytes;
                self.written.insert(memory.range(program, operand.value), fingerprint(bytes));
            }
        }
        Ok(())
    }

    /// Checks that data and scales are unchanged since their quantization.
    fn check_unchanged(
        &mut self,
        program: &Program,
        call: &Call,
        memory: &Memory<'_>,
    ) -> Result<(), KernelError> {
        for operand in call.inputs() {
            let range = memory.range(program, operand.value);
            let Some(&written) = self.written.get(&range) else { continue };
            let operand = view(program, operand.value, memory)?;
            if fingerprint(operand.bytes) != written {
                let what = format!("`{}` changed after it was quantized", operand.name);
                self.report.add(&call.name, what);
            }
        }
        Ok(())
    }
}

impl Observer for Audit {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        let first = program.calls.first().filter(|_| instance.is_first);
        if first.is_some_and(|first| first.name == call.name) {
            self.start_of_step(program, backend)?;
        }
        self.pending = None;
        match &call.op {
            Op::AdamWCoefficients(op) => {
                let memory = Memory::of_call(program, call, instance, backend)?;
                let expected = StepCoefficients::read(program, call, op, &memory)?;
                self.pending = Some(Pending::Coefficients(expected));
            }
            Op::AdamW(op) => {
                let memory = Memory::of_call(program, call, instance, backend)?;
                let before = BeforeUpdate::read(program, call, op, &memory)?;
                self.pending = Some(Pending::Update(before));
            }
            _ => {}
        }
        let reads_quantized = matches!(
            call.op.leading(),
            Op::ScaledGemm(_) | Op::ScaledGroupedGemm(_) | Op::Dequantize(_)
        );
        let adds = gemms::is_gemm(&call.op) && call.accumulate.adds(instance);
        if reads_quantized || adds {
            let memory = Memory::of_call(program, call, instance, backend)?;
            if adds {
                let sampled = gemms::sampled_output(program, call, &memory)?;
                self.pending = Some(Pending::Accumulator(sampled));
            }
            if reads_quantized {
                self.check_unchanged(program, call, &memory)?;
            }
        }
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        let pending = self.pending.take();
        let quantizes = !call.casts().is_empty() || !call.quantizations().is_empty();
        let is_other = matches!(
            call.op,
            Op::GradNorm(_)
                | Op::AdamWCoefficients(_)
                | Op::AdamW(_)
                | Op::Dequantize(_)
                | Op::StochasticRound(_)
        );
        if !(quantizes || is_other || gemms::is_gemm(&call.op)) {
            return Ok(());
        }
        let memory = Memory::of_call(program, call, instance, backend)?;
        if quantizes {
            self.check_conversion(program, call, &memory, "")?;
        }
        let report = &mut self.report;
        match (&call.op, pending) {
            (Op::GradNorm(_), _) => update::check_norm(report, program, call, &memory),
            (Op::Dequantize(op), _) => {
                emulated::check_dequantize(report, program, call, op, &memory, &self.tables)
            }
            (Op::StochasticRound(op), _) => {
                let data = stochastic::check(report, program, call, op, &memory)?;
                self.written.insert(memory.range(program, data.0), data.1);
                Ok(())
            }
            (_, Some(Pending::Coefficients(expected))) => {
                expected.check(report, program, call, &memory)
            }
            (Op::AdamW(op), Some(Pending::Update(before))) => {
                before.check(report, program, call, op, &memory)
            }
            (op, pending) if gemms::is_gemm(op) => {
                let previous = match pending {
                    Some(Pending::Accumulator(previous)) => previous,
                    _ => Vec::new(),
                };
                gemms::check(report, program, call, &memory, &self.tables, &previous)
            }
            _ => Ok(()),
        }
    }
}
