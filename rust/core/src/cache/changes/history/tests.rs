use super::*;

fn base(next_epoch: u32) -> BaseCheckpoint {
    BaseCheckpoint { name: format!("c{next_epoch}"), manifest_xxh3: u64::from(next_epoch) << 40, next_epoch }
}

#[test]
fn tombstones_are_known_since_each_of_the_last_checkpoints() {
    let mut history = CheckpointHistory::new(1 << 10);
    history.record_tombstones(0, &[1, 2]);
    assert_eq!((history.bytes(), history.tombstones_since(&base(1))), (0, None), "nothing is asked for");
    for epoch in 1..=5 {
        history.saved_as(base(epoch));
        history.record_tombstones(epoch, &[10, i64::from(epoch)]);
        history.record_tombstones(epoch, &[-i64::from(epoch)]);
    }
    assert_eq!(history.tombstones_since(&base(1)), None, "too long ago");
    assert_eq!(history.tombstones_since(&base(4)), Some(vec![-5, -4, 4, 5, 10]));
    assert_eq!(history.tombstones_since(&base(5)), Some(vec![-5, 5, 10]));
    assert_eq!(history.tombstones_since(&BaseCheckpoint { manifest_xxh3: 1, ..base(5) }), None, "another's");
    assert_eq!(history.bytes(), 12 * 8, "those of epoch 1 are forgotten");
    history.forget();
    assert_eq!((history.bytes(), history.tombstones_since(&base(5))), (0, None));
}

#[test]
fn too_many_tombstones_drop_the_oldest_checkpoints_and_then_all() {
    let mut history = CheckpointHistory::new(10 * 8);
    history.saved_as(base(1));
    history.record_tombstones(1, &[0, 1, 2, 3, 4, 5]);
    history.saved_as(base(2));
    history.record_tombstones(2, &[6, 7, 8, 9, 10, 11]);
    assert_eq!(history.tombstones_since(&base(1)), None);
    assert_eq!(history.tombstones_since(&base(2)), Some((6..12).collect()));
    history.record_tombstones(2, &[0; 11]);
    assert_eq!((history.bases().len(), history.bytes()), (0, 0));
}

#[test]
fn too_many_uncovered_sweeps_drop_the_oldest_checkpoints() {
    use crate::lifecycle::ExpiryRule;

    let ever_less =
        |step: usize| ExpirySweep { step: step as u64, rule: ExpiryRule::NormBelow(1.0 / (1 + step) as f64) };
    let mut history = CheckpointHistory::new(1 << 10);
    assert_eq!(history.record_sweep(0, &ever_less(0)), None);
    assert!(history.sweeps.is_empty(), "nothing is asked for");
    history.saved_as(base(1));
    for step in 0..MOST_SWEEPS - 1 {
        assert_eq!(history.record_sweep(1, &ever_less(step)), None);
    }
    history.saved_as(base(2));
    assert_eq!(history.record_sweep(2, &ever_less(MOST_SWEEPS)), None);
    assert_eq!(history.sweeps_since(&base(1)).len(), MOST_SWEEPS);
    let bytes = history.encode(1 << 20);
    assert_eq!(history.record_sweep(2, &ever_less(MOST_SWEEPS + 1)), Some("c1".into()));
    assert_eq!((history.tombstones_since(&base(1)), history.tombstones_since(&base(2))), (None, Some(vec![])));
    assert_eq!(history.sweeps_since(&base(2)).len(), 2);
    // A sweep that covers all others replaces them.
    history.record_sweep(2, &ExpirySweep { step: 1000, rule: ExpiryRule::NormBelow(9.0) });
    assert_eq!((history.sweeps.len(), history.bases().len()), (1, 1));
    // An asynchronous save that is awaited.
    history.await_save(3);
    for step in 0..MOST_SWEEPS {
        let forgotten = history.record_sweep(3, &ever_less(step));
        assert_eq!(forgotten, (step + 1 == MOST_SWEEPS).then(|| "c2".into()));
    }
    assert_eq!(history.record_sweep(3, &ever_less(MOST_SWEEPS)), None);
    assert!(!history.is_needed() && history.sweeps.is_empty());
    history.finish_background_save(3, Some(base(3)));
    assert!(history.bases().is_empty(), "its sweeps are not known");
    // A file of a release that kept more.
    let mut back = CheckpointHistory::new(1 << 10);
    back.decode(&bytes);
    assert_eq!((back.bases().len(), back.sweeps.len()), (2, MOST_SWEEPS));
    back.sweeps.push((2, ever_less(MOST_SWEEPS + 1)));
    let bytes = back.encode(1 << 20);
    back.decode(&bytes);
    assert_eq!((back.bases(), back.sweeps.len()), (&[base(2)][..], 2));
}

