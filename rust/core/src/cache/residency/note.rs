//! What a published state of the SSD tier keeps of a table beside its rows: its lineage, the counts of the ids that wait for rows, when
//! its steps were made, and the row that refused ids share.
//!
//! With a shared row it begins with [`WITH_SHARED`], how many numbers the row has, and these. With the times of steps [`WITH_CLOCK`]
//! follows, the length of the clock's bytes, and these bytes. What follows is the same as where there is neither:
//!
//! Without counts it is the bytes of the lineage. With counts it is: [`WITH_COUNTS`], the length of the lineage's bytes, these bytes, and
//! for each bucket that has any its number, its generation, how many ids it has, and each id with its shows and clicks. The state around
//! it has a checksum. Where there is a shared row, this comes before all that: [`WITH_SHARED`], how many numbers the row has, and these.

use super::Residency;
use crate::error::Result;
use crate::lifecycle::{BucketCounts, PendingId, SharedRow};
use crate::rows::RowLayout;
use crate::types::Id;

/// The first bytes of a note with counts. A lineage begins with a brace.
const WITH_COUNTS: &[u8] = b"counts 1\n";
/// The first bytes of a note with the times of steps.
const WITH_CLOCK: &[u8] = b"clock 1\n";
/// The times of steps take at most one part in this many of a note.
const CLOCK_SHARE: usize = 4;
/// The first bytes of a note with a shared row.
const WITH_SHARED: &[u8] = b"shared 1\n";
/// The bit of an id's shows that says that it is of the older generation.
const OLDER: u32 = 1 << 31;

/// The parts of a note.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Note<'a> {
    pub(super) lineage: &'a [u8],
    pub(super) counts: Vec<BucketCounts>,
}

impl Residency {
    /// Take over what a state that is resumed keeps beside the rows. What cannot be read is left out.
    ///
    /// Errors: `Memory`.
    pub(crate) fn resume_note(&mut self, note: &[u8]) -> Result<()> {
        let (shared, note) = split_shared(note, self.base.layout);
        if shared.is_none() {
            self.note_shared_row_begins("the state that it resumes");
        }
        self.set_shared_row(shared.as_ref());
        let (clock, note) = split_clock(note);
        self.clock = serde_json::from_slice(clock).unwrap_or_default();
        let Note { lineage, counts } = decode(note);
        self.lineage.decode(lineage);
        self.fit_host_to_index();
        let buckets = self.base.config.buckets.clone();
        counts
            .iter()
            .filter(|counts| buckets.contains(&counts.bucket))
            // Which of them were counted since the last save is not known, so that the next delta has them all.
            .try_for_each(|counts| self.restore_counts(counts, self.epoch))
    }

    /// The note for a state that the SSD tier publishes, of at most so many bytes. What does not fit is left out. Where that is the counts,
    /// the checkpoints that a delta could build on are left out too, because it would keep the counts of those.
    pub(crate) fn encoded_note(&self, most_bytes: usize) -> Vec<u8> {
        // The table was opened with room for a shared row.
        let mut note = self.shared_row().map_or_else(Vec::new, with_shared);
        let most_of_clock = most_bytes.saturating_sub(note.len()) / CLOCK_SHARE;
        note.extend(with_clock(&self.clock.encode(most_of_clock.saturating_sub(WITH_CLOCK.len() + 8))));
        note.extend(self.encoded_rest(most_bytes.saturating_sub(note.len())));
        note
    }

    /// What of the note follows the shared row and the times of steps.
    fn encoded_rest(&self, most_bytes: usize) -> Vec<u8> {
        // A delta could not have rows that a sweep has spared: see `Residency::ancestors`. A resume would not know of them.
        let lineage = if self.has_spared() { Vec::new() } else { self.lineage.encode(most_bytes) };
        if !self.keeps_counts() {
            return lineage;
        }
        let buckets = self.base.config.buckets.clone().map(|bucket| self.counts_of(bucket, None));
        encode(&lineage, buckets, most_bytes).unwrap_or_else(|| {
            tracing::warn!(
                "table {:?}: the counts of ids that wait for rows take more than the {most_bytes} bytes that a flush has for them: a \
                 resume of it finds no counts, and saves a full checkpoint next; raise ssd_bytes, or load a checkpoint, which has \
                 them",
                self.base.config.name
            );
            Vec::new()
        })
    }
}

/// The beginning of a note with these bytes of a clock; nothing where there are none.
fn with_clock(clock: &[u8]) -> Vec<u8> {
    if clock.is_empty() { Vec::new() } else { [WITH_CLOCK, &(clock.len() as u64).to_le_bytes(), clock].concat() }
}

/// The bytes of a note's clock, and what follows them. Where they cannot be told apart both are empty.
fn split_clock(note: &[u8]) -> (&[u8], &[u8]) {
    let Some(rest) = note.strip_prefix(WITH_CLOCK) else { return (&[], note) };
    split_part(rest).unwrap_or_default()
}

/// Bytes that their length comes before, and what follows them.
fn split_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// The beginning of a note with this shared row.
fn with_shared(row: &SharedRow) -> Vec<u8> {
    let mut note = [WITH_SHARED, &(row.values().len() as u32).to_le_bytes()].concat();
    note.extend(row.values().iter().flat_map(|value| value.to_le_bytes()));
    note
}

