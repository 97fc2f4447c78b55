use super::*;

#[test]
fn a_page_is_resident_for_two_generations_and_longer_if_used() {
    let pages = ResidentPages::new(1 << 20, &(0..1 << 20), false);
    assert!(!pages.are_resident(5000, 8, 0));
    pages.mark_resident(4090, 10, 0);
    assert!(pages.are_resident(4090, 10, 0) && pages.are_resident(0, 1, 0) && !pages.are_resident(8192, 1, 0));
    pages.begin_generation(1);
    assert!(pages.are_resident(0, 1, 1), "it was seen in the generation before");
    pages.begin_generation(2);
    assert!(pages.are_resident(0, 1, 2), "it was used in the generation before");
    assert!(!pages.are_resident(4096, 1, 2), "it was not used");
    pages.begin_generation(3);
    pages.begin_generation(4);
    assert!(!pages.are_resident(0, 1, 4));
}

#[test]
fn bytes_that_cannot_leave_memory_are_always_resident() {
    let pages = ResidentPages::new(100, &(0..100), true);
    assert!(pages.are_resident(0, 100, 7) && pages.have_all_weights(7));
}

#[test]
fn all_weights_are_resident_once_each_of_their_pages_was_seen() {
    const PAGE: usize = 1 << PAGE_BITS;
    for (first, last) in [(0, 0), (3, 5), (0, 63), (60, 70), (64, 127), (10, 199), (1, 128)] {
        let pages = ResidentPages::new(200 * PAGE, &(first * PAGE + 7..last * PAGE + 9), false);
        for page in (first..=last).rev() {
            assert!(!pages.have_all_weights(0), "page {page} of {first} to {last} was not seen");
            pages.mark_resident(page * PAGE, 8, 0);
        }
        assert!(pages.have_all_weights(0) && !pages.have_all_weights(1));
        pages.begin_generation(1);
        assert!(!pages.have_all_weights(1));
        assert!(
            (first..=last).all(|page| pages.are_resident(page * PAGE, 8, 1)),
            "they were seen in the generation before"
        );
        assert!(pages.have_all_weights(1));
        pages.begin_generation(2);
        assert!(!pages.have_all_weights(2));
    }
}
