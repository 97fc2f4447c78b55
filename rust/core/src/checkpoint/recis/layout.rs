//! Names and formats of the files of RecIS-format saves.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use serde::Serialize;
use serde::Serializer;
use serde_json::ser::PrettyFormatter;

use crate::checkpoint::chunked_file::{check_crc32c, check_length};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::checkpoint::rows::format::pad_header;
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, IoEngine, IoFile, IoOpenMode, read_file};

/// The file that names the latest complete save.
pub(crate) const LATEST_FILE: &str = "LATEST.blocks";
/// The file by which other shards recognize the save to join.
pub(crate) const BEGUN_FILE: &str = "begun.json";
/// RecIS index from blocks to files.
pub(crate) const INDEX_FILE: &str = "index";
/// RecIS names of blocks.
pub(crate) const NAMES_FILE: &str = "tensorkey.json";
/// Larger manifests are rejected before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// The safetensors dtypes, by bytes per element.
const DTYPES_BY_WIDTH: [(u64, &[&str]); 4] = [
    (8, &["F64", "I64", "U64", "C64"]),
    (4, &["F32", "I32", "U32"]),
    (2, &["F16", "BF16", "I16", "U16"]),
    (1, &["I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"]),
];
/// Name prefix, before a number, of zero tensors used as padding. If a tensor has this prefix, `_` is prepended until
/// none has it.
const PAD: &str = "__pad.";

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

impl fmt::Display for RecisSaveName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks-{}", self.0)
    }
}

impl FromStr for RecisSaveName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.strip_prefix("blocks-").and_then(|rest| rest.parse().ok());
        name.map(Self).ok_or_else(|| Kind::Input.error(format!("{text:?} is not the name of a RecIS-format save")))
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
        let latest = std::str::from_utf8(&bytes).ok().and_then(|text| text.strip_suffix('\n')).and_then(parse);
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

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecisTensor {
    pub(crate) name: String,
    /// Dtype by its safetensors name.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Bytes per element.
    pub(crate) width: u64,
    /// Bytes of all elements.
    pub(crate) bytes: u64,
}

impl RecisTensor {
    /// Returns a message if the dtype is unknown or the tensor is too large.
    pub(crate) fn new(name: String, dtype: &str, shape: Vec<u64>) -> Result<Self, String> {
        let width = DTYPES_BY_WIDTH.iter().find(|(_, dtypes)| dtypes.contains(&dtype)).map(|(width, _)| *width);
        let width = width.ok_or_else(|| format!("{name:?} is of the type {dtype:?}, which is not known"))?;
        let elements = shape.iter().try_fold(1_u64, |all, &length| all.checked_mul(length));
        let bytes = elements.and_then(|elements| elements.checked_mul(width)).filter(|&bytes| bytes < 1 << 62);
        let bytes = bytes.ok_or_else(|| format!("{name:?} of shape {shape:?} is larger than any file"))?;
        Ok(Self { name, dtype: dtype.to_owned(), shape, width, bytes })
    }
}

/// Alignment of tensors: each at a page boundary after zero padding, or directly after the previous tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorSpacing {
    Pages,
    Packed,
}

/// The layout of a file. The widest dtypes come first, so that each tensor is aligned to its element size.
#[derive(Debug)]
pub(crate) struct RecisFileLayout {
    /// First bytes of the file, in whole pages.
    pub(crate) header: Vec<u8>,
    /// Offset of each tensor in the file.
    starts: HashMap<String, u64>,
    /// Length of the file.
    pub(crate) bytes: u64,
}

impl RecisFileLayout {
    /// Lays out a file with these tensors; returns a message if there is no such layout.
    pub(crate) fn new(mut ordered: Vec<&RecisTensor>, spacing: TensorSpacing) -> Result<Self, String> {
        ordered.sort_by_key(|tensor| std::cmp::Reverse(tensor.width)); // stable
        let mut pad = PAD.to_owned();
        while ordered.iter().any(|tensor| tensor.name.starts_with(&pad)) {
            pad.insert(0, '_');
        }
        let paddings: Vec<[u64; 1]> = ordered.iter().map(|tensor| [whole_pages(tensor.bytes) - tensor.bytes]).collect();
        let (mut described, mut offsets, mut at) = (Vec::new(), HashMap::new(), 0_u64);
        for (number, (tensor, zeros)) in ordered.iter().zip(&paddings).enumerate() {
            let end =
                at.checked_add(tensor.bytes).filter(|&end| end < 1 << 62).ok_or("a file is larger than any is")?;
            if offsets.insert(tensor.name.clone(), at).is_some() {
                return Err(format!("two blocks of one file are called {:?}", tensor.name));
            }
            let entry = TensorHeaderEntry { dtype: &tensor.dtype, shape: &tensor.shape, data_offsets: [at, end] };
            described.push((tensor.name.clone(), entry));
            at = end;
            if spacing == TensorSpacing::Pages && zeros[0] > 0 {
                let entry = TensorHeaderEntry { dtype: "U8", shape: zeros, data_offsets: [at, at + zeros[0]] };
                described.push((format!("{pad}{number}"), entry));
                at += zeros[0];
            }
        }
        let text = serde_json::to_vec(&OrderedFields(described)).map_err(|error| error.to_string())?;
        let header = pad_header(&text);
        let length = header.len() as u64;
        let starts = offsets.into_iter().map(|(name, offset)| (name, length + offset)).collect();
        Ok(Self { header, starts, bytes: length + at })
    }

