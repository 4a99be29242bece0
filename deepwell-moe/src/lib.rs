//! The mixture-of-experts block: router, capacity, balancing losses.
//!
//! # Brief overview
//!
//! A mixture-of-experts layer replaces one feed-forward network by many, and each token visits a
//! few. This crate contains the mathematics of routing, on the CPU, over plain slices of `f32` or
//! `f64`, but not the expert networks.
//!
//! - [`route`] turns router logits into a [`Routing`]: for each token the `top_k` experts with the
//!   highest scores and the gate weights for their outputs, as defined by the op [`Route`].
//!   [`Routing::backward`] computes the gradient of the logits from the gradient of the gate
//!   weights. [`TokenRouter`] routes single tokens, for kernels.
//! - [`Dispatch`] sorts the chosen (token, expert) pairs by expert: counts, offsets and the
//!   permutation in both directions, dropless or with a [`Capacity`] limit.
//! - [`expand`] is the pass that turns the experts of a captured graph into ops.
//! - [`load_balancing_loss`] and [`z_loss`] are auxiliary losses with gradients that keep a router
//!   trainable; [`update_selection_bias`] is the alternative without a loss.
//!
//! All arithmetic is in `f64` and rounds once to the slice's type, so the `f32` functions can serve
//! as references for kernels. Ties between experts go to the lower index, and results depend only
//! on the arguments.
//!
//! # Example
//!
//! ```
//! use deepwell_ir::ops::{Route, RouteScore};
//! use deepwell_moe::{Capacity, Dispatch, load_balancing_loss, route, z_loss};
//!
//! # fn main() -> Result<(), deepwell_moe::MoeError> {
//! let router = Route {
//!     experts: 4,
//!     top_k: 2,
//!     score: RouteScore::Softmax,
//!     normalize: true,
//!     scaling: 1.0,
//!     groups: None,
//!     selection_bias: false,
//! };
//! // Three tokens, four experts.
//! let logits: [f32; 12] = [2.0, 1.0, 0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 5.0];
//! let routing = route(&router, &logits, None)?;
//! assert_eq!(routing.experts(), [0, 1, 0, 2, 3, 0]);
//!
//! // Room for ceil(1.0 * 3 * 2 / 4) = 2 tokens an expert: the third that wants expert 0 drops.
//! let dispatch = Dispatch::of_routing(&routing, Capacity::Factor(1.0))?;
//! assert_eq!(dispatch.counts(), [2, 1, 1, 1]);
//! assert_eq!(dispatch.dropped_count(), 1);
//!
//! // Gradients of the logits: from the layer's output, and from both auxiliary losses.
//! let mut dgates = vec![0.1; 6];
//! dispatch.zero_dropped(&mut dgates)?;
//! let through_gates = routing.backward(&dgates)?;
//! let balance = load_balancing_loss(&routing, 1e-2);
//! let z = z_loss(&logits, router.experts, 1e-3)?;
//! let dlogits: Vec<f32> =
//!     (0..12).map(|i| through_gates[i] + balance.dlogits[i] + z.dlogits[i]).collect();
//! assert!(dlogits.iter().all(|gradient| gradient.is_finite()));
//! # Ok(())
//! # }
//! ```

mod dispatch;
mod error;
mod expand;
mod losses;
mod ranks;
mod real;
mod route;
mod selection_bias;
mod training;

pub use deepwell_ir::ops::{Route, RouteScore};
pub use dispatch::{Capacity, DROPPED, Dispatch, GroupedMaps, NOWHERE};
pub use error::MoeError;
pub use expand::{expand, expand_on_rank};
pub use losses::{LossAndGradient, load_balancing_loss, router_losses, z_loss};
pub use ranks::{RankMaps, group_from_ranks};
pub use real::Real;
pub use route::{Routing, TokenRouter, route};
pub use selection_bias::update_selection_bias;
pub use training::{RouterTraining, with_router_training};

#[cfg(test)]
mod test_support;

/// Runs the README's example with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
