use super::*;

#[test]
fn the_rate_is_kept_and_a_slow_disk_is_made_up_for() {
    let mut limiter = WriteRateLimiter::new(Some(1 << 20));
    let mut now = limiter.due;
    for _ in 0..4 {
        let wait = limiter.delay_after(1 << 19, now);
        assert_eq!(wait, Duration::from_millis(500));
        now += wait;
    }
    // The disk loses three seconds, and only the credit is made up for.
    now += Duration::from_secs(3);
    assert_eq!(limiter.delay_after(1 << 20, now), Duration::from_millis(800));
    assert_eq!(WriteRateLimiter::new(None).delay_after(u64::MAX, now), Duration::ZERO);
}