    /// Offset of a tensor in the file.
    pub(crate) fn start(&self, tensor: &RecisTensor) -> u64 {
        self.starts[&tensor.name]
    }

    /// Returns the contents of a small file with the given tensor data.
    pub(crate) fn image<'a>(&self, data: impl Iterator<Item = (&'a RecisTensor, &'a [u8])>) -> Vec<u8> {
        let mut image = vec![0; self.bytes as usize];
        image[..self.header.len()].copy_from_slice(&self.header);
        for (tensor, bytes) in data {
            let start = self.start(tensor) as usize;
            image[start..start + bytes.len()].copy_from_slice(bytes);
        }
        image
    }

    /// Opens a file, which must have exactly this layout.
    pub(crate) fn open(&self, engine: &dyn IoEngine, path: &Path) -> Result<Arc<dyn IoFile>> {
        let file = open_file(engine, path)?;
        check_length(&*file, self.bytes)?;
        let mut header = vec![0; self.header.len()];
        file.read_at(0, &mut header)?;
        self.check_header(path, &header)?;
        Ok(file)
    }

    /// Reads an entire small file, which must have the length of this layout.
    pub(crate) fn read(&self, engine: &dyn IoEngine, path: &Path) -> Result<Vec<u8>> {
        check_length(&*open_file(engine, path)?, self.bytes)?;
        read_small(engine, path, self.bytes)
    }

    /// Returns `Corruption` unless `found` starts with this header.
    pub(crate) fn check_header(&self, path: &Path, found: &[u8]) -> Result<()> {
        if found.starts_with(&self.header) {
            return Ok(());
        }
        Err(Error::corruption(path, 0, "the header", "that of the manifest's counts", "another"))
    }
}

/// A tensor entry of the header.
#[derive(Serialize)]
struct TensorHeaderEntry<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// The fields of a JSON object, in their order.
#[derive(Debug)]
pub(crate) struct OrderedFields<V>(pub(crate) Vec<(String, V)>);

impl<V: Serialize> Serialize for OrderedFields<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// Rounds up to a multiple of a page.
pub(crate) fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT as u64)
}

/// Opens a regular file of a complete save. Returns `Corruption` if it is missing or not a regular file.
pub(crate) fn open_file(engine: &dyn IoEngine, path: &Path) -> Result<Arc<dyn IoFile>> {
    engine.open(path, IoOpenMode::Read).map_err(|error| missing_file_error(path, error))
}

/// Reads an entire file of at most `limit` bytes. Errors as [`open_file`].
pub(crate) fn read_small(engine: &dyn IoEngine, path: &Path, limit: u64) -> Result<Vec<u8>> {
    read_file(engine, path, limit).map_err(|error| missing_file_error(path, error))
}

fn missing_file_error(path: &Path, error: Error) -> Error {
    match error.errno() {
        Some(libc::ENOENT) => Error::corruption(path, 0, "what is there", "a file", "nothing"),
        Some(libc::ENXIO) => Error::corruption(path, 0, "what is there", "a regular file", "a socket or a pipe"),
        _ => error,
    }
}

/// Reads a manifest whose checksum is `expected`.
pub(crate) fn read_checked(engine: &dyn IoEngine, path: &Path, expected: u32) -> Result<Vec<u8>> {
    let bytes = read_small(engine, path, MAX_MANIFEST_BYTES)?;
    check_crc32c(path, 0, || "the checksum", &bytes, expected)?;
    Ok(bytes)
}

/// Formats a manifest: JSON with one blank per level and a final newline.
pub(crate) fn render(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut json = serde_json::Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b" "));
    value
        .serialize(&mut json)
        .map_err(|error| Kind::Input.error(format!("cannot write the manifest as JSON: {error}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}

#[cfg(test)]
mod tests;
