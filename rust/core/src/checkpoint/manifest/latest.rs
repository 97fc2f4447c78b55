//! Names of checkpoints and checkpoint parts, and `LATEST`, which names the latest complete checkpoint of a directory.

use std::fmt;
use std::str::FromStr;

use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Error, Kind, Result};
use crate::io::read_file;

/// The file that names the latest complete checkpoint.
pub(crate) const LATEST_FILE: &str = "LATEST";

/// Name of a checkpoint's directory: a sequence number that grows with every save to the path, and a random part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointName {
    /// Sequence number, from 1.
    pub seq: u64,
    /// Distinguishes saves with the same number.
    pub random: u64,
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:010}-{:016x}", self.seq, self.random)
    }
}

impl FromStr for CheckpointName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (seq, random) = text.split_once('-')?;
            let name = Self { seq: seq.parse().ok()?, random: u64::from_str_radix(random, 16).ok()? };
            (name.to_string() == text).then_some(name)
        };
        parse().ok_or_else(|| Error::new(Kind::Corruption, format!("{text:?} is not the name of a checkpoint")))
    }
}

/// Contents of `LATEST`: the name of a checkpoint, whose manifest contains its own checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatestCheckpoint {
    /// The checkpoint.
    pub name: CheckpointName,
}

impl fmt::Display for LatestCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

impl FromStr for LatestCheckpoint {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        Ok(Self { name: line.parse()? })
    }
}

impl LatestCheckpoint {
    /// Reads `LATEST` in `directory`. Returns `Kind::Path` if it is missing and `Kind::Corruption` if it is invalid.
    pub fn read(directory: &CheckpointDirectory) -> Result<Self> {
        let path = directory.join(LATEST_FILE);
        if !directory.has(LATEST_FILE)? {
            return Err(Error::new(
                Kind::Path,
                format!(
                    "there is no checkpoint in {}: {LATEST_FILE} is missing; check the path, or save one first",
                    directory.path().display()
                ),
            )
            .at(directory.path()));
        }
        let bytes = read_file(directory.engine(), &path, 256)?;
        let line = std::str::from_utf8(&bytes).ok().and_then(|text| text.strip_suffix('\n')).unwrap_or_default();
        line.parse().map_err(|_| {
            let found = String::from_utf8_lossy(&bytes);
            Error::corruption(
                &path,
                0,
                "the name of a checkpoint",
                "ten digits, '-', sixteen hexadecimal digits",
                format!("{found:?}"),
            )
        })
    }

    /// Like [`Self::read`], but returns `None` if there is no checkpoint.
    pub fn find(directory: &CheckpointDirectory) -> Result<Option<Self>> {
        if directory.has(LATEST_FILE)? { Self::read(directory).map(Some) } else { Ok(None) }
    }
}

/// Name of a checkpoint part's directory: a random number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartName(pub u64);

impl fmt::Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part-{:016x}", self.0)
    }
}

impl FromStr for PartName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let random = text.strip_prefix("part-").and_then(|random| u64::from_str_radix(random, 16).ok());
        random
            .map(Self)
            .filter(|name| name.to_string() == text)
            .ok_or_else(|| Error::new(Kind::Input, format!("{text:?} is not the name of a part of a checkpoint")))
    }
}
