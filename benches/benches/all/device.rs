//! Measures the processor's share of what moves between a device tier and RAM: distinct ids, where their rows are, victims that leave,
//! rows that arrive, and the commit. The device is memory, whose copies stand for those over a bus.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use embcache::cache::{DeviceRows, Lookup, PlanMode, RowBlock, Table};
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
const LIMIT: &str = "plain dedupe, open addressing, a clock over the device's slots, and the copies in one function";

pub(crate) fn group() -> Group {
    Group::Alone(vec![Bench {
        name: "device_moves_zipf105",
        unit: "ids/s",
        better: Better::Higher,
        limit: Some(LIMIT),
        make: device_moves,
    }])
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

impl DeviceRows for Memory {
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
    memory: Arc<Memory>,
    lookup: Lookup,
    plain: Plain,
}

fn device_moves(scale: Scale) -> Box<dyn Rounds> {
    let rows = scale.pick(1_250_000, 50_000);
    let on_device = rows as u32 / scale.pick(10, 5);
    let ids = Ids::from_ranks(&zipf_ranks(3, BATCH * scale.pick(100, 4), rows, 1.05), BATCH, scattered_id);
    let present: Vec<i64> = (0..rows).map(scattered_id).collect();

    let mut config = table_config(OptimizerKind::RowWiseAdagrad, rows + rows / 100);
    config.device_rows = Some(on_device);
    let memory = Arc::new(Memory::new(on_device as usize));
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, Some(Arc::clone(&memory) as Arc<dyn DeviceRows>), engine).expect("a table in RAM");
    for ids in present.chunks(100_000) {
        let headers: Vec<RowHeader> = ids.iter().map(|&id| RowHeader { id, ..RowHeader::default() }).collect();
        let vectors: Vec<f32> = ids.iter().flat_map(|&id| row(id)).collect();
        table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("rows that fit");
    }
    let lookup = Lookup::new(&[table], &[0]).expect("one feature of one table");
    let mut moves = DeviceMoves { ids, memory, lookup, plain: Plain::new(&present, on_device) };
    // The frequent rows are there when the first round begins.
    moves.ours();
    moves.limit();
    Box::new(moves)
}

/// Bring the rows of a batch to the device and commit a step of them. Returns how many have moved there.
fn step(lookup: &Lookup, memory: &Memory, ids: &[i64]) -> usize {
    let plan = lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN).expect("ids of the table");
    let bring = || {
        plan.wait().expect("rows in RAM");
        let (slots, vectors, scalars) = plan.fetched(0).expect("rows that arrive");
        memory.scatter(&slots, &vectors, &scalars);
        plan.scattered().expect("a table that is open");
        slots.len()
    };
    let moved = plan.exclusively(bring).expect("a table that is open");
    plan.exclusively(|| plan.begin_update().and_then(|()| plan.commit())).and_then(|done| done).expect("a step");
    moved
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
        let moved: usize = self.ids.batches().map(|batch| step(&self.lookup, &self.memory, batch)).sum();
        assert!(moved > 0, "not all rows fit the device");
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for batch in self.ids.batches() {
            self.plain.step(batch);
        }
        Some(self.ids.values.len() as f64 / begin.elapsed().as_secs_f64())
    }

    fn check(&mut self) {
        for batch in self.ids.batches().take(2) {
            step(&self.lookup, &self.memory, batch);
            self.plain.step(batch);
            let plan = self.lookup.plan(batch, &[0, BATCH as i64], PlanMode::EVALUATE).expect("ids of the table");
            plan.wait().and_then(|()| plan.scattered()).expect("rows that are there");
            let slots = plan.slots(0).expect("the rows are in place");
            let tensors = self.memory.0.lock().unwrap_or_else(PoisonError::into_inner);
            for ((&id, &slot), &number) in batch.iter().zip(&slots).zip(&self.plain.dedupe.inverse) {
                assert_eq!(tensors.0[slot as usize].map(f32::to_bits), row(id).map(f32::to_bits), "our rows are there");
                let slot = self.plain.slots[self.plain.numbers[number as usize] as usize];
                assert_eq!(
                    self.plain.device[slot as usize].map(f32::to_bits),
                    row(id).map(f32::to_bits),
                    "the limit's rows are there"
                );
            }
        }
    }
}
