//! Lowers a captured graph and a plan to the program of one rank.

mod bodies;
mod builder;
mod context;
mod copies;
mod evaluation;
mod expert;
mod fallback;
mod flops;
mod handover;
mod inference;
mod lowering;
mod masters;
mod offload;
mod optimizer;
mod overlap_collectives;
mod overlapped_reduction;
mod parameters;
mod pipeline;
mod place_values;
mod rank;
mod rank_graph;
mod scheduling;
mod shared_graph;
mod side_streams;
mod splits;
mod stage;
mod streams;
mod tensor;
mod train;
mod update_in_backward;
mod zero;

pub use self::evaluation::lower_evaluation;
pub(crate) use self::expert::expand_experts;
pub(crate) use self::fallback::mxfp8_plan;
pub use self::fallback::{Transient, fallback_plan, further_copy_bytes, shared_operand_lifetimes};
pub use self::fallback::{
    arena_bytes_with_fallback, arena_bytes_with_fallbacks, lower_fallback, lower_within,
};
pub use self::flops::{LinearFlops, linear_flops, quantized_bytes, quantized_flop_share};
pub use self::inference::{Inference, lower_inference, lower_scoring};
pub use self::lowering::Counted;
pub use self::place_values::place_state_as;
pub use self::scheduling::{EXCHANGES, Scheduling};
pub use self::shared_graph::{Differentiated, SharedGraph};
pub use self::train::{lower, lower_scheduled};
pub use self::zero::block_slice;
