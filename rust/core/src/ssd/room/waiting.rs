//! What whoever waits for room does next: [`next_space_wait_step`], a function of a [`View`] of the tier.

/// A tier, as far as it matters to whoever waits for room. Where one of the fields up to `has_changed` decides, nobody needs to look at what
/// the others say.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says of one thing whether it is there")]
pub(crate) struct SpaceWaitView {
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
    pub(crate) open_segment_holds_space: bool,
    /// Whether segments are kept for a moment, because their rows were not read yet.
    pub(crate) snapshot_is_unread: bool,
    /// Scans whose rows somebody takes at his own pace. Segments are kept for them.
    pub(crate) scan_consumers: usize,
    /// Whether giving up published states would make room, now or by compaction.
    pub(crate) states_hold_space: bool,
    /// Whether something is under way that makes room, or that lets compaction make some: scans, footers on their way to disk, files that
    /// go.
    pub(crate) space_is_pending: bool,
    /// Whether a file could not be removed.
    pub(crate) file_removal_failed: bool,
    /// Whether a segment that is worth moving cannot be read.
    pub(crate) segment_is_unreadable: bool,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceWaitStep {
    /// There is room.
    Proceed,
    /// Have compaction move a segment, and wait for a change.
    Compact,
    /// Look again at once.
    Retry,
    /// Return the error of the write that failed.
    ReadOnly,
    /// Close an open segment that is in the way, and look again. Its dead records, the tombstones that they keep, or the room that it has and
    /// cannot use, may be all that stands in the way.
    SealOpen,
    /// Read the rows of a segment that is kept for a moment, and look again. Where others are reading them, wait for a change.
    ReadForSnapshot,
    /// Ask who keeps scans waiting to end them, and wait for a change. Where none is kept waiting, it is the next step without takers.
    CancelScans,
    /// Give up the oldest published state, and look again.
    DropState,
    /// Wait for a change.
    Wait,
    /// Return an error: files that nobody needs could not be removed.
    FileRemovalFailed,
    /// Return an error: a segment with dead records cannot be read.
    SegmentUnreadable,
    /// Return an error: the rows do not fit the cap.
    Full,
}

/// Decide the next step. What costs nobody anything comes first, what costs a published state comes last, and an error only comes where
/// nothing is left that could make room.
pub(crate) fn next_space_wait_step(view: &SpaceWaitView) -> SpaceWaitStep {
    match view {
        view if view.free_bytes >= view.needed_bytes => SpaceWaitStep::Proceed,
        SpaceWaitView { is_compacting: true, .. } => SpaceWaitStep::Compact,
        SpaceWaitView { has_changed: true, .. } => SpaceWaitStep::Retry,
        SpaceWaitView { has_failed: true, .. } => SpaceWaitStep::ReadOnly,
        SpaceWaitView { open_segment_holds_space: true, .. } => SpaceWaitStep::SealOpen,
        SpaceWaitView { snapshot_is_unread: true, .. } => SpaceWaitStep::ReadForSnapshot,
        SpaceWaitView { scan_consumers: 1.., .. } => SpaceWaitStep::CancelScans,
        SpaceWaitView { states_hold_space: true, .. } => SpaceWaitStep::DropState,
        SpaceWaitView { space_is_pending: true, .. } => SpaceWaitStep::Wait,
        SpaceWaitView { file_removal_failed: true, .. } => SpaceWaitStep::FileRemovalFailed,
        SpaceWaitView { segment_is_unreadable: true, .. } => SpaceWaitStep::SegmentUnreadable,
        _ => SpaceWaitStep::Full,
    }
}
