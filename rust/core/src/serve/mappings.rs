//! Keeps some of the process's mappings of memory free. Every data file that is served is one. If these took the last ones, no thread could be
//! started and no memory be had.

use super::version::Version;
use crate::checkpoint::CheckpointName;
use crate::error::{Error, Kind, Result};

/// One of so many mappings is left for everything else.
const RESERVE_SHARE: usize = 8;

/// `Capacity` where the files of a version would take some of the last mappings that the system allows a process.
pub(super) fn check_reserve(version: &Version) -> Result<()> {
    // Where the system does not say, its limit shows where a file is mapped.
    let Ok(most) = std::fs::read_to_string("/proc/sys/vm/max_map_count") else { return Ok(()) };
    let Ok(most) = most.trim().parse::<usize>() else { return Ok(()) };
    let files = version.tables.iter().flat_map(|table| table.files.all());
    check(version.name, files.filter(|file| !file.mapping().is_copy()).count(), most)
}

fn check(name: CheckpointName, files: usize, most: usize) -> Result<()> {
    let reserve = most / RESERVE_SHARE;
    if files.saturating_add(reserve) <= most {
        return Ok(());
    }
    let what = format!(
        "checkpoint {name} and all that it builds on have {files} data files, each of which takes one of the {most} mappings of memory that the \
         system allows a process (vm.max_map_count), and the last {reserve} are kept for everything else: convert the newest checkpoint again \
         where a trainer's deltas are followed, run `embcache compact` on the directory otherwise, or allow more mappings"
    );
    Err(Error::new(Kind::Capacity, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mappings_are_kept() {
        let name: CheckpointName = "0000000007-00000000000000ab".parse().expect("a name");
        assert!(check(name, 56_000, 64_000).is_ok());
        let error = check(name, 56_001, 64_000).expect_err("the last ones");
        assert_eq!(error.kind(), Kind::Capacity);
        assert!(error.to_string().contains("56001 data files") && error.to_string().contains("last 8000"), "{error}");
    }
}
