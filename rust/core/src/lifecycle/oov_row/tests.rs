use super::*;
use crate::config::OptimizerKind;

#[test]
fn every_value_round_trips_through_text() {
    let values = vec![0.1, -0.0, f32::NAN, f32::INFINITY, f32::from_bits(1), -3.0e38];
    let row = OovRow::from_values(OptimizerKind::Adam.layout(2), values.clone()).expect("as many as the layout has");
    let text = serde_json::to_string(&row).expect("text");
    let back: OovRow = serde_json::from_str(&text).expect("a row");
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(back.values()), bits(&values));
    assert_eq!(back, row, "also where a number is none");
}

#[test]
fn other_text_is_rejected() {
    for text in ["\"0000000\"", "\"+0000000\"", "\"0000000g\"", "\"ääää\"", "[1.0]", "12345678"] {
        assert!(serde_json::from_str::<OovRow>(text).is_err(), "{text}");
    }
}

#[test]
fn a_row_of_another_optimizer_keeps_its_weights() {
    let adam =
        OovRow::from_values(OptimizerKind::Adam.layout(1), vec![1.0, 2.0, 3.0]).expect("as many as the layout has");
    assert_eq!(adam.without_slots(OptimizerKind::RowWiseAdagrad.layout(1)).values(), [1.0, 0.0]);
    assert!(OovRow::from_values(OptimizerKind::Sgd.layout(1), vec![1.0, 2.0]).is_none());
}
