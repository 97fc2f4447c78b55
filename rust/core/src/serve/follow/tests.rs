use super::*;
use crate::checkpoint::CheckpointName;

fn newest(followed: u64, served: u64) -> NewestCheckpoints {
    let name = |seq| CheckpointName { seq, random: 7 };
    NewestCheckpoints { followed: name(followed), served: Some(name(served)) }
}

/// Indexes of the polls that are made while the latest checkpoint cannot be served.
fn looks(back_off: &mut PollBackoff, newest: Option<NewestCheckpoints>, times: usize) -> Vec<usize> {
    let mut looked = Vec::new();
    for time in 0..times {
        if back_off.is_due(newest) {
            looked.push(time);
            back_off.record(newest, true);
        }
    }
    looked
}

#[test]
fn retries_of_a_failed_checkpoint_back_off_and_a_newer_one_does_not() {
    let mut back_off = PollBackoff::default();
    assert_eq!(looks(&mut back_off, Some(newest(1, 1)), 60), [0, 2, 6, 14, 30, 46]);
    assert_eq!(looks(&mut back_off, Some(newest(2, 1)), 10), [0, 2, 6]);
    // A new converted checkpoint may make the trainer's checkpoint servable.
    assert_eq!(looks(&mut back_off, Some(newest(2, 2)), 4), [0, 2]);
    // The directory cannot be read, which takes no time.
    assert_eq!(looks(&mut back_off, None, 4), [0, 1, 2, 3]);
    back_off.record(Some(newest(3, 3)), false);
    assert!(back_off.is_due(Some(newest(3, 3))) && back_off.is_due(Some(newest(3, 3))), "it was served");
}
