//! Settings for routers, applied to the graph of a model.

use deepwell_ir::{Graph, Op};
use deepwell_moe::{RouterTraining, with_router_training};

use crate::TrainError;

/// [`with_router_training`], but for a model without routers, an error names the flags of the given
/// router settings.
///
/// # Errors
/// [`TrainError::Setting`] for a model without routers, and the errors of [`with_router_training`].
pub fn with_routers(graph: &Graph, router: &RouterTraining) -> Result<Graph, TrainError> {
    let defaults = RouterTraining::default();
    let given = [
        ("router.balance", router.balance != defaults.balance, "--router-balance"),
        ("router.z", router.z != defaults.z, "--router-z"),
        ("router.capacity_factor", router.capacity_factor.is_some(), "--capacity-factor"),
    ];
    let has_routers = graph.nodes.iter().any(|node| matches!(node.op, Op::Route(_)));
    match given.into_iter().find(|(_, is_given, _)| *is_given && !has_routers) {
        None => Ok(with_router_training(graph, router)?),
        Some((setting, _, flag)) => Err(TrainError::Setting {
            setting,
            expected: "a mixture of experts".to_string(),
            got: format!("`{}`, whose layers have no router", graph.name),
            hint: Some(format!("leave `{flag}` out, or train a mixture such as `moe-tiny`")),
        }),
    }
}
