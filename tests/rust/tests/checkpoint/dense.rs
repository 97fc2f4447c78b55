//! Dense extents and parts. Bytes are read as they were written, corruption is detected, and a stop leaves the previous
//! checkpoint or the new one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::checkpoint::{
    CheckpointDirectory, CheckpointPart, CheckpointSave, DenseExtent, LatestCheckpoint, OpenCheckpoint, PartName,
    RankDigest, remove_stale_parts,
};
use embcache::config::OptimizerKind::RowWiseAdagrad;
use embcache::io::{FaultEngine, IoEngine, IoFault, MemoryEngine, PsyncEngine};
use embcache::types::{Id, hash_id};
use embcache::{Kind, Result};
use embcache_tests::checkpoint::{ROOT, Table, kind, load, memory};
use embcache_tests::directory_in;

const WORLD: u32 = 2;
const META: &[u8] = b"what the extents mean";

/// Bytes that are determined by their position and `salt`.
fn bytes(len: usize, salt: u64) -> Vec<u8> {
    (0..len).map(|at| hash_id((at as u64 / 8) as i64 ^ (salt << 40) as i64).to_le_bytes()[at % 8]).collect()
}

/// The extents that a rank writes: empty, small, and larger than files and pieces.
fn contents(rank: u32, salt: u64, large: usize) -> Vec<Vec<u8>> {
    let salt = salt * 100 + u64::from(rank) * 10;
    [0, 1, 4096, 4097, 70_000, large].iter().enumerate().map(|(n, &len)| bytes(len, salt + n as u64)).collect()
}

fn tables(salt: u64) -> Vec<Table> {
    let ids: Vec<Id> = (0..30 + salt as i64).collect();
    vec![Table::new("m", "a", RowWiseAdagrad, 3, &ids, salt)]
}

/// The arguments of [`CheckpointSave::adopt`] from a rank.
type Named = Vec<(CheckpointDirectory, PartName, RankDigest)>;

/// Writes the parts of one rank. One part has tables, the other extents.
fn write(
    engine: &Arc<dyn IoEngine>,
    root: &Path,
    rank: u32,
    salt: u64,
    large: usize,
) -> Result<(Vec<DenseExtent>, Vec<CheckpointPart>, Named)> {
    let random = salt * 1000 + u64::from(rank) * 2;
    let directory = directory_in(engine, root);
    let mut sparse = CheckpointPart::begin(&directory, random, 0)?;
    for table in tables(salt) {
        let buckets = table.buckets_of(rank, WORLD);
        let mut source = table.source(&buckets, 5);
        sparse.rank_writer()?.write_table(table.spec.clone(), buckets, &mut source)?;
    }
    let mut dense = CheckpointPart::begin(&directory, random + 1, 3 * large as u64)?.with_file_bytes(50_000);
    let mut extents = Vec::new();
    for content in contents(rank, salt, large) {
        for window in content.chunks(1 << 16) {
            dense.dense_writer()?.append(window)?;
        }
        extents.push(dense.dense_writer()?.end_extent()?);
    }
    let named = |part: &mut CheckpointPart| Ok((directory.clone(), part.name(), part.finish()?));
    let digests = vec![named(&mut sparse)?, named(&mut dense)?];
    Ok((extents, vec![sparse, dense], digests))
}

/// Saves as two ranks. Returns the extents of each rank.
fn save(engine: &Arc<dyn IoEngine>, root: &Path, salt: u64, large: usize) -> Result<Vec<Vec<DenseExtent>>> {
    let directory = directory_in(engine, root);
    remove_stale_parts(&directory)?;
    let (mut extents, mut held, mut named) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..WORLD {
        let (of_rank, parts, digests) = write(engine, root, rank, salt, large)?;
        extents.push(of_rank);
        held.push(parts);
        named.push(digests);
    }
    let mut save = CheckpointSave::begin(&directory, salt)?;
    let digests = named.iter().zip(0..).map(|(parts, rank)| save.adopt(rank, WORLD, parts));
    let digests = digests.collect::<Result<Vec<_>>>()?;
    save.write_dense_metadata(META)?;
    save.publish(&digests, 1)?;
    drop(held);
    Ok(extents)
}

