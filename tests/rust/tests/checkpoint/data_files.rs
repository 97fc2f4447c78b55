//! Data files of many groups, the rows of buckets in them, and the manifests that a load opens.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{
    CheckpointChain, CheckpointName, CheckpointSave, DeltaChanges, LatestCheckpoint, OpenCheckpoint, RankWriter, copy,
};
use embcache::config::OptimizerKind::{RowWiseAdagrad, Sgd};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation};
use embcache::types::{Id, hash_id};
use embcache_tests::checkpoint::{ROOT, Rows, Table, load, memory, on, save, save_delta, split};
use embcache_tests::directory_in;
use safetensors::SafeTensors;

/// The data files of a table in a checkpoint, in order of their names.
fn data_files(engine: &dyn IoEngine, latest: LatestCheckpoint, table: &str) -> Vec<PathBuf> {
    let mut files = engine.list(&Path::new(ROOT).join(latest.name.to_string()).join(table)).expect("listed");
    files.sort();
    files
}

/// A table of `rows` rows in 65,536 buckets.
fn in_many_buckets(rows: i64) -> Table {
    let mut table = Table::new("m", "t", RowWiseAdagrad, 4, &(0..rows).collect::<Vec<Id>>(), 1);
    table.spec.total_num_buckets = 1 << 16;
    table
}

#[test]
fn groups_share_files_up_to_the_maximum_of_a_header() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let table = in_many_buckets(10_000);
    // 48 bytes a row: groups of 50 rows, so 200 groups in files of 64.
    let latest = save(&engine, Path::new(ROOT), std::slice::from_ref(&table), 1, 2400, 7).expect("saved").latest;
    let files = data_files(&*engine, latest, "m+t");
    let groups = |path: &PathBuf| {
        let bytes = embcache::io::read_file(&*engine, path, 1 << 30).expect("read");
        let tensors = SafeTensors::deserialize(&bytes).expect("valid safetensors");
        tensors.names().iter().filter(|name| name.split('.').next() == Some("id")).count()
    };
    assert_eq!(files.iter().map(groups).collect::<Vec<_>>(), [64, 64, 64, 8]);
    for readers in [1, 3] {
        assert!(load(&engine, Path::new(ROOT), readers).expect("loaded")[0] == table, "{readers} ranks");
    }
}

#[test]
fn any_range_of_buckets_is_found_between_the_offsets() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let table = in_many_buckets(9000);
    // One group of all rows, with an offset for every 470 buckets, and groups of 700 rows.
    for group_bytes in [1 << 20, 700 * 48] {
        let root = Path::new(ROOT);
        let latest = save(&engine, root, std::slice::from_ref(&table), 1, group_bytes, 7).expect("saved").latest;
        let checkpoint = OpenCheckpoint::open(&directory_in(&engine, root), latest).expect("opened");
        let total = table.spec.total_num_buckets;
        let mut ranges = vec![0..0, 0..1, 0..total, total - 1..total, total..total];
        ranges.extend((0..200).map(|n| {
            let bounds = [hash_id(n) as u32 % (total + 1), hash_id(n + 1000) as u32 % (total + 1)];
            bounds[0].min(bounds[1])..bounds[0].max(bounds[1])
        }));
        ranges.extend((0..100).map(|n| {
            let begin = hash_id(n) as u32 % (total - 5);
            begin..begin + n as u32 % 5
        }));
        for buckets in ranges {
            let mut rows = Rows::new();
            let reader = checkpoint.table_reader("m", "t", buckets.clone()).expect("a reader");
            let read = reader.read(&mut |headers, vectors| {
                let each = headers.iter().zip(vectors.chunks(4));
                rows.extend(each.map(|(header, vector)| (header.id, (*header, vector.to_vec()))));
                Ok(())
            });
            read.unwrap_or_else(|error| panic!("{buckets:?}: {error}"));
            assert!(rows == table.part(&buckets), "{buckets:?}");
        }
    }
}

#[test]
fn a_delta_of_ten_rows_is_one_small_file() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (before, mut now) = (vec![in_many_buckets(1000)], vec![in_many_buckets(1000)]);
    let full = save(&engine, Path::new(ROOT), &before, 1, 1 << 20, 7).expect("saved");
    let other = Table::new("m", "t", RowWiseAdagrad, 4, &(0..10).collect::<Vec<Id>>(), 9);
    now[0].rows.extend(other.rows);
    let directory = directory_in(&engine, ROOT);
    let save = CheckpointSave::begin_with(&directory, 8, on(&full.identity)).expect("begun");
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("a writer");
    let mut changed = now[0].clone();
    changed.rows.retain(|id, _| *id < 10);
    let changes = DeltaChanges { tombstones: &[], sweeps: &[], total_rows: 1000 };
    let rows = &mut changed.source(&(0..1 << 16), 5);
    writer.write_changes(now[0].spec.clone(), 0..1 << 16, rows, changes).expect("written");
    let latest = save.publish(&[writer.finish().expect("finished")], 1).expect("published").latest;
    let files = data_files(&*engine, latest, "m+t");
    assert_eq!(files.len(), 1);
    let bytes = embcache::io::read_file(&*engine, &files[0], 1 << 20).expect("read").len();
    assert!(bytes < 8192, "{bytes} bytes");
    assert!(load(&engine, Path::new(ROOT), 2).expect("loaded") == now);
}

