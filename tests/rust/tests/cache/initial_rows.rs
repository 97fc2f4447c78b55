//! Tests of initial rows: the row of a (seed, table key, id) is always the same, and has the configured distribution.

use embcache::rows::{InitializerSpec, RowInitializer};
use embcache::types::table_key;

const SEED: u64 = 7;

fn row(initializer: InitializerSpec, seed: u64, key: u64, id: i64, dim: usize) -> Vec<f32> {
    let mut weights = vec![f32::NAN; dim];
    RowInitializer::new(initializer, seed, key).expect("valid initializer").fill(id, &mut weights);
    weights
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|weight| weight.to_bits()).collect()
}

fn named(name: &str, first: f32, second: f32) -> InitializerSpec {
    match name {
        "constant" => InitializerSpec::Constant { value: first },
        "uniform" => InitializerSpec::Uniform { low: first, high: second },
        "normal" => InitializerSpec::Normal { mean: first, std: second },
        "truncated_normal" => InitializerSpec::TruncatedNormal { mean: first, std: second },
        "linear" => InitializerSpec::Linear { low: first, high: second },
        _ => panic!("the fixture has an initializer {name:?} that this test does not know"),
    }
}

/// Each line is a row: the initializer, its two parameters, the seed, the table name, the id, then the bits of the
/// weights in hexadecimal.
#[test]
fn births_are_those_of_version_1() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/v1/births.txt");
    let fixture = std::fs::read_to_string(path).expect("the fixture is in the repository");
    let mut rows = 0;
    for line in fixture.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |field: usize| fields[field].parse::<f32>().expect("a number");
        let expected: Vec<u32> =
            fields[6..].iter().map(|word| u32::from_str_radix(word, 16).expect("hexadecimal")).collect();
        let got = row(
            named(fields[0], number(1), number(2)),
            fields[3].parse().expect("a seed"),
            table_key(fields[4]),
            fields[5].parse().expect("an id"),
            expected.len(),
        );
        assert_eq!(bits(&got), expected, "{line}");
        rows += 1;
    }
    assert!(rows >= 20, "only {rows} rows in the fixture");
}

/// All weights of `rows` rows of width 64.
fn sample(initializer: InitializerSpec, rows: i64) -> Vec<f64> {
    (0..rows).flat_map(|id| row(initializer, SEED, table_key("t"), id, 64)).map(f64::from).collect()
}

fn mean_and_std(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>() / values.len() as f64;
    (mean, variance.sqrt())
}

/// The Kolmogorov-Smirnov statistic against `cdf`, times √n. It is above 1.95 for one in a thousand samples.
fn kolmogorov(mut values: Vec<f64>, cdf: impl Fn(f64) -> f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let distance = values
        .iter()
        .enumerate()
        .map(|(rank, &value)| {
            let expected = cdf(value);
            (expected - rank as f64 / n).abs().max(((rank + 1) as f64 / n - expected).abs())
        })
        .fold(0.0, f64::max);
    distance * n.sqrt()
}

