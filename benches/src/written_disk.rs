//! The disk of a write bench: a real one, or one that costs nothing. Each has its limit.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::io::{IoEngine, default_engine};

use crate::measure::Scale;
use crate::null_disk::NullDisk;
use crate::plain_writeback::PlainWriteBack;
use crate::scratch::Scratch;
use crate::windows::raw_write_bytes;
use crate::workload::scattered_id;

/// The target of a tier's writes.
pub enum WrittenDisk {
    /// A folder of the disk under test. The limit is raw sequential writes there.
    Real(Scratch),
    /// A disk that costs nothing. The limit is a plain loop.
    Null(PlainWriteBack),
}

impl WrittenDisk {
    /// A folder with space for `cap` bytes and for the limit.
    ///
    /// # Panics
    /// Panics if the disk has less.
    pub fn real(scale: Scale, cap: u64) -> Self {
        Self::Real(Scratch::new(cap + raw_write_bytes(scale) as u64).unwrap_or_else(|why| panic!("{why}")))
    }

    /// A null disk, and a plain store of the rows of ranks `0..rows`.
    pub fn null(rows: u64) -> Self {
        Self::Null(PlainWriteBack::new((0..rows as usize).map(|rank| scattered_id(rank as u64))))
    }

    /// Returns an engine, and the existing folder for the tier.
    ///
    /// # Panics
    /// Panics if there is no engine.
    pub fn open(&self) -> (Arc<dyn IoEngine>, PathBuf) {
        let (engine, folder): (Arc<dyn IoEngine>, &Path) = match self {
            Self::Real(scratch) => (default_engine().expect("an engine"), scratch.path()),
            Self::Null(_) => (NullDisk::new(), Path::new("/null")),
        };
        engine.create_dir_all(folder).expect("a folder");
        (engine, folder.to_owned())
    }
}
