use super::*;

#[test]
fn missing_dir_locks_fail_only_for_changes() {
    let dir = Path::new("/mounted/by/nfs");
    for how in [DirLockPurpose::ToRead, DirLockPurpose::ToRemove, DirLockPurpose::ToOpen] {
        assert_eq!(DirLock::lock_failure(dir, how, Errno::BADF).unwrap().dir(), dir);
    }
    let error = DirLock::lock_failure(dir, DirLockPurpose::ToChange, Errno::BADF).unwrap_err();
    assert_eq!(error.kind(), Kind::Storage);
    assert!(error.to_string().ends_with("save to another file system"), "{error}");
    for how in [DirLockPurpose::ToRead, DirLockPurpose::ToRemove, DirLockPurpose::ToOpen, DirLockPurpose::ToChange] {
        assert_eq!(DirLock::lock_failure(dir, how, Errno::WOULDBLOCK).unwrap_err().kind(), Kind::InUse);
        assert_eq!(DirLock::lock_failure(dir, how, Errno::IO).unwrap_err().errno(), Some(libc::EIO));
    }
}
