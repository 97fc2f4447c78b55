//! The metadata blob of a table in a published state of the SSD tier: its checkpoint history, the admission counts, the
//! times of its steps, and the OOV row.
//!
//! With an OOV row the blob starts with [`OOV_TAG`], the number of values of the row, and the values. With times of
//! steps [`CLOCK_TAG`] follows, the length of the clock's bytes, and these bytes. If nothing has changed since the last
//! sweep except by that sweep, [`UNCHANGED_TAG`] follows. The rest is independent of these parts:
//!
//! Without counts it is the bytes of the checkpoint history. With counts it is: [`COUNTS_TAG`], the length of the
//! history's bytes, these bytes, and for each bucket with counts its number, its generation, its number of ids, and
//! each id with its shows and clicks. The enclosing state has a checksum.
//!
//! A table is opened only if its blobs fit the OOV row and some step times: see [`check_metadata_space`]. Other
//! parts that do not fit are omitted and logged.

use crate::cache::expiry::Residency;
use crate::config::{MissingRead, TableConfig};
use crate::error::{Kind, Result};
use crate::lifecycle::{BucketCounts, CountedId, OovRow};
use crate::rows::RowLayout;
use crate::ssd::SsdTier;
use crate::types::Id;

/// First bytes of a blob with counts. A checkpoint history starts with a brace.
const COUNTS_TAG: &[u8] = b"counts 1\n";
/// First bytes of the step times.
const CLOCK_TAG: &[u8] = b"clock 1\n";
/// States that nothing has changed since the last sweep except by that sweep.
const UNCHANGED_TAG: &[u8] = b"swept 1\n";
/// The step times use at most 1/`CLOCK_SHARE` of the blob without the OOV row, or [`LEAST_CLOCK_BYTES`] if that is
/// more.
const CLOCK_SHARE: usize = 4;
/// Bytes of a blob that the step times may use in any case: about 60 times.
const LEAST_CLOCK_BYTES: usize = 1 << 10;
/// First bytes of a blob with an OOV row.
const OOV_TAG: &[u8] = b"oov row 1\n";
/// The bit of an id's shows that marks the older generation.
const OLDER: u32 = 1 << 31;

/// The parts of a blob after the OOV row and the step times.
#[derive(Debug, PartialEq, Eq)]
struct MetadataBlob<'a> {
    history: &'a [u8],
    counts: Vec<BucketCounts>,
}

impl Residency {
    /// Restores the metadata of a resumed state. Omits unreadable parts.
    ///
    /// Errors: `Memory`.
    pub(crate) fn resume_metadata(&mut self, metadata: &[u8]) -> Result<()> {
        let (oov_row, blob) = split_oov_row(metadata, self.placement.context.layout);
        if oov_row.is_none() {
            self.lifecycle.admission.log_new_oov_row(self.placement.changes.step, "the state that it resumes");
        }
        self.lifecycle.admission.set_oov_row(oov_row.as_ref());
        let (clock, blob) = split_clock(blob);
        self.lifecycle.clock.steps = serde_json::from_slice(clock).unwrap_or_default();
        let (is_as_swept, blob) = split_unchanged(blob);
        let MetadataBlob { history, counts } = decode(blob);
        self.placement.changes.history.decode(history);
        self.placement.fit_host_to_index();
        let buckets = self.placement.context.config.buckets.clone();
        counts
            .iter()
            .filter(|counts| buckets.contains(&counts.bucket))
            // It is not known which of them were counted since the last save, so the next delta contains all of them.
            .try_for_each(|counts| self.lifecycle.admission.restore_counts(counts, self.placement.changes.epoch))?;
        // Restoring the metadata does not change the rows that the sweep has left.
        self.lifecycle.version_after_sweep = is_as_swept.then(|| self.placement.context.version());
        Ok(())
    }

    /// Encodes the blob for a state that the SSD tier publishes, in at most `most_bytes` bytes. Parts that do not fit
    /// are omitted and logged. If the counts do not fit, the base checkpoints are omitted too, because a delta based on
    /// them would keep their counts.
    pub(crate) fn encoded_metadata(&self, most_bytes: usize) -> Vec<u8> {
        let mut blob = self.lifecycle.admission.oov_row().map_or_else(Vec::new, oov_row_prefix);
        blob.extend(self.encoded_clock(clock_bytes(most_bytes.saturating_sub(blob.len()))));
        if self.is_unchanged_since_sweep() && blob.len() + UNCHANGED_TAG.len() <= most_bytes {
            blob.extend(UNCHANGED_TAG);
        }
        blob.extend(self.encoded_rest(most_bytes.saturating_sub(blob.len())));
        blob
    }

