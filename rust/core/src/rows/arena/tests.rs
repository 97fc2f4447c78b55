use super::*;
use crate::rows::RowLayout;

impl RowArena {
    /// Bytes of memory in use by the rows: the resident bytes of the mapping, and overflow chunks in full.
    pub(crate) fn resident_bytes(&self) -> usize {
        let chunks = self.chunks.iter().enumerate().filter(|(_, chunk)| !chunk.load(Ordering::Relaxed).is_null());
        self.mapping.resident_bytes() + chunks.map(|(number, _)| self.chunk_bytes(number)).sum::<usize>()
    }
}

fn layout(dim: usize) -> RowLayout {
    RowLayout { dim, vector_slots: 1, scalar_slot: true }
}

/// Writes every float and the id of a row.
fn write(arena: &RowArena, layout: &RowLayout, slot: u32, value: f32) {
    let row = arena.row(slot);
    // SAFETY: the test is the only user of the arena's rows.
    unsafe {
        std::slice::from_raw_parts_mut(row.vector, layout.vector_floats()).fill(value);
        (*row.header).id = i64::from(slot);
    }
}

fn read(arena: &RowArena, layout: &RowLayout, slot: u32) -> (Vec<f32>, i64) {
    let row = arena.row(slot);
    // SAFETY: the test is the only user of the arena's rows, and the slot is valid.
    unsafe { (std::slice::from_raw_parts(row.vector, layout.vector_floats()).to_vec(), (*row.header).id) }
}

#[test]
fn rows_do_not_overlap_and_start_aligned() {
    let layout = layout(3);
    let arena = RowArena::new(layout, 100).expect("the system maps it");
    arena.reserve_overflow(3000).expect("the system maps it");
    assert_eq!(arena.row(0).vector.addr() % 64, 0);
    assert_eq!(arena.row(0).header.addr() % 64, 0);
    for slot in 0..3100 {
        write(&arena, &layout, slot, slot as f32);
    }
    for slot in 0..3100 {
        assert_eq!(read(&arena, &layout, slot), (vec![slot as f32; 6], i64::from(slot)));
    }
}

#[test]
fn overflow_rows_keep_their_address_and_value_while_growing() {
    let layout = layout(16);
    let arena = RowArena::new(layout, 4).expect("the system maps it");
    arena.reserve_overflow(1).expect("the system maps it");
    write(&arena, &layout, 4, 7.0);
    let address = arena.row(4).vector;
    arena.reserve_overflow(100_000).expect("the system maps it");
    assert_eq!(arena.row(4).vector, address);
    assert_eq!(read(&arena, &layout, 4).0, vec![7.0; 32]);
}

#[test]
fn shrinking_releases_whole_chunks_past_the_kept_rows() {
    let layout = layout(4);
    let arena = RowArena::new(layout, 1).expect("the system maps it");
    arena.reserve_overflow(5000).expect("the system maps it");
    write(&arena, &layout, 1, 1.0);
    write(&arena, &layout, 1024, 2.0);
    arena.shrink_overflow(1024);
    assert_eq!(arena.chunks.iter().filter(|chunk| !chunk.load(Ordering::Relaxed).is_null()).count(), 1);
    assert_eq!(read(&arena, &layout, 1024).0[0].to_bits(), 2.0_f32.to_bits());
    arena.shrink_overflow(0);
    assert!(arena.chunks.iter().all(|chunk| chunk.load(Ordering::Relaxed).is_null()));
    arena.reserve_overflow(1).expect("the system maps it");
    assert_eq!(read(&arena, &layout, 1).0[0].to_bits(), 0);
}

#[test]
fn every_overflow_row_of_a_u32_has_a_chunk() {
    let mut expected = 0;
    for chunk in 0..CHUNKS {
        assert_eq!(chunk_of(expected), (chunk, 0));
        expected += FIRST_CHUNK_ROWS << chunk;
        assert_eq!(chunk_of(expected - 1), (chunk, (FIRST_CHUNK_ROWS << chunk) - 1));
    }
    assert!(expected > u32::MAX as usize);
}

#[test]
fn discard_zeroes_whole_pages_and_keeps_the_neighbours() {
    let layout = layout(64);
    let arena = RowArena::new(layout, 1000).expect("the system maps it");
    for slot in 0..1000 {
        write(&arena, &layout, slot, 1.0 + slot as f32);
    }
    arena.discard(101..900);
    for slot in (0..101).chain(900..1000) {
        assert_eq!(read(&arena, &layout, slot), (vec![1.0 + slot as f32; 128], i64::from(slot)));
    }
    assert_eq!(read(&arena, &layout, 500), (vec![0.0; 128], 0));
    arena.discard(900..5000);
    assert_eq!(read(&arena, &layout, 899).0.len(), 128);
}

#[test]
fn a_large_arena_costs_only_the_rows_it_touches() {
    let layout = layout(64);
    // 2 TB of rows.
    let arena = RowArena::new(layout, 4_000_000_000).expect("the system maps it");
    write(&arena, &layout, 3_999_999_999, 5.0);
    assert_eq!(read(&arena, &layout, 3_999_999_999).0, vec![5.0; 128]);
}

#[test]
fn a_failed_mapping_is_a_memory_error_with_its_bytes() {
    let error = RowArena::new(RowLayout { dim: 65_536, vector_slots: 2, scalar_slot: false }, 4_000_000_000)
        .expect_err("must be refused");
    assert_eq!(error.kind(), Kind::Memory);
    assert_eq!(error.errno(), Some(libc::ENOMEM));
    assert!(error.to_string().contains("3145856002097152 bytes"), "{error}");
}

#[test]
fn slots_past_u32_are_refused() {
    let arena = RowArena::new(layout(1), 10).expect("the system maps it");
    assert_eq!(arena.reserve_overflow(u32::MAX - 5).expect_err("must be refused").kind(), Kind::Capacity);
}

#[test]
fn an_empty_arena_still_takes_overflow() {
    let layout = layout(2);
    let arena = RowArena::new(layout, 0).expect("the system maps it");
    arena.reserve_overflow(1).expect("the system maps it");
    write(&arena, &layout, 0, 3.0);
    assert_eq!(read(&arena, &layout, 0).0, vec![3.0; 4]);
}

#[test]
fn rows_in_slots_and_contiguous_rows_are_equal() {
    let layout = RowLayout { dim: 3, vector_slots: 0, scalar_slot: true };
    let arena = RowArena::new(layout, 8).unwrap();
    arena.reserve_overflow(2).unwrap();
    let slots = [7, 0, 9, 3];
    let headers: Vec<RowHeader> = (0..4).map(|id| RowHeader { id, ..RowHeader::default() }).collect();
    let vectors: Vec<f32> = (0..12_u8).map(f32::from).collect();
    for (n, &slot) in slots.iter().enumerate() {
        let row = arena.row(slot);
        // SAFETY: the slot is valid, and no other code uses the arena.
        unsafe {
            row.header.write(headers[n]);
            row.vector.copy_from_nonoverlapping(vectors[n * 3..].as_ptr(), 3);
        }
    }
    // SAFETY: the slots are valid, and no code writes to the arena from here.
    let in_slots = unsafe { RowList::in_slots(&arena, &slots, 3) };
    let block = RowList::block(&headers, &vectors, 3);
    for (one, other) in [(in_slots, block), (in_slots.range(1..3), block.range(1..3))] {
        assert_eq!((one.len(), one.floats()), (other.len(), 3));
        assert!(one.iter().zip(other.iter()).all(|(a, b)| a.header == b.header && a.vector == b.vector));
    }
    assert!(block.range(2..2).is_empty());
}
