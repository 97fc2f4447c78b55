//! Measures the processor's share of what moves between a device tier and RAM: distinct ids, where their rows are, victims that leave,
//! rows that arrive, and the commit. The device is memory, whose copies stand for those over a bus.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use embcache::cache::{DeviceRowReader, Lookup, Plan, PlanMode, RowBlock, Table};
use embcache::config::OptimizerKind;
use embcache::io::default_engine;
use embcache::rows::RowHeader;
use embcache::types::CacheSlot;
use embcache_benches::{
    Bench, Better, DIM, Group, Ids, PlainDedupe, PlainIndex, Rounds, Scale, huge_pages, prefetch, scattered_id,
    table_config, zipf_ranks,
};

/// Ids of a batch: 8192 samples of 2.5 ids, as one table of eight has.
const BATCH: usize = 20_480;
/// Rows are prefetched so many ahead.
const ROWS_AHEAD: usize = 8;
const LIMIT: &str =
    "plain dedupe, open addressing, a clock over the device's slots, and the copies in one function, on one thread";

pub(crate) fn group() -> Group {
    let (unit, better, limit) = ("ids/s", Better::Higher, Some(LIMIT));
    Group::Alone(vec![
        Bench { name: "device_moves_zipf105", unit, better, limit, make: |scale| device_moves(scale, 1, 1) },
        Bench { name: "device_moves_two_threads", unit, better, limit, make: |scale| device_moves(scale, 4, 2) },
    ])
}

type Row = [f32; DIM];

/// The weights of an id.
fn row(id: i64) -> Row {
    [(id & 0xffff) as f32; DIM]
}

/// The tensors of a device tier.
struct Memory(Mutex<(Vec<Row>, Vec<f32>)>);

impl Memory {
    fn new(slots: usize) -> Self {
        let weights = vec![[0.0; DIM]; slots];
        huge_pages(&weights);
        Self(Mutex::new((weights, vec![0.0; slots])))
    }

    fn scatter(&self, slots: &[CacheSlot], vectors: &[f32], scalars: &[f32]) {
        let mut tensors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for ((&slot, row), &scalar) in slots.iter().zip(vectors.as_chunks().0).zip(scalars) {
            tensors.0[slot as usize] = *row;
            tensors.1[slot as usize] = scalar;
        }
    }
}

impl DeviceRowReader for Memory {
    fn gather(&self, slots: &[CacheSlot], vectors: &mut [f32], scalars: &mut [f32]) -> embcache::Result<()> {
        let tensors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, ((&slot, row), scalar)) in slots.iter().zip(vectors.as_chunks_mut().0).zip(scalars).enumerate() {
            if let Some(&later) = slots.get(at + ROWS_AHEAD) {
                let row = &raw const tensors.0[later as usize];
                (0..DIM / 16).for_each(|line| prefetch(row.cast::<f32>().wrapping_add(line * 16)));
            }
            *row = tensors.0[slot as usize];
            *scalar = tensors.1[slot as usize];
        }
        Ok(())
    }
}

struct DeviceMoves {
    ids: Ids,
    /// The ids of a batch for each table, one table after the other, and where those of each begin.
    given: Vec<i64>,
    splits: Vec<i64>,
    mode: PlanMode,
    memories: Vec<Arc<Memory>>,
    lookup: Lookup,
    plain: Vec<Plain>,
}

