//! Tests of every rule, with directories that follow it and directories that violate it.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

/// A directory of mode 0750 below one of mode 0700.
fn private() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::Builder::new().prefix("embcache").tempdir().expect("a temporary directory");
    let dir = root.path().join("checkpoint");
    std::fs::create_dir(&dir).expect("made");
    chmod(&dir, 0o750);
    (root, dir)
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> Kind {
    result.expect_err("refused").kind()
}

/// The strict rules for the directory of an SSD tier.
fn check_for_ssd(path: &Path) -> Result<PathBuf> {
    directory_for_ssd(path, PathChecks::Strict)
}

#[test]
fn sensitive_words_match_plurals_camel_case_and_separators() {
    let (root, _) = private();
    let refused = [
        "api_key",
        "Key",
        "my-KEY.d",
        "KEYS",
        "keys",
        "private_key",
        "private-keys",
        "privateKey",
        "privatekeys",
        "a key b",
        "apiKey",
        "APIKey",
        "v2Keys",
        "userPassword",
        "PassWord",
        "passwords",
        "passwd",
        "secrets",
        "clientSecret",
        "credentials",
        "id_rsa",
        "id_rsa.pub",
        "id-ed25519",
        ".ssh",
        ".SSH",
    ];
    for name in refused {
        let result = directory_to_save(&root.path().join(name).join("below"));
        assert_eq!(kind(result), Kind::Path, "{name}");
        assert!(!root.path().join(name).exists(), "{name} was made");
        assert!(PathChecks::Basic.directory_to_save(&root.path().join(name)).is_ok(), "{name}");
        std::fs::remove_dir(root.path().join(name)).expect("removed");
    }
    let accepted = [
        "keyboard",
        "keyboards",
        "MonKey",
        "monkey",
        "monKeys",
        "key2",
        "clé",
        "turkey-run",
        "Keyed",
        "secretary",
        "idRun",
        "ssh-logs",
        "rsa_id",
        "donkeyFarm",
    ];
    for name in accepted {
        let result = directory_to_save(&root.path().join(name));
        assert!(result.is_ok(), "{name}: {result:?}");
    }
}

#[test]
fn system_directories_are_matched_by_component() {
    for path in ["/", "/usr", "/usr/local/x", "/etc/embcache", "/bin", "/lib64/x", "/proc/self", "/dev/x", "//etc/./x"]
    {
        assert!(system_directory(&Path::new(path).components().collect::<PathBuf>()).is_some(), "{path}");
        assert_eq!(kind(directory_to_save(Path::new(path))), Kind::Path, "{path}");
    }
    for path in ["/etcetera", "/usrlocal/x", "/home/usr/etc", "/dev/shm/x", "/library", "/data/bin"] {
        assert_eq!(system_directory(Path::new(path)), None, "{path}");
    }
}

#[test]
fn length_and_dots_are_checked() {
    for chars in [0, MAX_PATH_CHARS + 1] {
        // One character is two bytes, and one component at most 255.
        let text: String = "ü".repeat(chars).chars().collect();
        let error = checked_user_path("path", Path::new(&text)).expect_err("refused");
        assert_eq!(error.kind(), Kind::Path);
        assert!(error.to_string().contains(&format!("has {chars} characters: use 1 to 1024")), "{error}");
    }
    let given = vec!["ü".repeat(127); 8].join("/") + "/";
    assert_eq!(given.chars().count(), MAX_PATH_CHARS);
    let long = checked_user_path("path", Path::new(&given)).expect("taken");
    assert_eq!(long, std::env::current_dir().expect("there").join(&given));
    let (root, dir) = private();
    let long = dir.join(&given);
    assert_eq!(directory_to_save(&long).expect("made"), long);
    let last = root.path().join("x".repeat(255));
    assert!(directory_to_save(&last).is_ok());
    assert_eq!(kind(directory_to_save(&root.path().join("x".repeat(256)))), Kind::Path);
    let system = Path::new("/").join(vec!["y".repeat(127); 28].join("/"));
    assert_eq!(system.as_os_str().len(), MAX_ABSOLUTE_BYTES + 1);
    let error = directory_to_load(&system).expect_err("refused").to_string();
    assert!(error.contains("absolute path of 3584 bytes, and the system takes 3583"), "{error}");
    for dots in ["checkpoint/../checkpoint", "checkpoint/..", "..", "missing/../checkpoint"] {
        assert_eq!(kind(directory_to_save(&root.path().join(dots))), Kind::Path, "{dots}");
    }
    assert_eq!(directory_to_save(&root.path().join("./checkpoint//.")).expect("plain dots do no harm"), dir);
    assert!(directory_to_save(&root.path().join("a..b")).is_ok());
}

