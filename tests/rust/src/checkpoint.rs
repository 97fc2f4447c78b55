//! Tables of a checkpoint, and their saves and loads.
#![allow(clippy::missing_panics_doc)] // a helper of tests panics when a check fails

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use embcache::checkpoint::{
    ChainCompaction, CheckpointChain, CheckpointDirectory, CheckpointId, CheckpointSave, DeltaChanges,
    LatestCheckpoint, OptimizerSpec, PublishedCheckpoint, RankDigest, RankWriter, RowSink, SaveOptions, TableSpec,
};
use embcache::config::{MissingRead, OptimizerKind};
use embcache::io::{FaultEngine, IoEngine, IoFault, MemoryEngine};
use embcache::rows::{InitializerSpec, RowHeader};
use embcache::types::{Id, hash_id};
use embcache::{Error, Result};

use crate::directory_in;

/// The directory to which the tests save.
pub const ROOT: &str = "/checkpoints/sparse";

/// The identity of the latest checkpoint in [`ROOT`]. It differs between saves of the same rows, because manifests have
/// the time.
pub fn newest_identity(engine: &Arc<dyn IoEngine>) -> Result<CheckpointId> {
    let directory = directory_in(engine, ROOT);
    Ok(CheckpointChain::open(&directory, LatestCheckpoint::read(&directory)?)?.identity())
}

/// Rows by id: header and vector part.
pub type Rows = BTreeMap<Id, (RowHeader, Vec<f32>)>;

/// A table of a checkpoint, with all its rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Its entry in the manifest.
    pub spec: TableSpec,
    /// Its rows by id.
    pub rows: Rows,
}

impl Table {
    /// A table of rows whose values are determined by the id and `salt`.
    pub fn new(module: &str, table: &str, optimizer: OptimizerKind, dim: usize, ids: &[Id], salt: u64) -> Self {
        let layout = optimizer.layout(dim);
        let row = |id: Id| {
            let draw = |n: u64| hash_id((hash_id(id) ^ salt.wrapping_mul(0x9e37) ^ n) as i64);
            let header = RowHeader {
                id,
                last_step: draw(1),
                count: draw(2) as u32,
                score: f32::from_bits(draw(3) as u32 & 0x7f7f_ffff),
                scalar: if layout.scalar_slot { draw(4) as u32 as f32 } else { 0.0 },
                modified_epoch: draw(5) as u32,
            };
            let vector = (0..layout.vector_floats()).map(|k| draw(10 + k as u64) as i32 as f32 * 0.001).collect();
            (id, (header, vector))
        };
        let spec = TableSpec {
            module: module.into(),
            table: table.into(),
            key: 0xffff_ffff_ffff_fffe,
            dim: dim as u32,
            dtype: "F32".into(),
            optimizer: OptimizerSpec {
                name: optimizer.name().into(),
                hyperparameters: BTreeMap::from([("lr".into(), 0.1), ("eps".into(), 1.0e-8)]),
            },
            step: salt,
            seed: u64::MAX,
            initializer: InitializerSpec::Uniform { low: -0.1, high: 0.1 },
            total_num_buckets: 7,
            oov_row: None,
            missing_read: MissingRead::Initial,
            precision: None,
        };
        Self { spec, rows: ids.iter().map(|&id| row(id)).collect() }
    }

    /// The buckets of a rank.
    pub fn buckets_of(&self, rank: u32, world: u32) -> Range<u32> {
        split(self.spec.total_num_buckets, rank, world)
    }

    /// The rows of `buckets`.
    pub fn part(&self, buckets: &Range<u32>) -> Rows {
        let owned = |id: Id| buckets.contains(&self.spec.bucketing().of(id));
        self.rows.iter().filter(|(id, _)| owned(**id)).map(|(id, row)| (*id, row.clone())).collect()
    }

