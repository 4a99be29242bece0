//! Checkpoints of ranks that have some of the experts each hold whole tensors by name: any other
//! world goes on from them.

mod rank_runs;

use bytemuck::cast_slice_mut;
use deepwell_ckpt::Section;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, ValueId};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Parallel, Settings, Start, Trainer, World, checkpoint};

use rank_runs::{TestFolder, go, go_until, metrics, tensors};

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph() -> Graph {
    capture(&LlamaConfig::preset("moe-micro").unwrap()).unwrap()
}

fn settings(place: &TestFolder, out: &str, data: usize, expert: usize) -> Settings {
    Settings { model: "moe-micro".to_string(), expert, ..place.settings(out, data) }
}

fn options(parallel: Parallel) -> CompileOptions {
    let policy = deepwell_precision::PrecisionPolicy::preset("mxfp8").unwrap();
    CompileOptions { micro_batch: Some(1), parallel, ..CompileOptions::new(policy, 32, 4) }
}

fn parallel(data: usize, expert: usize) -> Parallel {
    Parallel { expert, ..Parallel::data(data) }
}

#[test]
fn any_world_loads_what_another_saved() {
    let place = TestFolder::new();
    for (data, expert) in [(1, 1), (2, 2), (4, 2)] {
        let name = format!("expert-{data}-{expert}");
        let saved = Settings { steps: 2, ..settings(&place, &name, data, expert) };
        go(&saved, Start::New).unwrap();
        let entries = deepwell_ckpt::list(&Trainer::checkpoints_path(&saved.out)).unwrap();
        let entry = entries.last().unwrap();
        let checkpoint = deepwell_ckpt::load(&entry.path).unwrap();
        for parallel in [parallel(1, 1), parallel(2, 1), parallel(2, 2), parallel(4, 4)] {
            let mut world = World::compile(graph(), hardware(), &options(parallel)).unwrap();
            let loaded = world.on_all(|engine| {
                assert_eq!(checkpoint::load(entry, engine, &mut |_| ())?.step, 2);
                let program = engine.program().clone();
                for state in &program.parameters {
                    let own: [(Section, String, Option<ValueId>); 3] = [
                        (Section::Master, state.name.clone(), Some(state.master)),
                        (
                            Section::MomentFirst,
                            format!("moment1.{}", state.name),
                            state.first_moment,
                        ),
                        (
                            Section::MomentSecond,
                            format!("moment2.{}", state.name),
                            state.second_moment,
                        ),
                    ];
                    for (section, name, id) in own {
                        let Some(id) = id else { continue };
                        let shape = program.whole_shape(state);
                        let mut whole = vec![0f32; shape.iter().product()];
                        checkpoint.read_f32_into(section, &name, &shape, &mut whole).unwrap();
                        assert!(whole.iter().any(|&it| it != 0.0), "`{name}` is empty");
                        let own = match state.split {
                            Some(split) => split.extract(&whole, &program.value(id).shape),
                            None => whole,
                        };
                        let mut got = vec![0f32; own.len()];
                        engine.read_value(id, cast_slice_mut(&mut got))?;
                        assert!(got == own, "rank {} of {parallel}: `{name}`", engine.rank());
                    }
                }
                Ok(())
            });
            loaded.unwrap();
        }
    }
}

/// Held-out windows that ranks cannot share evenly are evaluated all the same.
#[test]
fn ranks_go_on_where_they_stopped() {
    let place = TestFolder::new();
    for (name, data, expert) in [("two", 2, 2), ("four", 4, 2)] {
        let whole = Settings { eval_tokens: 160, ..settings(&place, name, data, expert) };
        let summary = go(&whole, Start::New).unwrap();
        assert_eq!((summary.ranks, summary.fit.heldout_losses.len()), (data, 5));
        let parts = Settings { out: place.path(&format!("{name}-parts")), ..whole.clone() };
        assert!(go_until(&parts, 3).fit.interrupted);
        let resumed = go(&parts, Start::Resume).unwrap();
        assert_eq!(metrics(&parts.out), metrics(&whole.out), "{name}");
        assert_eq!(resumed.fit.heldout_losses, summary.fit.heldout_losses);
        assert!(tensors(&parts.out) == tensors(&whole.out), "{name}");
    }
}

#[test]
fn a_run_goes_on_with_other_ranks() {
    let place = TestFolder::new();
    let run = settings(&place, "run", 2, 2);
    assert!(go_until(&run, 2).fit.interrupted);
    let one = Settings { expert: 1, ranks: 1, ..run.clone() };
    go(&one, Start::Resume).unwrap();
    let alone = settings(&place, "alone", 1, 1);
    go(&alone, Start::New).unwrap();
    let (got, expected) = (metrics(&run.out).0, metrics(&alone.out).0);
    assert_eq!(got.len(), 6);
    for ((step, loss, _), (_, expected, _)) in got.into_iter().zip(expected) {
        // Losses fall by more than this from step to step; other weights would show.
        assert!((loss - expected).abs() < 0.02 * expected, "step {step}: {loss} {expected}");
    }
}