#[test]
fn a_path_with_a_scheme_is_rejected_and_nothing_is_created() {
    let addresses = [
        ("s3://bucket/z", "s3"),
        ("gs://bucket", "gs"),
        ("hdfs://host:9000/x", "hdfs"),
        ("file:///tmp/x", "file"),
        ("abfss://c@account/x", "abfss"),
        ("s3:/bucket/z", "s3"),
        ("file:", "file"),
        ("a/b/s3://bucket", "s3"),
        ("/data/gs://bucket", "gs"),
        ("simplecache::s3://bucket/x", "simplecache::s3"),
    ];
    for (given, scheme) in addresses {
        let path = Path::new(given);
        let errors = [
            checked_user_path("path", path).expect_err("refused"),
            directory_to_save(path).expect_err("refused"),
            PathChecks::Basic.directory_to_load(path).expect_err("refused"),
            PathChecks::Trusted.directory_to_save(path).expect_err("refused"),
            PathChecks::Basic.resolve_to_save(path).expect_err("refused"),
            directory_for_ssd(path, PathChecks::Trusted).expect_err("refused"),
        ];
        for error in errors {
            assert_eq!(error.kind(), Kind::Path, "{given}: {error}");
            assert!(error.to_string().contains(&format!("has the scheme {scheme:?}")), "{given}: {error}");
        }
    }
    let (root, _) = private();
    for name in ["a:b", "12:", "s3:", "run:3/x", ":", "é:/x"] {
        assert!(directory_to_save(&root.path().join(name)).is_ok(), "{name}");
    }
    for name in ["./s3:/x", "a:b", "12:/x", "run:3/x"] {
        assert!(checked_user_path("path", Path::new(name)).is_ok(), "{name}");
    }
}

#[test]
fn no_component_may_be_a_symbolic_link() {
    let (root, dir) = private();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    std::fs::create_dir(dir.join("below")).expect("made");
    chmod(&dir.join("below"), 0o700);
    for path in [link.clone(), link.join("below"), link.join("new")] {
        for check in [directory_to_save, directory_to_load, check_for_ssd] {
            assert_eq!(kind(check(&path)), Kind::Path, "{}", path.display());
        }
    }
    assert!(!dir.join("new").exists());
    let dangling = root.path().join("dangling");
    std::os::unix::fs::symlink(root.path().join("nowhere"), &dangling).expect("linked");
    assert_eq!(kind(directory_to_save(&dangling)), Kind::Path);
}

#[test]
fn modes_are_compared_as_bits() {
    let (_root, dir) = private();
    for (mode, allowed) in [
        (0o750, true),
        (0o700, true),
        (0o740, true),
        (0o707, false),
        (0o755, false),
        (0o770, false),
        (0o751, false),
        (0o702, false),
    ] {
        chmod(&dir, mode);
        for check in [directory_to_save, directory_to_load] {
            let result = check(&dir);
            assert_eq!(result.is_ok(), allowed, "{mode:o}: {result:?}");
            if !allowed {
                let error = result.expect_err("refused");
                assert_eq!(error.kind(), Kind::Permission);
                let cure = format!("chmod {:o} {}", mode & 0o750, dir.display());
                assert!(error.to_string().contains(&cure), "{error}");
            }
        }
    }
    for (mode, allowed) in [(0o755, true), (0o700, true), (0o775, false), (0o757, false), (0o777, false)] {
        chmod(&dir, mode);
        assert_eq!(check_for_ssd(&dir).is_ok(), allowed, "{mode:o}");
    }
}

#[test]
fn strict_checks_reject_special_bits_not_from_parent() {
    let (root, dir) = private();
    for mode in [0o1750, 0o2750, 0o4750, 0o7700] {
        chmod(&dir, mode);
        for check in [directory_to_save, directory_to_load] {
            let error = check(&dir).expect_err("refused");
            assert_eq!(error.kind(), Kind::Permission, "{mode:o}");
            assert!(error.to_string().ends_with(&format!("chmod 00{:o} {}", mode & 0o750, dir.display())), "{error}");
        }
        assert!(PathChecks::Basic.directory_to_save(&dir).is_ok(), "{mode:o}");
        assert!(check_for_ssd(&dir).is_ok(), "{mode:o}");
    }
    // A set-group-ID directory, whose files all belong to its group.
    chmod(root.path(), 0o2755);
    let made = directory_to_save(&root.path().join("a/b")).expect("made");
    assert_eq!(std::fs::metadata(&made).expect("there").mode() & 0o7000, 0o2000);
    assert_eq!(directory_to_load(&made).expect("not more than the parent gave"), made);
    chmod(&dir, 0o4750);
    assert_eq!(kind(directory_to_load(&dir)), Kind::Permission);
}

