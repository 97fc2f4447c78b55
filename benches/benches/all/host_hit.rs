//! Measures the path of a batch whose rows are all in RAM: dedupe, look-up, and the gather of the row of every occurrence into `[N,
//! D]`.
//!
//! Ours is the path that a module takes: a plan with its locks, pins and policy, then the forward, then the release.

use std::time::Instant;

use embcache::cache::{Lookup, PlanMode, RowBlock, Table};
use embcache::config::OptimizerKind;
use embcache::io::default_engine;
use embcache::rows::RowHeader;
use embcache_benches::{
    BATCH_IDS, Bench, Better, Group, Ids, PlainDedupe, PlainIndex, Rounds, Scale, huge_pages, prefetch, scattered_id,
    table_config, uniform_ranks, zipf_ranks,
};

const DIM: usize = 64;
const LIMIT: &str = "plain dedupe, open addressing and gather in one function";

pub(crate) fn group() -> Group {
    let (unit, better, limit) = ("ids/s", Better::Higher, Some(LIMIT));
    Group::Alone(vec![
        Bench {
            name: "host_hit_zipf105_10m",
            unit,
            better,
            limit,
            make: |scale| host_hit(scale, 10_000_000, false, |n, rows| zipf_ranks(3, n, rows, 1.05)),
        },
        Bench {
            name: "host_hit_uniform_10m",
            unit,
            better,
            limit,
            make: |scale| host_hit(scale, 10_000_000, true, |n, rows| uniform_ranks(3, n, rows)),
        },
        Bench {
            name: "host_hit_zipf105_1m",
            unit,
            better,
            limit,
            make: |scale| host_hit(scale, 1_000_000, false, |n, rows| zipf_ranks(3, n, rows, 1.05)),
        },
    ])
}

struct HostHit {
    ids: Ids,
    rows: u64,
    lookup: Lookup,
    plain: Plain,
    out: Vec<f32>,
}

struct Plain {
    dedupe: PlainDedupe,
    index: PlainIndex,
    slots: Vec<u32>,
    table: Vec<[f32; DIM]>,
}

/// The weights that both tables hold in the row of a slot.
fn value(slot: usize) -> [f32; DIM] {
    std::array::from_fn(|column| (slot * 7 + column) as f32)
}

fn host_hit(scale: Scale, rows: u64, mostly_new: bool, ranks: fn(usize, u64) -> Vec<u64>) -> Box<dyn Rounds> {
    let rows = scale.pick(rows, rows / 100);
    let ids = Ids::from_ranks(&ranks(BATCH_IDS * scale.pick(20, 2), rows), BATCH_IDS, scattered_id);
    let present: Vec<i64> = (0..rows).map(scattered_id).collect();

    let config = table_config(OptimizerKind::Sgd, rows + rows / 100);
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, None, engine).expect("a table in RAM");
    for (chunk, ids) in present.chunks(100_000).enumerate() {
        let headers: Vec<RowHeader> = ids.iter().map(|&id| RowHeader { id, ..RowHeader::default() }).collect();
        let vectors: Vec<f32> = (0..ids.len()).flat_map(|at| value(chunk * 100_000 + at)).collect();
        table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("rows that fit");
    }

    let mut plain = Vec::with_capacity(present.len());
    huge_pages(plain.spare_capacity_mut());
    plain.extend((0..present.len()).map(value));
    Box::new(HostHit {
        ids,
        rows,
        lookup: Lookup::new(&[table], &[0]).expect("one feature of one table"),
        plain: Plain {
            dedupe: PlainDedupe::new(BATCH_IDS, mostly_new),
            index: PlainIndex::new(&present),
            slots: vec![0; BATCH_IDS],
            table: plain,
        },
        out: vec![0.0; BATCH_IDS * DIM],
    })
}

fn ours(lookup: &Lookup, ids: &[i64], out: &mut [f32]) {
    let plan = lookup.plan(ids, &[0, ids.len() as i64], PlanMode::EVALUATE, &[]).expect("ids of the table");
    plan.wait(&mut []).expect("rows in RAM");
    plan.forward_sequence(out, &mut [None], 1).expect("a batch's room");
}

impl Plain {
    fn gather(&mut self, ids: &[i64], out: &mut [f32]) {
        self.dedupe.dedupe(ids);
        self.index.get(&self.dedupe.unique[..self.dedupe.found], &mut self.slots);
        let inverse = &self.dedupe.inverse;
        for (position, row) in out.as_chunks_mut::<DIM>().0.iter_mut().enumerate() {
            let ahead = inverse[(position + 16).min(inverse.len() - 1)];
            let address = self.table.as_ptr().wrapping_add(self.slots[ahead as usize] as usize);
            for line in 0..DIM / 16 {
                prefetch(address.cast::<f32>().wrapping_add(line * 16));
            }
            *row = self.table[self.slots[inverse[position] as usize] as usize];
        }
    }
}

impl Rounds for HostHit {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            ours(&self.lookup, batch, &mut self.out);
        }
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            self.plain.gather(batch, &mut self.out);
        }
        Some(self.ids.values.len() as f64 / begin.elapsed().as_secs_f64())
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }

    fn check(&mut self) {
        for batch in self.ids.batches().take(2) {
            ours(&self.lookup, batch, &mut self.out);
            let got = self.out.clone();
            self.plain.gather(batch, &mut self.out);
            assert!(got == self.out, "both gather the same rows");
        }
    }
}
