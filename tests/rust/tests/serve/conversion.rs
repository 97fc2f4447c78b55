//! Serving checkpoints: the rows of a chain without slots, in each precision. Training rejects them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::checkpoint::{
    ChainCompaction, CheckpointChain, CheckpointId, CheckpointKind, LatestCheckpoint, LoadColumns, LoadSegments,
    PublishedCheckpoint, SaveOptions, TableRequest, make_for_serving, reshard,
};
use embcache::config::{EvictionConfig, EvictionRule, MissingRead, OptimizerKind, TableConfig};
use embcache::io::{IoEngine, read_file, write_atomically};
use embcache::lifecycle::ExpirySweep;
use embcache::rows::WeightPrecision;
use embcache::serve::{ServeOptions, TableServer};
use embcache::types::{Id, hash_id};
use embcache::{Error, Kind, Result};
use embcache_tests::checkpoint::{ROOT, Table, kind, memory, on, save, save_delta, save_with, stop_at_each_change};
use embcache_tests::ranks::save_as_base;
use embcache_tests::{Rig, config, directory_in};

pub(crate) const SERVED: &str = "/checkpoints/served";

pub(crate) fn ids() -> Vec<Id> {
    (0..700).map(|n| hash_id(n) as Id).collect()
}

/// Tables of widths whose rows are multiples of cache lines, and of others whose stored rows have an odd number of
/// bytes.
pub(crate) fn tables(ids: &[Id], salt: u64) -> Vec<Table> {
    use OptimizerKind::{Adam, PartialRowWiseAdam, RowWiseAdagrad, Sgd};
    let wanted = [("a", RowWiseAdagrad, 16), ("b", Adam, 3), ("c", Sgd, 1), ("d", PartialRowWiseAdam, 64)];
    let small = |mut table: Table| {
        // The values of `Table::new` are beyond fp16.
        for (_, vector) in table.rows.values_mut() {
            for value in vector {
                *value *= 1e-5;
            }
        }
        table
    };
    wanted.into_iter().map(|(name, kind, dim)| small(Table::new("m", name, kind, dim, ids, salt))).collect()
}

/// A chain of two ranks: a full checkpoint, and a delta in which rows were changed, removed and inserted.
fn chain(engine: &Arc<dyn IoEngine>) -> (CheckpointChain, Vec<Table>) {
    let (before, mut now) = (tables(&ids()[..600], 1), tables(&ids(), 2));
    for (before, now) in before.iter().zip(&mut now) {
        now.rows.retain(|id, _| id % 7 != 0);
        let kept = before.rows.iter().filter(|(id, _)| *id % 7 != 0 && *id % 3 != 0);
        now.rows.extend(kept.map(|(id, row)| (*id, row.clone())));
    }
    let full = save(engine, Path::new(ROOT), &before, 2, 9000, 7).expect("saved");
    save_delta(engine, Path::new(ROOT), (&before, &now), (2, 9000), 8, on(&full.identity)).expect("saved");
    (newest(engine, ROOT).expect("opened"), now)
}

pub(crate) fn newest(engine: &Arc<dyn IoEngine>, root: impl AsRef<Path>) -> Result<CheckpointChain> {
    let directory = directory_in(engine, root);
    CheckpointChain::open(&directory, LatestCheckpoint::read(&directory)?)
}

pub(crate) fn serve(
    engine: &Arc<dyn IoEngine>,
    from: &CheckpointChain,
    precision: WeightPrecision,
) -> Result<PublishedCheckpoint> {
    engine.create_dir_all(Path::new(SERVED))?;
    make_for_serving(from, &directory_in(engine, SERVED), (5, 1), precision, &mut |_| Ok(()))
}

/// Every row of a table, as bits.
fn rows(chain: &CheckpointChain, table: &str, buckets: std::ops::Range<u32>) -> BTreeMap<Id, (u64, u32, Vec<u32>)> {
    let mut found = BTreeMap::new();
    let reader = chain.table_reader("m", table, buckets).expect("its files");
    reader
        .read(&mut |headers, vectors| {
            for (header, vector) in headers.iter().zip(vectors.chunks(vectors.len() / headers.len())) {
                let bits = vector.iter().map(|value| value.to_bits()).collect();
                let metadata = (header.last_step, header.score.to_bits(), bits);
                assert!(found.insert(header.id, metadata).is_none(), "row {} is there twice", header.id);
            }
            Ok(())
        })
        .expect("read");
    found
}

