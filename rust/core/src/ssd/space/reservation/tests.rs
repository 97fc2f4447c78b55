use super::*;

#[test]
fn reusable_file_that_cannot_be_removed_keeps_its_bytes() {
    let space = SpaceTracker::new(10 << 12, 1 << 12);
    space.reserve(7 << 12).unwrap();
    for name in ["a", "b", "c"] {
        let kept = space.remove_or_reuse(
            Path::new(name),
            1 << 12,
            || true,
            || unreachable!("a file of a whole segment is kept"),
        );
        assert!(kept);
    }
    let mut removed = false;
    let linked = || {
        removed = true;
        Ok(())
    };
    assert!(space.remove_or_reuse(Path::new("linked"), 1 << 12, || false, linked) && removed);
    assert!(space.remove_reusable_files(Some(0), |_| unreachable!("nothing is in the way")));
    assert_eq!(space.free_bytes(), 3 << 12, "kept files count as free");
    let refused = || Error::io("remove", Path::new("c"), &std::io::Error::from_raw_os_error(libc::EPERM));
    assert!(space.remove_reusable_files(Some(1 << 12), |path| if path == Path::new("c") {
        Err(refused())
    } else {
        Ok(())
    }));
    assert_eq!(space.free_bytes(), 2 << 12, "c is still there");
    assert_eq!(space.removal_error().and_then(|error| error.errno()), Some(libc::EPERM));
    assert!(!space.remove_reusable_files(Some(3 << 12), |_| Err(refused())), "nothing makes room for as much");
    assert_eq!(
        (space.free_bytes(), space.pending_free_bytes(7 << 12)),
        (1 << 12, 0),
        "nobody will let go of what is lost"
    );
}
