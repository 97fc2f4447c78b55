//! One shard's part of a block-level save: its blocks into data files, then their checksums and the shard's manifest.

use super::layout::{Layout, Spacing, Tensor, whole_pages};
use super::manifest::{BlockEntry, ShardManifest, TableShare, layout_of_file, tensors_of};
use super::names::Shard;
use super::save::{BlockSave, Finished};
use super::writer::{BlockFile, BlockRange, BlockWriter};
use crate::checkpoint::manifest::dense::CHUNK_BYTES;
use crate::checkpoint::manifest::holds::Wait;
use crate::error::{Error, Kind, Result};
use crate::io::publish;

/// A block to write.
#[derive(Clone, Debug)]
pub struct BlockToWrite {
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
pub struct WrittenTable {
    /// What the manifest says of it.
    pub share: TableShare,
    /// `[runs, buckets + 1]`: where in each run the rows of each bucket start, and the last ones end.
    pub starts: Vec<i64>,
}

/// The data files of a shard's blocks. Blocks go to `parallel` files in turn, and grow beside each other.
#[derive(Debug)]
pub struct ShardWriter {
    parallel: u32,
    entries: Vec<BlockEntry>,
    tensors: Vec<Tensor>,
    writer: BlockWriter,
}

fn refuse(what: String) -> Error {
    Error::new(Kind::Input, what)
}

impl ShardWriter {
    /// Make the data files: `parallel` at most, written by as many threads.
    ///
    /// Errors: `Input` for a type that is not known, a shape that no file can hold, or two blocks of one name; `Storage`.
    pub fn new(save: &BlockSave, parallel: u32, blocks: Vec<BlockToWrite>) -> Result<Self> {
        let parallel = parallel.max(1);
        let entry = |(number, block): (usize, BlockToWrite)| {
            let BlockToWrite { name, slot, dtype, shape } = block;
            BlockEntry { name, slot, dtype, shape, file: number as u32 % parallel }
        };
        let entries: Vec<BlockEntry> = blocks.into_iter().enumerate().map(entry).collect();
        let tensors = tensors_of(&entries, save.shard()).map_err(refuse)?;
        let dir = save.dir();
        let (mut files, mut layouts) = (Vec::new(), Vec::new());
        for file in 0..parallel.min(entries.len() as u32) {
            let layout = layout_of_file(file, &entries, &tensors).map_err(refuse)?;
            let name = save.shard().data_file(file, parallel);
            if dir.has(&name)? {
                // Of this shard, whose save was cut short.
                dir.engine().remove_file(&dir.join(&name))?;
            }
            files.push(BlockFile { name, header: layout.header.clone(), bytes: layout.bytes });
            layouts.push(layout);
        }
        let range = |(entry, tensor): (&BlockEntry, &Tensor)| {
            let file = entry.file as usize;
            BlockRange { file, start: layouts[file].start(tensor), bytes: tensor.bytes }
        };
        let ranges: Vec<BlockRange> = entries.iter().zip(&tensors).map(range).collect();
        let writer = BlockWriter::new(dir, &files, &ranges, CHUNK_BYTES, parallel as usize)?;
        Ok(Self { parallel, entries, tensors, writer })
    }

    /// Add bytes to a block: see [`BlockWriter::append`].
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        self.writer.append(block, bytes, copy)
    }

    /// Make the blocks durable, then write their checksums and the shard's manifest. The last shard publishes the save.
    ///
    /// Errors: `State` where a block is not complete, or a newer save was completed meanwhile; `Mismatch` where the shards do not make
    /// whole tables; `Input` where `tables` do not fit their buckets; `Storage`.
    pub fn finish(self, save: &BlockSave, tables: Vec<WrittenTable>, wait: &mut Wait<'_>) -> Result<Finished> {
        let Self { parallel, entries, tensors, writer } = self;
        let checksums = writer.finish()?;
        let check = write_checks(save, &tensors, &checksums, &tables)?;
        let Shard { index: shard, count: shards } = save.shard();
        let tables = tables.into_iter().map(|table| table.share).collect();
        save.finish(&ShardManifest { shard, shards, parallel, tables, blocks: entries, check }, wait)
    }
}

/// The tensors of the file of checksums: of each block those of its chunks, of each table where its buckets start.
pub(crate) fn check_tensors(tensors: &[Tensor], tables: &[&TableShare]) -> Result<Vec<Tensor>, String> {
    let chunks = |tensor: &Tensor| whole_pages(tensor.bytes).div_ceil(CHUNK_BYTES as u64);
    let of_block = |tensor: &Tensor| Tensor::new(format!("{}.crc32c", tensor.name), "U32", vec![chunks(tensor)]);
    let of_table = |table: &&TableShare| {
        let shape = vec![table.runs.len() as u64, table.starts()];
        Tensor::new(format!("{}.bucket_offsets", table.name), "I64", shape)
    };
    tensors.iter().map(of_block).chain(tables.iter().map(of_table)).collect()
}

/// Write the checksums of a shard's blocks, durably; the CRC-32C of the file.
fn write_checks(save: &BlockSave, tensors: &[Tensor], checksums: &[Vec<u32>], tables: &[WrittenTable]) -> Result<u32> {
    let shares: Vec<&TableShare> = tables.iter().map(|table| &table.share).collect();
    let described = check_tensors(tensors, &shares).map_err(refuse)?;
    let blocks = checksums.iter().map(|checksums| bytemuck::cast_slice::<u32, u8>(checksums));
    let starts = tables.iter().map(|table| bytemuck::cast_slice::<i64, u8>(&table.starts));
    let data: Vec<&[u8]> = blocks.chain(starts).collect();
    if let Some((tensor, _)) = described.iter().zip(&data).find(|(tensor, data)| tensor.bytes != data.len() as u64) {
        return Err(refuse(format!("{:?} does not have the shape {:?}", tensor.name, tensor.shape)));
    }
    let layout = Layout::new(&described.iter().collect::<Vec<_>>(), Spacing::None).map_err(refuse)?;
    let image = layout.image(described.iter().zip(data));
    publish(save.dir().engine(), &save.dir().join(save.shard().check_file()), &image)?;
    Ok(crc32c::crc32c(&image))
}
