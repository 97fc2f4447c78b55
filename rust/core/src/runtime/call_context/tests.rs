use super::*;

#[test]
fn thread_running_for_another_has_its_context_until_done() {
    let mine = CallContext::current();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let own = CallContext::current();
            assert_ne!(own, mine);
            mine.run(|| assert_eq!(CallContext::current(), mine));
            assert_eq!(CallContext::current(), own);
        });
    });
}

#[test]
fn each_of_several_readers_is_known_as_long_as_it_runs_foreign_code() {
    let foreign = ForeignReaders::default();
    let mine = foreign.begin();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(!foreign.is_calling());
            let theirs = foreign.begin();
            assert!(foreign.is_calling());
            drop(theirs);
            assert!(!foreign.is_calling());
        });
    });
    assert!(foreign.is_calling(), "another reader has come and gone");
    let again = foreign.begin();
    drop(mine);
    assert!(foreign.is_calling());
    drop(again);
    assert!(!foreign.is_calling());
}

#[test]
fn foreign_code_calls_only_from_its_thread_until_it_returns() {
    let foreign = ForeignCode::default();
    assert!(!foreign.is_calling());
    let running = foreign.begin();
    assert!(foreign.is_calling());
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(!foreign.is_calling()));
    });
    drop(running);
    assert!(!foreign.is_calling());
}
