//! A full checkpoint and its deltas load as exactly the rows at the last delta.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{
    ChainCompaction, CheckpointChain, CheckpointId, CheckpointKind, CheckpointName, CheckpointSave,
    PublishedCheckpoint, SaveOptions, TableSpec,
};
use embcache::config::OptimizerKind::RowWiseAdagrad;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOpenMode, IoOperation, MemoryEngine, read_file};
use embcache::types::Id;
use embcache_tests::checkpoint::{
    ROOT, Table, compact, kind, load, load_chain, memory, on, save, save_chain, save_delta, save_with, versions,
    write_delta,
};
use embcache_tests::directory_in;
use proptest::prelude::*;

fn root() -> &'static Path {
    Path::new(ROOT)
}

fn in_memory() -> (MemoryEngine, Arc<dyn IoEngine>) {
    let memory = memory();
    (memory.clone(), Arc::new(memory))
}

#[test]
fn any_world_size_loads_deltas_that_others_saved() {
    let versions = versions(5);
    for worlds in [[1, 1, 1], [2, 3, 1], [4, 1, 3]] {
        let (_, engine) = in_memory();
        for last in 1..versions.len() {
            let (_, fresh) = in_memory();
            save_chain(&fresh, &versions[..=last], &worlds);
            for readers in 1..=4 {
                assert_eq!(load(&fresh, root(), readers).expect("loaded"), versions[last], "{worlds:?} to {readers}");
            }
        }
        let saved = save_chain(&engine, &versions, &worlds);
        let newest = saved.last().expect("saved").latest;
        for ids_at_once in [1, 7, 50] {
            let loaded = load_chain(&engine, root(), 2, newest, Some(ids_at_once));
            assert_eq!(loaded.expect("loaded in parts"), versions[4]);
        }
        // Every link of the chain exists and loads.
        for (published, moment) in saved.iter().zip(&versions) {
            assert_eq!(load_chain(&engine, root(), 3, published.latest, None).expect("loaded"), *moment);
        }
    }
}

#[test]
fn a_delta_holds_what_changed_and_says_what_it_builds_on() {
    let (_, engine) = in_memory();
    let versions = versions(3);
    let saved = save_chain(&engine, &versions, &[2]);
    let chain = CheckpointChain::open(&directory_in(&engine, root()), saved[2].latest).expect("opened");
    let manifest = chain.manifest();
    assert_eq!((manifest.kind, manifest.parent.as_ref()), (CheckpointKind::Delta, Some(&saved[1].identity)));
    assert_eq!(chain.identity(), saved[2].identity);
    assert_eq!(chain.names().count(), 3);
    for (entry, table) in manifest.tables.iter().zip(&versions[2]) {
        assert_eq!(entry.total_rows, table.rows.len() as u64);
        assert!(entry.rows > 0 && entry.rows < entry.total_rows / 2, "{} of {}", entry.rows, entry.total_rows);
        assert!(entry.tombstones > 0);
    }
}

#[test]
fn merged_chain_equals_full_checkpoint_of_last_delta() {
    let versions = versions(5);
    for world in [1, 3] {
        let (_, engine) = in_memory();
        let saved = save_chain(&engine, &versions[..4], &[2, 1]);
        let merged = compact(&engine, world, 9).expect("merged");
        assert_eq!(load(&engine, root(), 2).expect("loaded"), versions[3]);
        let directory = directory_in(&engine, root());
        let chain = CheckpointChain::open(&directory, merged.latest).expect("opened");
        assert!(chain.links().len() == 1 && chain.manifest().kind == CheckpointKind::Full);
        assert_eq!(chain.manifest().merged.as_ref(), Some(&saved[3].identity), "a run goes on from it");
        assert_eq!(engine.list(root()).expect("listed").len(), 3, "LATEST, its lock and the merged one");
        assert!(ChainCompaction::open(&directory, merged.latest, true).expect("opened").is_none());
        let next = save_delta(&engine, root(), (&versions[3], &versions[4]), (2, 400), 1, on(&merged.identity));
        next.expect("a delta on the merged one");
        assert_eq!(load(&engine, root(), 1).expect("loaded"), versions[4]);
    }
}

