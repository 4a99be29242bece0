//! A model folder of fresh weights with a planted fault.

use std::path::Path;

use deepwell_ckpt::CkptDtype;
use deepwell_ckpt::hf::{WriteTensor, write};
use deepwell_ir::capture::Weights;
use deepwell_trainer::export::{ExportOptions, export_hf};
use deepwell_trainer::{Settings, Start, Trainer};

use crate::rank_runs::go;

/// Name, shape and elements.
pub(crate) type Tensor = (String, Vec<usize>, Vec<f32>);

/// Trains one step by `settings`, exports the weights to `to`, changes them by `plant` and returns
/// the folder.
pub(crate) fn planted_model(
    settings: Settings,
    to: &Path,
    plant: impl FnOnce(&mut [Tensor]),
) -> String {
    let made = Settings { no_checkpoints: false, steps: 1, ..settings };
    go(&made, Start::New).expect("a run");
    let checkpoints = deepwell_ckpt::list(&Trainer::checkpoints_path(&made.out)).expect("some");
    let options = ExportOptions {
        checkpoint: checkpoints[0].path.clone(),
        to: to.to_path_buf(),
        dtype: CkptDtype::F32,
        shard_bytes_max: 1 << 30,
        model: None,
        tokenizer: None,
        config: None,
    };
    export_hf(&options, &mut |_, _| ()).expect("a model folder");
    let weights = Weights::open(to).expect("weights");
    let mut tensors: Vec<Tensor> = weights
        .tensors()
        .map(|tensor| {
            let values = weights.read_f32(&tensor.name, &tensor.shape).expect("a tensor");
            (tensor.name.clone(), tensor.shape.clone(), values)
        })
        .collect();
    drop(weights);
    plant(&mut tensors);
    let views: Vec<WriteTensor<'_>> =
        tensors.iter().map(|(name, shape, it)| WriteTensor::from_f32(name, shape, it)).collect();
    write(&to.join("model.safetensors"), &views).expect("written");
    to.to_str().expect("a path").to_string()
}