    /// A source of the rows of `buckets`, in chunks of `chunk_rows` rows.
    pub fn source(
        &self,
        buckets: &Range<u32>,
        chunk_rows: usize,
    ) -> impl FnMut(&mut RowSink<'_>) -> Result<()> + use<> {
        // This is not the order of the file.
        let mut rows: Vec<(RowHeader, Vec<f32>)> = self.part(buckets).into_values().collect();
        rows.sort_by_key(|(header, _)| hash_id(header.id));
        move |sink| {
            for chunk in rows.chunks(chunk_rows) {
                let headers: Vec<RowHeader> = chunk.iter().map(|(header, _)| *header).collect();
                let vectors: Vec<f32> = chunk.iter().flat_map(|(_, vector)| vector.iter().copied()).collect();
                sink(&headers, &vectors)?;
            }
            Ok(())
        }
    }
}

/// Stops `work` at each operation that changes the disk, each time on a disk from `disk`. `check` receives each
/// possible state of the disk after the stop (after a power cut, after a kill, and `torn` times with a random part of
/// the unsynced writes), the result of `work`, and the number of changes before the stop. Returns the number of stops.
pub fn stop_at_each_change(
    disk: impl Fn() -> MemoryEngine,
    torn: u64,
    work: impl Fn(FaultEngine) -> Result<()>,
    mut check: impl FnMut(MemoryEngine, &Result<()>, u64),
) -> u64 {
    let mut stops = 0;
    loop {
        let memory = disk();
        let engine = FaultEngine::new(Arc::new(memory.clone()));
        engine.hit_change(stops, IoFault::Stop);
        let result = work(engine.clone());
        if !engine.is_stopped() {
            result.expect("nothing stopped it");
            return stops;
        }
        let torn = (0..torn).map(|seed| memory.crash_torn(stops * 4 + seed));
        for image in [memory.crash(), memory.kill()].into_iter().chain(torn) {
            check(image, &result, stops);
        }
        stops += 1;
    }
}

/// The buckets of a rank, as split by `TorchRec`. The first ranks have one bucket more.
pub fn split(total: u32, rank: u32, world: u32) -> Range<u32> {
    let (each, more) = (total / world, total % world);
    let begin = rank * each + rank.min(more);
    begin..begin + each + u32::from(rank < more)
}

/// Saves tables that are split over `world` ranks, in groups of at most `group_bytes` bytes.
pub fn save(
    engine: &Arc<dyn IoEngine>,
    root: &Path,
    tables: &[Table],
    world: u32,
    group_bytes: usize,
    random: u64,
) -> Result<PublishedCheckpoint> {
    save_with(engine, root, tables, (world, group_bytes), random, SaveOptions::default())
}

/// Like `save`, with options.
pub fn save_with(
    engine: &Arc<dyn IoEngine>,
    root: &Path,
    tables: &[Table],
    ranks: (u32, usize),
    random: u64,
    options: SaveOptions,
) -> Result<PublishedCheckpoint> {
    save_to(&directory_in(engine, root), tables, ranks, random, options)
}

/// Like `save_with`, in a directory.
pub fn save_to(
    directory: &CheckpointDirectory,
    tables: &[Table],
    ranks: (u32, usize),
    random: u64,
    options: SaveOptions,
) -> Result<PublishedCheckpoint> {
    let (save, digests) = write(directory, tables, ranks, random, options)?;
    save.publish(&digests, 1)
}

/// A save whose ranks have written everything, ready to be published with their digests.
pub fn write(
    directory: &CheckpointDirectory,
    tables: &[Table],
    (world, group_bytes): (u32, usize),
    random: u64,
    options: SaveOptions,
) -> Result<(CheckpointSave, Vec<RankDigest>)> {
    let save = CheckpointSave::begin_with(directory, random, options)?;
    let digests = (0..world)
        .map(|rank| {
            let mut writer = RankWriter::new(directory, save.name(), rank, world)?.with_group_bytes(group_bytes);
            for table in tables {
                let buckets = table.buckets_of(rank, world);
                let mut source = table.source(&buckets, 5);
                writer.write_table(table.spec.clone(), buckets, &mut source)?;
            }
            writer.finish()
        })
        .collect::<Result<Vec<_>>>()?;
    Ok((save, digests))
}