/// Φ by Simpson's rule, starting at 0. It is accurate to 1e-12 here.
fn normal_cdf(x: f64) -> f64 {
    let density = |t: f64| (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let steps = 200;
    let width = x / f64::from(steps);
    let inner: f64 =
        (1..steps).map(|step| density(f64::from(step) * width) * if step % 2 == 1 { 4.0 } else { 2.0 }).sum();
    0.5 + (density(0.0) + inner + density(x)) * width / 3.0
}

#[test]
fn uniform_weights_are_uniform() {
    let values = sample(InitializerSpec::Uniform { low: -0.5, high: 1.5 }, 2000);
    let (mean, std) = mean_and_std(&values);
    assert!((mean - 0.5).abs() < 0.006, "mean {mean}");
    assert!((std - 2.0 / 12.0_f64.sqrt()).abs() < 0.006, "std {std}");
    let statistic = kolmogorov(values, |x| (0.5 * x + 0.25).clamp(0.0, 1.0));
    assert!(statistic < 1.95, "Kolmogorov {statistic}");
}

#[test]
fn normal_weights_are_normal() {
    let values = sample(InitializerSpec::Normal { mean: 1.0, std: 0.25 }, 2000);
    let (mean, std) = mean_and_std(&values);
    assert!((mean - 1.0).abs() < 0.003, "mean {mean}");
    assert!((std - 0.25).abs() < 0.003, "std {std}");
    let statistic = kolmogorov(values, |x| normal_cdf((x - 1.0) / 0.25));
    assert!(statistic < 1.95, "Kolmogorov {statistic}");
}

#[test]
fn truncated_normal_weights_stay_within_two_deviations() {
    let values = sample(InitializerSpec::TruncatedNormal { mean: -1.0, std: 0.5 }, 2000);
    assert!(values.iter().all(|value| (-2.0..=0.0).contains(value)));
    assert!(values.iter().any(|value| *value < -1.99) && values.iter().any(|value| *value > -0.01));
    let (mean, std) = mean_and_std(&values);
    assert!((mean + 1.0).abs() < 0.006, "mean {mean}");
    // The standard deviation of a standard normal distribution that is truncated at ±2 is 0.8796.
    assert!((std - 0.5 * 0.879_626).abs() < 0.005, "std {std}");
    let (from, width) = (normal_cdf(-2.0), 1.0 - 2.0 * normal_cdf(-2.0));
    let statistic = kolmogorov(values, |x| (normal_cdf((x + 1.0) / 0.5) - from) / width);
    assert!(statistic < 1.95, "Kolmogorov {statistic}");
}

#[test]
fn linear_weights_are_a_ramp_over_the_columns() {
    let ramp = InitializerSpec::Linear { low: 1.0, high: 2.0 };
    assert_eq!(row(ramp, 0, 0, 3, 5), [1.0, 1.25, 1.5, 1.75, 2.0]);
    assert_eq!(row(ramp, 0, 0, -9, 5), [1.0, 1.25, 1.5, 1.75, 2.0]);
    assert_eq!(row(ramp, 0, 0, 3, 1), [1.0]);
    assert!(row(ramp, 0, 0, 3, 0).is_empty());
}

#[test]
fn every_column_of_a_wide_row_is_written() {
    for dim in [1, 3, 4, 63, 64, 65, 200] {
        let wide = row(InitializerSpec::Uniform { low: 0.0, high: 1.0 }, SEED, 1, i64::MIN, dim);
        assert!(wide.iter().all(|weight| (0.0..1.0).contains(weight)), "dim {dim}");
    }
}

#[test]
fn a_narrow_row_is_the_start_of_a_wide_one() {
    for initializer in
        [InitializerSpec::Uniform { low: -1.0, high: 1.0 }, InitializerSpec::Normal { mean: 0.0, std: 1.0 }]
    {
        let wide = row(initializer, SEED, 1, 5, 100);
        assert_eq!(bits(&row(initializer, SEED, 1, 5, 17)), bits(&wide[..17]));
    }
}

fn correlation(first: &[f64], second: &[f64]) -> f64 {
    let (mean_1, std_1) = mean_and_std(first);
    let (mean_2, std_2) = mean_and_std(second);
    first.iter().zip(second).map(|(a, b)| (a - mean_1) * (b - mean_2)).sum::<f64>()
        / (first.len() as f64 * std_1 * std_2)
}

/// Checks that two rows are uncorrelated within five standard errors.
fn assert_unrelated(first: &[f32], second: &[f32], what: &str) {
    let as_f64 = |row: &[f32]| row.iter().map(|&weight| f64::from(weight)).collect::<Vec<_>>();
    let correlation = correlation(&as_f64(first), &as_f64(second));
    assert!(correlation.abs() < 5.0 / (first.len() as f64).sqrt(), "{what}: correlation {correlation}");
}

#[test]
fn ids_seeds_tables_and_columns_are_independent() {
    let uniform = InitializerSpec::Uniform { low: -1.0, high: 1.0 };
    let base = row(uniform, SEED, table_key("a"), 5, 10_000);
    for id in [4, 6, -5, 5 + (1 << 32), 5 - (1 << 32), i64::MAX, i64::MIN] {
        assert_unrelated(&base, &row(uniform, SEED, table_key("a"), id, 10_000), "ids");
    }
    assert_unrelated(&base, &row(uniform, SEED + 1, table_key("a"), 5, 10_000), "seeds");
    assert_unrelated(&base, &row(uniform, SEED, table_key("b"), 5, 10_000), "tables");
    assert_unrelated(&base, &row(uniform, SEED, table_key("a") ^ 1, 5, 10_000), "neighbouring table keys");
    assert_unrelated(&base, &row(uniform, table_key("a"), SEED, 5, 10_000), "seed and table key exchanged");
    for lag in [1, 4, 16, 64] {
        assert_unrelated(&base[..9000], &base[lag..9000 + lag], "columns");
    }
    // The same for columns, over many ids.
    let rows: Vec<Vec<f32>> = (0..10_000).map(|id| row(uniform, SEED, 3, id, 5)).collect();
    let column = |which: usize| rows.iter().map(|row| row[which]).collect::<Vec<_>>();
    assert_unrelated(&column(0), &column(1), "columns over ids");
    assert_unrelated(&column(0), &column(4), "columns over ids");
    assert_unrelated(&column(0)[..9999], &column(0)[1..], "neighbouring ids");
}
