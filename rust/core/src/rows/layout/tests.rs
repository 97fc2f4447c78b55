use super::*;
use crate::rows::score_decay::ScoreDecay;

#[test]
fn a_score_decays_since_the_last_step_and_grows_by_the_occurrences() {
    let after = |last_step, step| {
        let mut row = RowHeader { score: 8.0, last_step, ..RowHeader::default() };
        row.touch(1, 0, &mut ScoreDecayTo::new(ScoreDecay::new(100).expect("in range"), step));
        row.score
    };
    assert_eq!(after(7, 7).to_bits(), 9.0_f32.to_bits());
    assert_eq!(after(7, 107).to_bits(), 5.0_f32.to_bits());
    assert_eq!(after(7, 207).to_bits(), 3.0_f32.to_bits());
    assert_eq!(after(0, 100_000).to_bits(), 1.0_f32.to_bits());
    assert_eq!(after(500, 100).to_bits(), 9.0_f32.to_bits(), "a step counter that was set back");
}
