use super::*;

fn thrower(p: f64, key: [u32; 2]) -> RowAdmitter {
    let bucketing = BucketMapper::new(7);
    let rule = AdmissionRule::Probability { p };
    RowAdmitter { rule, key, shows: None, clicks: None, buckets: 0..7, bucketing, snapshot_counts: None, changes: 0 }
}

/// Each line: the seed, the table key, p, the id, the step, the occurrences, and 1 if the id is admitted.
#[test]
fn coins_are_those_of_format_1() {
    let fixture = include_str!("../../../../../tests/fixtures/v1/coins.txt");
    let mut coins = 0;
    for line in fixture.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (seed, key): (u64, u64) = (fields[0].parse().expect("a seed"), fields[1].parse().expect("a key"));
        let p: f64 = fields[2].parse().expect("a probability");
        let id = fields[3].parse().expect("an id");
        let candidate = AdmissionCandidate::new(id, fields[5].parse().expect("occurrences"), 0);
        let mixed = hash_id(hash_id((seed ^ hash_id(key as Id)) as Id) as Id);
        let key = [mixed as u32, (mixed >> 32) as u32];
        let admitter = thrower(p, key);
        let admitted = admitter.decide(&mut [candidate], fields[4].parse().expect("a step"));
        assert_eq!(admitted, [fields[6] == "1"], "{line}");
        coins += 1;
    }
    assert_eq!(coins, 216);
}

#[test]
fn many_occurrences_admit_as_many_coins_would() {
    let admitter = thrower(0.1, [1, 2]);
    for (occurrences, expected) in [(1, 0.1), (2, 0.19), (10, 0.651)] {
        let mut candidates: Vec<AdmissionCandidate> =
            (0..20_000).map(|id| AdmissionCandidate::new(id, occurrences, 0)).collect();
        let admitted = admitter.decide(&mut candidates, 1);
        let share = admitted.iter().filter(|admitted| **admitted).count() as f64 / 20_000.0;
        assert!((share - expected).abs() < 0.015, "{share} and {expected}");
    }
}