#[test]
fn expired_rows_are_counted_since_each_checkpoint() {
    let mut history = CheckpointHistory::new(1 << 10);
    history.record_expired(0, 5);
    for epoch in 1..=3 {
        history.saved_as(base(epoch));
        history.record_expired(epoch, 10);
        history.record_expired(epoch, u64::from(epoch));
    }
    let since = |history: &CheckpointHistory| [1, 2, 3].map(|epoch| history.expired_since(&base(epoch)));
    assert_eq!(since(&history), [36, 25, 13]);
    let mut back = CheckpointHistory::new(1 << 10);
    back.decode(&history.encode(1 << 20));
    assert_eq!(since(&back), [36, 25, 13]);
    history.saved_as(base(4));
    history.saved_as(base(5));
    assert_eq!(since(&history), [25, 25, 13], "what came before the oldest checkpoint is forgotten");
}

#[test]
fn tombstones_during_a_save_are_kept_if_it_succeeds() {
    let mut history = CheckpointHistory::new(4 * 8);
    history.await_save(1);
    history.record_tombstones(1, &[7, 8]);
    history.finish_background_save(2, Some(base(2)));
    assert!(history.bases().is_empty(), "another save");
    history.finish_background_save(1, Some(base(1)));
    assert_eq!(history.tombstones_since(&base(1)), Some(vec![7, 8]));
    // A failed save keeps the entries that older ones need.
    history.await_save(2);
    history.record_tombstones(2, &[9]);
    history.finish_background_save(2, None);
    history.finish_background_save(2, Some(base(2)));
    assert_eq!(history.tombstones_since(&base(1)), Some(vec![7, 8, 9]));
    // Too many during the save: first the oldest checkpoint is forgotten, then this save.
    history.await_save(3);
    history.record_tombstones(3, &[1, 2, 3]);
    assert_eq!((history.bases().len(), history.bytes()), (0, 24));
    history.record_tombstones(3, &[4, 5]);
    history.finish_background_save(3, Some(base(3)));
    assert_eq!((history.bases().len(), history.bytes()), (0, 0));
    history.await_save(4);
    history.forget();
    history.finish_background_save(4, Some(base(4)));
    assert!(history.bases().is_empty(), "other contents");
}

#[test]
fn the_encoded_bytes_are_fixed() {
    use crate::lifecycle::ExpiryRule;

    let mut history = CheckpointHistory::new(1 << 10);
    history.saved_as(BaseCheckpoint { name: "7-ab".into(), manifest_xxh3: 12, next_epoch: 3 });
    let head = r#"{"bases":[{"name":"7-ab","manifest_xxh3":12,"next_epoch":3}],"tombstones":[]}"#;
    assert_eq!(history.encode(1 << 20), [head.as_bytes(), b"\n"].concat(), "empty lists are omitted");
    history.record_tombstones(3, &[1, -2]);
    history.record_tombstones(4, &[5]);
    history.record_sweep(4, &ExpirySweep { step: 9, rule: ExpiryRule::LastStep(8) });
    history.record_expired(4, 6);
    let head = concat!(
        r#"{"bases":[{"name":"7-ab","manifest_xxh3":12,"next_epoch":3}],"tombstones":[[3,2],[4,1]],"#,
        r#""sweeps":[[4,{"step":9,"rule":{"last_step":8}}]],"expired":[[4,6]]}"#,
    );
    let ids = [1, -2, 5].map(i64::to_le_bytes).concat();
    assert_eq!(history.encode(1 << 20), [head.as_bytes(), b"\n", &ids].concat());
}

#[test]
fn history_round_trips_and_corruption_clears_it() {
    let mut history = CheckpointHistory::new(1 << 10);
    for epoch in 1..=3 {
        history.saved_as(base(epoch));
        history.record_tombstones(epoch, &[i64::MIN, i64::from(epoch)]);
    }
    let bytes = history.encode(1 << 20);
    let mut back = CheckpointHistory::new(1 << 10);
    back.decode(&bytes);
    assert_eq!((back.bases(), &back.tombstones, back.tombstone_count), (history.bases(), &history.tombstones, 6));
    assert!(history.encode(bytes.len()) == bytes && history.encode(bytes.len() - 1).is_empty());
    for damaged in [&bytes[..bytes.len() - 1], &bytes[1..], b"", b"{}\n", &[b'\n'; 40]] {
        back.decode(damaged);
        assert!(back.bases().is_empty() && back.tombstones.is_empty());
    }
    let mut smaller = CheckpointHistory::new(5 * 8);
    smaller.decode(&bytes);
    assert!(smaller.bases().is_empty(), "more than it may hold");
}