fn device_moves(scale: Scale, tables: usize, threads: usize) -> Box<dyn Rounds> {
    let rows = scale.pick(1_250_000, 50_000);
    let on_device = rows as u32 / scale.pick(10, 5);
    let ids = Ids::from_ranks(&zipf_ranks(3, BATCH * scale.pick(100, 4), rows, 1.05), BATCH, scattered_id);
    let present: Vec<i64> = (0..rows).map(scattered_id).collect();
    let memories: Vec<Arc<Memory>> = (0..tables).map(|_| Arc::new(Memory::new(on_device as usize))).collect();
    let opened: Vec<Table> = memories.iter().map(|memory| table(&present, on_device, memory)).collect();
    let features: Vec<usize> = (0..tables).collect();
    let mut moves = DeviceMoves {
        ids,
        given: Vec::new(),
        splits: (0..=tables).map(|table| (table * BATCH) as i64).collect(),
        mode: PlanMode { threads, ..PlanMode::TRAIN },
        memories,
        lookup: Lookup::new(&opened, &features).expect("one feature of each table"),
        plain: (0..tables).map(|_| Plain::new(&present, on_device)).collect(),
    };
    // The frequent rows are there when the first round begins.
    moves.ours();
    moves.limit();
    Box::new(moves)
}

/// A table that has these ids, and room for `on_device` of them in `memory`.
fn table(present: &[i64], on_device: u32, memory: &Arc<Memory>) -> Table {
    let rows = present.len() as u64;
    let mut config = table_config(OptimizerKind::RowWiseAdagrad, rows + rows / 100);
    config.device_rows = Some(on_device);
    let engine = default_engine().expect("an engine for files, which are not used");
    let reader = Some(Arc::clone(memory) as Arc<dyn DeviceRowReader>);
    let table = Table::open(config, reader, engine).expect("a table in RAM");
    for ids in present.chunks(100_000) {
        let headers: Vec<RowHeader> = ids.iter().map(|&id| RowHeader { id, ..RowHeader::default() }).collect();
        let vectors: Vec<f32> = ids.iter().flat_map(|&id| row(id)).collect();
        table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("rows that fit");
    }
    table
}

impl DeviceMoves {
    /// Give each table these ids.
    fn give(&mut self, number: usize) {
        self.given.clear();
        for _ in &self.memories {
            self.given.extend_from_slice(&self.ids.values[number * BATCH..][..BATCH]);
        }
    }

    fn plan(&self, mode: PlanMode) -> Plan {
        self.lookup.plan(&self.given, &self.splits, mode, &[]).expect("ids of the tables")
    }

    /// Bring the rows of a batch to the device and commit a step of them. Returns how many have moved there.
    fn step(&self) -> usize {
        let plan = self.plan(self.mode);
        let bring = || {
            plan.wait(&mut []).expect("rows in RAM");
            let mut moved = 0;
            for (table, memory) in self.memories.iter().enumerate() {
                let rows = plan.fetched(table, &mut []).expect("rows that arrive");
                memory.scatter(&rows.slots, &rows.vectors.unwrap_or_default(), &rows.scalars);
                moved += rows.slots.len();
            }
            plan.scattered().expect("tables that are open");
            moved
        };
        let moved = plan.exclusively(bring).expect("tables that are open");
        plan.exclusively(|| plan.begin_update().and_then(|()| plan.commit())).and_then(|done| done).expect("a step");
        moved
    }

    fn batches(&self) -> usize {
        self.ids.values.len() / BATCH
    }

    fn rate(&self, begin: Instant) -> f64 {
        (self.ids.values.len() * self.memories.len()) as f64 / begin.elapsed().as_secs_f64()
    }
}

/// A cache of rows on a device, as a plain loop keeps it.
struct Plain {
    dedupe: PlainDedupe,
    index: PlainIndex,
    numbers: Vec<u32>,
    host: Vec<Row>,
    device: Vec<Row>,
    /// For each row its slot on the device, or `NOWHERE`.
    slots: Vec<u32>,
    /// For each slot its row, or `NOWHERE`, and the batch that used it last.
    used: Vec<(u32, u32)>,
    batch: u32,
    hand: usize,
    up: Vec<Row>,
    down: Vec<Row>,
    leaving: Vec<u32>,
    arriving: Vec<(u32, u32)>,
}

const NOWHERE: u32 = u32::MAX;

