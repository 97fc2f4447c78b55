use super::*;

fn standing(score: u32, last_step: u64, id: u64) -> RankKey {
    RankKey { score, last_step, id }
}

fn row(id: i64, last_step: u64, score: f32) -> RowHeader {
    RowHeader { id, last_step, score, ..RowHeader::default() }
}

#[test]
fn scores_of_every_kind_have_one_order() {
    let ordered = [f32::NEG_INFINITY, f32::MIN, -1.0, -f32::MIN_POSITIVE / 2.0, 0.0, f32::MIN_POSITIVE / 2.0];
    let ordered = [&ordered[..], &[1.0, 1.0 + f32::EPSILON, f32::MAX, f32::INFINITY, f32::NAN]].concat();
    assert!(ordered.windows(2).all(|pair| sortable_score(pair[0]) < sortable_score(pair[1])));
    assert_eq!(sortable_score(-0.0), sortable_score(0.0));
    let others = [-f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)];
    assert!(others.iter().all(|&score| sortable_score(score) == sortable_score(f32::NAN)));
}

#[test]
fn rank_orders_by_score_then_last_step_then_unsigned_id() {
    let decay = ScoreDecay::new(10).expect("in range");
    let rows = [row(9, 10, 1.0), row(7, 0, 4.1), row(3, 20, 2.1), row(5, 20, 2.1), row(-5, 20, 2.1), row(1, 0, 9.0)];
    let standings: Vec<RankKey> = rows.iter().map(|row| RankKey::of(row, &decay, 20)).collect();
    // The decayed scores are 0.5, 1.025, 2.1 three times, 2.25.
    assert!(standings.windows(2).all(|pair| pair[0] < pair[1]), "{standings:?}");
    let (older, newer) = (RankKey::of(&row(9, 3, 2.0), &decay, 3), RankKey::of(&row(1, 13, 2.0), &decay, 3));
    assert!(older < newer, "one that decays and one that does not, at one step");
}

/// The keys of a range have the same bits above their digits.
#[test]
fn digit_has_bits_above_shift_for_all_keys_of_a_range() {
    let at = standing(0xaabb_ccdd, 0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff01);
    let digits = [(0, 0xff01), (16, 0xddee), (60, 0x7889), (64, 0x7788), (112, 0x1122), (116, 0xd112)];
    for (shift, digit) in digits.into_iter().chain([(127, 0x99ba), (128, 0xccdd), (140, 0xabbc), (144, 0xaabb)]) {
        assert_eq!(at.digit(shift), digit, "{shift}");
    }
    assert_eq!(RankKey::bits_within(&RankKey::LOWEST, &RankKey::HIGHEST), 160);
    for (other, bits) in [
        (at, 0),
        (RankKey { id: at.id ^ 1, ..at }, 1),
        (RankKey { id: at.id ^ 1 << 63, ..at }, 64),
        (RankKey { last_step: at.last_step ^ 1, ..at }, 65),
        (RankKey { score: at.score ^ 1, ..at }, 129),
    ] {
        assert_eq!(RankKey::bits_within(&at, &other), bits);
    }
}

#[test]
fn a_histogram_counts_a_range_by_digits_and_lists_another() {
    let all = RankKeyRange { low: RankKey::LOWEST, high: RankKey::HIGHEST, is_listed: false };
    let decay = || ScoreDecay::new(1 << 53).expect("in range");
    let mut histogram = ScoreHistogramBuilder::new(9, decay(), &[all]).expect("memory");
    let rows: Vec<RowHeader> = (0..100).map(|id| row(id, 9, 1.0 + (id % 4) as f32)).collect();
    rows.iter().try_for_each(|row| histogram.add(row)).expect("memory");
    histogram.add(&row(1000, 10, 1.0)).expect("memory");
    let ScoreHistogram { rows: counted, newest, ranges: found } = histogram.finish();
    assert_eq!((counted, newest), (100, 100), "a row that was trained after the step is not counted");
    let RankRangeContents::Counted(parts) = &found[0] else { panic!("{found:?}") };
    let scores: Vec<(u32, u64)> = parts.iter().map(|(digit, part)| (*digit, part.rows)).collect();
    let digit = |score: f32| sortable_score(score) >> 16;
    assert_eq!(scores, [1.0, 2.0, 3.0, 4.0].map(|score| (digit(score), 25)));
    let (low, high) = (parts[1].1.low, parts[1].1.high);
    assert_eq!((low, high), (standing(sortable_score(2.0), 9, 1), standing(sortable_score(2.0), 9, 97)));
    // All have one score and one step: only the ids differ, in their lowest seven bits.
    let ranges = [
        RankKeyRange { low, high, is_listed: false },
        RankKeyRange { low: RankKey { id: 50, ..low }, high, is_listed: true },
    ];
    let mut histogram = ScoreHistogramBuilder::new(9, decay(), &ranges).expect("memory");
    rows.iter().try_for_each(|row| histogram.add(row)).expect("memory");
    let mut found = histogram.finish().ranges;
    let Some(RankRangeContents::Listed(listed)) = found.pop() else { panic!("{found:?}") };
    assert!(listed.iter().map(|standing| standing.id).eq((50..98).filter(|id| id % 4 == 1)), "{listed:?}");
    let Some(RankRangeContents::Counted(parts)) = found.pop() else { panic!("{found:?}") };
    assert!(parts.len() == 25 && parts.iter().all(|(digit, part)| part.low.id == u64::from(*digit) && part.rows == 1));
}