/// The values of a row that was stored in a precision, without slots.
pub(crate) fn expected(row: &[f32], dim: usize, precision: WeightPrecision) -> Vec<u32> {
    let (mut stored, mut read) = (vec![0; precision.row_bytes(dim)], vec![0.0; dim]);
    precision.store(&row[..dim], dim, &mut stored).expect("held");
    precision.load(&stored, &mut read);
    read.iter().map(|value| value.to_bits()).chain(std::iter::repeat_n(0, row.len() - dim)).collect()
}

#[test]
fn a_server_reads_what_a_serving_checkpoint_stores() {
    for precision in WeightPrecision::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let (from, tables) = chain(&engine);
        serve(&engine, &from, precision).expect("made");
        let serving = TableServer::open(directory_in(&engine, SERVED), ServeOptions::default()).expect("opened");
        // Converted again, as a newer checkpoint, which the server finds.
        serve(&engine, &from, WeightPrecision::Fp16).expect("made");
        let first = serving.pin().expect("a version");
        serving.poll().expect("a look");
        for (version, precision) in [(first, precision), (serving.pin().expect("a version"), WeightPrecision::Fp16)] {
            for table in &tables {
                let (dim, ids) = (table.spec.dim as usize, table.rows.keys().copied().collect::<Vec<Id>>());
                let (mut out, mut found) = (vec![0.0_f32; ids.len() * dim], vec![false; ids.len()]);
                let served = version.table(&table.spec.table).expect("the table");
                assert_eq!(served.lookup(&ids, &mut out, &mut found).expect("served"), 0);
                for (row, (_, vector)) in out.chunks(dim).zip(table.rows.values()) {
                    let bits: Vec<u32> = row.iter().map(|value| value.to_bits()).collect();
                    assert_eq!(bits, expected(vector, dim, precision)[..dim], "{precision:?} {}", table.spec.table);
                }
            }
        }
    }
}

#[test]
fn merged_rows_read_as_precision_stores_them() {
    for precision in WeightPrecision::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let (from, tables) = chain(&engine);
        serve(&engine, &from, precision).expect("made");
        let made = newest(&engine, SERVED).expect("opened");
        let manifest = made.manifest();
        assert_eq!(manifest.kind, CheckpointKind::Serving);
        assert_eq!(manifest.made_from, Some(from.identity()));
        assert_eq!((manifest.next_epoch, manifest.ranks.len()), (from.manifest().next_epoch, 1));
        for table in &tables {
            let (name, dim) = (&table.spec.table, table.spec.dim as usize);
            let entry = made.table("m", name).expect("there");
            assert_eq!((entry.spec.precision, entry.spec.dtype.as_str()), (Some(precision), precision.dtype()));
            assert_eq!((entry.rows, entry.total_rows), (table.rows.len() as u64, table.rows.len() as u64));
            let wanted = table.rows.iter().map(|(id, (header, vector))| {
                (*id, (header.last_step, header.score.to_bits(), expected(vector, dim, precision)))
            });
            assert_eq!(rows(&made, name, 0..7), wanted.collect(), "{precision:?} {name}");
            let parts = [rows(&made, name, 0..3), rows(&made, name, 3..7)];
            assert_eq!(parts.iter().map(BTreeMap::len).sum::<usize>(), table.rows.len());
            assert_eq!(made.table_reader("m", name, 0..7).expect("its files").verify().expect("whole"), entry.rows);
        }
    }
}

