//! Passes over the segments of rows: the next segment, and its remaining records.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::format::footer::FooterEntry;
use crate::ssd::format::segment::SegmentContent;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::footers::read_entries;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::walk::{CursorRecord, SegmentCursor};
use crate::types::Id;

/// The entries of a segment's present records, in the order of writing.
pub(crate) struct SegmentEntries {
    pub(crate) entries: Vec<FooterEntry>,
    /// True if more records may follow, because the segment is open.
    pub(crate) is_open: bool,
}

/// Returns the segments of rows that have live ones.
pub(crate) fn live_segments(state: &TierState) -> impl Iterator<Item = &Arc<Segment>> {
    state.segments().iter().filter(|segment| segment.content == SegmentContent::Rows && segment.live() > 0)
}

/// Returns the segment of `cursor`, if records of it remain and some row of it is still live.
pub(crate) fn segment_at(tier: &TierInner, cursor: &SegmentCursor) -> Option<Arc<Segment>> {
    if cursor.remaining.is_empty() {
        return None;
    }
    live_segments(&tier.view()).find(|segment| segment.serial == cursor.serial).cloned()
}

/// Moves `cursor` to `segment`, with these of its entries remaining.
pub(crate) fn move_to<'a>(
    cursor: &mut SegmentCursor,
    segment: &Segment,
    entries: impl DoubleEndedIterator<Item = &'a FooterEntry> + ExactSizeIterator,
) {
    let ahead =
        |entry: &FooterEntry| CursorRecord { id: entry.id, record: entry.record, modified_epoch: entry.modified_epoch };
    cursor.serial = segment.serial;
    cursor.remaining = entries.rev().map(ahead).collect();
}

/// Moves `cursor` to `segment`, with those of `entries` remaining that the index points to.
pub(crate) fn enter_segment(tier: &TierInner, cursor: &mut SegmentCursor, segment: &Segment, entries: &[FooterEntry]) {
    let ids: Vec<Id> = entries.iter().map(|entry| entry.id).collect();
    let mut here = vec![None; ids.len()];
    tier.view().index().get_batch(&ids, &mut here);
    let live = entries.iter().zip(here).filter(|(entry, here)| *here == Some(segment.location(entry.record)));
    move_to(cursor, segment, live.map(|(entry, _)| entry).collect::<Vec<&FooterEntry>>().into_iter());
}

/// True if the index still points to record `at` of the segment with this number and serial. Numbers are reused after a
/// segment is removed; serials are not.
pub(crate) fn is_still_at(state: &TierState, (slot, serial): (u32, u64), at: CursorRecord) -> bool {
    let here = state.segments().in_slot(slot).filter(|segment| segment.serial == serial);
    here.is_some_and(|segment| state.index().is_at(at.id, segment.location(at.record)))
}

/// Returns the entries of a segment's present records. Waits for a footer that is being written.
pub(crate) fn entries_of(tier: &TierInner, segment: &Arc<Segment>) -> Result<SegmentEntries> {
    loop {
        let generation = tier.context.space.generation();
        if let Some(open) = tier.view().open().find(segment) {
            return Ok(SegmentEntries { entries: open.entries().to_vec(), is_open: true });
        }
        if segment.sealed().is_some() {
            let mut entries = read_entries(&*tier.context.engine, segment)?;
            entries.sort_unstable_by_key(|entry| entry.record);
            return Ok(SegmentEntries { entries, is_open: false });
        }
        tier.check_writable()?;
        tier.context.space.wait_change(generation);
    }
}