#[test]
fn a_missing_link_and_another_in_its_place_are_refused() {
    let versions = versions(4);
    for broken in 0..3 {
        let (memory, engine) = in_memory();
        let saved = save_chain(&engine, &versions, &[1]);
        let dir = root().join(&saved[broken].identity.name);
        memory.remove_dir_all(&dir).expect("removed");
        let error = load(&engine, root(), 1).expect_err("a gap");
        assert_eq!(error.kind(), Kind::Corruption);
        assert!(error.to_string().contains(&saved[broken].identity.name), "{error}");
        // This checkpoint has the same name and is intact too, but it comes from another run.
        let (other, foreign) = in_memory();
        let options = [SaveOptions::default(), on(&saved[0].identity), on(&saved[1].identity)];
        let name: CheckpointName = saved[broken].identity.name.parse().expect("a name");
        place_before((&memory, &other), name.seq, &saved, broken);
        let again = save_delta_or_full(&foreign, &versions, broken, name, options[broken].clone());
        assert_eq!(again.latest.name, name);
        copy(&other, &memory, &dir);
        let error = load(&engine, root(), 1).expect_err("another's");
        assert_eq!(error.kind(), Kind::Corruption);
        assert!(error.to_string().contains("builds on"), "{error}");
    }
}

/// Makes the next save to `other` number `seq`, and copies its base checkpoints from `memory`.
fn place_before(
    (memory, other): (&MemoryEngine, &MemoryEngine),
    seq: u64,
    saved: &[PublishedCheckpoint],
    broken: usize,
) {
    if broken > 0 {
        let before = saved[broken - 1].latest;
        copy(memory, other, &root().join(before.to_string()));
        embcache::io::write_atomically(other, &root().join("LATEST"), format!("{before}\n").as_bytes())
            .expect("written");
    } else {
        assert_eq!(seq, 1);
    }
}

/// Saves the rows of another version under the name of the version `broken`.
fn save_delta_or_full(
    engine: &Arc<dyn IoEngine>,
    versions: &[Vec<Table>],
    broken: usize,
    name: CheckpointName,
    options: SaveOptions,
) -> PublishedCheckpoint {
    let mut other = versions[broken].clone();
    other[0].rows.remove(&3);
    match options.parent {
        None => save(engine, root(), &other, 1, 400, name.random).expect("saved"),
        Some(_) => {
            save_delta(engine, root(), (&versions[broken - 1], &other), (1, 400), name.random, options).expect("saved")
        }
    }
}

/// Copies the files of a directory.
fn copy(from: &MemoryEngine, to: &MemoryEngine, dir: &Path) {
    to.create_dir_all(dir).expect("made");
    for path in from.list(dir).expect("listed") {
        if from.list(&path).is_ok() {
            copy(from, to, &path);
        } else {
            let bytes = read_file(from, &path, 1 << 30).expect("read");
            let file = to.open(&path, IoOpenMode::Create { preallocate: 0 }).expect("made");
            let mut padded = embcache::io::AlignedBuf::zeroed(bytes.len().next_multiple_of(4096));
            padded[..bytes.len()].copy_from_slice(&bytes);
            file.write_at(0, &padded).expect("written");
            file.set_len(bytes.len() as u64).expect("cut");
        }
    }
}

#[test]
fn a_delta_on_what_is_no_longer_the_newest_is_not_published() {
    let versions = versions(3);
    let (_, engine) = in_memory();
    let saved = save_chain(&engine, &versions[..2], &[1]);
    // Two deltas on the same parent are saved concurrently. The first one wins, and its parent is kept.
    let second = CheckpointSave::begin_with(&directory_in(&engine, root()), 1, on(&saved[1].identity)).expect("begun");
    save_delta(&engine, root(), (&versions[1], &versions[2]), (1, 400), 2, on(&saved[1].identity)).expect("published");
    assert_eq!(kind(second.publish(&[], 1)), Kind::State, "without ranks there is nothing to publish");
    let stale = save_delta(&engine, root(), (&versions[1], &versions[2]), (1, 400), 3, on(&saved[1].identity));
    let error = stale.expect_err("something was saved since");
    assert_eq!(error.kind(), Kind::State);
    assert!(error.to_string().contains("save again"), "{error}");
    let nothing = CheckpointId { name: "0000000099-0000000000000000".into(), manifest_xxh3: 1 };
    assert_eq!(kind(save_delta(&engine, root(), (&versions[1], &versions[2]), (1, 400), 4, on(&nothing))), Kind::State);
    assert_eq!(load(&engine, root(), 2).expect("loaded"), versions[2]);
}

