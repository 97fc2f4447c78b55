//! Which version of the format a manifest is of.

use super::names::{
    VERSION, VERSION_WITHOUT_CLOCKS, VERSION_WITHOUT_COUNTS, VERSION_WITHOUT_MISSING_READS, VERSION_WITHOUT_SWEEPS,
};

/// What a checkpoint holds that not every version can.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "a checkpoint may hold any of these")]
pub(crate) struct Needs {
    /// Counts of ids that wait for rows.
    pub(crate) counts: bool,
    /// Sweeps since the parent.
    pub(crate) sweeps: bool,
    /// When steps were made.
    pub(crate) clocks: bool,
    /// The shared row of a table.
    pub(crate) shared_row: bool,
    /// What an id without a row reads.
    pub(crate) missing_reads: bool,
    /// Rows to be served.
    pub(crate) serving: bool,
}

/// The version of a manifest.
pub(crate) fn version_of(needs: Needs) -> u32 {
    match needs {
        Needs { missing_reads: true, .. } | Needs { serving: true, .. } => VERSION,
        Needs { clocks: true, .. } | Needs { shared_row: true, .. } => VERSION_WITHOUT_MISSING_READS,
        Needs { sweeps: true, .. } => VERSION_WITHOUT_CLOCKS,
        Needs { counts: true, .. } => VERSION_WITHOUT_SWEEPS,
        Needs { .. } => VERSION_WITHOUT_COUNTS,
    }
}

/// Whether a manifest that is read is of the version that its tables ask for; the message says what does not fit.
pub(crate) fn check_version(version: u32, needs: Needs) -> Result<(), String> {
    let wanted = version_of(needs);
    // What needs no newer version may be of an older one too.
    if version == wanted || (wanted == VERSION_WITHOUT_COUNTS && version < wanted) {
        return Ok(());
    }
    let has = |it: bool| if it { "has" } else { "has no" };
    Err(format!(
        "it is of version {version}, {} counts of ids that wait for rows, {} sweeps, {} times of steps, {} shared row, {} word of \
         what ids without rows read and {} rows to be served",
        has(needs.counts),
        has(needs.sweeps),
        has(needs.clocks),
        has(needs.shared_row),
        has(needs.missing_reads),
        has(needs.serving)
    ))
}
