//! The tiers of a table above its SSD: rows in RAM, and rows on a device.

mod device;
mod host;

pub(crate) use crate::runtime::budget::HostBudget;
pub use device::DeviceRowReader;
pub(crate) use device::DeviceTier;
pub use host::INDEX_BYTES_PER_ROW;
pub(crate) use host::{HostTier, NoKernelWrites, ROWS_AHEAD, ReadAccess, WriteAccess};