/// Saves the changes from `before` to `now`, split over `world` ranks, on `parent`.
pub fn save_delta(
    engine: &Arc<dyn IoEngine>,
    root: &Path,
    pair: (&[Table], &[Table]),
    ranks: (u32, usize),
    random: u64,
    options: SaveOptions,
) -> Result<PublishedCheckpoint> {
    let (save, digests) = write_delta(engine, root, pair, ranks, random, options)?;
    save.publish(&digests, 1)
}

/// A delta whose ranks have written everything, ready to be published with their digests.
pub fn write_delta(
    engine: &Arc<dyn IoEngine>,
    root: &Path,
    (before, now): (&[Table], &[Table]),
    (world, group_bytes): (u32, usize),
    random: u64,
    options: SaveOptions,
) -> Result<(CheckpointSave, Vec<RankDigest>)> {
    let directory = directory_in(engine, root);
    let save = CheckpointSave::begin_with(&directory, random, options)?;
    let digests = (0..world)
        .map(|rank| {
            let mut writer = RankWriter::new(&directory, save.name(), rank, world)?.with_group_bytes(group_bytes);
            for (before, now) in before.iter().zip(now) {
                let buckets = now.buckets_of(rank, world);
                let (was, is) = (before.part(&buckets), now.part(&buckets));
                let mut changed = now.clone();
                changed.rows.retain(|id, row| was.get(id) != Some(row));
                // A tombstone of a row that exists again, or that never existed, has no effect.
                let mut left: Vec<Id> = was.keys().copied().filter(|id| is.get(id) != was.get(id)).collect();
                left.extend((1000..1005).filter(|&id| buckets.contains(&now.spec.bucketing().of(id))));
                let changes = DeltaChanges { tombstones: &left, sweeps: &[], total_rows: is.len() as u64 };
                let mut source = changed.source(&buckets, 5);
                writer.write_changes(now.spec.clone(), buckets, &mut source, changes)?;
            }
            writer.finish()
        })
        .collect::<Result<Vec<_>>>()?;
    Ok((save, digests))
}

/// The options of a save that is based on `parent`.
pub fn on(parent: &CheckpointId) -> SaveOptions {
    SaveOptions { parent: Some(parent.clone()), ..SaveOptions::default() }
}

/// Loads the checkpoint that `LATEST` names as `world` ranks. Each must get exactly its own buckets.
pub fn load(engine: &Arc<dyn IoEngine>, root: &Path, world: u32) -> Result<Vec<Table>> {
    load_from(&directory_in(engine, root), world)
}

/// Like `load`, in a directory.
pub fn load_from(directory: &CheckpointDirectory, world: u32) -> Result<Vec<Table>> {
    load_link(directory, world, LatestCheckpoint::read(directory)?, None)
}

/// Like `load`, with any checkpoint, and at most `ids_at_once` ids of deltas in memory.
pub fn load_chain(
    engine: &Arc<dyn IoEngine>,
    root: &Path,
    world: u32,
    latest: LatestCheckpoint,
    ids_at_once: Option<u64>,
) -> Result<Vec<Table>> {
    load_link(&directory_in(engine, root), world, latest, ids_at_once)
}

fn load_link(
    directory: &CheckpointDirectory,
    world: u32,
    latest: LatestCheckpoint,
    ids_at_once: Option<u64>,
) -> Result<Vec<Table>> {
    let mut tables: Vec<Table> = Vec::new();
    for rank in 0..world {
        let mut checkpoint = CheckpointChain::open(directory, latest)?;
        if let Some(ids) = ids_at_once {
            checkpoint = checkpoint.with_ids_at_once(ids);
        }
        for (n, entry) in checkpoint.manifest().tables.iter().enumerate() {
            let spec = &entry.spec;
            if rank == 0 {
                tables.push(Table { spec: spec.clone(), rows: Rows::new() });
            }
            let buckets = split(spec.total_num_buckets, rank, world);
            let reader = checkpoint.table_reader(&spec.module, &spec.table, buckets.clone())?;
            let floats = spec.optimizer_kind()?.layout(spec.dim as usize).vector_floats();
            let mut rows = Rows::new();
            let read = reader.read(&mut |headers, vectors| {
                assert_eq!(vectors.len(), headers.len() * floats);
                for (header, vector) in headers.iter().zip(vectors.chunks(floats)) {
                    assert!(buckets.contains(&spec.bucketing().of(header.id)));
                    assert!(rows.insert(header.id, (*header, vector.to_vec())).is_none(), "row {} twice", header.id);
                }
                Ok(())
            })?;
            assert_eq!(rows.len() as u64, read);
            assert!(reader.max_rows() >= read);
            tables[n].rows.extend(rows);
        }
        let counted: u64 = checkpoint.manifest().tables.iter().map(|entry| entry.total_rows).sum();
        if rank + 1 == world {
            assert_eq!(counted, tables.iter().map(|table| table.rows.len() as u64).sum::<u64>());
        }
    }
    Ok(tables)
}

