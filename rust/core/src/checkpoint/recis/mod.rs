//! RecIS-format saves: tables and tensors as named blocks in the files and names of RecIS 1, published atomically.
//!
//! ```text
//! path/LATEST.blocks                                           the latest complete save and the crc32c of its manifest
//! path/blocks-<seq>-<random>/begun.json                        number of shards and steps of the tables, by which other shards join
//! path/blocks-<seq>-<random>/shard-<i>.lock                    locked by the process that writes the shard
//! path/blocks-<seq>-<random>/model-<k>-of-<n>.safetensors      blocks: `<table>.<slot>/part_<shard>_<shards>`, and tensors
//! path/blocks-<seq>-<random>/check-<i>-of-<n>.safetensors      crc32c of each 256 KiB of each block
//! path/blocks-<seq>-<random>/shard-<i>-of-<n>.json             a shard's tables, blocks and runs, written when they are durable
//! path/blocks-<seq>-<random>/index, tensorkey.json             RecIS' indexes
//! path/blocks-<seq>-<random>/manifest.json                     crc32c of the shards' manifests, written by the last shard
//! ```
//!
//! Saving, shard by shard, in any order and in any processes:
//!
//! 1. [`RecisSave::begin`] creates a save or joins the one that waits for the shard.
//! 2. [`RecisShardWriter::new`] creates the data files, [`RecisShardWriter::append`] fills the blocks.
//! 3. [`RecisShardWriter::finish`] makes them durable and writes the shard's manifest. The last shard publishes the
//!    save: loads then find it, and older saves are removed.
//!
//! Loading: [`RecisReader::open`] checks the manifests of the latest save and protects it from removal. Rows and
//! tensors are verified as they are read.

pub(crate) mod index;
pub(crate) mod layout;
pub(crate) mod load;
pub(crate) mod manifest;
pub(crate) mod save;
