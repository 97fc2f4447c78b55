//! One shard's part of a RecIS-format save: writes its blocks to data files, then their checksums and the shard's
//! manifest.

use super::layout::{RecisFileLayout, RecisTensor, TensorSpacing, whole_pages};
use super::manifest::{RecisBlockEntry, RecisShardManifest, RecisTableShare, layout_of_file, tensors_of};
use super::names::RecisShard;
use super::save::{RecisSave, RecisShardOutcome};
use super::writer::{RecisBlockRange, RecisBlockWriter, RecisFileSpec};
use crate::checkpoint::manifest::dense::DENSE_CHUNK_BYTES;
use crate::checkpoint::manifest::holds::WaitCallback;
use crate::error::{Error, Kind, Result};
use crate::io::write_atomically;

/// A block to write.
#[derive(Clone, Debug)]
pub struct RecisBlockSpec {
    /// Name of the table or of the dense tensor.
    pub name: String,
    /// Column of the table's rows that the block contains; `None` for a dense tensor.
    pub slot: Option<String>,
    /// Dtype by its safetensors name.
    pub dtype: String,
    /// Shape; the first dimension of a table's block is its number of rows.
    pub shape: Vec<u64>,
}

/// A table whose blocks are written.
#[derive(Clone, Debug)]
pub struct RecisWrittenTable {
    /// Its entry in the manifest.
    pub share: RecisTableShare,
    /// `[runs, buckets + 1]`: index in each run of the first row of each bucket, then the number of rows.
    pub starts: Vec<i64>,
}

/// The data files of a shard's blocks. Blocks are distributed round-robin over `parallel` files and filled
/// concurrently.
#[derive(Debug)]
pub struct RecisShardWriter {
    parallel: u32,
    entries: Vec<RecisBlockEntry>,
    tensors: Vec<RecisTensor>,
    writer: RecisBlockWriter,
}

fn input_error(message: String) -> Error {
    Error::new(Kind::Input, message)
}

impl RecisShardWriter {
    /// Creates at most `parallel` data files, written by as many threads.
    ///
    /// Errors: `Input` for an unknown dtype, a shape that no file can hold, or two blocks with the same name;
    /// `Storage`.
    pub fn new(save: &RecisSave, parallel: u32, blocks: Vec<RecisBlockSpec>) -> Result<Self> {
        let parallel = parallel.max(1);
        let entry = |(number, block): (usize, RecisBlockSpec)| {
            let RecisBlockSpec { name, slot, dtype, shape } = block;
            RecisBlockEntry { name, slot, dtype, shape, file: number as u32 % parallel }
        };
        let entries: Vec<RecisBlockEntry> = blocks.into_iter().enumerate().map(entry).collect();
        let tensors = tensors_of(&entries, save.shard()).map_err(input_error)?;
        let dir = save.dir();
        let (mut files, mut layouts) = (Vec::new(), Vec::new());
        for file in 0..parallel.min(entries.len() as u32) {
            let layout = layout_of_file(file, &entries, &tensors).map_err(input_error)?;
            let name = save.shard().data_file(file, parallel);
            if dir.has(&name)? {
                // Left by an interrupted save of this shard.
                dir.engine().remove_file(&dir.join(&name))?;
            }
            files.push(RecisFileSpec { name, header: layout.header.clone(), bytes: layout.bytes });
            layouts.push(layout);
        }
        let range = |(entry, tensor): (&RecisBlockEntry, &RecisTensor)| {
            let file = entry.file as usize;
            RecisBlockRange { file, start: layouts[file].start(tensor), bytes: tensor.bytes }
        };
        let ranges: Vec<RecisBlockRange> = entries.iter().zip(&tensors).map(range).collect();
        let writer = RecisBlockWriter::new(dir, &files, &ranges, DENSE_CHUNK_BYTES, parallel as usize)?;
        Ok(Self { parallel, entries, tensors, writer })
    }

    /// Appends bytes to a block. See [`RecisBlockWriter::append`].
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        self.writer.append(block, bytes, copy)
    }

    /// Makes the blocks durable, then writes their checksums and the shard's manifest. The last shard publishes the
    /// save.
    ///
    /// Errors: `State` if a block is incomplete, or a newer save was completed concurrently; `Mismatch` if the shards
    /// do not make complete tables; `Input` if `tables` do not match their buckets; `Storage`.
    pub fn finish(
        self,
        save: &RecisSave,
        tables: Vec<RecisWrittenTable>,
        wait: &mut WaitCallback<'_>,
    ) -> Result<RecisShardOutcome> {
        let Self { parallel, entries, tensors, writer } = self;
        let checksums = writer.finish()?;
        let check = write_checks(save, &tensors, &checksums, &tables)?;
        let RecisShard { index: shard, count: shards } = save.shard();
        let tables = tables.into_iter().map(|table| table.share).collect();
        save.finish(&RecisShardManifest { shard, shards, parallel, tables, blocks: entries, check }, wait)
    }
}

/// Returns the tensors of the checksum file: the chunk checksums of each block, and the bucket starts of each table.
pub(crate) fn check_tensors(tensors: &[RecisTensor], tables: &[&RecisTableShare]) -> Result<Vec<RecisTensor>, String> {
    let chunks = |tensor: &RecisTensor| whole_pages(tensor.bytes).div_ceil(DENSE_CHUNK_BYTES as u64);
    let of_block =
        |tensor: &RecisTensor| RecisTensor::new(format!("{}.crc32c", tensor.name), "U32", vec![chunks(tensor)]);
    let of_table = |table: &&RecisTableShare| {
        let shape = vec![table.runs.len() as u64, table.starts()];
        RecisTensor::new(format!("{}.bucket_offsets", table.name), "I64", shape)
    };
    tensors.iter().map(of_block).chain(tables.iter().map(of_table)).collect()
}

/// Writes the checksums of a shard's blocks durably. Returns the CRC-32C of the file.
fn write_checks(
    save: &RecisSave,
    tensors: &[RecisTensor],
    checksums: &[Vec<u32>],
    tables: &[RecisWrittenTable],
) -> Result<u32> {
    let shares: Vec<&RecisTableShare> = tables.iter().map(|table| &table.share).collect();
    let described = check_tensors(tensors, &shares).map_err(input_error)?;
    let blocks = checksums.iter().map(|checksums| bytemuck::cast_slice::<u32, u8>(checksums));
    let starts = tables.iter().map(|table| bytemuck::cast_slice::<i64, u8>(&table.starts));
    let data: Vec<&[u8]> = blocks.chain(starts).collect();
    if let Some((tensor, _)) = described.iter().zip(&data).find(|(tensor, data)| tensor.bytes != data.len() as u64) {
        return Err(input_error(format!("{:?} does not have the shape {:?}", tensor.name, tensor.shape)));
    }
    let layout =
        RecisFileLayout::new(&described.iter().collect::<Vec<_>>(), TensorSpacing::Packed).map_err(input_error)?;
    let image = layout.image(described.iter().zip(data));
    write_atomically(save.dir().engine(), &save.dir().join(save.shard().check_file()), &image)?;
    Ok(crc32c::crc32c(&image))
}
