//! The data structures shared by all Deepwell crates: the model as a [`Graph`], and the
//! lowered step as a [`Program`].
//!
//! # Brief overview
//!
//! A [`Graph`] holds typed ops over tensors in execution order. It is captured from a model
//! ([`capture`]) or built by hand ([`GraphBuilder`]). [`differentiate`] adds the backward,
//! [`recompute`] saves memory at the cost of time, [`apply_precision`] turns a precision policy
//! into explicit casts and quantizations, and [`fuse`] merges neighbouring ops. [`verify`] checks
//! the result of each pass. A planner lowers a graph to a [`Program`]: kernel calls over byte
//! ranges of one arena, as plain data with a text form and a verifier ([`verify_program`]). The
//! planner queries the available kernels through the [`KernelCatalog`] trait; this crate knows no
//! kernel and no device.
//!
//! ```
//! use deepwell_ir::capture::{LlamaConfig, capture};
//! use deepwell_ir::{PrecisionPolicy, Recompute, apply_precision, differentiate, fuse, recompute};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LlamaConfig::preset("parity-3m").ok_or("no such preset")?;
//! let forward = capture(&config)?;
//! assert_eq!(forward.parameter_count(), 3_082_496);
//! let training = recompute(&differentiate(&forward)?, Recompute::None)?;
//! let (quantized, precision) = apply_precision(&training, &PrecisionPolicy::mxfp8())?;
//! let fused = fuse(&quantized, &|_, _, _| None)?;
//! assert!(fused.to_string().contains("scaled_gemm"));
//! assert_eq!(precision[0].tensor, "model.embed_tokens.weight");
//! # Ok(())
//! # }
//! ```

pub mod autodiff;
mod builder;
pub mod capture;
mod catalog;
mod dtype;
mod error;
mod graph;
mod link;
mod op;
pub mod ops;
mod passes;
mod program;
mod ranks;
mod safetensors_header;
mod shape;
mod split;
mod storage;
mod text;
mod verify;

pub use autodiff::differentiate;
pub use builder::GraphBuilder;
pub use catalog::{
    KernelCatalog, KernelChoice, KernelRequest, NoKernel, OperandType, Rejected, Selection, Target,
    Tile,
};
pub use deepwell_precision::{GemmKind, PrecisionPolicy, Role};
pub use dtype::DType;
pub use error::{IrError, OpError};
pub use graph::{
    Graph, Init, InputRole, Node, NodeId, Phase, Stage, Tag, Tensor, TensorId, TensorKind,
};
pub use link::{Derivation, Link};
pub use op::{MathUnit, Op, OpRule, OutputKind, OutputType, TensorType};
pub use passes::{
    PipelineCut, Predict, RankSlices, Recompute, SavedActivations, Serves, TensorPrecision,
    apply_precision, apply_precision_of_rank, apply_served_precision, bf16_masters,
    check_split_blocks, context_parallel, cut_pipeline, defer_weight_gradients,
    expert_row_alignment, fuse, keep_layers, layer_kinds, mask_documents, measure_products,
    quantizable_weights, recompute, save_activations, tensor_parallel, weight_assignments,
};
pub use program::{
    ALIGNMENT_BYTES, Access, Accumulate, Arena, Arrival, Body, BodyId, ByteRange, Call, Cost,
    EventId, Gathered, Handover, HostInterface, Instance, Invocation, Master, Meeting, MemoryKind,
    Mode, Operand, Order, ParameterState, Program, Quantization, Schedule, Shard, Slotted,
    StreamId, Unstored, Value, ValueId, verify_program,
};
pub use ranks::{GroupId, GroupRank, ProcessGroup, Ranks};
pub use safetensors_header::{SafetensorsError, SafetensorsHeader};
pub use shape::{Binding, Dim, Shape};
pub use split::{Split, SplitOver};
pub use storage::{Plane, PlaneType, Storage, storage_bytes};
pub use verify::verify;

/// Runs the README's examples with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
