//! Block scales that stop following the data: guards move the GEMM that reads them to MXFP8, from
//! there to BF16, and back to NVFP4 after the fault.

#[expect(dead_code, reason = "runs of one rank need less")]
mod rank_runs;

use std::collections::HashMap;
use std::sync::Arc;

use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_ir::{Call, Instance, Op, PrecisionPolicy, Program};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};
use deepwell_precision::GuardConfig;
use deepwell_trainer::data::TokenCache;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::{CompileOptions, Progress, Settings, Trainer, compile};

use rank_runs::TestFolder;

const SEQ: usize = 64;
const BATCH: usize = 2;
/// A GEMM whose activations no other GEMM reads.
const GEMM: &str = "layers.1.mlp.down_proj";

/// From the first sight of them on, the block scales of the first operand of [`GEMM`] stay what
/// they were, whatever data the operand has, until the last faulty step. So do the scales of
/// another format of that operand.
#[derive(Default)]
struct StuckScales {
    /// Scales by number of bytes, which tells formats apart.
    stuck: HashMap<usize, Vec<u8>>,
    finished_steps: u64,
    last_faulty_step: u64,
}

impl Observer for StuckScales {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        _: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        // The measurement of the product reads the operand before the GEMM does.
        let reads = matches!(call.op, Op::ScaledGemm(_) | Op::ProductError(_));
        let gemm = program.calls.iter().find(|it| it.name == GEMM);
        let scales = gemm.filter(|it| matches!(it.op, Op::ScaledGemm(_)));
        let scales = scales.map(|gemm| gemm.operands[1].value).filter(|_| reads);
        let is_reader = scales.is_some_and(|id| call.inputs().iter().any(|it| it.value == id));
        let (true, Some(id)) = (is_reader, scales) else { return Ok(CallAction::Run) };
        if self.finished_steps < self.last_faulty_step {
            let range = program.value(id).range;
            let mut bytes = vec![0; range.bytes];
            backend.read(range, &mut bytes)?;
            let stuck = self.stuck.entry(bytes.len()).or_insert(bytes);
            backend.write(range, stuck)?;
        }
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        _: &Program,
        call: &Call,
        _: Instance,
        _: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        self.finished_steps += u64::from(call.name == "adamw_coefficients");
        Ok(())
    }
}

#[derive(Default)]
struct Events(Vec<String>);

impl Progress for Events {
    fn step(&mut self, _line: &StepLine) {}
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, text: &str) {
        self.0.extend(text.strip_prefix("guard at step ").map(str::to_string));
    }
}

/// What guards say in 14 steps, all measured.
fn events(last_faulty_step: u64) -> Vec<String> {
    let place = TestFolder::new();
    let config = LlamaConfig {
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        hidden_size: 128,
        intermediate_size: 256,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    let settings = Settings {
        guards: GuardConfig {
            product_every_steps: 1,
            backoff_steps: 4,
            probation_steps: 1,
            fallbacks_max: 9,
            ..GuardConfig::default()
        },
        precision: "nvfp4".to_string(),
        steps: 14,
        seq_len: SEQ,
        batch_size: BATCH,
        eval_every: Some(10_000),
        no_checkpoints: true,
        checkpoint_every: None,
        ..place.settings("run", 1)
    };
    let graph = capture_for_sequence(&config, SEQ).expect("a graph");
    let policy = PrecisionPolicy::nvfp4();
    let options =
        CompileOptions { micro_batch: Some(1), ..CompileOptions::new(policy, SEQ, BATCH) };
    let mut engine = compile(graph, deepwell_probe::probe(), &options).expect("an engine");
    engine.initialize(7).expect("weights");
    let observer = StuckScales { last_faulty_step, ..StuckScales::default() };
    engine.observe_steps(Box::new(observer));
    let token = |index: u32| index.wrapping_mul(2_654_435_761) >> 16 & 255;
    let tokens: Vec<u32> = (0..8000).map(token).collect();
    let tokens = Arc::new(TokenCache::in_memory(&tokens, &tokens[..400]));
    let mut events = Events::default();
    Trainer::from_engine(engine, settings, tokens).fit(&mut events).expect("a run");
    events.0
}

#[test]
fn stuck_scales_move_the_gemm_that_reads_them_to_mxfp8_then_to_bf16_and_back() {
    assert_eq!(events(0), [""; 0]);
    let events = events(4);
    let expected =
        [("2", "ToMxfp8"), ("4", "ToBf16"), ("12", "BackToLow"), ("13", "ProbationPassed")];
    assert_eq!(events.len(), expected.len(), "{events:#?}");
    for (event, (step, kind)) in events.iter().zip(expected) {
        assert!(event.starts_with(&format!("{step}: {kind}")), "{events:#?}");
        assert!(event.contains(&format!(" model.{GEMM}.weight: ")), "{events:#?}");
    }
    assert!(events[0].contains("fprop has a signal of "), "{events:#?}");
}
