//! Decides the next step of a thread that waits for free space: [`next_space_wait_step`], a function of a
//! [`SpaceWaitView`] of the tier.

/// The properties of a tier that a thread waiting for free space depends on. If one of the fields up to `has_changed`
/// decides, the others may have any value.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says of one thing whether it is there")]
pub(crate) struct SpaceWaitView {
    /// Bytes of the cap that no file occupies.
    pub(crate) free_bytes: u64,
    /// Bytes that must be free to open a segment: that segment's, and the reserved ones.
    pub(crate) needed_bytes: u64,
    /// True if a segment is being moved, or compaction has chosen one.
    pub(crate) is_compacting: bool,
    /// True if something changed while the view was taken, so that its fields are inconsistent.
    pub(crate) has_changed: bool,
    /// True if a write or a sync failed.
    pub(crate) has_failed: bool,
    /// True if an open segment has dead records, which compaction cannot free before it is sealed, or is full, because
    /// the heads of new records are wider.
    pub(crate) open_segment_holds_space: bool,
    /// True if a snapshot pins segments whose rows are not read yet.
    pub(crate) snapshot_is_unread: bool,
    /// Number of scans with consumers that may block. They pin segments.
    pub(crate) scan_consumers: usize,
    /// True if discarding published states would free space, directly or by compaction.
    pub(crate) states_hold_space: bool,
    /// True if an operation is in progress that frees space or enables compaction to free some: scans, footers being
    /// written, files being removed.
    pub(crate) space_is_pending: bool,
    /// True if a file could not be removed.
    pub(crate) file_removal_failed: bool,
    /// True if a segment that is worth moving cannot be read.
    pub(crate) segment_is_unreadable: bool,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceWaitStep {
    /// Space is available.
    Proceed,
    /// Makes compaction move a segment, and waits for a change.
    Compact,
    /// Takes a new view immediately.
    Retry,
    /// Returns the error of the write that failed.
    ReadOnly,
    /// Seals an open segment, and retries. Its dead records, the tombstones that they keep, or its unusable space may
    /// be all that blocks progress.
    SealOpen,
    /// Reads the rows of a segment that a snapshot pins, and retries. If other threads are reading them, waits for a
    /// change.
    ReadForSnapshot,
    /// Cancels scans that a consumer blocks, and waits for a change. If none is blocked, the step is the next one
    /// without consumers.
    CancelScans,
    /// Discards the oldest published state, and retries.
    DropState,
    /// Waits for a change.
    Wait,
    /// Returns an error: unused files could not be removed.
    FileRemovalFailed,
    /// Returns an error: a segment with dead records cannot be read.
    SegmentUnreadable,
    /// Returns an error: the rows do not fit the cap.
    Full,
}

/// Decides the next step. Free steps come first, discarding a published state comes last, and an error occurs only if
/// nothing is left that could free space.
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
