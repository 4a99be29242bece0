//! From a model and hardware to a trained model: compile, engine, trainer, data, parity.
//!
//! # Brief overview
//!
//! [`compile`] plans and lowers a captured graph and loads it on a backend: an [`Engine`].
//! [`Trainer`] feeds the engine batches of a [`data::Dataset`], evaluates, guards the precision,
//! and writes metrics and checkpoints. [`optimize`] goes from a model folder to an engine in one
//! call. [`World`] represents several ranks that train one model together. [`generate`] continues a
//! text with a trained model. [`parity`] trains a model in BF16 and in low precision and tests
//! whether low precision holds BF16's loss; [`audit`] compares one step, call by call, with slow
//! definitions. The `deepwell` command is this crate's binary.
//!
//! ```
//! use deepwell_ir::PrecisionPolicy;
//! use deepwell_ir::capture::{LlamaConfig, capture};
//! use deepwell_trainer::{CompileOptions, compile};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LlamaConfig::preset("llama-micro").ok_or("no such preset")?;
//! let options = CompileOptions::new(PrecisionPolicy::mxfp8(), 32, 2);
//! let mut engine = compile(capture(&config)?, deepwell_probe::probe(), &options)?;
//! engine.initialize(0)?;
//! let (inputs, targets) = ([7; 64], [7; 64]);
//! let first = engine.step(&inputs, &targets, 1e-2, 1.0)?;
//! let second = engine.step(&inputs, &targets, 1e-2, 1.0)?;
//! assert!(second.loss < first.loss);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `cuda` | yes | training on NVIDIA GPUs; neither building nor a CPU run needs a toolkit |
//! | `emulated` | yes | the CUDA path on an emulator, `--device emulated:sm90` and its like |
//! | `mpi` | no | CPU ranks that mpirun or srun has started, `--launched --device cpu` |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod atomic_write;
mod auto_precision;
pub mod baselines;
pub mod checkpoint;
pub mod clock;
pub mod console;
mod device;
mod documents;
mod elastic;
mod engine;
mod error;
mod exit_status;
mod expert_charts;
mod expert_rows;
pub mod export;
pub mod fingerprint;
mod fit;
mod fit_report;
mod formats;
pub mod generate;
pub mod init;
mod learning_rate;
pub mod lock;
pub mod memory_sampler;
pub mod parity;
mod peers;
pub mod plan_file;
mod product_charts;
pub mod profile;
mod progress;
mod rank_map;
mod rank_times;
mod record;
mod routers;
pub mod run;
mod run_folder;
mod run_log;
mod run_paths;
mod run_report;
mod settings;
mod settings_unused;
mod source;
mod stalls;
pub mod terminal;
mod trainer;
pub mod tuned;
pub mod weights;
mod world;

pub use auto_precision::{AutoPrecision, auto_policy};
pub use deepwell_audit as audit;
pub use deepwell_data as data;
pub use deepwell_metrics as metrics;
pub use deepwell_plan::Parallel;
pub use deepwell_quantize_file as quantize_file;
pub use deepwell_report as report;
pub use device::{Catalog, Device, Devices, OpenDevice};
pub use documents::Documents;
pub use engine::{
    CompileOptions, Engine, ExpertLoad, Gemm, GemmCounts, OperandStats, PendingStep, ProductSums,
    RunCounts, StepOutcome, StepTime, compile, compile_on, optimize,
};
pub use error::TrainError;
pub use exit_status::ExitStatus;
pub use expert_rows::ExpertRows;
pub use fit_report::FitReport;
pub use formats::quantized_formats;
pub use learning_rate::LearningRateSchedule;
pub use peers::Peers;
pub use product_charts::ProductRecord;
pub use progress::Progress;
pub use rank_map::RankCoordinates;
pub use rank_times::RankTime;
pub use record::{ExpertRecord, Record};
pub use routers::with_routers;
pub use run_folder::{RunChange, RunFolder, RunIdentity, RunRecord, Start};
pub use settings::{PARITY_EVAL_TOKENS, PARITY_INTERIM_PART, Settings, SettingsLayer};
pub use source::{
    BYTES, ChosenTokenizer, ModelSource, SpecialTokens, StoredParameter, open_tokenizer,
};
pub use trainer::Trainer;
pub use world::{Launched, Member, World, library_version, supervise};
