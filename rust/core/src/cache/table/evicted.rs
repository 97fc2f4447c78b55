//! The queue of rows that were evicted from a table.

use std::sync::Arc;

use super::handle::Table;
use crate::cache::watch::{EvictedQueue, EvictedRows};
use crate::error::Result;

impl Table {
    /// Starts keeping a copy of each row evicted by the table's rule or because the table is full, until it is taken
    /// from the queue. While many rows are queued, sweeps do not advance before batches. The queue ends when the table
    /// is closed. Its rows can still be taken then.
    pub fn start_evicted_queue(&self) -> Result<Arc<EvictedQueue>> {
        Ok(self.inner.lock_any()?.start_evicted_queue())
    }

    /// Queues all rows that the sweep in progress matches, and ends the queue of [`Table::start_evicted_queue`], as
    /// closing the table does.
    pub fn end_evicted_queue(&self) -> Result<()> {
        self.inner.check_process()?;
        if !self.is_closed() {
            let is_whole = self.inner.during_sweeps(|| self.inner.lock_any(), |held| held.notify_rest());
            // A thread that waits for the queue must not block indefinitely, even if the table is unusable.
            self.inner.lock_always().end_notifying();
            is_whole?;
        }
        Ok(())
    }

    /// Takes the next rows of the queue of [`Table::start_evicted_queue`]. If the queue has less than a full chunk,
    /// continues the sweep in progress until it has one or the sweep is done. So when this returns `None`, every row
    /// matched by a sweep has been taken, except rows of batches between their forward and their backward.
    ///
    /// Errors: those of the SSD tier and of reads of the device tier. No row is lost.
    pub fn next_evicted(&self) -> Result<Option<EvictedRows>> {
        let queue = self.start_evicted_queue()?;
        let sweep_on = || self.inner.during_sweeps(|| self.inner.lock(), |held| held.sweep_slice());
        while queue.rows() < queue.rows_of_chunk() && sweep_on()? {}
        Ok(queue.take())
    }
}