/// The bytes of a note that a shared row takes.
pub(crate) fn shared_note_bytes(layout: &RowLayout) -> usize {
    WITH_SHARED.len() + size_of::<u32>() + layout.floats() * size_of::<f32>()
}

/// The shared row of a note, where it has one of this layout, and what comes after it.
fn split_shared(note: &[u8], layout: RowLayout) -> (Option<SharedRow>, &[u8]) {
    let parts = note.strip_prefix(WITH_SHARED).and_then(|rest| {
        let (count, rest) = rest.split_first_chunk()?;
        rest.split_at_checked((u32::from_le_bytes(*count) as usize).checked_mul(size_of::<f32>())?)
    });
    let Some((numbers, rest)) = parts else { return (None, note) };
    let values = numbers.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
    (SharedRow::of(layout, values.collect()), rest)
}

/// The note with these counts; `None` where it would have more than `most` bytes.
fn encode(lineage: &[u8], buckets: impl Iterator<Item = BucketCounts>, most: usize) -> Option<Vec<u8>> {
    let mut note = [WITH_COUNTS, &(lineage.len() as u64).to_le_bytes(), lineage].concat();
    for BucketCounts { bucket, generation, pending } in buckets {
        if generation == 0 && pending.is_empty() {
            continue;
        }
        for number in [bucket, generation, pending.len() as u32] {
            note.extend_from_slice(&number.to_le_bytes());
        }
        for PendingId { id, shows, clicks, is_older } in pending {
            note.extend_from_slice(&id.to_le_bytes());
            note.extend_from_slice(&(if is_older { shows | OLDER } else { shows }).to_le_bytes());
            note.extend_from_slice(&clicks.to_le_bytes());
        }
        if note.len() > most {
            return None;
        }
    }
    (note.len() <= most).then_some(note)
}

/// The parts of a note; what cannot be read is left out.
pub(super) fn decode(note: &[u8]) -> Note<'_> {
    let Some(rest) = note.strip_prefix(WITH_COUNTS) else { return Note { lineage: note, counts: Vec::new() } };
    let Some((lineage, mut rest)) = split_part(rest) else { return Note { lineage: &[], counts: Vec::new() } };
    let mut counts = Vec::new();
    while !rest.is_empty() {
        let Some(bucket) = take_bucket(&mut rest) else { return Note { lineage, counts: Vec::new() } };
        counts.push(bucket);
    }
    Note { lineage, counts }
}

fn take_bucket(rest: &mut &[u8]) -> Option<BucketCounts> {
    let (bucket, generation, count) = (take_u32(rest)?, take_u32(rest)?, take_u32(rest)?);
    let mut pending = Vec::new();
    for _ in 0..count {
        let (id, later) = rest.split_first_chunk::<8>()?;
        *rest = later;
        let (shows, clicks) = (take_u32(rest)?, take_u32(rest)?);
        let (shows, is_older) = (shows & !OLDER, shows & OLDER != 0);
        pending.push(PendingId { id: Id::from_le_bytes(*id), shows, clicks, is_older });
    }
    Some(BucketCounts { bucket, generation, pending })
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (number, later) = rest.split_first_chunk::<4>()?;
    *rest = later;
    Some(u32::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_comes_before_the_rest_and_without_one_the_note_is_as_it_was() {
        assert_eq!(with_clock(b""), b"");
        let note = [with_clock(b"[0,1,2]"), b"counts 1\n...".to_vec()].concat();
        assert_eq!(split_clock(&note), (&b"[0,1,2]"[..], &b"counts 1\n..."[..]));
        for old in [&b""[..], b"{old}", b"counts 1\n..."] {
            assert_eq!(split_clock(old), (&b""[..], old));
        }
        for end in WITH_CLOCK.len()..WITH_CLOCK.len() + 8 + 7 {
            assert_eq!(split_clock(&note[..end]), (&b""[..], &b""[..]), "{end}");
        }
    }

    #[test]
    fn a_note_comes_back_and_one_that_was_cut_has_no_counts() {
        let pending = |id, is_older| PendingId { id, shows: (1 << 24) - 1, clicks: 7, is_older };
        let counts = vec![
            BucketCounts { bucket: 0, generation: u32::MAX, pending: vec![pending(-1, true), pending(5, false)] },
            BucketCounts { bucket: 9, generation: 2, pending: Vec::new() },
        ];
        let nothing = BucketCounts { bucket: 3, ..BucketCounts::default() };
        let all = || counts.iter().cloned().chain([nothing.clone()]);
        let note = encode(b"{lineage}", all(), 1000).expect("it fits");
        assert_eq!(decode(&note), Note { lineage: b"{lineage}", counts: counts.clone() });
        assert_eq!(encode(b"{lineage}", all(), note.len() - 1), None);
        for end in WITH_COUNTS.len()..note.len() {
            assert!(decode(&note[..end]).counts.len() < 2, "{end}");
        }
        assert_eq!(decode(b"{old}"), Note { lineage: b"{old}", counts: Vec::new() });
    }
}
