//! One shard's part of a block-level save: its blocks into data files, then their checksums and the shard's manifest.

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
    /// The table's name, or the tensor's.
    pub name: String,
    /// What of the table's rows it holds; `None` of a dense tensor.
    pub slot: Option<String>,
    /// The type as safetensors names it.
    pub dtype: String,
    /// Its shape; of a table's block the rows come first.
    pub shape: Vec<u64>,
}

/// A table whose blocks are written.
#[derive(Clone, Debug)]
pub struct RecisWrittenTable {
    /// What the manifest says of it.
    pub share: RecisTableShare,
    /// `[runs, buckets + 1]`: where in each run the rows of each bucket start, and the last ones end.
    pub starts: Vec<i64>,
}

/// The data files of a shard's blocks. Blocks go to `parallel` files in turn, and grow beside each other.
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
    /// Make the data files: `parallel` at most, written by as many threads.
    ///
    /// Errors: `Input` for a type that is not known, a shape that no file can hold, or two blocks of one name; `Storage`.
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
                // Of this shard, whose save was cut short.
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

    /// Add bytes to a block: see [`RecisBlockWriter::append`].
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        self.writer.append(block, bytes, copy)
    }

    /// Make the blocks durable, then write their checksums and the shard's manifest. The last shard publishes the save.
    ///
    /// Errors: `State` where a block is not complete, or a newer save was completed meanwhile; `Mismatch` where the shards do not make
    /// whole tables; `Input` where `tables` do not fit their buckets; `Storage`.
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

/// The tensors of the file of checksums: of each block those of its chunks, of each table where its buckets start.
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

/// Write the checksums of a shard's blocks, durably; the CRC-32C of the file.
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
