//! An export as a stream: a thread of its own reads ahead of whoever takes the chunks.

use std::collections::VecDeque;
use std::sync::Arc;

use super::chunker::changed_meanwhile;
use super::export::all_chunks;
use crate::cache::locks::TableInner;
use crate::cache::rows::Chunk;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::ssd::{GiveWay, SsdTier};
use crate::sync::{Condvar, Mutex, lock, wait};

/// The thread is ahead of whoever takes the chunks by at most this many.
const CHUNKS_AHEAD: usize = 2;

/// The rows of a table, as [`Table::export`](crate::cache::Table::export) hands them over. It ends after its first error.
pub struct ExportStream {
    table: Arc<TableInner>,
    version: u64,
    channel: Arc<Channel>,
    /// None once it has ended.
    wants_contents: Option<Arc<()>>,
}

impl ExportStream {
    /// Start the thread that reads ahead.
    pub(crate) fn start(table: &Arc<TableInner>, chunk_rows: usize) -> Result<Self> {
        table.check_rows()?;
        memory::room("start the export's thread", memory::ROOM_FOR_THREADS)?;
        let mut held = table.lock()?;
        let version = table.version();
        let wants_contents = Some(held.want_contents(version));
        drop(held);
        let channel = Arc::new(Channel::default());
        let sender = Sender { table: Arc::clone(table), channel: Arc::clone(&channel) };
        std::thread::Builder::new()
            .name("embcache-export".into())
            .spawn(move || sender.run(version, chunk_rows.max(1)))
            .map_err(|error| Error::new(Kind::Storage, format!("cannot start the export's thread: {error}")))?;
        Ok(Self { table: Arc::clone(table), version, channel, wants_contents })
    }
}

impl std::fmt::Debug for ExportStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExportStream").field("table", &self.table.config.name).finish_non_exhaustive()
    }
}

impl Iterator for ExportStream {
    type Item = Result<Chunk>;

    fn next(&mut self) -> Option<Result<Chunk>> {
        self.wants_contents.as_ref()?;
        // The export's thread copies rows that a caller may keep from it, and it does not exist in a forked child.
        if let Err(refused) = self.table.check_rows() {
            self.wants_contents = None;
            return Some(Err(refused));
        }
        let item = match self.channel.take() {
            Some(Ok(_)) if self.table.version() != self.version => Some(Err(changed_meanwhile(&self.table))),
            item => item,
        };
        if !matches!(item, Some(Ok(_))) {
            self.wants_contents = None;
        }
        item
    }
}

impl Drop for ExportStream {
    fn drop(&mut self) {
        if self.table.check_process().is_err() {
            return;
        }
        let mut passing = lock(&self.channel.passing);
        passing.dropped = true;
        passing.chunks.clear();
        drop(passing);
        self.channel.changed.notify_all();
    }
}

/// Passes chunks from the export's thread to whoever takes them.
#[derive(Debug, Default)]
struct Channel {
    passing: Mutex<Passing>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Passing {
    chunks: VecDeque<Chunk>,
    /// How the export ended, if it has.
    ended: Option<Result<()>>,
    /// Whether nobody takes chunks any more.
    dropped: bool,
    /// Whether the exporting thread waits until a chunk is taken.
    waits: bool,
    /// Instead of waiting, the exporting thread is to end the export, because somebody needs the room of files that it is still to read.
    gives_way: bool,
}

impl Channel {
    /// Wait for the next chunk. `None` comes after the last one.
    fn take(&self) -> Option<Result<Chunk>> {
        let mut passing = lock(&self.passing);
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

impl GiveWay for Channel {
    fn give_way(&self) -> bool {
        let mut passing = lock(&self.passing);
        passing.gives_way |= passing.waits;
        let gives_way = passing.gives_way;
        drop(passing);
        self.changed.notify_all();
        gives_way
    }
}

/// The thread's end of a channel. Its drop ends the stream where a panic ended the thread.
struct Sender {
    table: Arc<TableInner>,
    channel: Arc<Channel>,
}

impl Sender {
    fn run(&self, version: u64, chunk_rows: usize) {
        let taker: Arc<dyn GiveWay> = self.channel.clone();
        let ended = all_chunks(&self.table, version, chunk_rows, Some(&taker), &mut |chunk| self.send(chunk));
        self.end(ended);
    }

    /// Hand a chunk over once there is room for it among those that wait to be taken.
    fn send(&self, chunk: Chunk) -> Result<()> {
        let mut passing = lock(&self.channel.passing);
        while passing.chunks.len() >= CHUNKS_AHEAD && !passing.dropped && !passing.gives_way {
            if !passing.waits {
                passing.waits = true;
                drop(passing);
                self.table.ssd.as_ref().into_iter().for_each(SsdTier::look_again);
                passing = lock(&self.channel.passing);
                continue;
            }
            passing = wait(&self.channel.changed, passing);
        }
        passing.waits = false;
        if passing.dropped {
            return Err(Error::new(Kind::State, "the export was dropped before its end"));
        }
        if passing.gives_way {
            return Err(gave_way(&self.table));
        }
        passing.chunks.push_back(chunk);
        drop(passing);
        self.channel.changed.notify_all();
        Ok(())
    }

    fn end(&self, how: Result<()>) {
        lock(&self.channel.passing).ended.get_or_insert(how);
        self.channel.changed.notify_all();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end(Err(Error::new(
                Kind::State,
                "the export's thread ended in a panic: this is a bug of torchrec-embcache, report it",
            )));
        }
    }
}

fn gave_way(table: &TableInner) -> Error {
    Error::new(
        Kind::State,
        format!(
            "the export of table {:?} was ended before its last chunk, because the files that it was still to read on SSD took the \
             room of rows that are written there: export again and take the chunks one after the other, or raise ssd_bytes",
            table.config.name
        ),
    )
}
