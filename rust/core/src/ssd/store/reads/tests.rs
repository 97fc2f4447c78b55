use super::*;

#[test]
fn failed_fetch_wakes_its_waiter() {
    let fetch = Arc::new(RowFetch::default());
    let waiter = std::thread::spawn({
        let fetch = fetch.clone();
        move || fetch.wait()
    });
    fetch.finish(Err(Kind::State.error("gone")));
    assert_eq!(waiter.join().unwrap().unwrap_err().kind(), Kind::State);
    fetch.finish(Ok(vec![]));
    assert!(fetch.wait().is_err(), "the first outcome stays");
}