#[test]
fn entries_are_checked_like_the_directory() {
    let (_root, dir) = private();
    let file = dir.join("file");
    std::fs::write(&file, "").expect("written");
    let judge = |checks: PathChecks, mode: u32| {
        chmod(&file, mode);
        let stat = |path: &Path| rustix::fs::stat(path).expect("there");
        checks.entry_check().map_or(Ok(()), |check| check(&file, &stat(&file), &stat(&dir)))
    };
    for (mode, strict, basic) in [
        (0o640, true, true),
        (0o750, true, true),
        (0o644, true, true),
        (0o755, true, true),
        (0o660, false, false),
        (0o1755, false, true),
        (0o4750, false, true),
        (0o2640, false, true),
        (0o646, false, false),
        (0o777, false, false),
    ] {
        assert_eq!(judge(PathChecks::Strict, mode).is_ok(), strict, "{mode:o}");
        assert_eq!(judge(PathChecks::Basic, mode).is_ok(), basic, "{mode:o}");
        assert!(judge(PathChecks::Trusted, mode).is_ok(), "{mode:o}");
    }
    let error = judge(PathChecks::Basic, 0o666).expect_err("refused");
    assert_eq!(error.kind(), Kind::Permission);
    let text = error.to_string();
    assert!(
        text.contains(&format!("chmod 644 {}", file.display())) && text.contains("path_checks=\"trusted\""),
        "{text}"
    );
}

#[test]
fn trusted_checks_accept_any_owner_and_mode() {
    let (root, dir) = private();
    std::fs::write(dir.join("file"), "").expect("written");
    std::os::unix::fs::symlink(&dir, root.path().join("link")).expect("linked");
    // The modes of `fsGroup` and `emptyDir` in a pod.
    for (parent, mode) in [(0o2775, 0o2775), (0o777, 0o777), (0o777, 0o2770), (0o755, 0o4757)] {
        chmod(root.path(), parent);
        chmod(&dir, mode);
        assert_eq!(PathChecks::Trusted.directory_to_save(&dir).expect("trusted"), dir);
        assert_eq!(PathChecks::Trusted.directory_to_load(&dir).expect("trusted"), dir);
        assert_eq!(directory_for_ssd(&dir, PathChecks::Trusted).expect("trusted"), dir);
        let link = root.path().join("link/new");
        assert_eq!(PathChecks::Trusted.resolve_to_save(&link).expect("followed"), dir.join("new"));
        for strict in [directory_to_save(&dir), check_for_ssd(&dir), PathChecks::Basic.directory_to_save(&dir)] {
            assert_eq!(kind(strict), Kind::Permission, "{parent:o} {mode:o}");
        }
    }
    assert_eq!(kind(PathChecks::Trusted.directory_to_load(&dir.join("file"))), Kind::Path);
    assert_eq!(kind(PathChecks::Trusted.directory_to_load(&root.path().join("link"))), Kind::Path);
    assert_eq!(kind(PathChecks::Trusted.directory_to_save(&dir.join("../x"))), Kind::Path);
    if std::os::unix::fs::chown(&dir, Some(12345), Some(12345)).is_ok() {
        std::os::unix::fs::chown(root.path(), Some(12346), None).expect("given away");
        assert!(PathChecks::Trusted.directory_to_save(&dir).is_ok());
        assert!(directory_for_ssd(&dir, PathChecks::Trusted).is_ok());
        let text = PathChecks::Basic.directory_to_save(&dir).expect_err("refused").to_string();
        assert!(text.contains("path_checks=\"trusted\""), "{text}");
    }
}

#[test]
fn parents_are_rejected_if_others_may_write_and_not_sticky() {
    let (root, dir) = private();
    let basic = |path: &Path| PathChecks::Basic.directory_to_save(path);
    for (mode, allowed) in [(0o755, true), (0o1777, true), (0o1775, true), (0o777, false), (0o702, false)] {
        chmod(root.path(), mode);
        for check in [directory_to_save, directory_to_load, check_for_ssd, basic] {
            let result = check(&dir);
            assert_eq!(result.is_ok(), allowed, "{mode:o}: {result:?}");
            if !allowed {
                let error = result.expect_err("refused");
                assert_eq!(error.kind(), Kind::Permission);
                assert!(error.to_string().contains("chmod o-w"), "{error}");
            }
        }
    }
    assert_eq!(kind(directory_to_save(&root.path().join("new"))), Kind::Permission);
    assert!(!root.path().join("new").exists());
}