/// Every byte of the checkpoint that `LATEST` names, by rank and extent.
fn read(engine: &Arc<dyn IoEngine>, root: &Path, extents: &[Vec<DenseExtent>]) -> Result<Vec<Vec<Vec<u8>>>> {
    let directory = directory_in(engine, root);
    let checkpoint = OpenCheckpoint::open(&directory, LatestCheckpoint::read(&directory)?)?;
    assert_eq!(checkpoint.dense_metadata()?.as_deref(), Some(META));
    let reader = checkpoint.dense_reader();
    let read = |rank: u32, extent: &DenseExtent| {
        let mut into = vec![0; extent.bytes as usize];
        reader.read(rank, *extent, &mut into).map(|()| into)
    };
    extents.iter().zip(0..).map(|(of_rank, rank)| of_rank.iter().map(|extent| read(rank, extent)).collect()).collect()
}

fn written(salt: u64, large: usize) -> Vec<Vec<Vec<u8>>> {
    (0..WORLD).map(|rank| contents(rank, salt, large)).collect()
}

#[test]
fn extents_come_back_whole_and_in_parts_across_files_and_pieces() {
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let dir = tempfile::tempdir().expect("a directory");
    // This is larger than two pieces, so threads write, and files are larger than a piece.
    let large = (9 << 20) + 5;
    let extents = save(&engine, dir.path(), 1, large).expect("saved");
    assert!(extents.iter().flatten().all(|extent| extent.offset % 4096 == 0));
    assert_eq!(read(&engine, dir.path(), &extents).expect("read"), written(1, large));
    assert_eq!(load(&engine, dir.path(), 3).expect("loaded"), tables(1));
    let directory = directory_in(&engine, dir.path());
    let latest = LatestCheckpoint::read(&directory).expect("there");
    let reader = OpenCheckpoint::open(&directory, latest).expect("whole").dense_reader();
    let whole = &extents[1][5];
    let content = &contents(1, 1, large)[5];
    for (start, len) in [(0, 1), (1, 49_999), (49_999, 2), (262_143, 300_000), (large - 1, 1), (large, 0)] {
        let mut into = vec![0; len];
        let part = DenseExtent { offset: whole.offset + start as u64, bytes: len as u64 };
        reader.read(1, part, &mut into).expect("read");
        assert_eq!(into, content[start..start + len], "{len} bytes at {start}");
    }
    for outside in [
        DenseExtent { offset: reader.stream_bytes().expect("read")[1], bytes: 1 },
        DenseExtent { offset: u64::MAX, bytes: 1 },
        DenseExtent { offset: 0, bytes: u64::MAX },
    ] {
        assert_eq!(kind(reader.read(1, outside, &mut [0])), Kind::Corruption);
    }
    assert_eq!(kind(reader.read(2, DenseExtent { offset: 0, bytes: 1 }, &mut [0])), Kind::Corruption);
}

#[test]
fn a_flipped_bit_anywhere_is_found() {
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let dir = tempfile::tempdir().expect("a directory");
    let extents = save(&engine, dir.path(), 1, 60_000).expect("saved");
    let mut dirs = vec![dir.path().to_owned()];
    let (mut files, mut flips) = (0, 0);
    while let Some(from) = dirs.pop() {
        for entry in std::fs::read_dir(from).expect("listed") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            // The lock belongs to savers, and a load does not read it.
            if path.file_name().is_some_and(|name| name == "lock") {
                continue;
            }
            files += 1;
            let bytes = std::fs::read(&path).expect("read");
            for at in (0..bytes.len()).step_by(1 + bytes.len() / 40).chain([bytes.len() - 1]) {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << (at % 8);
                std::fs::write(&path, &flipped).expect("written");
                let found = read(&engine, dir.path(), &extents).and_then(|_| load(&engine, dir.path(), 1));
                let error = found.err().unwrap_or_else(|| panic!("{}: byte {at} changed unseen", path.display()));
                assert!(matches!(error.kind(), Kind::Corruption | Kind::Unsupported | Kind::Storage), "{error}");
                flips += 1;
            }
            std::fs::write(&path, &bytes).expect("written");
        }
    }
    assert!(files > 10 && flips > 300, "{flips} flips in {files} files");
    assert_eq!(read(&engine, dir.path(), &extents).expect("whole again"), written(1, 60_000));
}

