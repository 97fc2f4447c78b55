//! Locks on directories between processes, and engines after a fork.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use embcache::Kind;
use embcache::io::{
    DirLock, DirLockPurpose, IoEngine, IoOpenMode, IoReadRequest, MemoryEngine, PsyncEngine, UringEngine,
    default_engine, write_atomically,
};

const HELD_DIR: &str = "EMBCACHE_TEST_HELD_DIR";

/// The other process of the test below, which locks a directory until it is killed. Without the variable it does
/// nothing.
#[test]
fn other_process() {
    let Some(dir) = std::env::var_os(HELD_DIR) else { return };
    let _held = DirLock::acquire(Path::new(&dir)).unwrap();
    eprintln!("held");
    loop {
        std::thread::park();
    }
}

#[test]
fn locked_directory_is_in_use_by_pid_until_kill() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "io::other_process", "--nocapture"])
        .env(HELD_DIR, dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(other.stderr.take().unwrap()).lines().any(|line| line.unwrap() == "held");
    assert!(said);
    let error = DirLock::acquire(dir.path()).unwrap_err();
    assert_eq!(error.kind(), Kind::InUse);
    assert!(error.to_string().contains(&format!("pid {}", other.id())), "{error}");
    other.kill().unwrap();
    other.wait().unwrap();
    DirLock::acquire(dir.path()).unwrap();
}

#[test]
fn a_directory_given_up_is_free_although_a_forked_child_lives() {
    let dir = tempfile::tempdir().unwrap();
    let held =
        (DirLock::acquire(dir.path()).unwrap(), DirLock::acquire_for(dir.path(), DirLockPurpose::ToOpen).unwrap());
    // SAFETY: the child only waits until it is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: pause only waits for a signal.
            unsafe { libc::pause() };
        }
    }
    assert_eq!(DirLock::acquire(dir.path()).unwrap_err().kind(), Kind::InUse);
    assert_eq!(DirLock::acquire_for(dir.path(), DirLockPurpose::ToOpen).unwrap_err().kind(), Kind::InUse);
    drop(held);
    let again = (DirLock::acquire(dir.path()), DirLock::acquire_for(dir.path(), DirLockPurpose::ToOpen));
    // SAFETY: `child` is a child of this process, which has not waited for it yet.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    again.0.unwrap();
    again.1.unwrap();
}

#[test]
fn forked_child_holds_no_directory_lock_of_parent() {
    // A process forks a child and exits, while it holds directory locks of both kinds.
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut from, mut to) = std::io::pipe().unwrap();
    // SAFETY: the child only calls the code below, and exits by _exit.
    let parent = unsafe { libc::fork() };
    if parent == 0 {
        let held = (
            DirLock::acquire(one.path()).unwrap(),
            DirLock::acquire_for(two.path(), DirLockPurpose::ToRemove).unwrap(),
        );
        // SAFETY: this child only writes its pid and waits until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // This process has released the directories at this point.
            std::io::Write::write_all(&mut to, &std::process::id().to_le_bytes()).unwrap();
            loop {
                // SAFETY: pause only waits for a signal.
                unsafe { libc::pause() };
            }
        }
        std::mem::forget(held);
        // SAFETY: _exit terminates this process, which has nothing left to do.
        unsafe { libc::_exit(0) };
    }
    let mut child = [0; 4];
    std::io::Read::read_exact(&mut from, &mut child).unwrap();
    // SAFETY: `parent` is a child of this process, and the call writes nowhere.
    unsafe { libc::waitpid(parent, std::ptr::null_mut(), 0) };
    let again = (DirLock::acquire(one.path()), DirLock::acquire_for(two.path(), DirLockPurpose::ToRead));
    // SAFETY: this kills the process whose pid came through the pipe. No other process needs it.
    unsafe { libc::kill(i32::from_le_bytes(child), libc::SIGKILL) };
    again.0.unwrap();
    again.1.unwrap();
}

