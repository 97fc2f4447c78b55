//! The rows that were evicted from a table, for whoever is to be told of them.

use std::sync::Arc;

use super::handle::Table;
use crate::cache::watch::{EvictedQueue, EvictedRows};
use crate::error::Result;

impl Table {
    /// Keep a copy of each row that is evicted from now on, by the table's rule or because the table is full, until it is taken from the
    /// queue. While many rows wait there sweeps go no further before batches. The queue ends when the table is closed. Its rows can still be
    /// taken then.
    pub fn start_evicted_queue(&self) -> Result<Arc<EvictedQueue>> {
        Ok(self.inner.lock_any()?.start_evicted_queue())
    }

    /// Tell of all rows that the sweep under way takes, and end the queue of [`Table::start_evicted_queue`], as closing the table does.
    pub fn end_evicted_queue(&self) -> Result<()> {
        self.inner.check_process()?;
        if !self.is_closed() {
            let is_whole = self.inner.during_sweeps(|| self.inner.lock_any(), |held| held.notify_rest());
            // Whoever waits for the queue must not wait for ever, also where the table cannot be used any more.
            self.inner.lock_always().end_notifying();
            is_whole?;
        }
        Ok(())
    }

    /// The next rows of the queue of [`Table::start_evicted_queue`]. Where the queue has not enough for a full chunk, the sweep under way goes on
    /// until it has, or is done. So when this returns `None`, every row was told of that a sweep took by now, but those of batches that are
    /// between their forward and their backward.
    ///
    /// Errors: those of the SSD tier and of reads of the device tier. No row is lost.
    pub fn next_evicted(&self) -> Result<Option<EvictedRows>> {
        let queue = self.start_evicted_queue()?;
        let sweep_on = || self.inner.during_sweeps(|| self.inner.lock(), |held| held.sweep_slice());
        while queue.rows() < queue.rows_of_chunk() && sweep_on()? {}
        Ok(queue.take())
    }
}