#[test]
fn a_file_is_safetensors_without_slots_and_with_weights_in_few_bytes() {
    for precision in WeightPrecision::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let (from, tables) = chain(&engine);
        let made = serve(&engine, &from, precision).expect("made");
        for table in &tables {
            let name = format!("{}/m+{}/0-of-1.0.safetensors", made.identity.name, table.spec.table);
            let bytes = read_file(&*engine, &Path::new(SERVED).join(name), 1 << 30).expect("a file");
            let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
            let (n, dim) = (table.rows.len(), table.spec.dim as usize);
            let mut names: Vec<&str> = file.names().into_iter().collect();
            names.sort_unstable();
            let all = "__pad bucket_offsets checksums count id last_step score tombstone weight";
            assert_eq!(names.join(" "), all);
            let weight = file.tensor("weight").expect("weights");
            assert_eq!(weight.shape(), [n, precision.columns(dim)]);
            assert_eq!(format!("{:?}", weight.dtype()), precision.dtype());
            let start = weight.data().as_ptr().addr() - bytes.as_ptr().addr();
            assert_eq!((start % 64, bytes.len() % 4096), (0, 0), "weights start at a line, in whole blocks");
            let ids: Vec<Id> = bytemuck::pod_collect_to_vec(file.tensor("id").expect("ids").data());
            for (id, stored) in ids.iter().zip(weight.data().chunks(precision.row_bytes(dim))) {
                let mut wanted = vec![0; stored.len()];
                precision.store(&table.rows[id].1[..dim], dim, &mut wanted).expect("held");
                assert_eq!(stored, wanted, "{precision:?}, row {id}");
            }
        }
    }
}

fn rig() -> Rig {
    let settings = TableConfig { total_num_buckets: 13, ..config(4, OptimizerKind::RowWiseAdagrad, 1000) };
    let rig = Rig::with_faults(settings).0;
    rig.train(&[1, 2, 3], 1, 1).expect("trained");
    rig
}

/// Loads into tables, resharding, merging and conversion reject it with an error that states its purpose.
#[test]
fn training_operations_reject_serving_checkpoint() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = Rig::open(config(4, OptimizerKind::RowWiseAdagrad, 1000), Arc::clone(&engine)).expect("opened");
    saved.train(&[5, 6], 1, 1).expect("trained");
    let full = save_as_base(&engine, std::slice::from_ref(&saved), 20_000, None);
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
    let made = newest(&engine, SERVED).expect("opened");
    let check = |error: Error| {
        assert_eq!(error.kind(), Kind::Unsupported, "{error}");
        let text = error.to_string();
        assert!(text.contains("kind serving, int8") && text.contains("torchrec_embcache.serving"), "{text}");
        assert!(text.contains(&full.name), "{text}");
    };
    let (other, directory) = (rig(), directory_in(&engine, SERVED));
    let before = other.contents().expect("every row");
    for columns in [LoadColumns::All, LoadColumns::WithoutSlots] {
        let segments = LoadSegments::Open;
        let request = TableRequest { module: "m", table: "t", buckets: 0..13, columns, segments };
        check(made.check_table(&other.table, &request).expect_err("refused"));
    }
    let reader = made.table_reader("m", "t", 0..13).expect("its files");
    assert_eq!(kind(reader.load_into(&other.table)), Kind::Mismatch);
    assert_eq!(other.contents().expect("every row"), before);
    check(
        ChainCompaction::open(&directory, LatestCheckpoint::read(&directory).expect("there"), true)
            .expect_err("refused"),
    );
    engine.create_dir_all(Path::new("/checkpoints/more")).expect("made");
    let more = directory_in(&engine, "/checkpoints/more");
    check(reshard(&made, &more, 1, 2, true).expect_err("refused"));
    check(make_for_serving(&made, &more, (1, 1), WeightPrecision::Fp16, &mut |_| Ok(())).expect_err("refused"));
    assert!(LatestCheckpoint::find(&more).expect("read").is_none());
}

#[test]
fn a_delta_does_not_build_on_it_and_a_full_save_follows_it() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (from, now) = chain(&engine);
    let made = serve(&engine, &from, WeightPrecision::Fp32).expect("made");
    let refused = save_delta(&engine, Path::new(SERVED), (&now, &now), (1, 9000), 9, on(&made.identity));
    assert_eq!(kind(refused), Kind::State);
    assert_eq!(LatestCheckpoint::read(&directory_in(&engine, SERVED)).expect("there"), made.latest);
    save(&engine, Path::new(SERVED), &now, 1, 9000, 9).expect("saved");
    assert_eq!(newest(&engine, SERVED).expect("opened").manifest().kind, CheckpointKind::Full);
}

