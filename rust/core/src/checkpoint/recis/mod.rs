//! RecIS-format saves: tables and tensors as named blocks in the files and names of RecIS 1, published atomically.
//!
//! ```text
//! path/LATEST.blocks                                           the newest complete save and the CRC-32C of its manifest
//! path/blocks-<seq>-<random>/begun.json                        shards and steps of the tables: by it other shards know their save
//! path/blocks-<seq>-<random>/model-<k>-of-<n>.safetensors      blocks, as RecIS names them
//! path/blocks-<seq>-<random>/check-<i>-of-<n>.safetensors      checksums of a shard's blocks, and where buckets start
//! path/blocks-<seq>-<random>/shard-<i>-of-<n>.json             a shard's tables, blocks and runs, written when they are durable
//! path/blocks-<seq>-<random>/index, tensorkey.json             RecIS' indexes
//! path/blocks-<seq>-<random>/manifest.json                     CRC-32C of the shards' manifests, written by the last shard
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
