//! Loaded tables equal the saved ones, for any number of ranks.

use std::path::Path;
use std::sync::Arc;

use embcache::checkpoint::{CheckpointSave, OpenCheckpoint, RankWriter};
use embcache::config::OptimizerKind::{Adagrad, Adam, AdamW, PartialRowWiseAdam, RowWiseAdagrad, Sgd};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, PsyncEngine};
use embcache::types::Id;
use embcache::{Error, Kind};
use embcache_tests::checkpoint::{ROOT, Table, kind, load, memory, save, split};
use embcache_tests::directory_in;
use proptest::prelude::*;

fn several() -> Vec<Table> {
    let ids: Vec<Id> = (-40..60).chain([Id::MIN, Id::MAX, 1 << 40, -(1 << 50)]).collect();
    // The tables are in the order of (module, table), as manifests list them.
    vec![
        Table::new("", "root", Sgd, 1, &ids, 1),
        Table::new("model.ebc", "adam", Adam, 3, &ids, 2),
        Table::new("model.ebc", "empty", Adagrad, 4, &[], 3),
        Table::new("model.ebc", "one", RowWiseAdagrad, 8, &[-1], 4),
        Table::new("model.ebc", "partial", PartialRowWiseAdam, 6, &ids[10..80], 7),
        Table::new("model.ebc", "sum", Adagrad, 5, &ids[20..], 5),
        Table::new("other/ebc", "adam", AdamW, 2, &ids[..30], 6),
    ]
}

#[test]
fn any_world_size_loads_what_any_other_saved() {
    let tables = several();
    for writers in 1..=4 {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        save(&engine, Path::new(ROOT), &tables, writers, 300, 7).expect("saved");
        for readers in 1..=4 {
            assert_eq!(load(&engine, Path::new(ROOT), readers).expect("loaded"), tables, "{writers} to {readers}");
        }
    }
}

#[test]
fn more_ranks_than_buckets_leave_some_ranks_without_rows() {
    let tables = several();
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    save(&engine, Path::new(ROOT), &tables, 9, 4096, 7).expect("saved");
    assert_eq!(load(&engine, Path::new(ROOT), 10).expect("loaded"), tables);
}

#[test]
fn a_second_save_replaces_the_first_and_leaves_nothing_of_it() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    let mut tables = several();
    let first = save(&engine, root, &tables, 2, 4096, 7).expect("saved");
    for table in &mut tables {
        table.spec.step += 1;
        table.rows.pop_first();
    }
    let second = save(&engine, root, &tables, 3, 4096, 8).expect("saved");
    assert_eq!((first.latest.name.seq, second.latest.name.seq), (1, 2));
    assert!(second.cleanup_errors.is_empty());
    assert_eq!(load(&engine, root, 1).expect("loaded"), tables);
    let entries = engine.list(root).expect("listed");
    assert_eq!(entries, [root.join(second.latest.name.to_string()), root.join("LATEST"), root.join("lock")]);
}

#[test]
fn what_an_abandoned_save_left_is_swept_but_not_a_save_under_way() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    let tables = several();
    save(&engine, root, &tables, 1, 4096, 7).expect("saved");
    let directory = directory_in(&engine, root);
    drop(CheckpointSave::begin(&directory, 8).expect("begun"));
    let under_way = CheckpointSave::begin(&directory, 9).expect("begun");
    assert_eq!(engine.list(root).expect("listed").len(), 4, "the dropped save's directory is gone");
    let published = save(&engine, root, &tables, 1, 4096, 10).expect("saved");
    assert!(published.cleanup_errors.is_empty());
    assert!(engine.exists(&root.join(under_way.name().to_string())).unwrap());
    let mut writer = RankWriter::new(&directory, under_way.name(), 0, 1).expect("made");
    let none = &mut |_: &mut embcache::checkpoint::RowSink<'_>| Ok(());
    writer.write_table(tables[2].spec.clone(), 0..7, none).expect("written");
    let digest = writer.finish().expect("finished");
    under_way.publish(&[digest], 1).expect("published");
    assert_eq!(load(&engine, root, 1).expect("loaded"), tables[2..3]);
    CheckpointSave::begin(&directory, 11).expect("begun").abandon().expect("removed");
    assert_eq!(engine.list(root).expect("listed").len(), 3);
}

