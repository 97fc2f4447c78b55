//! Layout of tensors in a safetensors file.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde::ser::{SerializeMap as _, Serializer};

use super::files::{open_file, read_small};
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, IoEngine, IoFile};

/// Bytes per element of each safetensors dtype.
const ELEMENT_BYTES: [(&str, u64); 16] = [
    ("F64", 8),
    ("I64", 8),
    ("U64", 8),
    ("C64", 8),
    ("F32", 4),
    ("I32", 4),
    ("U32", 4),
    ("F16", 2),
    ("BF16", 2),
    ("I16", 2),
    ("U16", 2),
    ("I8", 1),
    ("U8", 1),
    ("BOOL", 1),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
];
/// Name prefix, before a number, of zero tensors used as padding. If a tensor has this prefix, `_` is prepended until
/// none has it.
const PAD: &str = "__pad.";

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
        let width = ELEMENT_BYTES.iter().find(|(known, _)| *known == dtype).map(|(_, width)| *width);
        let width = width.ok_or_else(|| format!("{name:?} is of the type {dtype:?}, which is not known"))?;
        let elements = shape.iter().try_fold(1_u64, |all, &length| all.checked_mul(length));
        let bytes = elements.and_then(|elements| elements.checked_mul(width)).filter(|&bytes| bytes < 1 << 62);
        let bytes = bytes.ok_or_else(|| format!("{name:?} of shape {shape:?} is larger than any file"))?;
        Ok(Self { name, dtype: dtype.to_owned(), shape, width, bytes })
    }
}

/// Rounds up to a multiple of a page.
pub(crate) fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT as u64)
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

/// A tensor entry of the header.
#[derive(Serialize)]
struct TensorHeaderEntry<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// Serializes as a JSON object with its fields in list order.
pub(crate) struct OrderedFields<'a, V>(pub(crate) &'a [(String, V)]);

impl<V: Serialize> Serialize for OrderedFields<'_, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
        map.end()
    }
}

impl RecisFileLayout {
    /// Lays out a file with these tensors; returns a message if there is no such layout.
    pub(crate) fn new(tensors: &[&RecisTensor], spacing: TensorSpacing) -> Result<Self, String> {
        let mut ordered = tensors.to_vec();
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
        let text = serde_json::to_vec(&OrderedFields(&described)).map_err(|error| error.to_string())?;
        let length = whole_pages(8 + text.len() as u64);
        let mut header = (length - 8).to_le_bytes().to_vec();
        header.extend_from_slice(&text);
        header.resize(length as usize, b' ');
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
        let len = file.len()?;
        if len != self.bytes {
            return Err(Error::corruption(path, 0, "the file's length", self.bytes, len));
        }
        let mut header = vec![0; self.header.len()];
        file.read_at(0, &mut header)?;
        self.check_header(path, &header)?;
        Ok(file)
    }

    /// Reads an entire small file, which must have the length of this layout.
    pub(crate) fn read(&self, engine: &dyn IoEngine, path: &Path) -> Result<Vec<u8>> {
        let len = open_file(engine, path)?.len()?;
        if len != self.bytes {
            return Err(Error::corruption(path, 0, "the file's length", self.bytes, len));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: &str, shape: &[u64]) -> RecisTensor {
        RecisTensor::new(name.into(), dtype, shape.to_vec()).unwrap()
    }

    #[test]
    fn wide_elements_come_first_and_each_tensor_starts_at_a_page() {
        let tensors = [tensor("b", "BOOL", &[7]), tensor("w", "F32", &[3, 2]), tensor("i", "I64", &[1])];
        let all: Vec<&RecisTensor> = tensors.iter().collect();
        let layout = RecisFileLayout::new(&all, TensorSpacing::Pages).unwrap();
        let starts: Vec<u64> = tensors.iter().map(|tensor| layout.start(tensor)).collect();
        assert_eq!(starts, [3 * 4096, 2 * 4096, 4096]);
        assert_eq!(layout.bytes, 4 * 4096);
        let close = RecisFileLayout::new(&all, TensorSpacing::Packed).unwrap();
        assert_eq!(tensors.each_ref().map(|tensor| close.start(tensor)), [4096 + 8 + 24, 4096 + 8, 4096]);
    }

    #[test]
    fn header_lists_each_tensor_and_padding_in_file_order() {
        let tensors = [tensor("__pad.x", "U8", &[1]), tensor("w", "F32", &[])];
        let layout = RecisFileLayout::new(&tensors.iter().collect::<Vec<_>>(), TensorSpacing::Pages).unwrap();
        let text = std::str::from_utf8(&layout.header[8..]).unwrap();
        assert_eq!(
            text.trim_end(),
            r#"{"w":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"___pad.0":{"dtype":"U8","shape":[4092],"data_offsets":[4,4096]},"#
                .to_owned()
                + r#""__pad.x":{"dtype":"U8","shape":[1],"data_offsets":[4096,4097]},"___pad.1":{"dtype":"U8","shape":[4095],"data_offsets":[4097,8192]}}"#
        );
        assert_eq!(layout.header[..8], (4096_u64 - 8).to_le_bytes());
    }

    #[test]
    fn what_no_file_can_hold_is_refused() {
        assert!(RecisTensor::new("a".into(), "F31", vec![]).is_err());
        assert!(RecisTensor::new("a".into(), "F32", vec![1 << 40, 1 << 40]).is_err());
        assert!(RecisTensor::new("a".into(), "F32", vec![1 << 61]).is_err());
        let twice = [tensor("a", "U8", &[1]), tensor("a", "F32", &[1])];
        assert!(RecisFileLayout::new(&twice.iter().collect::<Vec<_>>(), TensorSpacing::Packed).is_err());
        let huge = [tensor("a", "U8", &[(1 << 62) - 1]), tensor("b", "U8", &[(1 << 62) - 1])];
        assert!(RecisFileLayout::new(&huge.iter().collect::<Vec<_>>(), TensorSpacing::Pages).is_err());
    }
}
