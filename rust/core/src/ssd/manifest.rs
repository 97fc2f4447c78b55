//! Published states: small files that name the segments of one consistent state, their lengths and checksums.
//!
//! `<token>.state` is a line `embcache-ssd-state 2 <crc32c> <bytes> <note bytes>`, as many bytes of JSON, and a note of the table's. It is published whole (temporary file,
//! sync, rename, directory sync) after every segment it names is synced. Two are kept.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::format::Content;
use super::segment::Segment;
use super::{Identity, StateCounters};
use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, publish, read_file};
use crate::rows::RowLayout;

const SUFFIX: &str = "state";
const TITLE: &str = "embcache-ssd-state";
/// States of format 2 say how ids fall into buckets (`bucket_hash`).
const FORMAT: u32 = 2;
/// States of format 1 are of plain buckets, and all their segments are of version 1.
const OLDEST_FORMAT: u32 = 1;
/// No state file is longer: 2²⁰ segments at under 128 bytes, and the longest note.
const LIMIT_BYTES: u64 = 256 << 20;

/// Counters larger than this are damage: no process gets there one by one, and what is added to them does not overflow.
pub(super) const MAX_COUNT: u64 = 1 << 62;

/// A state that the directory can be resumed from, and what keeps its segments' files.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) token: u64,
    pub(super) segments: Vec<Arc<Segment>>,
}

impl Published {
    /// Name `segments`: their files stay until `release`.
    pub(super) fn hold(token: u64, segments: Vec<Arc<Segment>>) -> Self {
        for segment in &segments {
            segment.hold();
        }
        Self { token, segments }
    }

    /// The state is gone from disk, durably.
    pub(super) fn release(mut self) {
        for segment in std::mem::take(&mut self.segments) {
            segment.unhold();
        }
    }
}

/// A segment as a state names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Named {
    /// Serial.
    #[serde(rename = "n")]
    pub serial: u64,
    /// Whether it holds tombstones.
    #[serde(rename = "t")]
    pub tombstones: bool,
    /// Length of the file.
    #[serde(rename = "b")]
    pub file_bytes: u64,
    /// Checksum of the trailer.
    #[serde(rename = "c")]
    pub crc: u32,
}

/// The contents of a state file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct StateFile {
    pub(super) token: u64,
    pub(super) identity: Identity,
    pub(super) vector_floats: u64,
    pub(super) scalar_slot: bool,
    pub(super) counters: StateCounters,
    /// Records with a larger `write_seq` are not of this state.
    pub(super) write_seq: u64,
    pub(super) rows: u64,
    pub(super) segments: Vec<Named>,
    /// The table's own; its length, and its checksum with the rest, are in the first line.
    #[serde(skip)]
    pub(super) note: Vec<u8>,
}

/// The file of state `token` in `dir`.
pub(super) fn state_path(dir: &Path, token: u64) -> PathBuf {
    dir.join(format!("{token:016x}.{SUFFIX}"))
}

/// The token of a state file, `None` for any other file.
pub(super) fn state_token(path: &Path) -> Option<u64> {
    number_of(path, SUFFIX)
}

/// The number in a file name of 16 lower-case hexadecimal digits and `suffix`, `None` for any other name.
pub(super) fn number_of(path: &Path, suffix: &str) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let number = u64::from_str_radix(name.split_once('.')?.0, 16).ok()?;
    (name == format!("{number:016x}.{suffix}")).then_some(number)
}

/// Whether a path is a state file that was being published.
pub(super) fn is_temporary(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_suffix(".tmp").is_some_and(|stem| state_token(Path::new(stem)).is_some())
}

impl Named {
    /// How a state names a sealed segment.
    pub(super) fn of(segment: &Segment) -> Option<Self> {
        let sealed = segment.sealed()?;
        Some(Self {
            serial: segment.serial,
            tombstones: segment.content == Content::Tombstones,
            file_bytes: sealed.file_bytes,
            crc: sealed.trailer.crc,
        })
    }
}

impl StateFile {
    /// Make it durable.
    pub(super) fn write(&self, engine: &dyn IoEngine, dir: &Path) -> Result<()> {
        let body = serde_json::to_string(self)
            .map_err(|e| Error::new(Kind::Storage, format!("cannot render the state of {}: {e}", dir.display())))?;
        let crc = crc32c::crc32c_append(crc32c::crc32c(body.as_bytes()), &self.note);
        let mut bytes = format!("{TITLE} {FORMAT} {crc:08x} {} {}\n{body}", body.len(), self.note.len()).into_bytes();
        bytes.extend_from_slice(&self.note);
        publish(engine, &state_path(dir, self.token), &bytes)
    }

    /// Read and check the state `token` of `dir`.
    pub(super) fn read(engine: &dyn IoEngine, dir: &Path, token: u64) -> Result<Self> {
        let path = state_path(dir, token);
        let bytes = read_file(engine, &path, LIMIT_BYTES)?;
        let damaged = |what: &str, expected: String, got: String| Error::corruption(&path, 0, what, expected, got);
        let line_end = bytes.iter().take(128).position(|byte| *byte == b'\n').unwrap_or(0);
        let line = String::from_utf8_lossy(&bytes[..line_end]);
        let body = &bytes[(line_end + 1).min(bytes.len())..];
        let parts: Vec<&str> = line.split(' ').collect();
        let &[TITLE, format, crc, len, note_len] = parts.as_slice() else {
            let expected = format!("'{TITLE} {FORMAT} <crc32c> <bytes> <note bytes>'");
            return Err(damaged("the first line", expected, format!("'{line}'")));
        };
        if !(OLDEST_FORMAT..=FORMAT).any(|known| format == known.to_string()) {
            return Err(Error::new(
                Kind::Mismatch,
                format!(
                    "{} has format {format} and this version reads formats {OLDEST_FORMAT} to {FORMAT}",
                    path.display()
                ),
            ));
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
        let (body, note) = body.split_at(len);
        let mut state: Self = serde_json::from_slice(body)
            .map_err(|e| damaged("the state", "fields of a known format".to_owned(), format!("not readable ({e})")))?;
        note.clone_into(&mut state.note);
        if state.token != token {
            return Err(damaged("the token", token.to_string(), state.token.to_string()));
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

    /// `Mismatch`, naming the first field that differs, unless the state is of this table. How ids fall into buckets may differ: the table
    /// takes that of the state.
    pub(super) fn check_identity(&self, identity: &Identity, layout: &RowLayout, dir: &Path) -> Result<()> {
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
            Some((field, was, is)) => Err(Error::new(
                Kind::Mismatch,
                format!(
                    "cannot resume {}: {field} was {was} there and is {is} now; to change it, load a checkpoint made with Saver \
                     and open the directory with reopen = \"discard\"",
                    dir.display()
                ),
            )),
        }
    }
}

/// Tokens of the states in a directory's listing, ascending.
pub(super) fn tokens(listing: &[PathBuf]) -> Vec<u64> {
    let mut tokens: Vec<u64> = listing.iter().filter_map(|path| state_token(path)).collect();
    tokens.sort_unstable();
    tokens
}