    /// The step times. A table opened without a rule in seconds may have loaded some nevertheless.
    fn encoded_clock(&self, most_bytes: usize) -> Vec<u8> {
        let clock = clock_prefix(
            &self.lifecycle.clock.steps.encode(most_bytes.saturating_sub(CLOCK_TAG.len() + size_of::<u64>())),
        );
        if clock.is_empty() && !self.lifecycle.clock.steps.is_empty() {
            tracing::warn!(
                "table {:?}: the times of its steps do not fit the {most_bytes} bytes that a flush has for them: after a resume of it all \
                 steps before count as made with the next one; raise ssd_bytes, or load a checkpoint, which has them",
                self.placement.context.config.name
            );
        }
        clock
    }

    /// The part of the blob after the OOV row and the step times.
    fn encoded_rest(&self, most_bytes: usize) -> Vec<u8> {
        let history = self.encoded_history(most_bytes);
        if !self.lifecycle.admission.keeps_counts() {
            return history;
        }
        let buckets = self
            .placement
            .context
            .config
            .buckets
            .clone()
            .map(|bucket| self.lifecycle.admission.counts_of(bucket, None));
        encode(&history, buckets, most_bytes).unwrap_or_else(|| {
            tracing::warn!(
                "table {:?}: the counts of ids that wait for rows take more than the {most_bytes} bytes that a flush has for them: a \
                 resume of it finds no counts, and saves a full checkpoint next; raise ssd_bytes, or load a checkpoint, which has \
                 them",
                self.placement.context.config.name
            );
            Vec::new()
        })
    }

    fn encoded_history(&self, most_bytes: usize) -> Vec<u8> {
        // A delta could not contain deferred rows: see `Residency::base_checkpoints`. A resume would not know about
        // them.
        let history = if self.has_deferred() { Vec::new() } else { self.placement.changes.history.encode(most_bytes) };
        if history.is_empty() && !self.placement.changes.history.bases().is_empty() {
            tracing::info!(
                "table {:?}: a flush leaves out which checkpoints its rows descend from: a resume of it saves a full checkpoint next",
                self.placement.context.config.name
            );
        }
        history
    }
}

/// Number of bytes that the step times may use out of `space`, the blob without the OOV row.
fn clock_bytes(space: usize) -> usize {
    (space / CLOCK_SHARE).max(space.min(LEAST_CLOCK_BYTES))
}

/// Number of bytes that a table's OOV row uses in a blob; 0 if it has none.
fn oov_row_bytes(config: &TableConfig) -> usize {
    let numbers = OOV_TAG.len() + size_of::<u32>() + config.layout().floats() * size_of::<f32>();
    if config.not_admitted == MissingRead::OovRow { numbers } else { 0 }
}

/// Number of bytes of a blob for the checkpoint history and the counts, next to the OOV row and the step times.
pub(super) fn rest_bytes(config: &TableConfig, metadata_bytes: usize) -> usize {
    let left = metadata_bytes.saturating_sub(oov_row_bytes(config));
    if config.keeps_times() { left - clock_bytes(left) } else { left }
}

/// Checks that a published state of the SSD tier fits the OOV row, and some step times if a rule needs them.
///
/// Errors: `Config`, which states how many bytes the tier needs.
pub(crate) fn check_metadata_space(config: &TableConfig) -> Result<()> {
    let Some(ssd) = &config.ssd else { return Ok(()) };
    let (oov_row, clock) = (oov_row_bytes(config), if config.keeps_times() { LEAST_CLOCK_BYTES } else { 0 });
    if SsdTier::max_metadata_bytes_of(ssd.bytes) >= oov_row + clock {
        return Ok(());
    }
    let what = match (oov_row > 0, clock > 0) {
        (true, true) => "the OOV row of not_admitted=\"oov\" and the step times, which eviction by seconds needs",
        (true, false) => "the OOV row of not_admitted=\"oov\"",
        _ => "the step times, which eviction by seconds needs",
    };
    let least = SsdTier::cap_for_metadata(oov_row + clock);
    let lower = if oov_row > 0 { ", or lower embedding_dim" } else { "" };
    Err(Kind::Config.error(format!(
        "table {:?}: ssd_bytes = {} has no room in a flush for {what}: set it to {least} or more, or to 0 for no SSD tier{lower}",
        config.name, ssd.bytes
    )))
}

