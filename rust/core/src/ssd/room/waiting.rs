//! What whoever waits for room does next: [`next_for_room`], a function of a [`View`] of the tier.

/// A tier, as far as it matters to whoever waits for room. Where one of the fields up to `has_changed` decides, nobody needs to look at what
/// the others say.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says of one thing whether it is there")]
pub(crate) struct View {
    /// Bytes of the cap that no file holds.
    pub(crate) free_bytes: u64,
    /// Bytes that have to be free for a segment to be opened: that segment's, and those that are kept.
    pub(crate) needed_bytes: u64,
    /// Whether a segment is being moved, or compaction has chosen one.
    pub(crate) is_compacting: bool,
    /// Whether something changed while the tier was looked at, so that the looks do not fit together.
    pub(crate) has_changed: bool,
    /// Whether a write or a sync failed.
    pub(crate) has_failed: bool,
    /// Whether an open segment has dead records, which compaction cannot take before it is closed, or takes no more rows, because the heads
    /// of those that are written now are wider.
    pub(crate) open_in_the_way: bool,
    /// Whether segments are kept for a moment, because their rows were not read yet.
    pub(crate) moment_is_unread: bool,
    /// Scans whose rows somebody takes at his own pace. Segments are kept for them.
    pub(crate) takers: usize,
    /// Whether giving up published states would make room, now or by compaction.
    pub(crate) states_are_in_the_way: bool,
    /// Whether something is under way that makes room, or that lets compaction make some: scans, footers on their way to disk, files that
    /// go.
    pub(crate) room_is_coming: bool,
    /// Whether a file could not be removed.
    pub(crate) file_is_stuck: bool,
    /// Whether a segment that is worth moving cannot be read.
    pub(crate) segment_is_unreadable: bool,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There is room.
    Go,
    /// Have compaction move a segment, and wait for a change.
    Compact,
    /// Look again at once.
    LookAgain,
    /// Return the error of the write that failed.
    ReadOnly,
    /// Close an open segment that is in the way, and look again. Its dead records, the tombstones that they keep, or the room that it has and
    /// cannot use, may be all that stands in the way.
    CloseOpen,
    /// Read the rows of a segment that is kept for a moment, and look again. Where others are reading them, wait for a change.
    ReadForMoment,
    /// Ask who keeps scans waiting to end them, and wait for a change. Where none is kept waiting, it is the next step without takers.
    EndScans,
    /// Give up the oldest published state, and look again.
    GiveUpState,
    /// Wait for a change.
    Wait,
    /// Return an error: files that nobody needs could not be removed.
    FilesAreStuck,
    /// Return an error: a segment with dead records cannot be read.
    SegmentIsUnreadable,
    /// Return an error: the rows do not fit the cap.
    Full,
}

/// Decide the next step. What costs nobody anything comes first, what costs a published state comes last, and an error only comes where
/// nothing is left that could make room.
pub(crate) fn next_for_room(view: &View) -> Step {
    match view {
        view if view.free_bytes >= view.needed_bytes => Step::Go,
        View { is_compacting: true, .. } => Step::Compact,
        View { has_changed: true, .. } => Step::LookAgain,
        View { has_failed: true, .. } => Step::ReadOnly,
        View { open_in_the_way: true, .. } => Step::CloseOpen,
        View { moment_is_unread: true, .. } => Step::ReadForMoment,
        View { takers: 1.., .. } => Step::EndScans,
        View { states_are_in_the_way: true, .. } => Step::GiveUpState,
        View { room_is_coming: true, .. } => Step::Wait,
        View { file_is_stuck: true, .. } => Step::FilesAreStuck,
        View { segment_is_unreadable: true, .. } => Step::SegmentIsUnreadable,
        _ => Step::Full,
    }
}
