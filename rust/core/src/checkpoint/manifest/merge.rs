//! Merges the ranks' manifests into the tables of a checkpoint.

use std::collections::BTreeMap;

use super::dense::DenseShare;
use super::manifests::{CheckpointKind, CheckpointManifest, RankManifest, RankShare, TableEntry, dense_bytes};
use crate::lifecycle::StepClock;

/// Number of pending ids with counts in these shares; `None` if no share has counts.
fn count_pending<'a>(shares: impl Iterator<Item = &'a RankShare>) -> Option<u64> {
    let counts = shares.filter_map(|share| share.counts.as_ref());
    counts.map(|counts| counts.files.iter().map(|file| file.rows).sum()).reduce(|a: u64, b| a + b)
}

/// Merges the tables of all ranks. The message describes a mismatch.
pub(crate) fn merge_tables(ranks: &[RankManifest], kind: CheckpointKind) -> Result<Vec<TableEntry>, String> {
    let mut tables: BTreeMap<(&str, &str), Vec<(usize, &RankShare)>> = BTreeMap::new();
    for (rank, manifest) in ranks.iter().enumerate() {
        for share in &manifest.tables {
            share.check(kind)?;
            let shares = tables.entry((&share.spec.module, &share.spec.table)).or_default();
            if shares.last().is_some_and(|&(last, _)| last == rank) {
                return Err(format!(
                    "rank {rank} has table {:?} of module {:?} twice",
                    share.spec.table, share.spec.module
                ));
            }
            shares.push((rank, share));
        }
    }
    tables
        .into_iter()
        .map(|((module, table), mut shares)| {
            let name = format!("table {table:?} of module {module:?}");
            let (first_rank, first) = shares[0];
            if let Some((rank, _)) = shares.iter().find(|(_, share)| share.spec != first.spec) {
                return Err(format!(
                    "{name}: ranks {first_rank} and {rank} have different settings or steps, or their shared rows differ"
                ));
            }
            if let Some((rank, _)) = shares.iter().find(|(_, share)| share.sweeps != first.sweeps) {
                return Err(format!("{name}: ranks {first_rank} and {rank} have made different sweeps"));
            }
            shares.sort_by_key(|(_, share)| (share.bucket_begin, share.bucket_end));
            let mut end = 0;
            for (rank, share) in &shares {
                if share.bucket_begin != end {
                    return Err(format!("{name}: bucket {end} is followed by {} (rank {rank})", share.bucket_begin));
                }
                end = share.bucket_end;
            }
            if end != first.spec.total_num_buckets {
                return Err(format!("{name}: no rank has the buckets from {end} on"));
            }
            Ok(TableEntry {
                spec: first.spec.clone(),
                rows: shares.iter().map(|(_, share)| share.rows()).sum(),
                tombstones: shares.iter().map(|(_, share)| share.tombstones()).sum(),
                total_rows: shares.iter().map(|(_, share)| share.total_rows).sum(),
                pending: count_pending(shares.iter().map(|(_, share)| *share)),
                sweeps: first.sweeps.clone(),
                clock: StepClock::join(shares.iter().map(|(_, share)| &share.clock)),
            })
        })
        .collect()
}

impl CheckpointManifest {
    /// Checks that the ranks' manifests belong to this checkpoint, agree with it, and together contain every bucket of
    /// every table once.
    pub(crate) fn check_ranks(&self, ranks: &[RankManifest]) -> Result<(), String> {
        for (rank, manifest) in ranks.iter().enumerate() {
            if manifest.name != self.name
                || manifest.rank as usize != rank
                || manifest.world as usize != self.ranks.len()
            {
                return Err(format!(
                    "the manifest of rank {rank} belongs to rank {} of {}",
                    manifest.rank, manifest.name
                ));
            }
        }
        if merge_tables(ranks, self.kind)? != self.tables {
            return Err("the ranks' manifests hold other tables, settings or counts".into());
        }
        for (rank, manifest) in ranks.iter().enumerate() {
            let checked = manifest.dense.as_ref().map_or(Ok(()), DenseShare::check);
            checked.map_err(|what| format!("rank {rank}: {what}"))?;
            if manifest.dense.is_some() != self.dense.is_some() {
                return Err(format!("one of rank {rank} and the coordinator has extents"));
            }
        }
        if dense_bytes(ranks) == self.dense.map_or(0, |dense| dense.bytes) {
            Ok(())
        } else {
            Err("the ranks' manifests have other extents".into())
        }
    }
}