/// A delta of other tables than its parent's is not published. A delta of the same tables with other settings loads.
#[test]
fn delta_of_other_tables_is_not_published() {
    let versions = versions(2);
    let (_, engine) = in_memory();
    let saved = save_chain(&engine, &versions[..1], &[1]);
    let parent = &saved[0].identity;
    let changed = |change: &dyn Fn(&mut TableSpec)| {
        let mut tables = versions[1].clone();
        change(&mut tables[0].spec);
        tables
    };
    let strange = CheckpointId { manifest_xxh3: parent.manifest_xxh3 ^ 1, ..parent.clone() };
    for (tables, parent) in [
        (changed(&|spec| spec.key ^= 1), parent),
        (changed(&|spec| spec.table.push('x')), parent),
        (vec![versions[1][0].clone()], parent),
        (versions[1].clone(), &strange),
    ] {
        let error = save_delta(&engine, root(), (&versions[0], &tables), (1, 400), 1, on(parent));
        assert_eq!(kind(error), Kind::State);
        assert_eq!(load(&engine, root(), 1).expect("what was there"), versions[0]);
    }
    let tables = changed(&|spec| {
        spec.seed ^= 1;
        spec.initializer = embcache::rows::InitializerSpec::Constant { value: 0.5 };
        spec.optimizer.hyperparameters.insert("lr".into(), 0.75);
    });
    save_delta(&engine, root(), (&versions[0], &tables), (1, 400), 1, on(parent)).expect("published");
    assert_eq!(load(&engine, root(), 1).expect("loaded"), tables);
}

#[test]
fn so_many_stay_as_are_asked_for_and_all_that_they_build_on() {
    let versions = versions(6);
    let (_, engine) = in_memory();
    let keeping =
        |keep, parent: Option<&CheckpointId>| SaveOptions { parent: parent.cloned(), keep, ..SaveOptions::default() };
    let there = |saved: &[PublishedCheckpoint]| -> Vec<bool> {
        saved.iter().map(|one| engine.exists(&root().join(&one.identity.name)).unwrap()).collect()
    };
    let full = |n: usize, keep| {
        save_with(&engine, root(), &versions[n], (1, 400), 50 + n as u64, keeping(keep, None)).expect("saved")
    };
    let delta = |n: usize, keep, parent: &PublishedCheckpoint| {
        let options = keeping(keep, Some(&parent.identity));
        save_delta(&engine, root(), (&versions[n - 1], &versions[n]), (1, 400), n as u64, options).expect("a delta")
    };
    let mut saved = vec![full(0, 2)];
    saved.push(delta(1, 2, &saved[0]));
    saved.push(delta(2, 2, &saved[1]));
    assert_eq!(there(&saved), [true; 3], "what a delta builds on stays");
    saved.push(full(3, 2));
    assert_eq!(there(&saved), [true; 4], "the last two are a full one and a delta with all before it");
    saved.push(delta(4, 2, &saved[3]));
    assert_eq!(there(&saved), [false, false, false, true, true]);
    saved.push(full(5, 3));
    assert_eq!(there(&saved), [false, false, false, true, true, true]);
    for n in [3, 4, 5] {
        assert_eq!(load_chain(&engine, root(), 2, saved[n].latest, None).expect("loaded"), versions[n]);
    }
    saved.push(full(5, 1));
    assert_eq!(there(&saved), [false, false, false, false, false, false, true]);
}

