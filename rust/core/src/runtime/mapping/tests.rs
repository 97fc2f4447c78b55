use super::*;

impl AnonymousMapping {
    /// Number of resident bytes of the mapping.
    pub(crate) fn resident_bytes(&self) -> usize {
        let mut pages = vec![0_u8; self.bytes / page_bytes()];
        // SAFETY: the range is this mapping, and `pages` has a byte for each of its pages.
        let asked = unsafe { libc::mincore(self.start.cast(), self.bytes, pages.as_mut_ptr().cast()) };
        assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes()
    }
}

#[test]
fn zeros_cost_memory_once_they_are_written() {
    let resident = |zeros: &ZeroedSlice<u64>| zeros.mapping.as_ref().map_or(0, AnonymousMapping::resident_bytes);
    let mut zeros = ZeroedSlice::<u64>::new("count", 3 << 20).expect("memory");
    assert_eq!(resident(&zeros), 0);
    (zeros[0], zeros[(3 << 20) - 1]) = (7, 8);
    assert_eq!((zeros.len(), zeros[0], zeros[1], zeros.last()), (3 << 20, 7, 0, Some(&8)));
    assert!(resident(&zeros) <= 2 * HUGE_PAGE_BYTES);
}

#[test]
fn what_memory_holds_stays_when_huge_pages_are_asked_for_beside_it() {
    let mut all: Vec<u64> = Vec::with_capacity(3 << 20);
    all.extend(0..1000);
    ask_for_huge_pages(all.spare_capacity_mut());
    ask_for_huge_pages::<u64>(&mut []);
    all.extend(1000..3 << 20);
    assert!((0..3 << 20).eq(all));
}

#[test]
fn no_system_has_memory_without_end() {
    for len in [1 << 56, 1 << 61, usize::MAX] {
        let refused = ZeroedSlice::<u64>::new("count ids", len).expect_err("more than there is");
        assert!(refused.to_string().contains("count ids"), "{refused}");
    }
}