#[test]
fn readers_hold_a_directory_together_and_who_removes_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let memory: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    memory.create_dir_all(dir.path()).unwrap();
    for engine in [Arc::new(PsyncEngine::default()) as Arc<dyn IoEngine>, memory] {
        let hold = |how| engine.lock_dir_for(dir.path(), how);
        let (one, two) = (hold(DirLockPurpose::ToRead).unwrap(), hold(DirLockPurpose::ToRead).unwrap());
        assert_eq!(hold(DirLockPurpose::ToRemove).unwrap_err().kind(), Kind::InUse);
        // Writers lock the directory separately, which is independent of this lock.
        drop(engine.lock_dir(dir.path()).unwrap());
        drop(one);
        assert_eq!(hold(DirLockPurpose::ToRemove).unwrap_err().kind(), Kind::InUse);
        drop(two);
        let alone = hold(DirLockPurpose::ToRemove).unwrap();
        assert_eq!(hold(DirLockPurpose::ToRemove).unwrap_err().kind(), Kind::InUse);
        assert_eq!(hold(DirLockPurpose::ToRead).unwrap_err().kind(), Kind::InUse);
        assert_eq!(hold(DirLockPurpose::ToOpen).unwrap_err().kind(), Kind::InUse);
        drop(alone);
        let open = hold(DirLockPurpose::ToOpen).unwrap();
        for how in [DirLockPurpose::ToRead, DirLockPurpose::ToRemove, DirLockPurpose::ToOpen] {
            assert_eq!(hold(how).unwrap_err().kind(), Kind::InUse);
        }
        drop(open);
        hold(DirLockPurpose::ToRead).unwrap();
    }
}

#[test]
fn a_lock_file_that_is_a_symbolic_link_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("precious"), "data").unwrap();
    std::os::unix::fs::symlink(dir.path().join("precious"), dir.path().join("lock")).unwrap();
    assert_eq!(DirLock::acquire(dir.path()).unwrap_err().kind(), Kind::Path);
    assert_eq!(std::fs::read(dir.path().join("precious")).unwrap(), b"data");
}

/// Runs `child` in a fork. Returns its exit code.
fn forked(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child only accesses inherited state and exits by _exit, without destructors or the test harness.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: _exit terminates this process without the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: `pid` is a child of this process, and `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child was killed");
    libc::WEXITSTATUS(status)
}

#[test]
fn engine_of_parent_returns_state_error_after_fork() {
    let mut engines: Vec<Arc<dyn IoEngine>> = vec![Arc::new(PsyncEngine::default())];
    if let Ok(engine) = UringEngine::new(true) {
        engines.push(Arc::new(engine));
    }
    for engine in engines {
        let dir = tempfile::tempdir().unwrap();
        write_atomically(&*engine, &dir.path().join("a"), &[7; 5000]).unwrap();
        let file = engine.open(&dir.path().join("a"), IoOpenMode::Read).unwrap();
        let reads = vec![IoReadRequest { file: file.clone(), offset: 1, len: 300 }; 40];
        let count_of = |kind: Option<Kind>| {
            let mut count = 0;
            engine
                .read_batch(&reads, &mut |_, outcome, _| count += usize::from(outcome.err().map(|e| e.kind()) == kind));
            count
        };
        // The pool's threads and the rings exist before the fork.
        assert_eq!(count_of(None), 40);
        let code = forked(|| {
            count_of(Some(Kind::State)) == 40
                && engine.open(&dir.path().join("a"), IoOpenMode::Read).is_err_and(|e| e.kind() == Kind::State)
                && file.read_at(0, &mut [0]).is_err_and(|e| e.kind() == Kind::State)
        });
        assert_eq!(code, 0, "{}", engine.name());
        assert_eq!(count_of(None), 40, "the parent goes on");
    }
}

#[test]
fn a_forked_child_gets_a_default_engine_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let parents = default_engine().unwrap();
    write_atomically(&*parents, &dir.path().join("a"), b"x").unwrap();
    let code = forked(|| {
        let own = default_engine().unwrap();
        let file = own.open(&dir.path().join("a"), IoOpenMode::Read).unwrap();
        let mut found = 0;
        own.read_batch(&[IoReadRequest { file, offset: 0, len: 1 }], &mut |_, outcome, _| {
            found += usize::from(outcome.is_ok_and(|data| data == b"x"));
        });
        !Arc::ptr_eq(&own, &parents) && found == 1
    });
    assert_eq!(code, 0);
}
