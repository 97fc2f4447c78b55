use super::*;

#[test]
fn pieces_never_overlap_and_all_space_becomes_free() {
    let pages = 16;
    let mut arena = ReadArena::new(pages * ALIGNMENT).unwrap();
    let mut held: Vec<(usize, usize)> = Vec::new();
    let (mut state, mut refused) = (1_u64, 0);
    for _ in 0..10_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let drawn = (state >> 33) as usize;
        if drawn.is_multiple_of(2) {
            let bytes = 1 + drawn / 2 % (5 * ALIGNMENT);
            match arena.take(bytes) {
                Some(start) => {
                    assert!(start.is_multiple_of(ALIGNMENT) && start + bytes <= pages * ALIGNMENT);
                    assert!(held.iter().all(|(other, len)| start + bytes <= *other || other + len <= start));
                    held.push((start, bytes));
                }
                None => refused += 1,
            }
        } else if !held.is_empty() {
            let (start, _) = held.swap_remove(drawn / 2 % held.len());
            arena.give_back(start);
        }
    }
    assert!(refused > 0);
    held.drain(..).for_each(|(start, _)| arena.give_back(start));
    assert_eq!(arena.take(pages * ALIGNMENT), Some(0));
    assert_eq!(arena.take(1), None);
    arena.clear();
    assert_eq!(arena.take(pages * ALIGNMENT + 1), None);
    assert_eq!(arena.take(1), Some(0));
}
