//! Passes over a captured graph (keep_layers, documents, tensor_parallel, pipeline) and, in this
//! order, over a differentiated graph: recompute, precision, saved_activations and bf16_masters
//! (only if asked for), product_errors (only of a program that measures), context_parallel, fuse,
//! weight_gradients.

mod assign;
mod bf16_masters;
mod context_parallel;
mod documents;
mod fuse;
mod keep_layers;
mod pipeline;
mod precision;
mod predict;
mod product_errors;
mod quantize_operands;
mod recompute;
mod saved_activations;
mod stored_inputs;
mod tensor_parallel;
mod tensor_precision;
mod weight_gradients;

pub use assign::{
    check_split_blocks, expert_row_alignment, quantizable_weights, weight_assignments,
};
pub use bf16_masters::bf16_masters;
pub use context_parallel::context_parallel;
pub use documents::mask_documents;
pub use fuse::fuse;
pub use keep_layers::{keep_layers, layer_kinds};
pub use pipeline::{PipelineCut, cut_pipeline};
pub use precision::{
    RankSlices, Serves, apply_precision, apply_precision_of_rank, apply_served_precision,
};
pub use predict::Predict;
pub use product_errors::measure_products;
pub use recompute::{Recompute, recompute};
pub use saved_activations::{SavedActivations, save_activations};
pub use tensor_parallel::tensor_parallel;
pub use tensor_precision::TensorPrecision;
pub use weight_gradients::defer_weight_gradients;
