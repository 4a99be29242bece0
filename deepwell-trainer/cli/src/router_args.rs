//! Options of the training of routers.

use clap::Args;
use deepwell_moe::RouterTraining;

/// Losses of routers, and the capacity of experts.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RouterArgs {
    /// Coefficient of the load-balancing loss of each router [default: 0]
    #[arg(long, value_name = "COEFFICIENT")]
    router_balance: Option<f64>,
    /// Coefficient of the z-loss of each router [default: 0]
    #[arg(long, value_name = "COEFFICIENT")]
    router_z: Option<f64>,
    /// Expert capacity as a multiple of an even share; excess tokens are dropped [default:
    /// unlimited]
    #[arg(long, value_name = "FACTOR")]
    capacity_factor: Option<f64>,
}

impl RouterArgs {
    /// The given flags, by the name of their setting.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static str, f64)> {
        [
            ("router.balance", self.router_balance),
            ("router.z", self.router_z),
            ("router.capacity_factor", self.capacity_factor),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }

    /// Sets the given flags.
    pub(crate) fn set_in(&self, router: &mut RouterTraining) {
        router.balance = self.router_balance.unwrap_or(router.balance);
        router.z = self.router_z.unwrap_or(router.z);
        router.capacity_factor = self.capacity_factor.or(router.capacity_factor);
    }
}
