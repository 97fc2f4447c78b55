//! Looks rows up. Copies those in buffers immediately; those in files join a batch of reads.

use std::sync::Arc;

use crate::error::Result;
use crate::rows::RowMut;
use crate::ssd::SsdTier;
use crate::ssd::segment::SegmentByteSource;
use crate::ssd::store::TierInner;
use crate::ssd::store::reads::{FetchBatch, FetchJob, FetchKeepAlive, RowFetch};
use crate::types::Id;

impl SsdTier {
    /// Starts reading rows into the passed memory, which must stay valid and untouched until the fetch is done.
    pub fn fetch(&self, requested: Vec<(Id, RowMut)>) -> Arc<RowFetch> {
        let mut batch = FetchBatch::default();
        let fetch = self.fetch_in(requested, None, &mut batch);
        batch.submit();
        fetch
    }

    /// Like [`SsdTier::fetch`], but reads from disk only when `batch` is submitted, together with the reads of other
    /// tiers. Callers need not wait for it: the fetch owns `keep_alive`, which contains the rows' memory, if it is set.
    pub fn fetch_in(
        &self,
        requested: Vec<(Id, RowMut)>,
        keep_alive: Option<FetchKeepAlive>,
        batch: &mut FetchBatch,
    ) -> Arc<RowFetch> {
        let tier = &self.inner;
        let fetch = tier.reads.begin();
        if let Err(error) = tier.check_usable() {
            fetch.finish(Err(error));
            return fetch;
        }
        let mut job = FetchJob::new(&tier.reads, &fetch, requested, keep_alive);
        if let Err(error) = look_up(tier, &mut job) {
            fetch.finish(Err(error));
        } else if job.needs_no_disk() {
            job.finish(Ok(()));
        } else {
            batch.add(job);
        }
        fetch
    }
}

/// Looks every id of a job up. Copies rows that are in buffers, lists those that are in files.
fn look_up(tier: &TierInner, job: &mut FetchJob) -> Result<()> {
    let ids = job.ids();
    let mut locations = vec![None; ids.len()];
    let state = tier.view();
    state.index().get_batch(&ids, &mut locations);
    let mut listed = vec![u32::MAX; state.segments().slots()];
    for (position, location) in locations.into_iter().enumerate() {
        let Some(location) = location else {
            job.add_missing(position);
            continue;
        };
        let segment = state.segments().of(location);
        let offset = segment.offset(location.record);
        let mut taken = Ok(());
        let place = segment.locate(offset, segment.record_bytes, &mut |bytes| {
            taken = job.take_buffered(position, segment, location.record, bytes);
        });
        match place {
            SegmentByteSource::Block => taken?,
            SegmentByteSource::Buffer => {
                let bytes = state.open().find(segment).and_then(|open| open.get(offset));
                let bytes = bytes.expect("a record is in file, block or buffer");
                job.take_buffered(position, segment, location.record, bytes)?;
            }
            SegmentByteSource::File => job.add_read(position, segment, location, &mut listed),
        }
    }
    Ok(())
}