#[test]
fn a_missing_directory_is_made_for_a_save_only() {
    let (root, _) = private();
    let new = root.path().join("a/b");
    assert_eq!(kind(directory_to_load(&new)), Kind::Path);
    assert_eq!(kind(check_for_ssd(&new)), Kind::Path);
    assert_eq!(directory_to_save(&new).expect("made"), new);
    for made in [&new, &root.path().join("a")] {
        let mode = std::fs::metadata(made).expect("there").mode() & 0o777;
        assert_eq!(mode & !CHECKPOINT_MODE, 0, "{mode:o}");
    }
    let file = root.path().join("file");
    std::fs::write(&file, "").expect("written");
    assert_eq!(kind(directory_to_save(&file)), Kind::Path);
    assert_eq!(kind(directory_to_save(&file.join("below"))), Kind::Path);
}

#[test]
fn directory_of_another_user_is_rejected() {
    let (_root, dir) = private();
    if std::os::unix::fs::chown(&dir, Some(12345), None).is_err() {
        return; // only root may give a directory away
    }
    for check in [directory_to_save, directory_to_load, check_for_ssd] {
        assert_eq!(kind(check(&dir)), Kind::Permission);
    }
}

#[test]
fn group_writable_parent_is_rejected_unless_sticky_or_own_group() {
    let (root, dir) = private();
    let basic = |path: &Path| PathChecks::Basic.directory_to_save(path);
    let (user, group) = (caller_uid(), rustix::process::getegid().as_raw());
    chmod(root.path(), 0o775);
    for check in [directory_to_save, directory_to_load, check_for_ssd, basic] {
        let result = check(&dir);
        if group != 0 && group == user {
            assert!(result.is_ok(), "{result:?}");
        } else {
            let error = result.expect_err("refused");
            assert_eq!(error.kind(), Kind::Permission);
            assert!(error.to_string().contains(&format!("chmod g-w {}", root.path().display())), "{error}");
        }
    }
    assert!(PathChecks::Basic.directory_to_load(&dir).is_ok(), "who only reads is not told how others share");
    if std::os::unix::fs::chown(root.path(), None, Some(12345)).is_ok() {
        chmod(root.path(), 0o775);
        assert_eq!(kind(check_for_ssd(&dir)), Kind::Permission);
        chmod(root.path(), 0o1775);
        assert!(check_for_ssd(&dir).is_ok());
    }
}

#[test]
fn parent_of_another_user_is_rejected_for_any_mode() {
    let (root, dir) = private();
    if std::os::unix::fs::chown(root.path(), Some(12345), None).is_err() {
        return; // only root may give a directory away
    }
    let basic = |path: &Path| PathChecks::Basic.directory_to_save(path);
    for mode in [0o755, 0o700, 0o1777] {
        chmod(root.path(), mode);
        for check in [directory_to_save, directory_to_load, check_for_ssd, basic] {
            let error = check(&dir).expect_err("refused");
            assert_eq!(error.kind(), Kind::Permission);
            assert!(error.to_string().contains("user 12345 owns"), "{error}");
        }
        assert!(PathChecks::Basic.directory_to_load(&dir).is_ok(), "{mode:o}");
    }
}

#[test]
fn basic_checks_reject_only_paths_writable_by_others() {
    let (root, dir) = private();
    for (mode, allowed) in [(0o755, true), (0o750, true), (0o711, true), (0o775, false), (0o757, false), (0o777, false)]
    {
        chmod(&dir, mode);
        for check in [PathChecks::directory_to_save, PathChecks::directory_to_load] {
            let result = check(PathChecks::Basic, &dir);
            assert_eq!(result.is_ok(), allowed, "{mode:o}: {result:?}");
            if !allowed {
                let error = result.expect_err("refused");
                assert_eq!(error.kind(), Kind::Permission);
                assert!(error.to_string().contains(&format!("chmod {:o} {};", mode & 0o755, dir.display())), "{error}");
            }
        }
    }
    for name in ["api_key", "my.password"] {
        assert!(PathChecks::Basic.directory_to_save(&root.path().join(name)).is_ok(), "{name}");
    }
    chmod(&dir, 0o750);
    if std::os::unix::fs::chown(&dir, Some(12345), None).is_ok() {
        assert!(PathChecks::Basic.directory_to_load(&dir).is_ok(), "a checkpoint of another user is there to read");
        assert_eq!(kind(PathChecks::Basic.directory_to_save(&dir)), Kind::Permission);
    }
}

