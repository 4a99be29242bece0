//! Data flow, from the machine to a file that somebody else can load, each step by itself: `cargo
//! run --release -p deepwell-trainer --example tour`. The chapter `docs/tour.md` explains the steps
//! with the lines of this file.

use std::error::Error;
use std::sync::Arc;

use deepwell_ir::capture::ModelConfig;
use deepwell_plan::dryrun;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::probe;
use deepwell_trainer::data::{DataOptions, Dataset};
use deepwell_trainer::quantize_file::{FileFormat, QuantizeFileOptions, quantize};
use deepwell_trainer::{CompileOptions, Settings, Trainer, compile};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "A well is deep where its water is clear. ".repeat(400))?;

    // Probe: what is here, as one value. `Hardware::preset("h200-x2")` is a machine elsewhere.
    let hardware = probe();
    print!("{}", hardware.table());

    // Capture: a preset here; a folder or a `config.json` with `ModelConfig::from_path`.
    let model = ModelConfig::preset("llama-micro").ok_or("no such preset")?;
    let graph = model.capture(Some(32))?;
    println!("{} parameters", graph.parameter_count());

    // Plan and compile: the passes over the graph, the search, lowering, kernels, one arena.
    let policy = PrecisionPolicy::mxfp8();
    let mut engine = compile(graph, hardware, &CompileOptions::new(policy, 32, 4))?;
    print!("{}", engine.plan());

    // Dry run: memory and time, from the very list of calls that will run.
    println!("{}", engine.prediction());
    let again = dryrun(std::slice::from_ref(engine.program()), engine.hardware());
    assert_eq!(again.ranks[0].flops, engine.prediction().ranks[0].flops);

    // Fit: batches, schedule, guards, metrics, checkpoints.
    let settings = Settings {
        model: "llama-micro".to_owned(),
        data: vec![text.clone()],
        out: folder.path().join("run"),
        precision: "mxfp8".to_owned(),
        steps: 20,
        seq_len: 32,
        batch_size: 4,
        learning_rate: Some(3e-3),
        eval_tokens: 512,
        ..Settings::default()
    };
    let options = DataOptions {
        inputs: settings.data.clone(),
        cache_dir: folder.path().join("cache"),
        heldout_tokens_min: 1024,
        ..DataOptions::default()
    };
    let dataset = Dataset::prepare(&options, &mut |_| {})?;
    engine.initialize(settings.seed)?;
    let mut trainer = Trainer::from_engine(engine, settings.clone(), Arc::clone(dataset.tokens()));
    let report = trainer.fit(&mut ())?;
    assert_eq!(report.step, 20);

    // Checkpoint: complete or absent, every byte checksummed.
    let checkpoints = Trainer::checkpoints_path(&settings.out);
    let newest = deepwell_ckpt::latest(&checkpoints)?.ok_or("no checkpoint")?;
    assert!(deepwell_ckpt::verify(&newest.path)?.is_sound());
    println!("{}", newest.path.display());

    // Artifact: the trained weights in a block format, in one file that others read too.
    let weights = newest.path.join("master-00001.safetensors");
    let small = folder.path().join("small.safetensors");
    let report = quantize(&QuantizeFileOptions::new(weights, small, FileFormat::Mxfp8))?;
    println!("{} bytes became {}", report.bytes_in, report.bytes_out);
    Ok(())
}