#[test]
fn a_stop_at_every_operation_leaves_the_old_checkpoint_or_the_new_one() {
    const LARGE: usize = 60_000;
    let made = |salt| {
        let disk = memory();
        let extents =
            save(&(Arc::new(disk.clone()) as Arc<dyn IoEngine>), Path::new(ROOT), salt, LARGE).expect("saved");
        (disk, extents)
    };
    let found = |image: MemoryEngine, extents: &[Vec<DenseExtent>]| {
        let image: Arc<dyn IoEngine> = Arc::new(image);
        let dense = read(&image, Path::new(ROOT), extents).expect("a whole checkpoint");
        (dense, load(&image, Path::new(ROOT), 1).expect("a whole checkpoint"))
    };
    let (old, new) = ((written(1, LARGE), tables(1)), (written(2, LARGE), tables(2)));
    let (mut stops, mut kept, mut replaced) = (0, 0, 0);
    loop {
        let (disk, extents) = made(1);
        let engine = FaultEngine::new(Arc::new(disk.clone()));
        engine.hit_change(stops, IoFault::Stop);
        let result = save(&(Arc::new(engine.clone()) as Arc<dyn IoEngine>), Path::new(ROOT), 2, LARGE);
        if !engine.is_stopped() {
            assert_eq!(result.expect("nothing stopped it"), extents, "extents are where they were");
            break;
        }
        for image in [disk.crash(), disk.kill(), disk.crash_torn(stops)] {
            let found_now = found(image.clone(), &extents);
            assert!(found_now == old || found_now == new, "neither, after {stops} changes");
            assert!(result.is_err() || found_now == new, "a save that succeeded is lost after {stops} changes");
            if found_now == old {
                kept += 1;
            } else {
                replaced += 1;
            }
            let again: Arc<dyn IoEngine> = Arc::new(image.clone());
            save(&again, Path::new(ROOT), 3, LARGE).expect("saved");
            assert_eq!(found(image.clone(), &extents), (written(3, LARGE), tables(3)));
            assert_eq!(image.list(Path::new(ROOT)).expect("listed").len(), 3, "orphans are swept");
        }
        stops += 1;
    }
    assert!(stops > 60 && kept > 150 && replaced > 0, "{stops} stops, {kept} kept, {replaced} replaced");
}

#[test]
fn failed_write_fails_part_and_held_parts_are_kept() {
    let disk = memory();
    let plain: Arc<dyn IoEngine> = Arc::new(disk.clone());
    for large in [60_000, 9 << 20] {
        let mut passing = 0;
        loop {
            let engine = FaultEngine::new(plain.clone());
            engine.hit_once(embcache::io::IoOperation::Write, passing, IoFault::Fail(libc::ENOSPC));
            let engine: Arc<dyn IoEngine> = Arc::new(engine);
            let mut part =
                CheckpointPart::begin(&directory_in(&engine, ROOT), 1, large).expect("begun").with_file_bytes(6 << 20);
            let content = bytes(large as usize, 1);
            let result = part.dense_writer().and_then(|extents| extents.append(&content)).and_then(|()| part.finish());
            let failed = result.as_ref().err().map(embcache::Error::errno);
            assert!(failed.is_none() || failed == Some(Some(libc::ENOSPC)), "{result:?}");
            assert!(part.finish().is_err(), "it is finished, or failed");
            part.abandon().expect("removed");
            if failed.is_none() {
                break;
            }
            passing += 1;
        }
        assert!(passing > 2, "{passing} writes");
    }
    let directory = directory_in(&plain, ROOT);
    let held = CheckpointPart::begin(&directory, 7, 0).expect("begun");
    drop(CheckpointPart::begin(&directory, 8, 0).expect("begun"));
    assert!(remove_stale_parts(&directory).expect("swept").is_empty());
    let left: Vec<PathBuf> = disk.list(Path::new(ROOT)).expect("listed");
    assert!(left.contains(&Path::new(ROOT).join(held.name().to_string())), "{left:?}");
    assert!(!left.contains(&Path::new(ROOT).join(PartName(8).to_string())), "{left:?}");
}