#[test]
fn messages_name_both_cures_but_no_change_of_a_shared_directory() {
    let (root, dir) = private();
    chmod(&dir, 0o755);
    let text = directory_to_save(&dir).expect_err("refused").to_string();
    assert!(text.contains("path_checks=\"basic\"") && text.contains("chmod 750"), "{text}");
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    let text = directory_to_save(&link).expect_err("refused").to_string();
    assert!(text.contains("path_checks=\"basic\"") && text.contains("name its target"), "{text}");
    chmod(&dir, 0o1777);
    for check in [directory_to_save, directory_to_load, check_for_ssd] {
        let text = check(&dir).expect_err("refused").to_string();
        assert!(text.contains("make a directory of your own in it") && !text.contains("chmod"), "{text}");
    }
}

#[test]
fn leading_tilde_is_rejected_with_a_replacement() {
    for path in ["~", "~/x", "~nobody/x"] {
        for check in [directory_to_save, directory_to_load, check_for_ssd] {
            let error = check(Path::new(path)).expect_err("refused");
            assert_eq!(error.kind(), Kind::Path, "{path}");
            assert!(error.to_string().contains("expanduser"), "{error}");
        }
        assert_eq!(kind(PathChecks::Basic.resolve_to_load(Path::new(path))), Kind::Path);
    }
    let (root, _) = private();
    assert!(directory_to_save(&root.path().join("~x")).is_ok());
}

#[test]
fn a_path_is_resolved_through_links_and_dots_to_one_without() {
    let (root, dir) = private();
    let base = root.path();
    std::fs::create_dir(base.join("a")).expect("made");
    for (target, name) in [("../checkpoint", "a/up"), ("a", "short"), ("short/up", "both"), ("round", "round")] {
        std::os::unix::fs::symlink(target, base.join(name)).expect("linked");
    }
    std::os::unix::fs::symlink(&dir, base.join("whole")).expect("linked");
    std::fs::write(base.join("file"), "").expect("written");
    for (given, expected) in [
        ("checkpoint", "checkpoint"),
        ("whole", "checkpoint"),
        ("whole/new/er", "checkpoint/new/er"),
        ("short/up", "checkpoint"),
        ("both/x", "checkpoint/x"),
        ("short/../checkpoint", "checkpoint"),
        ("both/../a", "a"),
        ("new", "new"),
    ] {
        for resolve in [PathChecks::resolve_to_save, PathChecks::resolve_to_load] {
            let resolved = resolve(PathChecks::Basic, &base.join(given)).expect("resolved");
            assert_eq!(resolved, base.join(expected), "{given}");
        }
    }
    for given in ["round", "file", "file/x", "new/../x"] {
        assert_eq!(kind(PathChecks::Basic.resolve_to_load(&base.join(given))), Kind::Path, "{given}");
    }
}

#[test]
fn a_link_that_others_may_point_elsewhere_is_not_followed() {
    let (root, dir) = private();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    chmod(root.path(), 0o777);
    for resolve in [PathChecks::resolve_to_save, PathChecks::resolve_to_load] {
        assert_eq!(kind(resolve(PathChecks::Basic, &link)), Kind::Permission);
    }
    chmod(root.path(), 0o1777);
    assert_eq!(PathChecks::Basic.resolve_to_save(&link).expect("of the caller's own"), dir);
    if std::os::unix::fs::lchown(&link, Some(12345), None).is_ok() {
        for resolve in [PathChecks::resolve_to_save, PathChecks::resolve_to_load] {
            assert_eq!(kind(resolve(PathChecks::Basic, &link)), Kind::Permission);
        }
        std::os::unix::fs::chown(root.path(), Some(12345), None).expect("given away");
        assert_eq!(PathChecks::Basic.resolve_to_load(&link).expect("all of one user's"), dir);
        assert_eq!(kind(PathChecks::Basic.resolve_to_save(&link)), Kind::Permission);
    }
}

#[test]
fn encoded_names_are_distinct_and_fit_a_file_name() {
    let names = [
        "",
        ".",
        "..",
        "a",
        "A",
        "a/b",
        "a%2Fb",
        "a.b",
        "a b",
        "ü",
        "x+y",
        &"n".repeat(300),
        &"n".repeat(301),
        "~",
        "%",
    ];
    let encoded: std::collections::BTreeSet<String> = names.iter().map(|name| encode_name(name)).collect();
    assert_eq!(encoded.len(), names.len());
    for name in encoded {
        assert!(!name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.starts_with('.'), "{name}");
        assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.%~".contains(&b)), "{name}");
    }
    assert_eq!(encode_name("t_cat-1.w"), "t_cat-1.w");
}
