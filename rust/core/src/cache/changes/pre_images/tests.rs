use std::path::Path;

use super::*;
use crate::io::MemoryEngine;

#[test]
fn without_a_writer_thread_copiers_write_each_block_once() {
    const ROWS: i64 = 3000;
    let layout = RowLayout { dim: 16, vector_slots: 0, scalar_slot: false };
    let engine = MemoryEngine::default();
    engine.create_dir_all(Path::new("/made")).unwrap();
    let images = PreImages::new(Arc::new(engine), "/made/images".into(), 16 * ALIGNMENT, 4);
    lock(&images.shared.state).has_writer = Some(false);
    let tables: Vec<usize> = (0..4).map(|_| images.add(&layout)).collect();
    std::thread::scope(|scope| {
        for &table in &tables {
            let images = &images;
            scope.spawn(move || {
                for id in 0..ROWS {
                    let header = RowHeader { id, ..RowHeader::default() };
                    images.writer(table).copy_row(&header, |to| to.fill((id * 4 + table as i64) as f32));
                }
            });
        }
    });
    assert!(images.file_bytes() > 0);
    for table in tables {
        let mut ids = Vec::new();
        while let Some(chunk) = images.take(table).unwrap() {
            for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(16)) {
                assert_eq!(vector, [(header.id * 4 + table as i64) as f32; 16]);
                ids.push(header.id);
            }
        }
        ids.sort_unstable();
        assert!(ids.into_iter().eq(0..ROWS), "table {table}");
    }
}