#[test]
fn a_rank_needs_only_the_manifests_that_overlap_its_buckets() {
    const WRITERS: u32 = 1024;
    let (engine, root): (Arc<dyn IoEngine>, _) = (Arc::new(memory()), Path::new(ROOT));
    let mut tables = vec![in_many_buckets(500), in_many_buckets(300)];
    tables[1].spec.table = "u".into();
    let full = save(&engine, root, &tables, WRITERS, 1 << 20, 7).expect("saved");
    let mut now = tables.clone();
    now[0].rows.retain(|id, _| id % 5 > 0);
    let delta = save_delta(&engine, root, (&tables, &now), (WRITERS, 1 << 20), 8, on(&full.identity)).expect("saved");
    for (rank, world, most) in [(512, 1024, 1), (999, 1000, 3), (50, 100, 12)] {
        let buckets = split(1 << 16, rank, world);
        let others: Vec<u32> = (0..WRITERS)
            .filter(|&writer| {
                let owned = split(1 << 16, writer, WRITERS);
                owned.end <= buckets.start || buckets.end <= owned.start
            })
            .collect();
        assert!(WRITERS as usize - others.len() <= most, "rank {rank} of {world}");
        let manifest =
            |name: &CheckpointName, rank| root.join(name.to_string()).join(format!("{rank}-of-{WRITERS}.json"));
        let each = |action: &dyn Fn(&Path, &Path)| {
            for name in [&full.latest.name, &delta.latest.name] {
                for rank in &others {
                    let path = manifest(name, rank);
                    action(&path, &path.with_extension("hidden"));
                }
            }
        };
        each(&|path, hidden| engine.rename(path, hidden).expect("renamed"));
        let chain = CheckpointChain::open(&directory_in(&engine, root), delta.latest).expect("opened");
        for table in &now {
            let reader = chain.table_reader("m", &table.spec.table, buckets.clone()).expect("a reader");
            let rows = table.part(&buckets).len() as u64;
            assert_eq!(reader.read(&mut |_, _| Ok(())).expect("read"), rows, "rank {rank} of {world}");
        }
        let error = chain.table_reader("m", "t", 0..1 << 16).expect_err("manifests are missing");
        assert!(error.to_string().contains(&format!("-of-{WRITERS}.json")), "{error}");
        each(&|path, hidden| engine.rename(hidden, path).expect("renamed"));
    }
    assert!(load(&engine, root, 5).expect("loaded") == now);
}

#[test]
fn the_manifest_of_a_rank_without_tables_is_verified() {
    let (engine, root): (Arc<dyn IoEngine>, _) = (Arc::new(memory()), Path::new(ROOT));
    let (directory, table) = (directory_in(&engine, root), in_many_buckets(100));
    let save = CheckpointSave::begin(&directory, 7).expect("begun");
    let digests = [0, 1].map(|rank| {
        let mut writer = RankWriter::new(&directory, save.name(), rank, 2).expect("a writer");
        if rank == 0 {
            let rows = &mut table.source(&(0..1 << 16), 5);
            writer.write_table(table.spec.clone(), 0..1 << 16, rows).expect("written");
        }
        writer.finish().expect("finished")
    });
    let latest = save.publish(&digests, 1).expect("published").latest;
    let open = || OpenCheckpoint::open(&directory, latest).expect("opened");
    open().check_ranks(0, 1).expect("whole");
    let path = root.join(latest.name.to_string()).join("1-of-2.json");
    engine.remove_file(&path).expect("removed");
    open().table_reader("m", "t", 0..1 << 16).expect("rank 1 has no rows");
    open().check_ranks(0, 2).expect("rank 0 is whole");
    for (part, parts) in [(0, 1), (1, 2)] {
        let error = open().check_ranks(part, parts).expect_err("a manifest is missing");
        assert!(error.to_string().contains("1-of-2.json"), "{error}");
    }
    let chain = CheckpointChain::open(&directory, latest).expect("opened");
    engine.create_dir_all(Path::new("/checkpoints/copy")).expect("made");
    let copied = copy(&chain, &directory_in(&engine, "/checkpoints/copy"));
    assert!(copied.expect_err("a manifest is missing").to_string().contains("1-of-2.json"));
}

#[test]
fn a_full_disk_at_any_write_of_a_file_of_groups_fails_the_save() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let table = Table::new("m", "t", Sgd, 4, &(0..2000).collect::<Vec<Id>>(), 1);
    let root = Path::new(ROOT);
    save(&engine, root, std::slice::from_ref(&table), 1, 1 << 20, 7).expect("saved");
    let mut failures = 0;
    for operation in [IoOperation::Create, IoOperation::SetLen, IoOperation::Write, IoOperation::Sync] {
        for passing in 0.. {
            let faults = Arc::new(FaultEngine::new(Arc::clone(&engine)));
            faults.hit_once(operation, passing, IoFault::Fail(libc::ENOSPC));
            let faulty: Arc<dyn IoEngine> = Arc::clone(&faults) as _;
            // 100 groups in two files.
            let saved = save(&faulty, root, std::slice::from_ref(&table), 1, 20 * 44, 8 + passing);
            if faults.will_hit() {
                assert!(saved.is_ok(), "{operation:?} has happened {passing} times");
                break;
            }
            let error = saved.expect_err("the disk was full");
            assert!(matches!(error.kind(), Kind::Storage | Kind::Capacity), "{error}");
            assert!(load(&engine, root, 2).expect("the previous one")[0] == table);
            failures += 1;
        }
    }
    assert!(failures > 100, "{failures}");
}
