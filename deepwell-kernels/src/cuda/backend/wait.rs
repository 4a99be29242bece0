//! Waits of the host for the device, while the device may wait for other ranks.

use super::CudaBackend;
use crate::runtime::cuda::driver::{Driver, DriverError};

impl CudaBackend {
    /// Makes the host wait for the device; with several ranks, up to the timeout of collectives.
    pub(super) fn wait(
        &mut self,
        mut wait: impl FnMut(&mut dyn Driver) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let driver = self.driver.as_mut();
        match &mut self.comm {
            Some(comm) => comm.wait(&mut || wait(driver)),
            None => wait(driver),
        }
    }

    /// [`CudaBackend::wait`] until all streams are empty.
    pub(super) fn wait_for_all(&mut self) -> Result<(), DriverError> {
        self.wait(|driver| driver.synchronize())
    }
}
