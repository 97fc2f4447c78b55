//! Measures the dedupe of a batch: its distinct ids, and the inverse.

use std::time::Instant;

use embcache::index::{DedupedIds, IdDeduper};
use embcache_benches::{
    BATCH_IDS, Bench, Better, Group, Ids, PlainDedupe, Rounds, Scale, scattered_id, uniform_ranks, zipf_ranks,
};

/// Ids are drawn from so many.
const ROWS: u64 = 10_000_000;
const LIMIT: &str = "plain hash pass over a table sized for the batch, prefetching";

pub(crate) fn group() -> Group {
    let (unit, better, limit) = ("ids/s", Better::Higher, Some(LIMIT));
    Group::Alone(vec![
        Bench {
            name: "dedupe_zipf105",
            unit,
            better,
            limit,
            make: |scale| dedupe(scale, false, |n| zipf_ranks(1, n, ROWS, 1.05)),
        },
        Bench {
            name: "dedupe_uniform",
            unit,
            better,
            limit,
            make: |scale| dedupe(scale, true, |n| uniform_ranks(1, n, ROWS)),
        },
    ])
}

struct Dedupe {
    ids: Ids,
    deduper: IdDeduper,
    deduped: DedupedIds,
    plain: PlainDedupe,
}

fn dedupe(scale: Scale, mostly_new: bool, ranks: fn(usize) -> Vec<u64>) -> Box<dyn Rounds> {
    let ids = Ids::from_ranks(&ranks(BATCH_IDS * scale.pick(40, 2)), BATCH_IDS, scattered_id);
    Box::new(Dedupe {
        ids,
        deduper: IdDeduper::default(),
        deduped: DedupedIds::default(),
        plain: PlainDedupe::new(BATCH_IDS, mostly_new),
    })
}

impl Rounds for Dedupe {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            self.deduper.dedupe(batch, &mut self.deduped);
        }
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            self.plain.dedupe(batch);
        }
        Some(self.ids.values.len() as f64 / begin.elapsed().as_secs_f64())
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, ROWS))
    }

    fn check(&mut self) {
        for batch in self.ids.batches() {
            self.deduper.dedupe(batch, &mut self.deduped);
            self.plain.dedupe(batch);
            assert_eq!(self.deduped.unique, self.plain.unique[..self.plain.found]);
            assert_eq!(self.deduped.inverse, self.plain.inverse);
        }
    }
}
