use super::*;

#[test]
fn the_variable_chooses_and_a_wrong_value_is_named() {
    assert!(choose_engine(Some("pread")).unwrap().name().starts_with("pread"));
    let error = choose_engine(Some("aio")).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.to_string().contains("\"aio\""), "{error}");
}

#[test]
fn default_engine_falls_back_without_a_ring() {
    let expected = if uring_engine().is_ok() { "io_uring" } else { "pread" };
    assert!(choose_engine(None).unwrap().name().starts_with(expected));
}

#[test]
fn a_process_has_one_engine() {
    assert!(Arc::ptr_eq(&default_engine().unwrap(), &default_engine().unwrap()));
}
