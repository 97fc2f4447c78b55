//! Rewrites a checkpoint for another number of ranks.

use super::chain::CheckpointChain;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::publish::save::{CheckpointSave, PublishedCheckpoint};
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};

/// The buckets of `rank` of `world`. Ranks differ by at most one bucket, and the first ranks have more.
pub(crate) fn share_of(rank: u32, world: u32, buckets: u32) -> std::ops::Range<u32> {
    let (each, more) = (buckets / world, buckets % world);
    let start = |rank: u32| rank * each + rank.min(more);
    start(rank)..start(rank + 1)
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
    from.refuse_serving("rows are divided between ranks")?;
    let tables = &from.manifest().tables;
    let owners: Vec<Option<u32>> =
        tables.iter().map(|entry| from.only_rank(&entry.spec.module, &entry.spec.table)).collect();
    let fewest =
        tables.iter().zip(&owners).filter(|(_, owner)| owner.is_none()).map(|(entry, _)| entry.spec.total_num_buckets);
    let most = fewest.min().unwrap_or(u32::MAX);
    if world == 0 || world > most {
        return Err(Error::new(
            Kind::Input,
            format!("a world of {world} ranks: give 1 to {most}, the buckets there are"),
        ));
    }
    let save = CheckpointSave::begin(to, random)?;
    let written = (0..world).map(|rank| {
        let writer = RankWriter::new(to, save.name(), rank, world)?;
        let mut writer = if counts { writer } else { writer.without_counts() };
        for (entry, owner) in tables.iter().zip(&owners) {
            let buckets = match owner {
                None => share_of(rank, world, entry.spec.total_num_buckets),
                Some(owner) if owner.min(&(world - 1)) == &rank => 0..entry.spec.total_num_buckets,
                Some(_) => continue,
            };
            let rows = from.table_reader(&entry.spec.module, &entry.spec.table, buckets)?;
            writer.write_chain(&rows, &mut |_| Ok(()))?;
        }
        writer.finish()
    });
    let digests = match written.collect::<Result<Vec<_>>>() {
        Ok(digests) => digests,
        Err(error) => {
            // The next save removes any leftovers.
            let _ = save.abandon();
            return Err(error);
        }
    };
    save.publish(&digests, from.manifest().next_epoch)
}

#[cfg(test)]
mod tests {
    use super::share_of;

    #[test]
    fn shares_follow_one_another_and_differ_by_one_at_most() {
        for (world, buckets) in [(1, 1), (3, 10), (4, 65_536), (7, 7)] {
            let shares: Vec<_> = (0..world).map(|rank| share_of(rank, world, buckets)).collect();
            assert_eq!((shares[0].start, shares[world as usize - 1].end), (0, buckets));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() - pair[1].len() <= 1));
        }
    }
}
