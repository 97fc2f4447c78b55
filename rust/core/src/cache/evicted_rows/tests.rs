use super::*;
use crate::types::Id;

fn part(step: u64, reason: &'static str, ids: std::ops::Range<Id>) -> EvictedRows {
    let vectors = ids.clone().flat_map(|id| [id as f32, -(id as f32)]).collect();
    let headers = ids.map(|id| RowHeader { id, ..RowHeader::default() }).collect();
    EvictedRows { step, reason, rows: RowChunk { headers, vectors } }
}

fn said(chunk: &EvictedRows) -> (u64, &'static str, Vec<Id>) {
    let ids: Vec<Id> = chunk.rows.headers.iter().map(|header| header.id).collect();
    let vectors: Vec<f32> = ids.iter().flat_map(|&id| [id as f32, -(id as f32)]).collect();
    assert_eq!(chunk.rows.vectors, vectors);
    (chunk.step, chunk.reason, ids)
}

#[test]
fn rows_of_one_step_and_reason_form_one_bounded_chunk() {
    let queue = EvictedQueue::new(2);
    for rows in [part(1, "ttl", 0..3), part(1, "full", 3..5), part(1, "ttl", 5..6), part(2, "ttl", 6..7)] {
        queue.push(rows);
    }
    queue.push(part(1, "ttl", 0..0));
    assert_eq!(queue.rows(), 7);
    let chunks: Vec<_> = std::iter::from_fn(|| queue.take()).map(|chunk| said(&chunk)).collect();
    assert_eq!(chunks, [(1, "ttl", vec![0, 1, 2, 5]), (1, "full", vec![3, 4]), (2, "ttl", vec![6])]);
    let many = MOST_ROWS as Id;
    queue.push(part(3, "ttl", 0..many - 1));
    queue.push(part(3, "ttl", many - 1..many + 3));
    let sizes: Vec<usize> = std::iter::from_fn(|| queue.take()).map(|chunk| said(&chunk).2.len()).collect();
    assert_eq!((sizes, queue.rows()), (vec![MOST_ROWS, 3], 0));
    assert_eq!(EvictedQueue::new(MOST_BYTES).rows_of_chunk(), 1);
}

#[test]
fn each_chunk_has_the_rows_like_the_first_ones() {
    const MOST: usize = 5;
    let (mut random, mut next) = (7_u64, 0);
    let mut dice = |sides: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % sides
    };
    let (mut waiting, mut rows) = (EvictedBacklog::default(), Vec::<(u64, &'static str, Id)>::new());
    for round in 0..20_000 {
        if dice(if round < 15_000 { 3 } else { 12 }) < 2 {
            let kind = (dice(3), ["ttl", "full"][dice(2) as usize]);
            let most = if dice(9) == 0 { 30 } else { 4 };
            let ids = next..next + 1 + dice(most) as Id;
            next = ids.end;
            rows.extend(ids.clone().map(|id| (kind.0, kind.1, id)));
            waiting.add(part(kind.0, kind.1, ids), 2, MOST);
            continue;
        }
        let is_like = |row: &&(u64, &'static str, Id)| (row.0, row.1) == (rows[0].0, rows[0].1);
        let expected: Vec<Id> = rows.iter().filter(is_like).take(MOST).map(|row| row.2).collect();
        let first = rows.first().map(|row| (row.0, row.1, expected.clone()));
        assert_eq!(waiting.take().map(|chunk| said(&join_parts(chunk, 2))), first, "round {round}");
        rows.retain(|row| !expected.contains(&row.2));
        assert_eq!(waiting.rows, rows.len());
        assert!(waiting.newest.len() <= waiting.chunks.len());
    }
}

#[test]
fn taking_a_chunk_moves_no_other() {
    let queue = EvictedQueue::new(2);
    for step in 0..1000 {
        for (reason, id) in [("full", 0), ("ttl", 1), ("full", 2)] {
            queue.push(part(step, reason, id..id + 1));
        }
    }
    let places = || lock(&queue.waiting).chunks.iter().map(std::ptr::from_ref).collect::<Vec<*const EvictedChunk>>();
    let (mut chunks, mut moved) = (0, 0);
    let mut before = places();
    while let Some(chunk) = queue.take() {
        assert_eq!(said(&chunk).2, if chunk.reason == "full" { vec![0, 2] } else { vec![1] });
        chunks += 1;
        let after = places();
        moved += before[1..].iter().zip(&after).filter(|(before, after)| before != after).count();
        before = after;
    }
    assert_eq!((chunks, moved, queue.rows()), (2000, 0, 0));
}

#[test]
fn resumed_queue_reports_waiting_threads() {
    let queue = EvictedQueue::new(2);
    queue.end();
    queue.push(part(1, "ttl", 0..1));
    assert!(queue.wait().is_some());
    assert!(!queue.reopen(), "whoever took the row goes on");
    assert!(!queue.is_ended());
    queue.end();
    assert!(queue.wait().is_none());
    assert!(queue.reopen());
    assert!(!queue.reopen(), "the one that came in its place");
}

#[test]
fn waiting_threads_get_rows_unless_the_queue_is_held() {
    let queue = EvictedQueue::new(2);
    assert!(!queue.is_full());
    queue.pause();
    queue.push(part(1, "ttl", 0..3));
    assert!(queue.is_full());
    std::thread::scope(|scope| {
        let taker = scope.spawn(|| std::iter::from_fn(|| queue.wait()).map(|chunk| said(&chunk)).collect::<Vec<_>>());
        assert_eq!(queue.rows(), 3, "held");
        queue.resume();
        queue.push(part(2, "ttl", 3..4));
        queue.pause();
        queue.push(part(3, "ttl", 4..5));
        queue.end();
        queue.pause();
        let all: Vec<Id> = taker.join().unwrap().into_iter().flat_map(|(_, _, ids)| ids).collect();
        assert_eq!(all, [0, 1, 2, 3, 4]);
    });
    assert!(queue.wait().is_none());
    queue.push(part(1, "ttl", 0..(MOST_CHUNKS * MOST_ROWS) as Id));
    assert!(queue.is_full());
    queue.take();
    assert!(!queue.is_full());
}
