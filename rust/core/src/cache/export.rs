//! Every row of a table, in chunks, as of one moment.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use super::table::{Shared, Table};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::types::{CacheSlot, Id};

/// Some rows of an export, in memory of their own.
#[derive(Clone, Debug, Default)]
pub struct Chunk {
    /// `[n]`: id, metadata, scalar slot.
    pub headers: Vec<RowHeader>,
    /// `[n, V]`
    pub vectors: Vec<f32>,
}

impl Table {
    /// Hand every row of every tier to `sink` once, in chunks of at most `chunk_rows`. The table may be read meanwhile; a training
    /// step, an import or a removal ends it with `State`.
    pub fn for_each_chunk(&self, chunk_rows: usize, sink: &mut dyn FnMut(Chunk) -> Result<()>) -> Result<()> {
        let version = self.shared.version();
        self.shared.export(version, chunk_rows.max(1), sink)
    }

    /// The same as a stream: a thread reads ahead by at most two chunks.
    pub fn export(&self, chunk_rows: usize) -> Result<ExportStream> {
        drop(self.shared.lock()?);
        let (sender, receiver) = sync_channel(2);
        let shared = Arc::clone(&self.shared);
        let version = shared.version();
        std::thread::Builder::new()
            .name("embcache-export".into())
            .spawn(move || {
                let result = shared.export(version, chunk_rows.max(1), &mut |chunk| {
                    sender.send(Ok(chunk)).map_err(|_| Error::new(Kind::State, "the export was dropped before its end"))
                });
                if let Err(error) = result {
                    // Nobody listens any more when this fails.
                    let _ = sender.send(Err(error));
                }
            })
            .map_err(|error| Error::new(Kind::Storage, format!("cannot start the export's thread: {error}")))?;
        Ok(ExportStream { shared: Arc::clone(&self.shared), version, receiver, ended: false })
    }
}

/// See [`Table::export`].
pub struct ExportStream {
    shared: Arc<Shared>,
    version: u64,
    receiver: Receiver<Result<Chunk>>,
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
        let item = match self.receiver.recv() {
            Err(_) => None,
            Ok(Ok(_)) if self.shared.version() != self.version => Some(Err(self.shared.changed_meanwhile())),
            Ok(item) => Some(item),
        };
        self.ended = !matches!(item, Some(Ok(_)));
        item
    }
}

impl Shared {
    fn changed_meanwhile(&self) -> Error {
        Error::new(
            Kind::State,
            format!(
                "table {:?} changed while it was exported (a training step, an import or a removal): export again, and train \
                 only after the last chunk",
                self.config.name
            ),
        )
    }

    pub(super) fn check_version(&self, version: u64) -> Result<()> {
        if self.version() == version { Ok(()) } else { Err(self.changed_meanwhile()) }
    }

    fn export(&self, version: u64, chunk_rows: usize, sink: &mut dyn FnMut(Chunk) -> Result<()>) -> Result<()> {
        let mut in_ram = self.newest_in_ram()?;
        for ids in in_ram.chunks(chunk_rows) {
            let rows = {
                let _rows = self.reading_rows()?;
                let mut state = self.lock()?;
                self.check_version(version)?;
                self.read_now(&mut state, ids)?
            };
            debug_assert!(rows.found.iter().all(|&found| found));
            sink(Chunk { headers: rows.headers, vectors: rows.vectors })?;
        }
        let Some(ssd) = &self.ssd else { return Ok(()) };
        in_ram.sort_unstable();
        let mut chunk = Chunk::default();
        ssd.scan(&mut |row| {
            if in_ram.binary_search(&row.header.id).is_ok() {
                return Ok(());
            }
            chunk.headers.push(*row.header);
            chunk.vectors.extend_from_slice(row.vector);
            if chunk.headers.len() == chunk_rows {
                self.check_version(version)?;
                sink(std::mem::take(&mut chunk))?;
            }
            Ok(())
        })?;
        if !chunk.headers.is_empty() {
            self.check_version(version)?;
            sink(chunk)?;
        }
        Ok(())
    }

    /// Ids of rows whose newest copy is in RAM or on the device: all others are on SSD, current.
    fn newest_in_ram(&self) -> Result<Vec<Id>> {
        let mut state = self.lock()?;
        self.finish_loads(&mut state)?;
        let host = &state.host;
        let most = (host.slots.used() + host.slots.overflow_used()) as usize;
        let on_device =
            state.device.as_ref().map_or(0, |tier| (tier.slots.used() + tier.slots.overflow_used()) as usize);
        let mut ids: Vec<Id> = Vec::new();
        memory::reserve(&mut ids, "list the rows in RAM", most + on_device)?;
        ids.extend(
            host.slots
                .occupied_from(0)
                .filter(|&slot: &CacheSlot| host.slots.state(slot).is_newest())
                .map(|slot| host.id(slot)),
        );
        if let Some(device) = &state.device {
            ids.extend(
                device
                    .slots
                    .occupied_from(0)
                    .filter(|&slot| device.slots.state(slot).is_newest())
                    .map(|slot| device.id(slot)),
            );
        }
        Ok(ids)
    }
}