/// The kind of the error.
pub fn kind<T>(result: Result<T>) -> embcache::Kind {
    result.err().as_ref().map(Error::kind).expect("refused")
}

/// A directory tree in RAM that contains [`ROOT`].
pub fn memory() -> MemoryEngine {
    let engine = MemoryEngine::default();
    engine.create_dir_all(Path::new(ROOT)).expect("made");
    for dir in Path::new(ROOT).ancestors() {
        engine.sync_dir(dir).expect("synced");
    }
    engine
}

/// Versions of tables. Between versions, rows change, are inserted, are removed and are inserted again.
pub fn versions(count: u64) -> Vec<Vec<Table>> {
    let at = |salt: u64| {
        let table = |name: &str, optimizer, dim| {
            let mut now = Table::new("m", name, optimizer, dim, &(0..60).collect::<Vec<Id>>(), 0);
            for version in 1..=salt {
                // One in eight ids changes. One in nine is removed, and is inserted again two versions later.
                let ids: Vec<Id> = (0..90 + version as Id).filter(|id| (*id + version as Id) % 8 == 0).collect();
                now.rows.extend(Table::new("m", name, optimizer, dim, &ids, version).rows);
                now.rows.retain(|id, _| (*id + version as Id) % 9 != 0);
                let back: Vec<Id> = (0..60).filter(|id| (*id + version as Id) % 9 == 2).collect();
                now.rows.extend(Table::new("m", name, optimizer, dim, &back, 100 + version).rows);
            }
            now.spec.step = salt;
            now
        };
        vec![table("a", OptimizerKind::RowWiseAdagrad, 3), table("b", OptimizerKind::Adam, 2)]
    };
    (0..count).map(at).collect()
}

/// Saves the versions as a full checkpoint and deltas. `worlds` are the numbers of ranks that save each.
pub fn save_chain(engine: &Arc<dyn IoEngine>, versions: &[Vec<Table>], worlds: &[u32]) -> Vec<PublishedCheckpoint> {
    let mut saved = vec![save(engine, Path::new(ROOT), &versions[0], worlds[0], 400, 7).expect("saved")];
    for (n, pair) in versions.windows(2).enumerate() {
        let world = worlds[(n + 1) % worlds.len()];
        let options = on(&saved[n].identity);
        let made = save_delta(engine, Path::new(ROOT), (&pair[0], &pair[1]), (world, 400), n as u64, options);
        saved.push(made.expect("a delta"));
    }
    saved
}

/// Merges the checkpoint that `LATEST` names with its base checkpoints, by `world` ranks.
pub fn compact(engine: &Arc<dyn IoEngine>, world: u32, random: u64) -> Result<PublishedCheckpoint> {
    let directory = directory_in(engine, ROOT);
    let latest = LatestCheckpoint::read(&directory)?;
    let merged = ChainCompaction::open(&directory, latest, true)?.expect("a chain");
    let options = SaveOptions { merged: Some(merged.chain().identity()), ..SaveOptions::default() };
    let save = CheckpointSave::begin_with(&directory, random, options)?;
    let digests = (0..world)
        .map(|rank| merged.write(save.name(), (rank, world), &mut |_| Ok(())))
        .collect::<Result<Vec<RankDigest>>>()?;
    merged.chain().release();
    save.publish(&digests, merged.chain().manifest().next_epoch)
}
