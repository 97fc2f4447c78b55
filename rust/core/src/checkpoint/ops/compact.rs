//! Merges a chain of deltas, or a linked checkpoint, into a full checkpoint.

use super::chain::CheckpointChain;
use super::reshard::share_of;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::digest::RankDigest;
use crate::checkpoint::manifest::latest::{CheckpointName, LatestCheckpoint};
use crate::checkpoint::manifest::manifests::CheckpointKind;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::Result;

/// One rank's part of merging the chain that `LATEST` names.
///
/// The coordinator sends the result of [`LatestCheckpoint::read`] to all ranks and starts a
/// [`CheckpointSave`](crate::checkpoint::CheckpointSave) that merges it. Each rank writes its range of buckets.
/// Publishing makes the merged checkpoint the latest one, if that chain is still the latest.
#[derive(Debug)]
pub struct ChainCompaction {
    chain: CheckpointChain,
    directory: CheckpointDirectory,
    counts: bool,
}

impl ChainCompaction {
    /// Opens the chain, or the linked checkpoint. The merged checkpoint is written to the same directory. Returns
    /// `None` if it is already a full checkpoint.
    pub fn open(directory: &CheckpointDirectory, latest: LatestCheckpoint) -> Result<Option<Self>> {
        directory.check_to_save()?;
        let chain = CheckpointChain::open(directory, latest)?;
        chain.refuse_serving("deltas are merged")?;
        Ok((chain.manifest().kind != CheckpointKind::Full).then(|| Self {
            chain,
            directory: directory.clone(),
            counts: true,
        }))
    }

    /// Omits the admission counts of pending ids.
    #[must_use]
    pub fn without_counts(mut self) -> Self {
        self.counts = false;
        self
    }

    /// The chain.
    pub fn chain(&self) -> &CheckpointChain {
        &self.chain
    }

    /// Writes the buckets of `rank` (of `world`) to the checkpoint `name`. `progress` is called with numbers of rows;
    /// an error from it aborts the work.
    pub fn write(
        &self,
        name: CheckpointName,
        (rank, world): (u32, u32),
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<RankDigest> {
        let writer = RankWriter::new(&self.directory, name, rank, world)?;
        let mut writer = if self.counts { writer } else { writer.without_counts() };
        for entry in &self.chain.manifest().tables {
            let buckets = share_of(rank, world, entry.spec.total_num_buckets);
            let reader = self.chain.table_reader(&entry.spec.module, &entry.spec.table, buckets)?;
            writer.write_chain(&reader, progress)?;
        }
        writer.finish()
    }
}
