//! One rank's part of a save.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use super::RowSink;
use super::format::{
    CHUNK_BYTES, DataShape, FORMAT, Field, FileLayout, GROUP_BYTES, VERSION, data_file, group_rows, rank_file,
    table_dir,
};
use super::latest::CheckpointName;
use super::manifest::{DataFile, RankDigest, RankManifest, Share, TableSpec, checksum, render};
use crate::config::OptimizerKind;
use crate::error::{Error, Kind, Result};
use crate::io::{BufPool, IoEngine, Open, PooledBuf, publish};
use crate::kernels::threads::{for_each, sort};
use crate::memory::{self, room_for};
use crate::rows::RowHeader;
use crate::types::{Id, bucket_of};

/// Where the rows of a table come from.
pub trait RowSource {
    /// Hand every row to `sink` once, in any order, in chunks of any size; stop at the first error and return it.
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> Result<()>;
}

impl<F: FnMut(&mut RowSink<'_>) -> Result<()>> RowSource for F {
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> Result<()> {
        self(sink)
    }
}

/// A group that the system has no memory for is made smaller, down to this.
const FEWEST_ROWS: usize = 256;
/// Rows that one thread copies at a time.
const ROWS_PER_TASK: usize = 4096;
/// Bytes of one write request.
const WRITE_BYTES: usize = 8 << 20;

/// Writes one rank's tables into a checkpoint that [`super::Save::begin`] made.
///
/// It holds three groups at most: one filling, one waiting, one being written (192 MiB with the default size).
#[derive(Debug)]
pub struct RankWriter {
    engine: Arc<dyn IoEngine>,
    dir: PathBuf,
    group_bytes: usize,
    manifest: RankManifest,
}

impl RankWriter {
    /// The part of `rank` (of `world`) in the checkpoint `name` in `root`.
    pub fn new(engine: Arc<dyn IoEngine>, root: &Path, name: CheckpointName, rank: u32, world: u32) -> Result<Self> {
        if rank >= world {
            return Err(Error::new(Kind::Input, format!("rank {rank} is not within a world of {world}")));
        }
        let manifest = RankManifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            name: name.to_string(),
            rank,
            world,
            tables: Vec::new(),
        };
        Ok(Self { engine, dir: root.join(name.to_string()), group_bytes: GROUP_BYTES, manifest })
    }

    /// Make groups of at most `bytes`, and of one row at least; the default and the most is [`GROUP_BYTES`].
    #[must_use]
    pub fn with_group_bytes(mut self, bytes: usize) -> Self {
        self.group_bytes = bytes.min(GROUP_BYTES);
        self
    }

    /// Write the rows of one table, all of which are in `buckets`; returns how many they were.
    pub fn write_table(&mut self, spec: TableSpec, buckets: Range<u32>, rows: &mut dyn RowSource) -> Result<u64> {
        spec.check()?;
        let optimizer = spec.optimizer_kind()?;
        if buckets.start > buckets.end || buckets.end > spec.total_num_buckets {
            return Err(Error::new(
                Kind::Input,
                format!("table {:?}: buckets {buckets:?} are not within 0..{}", spec.table, spec.total_num_buckets),
            ));
        }
        let same = |share: &&Share| share.spec.module == spec.module && share.spec.table == spec.table;
        if self.manifest.tables.iter().find(same).is_some() {
            return Err(Error::new(
                Kind::Input,
                format!("table {:?} of module {:?} is written twice", spec.table, spec.module),
            ));
        }
        let dir = self.dir.join(table_dir(&spec.module, &spec.table));
        self.engine.create_dir_all(&dir)?;
        let mut group = Group::new(&spec, optimizer, buckets.clone(), self.group_bytes);
        let engine = &*self.engine;
        let path = |n| dir.join(data_file(self.manifest.rank, self.manifest.world, n));
        let files = std::thread::scope(|scope| {
            let (send, receive) = mpsc::sync_channel::<Image>(1);
            let writing = std::thread::Builder::new().name("embcache-save".into()).spawn_scoped(scope, move || {
                for (n, image) in receive.iter().enumerate() {
                    write_file(engine, &path(n), image.bytes())?;
                }
                Ok(())
            });
            let mut files = Vec::new();
            let mut seal = |group: &mut Group<'_>| -> Result<()> {
                while !group.headers.is_empty() {
                    let (image, file) = group.seal()?;
                    if writing.is_ok() {
                        // A send fails only when the writing thread ended with the error that joining returns.
                        send.send(image).map_err(|_| Error::new(Kind::Storage, "the writing thread ended"))?;
                    } else {
                        // The system gives no thread: nothing is written beside.
                        write_file(engine, &path(files.len()), image.bytes())?;
                    }
                    files.push(file);
                }
                Ok(())
            };
            let filled = rows
                .for_each_chunk(&mut |headers, vectors| group.take(headers, vectors, &mut seal))
                .and_then(|()| seal(&mut group));
            drop(send);
            let written =
                writing.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            written.and(filled).map(|()| files)
        })?;
        self.engine.sync_dir(&dir)?;
        let share = Share { spec, bucket_begin: buckets.start, bucket_end: buckets.end, files };
        let rows = share.rows();
        self.manifest.tables.push(share);
        Ok(rows)
    }

    /// Make this rank's part durable. The digest goes to the coordinator.
    pub fn finish(self) -> Result<RankDigest> {
        let bytes = render(&self.manifest)?;
        publish(&*self.engine, &self.dir.join(rank_file(self.manifest.rank, self.manifest.world)), &bytes)?;
        Ok(RankDigest { bytes: bytes.len() as u64, xxh3: checksum(&bytes) })
    }
}

