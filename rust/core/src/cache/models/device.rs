//! Models of promotion to a device tier and demotion from it. The memory of each slot is a cell whose readers and
//! writers loom tracks: reading a slot before its row has arrived, or writing it before its victim has left, fails the
//! model.

use std::sync::Arc;

use loom::cell::UnsafeCell;

use super::{DIM, Lookup, MemoryEngine, Plan, PlanMode, PreImages, RowChunk, Table, config, model, spawn};
use crate::cache::{BaseCheckpoint, DeviceRowReader};
use crate::config::{OnFull, TableConfig};
use crate::io::IoEngine;
use crate::types::{CacheSlot, Id};

/// The memory of a device, one cell per slot.
struct Device(Vec<UnsafeCell<[f32; DIM]>>);

// SAFETY: loom checks each access to a cell, which is the purpose of the models.
#[allow(unsafe_code)]
unsafe impl Send for Device {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Device {}

#[allow(unsafe_code)]
impl Device {
    fn read(&self, slot: CacheSlot) -> [f32; DIM] {
        // SAFETY: loom fails the model on a concurrent write.
        self.0[slot as usize].with(|row| unsafe { *row })
    }

    fn write(&self, slot: CacheSlot, change: impl FnOnce(&mut [f32; DIM])) {
        // SAFETY: loom fails the model on a concurrent read or write.
        self.0[slot as usize].with_mut(|row| change(unsafe { &mut *row }));
    }
}

impl DeviceRowReader for Device {
    fn gather(&self, slots: &[CacheSlot], vectors: &mut [f32], scalars: &mut [f32]) -> crate::Result<()> {
        scalars.fill(0.0);
        for (&slot, to) in slots.iter().zip(vectors.chunks_exact_mut(DIM)) {
            to.copy_from_slice(&self.read(slot));
        }
        Ok(())
    }
}

/// A table with two device slots, which contain rows 1 and 2, and without an SSD tier.
fn table() -> (Table, Arc<Lookup>, Arc<Device>) {
    // Slots beyond the budget are for batches that do not fit.
    let device = Arc::new(Device((0..6).map(|_| UnsafeCell::new([f32::NAN; DIM])).collect()));
    let wanted = TableConfig { device_rows: Some(2), ssd: None, on_full: OnFull::Error, ..config() };
    let reader = Arc::clone(&device) as Arc<dyn DeviceRowReader>;
    let table = Table::open(wanted, Some(reader), Arc::new(MemoryEngine::default())).unwrap();
    let lookup = Arc::new(Lookup::new(std::slice::from_ref(&table), &[0]).unwrap());
    for id in [1, 2] {
        train(&lookup, &device, id);
    }
    (table, lookup, device)
}

/// Promotes a row to the device from a caller's buffer, as Python does.
fn place(lookup: &Lookup, device: &Device, id: Id) -> Plan {
    let plan = lookup.plan(&[id], &[0, 1], PlanMode::TRAIN, &[]).unwrap();
    plan.wait_for_reads().unwrap();
    let mut buffer = [f32::NAN; DIM];
    plan.wait(&mut [Some(&mut buffer)]).unwrap();
    let fetched = plan.fetched(0, &mut buffer).unwrap();
    assert!(fetched.vectors.is_none(), "the row is in the memory that was lent");
    for (&slot, vector) in fetched.slots.iter().zip(buffer.chunks_exact(DIM)) {
        device.write(slot, |row| row.copy_from_slice(vector));
    }
    plan.scattered().unwrap();
    plan
}

/// Runs a step that adds 1 to each weight of a row.
fn train(lookup: &Lookup, device: &Device, id: Id) {
    update(&place(lookup, device, id), device);
}

/// Runs the update of a step whose row is in its slot.
fn update(plan: &Plan, device: &Device) {
    plan.exclusively(|| {
        plan.begin_update().unwrap();
        device.write(plan.slots(0).unwrap()[0], |row| row.iter_mut().for_each(|weight| *weight += 1.0));
        plan.commit().unwrap();
    })
    .unwrap();
}

/// Checks that each row was trained as often as its weights show, and that no row is pinned.
fn at_rest(table: &Table, expected: &[(Id, u32)]) {
    for &(id, steps) in expected {
        let row = table.read_rows(&[id]).unwrap();
        let weights = [f64::from(steps) as f32; DIM].map(f32::to_bits);
        assert_eq!(
            (row.headers[0].count, row.vectors.iter().map(|weight| weight.to_bits()).collect()),
            (steps, weights.to_vec())
        );
    }
    assert_eq!(table.stats().unwrap().pinned_rows, 0, "a pin was not returned");
}

/// One plan evicts a row from the device while another one requires that row: it stays, or is demoted and promoted
/// again.
#[test]
fn loom_row_that_two_plans_move_is_intact() {
    model(|| {
        let (table, lookup, device) = table();
        let other = {
            let (lookup, device) = (Arc::clone(&lookup), Arc::clone(&device));
            spawn(move || train(&lookup, &device, 1))
        };
        train(&lookup, &device, 3);
        other.join().unwrap();
        at_rest(&table, &[(1, 2), (2, 1), (3, 1)]);
    });
}

/// Rows are read while they leave the device, while others arrive and while they are trained: each read is consistent.
#[test]
fn loom_rows_read_during_moves_and_steps_are_intact() {
    model(|| {
        let (table, lookup, device) = table();
        let reading = {
            let table = table.clone();
            spawn(move || {
                let read = table.read_rows(&[1]).unwrap();
                let (steps, weight) = (read.headers[0].count, read.vectors[0]);
                assert!((steps, weight) == (1, 1.0) || (steps, weight) == (2, 2.0), "{steps} steps give {weight}");
            })
        };
        train(&lookup, &device, 3);
        train(&lookup, &device, 1);
        reading.join().unwrap();
        at_rest(&table, &[(1, 2), (2, 1), (3, 1)]);
    });
}

/// A row has arrived for a plan that is trained later. Another plan moves and trains rows concurrently, and that row
/// stays.
#[test]
fn loom_prefetched_row_is_there_for_its_step() {
    model(|| {
        let (table, lookup, device) = table();
        let ahead = place(&lookup, &device, 3);
        let other = {
            let (lookup, device) = (Arc::clone(&lookup), Arc::clone(&device));
            spawn(move || train(&lookup, &device, 4))
        };
        update(&ahead, &device);
        other.join().unwrap();
        at_rest(&table, &[(1, 1), (2, 1), (3, 1), (4, 1)]);
    });
}

/// A plan is dropped after its rows have got slots, while another plan requires the same row.
#[test]
fn loom_dropped_plan_leaves_its_arriving_row_to_another() {
    model(|| {
        let (table, lookup, device) = table();
        let dropped = lookup.plan(&[3], &[0, 1], PlanMode::TRAIN, &[]).unwrap();
        let other = {
            let (lookup, device) = (Arc::clone(&lookup), Arc::clone(&device));
            spawn(move || train(&lookup, &device, 3))
        };
        dropped.wait(&mut []).unwrap();
        drop(dropped);
        other.join().unwrap();
        at_rest(&table, &[(1, 1), (2, 1), (3, 1)]);
    });
}

/// Returns the ids of a save while a row leaves the device for another one. Rows 1 and 2 are present, and both were
/// trained since the base checkpoint of the delta. Row 1 is trained after the save has started, so that a copy of it is
/// kept.
fn saved_while_a_row_leaves(is_delta: bool) -> Vec<Id> {
    let (table, lookup, device) = table();
    let parent = BaseCheckpoint { name: "c".into(), manifest_xxh3: 0, next_epoch: 1 };
    table.set_epoch(1).unwrap();
    table.saved_as(parent.clone()).unwrap();
    train(&lookup, &device, 1);
    train(&lookup, &device, 2);
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let images = Arc::new(PreImages::new(engine, "/save/images".into(), 1 << 20, 1));
    let snapshot = if is_delta { table.snapshot_of_changes(&images, 2, &parent) } else { table.snapshot(&images, 2) };
    train(&lookup, &device, 1);
    let other = {
        let (lookup, device) = (Arc::clone(&lookup), Arc::clone(&device));
        spawn(move || train(&lookup, &device, 3))
    };
    let mut ids = Vec::new();
    let mut sink = |chunk: RowChunk| {
        ids.extend(chunk.headers.iter().map(|header| header.id));
        Ok(())
    };
    snapshot.unwrap().for_each_chunk(4, &mut sink).unwrap();
    other.join().unwrap();
    ids.sort_unstable();
    ids
}

#[test]
fn loom_save_during_a_demotion_has_every_row() {
    model(|| assert_eq!(saved_while_a_row_leaves(false), [1, 2]));
}

#[test]
fn loom_delta_during_a_demotion_has_every_row() {
    model(|| assert_eq!(saved_while_a_row_leaves(true), [1, 2]));
}
