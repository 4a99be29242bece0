//! Models that PyTorch exported: what the captured graph computes on the CPU backend, against the
//! logits that PyTorch stored beside each archive (`deepwell-ir/scripts/make_pt2_fixtures.py`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{Gpt2Config, Pt2Model};
use deepwell_ir::{Call, Graph, Instance, Program};
use deepwell_kernels::{Backend, KernelError, Observer};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Device, Engine, ModelSource, compile, optimize};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// Largest difference over the largest logit. Both sides compute in F32, whose rounding is far
/// below; a wrong rule is off by 1e-2 or more.
const TOLERANCE: f32 = 1e-4;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deepwell-ir/tests/pt2").join(name)
}

/// What the output head read, and the weight that it read it with.
#[derive(Default)]
struct HeadOperands {
    rows: Vec<f32>,
    table: Vec<f32>,
}

impl Observer for HeadOperands {
    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        if call.op.name() == "linear_cross_entropy_grad" {
            for (index, into) in [(0, &mut self.rows), (1, &mut self.table)] {
                let value = program.value(call.operands[index].value);
                into.resize(value.elements(), 0.0);
                backend.read(value.range, cast_slice_mut(into))?;
            }
        }
        Ok(())
    }
}

/// An engine of a graph in F32, for batches of the sizes that models were exported for.
fn engine_of(graph: Graph, (batch, seq): (usize, usize)) -> Engine {
    let options = CompileOptions {
        micro_batch: Some(batch),
        ..CompileOptions::new(PrecisionPolicy::f32(), seq, batch)
    };
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    compile(graph, Hardware::cpu_only(cpu), &options).unwrap()
}

/// An engine of the captured graph, with the archive's weights.
fn engine(model: &mut Pt2Model) -> Engine {
    let mut engine = engine_of(model.graph.clone(), model.exported_for);
    for state in engine.program().parameters.clone() {
        let values = model.read(&state.name).unwrap();
        engine.write_value(state.master.value(), cast_slice(&values)).unwrap();
    }
    engine.refresh_weight_copies().unwrap();
    engine
}

/// Runs the token ids stored beside a fixture, and wants the logits that are stored with them.
fn check_logits(name: &str, engine: &mut Engine) {
    let bytes = std::fs::read(fixture(&format!("{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = file.tensor("input_ids").unwrap();
    let ids: Vec<i32> = ids
        .data()
        .chunks_exact(8)
        .map(|id| i64::from_le_bytes(id.try_into().unwrap()) as i32)
        .collect();
    let expected = file.tensor("logits").unwrap();
    let vocab = expected.shape()[2];
    let expected: Vec<f32> = expected
        .data()
        .chunks_exact(4)
        .map(|logit| f32::from_le_bytes(logit.try_into().unwrap()))
        .collect();
    let mut head = HeadOperands::default();
    // A learning rate of 0, and a gradient norm that clips nothing.
    let outcome = engine.step_observed(&ids, &ids, 0.0, 1e30, &mut head).unwrap();
    assert!(outcome.loss.is_finite() && outcome.grad_norm > 0.0, "{name}");
    let hidden = head.table.len() / vocab;
    let dot = |row: &[f32], column: &[f32]| -> f32 {
        let terms = row.iter().zip(column);
        terms.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
    };
    let logits: Vec<f32> = head
        .rows
        .chunks_exact(hidden)
        .flat_map(|row| head.table.chunks_exact(hidden).map(move |column| dot(row, column)))
        .collect();
    assert_eq!(logits.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0.0f32, |top, logit| top.max(logit.abs()));
    let off = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs() / largest);
    let worst = off.fold(0.0f32, |top, off| if off.is_nan() { f32::NAN } else { top.max(off) });
    println!("{name}: logits differ by at most {worst:.1e} of the largest");
    assert!(worst <= TOLERANCE, "{name}: {worst:.2e}");
}

#[test]
fn logits_are_those_of_pytorch() {
    for name in [
        "llama",
        "llama_core",
        "llama_eager",
        "llama_scaled",
        "qwen3",
        "gpt2",
        "gpt2_core",
        "phi3",
        "maskfill",
        "maskcore",
        "encoder",
        "encoder_both_ways",
        "mha",
        "mha_core",
    ] {
        let mut model = Pt2Model::open(fixture(&format!("{name}.pt2"))).unwrap();
        assert_eq!(model.opaque(), [], "{name}");
        check_logits(name, &mut engine(&mut model));
    }
}

/// `optimize` takes an archive with its weights, as `deepwell train --model` does.
#[test]
fn optimize_takes_exported_graphs_with_their_weights() {
    for name in ["llama", "gpt2"] {
        let path = fixture(&format!("{name}.pt2"));
        let (batch, seq) = Pt2Model::open(&path).unwrap().exported_for;
        check_logits(name, &mut optimize(path, "f32", seq, batch, Device::Cpu).unwrap());
    }
    let unknown = optimize("no-such-model", "auto", 16, 2, Device::Cpu).err().unwrap();
    assert!(unknown.to_string().contains("expected a preset ("), "{unknown}");
}

/// The weights of the exported GPT-2 as `save_pretrained` stores them, imported through a folder.
#[test]
fn a_folder_of_gpt2_has_the_logits_of_pytorch() {
    let mut model = Pt2Model::open(fixture("gpt2.pt2")).unwrap();
    let config = Gpt2Config {
        vocab_size: 96,
        hidden_size: 32,
        intermediate_size: 128,
        num_heads: 4,
        max_position_embeddings: 32,
        ..Gpt2Config::preset("gpt2-micro").unwrap()
    };
    let mut stored: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (spec, part) in config.parameters_and_parts() {
        let exported = match spec.name.as_str() {
            // One parameter in PyTorch, which calls it by its other name.
            "wte.weight" => "lm_head.weight".to_string(),
            name => {
                let parts = ["q", "k", "v"].map(|part| format!(".attn.{part}."));
                let packed = parts.iter().find(|packed| name.contains(packed.as_str()));
                let name = packed.map_or(name.to_string(), |packed| {
                    name.replace(packed.as_str(), &packed.replace(".attn.", ".attn.c_attn."))
                });
                format!("transformer.{name}")
            }
        };
        let values = model.read(&exported).unwrap();
        let size = part.shape.iter().product();
        let name = format!("transformer.{}", part.name);
        let entry = stored.entry(name).or_insert((part.shape.clone(), vec![0.0; size]));
        part.insert(&values, &spec.shape, &mut entry.1).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("config.json"), config.to_json().to_string()).unwrap();
    let views = stored.iter().map(|(name, (shape, values))| {
        let bytes = cast_slice(values);
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path.join("model.safetensors")).unwrap();

    let mut source = ModelSource::open(path.to_str().unwrap()).unwrap();
    let (batch, seq) = model.exported_for;
    let mut engine = engine_of(source.capture(Some(seq)).unwrap(), (batch, seq));
    assert!(source.load_weights(&mut engine).unwrap());
    check_logits("gpt2", &mut engine);
}
