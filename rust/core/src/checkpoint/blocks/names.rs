//! File names of RecIS-format saves.

use std::fmt;
use std::str::FromStr;

use super::files::{read_small, read_utf8_line};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::error::{Error, Kind, Result};

/// The file that names the latest complete save.
pub(crate) const LATEST_FILE: &str = "LATEST.blocks";
/// The file by which other shards recognize the save to join.
pub(crate) const BEGUN_FILE: &str = "begun.json";
/// RecIS index from blocks to files.
pub(crate) const INDEX_FILE: &str = "index";
/// RecIS names of blocks.
pub(crate) const NAMES_FILE: &str = "tensorkey.json";

/// One of the shards that save tables together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecisShard {
    /// Index of the shard, from 0.
    pub index: u32,
    /// Number of shards.
    pub count: u32,
}

impl RecisShard {
    /// File name of the shard's manifest.
    pub(crate) fn manifest_file(self) -> String {
        format!("shard-{:06}-of-{:06}.json", self.index, self.count)
    }

    /// Name of the file that a process locks while it saves the shard.
    pub(crate) fn lock_file(self) -> String {
        format!("shard-{:06}.lock", self.index)
    }

    /// Name of the shard's checksum file.
    pub(crate) fn check_file(self) -> String {
        format!("check-{:06}-of-{:06}.safetensors", self.index, self.count)
    }

    /// RecIS name of data file `file`. A shard has at most `parallel` data files.
    pub(crate) fn data_file(self, file: u32, parallel: u32) -> String {
        let (index, parallel) = (u64::from(self.index), u64::from(parallel));
        format!(
            "model-{:06}-of-{:06}.safetensors",
            index * parallel + u64::from(file),
            parallel * u64::from(self.count)
        )
    }

    /// RecIS name of a table's block in its file.
    pub(crate) fn part_name(self, table: &str, slot: &str) -> String {
        format!("{table}.{slot}/part_{}_{}", self.index, self.count)
    }

    /// All shards of the save.
    pub(crate) fn all(self) -> impl Iterator<Item = Self> {
        (0..self.count).map(move |index| Self { index, ..self })
    }
}

/// Name of a save's directory: a sequence number that grows with every save to the path, and a random part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecisSaveName(pub(crate) CheckpointName);

impl RecisSaveName {
    /// The sequence number.
    pub(crate) fn seq(self) -> u64 {
        self.0.seq
    }

    /// The save's directory.
    pub(crate) fn dir(self, root: &CheckpointDirectory) -> CheckpointDirectory {
        root.subdirectory(self)
    }
}

impl fmt::Display for RecisSaveName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks-{}", self.0)
    }
}

impl FromStr for RecisSaveName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.strip_prefix("blocks-").and_then(|rest| rest.parse().ok());
        name.map(Self).ok_or_else(|| Error::new(Kind::Input, format!("{text:?} is not the name of a block-level save")))
    }
}

/// Returns the saves in a directory, complete or not, oldest first.
pub(crate) fn list_saves(root: &CheckpointDirectory) -> Result<Vec<RecisSaveName>> {
    let mut found: Vec<RecisSaveName> = root.list_names()?;
    found.sort_unstable();
    Ok(found)
}

/// Contents of `LATEST.blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LatestRecisSave {
    pub(crate) name: RecisSaveName,
    /// CRC-32C of the save's manifest.
    pub(crate) manifest_crc32c: u32,
}

impl LatestRecisSave {
    /// Returns the latest complete save; `None` if there is none.
    pub(crate) fn find(root: &CheckpointDirectory) -> Result<Option<Self>> {
        let path = root.join(LATEST_FILE);
        if !root.has(LATEST_FILE)? {
            return Ok(None);
        }
        let bytes = read_small(root.engine(), &path, 256)?;
        let parse = |line: &str| {
            let (name, checksum) = line.split_once(' ')?;
            let manifest_crc32c = u32::from_str_radix(checksum, 16).ok()?;
            let latest = Self { name: name.parse().ok()?, manifest_crc32c };
            (latest.to_string() == line).then_some(latest)
        };
        let latest = read_utf8_line(&bytes).and_then(parse);
        latest.map(Some).ok_or_else(|| {
            let found = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned();
            Error::corruption(&path, 0, "the line", "the name of a save and a checksum", format!("{found:?}"))
        })
    }
}

impl fmt::Display for LatestRecisSave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:08x}", self.name, self.manifest_crc32c)
    }
}