#[test]
fn deltas_on_what_it_was_made_from_are_changes_of_it_and_no_others() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (from, now) = chain(&engine);
    serve(&engine, &from, WeightPrecision::Int8).expect("made");
    let served = newest(&engine, SERVED).expect("opened");
    assert!(from.manifest().check_fits_served(served.manifest()).is_err(), "it does not build on itself");
    let mut next = now.clone();
    next[1].spec.seed = 1;
    let parent = from.identity();
    let later = save_delta(&engine, Path::new(ROOT), (&now, &next), (2, 9000), 9, on(&parent)).expect("saved");
    let delta = newest(&engine, ROOT).expect("opened");
    assert_eq!(delta.manifest().check_fits_served(served.manifest()), Ok(()));
    let mut other = delta.manifest().clone();
    other.tables.pop();
    assert!(other.check_fits_served(served.manifest()).is_err(), "another number of tables");
    let mut other = delta.manifest().clone();
    other.tables[0].spec.dim = 17;
    assert!(other.check_fits_served(served.manifest()).is_err(), "another table");
    save_delta(&engine, Path::new(ROOT), (&next, &now), (2, 9000), 10, on(&later.identity)).expect("saved");
    let refused = newest(&engine, ROOT).expect("opened").manifest().check_fits_served(served.manifest());
    assert!(refused.expect_err("refused").contains("another checkpoint than"));
    assert!(delta.manifest().check_fits_served(from.manifest()).is_err(), "that is no serving checkpoint");
}

#[test]
fn what_ids_without_rows_read_comes_along() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let mut tables = tables(&ids()[..50], 1);
    tables[0].spec.missing_read = MissingRead::Value(0.1);
    save(&engine, Path::new(ROOT), &tables, 2, 9000, 7).expect("saved");
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Bf16).expect("made");
    let made = newest(&engine, SERVED).expect("opened");
    let reads: Vec<MissingRead> = made.manifest().tables.iter().map(|entry| entry.spec.missing_read).collect();
    let initial = MissingRead::Initial;
    assert_eq!(reads, [MissingRead::Value(0.1), initial, initial, initial]);
}

#[test]
fn unrepresentable_row_is_named_and_nothing_is_published() {
    let cases = [
        (WeightPrecision::Fp16, 65_520.0),
        (WeightPrecision::Bf16, f32::MAX),
        (WeightPrecision::Int8, f32::NAN),
        (WeightPrecision::Int8, 2e7),
    ];
    for (precision, bad) in cases {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let mut tables = tables(&ids()[..50], 1);
        let id = ids()[17];
        tables[3].rows.get_mut(&id).expect("there").1[5] = bad;
        save(&engine, Path::new(ROOT), &tables, 2, 9000, 7).expect("saved");
        let error = serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect_err("refused");
        assert_eq!(error.kind(), Kind::Input);
        let text = error.to_string();
        assert!(text.contains(&format!("row {id}")) && text.contains(precision.name()), "{text}");
        assert!(newest(&engine, SERVED).is_err(), "nothing was published");
        serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp32)
            .expect("float32 holds every number");
    }
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let mut slots = tables(&ids()[..50], 1);
    slots[3].rows.values_mut().for_each(|(_, vector)| vector[64..].fill(f32::INFINITY));
    save(&engine, Path::new(ROOT), &slots, 2, 9000, 7).expect("saved");
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("slots do not matter");
}

#[test]
fn sweeps_and_tombstones_of_the_chain_are_in_it() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let eviction = Some(EvictionConfig { rule: EvictionRule::Unused { steps: 1 }, every_steps: None });
    let settings = TableConfig { eviction, ..config(4, OptimizerKind::Sgd, 1000) };
    let rig = Rig::open(settings, Arc::clone(&engine)).expect("opened");
    rig.train(&(0..40).collect::<Vec<Id>>(), 1, 1).expect("trained");
    let full = save_as_base(&engine, std::slice::from_ref(&rig), 20_000, None);
    rig.train(&(20..50).collect::<Vec<Id>>(), 1, 2).expect("trained");
    rig.table.remove_rows(&[30, 31, 45]).expect("removed");
    rig.table.sweep().expect("swept");
    save_as_base(&engine, std::slice::from_ref(&rig), 20_000, Some(&full));
    let from = newest(&engine, ROOT).expect("opened");
    let sweeps: &[ExpirySweep] = &from.manifest().tables[0].sweeps;
    assert_eq!(sweeps.len(), 1);
    serve(&engine, &from, WeightPrecision::Fp32).expect("made");
    let made = newest(&engine, SERVED).expect("opened");
    let found: Vec<Id> = rows(&made, "t", 0..13).into_keys().collect();
    let expected: Vec<Id> = rig.contents().expect("every row").into_keys().collect();
    assert_eq!(found, expected);
    assert_eq!(found, (20..50).filter(|id| ![30, 31, 45].contains(id)).collect::<Vec<Id>>());
}

