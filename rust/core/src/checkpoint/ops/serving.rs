//! Rewrites a checkpoint for serving: without optimizer slots, and with weights in the requested precision.

use super::chain::CheckpointChain;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::manifests::CheckpointKind;
use crate::checkpoint::publish::save::{CheckpointSave, PublishedCheckpoint, SaveOptions};
use crate::checkpoint::rows::reader::OpenCheckpoint;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};
use crate::rows::WeightPrecision;

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
    from.refuse_serving("another precision is made of it")?;
    let options = SaveOptions { made_from: Some(from.identity()), keep, ..SaveOptions::default() };
    let save = CheckpointSave::begin_with(to, random, options)?;
    let mut write = || {
        let mut writer = RankWriter::new(to, save.name(), 0, 1)?.without_counts();
        for entry in &from.manifest().tables {
            let spec = &entry.spec;
            let rows = from.table_reader(&spec.module, &spec.table, 0..spec.total_num_buckets)?.without_slots();
            writer.write_rows_for_serving(&rows, precision, progress)?;
        }
        writer.finish()
    };
    match write() {
        Ok(digest) => save.publish(&[digest], from.manifest().next_epoch),
        Err(error) => {
            // The next save removes any leftovers.
            let _ = save.abandon();
            Err(error)
        }
    }
}

impl CheckpointChain {
    /// Returns `Unsupported` if this is a serving checkpoint, which does not support `action`.
    pub fn refuse_serving(&self, action: &str) -> Result<()> {
        self.links()[0].refuse_serving(action)
    }
}

impl OpenCheckpoint {
    /// Returns `Unsupported` if this is a serving checkpoint, which does not support the action `what`.
    pub(crate) fn refuse_serving(&self, what: &str) -> Result<()> {
        let manifest = self.manifest();
        let (CheckpointKind::Serving, Some(source)) = (manifest.kind, &manifest.made_from) else { return Ok(()) };
        let precision = manifest.tables.iter().find_map(|entry| entry.spec.precision).map_or("", WeightPrecision::name);
        Err(Error::new(
            Kind::Unsupported,
            format!(
                "{} is a serving checkpoint (kind serving, {precision}): it is for torchrec_embcache.serving, and has no optimizer state; \
                 {what} only from the checkpoint that it was made from, {}",
                self.directory().path().display(),
                source.name
            ),
        )
        .at(self.directory().path()))
    }
}
