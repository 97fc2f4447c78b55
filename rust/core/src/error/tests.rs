use super::*;

#[test]
fn error_path_is_renamed_with_paths_below_it() {
    let refused = std::io::Error::from_raw_os_error(libc::EIO);
    let (five, fifty, user) = (Path::new("/fd/5"), Path::new("/fd/57"), Path::new("/user"));
    let about = |path: &str, from: &Path| Error::io("open", Path::new(path), &refused).renamed(from, user);
    for (path, from, expected) in [
        ("/fd/5", five, "/user"),
        ("/fd/5/x", five, "/user/x"),
        ("/fd/57/x", five, "/fd/57/x"),
        ("/fd/57/x", fifty, "/user/x"),
    ] {
        let error = about(path, from);
        assert_eq!(error.path(), Some(Path::new(expected)));
        assert!(error.to_string().starts_with(&format!("cannot open {expected}: ")), "{error}");
    }
}