#[test]
fn a_save_on_a_long_chain_reads_each_manifest_of_it_a_few_times() {
    const DELTAS: u64 = 60;
    let memory = memory();
    let faulty = FaultEngine::new(Arc::new(memory));
    let engine: Arc<dyn IoEngine> = Arc::new(faulty.clone());
    let table = |salt| vec![Table::new("m", "a", RowWiseAdagrad, 3, &[1, 2, 3], salt)];
    let mut parent = save(&engine, root(), &table(0), 1, 9000, 0).expect("saved").identity;
    for salt in 1..=DELTAS {
        if salt == DELTAS {
            // If a save opened this many files, it would fail.
            faulty.hit_once(IoOperation::Open, 5 * DELTAS, IoFault::Fail(5));
        }
        let states = (&table(salt - 1)[..], &table(salt)[..]);
        parent = save_delta(&engine, root(), states, (1, 9000), salt, on(&parent)).expect("saved").identity;
    }
    assert!(faulty.will_hit(), "so many files were not opened");
    faulty.clear();
    assert!(load(&engine, root(), 1).expect("loaded") == table(DELTAS));
}

#[test]
fn a_merged_parent_of_a_higher_number_stays_as_long_as_its_delta() {
    for (keep, is_read) in [(1, true), (2, false), (1, false)] {
        let versions = versions(4);
        let (_, engine) = in_memory();
        let saved = save_chain(&engine, &versions[..2], &[1]);
        let pair = (&*versions[1], &*versions[2]);
        let (save, digests) = write_delta(&engine, root(), pair, (1, 400), 5, on(&saved[1].identity)).expect("written");
        let merged = compact(&engine, 1, 6).expect("merged").latest.name;
        let delta = save.publish(&digests, 1).expect("published").latest;
        assert!(delta.name.seq < merged.seq, "the delta was begun before");
        let directory = directory_in(&engine, ROOT);
        let reading = is_read.then(|| CheckpointChain::open(&directory, delta).expect("opened"));
        let options = SaveOptions { keep, ..SaveOptions::default() };
        save_with(&engine, root(), &versions[3], (1, 400), 7, options).expect("saved");
        let there: Vec<bool> = [merged, delta.name].map(|name| directory.has(&name.to_string()).expect("there")).into();
        assert_eq!(there, [keep > 1 || is_read; 2], "keep {keep}, read {is_read}");
        if there[0] {
            assert_eq!(load_chain(&engine, root(), 1, delta, None).expect("loaded"), versions[2]);
        }
        drop(reading);
    }
}

/// If the base of a checkpoint cannot be read, no complete checkpoint is removed.
#[test]
fn unknown_base_keeps_all_complete_checkpoints() {
    let versions = versions(3);
    let (memory, engine) = in_memory();
    let saved = save_chain(&engine, &versions, &[1]);
    let path = root().join(&saved[1].identity.name).join("manifest.json");
    let whole = read_file(&memory, &path, 1 << 20).expect("read");
    embcache::io::write_atomically(&memory, &path, b"damaged").expect("written");
    drop(CheckpointSave::begin(&directory_in(&engine, root()), 9).expect("begun"));
    embcache::io::write_atomically(&memory, &path, &whole).expect("written");
    assert_eq!(load(&engine, root(), 1).expect("loaded"), versions[2]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_changes_come_back(
        steps in prop::collection::vec((prop::collection::btree_set(-20_i64..40, 0..30), prop::collection::btree_set(-20_i64..40, 0..20)), 1..6),
        worlds in prop::collection::vec(1_u32..5, 1..4),
        (readers, ids_at_once, merging) in (1_u32..5, 1_u64..40, prop::option::of(1_u32..4)),
    ) {
        let mut now = Table::new("m", "t", RowWiseAdagrad, 2, &(-10..20).collect::<Vec<Id>>(), 0);
        let mut versions = vec![vec![now.clone()]];
        for (salt, (changed, left)) in (1..).zip(steps) {
            let changed: Vec<Id> = changed.into_iter().collect();
            now.rows.extend(Table::new("m", "t", RowWiseAdagrad, 2, &changed, salt).rows);
            now.rows.retain(|id, _| !left.contains(id));
            now.spec.step = salt;
            versions.push(vec![now.clone()]);
        }
        let (_, engine) = in_memory();
        let mut newest = save_chain(&engine, &versions, &worlds).last().expect("saved").latest;
        if let Some(world) = merging {
            newest = compact(&engine, world, 77).expect("merged").latest;
        }
        let loaded = load_chain(&engine, root(), readers, newest, Some(ids_at_once)).expect("loaded");
        prop_assert_eq!(&loaded[0], &now);
    }
}
