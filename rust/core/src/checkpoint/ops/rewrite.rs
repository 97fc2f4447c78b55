//! Writes a chain of checkpoints as a new one: merged, for other ranks, or for serving.

use super::chain::CheckpointChain;
use crate::checkpoint::commit::{CheckpointSave, PublishedCheckpoint, SaveOptions};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::RankDigest;
use crate::checkpoint::manifest::latest::{CheckpointName, LatestCheckpoint};
use crate::checkpoint::manifest::manifests::CheckpointKind;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Kind, Result};
use crate::rows::WeightPrecision;
use crate::types::buckets_of_rank;

/// One rank's part of merging the chain that `LATEST` names.
///
/// The coordinator sends the result of [`LatestCheckpoint::read`] to all ranks and starts a
/// [`CheckpointSave`](crate::checkpoint::CheckpointSave) that merges it. Each rank writes its range of buckets.
/// Publishing makes the merged checkpoint the latest one, if that chain is still the latest.
#[derive(Debug)]
pub struct ChainCompaction {
    chain: CheckpointChain,
    directory: CheckpointDirectory,
    /// True if admission counts of pending ids are written.
    counts: bool,
}

impl ChainCompaction {
    /// Opens the chain, or the linked checkpoint. The merged checkpoint is written to the same directory, with the
    /// admission counts of pending ids if `counts`. Returns `None` if it is already a full checkpoint.
    pub fn open(directory: &CheckpointDirectory, latest: LatestCheckpoint, counts: bool) -> Result<Option<Self>> {
        directory.check_to_save()?;
        let chain = CheckpointChain::open(directory, latest)?;
        chain.links()[0].refuse_serving("merge deltas")?;
        let is_full = chain.manifest().kind == CheckpointKind::Full;
        Ok((!is_full).then(|| Self { chain, directory: directory.clone(), counts }))
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
        let mut writer = RankWriter::new(&self.directory, name, rank, world)?.with_counts(self.counts);
        for entry in &self.chain.manifest().tables {
            let buckets = buckets_of_rank(entry.spec.total_num_buckets, rank, world);
            let reader = self.chain.table_reader(&entry.spec.module, &entry.spec.table, buckets)?;
            writer.write_chain(&reader, progress)?;
        }
        writer.finish()
    }
}

/// Writes the rows of `from` to another directory, as `world` ranks would have saved them. Merges deltas. A table that
/// only one of several ranks owned stays on one rank; every other table is sharded by buckets. Keeps epochs, steps and
/// settings.
///
/// Any number of ranks can load any checkpoint. If it is sharded as they are, each rank reads complete files.
///
/// If `counts` is true, admission counts of pending ids are written too.
///
/// Errors: `Input` (no rank, or more ranks than a sharded table has buckets), `Corruption` of the source, `Storage`.
pub fn reshard(
    from: &CheckpointChain,
    to: &CheckpointDirectory,
    random: u64,
    world: u32,
    counts: bool,
) -> Result<PublishedCheckpoint> {
    from.links()[0].refuse_serving("divide rows between ranks")?;
    let tables = &from.manifest().tables;
    let owners: Vec<Option<u32>> = tables.iter().map(|entry| from.links()[0].only_rank(entry)).collect();
    let fewest =
        tables.iter().zip(&owners).filter(|(_, owner)| owner.is_none()).map(|(entry, _)| entry.spec.total_num_buckets);
    let max_ranks = fewest.min().unwrap_or(u32::MAX);
    if world == 0 || world > max_ranks {
        return Err(
            Kind::Input.error(format!("a world of {world} ranks: give 1 to {max_ranks}, the number of buckets"))
        );
    }
    let save = CheckpointSave::begin(to, random)?;
    let written = (0..world).map(|rank| {
        let mut writer = RankWriter::new(to, save.name(), rank, world)?.with_counts(counts);
        for (entry, owner) in tables.iter().zip(&owners) {
            let buckets = match owner {
                None => buckets_of_rank(entry.spec.total_num_buckets, rank, world),
                Some(owner) if owner.min(&(world - 1)) == &rank => 0..entry.spec.total_num_buckets,
                Some(_) => continue,
            };
            let rows = from.table_reader(&entry.spec.module, &entry.spec.table, buckets)?;
            writer.write_chain(&rows, &mut |_| Ok(()))?;
        }
        writer.finish()
    });
    let written = written.collect::<Result<Vec<_>>>();
    publish_or_abandon(save, written, from)
}

/// Writes the rows of `from`, with deltas merged, to another directory as a serving checkpoint. It records the
/// checkpoint from which it was made, so that a server can find the deltas based on it. Keeps epochs, steps and
/// settings; omits optimizer slots, admission counts and step times. `keep` is as in [`SaveOptions`]. `progress` is
/// called with numbers of rows; an error from it aborts the work.
///
/// Errors: `Input` if the precision cannot represent a row, `Unsupported` if `from` is a serving checkpoint,
/// `Corruption` of the source, `Storage`.
pub fn make_for_serving(
    from: &CheckpointChain,
    to: &CheckpointDirectory,
    (random, keep): (u64, usize),
    precision: WeightPrecision,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<PublishedCheckpoint> {
    from.links()[0].refuse_serving("convert it to another precision")?;
    let options = SaveOptions { made_from: Some(from.identity()), keep, ..SaveOptions::default() };
    let save = CheckpointSave::begin_with(to, random, options)?;
    let mut write = || {
        let mut writer = RankWriter::new(to, save.name(), 0, 1)?.with_counts(false);
        for entry in &from.manifest().tables {
            let spec = &entry.spec;
            let rows = from.table_reader(&spec.module, &spec.table, 0..spec.total_num_buckets)?.without_slots();
            writer.write_merged_rows(spec.clone().for_serving(precision), &rows, None, progress)?;
        }
        writer.finish()
    };
    let written = write().map(|digest| vec![digest]);
    publish_or_abandon(save, written, from)
}

/// Publishes a checkpoint with the rows of `from`, or cancels the save if the rows could not be written.
fn publish_or_abandon(
    save: CheckpointSave,
    written: Result<Vec<RankDigest>>,
    from: &CheckpointChain,
) -> Result<PublishedCheckpoint> {
    match written {
        Ok(digests) => save.publish(&digests, from.manifest().next_epoch),
        Err(error) => {
            // The next save removes any leftovers.
            let _ = save.abandon();
            Err(error)
        }
    }
}