/// Encodes the part of a blob with these bytes of a clock; empty if there are none.
fn clock_prefix(clock: &[u8]) -> Vec<u8> {
    if clock.is_empty() { Vec::new() } else { [CLOCK_TAG, &(clock.len() as u64).to_le_bytes(), clock].concat() }
}

/// Splits a blob into the clock's bytes and the rest. Both are empty if they cannot be separated.
fn split_clock(metadata: &[u8]) -> (&[u8], &[u8]) {
    let Some(rest) = metadata.strip_prefix(CLOCK_TAG) else { return (&[], metadata) };
    split_part(rest).unwrap_or_default()
}

/// Splits a blob into the flag that nothing has changed since the last sweep, and the rest.
fn split_unchanged(metadata: &[u8]) -> (bool, &[u8]) {
    metadata.strip_prefix(UNCHANGED_TAG).map_or((false, metadata), |rest| (true, rest))
}

/// Splits bytes into a length-prefixed part and the rest.
fn split_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// Encodes the part of a blob with this OOV row.
fn oov_row_prefix(row: &OovRow) -> Vec<u8> {
    let mut blob = [OOV_TAG, &(row.values().len() as u32).to_le_bytes()].concat();
    blob.extend(row.values().iter().flat_map(|value| value.to_le_bytes()));
    blob
}

/// Splits a blob into the OOV row, if it has one of this layout, and the rest.
fn split_oov_row(metadata: &[u8], layout: RowLayout) -> (Option<OovRow>, &[u8]) {
    let parts = metadata.strip_prefix(OOV_TAG).and_then(|rest| {
        let (count, rest) = rest.split_first_chunk()?;
        rest.split_at_checked((u32::from_le_bytes(*count) as usize).checked_mul(size_of::<f32>())?)
    });
    let Some((numbers, rest)) = parts else { return (None, metadata) };
    let values = numbers.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
    (OovRow::from_values(layout, values.collect()), rest)
}

/// Encodes the blob with these counts; `None` if it would have more than `most` bytes.
fn encode(history: &[u8], buckets: impl Iterator<Item = BucketCounts>, most: usize) -> Option<Vec<u8>> {
    let mut blob = [COUNTS_TAG, &(history.len() as u64).to_le_bytes(), history].concat();
    for BucketCounts { bucket, generation, ids: pending } in buckets {
        if generation == 0 && pending.is_empty() {
            continue;
        }
        for number in [bucket, generation, pending.len() as u32] {
            blob.extend_from_slice(&number.to_le_bytes());
        }
        for CountedId { id, shows, clicks, is_older } in pending {
            blob.extend_from_slice(&id.to_le_bytes());
            blob.extend_from_slice(&(if is_older { shows | OLDER } else { shows }).to_le_bytes());
            blob.extend_from_slice(&clicks.to_le_bytes());
        }
        if blob.len() > most {
            return None;
        }
    }
    (blob.len() <= most).then_some(blob)
}

/// Decodes the parts of a blob. Omits unreadable parts.
fn decode(metadata: &[u8]) -> MetadataBlob<'_> {
    let Some(rest) = metadata.strip_prefix(COUNTS_TAG) else {
        return MetadataBlob { history: metadata, counts: Vec::new() };
    };
    let Some((history, mut rest)) = split_part(rest) else { return MetadataBlob { history: &[], counts: Vec::new() } };
    let mut counts = Vec::new();
    while !rest.is_empty() {
        let Some(bucket) = take_bucket(&mut rest) else { return MetadataBlob { history, counts: Vec::new() } };
        counts.push(bucket);
    }
    MetadataBlob { history, counts }
}

fn take_bucket(rest: &mut &[u8]) -> Option<BucketCounts> {
    let (bucket, generation, count) = (take_u32(rest)?, take_u32(rest)?, take_u32(rest)?);
    let mut pending = Vec::new();
    for _ in 0..count {
        let (id, later) = rest.split_first_chunk::<8>()?;
        *rest = later;
        let (shows, clicks) = (take_u32(rest)?, take_u32(rest)?);
        let (shows, is_older) = (shows & !OLDER, shows & OLDER != 0);
        pending.push(CountedId { id: Id::from_le_bytes(*id), shows, clicks, is_older });
    }
    Some(BucketCounts { bucket, generation, ids: pending })
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (number, later) = rest.split_first_chunk::<4>()?;
    *rest = later;
    Some(u32::from_le_bytes(*number))
}

#[cfg(test)]
mod tests;
