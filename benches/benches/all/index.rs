//! Measures the look-up of ids in the index of a tier in RAM.

use std::time::Instant;

use embcache::index::SlotIndex;
use embcache_benches::{
    BATCH_IDS, Bench, Better, Group, Ids, PlainIndex, Rounds, Scale, scattered_id, uniform_ranks, zipf_ranks,
};

const LIMIT: &str = "open addressing, one 16-byte entry a key, prefetch in blocks";

pub(crate) fn group() -> Group {
    let (unit, better, limit) = ("ids/s", Better::Higher, Some(LIMIT));
    Group::Alone(vec![
        Bench {
            name: "index_lookup_zipf105_10m",
            unit,
            better,
            limit,
            make: |scale| lookup(scale, 10_000_000, |n, rows| zipf_ranks(2, n, rows, 1.05)),
        },
        Bench {
            name: "index_lookup_uniform_10m",
            unit,
            better,
            limit,
            make: |scale| lookup(scale, 10_000_000, |n, rows| uniform_ranks(2, n, rows)),
        },
        Bench {
            name: "index_lookup_zipf105_1m",
            unit,
            better,
            limit,
            make: |scale| lookup(scale, 1_000_000, |n, rows| zipf_ranks(2, n, rows, 1.05)),
        },
    ])
}

struct Lookup {
    ids: Ids,
    rows: u64,
    index: SlotIndex,
    plain: PlainIndex,
    slots: Vec<u32>,
}

fn lookup(scale: Scale, rows: u64, ranks: fn(usize, u64) -> Vec<u64>) -> Box<dyn Rounds> {
    let rows = scale.pick(rows, rows / 100);
    let ids = Ids::from_ranks(&ranks(BATCH_IDS * scale.pick(40, 2), rows), BATCH_IDS, scattered_id);
    let present: Vec<i64> = (0..rows).map(scattered_id).collect();
    let mut index = SlotIndex::new(present.len());
    for (slot, &id) in present.iter().enumerate() {
        index.insert(id, slot as u32);
    }
    Box::new(Lookup { ids, rows, index, plain: PlainIndex::new(&present), slots: vec![0; BATCH_IDS] })
}

impl Rounds for Lookup {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            self.index.get_batch(batch, &mut self.slots);
        }
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            self.plain.get(batch, &mut self.slots);
        }
        Some(self.ids.values.len() as f64 / begin.elapsed().as_secs_f64())
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }

    fn check(&mut self) {
        let mut plain = vec![0; BATCH_IDS];
        for batch in self.ids.batches() {
            self.index.get_batch(batch, &mut self.slots);
            self.plain.get(batch, &mut plain);
            assert_eq!(self.slots, plain);
        }
    }
}