impl Plain {
    fn new(ids: &[i64], on_device: u32) -> Self {
        let host: Vec<Row> = ids.iter().map(|&id| row(id)).collect();
        let device = vec![[0.0; DIM]; on_device as usize];
        huge_pages(&host);
        huge_pages(&device);
        Self {
            dedupe: PlainDedupe::new(BATCH, false),
            index: PlainIndex::new(ids),
            numbers: vec![0; BATCH],
            host,
            device,
            slots: vec![NOWHERE; ids.len()],
            used: vec![(NOWHERE, 0); on_device as usize],
            batch: 0,
            hand: 0,
            up: Vec::with_capacity(BATCH),
            down: Vec::with_capacity(BATCH),
            leaving: Vec::with_capacity(BATCH),
            arriving: Vec::with_capacity(BATCH),
        }
    }

    fn step(&mut self, ids: &[i64]) {
        self.batch += 1;
        self.dedupe.dedupe(ids);
        let found = self.dedupe.found;
        self.index.get(&self.dedupe.unique[..found], &mut self.numbers);
        let numbers = &self.numbers[..found];
        for &number in numbers {
            if let Some(used) = self.used.get_mut(self.slots[number as usize] as usize) {
                used.1 = self.batch;
            }
        }
        self.arriving.clear();
        self.leaving.clear();
        for &number in numbers {
            if self.slots[number as usize] != NOWHERE {
                continue;
            }
            // The least recent of a few batches leaves: one whose batch is not among the last two.
            while self.used[self.hand].1 + 1 >= self.batch && self.used[self.hand].0 != NOWHERE {
                self.hand = (self.hand + 1) % self.used.len();
            }
            let old = std::mem::replace(&mut self.used[self.hand], (number, self.batch)).0;
            self.arriving.push((number, self.hand as u32));
            self.slots[number as usize] = self.hand as u32;
            self.leaving.push(old);
        }
        self.copy();
    }

    fn copy(&mut self) {
        self.down.clear();
        self.down.extend(self.arriving.iter().map(|&(_, slot)| self.device[slot as usize]));
        self.up.clear();
        self.up.extend(self.arriving.iter().map(|&(number, _)| self.host[number as usize]));
        for (&old, row) in self.leaving.iter().zip(&self.down) {
            if old != NOWHERE {
                self.host[old as usize] = *row;
                self.slots[old as usize] = NOWHERE;
            }
        }
        for (&(_, slot), row) in self.arriving.iter().zip(&self.up) {
            self.device[slot as usize] = *row;
        }
    }
}

impl Rounds for DeviceMoves {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        let mut moved = 0;
        for number in 0..self.batches() {
            self.give(number);
            moved += self.step();
        }
        assert!(moved > 0, "not all rows fit the device");
        self.rate(begin)
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            for plain in &mut self.plain {
                plain.step(batch);
            }
        }
        Some(self.rate(begin))
    }

    fn check(&mut self) {
        for number in 0..2 {
            self.give(number);
            self.step();
            let plan = self.plan(PlanMode::EVALUATE);
            plan.wait(&mut []).and_then(|()| plan.scattered()).expect("rows that are there");
            let batch = &self.ids.values[number * BATCH..][..BATCH];
            for (table, (memory, plain)) in self.memories.iter().zip(&mut self.plain).enumerate() {
                plain.step(batch);
                let slots = plan.slots(table).expect("the rows are in place");
                let tensors = memory.0.lock().unwrap_or_else(PoisonError::into_inner);
                for ((&id, &slot), &number) in batch.iter().zip(&slots).zip(&plain.dedupe.inverse) {
                    let wanted = row(id).map(f32::to_bits);
                    assert_eq!(tensors.0[slot as usize].map(f32::to_bits), wanted, "our rows are there");
                    let slot = plain.slots[plain.numbers[number as usize] as usize];
                    assert_eq!(plain.device[slot as usize].map(f32::to_bits), wanted, "the limit's rows are there");
                }
            }
        }
    }
}
