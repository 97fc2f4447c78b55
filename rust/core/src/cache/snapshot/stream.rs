//! An export as a stream: a background thread reads ahead of the consumer.

use std::collections::VecDeque;
use std::sync::Arc;

use super::all_chunks;
use super::chunker::contents_changed_error;
use crate::cache::lock::TableInner;
use crate::cache::row_blocks::RowChunk;
use crate::error::{Error, Kind, Result};
use crate::runtime::memory;
use crate::runtime::sync::{Condvar, Mutex, lock, wait};
use crate::ssd::{ScanConsumer, SsdTier};

/// Maximum number of chunks that the thread reads ahead.
const CHUNKS_AHEAD: usize = 2;

/// A stream of the rows of a table, as returned by [`Table::export`](crate::cache::Table::export). It ends after its
/// first error.
pub struct ExportStream {
    table: Arc<TableInner>,
    version: u64,
    channel: Arc<ExportChannel>,
    /// `None` once it has ended.
    contents_pin: Option<Arc<()>>,
}

impl ExportStream {
    /// Starts the thread that reads ahead.
    pub(crate) fn start(table: &Arc<TableInner>, chunk_rows: usize) -> Result<Self> {
        table.check_rows()?;
        memory::check_system_memory("start the export's thread", memory::THREAD_START_BYTES)?;
        let mut guard = table.lock()?;
        let version = table.version();
        let wants_contents = Some(guard.placement.changes.exports.pin_contents(version));
        drop(guard);
        let channel = Arc::new(ExportChannel::default());
        let sender = ExportSender { table: Arc::clone(table), channel: Arc::clone(&channel) };
        std::thread::Builder::new()
            .name("embcache-export".into())
            .spawn(move || sender.run(version, chunk_rows.max(1)))
            .map_err(|error| Kind::Storage.error(format!("cannot start the export's thread: {error}")))?;
        Ok(Self { table: Arc::clone(table), version, channel, contents_pin: wants_contents })
    }
}

opaque_debug!(ExportStream, self, table = self.table.config.name);

impl Iterator for ExportStream {
    type Item = Result<RowChunk>;

    fn next(&mut self) -> Option<Result<RowChunk>> {
        self.contents_pin.as_ref()?;
        // The export's thread copies rows to which a caller may have exclusive access, and it does not exist in a
        // forked child.
        if let Err(refused) = self.table.check_rows() {
            self.contents_pin = None;
            return Some(Err(refused));
        }
        let item = match self.channel.take() {
            Some(Ok(_)) if self.table.version() != self.version => Some(Err(contents_changed_error(&self.table))),
            item => item,
        };
        if !matches!(item, Some(Ok(_))) {
            self.contents_pin = None;
        }
        item
    }
}

impl Drop for ExportStream {
    fn drop(&mut self) {
        if self.table.check_process().is_err() {
            return;
        }
        let mut passing = lock(&self.channel.queue);
        passing.dropped = true;
        passing.chunks.clear();
        drop(passing);
        self.channel.changed.notify_all();
    }
}

/// Passes chunks from the export's thread to the consumer.
#[derive(Debug, Default)]
struct ExportChannel {
    queue: Mutex<ExportQueue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ExportQueue {
    chunks: VecDeque<RowChunk>,
    /// Result of the export, once it has ended.
    ended: Option<Result<()>>,
    /// True if the consumer was dropped.
    dropped: bool,
    /// True if the exporting thread waits until a chunk is taken.
    waits: bool,
    /// Makes the exporting thread end the export instead of waiting, because another thread needs the space of files
    /// that it has not read yet.
    is_cancelled: bool,
}

impl ExportChannel {
    /// Waits for the next chunk. Returns `None` after the last one.
    fn take(&self) -> Option<Result<RowChunk>> {
        let mut passing = lock(&self.queue);
        loop {
            if let Some(chunk) = passing.chunks.pop_front() {
                drop(passing);
                self.changed.notify_all();
                return Some(Ok(chunk));
            }
            if let Some(ended) = passing.ended.take() {
                return ended.err().map(Err);
            }
            passing = wait(&self.changed, passing);
        }
    }
}

impl ScanConsumer for ExportChannel {
    fn cancel_if_waiting(&self) -> bool {
        let mut passing = lock(&self.queue);
        passing.is_cancelled |= passing.waits;
        let gives_way = passing.is_cancelled;
        drop(passing);
        self.changed.notify_all();
        gives_way
    }
}

/// The thread's end of a channel. Its drop ends the stream if the thread panicked.
struct ExportSender {
    table: Arc<TableInner>,
    channel: Arc<ExportChannel>,
}

impl ExportSender {
    fn run(&self, version: u64, chunk_rows: usize) {
        let taker: Arc<dyn ScanConsumer> = self.channel.clone();
        let ended = all_chunks(&self.table, version, chunk_rows, Some(&taker), &mut |chunk| self.send(chunk));
        self.end(ended);
    }

    /// Sends a chunk once the queue has space for it.
    fn send(&self, chunk: RowChunk) -> Result<()> {
        let mut passing = lock(&self.channel.queue);
        while passing.chunks.len() >= CHUNKS_AHEAD && !passing.dropped && !passing.is_cancelled {
            if !passing.waits {
                passing.waits = true;
                drop(passing);
                self.table.ssd.as_ref().into_iter().for_each(SsdTier::notify_space_waiters);
                passing = lock(&self.channel.queue);
                continue;
            }
            passing = wait(&self.channel.changed, passing);
        }
        passing.waits = false;
        if passing.dropped {
            return Err(Kind::State.error("the export was dropped before its end"));
        }
        if passing.is_cancelled {
            return Err(cancelled_error(&self.table));
        }
        passing.chunks.push_back(chunk);
        drop(passing);
        self.channel.changed.notify_all();
        Ok(())
    }

    fn end(&self, outcome: Result<()>) {
        lock(&self.channel.queue).ended.get_or_insert(outcome);
        self.channel.changed.notify_all();
    }
}

impl Drop for ExportSender {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end(Err(Kind::State
                .error("the export's thread ended in a panic: this is a bug of torchrec-embcache, report it")));
        }
    }
}

fn cancelled_error(table: &TableInner) -> Error {
    Kind::State.error(format!(
        "the export of table {:?} was ended before its last chunk, because the files that it was still to read on SSD took the \
         room of rows that are written there: export again and take the chunks one after the other, or raise ssd_bytes",
        table.config.name
    ))
}
