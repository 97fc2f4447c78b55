//! The file of a published state: a small file with the segments of one consistent state, their lengths and checksums.
//!
//! `<commit id>.state` is a line `embcache-ssd-state 1 <crc32c> <bytes> <metadata bytes>`, then that many bytes of JSON,
//! then the table's metadata blob. It is published atomically (temporary file, sync, rename, sync of the directory)
//! after every segment that it references was synced.

use std::collections::HashSet;
use std::path::Path;

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, read_file, write_atomically};
use crate::rows::RowLayout;
use crate::ssd::directory::{ShardIdentity, StateCounters};
use crate::ssd::format::segment_file::state_path;

const STATE_TITLE: &str = "embcache-ssd-state";
/// Version of the format, including the segments' files.
const FORMAT: u32 = 1;
/// Maximum bytes of a state's file: 2²⁰ segments at less than 128 bytes each, and the longest metadata blob.
const MAX_STATE_BYTES: u64 = 256 << 20;

/// A larger counter in a file is corruption: counting one by one does not reach it. Additions to a counter up to this
/// limit do not overflow.
pub(crate) const MAX_COUNT: u64 = 1 << 62;

/// A segment in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentDescriptor {
    /// Serial.
    #[serde(rename = "n")]
    pub serial: u64,
    /// True if it contains tombstones.
    #[serde(rename = "t")]
    pub tombstones: bool,
    /// Length of the file.
    #[serde(rename = "b")]
    pub file_bytes: u64,
    /// Checksum of the trailer.
    #[serde(rename = "c")]
    pub crc: u32,
}

/// Sealed segments that together contain a tier's rows, as a linked checkpoint references them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSet {
    /// No record has a larger `write_seq`.
    pub write_seq: u64,
    /// Number of rows. A row counts once, even if it has several records.
    pub rows: u64,
    /// The segments.
    pub segments: Vec<SegmentDescriptor>,
}

impl SegmentSet {
    /// Bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|descriptor| descriptor.file_bytes).sum()
    }

    /// Checks the numbers, which were read from a file. `Err` describes the problem.
    pub fn check(&self) -> Result<(), String> {
        let highest = self.segments.iter().map(|descriptor| descriptor.serial).max().unwrap_or(0);
        let longest = self.segments.iter().map(|descriptor| descriptor.file_bytes).max().unwrap_or(0);
        if [self.write_seq, highest].into_iter().any(|number| number > MAX_COUNT)
            || [self.rows, longest].into_iter().any(|number| number > 1 << 44)
            || self.segments.len() > 1 << 20
        {
            return Err("the numbers of its segments are out of range".into());
        }
        let serials: HashSet<u64> = self.segments.iter().map(|descriptor| descriptor.serial).collect();
        if serials.len() == self.segments.len() { Ok(()) } else { Err("a segment is there twice".into()) }
    }
}

/// The contents of a state's file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StateFile {
    #[serde(rename = "token")]
    pub(crate) commit_id: u64,
    pub(crate) identity: ShardIdentity,
    pub(crate) vector_floats: u64,
    pub(crate) scalar_slot: bool,
    pub(crate) counters: StateCounters,
    /// No record of this state has a larger `write_seq`.
    pub(crate) write_seq: u64,
    pub(crate) rows: u64,
    pub(crate) segments: Vec<SegmentDescriptor>,
    /// The table's metadata blob. Its length is in the first line, and the checksum there covers it too.
    #[serde(skip)]
    pub(crate) metadata: Vec<u8>,
}

impl StateFile {
    /// Writes the file durably.
    pub(crate) fn write(&self, engine: &dyn IoEngine, dir: &Path) -> Result<()> {
        let body = serde_json::to_string(self)
            .map_err(|e| Kind::Storage.error(format!("cannot render the state of {}: {e}", dir.display())))?;
        let crc = crc32c::crc32c_append(crc32c::crc32c(body.as_bytes()), &self.metadata);
        let mut bytes =
            format!("{STATE_TITLE} {FORMAT} {crc:08x} {} {}\n{body}", body.len(), self.metadata.len()).into_bytes();
        bytes.extend_from_slice(&self.metadata);
        write_atomically(engine, &state_path(dir, self.commit_id), &bytes)
    }