fn write_file(engine: &dyn IoEngine, path: &Path, image: &[u8]) -> Result<()> {
    let file = engine.open(path, Open::Create { preallocate: image.len() as u64 })?;
    for (n, piece) in image.chunks(WRITE_BYTES).enumerate() {
        file.write_at((n * WRITE_BYTES) as u64, piece)?;
    }
    file.sync()
}

/// The content of a data file, in a buffer of the pool.
struct Image {
    buffer: PooledBuf,
    len: usize,
}

impl Image {
    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

/// Rows that wait for their file.
struct Group<'a> {
    spec: &'a TableSpec,
    optimizer: OptimizerKind,
    buckets: Range<u32>,
    /// Rows of a full group.
    capacity: usize,
    /// Floats of a row's vector part.
    vector_floats: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    /// Images of files, used again.
    images: Option<Arc<BufPool>>,
}

impl<'a> Group<'a> {
    fn new(spec: &'a TableSpec, optimizer: OptimizerKind, buckets: Range<u32>, bytes: usize) -> Self {
        let dim = spec.dim as usize;
        let capacity = group_rows(optimizer, dim, bytes);
        let vector_floats = optimizer.layout(dim).vector_floats();
        Self {
            spec,
            optimizer,
            buckets,
            capacity,
            vector_floats,
            // At once: growing would hold a group twice, and what is not filled is not resident.
            headers: room_for(capacity),
            vectors: room_for(capacity * vector_floats),
            images: None,
        }
    }

