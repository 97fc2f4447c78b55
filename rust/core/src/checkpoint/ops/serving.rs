//! Writes a checkpoint again for servers: without optimizer slots, and with weights in as many bytes as asked for.

use super::chain::CheckpointChain;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::manifests::CheckpointKind;
use crate::checkpoint::publish::save::{CheckpointSave, PublishedCheckpoint, SaveOptions};
use crate::checkpoint::rows::reader::OpenCheckpoint;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};
use crate::rows::WeightPrecision;

/// Write the rows of `from`, deltas merged, to another directory as a serving checkpoint. It says which checkpoint it was made from, so that a
/// server knows which deltas are changes of it. Epochs, steps and settings are kept; optimizer slots, counts of ids that wait for rows and the
/// times of steps are left out. `keep` as in [`SaveOptions`]. `progress` is called with numbers of rows; its error ends the work.
///
/// Errors: `Input` where the precision cannot hold a row, `Unsupported` where `from` is a serving checkpoint, `Corruption` of what is read,
/// `Storage`.
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
            // The next save removes what stays.
            let _ = save.abandon();
            Err(error)
        }
    }
}

impl CheckpointChain {
    /// `Unsupported` where this is a serving checkpoint, from which `action` cannot be done.
    pub fn refuse_serving(&self, action: &str) -> Result<()> {
        self.links()[0].refuse_serving(action)
    }
}

impl OpenCheckpoint {
    /// `Unsupported` where this is a serving checkpoint, from which `action` cannot be done.
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