#[test]
fn safetensors_reads_files_and_direct_io_could_write_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let table = Table::new("m", "t", Adam, 3, &(0..1000).collect::<Vec<Id>>(), 1);
    let published = save(&engine, dir.path(), std::slice::from_ref(&table), 1, 20_000, 7).expect("saved");
    let files = dir.path().join(published.latest.name.to_string()).join("m+t");
    let (mut seen, mut groups) = (0, 0);
    for entry in std::fs::read_dir(files).expect("listed") {
        let bytes = std::fs::read(entry.expect("an entry").path()).expect("read");
        assert_eq!(bytes.len() % 4096, 0);
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("valid");
        let names = tensors.names();
        for suffix in names.iter().filter_map(|name| name.strip_prefix("id")) {
            let tensor = |name: &str| tensors.tensor(&format!("{name}{suffix}")).expect(name);
            let ids: Vec<Id> =
                tensor("id").data().chunks(8).map(|b| Id::from_le_bytes(b.try_into().expect("8"))).collect();
            assert!(
                ids.is_sorted_by_key(|&id| (table.spec.bucketing().of(id), id as u64)),
                "sorted by bucket, then id"
            );
            for (part, name) in ["weight", "exp_avg", "exp_avg_sq"].into_iter().enumerate() {
                assert_eq!(tensor(name).shape(), [ids.len(), 3]);
                let values = |id| table.rows[id].1[part * 3..part * 3 + 3].iter();
                let expected: Vec<u8> = ids.iter().flat_map(values).flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(tensor(name).data(), expected, "{name}");
            }
            let counts: Vec<u8> = ids.iter().flat_map(|id| table.rows[id].0.count.to_le_bytes()).collect();
            assert_eq!(tensor("count").data(), counts);
            seen += ids.len();
            groups += 1;
        }
    }
    assert_eq!((seen, groups > 1), (1000, true));
}

#[test]
fn a_rank_reads_its_own_byte_ranges_only() {
    // One group of 14,000 rows has its weights in 875 chunks. A rank of seven owns one bucket of seven.
    let dir = tempfile::tempdir().expect("a directory");
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let table = Table::new("m", "t", Sgd, 256, &(0..14_000).collect::<Vec<Id>>(), 1);
    let latest = save(&engine, dir.path(), std::slice::from_ref(&table), 1, 64 << 20, 7).expect("saved").latest;
    let path = dir.path().join(latest.name.to_string()).join("m+t/0-of-1.0.safetensors");
    // Corrupt all weights after the chunk in which those of bucket 0 (rows of 1 KiB) end.
    let own = table.part(&split(7, 0, 7)).len();
    let mut bytes = std::fs::read(&path).expect("read");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8")) as usize;
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("valid");
    let weights = tensors.tensor("weight").expect("there").data();
    let start = weights.as_ptr() as usize - bytes.as_ptr() as usize;
    let end = start + weights.len();
    assert!(start > header && weights.len() == 14_000 * 1024);
    let shared = (own * 1024).next_multiple_of(16 << 10);
    bytes[start + shared..end].iter_mut().for_each(|byte| *byte = !*byte);
    std::fs::write(&path, bytes).expect("written");
    let checkpoint = OpenCheckpoint::open(&directory_in(&engine, dir.path()), latest).expect("opened");
    let read = |rank: u32| {
        let reader = checkpoint.table_reader("m", "t", split(7, rank, 7))?;
        let mut rows = 0;
        reader.read(&mut |headers, _| {
            rows += headers.len();
            Ok(())
        })?;
        Ok::<_, Error>(rows)
    };
    assert_eq!(read(0).expect("its own bytes are whole"), own);
    for rank in 1..7 {
        assert_eq!(kind(read(rank)), Kind::Corruption, "rank {rank}");
    }
}

#[test]
fn ranks_that_disagree_are_not_published() {
    let root = Path::new(ROOT);
    let table = Table::new("m", "t", Sgd, 2, &[1, 2, 3], 1);
    let none = |_: &mut embcache::checkpoint::RowSink<'_>| Ok(());
    let publish = |shares: &[(u64, std::ops::Range<u32>)]| {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let directory = directory_in(&engine, root);
        let save = CheckpointSave::begin(&directory, 7)?;
        let world = shares.len() as u32;
        let digests = shares
            .iter()
            .enumerate()
            .map(|(rank, (step, buckets))| {
                let mut writer = RankWriter::new(&directory, save.name(), rank as u32, world)?;
                let mut spec = table.spec.clone();
                spec.step = *step;
                writer.write_table(spec, buckets.clone(), &mut none.clone())?;
                writer.finish()
            })
            .collect::<Result<Vec<_>, Error>>()?;
        save.publish(&digests, 1)?;
        Ok::<_, Error>(())
    };
    publish(&[(5, 0..3), (5, 3..7)]).expect("published");
    assert_eq!(kind(publish(&[(5, 0..3), (6, 3..7)])), Kind::State, "steps differ");
    assert_eq!(kind(publish(&[(5, 0..3), (5, 4..7)])), Kind::State, "nobody has bucket 3");
    assert_eq!(kind(publish(&[(5, 0..4), (5, 3..7)])), Kind::State, "two have bucket 3");
    assert_eq!(kind(publish(&[(5, 0..3), (5, 3..6)])), Kind::State, "nobody has bucket 6");
    assert_eq!(kind(publish(&[(5, 0..8)])), Kind::Input, "no such bucket");
}

