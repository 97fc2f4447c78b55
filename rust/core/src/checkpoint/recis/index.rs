//! The index files by which RecIS finds blocks, and the check that the shards of a save make complete tables.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use super::layout::{OrderedFields, RecisShard, render};
use super::manifest::{RecisBlockEntry, RecisShardManifest, RecisTableShare};
use crate::error::{Kind, Result};

#[derive(Serialize)]
struct RecisFileIndex {
    file_index: OrderedFields<usize>,
    block_index: OrderedFields<usize>,
}

/// Builds the RecIS indexes of a save from the manifests of all shards, ordered by shard index, which make complete
/// tables. The first one maps block names in the files to RecIS block names, the second one blocks to files.
pub(crate) fn build_indexes(manifests: &[RecisShardManifest]) -> Result<[Vec<u8>; 2]> {
    let (mut names, mut file_of, mut files, mut numbers) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
    for (index, manifest) in manifests.iter().enumerate() {
        let shard = RecisShard { index: index as u32, count: manifests.len() as u32 };
        for block in &manifest.blocks {
            let number = *numbers.entry((index, block.file)).or_insert_with(|| {
                files.push((shard.data_file(block.file, manifest.parallel), files.len()));
                files.len() - 1
            });
            let (part, full) = names_of(block, manifest, shard);
            names.push((part.clone(), full));
            file_of.push((part, number));
        }
    }
    let index = RecisFileIndex { file_index: OrderedFields(files), block_index: OrderedFields(file_of) };
    Ok([render(&OrderedFields(names))?, render(&index)?])
}

/// Returns a block's name in its file, and its RecIS name.
fn names_of(block: &RecisBlockEntry, manifest: &RecisShardManifest, shard: RecisShard) -> (String, String) {
    let Some(slot) = &block.slot else {
        // RecIS names the slice of a complete tensor by a blank.
        return (block.name.clone(), format!("{}^ ", block.name));
    };
    let slice = manifest.tables.iter().find(|table| table.name == block.name).map(|table| slice(table, shard));
    (shard.part_name(&block.name, slot), format!("{}@{slot}^{}", block.name, slice.unwrap_or_default()))
}

/// RecIS slice of a shard's block, `begin@end@total`: the range of `uint64(id) mod total` that contains its ids.
///
/// A shard that owns some buckets has ids of the entire range, because ids are hashed. RecIS finds blocks by names that
/// differ only in the slice, so the slices of several shards differ in their leading zeros.
fn slice(table: &RecisTableShare, shard: RecisShard) -> String {
    let total = table.total_num_buckets;
    let mut left = total.to_string().len();
    let mut right = left;
    if table.buckets != [0, total] {
        let ways = (shard.count - 1).isqrt() + 1;
        left += (shard.index / ways) as usize;
        right += (shard.index % ways) as usize;
    }
    format!("{:0left$}@{total:0right$}@{total}", 0)
}

/// One shard's part of a table.
struct RecisTablePart<'a> {
    shard: usize,
    share: &'a RecisTableShare,
    /// Slots, each with the shape of one row.
    slots: Vec<(&'a str, &'a [u64])>,
}

/// Returns `Mismatch` unless the shards of each table agree and contain every bucket once, and names are unique across
/// tables and tensors.
pub(crate) fn check_complete(manifests: &[RecisShardManifest]) -> Result<()> {
    let refuse = |what: String| Err(Kind::Mismatch.error(what));
    let mut tables: BTreeMap<&str, Vec<RecisTablePart<'_>>> = BTreeMap::new();
    let mut dense = BTreeSet::new();
    for (shard, manifest) in manifests.iter().enumerate() {
        for share in &manifest.tables {
            let of_table = manifest.blocks.iter().filter(|block| block.name == share.name);
            let slots = of_table.filter_map(|block| Some((block.slot.as_deref()?, block.shape.get(1..)?))).collect();
            tables.entry(&share.name).or_default().push(RecisTablePart { shard, share, slots });
        }
        for block in manifest.blocks.iter().filter(|block| block.slot.is_none()) {
            if !dense.insert(block.name.as_str()) {
                return refuse(format!("tensor {:?} is saved by several shards: give it to one", block.name));
            }
        }
    }
    let both: Vec<&&str> = dense.iter().filter(|name| tables.contains_key(**name)).collect();
    if !both.is_empty() {
        return refuse(format!("{both:?} are tables on one shard and tensors on another: rename one"));
    }
    tables.into_iter().try_for_each(|(name, parts)| check_parts(name, parts))
}

fn check_parts(name: &str, mut parts: Vec<RecisTablePart<'_>>) -> Result<()> {
    let refuse = |what: String| Err(Kind::Mismatch.error(format!("table {name:?}{what}")));
    for part in &parts {
        if let Some((field, value, other_value)) = first_difference(part, &parts[0]) {
            let (shard, first) = (part.shard, parts[0].shard);
            return refuse(format!(
                " has {field} {value} on shard {shard} and {other_value} on shard {first}: save the shards of one table at one step, \
                 with the same filter"
            ));
        }
    }
    let total = parts[0].share.total_num_buckets;
    parts.sort_by_key(|part| part.share.buckets);
    let mut at = 0;
    for RecisTablePart { shard, share, .. } in &parts {
        let [begin, end] = share.buckets;
        if begin != at {
            return refuse(format!(": bucket {at} is followed by {begin} of shard {shard}: give each shard's table"));
        }
        at = end;
    }
    if at != total {
        return refuse(format!(": no shard has the buckets from {at} on: give each shard's table"));
    }
    Ok(())
}

/// Returns the first field in which two shards' parts of a table differ, with both values.
fn first_difference(part: &RecisTablePart<'_>, other: &RecisTablePart<'_>) -> Option<(&'static str, String, String)> {
    let fields = |share: &RecisTableShare| {
        [
            ("dim", share.dim.to_string()),
            ("optimizer", share.optimizer.clone()),
            ("key", share.key.to_string()),
            ("seed", share.seed.to_string()),
            ("step", share.step.to_string()),
            ("total_num_buckets", share.total_num_buckets.to_string()),
        ]
    };
    let slots = [("slots", format!("{:?}", part.slots), format!("{:?}", other.slots))];
    let pairs = fields(part.share).into_iter().zip(fields(other.share));
    let fields = pairs.map(|((name, value), (_, other_value))| (name, value, other_value));
    fields.chain(slots).find(|(_, value, other_value)| value != other_value)
}
