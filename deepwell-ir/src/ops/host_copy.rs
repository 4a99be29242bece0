//! Copies between the memory of a device and the memory of its host.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{OpError, OperandType};

/// A copy of a tensor between a device and its host, for state that
/// [lies in host memory](crate::MemoryKind::Offloaded).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostCopy {
    /// The direction.
    pub direction: HostCopyDirection,
}

/// Direction of a [`HostCopy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostCopyDirection {
    /// From host memory to the device, before a call that needs the tensor.
    ToDevice,
    /// From the device to host memory, after a call that changed the tensor.
    ToHost,
}

impl OpRule for HostCopy {
    fn name(&self) -> &'static str {
        "host_copy"
    }

    fn attributes(&self) -> String {
        let direction = match self.direction {
            HostCopyDirection::ToDevice => "to_device",
            HostCopyDirection::ToHost => "to_host",
        };
        format!("direction={direction}")
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        Check::count(self.name(), inputs, &["x"])?;
        Ok(vec![OutputType::statistic("", inputs[0].shape.clone(), inputs[0].dtype)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn bytes_on_link(&self, operands: &[OperandType]) -> u64 {
        operands.first().and_then(OperandType::storage_bytes).map_or(0, |bytes| bytes as u64)
    }
}