#[test]
fn stopped_conversion_is_complete_or_absent() {
    let disk = || {
        let memory = memory();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        chain(&engine);
        engine.create_dir_all(Path::new(SERVED)).expect("made");
        engine.sync_dir(Path::new("/checkpoints")).expect("synced");
        memory
    };
    let mut whole = 0;
    let stops = stop_at_each_change(
        disk,
        1,
        |engine| {
            let engine: Arc<dyn IoEngine> = Arc::new(engine);
            serve(&engine, &newest(&engine, ROOT)?, WeightPrecision::Int8).map(|_| ())
        },
        |image, result, _| {
            let engine: Arc<dyn IoEngine> = Arc::new(image);
            match newest(&engine, SERVED) {
                Ok(made) => {
                    whole += 1;
                    let entry = made.table("m", "d").expect("there");
                    let reader = made.table_reader("m", "d", 0..7).expect("its files");
                    assert_eq!(reader.verify().expect("whole"), entry.rows);
                }
                Err(error) => {
                    assert!(result.is_err() && error.kind() == Kind::Path, "{error}");
                }
            }
            assert_eq!(newest(&engine, ROOT).expect("what it was made from").manifest().tables.len(), 4);
        },
    );
    assert!(stops > 10 && whole > 0, "{stops} stops");
}

#[test]
fn every_flipped_byte_of_its_files_is_damage() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let mut small = tables(&ids()[..40], 1);
    small.truncate(2);
    save(&engine, Path::new(ROOT), &small, 1, 9000, 7).expect("saved");
    let made = serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
    let dir = Path::new(SERVED).join(&made.identity.name);
    let files: Vec<PathBuf> = ["m+a", "m+b"]
        .iter()
        .map(|table| dir.join(table).join("0-of-1.0.safetensors"))
        .chain([dir.join("manifest.json"), dir.join("0-of-1.json")])
        .collect();
    for file in files {
        let whole = read_file(&*engine, &file, 1 << 30).expect("a file");
        for at in (0..whole.len()).step_by(if whole.len() > 2000 { 13 } else { 1 }) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            write_atomically(&*engine, &file, &damaged).expect("written");
            let read = newest(&engine, SERVED).and_then(|chain| {
                let tables = ["a", "b"].map(|table| chain.table_reader("m", table, 0..7)?.verify());
                tables.into_iter().collect::<Result<Vec<_>>>()
            });
            assert!(read.is_err(), "byte {at} of {}", file.display());
        }
        write_atomically(&*engine, &file, &whole).expect("written");
    }
    assert!(newest(&engine, SERVED).is_ok());
}

#[test]
fn a_save_that_says_it_is_for_serving_must_be() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (from, now) = chain(&engine);
    let made_from = Some(CheckpointId { name: "x".into(), manifest_xxh3: 1 });
    let options = SaveOptions { made_from, ..SaveOptions::default() };
    engine.create_dir_all(Path::new(SERVED)).expect("made");
    let refused = save_with(&engine, Path::new(SERVED), &now, (1, 9000), 3, options);
    assert_eq!(kind(refused), Kind::State);
    let mut stored = now;
    stored[0].spec.precision = Some(WeightPrecision::Int8);
    assert_eq!(kind(save(&engine, Path::new(SERVED), &stored, 1, 9000, 3)), Kind::Input, "its dtype is F32");
    stored[0].spec.dtype = "U8".into();
    assert_eq!(kind(save(&engine, Path::new(SERVED), &stored, 1, 9000, 3)), Kind::State, "a full one");
    drop(from);
}