#[test]
fn rows_that_do_not_belong_are_refused_by_the_writer() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    let directory = directory_in(&engine, root);
    let save = CheckpointSave::begin(&directory, 7).expect("begun");
    let table = Table::new("m", "t", Sgd, 2, &[1], 1);
    let (header, vector) = table.rows[&1].clone();
    let write = |rank, rows: &[(Id, usize)], buckets: std::ops::Range<u32>| {
        let mut writer = RankWriter::new(&directory, save.name(), rank, 9).expect("made");
        writer.write_table(table.spec.clone(), buckets, &mut |sink: &mut embcache::checkpoint::RowSink<'_>| {
            for &(id, floats) in rows {
                let header = embcache::rows::RowHeader { id, ..header };
                sink(&[header], &vector[..floats])?;
            }
            Ok(())
        })
    };
    assert_eq!(write(0, &[(1, 2), (8, 2)], 0..7).expect("written"), 2);
    assert_eq!(kind(write(1, &[(1, 2), (8, 2), (1, 2)], 0..7)), Kind::Input, "twice");
    assert_eq!(kind(write(2, &[(1, 1)], 0..7)), Kind::Input, "too few floats");
    let bucket = table.spec.bucketing().of(1);
    assert_eq!(kind(write(3, &[(1, 2)], bucket + 1..7)), Kind::Input, "another rank's bucket");
    assert_eq!(kind(RankWriter::new(&directory, save.name(), 9, 9)), Kind::Input);
}

#[test]
fn a_missing_checkpoint_and_a_missing_table_are_named() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    assert_eq!(kind(load(&engine, root, 1)), Kind::Path);
    let saved = save(&engine, root, &several(), 1, 4096, 7).expect("saved");
    let checkpoint = OpenCheckpoint::open(&directory_in(&engine, root), saved.latest).expect("opened");
    let error = checkpoint.table("model.ebc", "missing").expect_err("not there");
    assert_eq!(error.kind(), Kind::Mismatch);
    assert!(error.to_string().contains("model.ebc/one"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_rows_come_back_bit_for_bit(
        ids in prop::collection::btree_set(any::<Id>(), 0..200),
        dim in 1_usize..9,
        optimizer in prop::sample::select(vec![Sgd, Adagrad, RowWiseAdagrad, Adam, AdamW]),
        total_num_buckets in 1_u32..40,
        (writers, readers) in (1_u32..5, 1_u32..5),
        group_bytes in 1_usize..20_000,
        values in prop::collection::vec(any::<u32>(), 1..50),
    ) {
        let ids: Vec<Id> = ids.into_iter().collect();
        let mut table = Table::new("a.b", "t/ü", optimizer, dim, &ids, 3);
        table.spec.total_num_buckets = total_num_buckets;
        let mut value = values.iter().cycle();
        for (header, vector) in table.rows.values_mut() {
            header.score = f32::from_bits(*value.next().expect("endless"));
            for float in vector {
                *float = f32::from_bits(*value.next().expect("endless"));
            }
        }
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        save(&engine, Path::new(ROOT), std::slice::from_ref(&table), writers, group_bytes, 7).expect("saved");
        let loaded = load(&engine, Path::new(ROOT), readers).expect("loaded");
        prop_assert_eq!(&loaded[0].spec, &table.spec);
        // They are compared as bits, because NaNs are values like others.
        let bits = |table: &Table| -> Vec<(Id, u32, Vec<u32>)> {
            table.rows.iter().map(|(id, (header, vector))| {
                (*id, header.score.to_bits(), vector.iter().map(|value| value.to_bits()).collect())
            }).collect()
        };
        prop_assert_eq!(bits(&loaded[0]), bits(&table));
    }
}

#[test]
fn failed_listing_loses_and_removes_no_checkpoint() {
    let whole = memory();
    let root = Path::new(ROOT);
    let (older, newer) = (several(), vec![Table::new("m", "a", RowWiseAdagrad, 4, &[7, 8], 5)]);
    let engine: Arc<dyn IoEngine> = Arc::new(whole.clone());
    save(&engine, root, &older, 1, 4096, 1).expect("saved");
    save(&engine, root, &newer, 1, 4096, 2).expect("saved");
    let mut refused = 0;
    for passing in 0.. {
        let fault = FaultEngine::new(Arc::new(whole.kill()));
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        fault.hit_once(IoOperation::Exists, passing, IoFault::Fail(libc::EIO));
        match load(&engine, root, 1) {
            Ok(found) => assert_eq!(found, newer, "look {passing}"),
            Err(error) => {
                assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::EIO)), "{error}");
                refused += 1;
                continue;
            }
        }
        // All reads of a save except those of its cleanup must succeed. For any result of the save, the checkpoint that
        // `LATEST` names is intact.
        let saved = save(&engine, root, &older, 1, 4096, 3);
        fault.clear();
        let expected = if saved.is_ok() { &older } else { &newer };
        assert_eq!(&load(&engine, root, 1).expect("whole"), expected, "look {passing}");
        if saved.is_ok() {
            break;
        }
        refused += 1;
    }
    assert!(refused > 1, "{refused}");
}
