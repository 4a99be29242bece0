//! Profile of a step: a table, JSON, and a trace for Chrome and Perfetto.

mod call;
mod exchanges;
mod ranks;
mod step;

pub use self::call::CallProfile;
pub use self::exchanges::{ExchangeProfile, RankExchanges};
pub use self::ranks::RankProfiles;
pub use self::step::{OpProfile, Profile};