    fn take(
        &mut self,
        mut headers: &[RowHeader],
        mut vectors: &[f32],
        seal: &mut dyn FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if vectors.len() != headers.len() * self.vector_floats {
            return Err(Error::new(
                Kind::Input,
                format!(
                    "{} rows come with {} floats instead of {} each",
                    headers.len(),
                    vectors.len(),
                    self.vector_floats
                ),
            ));
        }
        while !headers.is_empty() {
            let fits = headers.len().min(self.capacity - self.headers.len());
            if let Err(refused) = self.reserve(fits) {
                // A smaller group, then.
                if self.headers.is_empty() {
                    return Err(refused);
                }
                seal(self)?;
                continue;
            }
            let (head, rest) = headers.split_at(fits);
            let (values, rest_values) = vectors.split_at(fits * self.vector_floats);
            self.headers.extend_from_slice(head);
            self.vectors.extend_from_slice(values);
            (headers, vectors) = (rest, rest_values);
            if self.headers.len() == self.capacity {
                seal(self)?;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, rows: usize) -> Result<()> {
        memory::reserve(&mut self.headers, "gather rows for a file", rows)?;
        memory::reserve(&mut self.vectors, "gather rows for a file", rows * self.vector_floats)
    }

    /// The file of the rows taken so far, or where the system has no memory for it, of some of them; those are forgotten.
    fn seal(&mut self) -> Result<(Image, DataFile)> {
        let mut rows = self.headers.len();
        let made = loop {
            match self.image_of(rows) {
                Err(refused) if refused.kind() == Kind::Memory && rows > FEWEST_ROWS => rows /= 2,
                made => break made?,
            }
        };
        self.headers.drain(..rows);
        self.vectors.drain(..rows * self.vector_floats);
        Ok(made)
    }

    /// The positions of the first `rows` rows in the order of the file, and where each bucket starts.
    fn order(&self, rows: usize) -> Result<(Vec<u32>, Vec<i64>)> {
        let total = self.spec.total_num_buckets;
        // Bucket, id and position as one number: compared in one go.
        let mut keys: Vec<u128> = vec![0; rows];
        let tasks = keys.chunks_mut(ROWS_PER_TASK).zip(self.headers[..rows].chunks(ROWS_PER_TASK));
        for_each(tasks.enumerate(), |(task, (keys, headers))| {
            for (at, (key, header)) in keys.iter_mut().zip(headers).enumerate() {
                let (bucket, position) = (bucket_of(header.id, total), task * ROWS_PER_TASK + at);
                *key = u128::from(bucket) << 96 | u128::from(header.id as u64) << 32 | position as u128;
            }
        });
        sort(&mut keys);
        let (bucket_at, id_at) = (|key: u128| (key >> 96) as u32, |key: u128| (key >> 32) as Id);
        let refuse = |id: Id, what: String| {
            Err(Error::new(Kind::Input, format!("table {:?}: row {id} {what}", self.spec.table)))
        };
        if let Some(&key) = keys.iter().find(|&&key| !self.buckets.contains(&bucket_at(key))) {
            let bucket = bucket_at(key);
            return refuse(id_at(key), format!("is of bucket {bucket}, which is not within {:?}", self.buckets));
        }
        if let Some(pair) = keys.windows(2).find(|pair| id_at(pair[0]) == id_at(pair[1])) {
            return refuse(id_at(pair[0]), "is there twice".into());
        }
        let mut starts = Vec::with_capacity(self.buckets.len() + 1);
        let mut row = 0;
        for bucket in self.buckets.clone() {
            starts.push(row as i64);
            row += keys[row..].iter().take_while(|&&key| bucket_at(key) == bucket).count();
        }
        starts.push(row as i64);
        Ok((keys.into_iter().map(|key| key as u32).collect(), starts))
    }

    /// The file of the first `rows` rows.
    fn image_of(&mut self, rows: usize) -> Result<(Image, DataFile)> {
        memory::room("order rows for a file", rows * 32)?;
        let (order, starts) = self.order(rows)?;
        let shape = DataShape { rows: order.len(), buckets: self.buckets.len(), tombstones: 0 };
        let layout = FileLayout::new(self.optimizer, self.spec.dim as usize, shape)
            .ok_or_else(|| Error::new(Kind::Input, "a group's size overflows"))?;
        let header = layout.header(self.spec, &self.buckets);
        let len = header.len() + layout.data_bytes;
        // The first group is the largest, and often the only one.
        let images = self.images.get_or_insert_with(|| Arc::new(BufPool::new(len, 3)));
        let mut buffer = images.take_at_least(len)?;
        let (head, data) = buffer[..len].split_at_mut(header.len());
        head.copy_from_slice(&header);
        let mut checksums: Vec<u32> = Vec::new();
        for column in layout.checked_columns() {
            let bytes = &mut data[column.range()];
            self.fill(column.field, &order, &starts, bytes);
            let first = checksums.len();
            checksums.resize(first + bytes.len().div_ceil(CHUNK_BYTES), 0);
            for_each(checksums[first..].iter_mut().zip(bytes.chunks(CHUNK_BYTES)), |(checksum, chunk)| {
                *checksum = crc32c::crc32c(chunk);
            });
        }
        let checksums: &[u8] = bytemuck::cast_slice(&checksums);
        data[layout.column(Field::Checksums).range()].copy_from_slice(checksums);
        data[layout.column(Field::Pad).range()].fill(0);
        let file = DataFile {
            rows: order.len() as u64,
            tombstones: 0,
            bytes: len as u64,
            header_crc32c: crc32c::crc32c(&header),
            checksums_crc32c: crc32c::crc32c(checksums),
        };
        Ok((Image { buffer, len }, file))
    }

    /// Fill a column. Its bytes are aligned for its type: wider columns lie first, in a buffer aligned for all.
    fn fill(&self, field: Field, order: &[u32], starts: &[i64], bytes: &mut [u8]) {
        fn each<T: bytemuck::Pod + Send>(bytes: &mut [u8], order: &[u32], value: impl Fn(usize) -> T + Sync) {
            let values = bytemuck::cast_slice_mut::<u8, T>(bytes).chunks_mut(ROWS_PER_TASK);
            for_each(values.zip(order.chunks(ROWS_PER_TASK)), |(values, order)| {
                for (to, &position) in values.iter_mut().zip(order) {
                    *to = value(position as usize);
                }
            });
        }
        let headers = &self.headers;
        match field {
            Field::Id => each(bytes, order, |position| headers[position].id),
            Field::LastStep => each(bytes, order, |position| headers[position].last_step),
            Field::Count => each(bytes, order, |position| headers[position].count),
            Field::Score => each(bytes, order, |position| headers[position].score),
            Field::Scalar => each(bytes, order, |position| headers[position].scalar),
            Field::ModifiedEpoch => each(bytes, order, |position| headers[position].modified_epoch),
            Field::BucketOffsets => bytes.copy_from_slice(bytemuck::cast_slice(starts)),
            Field::Vector(part) => {
                let dim = self.spec.dim as usize;
                let rows = bytemuck::cast_slice_mut::<u8, f32>(bytes).chunks_mut(ROWS_PER_TASK * dim);
                for_each(rows.zip(order.chunks(ROWS_PER_TASK)), |(rows, order)| {
                    for (to, &position) in rows.chunks_exact_mut(dim).zip(order) {
                        let start = position as usize * self.vector_floats + part * dim;
                        to.copy_from_slice(&self.vectors[start..start + dim]);
                    }
                });
            }
            Field::Tombstone | Field::Checksums | Field::Pad => {}
        }
    }
}
