//! Rows that were modified since an epoch are found without reading the others.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Result;
use embcache::config::ReopenMode;
use embcache::io::{AlignedBuf, IoEngine, IoOpenMode, MemoryEngine};
use embcache::ssd::{SsdTier, StateCounters};
use embcache::types::Id;
use embcache_tests::ssd::{Versions, append, config, open, vector};

const DIR: &str = "/embcache-modified/tier";
const CAP: u64 = 8 << 20;

/// The versions of the rows that were modified since `since`.
fn scan(tier: &SsdTier, since: u32) -> Result<Versions> {
    let mut found = Versions::new();
    tier.scan_since(since, &mut |row| {
        assert_eq!(row.vector, vector(row.header.id, row.header.count));
        assert_eq!(found.insert(row.header.id, row.header.count), None, "id {} twice", row.header.id);
        Ok(())
    })?;
    Ok(found)
}

fn segments(engine: &MemoryEngine) -> Vec<PathBuf> {
    let files = engine.list(Path::new(DIR)).unwrap();
    files.into_iter().filter(|path| path.extension().is_some_and(|found| found == "seg")).collect()
}

fn overwrite(engine: &MemoryEngine, path: &Path) {
    let file = engine.open(path, IoOpenMode::Write).unwrap();
    let mut garbage = AlignedBuf::zeroed(file.len().unwrap() as usize);
    garbage.fill(0xa5);
    file.write_at(0, &garbage).unwrap();
}

/// Segments without modified rows are not read, before and after a reopen.
#[test]
fn segments_without_modified_rows_are_not_read() {
    let memory = MemoryEngine::default();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
    let (mut held, mut of_epoch) = (Versions::new(), Vec::new());
    // Versions are epochs here. Each publish closes the segments.
    for (token, (ids, version)) in [(0..3000, 1), (3000..6000, 2), (0..40, 3)].into_iter().enumerate() {
        let before = segments(&memory);
        append(&tier, &ids.collect::<Vec<Id>>(), version, &mut held).unwrap();
        tier.publish(Some(token as u64 + 1), StateCounters::default(), Vec::new()).unwrap();
        of_epoch.push(segments(&memory).into_iter().filter(|path| !before.contains(path)).collect::<Vec<_>>());
    }
    append(&tier, &[7, 3100, 9000], 4, &mut held).unwrap();
    let since = |since| -> Versions {
        held.iter().filter(|(_, version)| **version >= since).map(|(id, version)| (*id, *version)).collect()
    };
    for epoch in 0..6 {
        assert_eq!(scan(&tier, epoch).unwrap(), since(epoch), "with an open segment, since {epoch}");
    }
    tier.publish(Some(9), StateCounters::default(), Vec::new()).unwrap();
    tier.close().unwrap();
    drop(tier);
    let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Resume)).unwrap();
    for epoch in 0..6 {
        assert_eq!(scan(&tier, epoch).unwrap(), since(epoch), "reopened, since {epoch}");
    }
    for (epoch, paths) in (1..).zip(of_epoch) {
        for path in &paths {
            overwrite(&memory, path);
        }
        assert!(scan(&tier, epoch).is_err(), "what is read is checked");
        assert_eq!(scan(&tier, epoch + 1).unwrap(), since(epoch + 1), "nothing older is read");
    }
}
