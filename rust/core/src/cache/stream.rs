//! An export as a stream: a thread reads ahead of whoever takes the chunks.

use std::collections::VecDeque;
use std::sync::Arc;

use super::export::Chunk;
use super::table::{Shared, Table};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::ssd::{GiveWay, SsdTier};
use crate::sync::{Condvar, Mutex, lock, wait};

/// Chunks that the thread is ahead by at most.
const CHUNKS_AHEAD: usize = 2;

impl Table {
    /// As [`Table::for_each_chunk`], as a stream: a thread reads ahead by at most two chunks. A stream whose taker keeps it waiting ends
    /// with `State` too where the table needs the room on SSD of files that it is still to read.
    pub fn export(&self, chunk_rows: usize) -> Result<ExportStream> {
        drop(self.shared.lock()?);
        memory::room("start the export's thread", memory::ROOM_FOR_THREADS)?;
        let shared = Arc::clone(&self.shared);
        let version = shared.version();
        let channel = Arc::new(Channel::default());
        let sender = Sender { shared: Arc::clone(&shared), channel: Arc::clone(&channel) };
        std::thread::Builder::new()
            .name("embcache-export".into())
            .spawn(move || sender.run(version, chunk_rows.max(1)))
            .map_err(|error| Error::new(Kind::Storage, format!("cannot start the export's thread: {error}")))?;
        Ok(ExportStream { shared, version, channel, ended: false })
    }
}

/// See [`Table::export`].
pub struct ExportStream {
    shared: Arc<Shared>,
    version: u64,
    channel: Arc<Channel>,
    ended: bool,
}

impl std::fmt::Debug for ExportStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExportStream").field("table", &self.shared.config.name).finish_non_exhaustive()
    }
}

impl Iterator for ExportStream {
    type Item = Result<Chunk>;

    fn next(&mut self) -> Option<Result<Chunk>> {
        if self.ended {
            return None;
        }
        let item = match self.channel.take() {
            Some(Ok(_)) if self.shared.version() != self.version => Some(Err(self.shared.changed_meanwhile())),
            item => item,
        };
        self.ended = !matches!(item, Some(Ok(_)));
        item
    }
}

impl Drop for ExportStream {
    fn drop(&mut self) {
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
    /// How the export ended, once it has.
    ended: Option<Result<()>>,
    /// Nobody takes chunks any more.
    dropped: bool,
    /// The exporting thread waits until a chunk is taken.
    waits: bool,
    /// The exporting thread is to end the export instead of waiting: somebody needs the room that the export's files take.
    gives_way: bool,
}

impl Channel {
    /// The next chunk, waited for; `None` after the last one.
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

/// The thread's end of a channel. Its drop ends the stream, after a panic too.
struct Sender {
    shared: Arc<Shared>,
    channel: Arc<Channel>,
}

impl Sender {
    fn run(&self, version: u64, chunk_rows: usize) {
        let taker: Arc<dyn GiveWay> = self.channel.clone();
        let ended = self.shared.export(version, chunk_rows, Some(&taker), &mut |chunk| self.send(chunk));
        self.end(ended);
    }

    /// Hand a chunk over, as soon as fewer wait to be taken.
    fn send(&self, chunk: Chunk) -> Result<()> {
        let mut passing = lock(&self.channel.passing);
        while passing.chunks.len() >= CHUNKS_AHEAD && !passing.dropped && !passing.gives_way {
            if !passing.waits {
                passing.waits = true;
                drop(passing);
                self.shared.ssd.as_ref().into_iter().for_each(SsdTier::look_again);
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
            return Err(self.shared.export_gave_way());
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
