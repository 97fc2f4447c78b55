use super::*;

#[test]
fn id_is_active_while_one_of_its_plans_is() {
    let mut active = ActivePlans::default();
    let (first, second, never) = (Arc::new(vec![1, 2]), Arc::new(vec![2, 3]), Arc::new(vec![2, 3]));
    active.add(&first);
    active.add(&second);
    assert_eq!([1, 2, 3, 4].map(|id| active.plans_with(id)), [1, 2, 1, 0]);
    assert!(active.remove(&first) && !active.remove(&first) && !active.remove(&never));
    assert_eq!([1, 2, 3, 4].map(|id| active.has(id)), [false, true, true, false]);
    active.add(&never);
    assert_eq!([1, 2, 3, 4].map(|id| active.plans_with(id)), [0, 2, 2, 0]);
    active.sweep_has_ended();
    assert_eq!([1, 2, 3, 4].map(|id| active.plans_with(id)), [0, 2, 2, 0]);
    assert!(active.remove(&second) && active.remove(&never));
    assert!(!active.has(2));
}
