//! Measures admission: what it costs where every id is known, and the path of a batch of which half of the occurrences are of ids that wait
//! for a row.

use std::time::Instant;

use embcache::cache::{Lookup, PlanMode, Table};
use embcache::config::{AdmissionRule, MissingRead, OptimizerKind, TableConfig};
use embcache_benches::{
    BATCH_IDS, Bench, Better, DIM, Group, Ids, PlainCounts, PlainDedupe, PlainIndex, Rounds, Scale, TrainedInTurn,
    huge_pages, prefetch, scattered_id, table_config, table_in_ram, uniform_ranks, zipf_ranks,
};

const LIMIT: &str = "plain dedupe, open addressing, a count in an open-addressing table or a gather, in one function";
/// Enough for all ids, so that nothing is forgotten.
const MEMORY: u64 = 1 << 30;

pub(crate) fn group() -> Group {
    Group::Alone(vec![
        Bench { name: "admission_all_known", unit: "ratio", better: Better::Higher, limit: None, make: all_known },
        Bench {
            name: "admission_half_pending",
            unit: "ids/s",
            better: Better::Higher,
            limit: Some(LIMIT),
            make: |scale| Box::new(HalfPending::new(scale)),
        },
    ])
}

fn count(threshold: u32) -> AdmissionRule {
    AdmissionRule::Count { threshold, window_steps: None, memory: MEMORY }
}

fn in_ram(optimizer: OptimizerKind, rows: u64, admission: AdmissionRule) -> Table {
    table_in_ram(
        TableConfig { not_admitted: MissingRead::Zeros, admission, ..table_config(optimizer, rows + rows / 100) },
        rows,
    )
}

fn all_known(scale: Scale) -> Box<dyn Rounds> {
    let rows = scale.pick(10_000_000, 100_000);
    let open = |admission| in_ram(OptimizerKind::RowWiseAdagrad, rows, admission);
    Box::new(TrainedInTurn::new(scale, rows, [open(count(5)), open(AdmissionRule::All)]))
}

/// Batches of which half of the occurrences are of ids that wait, and stay.
struct HalfPending {
    ids: Ids,
    rows: u64,
    lookup: Lookup,
    plain: Plain,
    out: Vec<f32>,
}

struct Plain {
    dedupe: PlainDedupe,
    index: PlainIndex,
    counts: PlainCounts,
    slots: Vec<u32>,
    table: Vec<[f32; DIM]>,
}

impl HalfPending {
    fn new(scale: Scale) -> Self {
        let rows = scale.pick(10_000_000, 100_000);
        let pending = rows;
        let occurrences = BATCH_IDS * scale.pick(20, 2);
        let known = zipf_ranks(3, occurrences / 2, rows, 1.05);
        let waiting = uniform_ranks(4, occurrences / 2, pending);
        let ranks: Vec<u64> = known.into_iter().zip(waiting).flat_map(|(known, waits)| [known, rows + waits]).collect();
        let table = in_ram(OptimizerKind::Sgd, rows, count((1 << 24) - 1));
        let lookup = Lookup::new(&[table], &[0]).expect("one feature of one table");
        let mut counts = PlainCounts::new(pending as usize);
        let all: Vec<i64> = (rows..rows + pending).map(scattered_id).collect();
        for ids in all.chunks(BATCH_IDS) {
            let plan = lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("ids");
            plan.wait(&mut []).expect("nothing to read");
            plan.begin_update().expect("nobody else trains");
            plan.commit().expect("counted");
            for &id in ids {
                counts.add(id, 1);
            }
        }
        let mut plain = Vec::with_capacity(rows as usize);
        huge_pages(plain.spare_capacity_mut());
        plain.extend((0..rows).map(|_| [0.5; DIM]));
        let present: Vec<i64> = (0..rows).map(scattered_id).collect();
        Self {
            ids: Ids::from_ranks(&ranks, BATCH_IDS, scattered_id),
            rows,
            lookup,
            plain: Plain {
                dedupe: PlainDedupe::new(BATCH_IDS, true),
                index: PlainIndex::new(&present),
                counts,
                slots: vec![0; BATCH_IDS],
                table: plain,
            },
            out: vec![0.0; BATCH_IDS * DIM],
        }
    }
}

impl Plain {
    fn step(&mut self, ids: &[i64], out: &mut [f32]) {
        self.dedupe.dedupe(ids);
        let unique = &self.dedupe.unique[..self.dedupe.found];
        self.index.find(unique, &mut self.slots);
        let mut occurrences = vec![0_u32; unique.len()];
        self.dedupe.inverse.iter().for_each(|&distinct| occurrences[distinct as usize] += 1);
        let inverse = &self.dedupe.inverse;
        for (position, row) in out.as_chunks_mut::<DIM>().0.iter_mut().enumerate() {
            let ahead = self.slots[inverse[(position + 16).min(inverse.len() - 1)] as usize];
            if ahead != u32::MAX {
                let address = self.table.as_ptr().wrapping_add(ahead as usize);
                for line in 0..DIM / 16 {
                    prefetch(address.cast::<f32>().wrapping_add(line * 16));
                }
            }
            let slot = self.slots[inverse[position] as usize];
            *row = if slot == u32::MAX { [0.0; DIM] } else { self.table[slot as usize] };
        }
        for (at, &id) in unique.iter().enumerate() {
            if let Some(&later) = unique.get(at + 16) {
                self.counts.prefetch(later);
            }
            if self.slots[at] == u32::MAX {
                self.counts.add(id, occurrences[at]);
            }
        }
    }
}

impl Rounds for HalfPending {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        for ids in self.ids.batches() {
            let plan = self.lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("ids");
            plan.wait(&mut []).expect("rows in RAM");
            plan.forward_sequence(&mut self.out, &mut [None], 1).expect("a batch's room");
            plan.begin_update().expect("nobody else trains");
            plan.commit().expect("counted");
        }
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for ids in self.ids.batches() {
            self.plain.step(ids, &mut self.out);
        }
        Some(self.ids.values.len() as f64 / begin.elapsed().as_secs_f64())
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }
}
