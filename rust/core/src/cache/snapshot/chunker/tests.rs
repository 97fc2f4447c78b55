use super::*;
use crate::rows::RowHeader;

const FLOATS: usize = 3;

fn rows(count: usize) -> (Vec<RowHeader>, Vec<f32>) {
    let headers: Vec<RowHeader> = (0..count).map(|id| RowHeader { id: id as Id, ..RowHeader::default() }).collect();
    let vectors = headers.iter().flat_map(|header| [header.id as f32; FLOATS]).collect();
    (headers, vectors)
}

/// Returns the ids of the chunks, after checking each against its vector part.
fn ids(chunks: &[RowChunk]) -> Vec<Vec<Id>> {
    for chunk in chunks {
        assert!(chunk.headers.iter().enumerate().all(|(at, header)| {
            let row = chunk.row(at, FLOATS);
            row.header.id == header.id && row.vector == [header.id as f32; FLOATS]
        }));
    }
    chunks.iter().map(|chunk| chunk.headers.iter().map(|header| header.id).collect()).collect()
}

#[test]
fn chunker_passes_each_row_once_in_chunks_of_the_requested_size() {
    for (count, most, chunks) in
        [(0, 4, vec![]), (3, 4, vec![3]), (4, 4, vec![4]), (9, 4, vec![4, 4, 1]), (2, 1, vec![1, 1])]
    {
        let (headers, vectors) = rows(count);
        let mut taken = Vec::new();
        let mut sink = |chunk| {
            taken.push(chunk);
            Ok(())
        };
        let mut chunker = RowChunker::new(most, &mut sink);
        RowList::block(&headers, &vectors, FLOATS).iter().for_each(|row| chunker.push(row).expect("taken"));
        assert_eq!(chunker.finish().expect("taken"), count as u64);
        let found = ids(&taken);
        assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), chunks, "{count} rows, {most} at a time");
        assert!(found.into_iter().flatten().eq(0..count as Id));
    }
}

#[test]
fn lent_rows_are_passed_on_when_no_lock_is_held() {
    let (headers, vectors) = rows(5);
    let lent = RowList::block(&headers, &vectors, FLOATS);
    let taken = std::cell::RefCell::new(Vec::new());
    let mut sink = |chunk| {
        taken.borrow_mut().push(chunk);
        Ok(())
    };
    let mut chunks = ChunkConsumer::new(3, &mut sink);
    assert_eq!(chunks.wait_for_space().expect("no chunk yet"), 3);
    chunks.lend(lent.range(0..3)).expect("copied");
    assert!(taken.borrow().is_empty(), "the locks are held");
    assert_eq!(chunks.wait_for_space().expect("taken"), 3);
    assert_eq!(ids(&taken.borrow()), [vec![0, 1, 2]]);
    chunks.lend(lent.range(3..5)).expect("copied");
    chunks.wait_for_space().expect("taken");
    chunks.wait_for_space().expect("nothing to take");
    assert_eq!(ids(&taken.borrow()), [vec![0, 1, 2], vec![3, 4]]);
}