    /// Reads and checks the state `commit_id` of `dir`.
    pub(crate) fn read(engine: &dyn IoEngine, dir: &Path, commit_id: u64) -> Result<Self> {
        let path = state_path(dir, commit_id);
        let bytes = read_file(engine, &path, MAX_STATE_BYTES)?;
        let damaged = |what: &str, expected: String, got: String| Error::corruption(&path, 0, what, expected, got);
        let line_end = bytes.iter().take(128).position(|byte| *byte == b'\n').unwrap_or(0);
        let line = String::from_utf8_lossy(&bytes[..line_end]);
        let body = &bytes[(line_end + 1).min(bytes.len())..];
        let parts: Vec<&str> = line.split(' ').collect();
        let &[STATE_TITLE, format, crc, len, note_len] = parts.as_slice() else {
            let expected = format!("'{STATE_TITLE} {FORMAT} <crc32c> <bytes> <note bytes>'");
            return Err(damaged("the first line", expected, format!("'{line}'")));
        };
        if format != FORMAT.to_string() {
            return Err(Kind::Mismatch.error(format!(
                "{} has format {format} and this release reads {FORMAT}: open it with the release that wrote it",
                path.display()
            )));
        }
        let lengths = len.parse::<usize>().ok().zip(note_len.parse::<usize>().ok());
        let whole = lengths.filter(|(len, note_len)| len.checked_add(*note_len) == Some(body.len()));
        let Some((len, _)) = whole else {
            return Err(damaged("the length of the state", format!("{len} and {note_len}"), body.len().to_string()));
        };
        let got = format!("{:08x}", crc32c::crc32c(body));
        if crc != got {
            return Err(damaged("the state's checksum", crc.to_owned(), got));
        }
        let (body, metadata) = body.split_at(len);
        let mut state: Self = serde_json::from_slice(body)
            .map_err(|e| damaged("the state", "fields of a known format".to_owned(), format!("not readable ({e})")))?;
        metadata.clone_into(&mut state.metadata);
        if state.commit_id != commit_id {
            return Err(damaged("the commit id", commit_id.to_string(), state.commit_id.to_string()));
        }
        let highest = state.segments.iter().map(|segment| segment.serial).max().unwrap_or(0);
        for (what, number) in
            [("write_seq", state.write_seq), ("the step", state.counters.step), ("the serial of a segment", highest)]
        {
            if number > MAX_COUNT {
                return Err(damaged(what, format!("at most {MAX_COUNT}"), number.to_string()));
            }
        }
        let serials: HashSet<u64> = state.segments.iter().map(|segment| segment.serial).collect();
        if serials.len() != state.segments.len() {
            let got = format!("{} of {}", serials.len(), state.segments.len());
            return Err(damaged("the number of distinct segments", state.segments.len().to_string(), got));
        }
        Ok(state)
    }

    /// Returns `Mismatch`, which names the first field that differs, unless the state belongs to this table.
    pub(crate) fn check_identity(&self, identity: &ShardIdentity, layout: &RowLayout, dir: &Path) -> Result<()> {
        let (was, is) = (&self.identity, identity);
        let layout_name = |vector_floats: u64, scalar: bool| {
            format!("{vector_floats} floats{}", if scalar { " and a scalar" } else { "" })
        };
        let fields: [(&str, String, String); 10] = [
            ("table", was.table.clone(), is.table.clone()),
            ("table key", was.key.to_string(), is.key.to_string()),
            ("embedding_dim", was.dim.to_string(), is.dim.to_string()),
            ("optimizer", was.optimizer.clone(), is.optimizer.clone()),
            ("seed", was.seed.to_string(), is.seed.to_string()),
            ("initializer", was.initializer.clone(), is.initializer.clone()),
            ("total_num_buckets", was.total_num_buckets.to_string(), is.total_num_buckets.to_string()),
            ("first bucket of this rank", was.bucket_begin.to_string(), is.bucket_begin.to_string()),
            ("last bucket of this rank", was.bucket_end.to_string(), is.bucket_end.to_string()),
            (
                "row",
                layout_name(self.vector_floats, self.scalar_slot),
                layout_name(layout.vector_floats() as u64, layout.scalar_slot),
            ),
        ];
        match fields.iter().find(|(_, was, is)| was != is) {
            None => Ok(()),
            Some((field, was, is)) => Err(Kind::Mismatch.error(format!(
                "cannot resume {}: {field} was {was} there and is {is} now; to change it, load a checkpoint made with Saver \
                 and open the directory with reopen = \"discard\"",
                dir.display()
            ))),
        }
    }
}
