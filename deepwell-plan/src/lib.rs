//! Plans the training of a model on given hardware: the crates [`deepwell_lower`] and
//! [`deepwell_search`] under one name.
//!
//! # Brief overview
//!
//! | question | crate |
//! |---|---|
//! | how does this plan run, and what memory and time does its program take? | [`deepwell_lower`] |
//! | which plan is best on this cluster? | [`deepwell_search`] |
//!
//! The trainer runs programs of [`deepwell_lower`] and predicts by them alone. The search covers
//! clusters that nobody has at hand, by closed forms; where the trainer can run a strategy,
//! [`Strategy::parallel`] leads from the second to the first.
//!
//! ```
//! use deepwell_plan::arena::{Lifetime, pack};
//!
//! // Two values that never live at the same call share their bytes.
//! let packing = pack(&[
//!     Lifetime { bytes: 4096, first: 0, last: 1 },
//!     Lifetime { bytes: 4096, first: 2, last: 3 },
//! ]);
//! assert_eq!(packing.bytes, 4096);
//! ```

pub use deepwell_lower::*;
pub use deepwell_search::*;
