//! Every rule, by directories that keep it and directories that break it.

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

#[test]
fn words_are_matched_whole_and_without_case() {
    let (root, _) = private();
    for (name, allowed) in [
        ("api_key", false),
        ("Key", false),
        ("my-KEY.d", false),
        ("PassWord", false),
        ("privatekey", false),
        ("private_key", false),
        ("a key b", false),
        ("keyboard", true),
        ("MonKey", true),
        ("keys", true),
        ("key2", true),
        ("passwords", true),
        ("clé", true),
    ] {
        let result = directory_to_save(&root.path().join(name));
        assert_eq!(result.is_ok(), allowed, "{name}: {result:?}");
        if !allowed {
            assert_eq!(kind(result), Kind::Path);
            assert!(!root.path().join(name).exists(), "{name} was made");
        }
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
    assert_eq!(kind(directory_to_save(Path::new(""))), Kind::Path);
    let (root, dir) = private();
    let long = ["x", "y", "z", "w"].iter().fold(dir.clone(), |path, letter| path.join(letter.repeat(200)));
    let pad = MAX_PATH_BYTES - long.as_os_str().len() - 1;
    assert!(directory_to_save(&long.join("u".repeat(pad))).is_ok());
    assert_eq!(kind(directory_to_save(&long.join("u".repeat(pad + 1)))), Kind::Path);
    for dots in ["checkpoint/../checkpoint", "checkpoint/..", "..", "missing/../checkpoint"] {
        assert_eq!(kind(directory_to_save(&root.path().join(dots))), Kind::Path, "{dots}");
    }
    assert_eq!(directory_to_save(&root.path().join("./checkpoint//.")).expect("plain dots do no harm"), dir);
    assert!(directory_to_save(&root.path().join("a..b")).is_ok());
}

#[test]
fn no_component_may_be_a_symbolic_link() {
    let (root, dir) = private();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    std::fs::create_dir(dir.join("below")).expect("made");
    chmod(&dir.join("below"), 0o700);
    for path in [link.clone(), link.join("below"), link.join("new")] {
        for check in [directory_to_save, directory_to_load, directory_for_ssd] {
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
                assert!(error.to_string().ends_with(&cure), "{error}");
            }
        }
    }
    for (mode, allowed) in [(0o755, true), (0o700, true), (0o775, false), (0o757, false), (0o777, false)] {
        chmod(&dir, mode);
        assert_eq!(directory_for_ssd(&dir).is_ok(), allowed, "{mode:o}");
    }
}

#[test]
fn parents_are_refused_only_when_others_may_write_and_it_is_not_sticky() {
    let (root, dir) = private();
    let basic = |path: &Path| Checks::Basic.directory_to_save(path);
    for (mode, allowed) in [(0o755, true), (0o1777, true), (0o1775, true), (0o777, false), (0o702, false)] {
        chmod(root.path(), mode);
        for check in [directory_to_save, directory_to_load, directory_for_ssd, basic] {
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
    assert_eq!(kind(directory_for_ssd(&new)), Kind::Path);
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
fn a_directory_of_another_user_is_refused() {
    let (_root, dir) = private();
    if std::os::unix::fs::chown(&dir, Some(12345), None).is_err() {
        return; // only root may give a directory away
    }
    for check in [directory_to_save, directory_to_load, directory_for_ssd] {
        assert_eq!(kind(check(&dir)), Kind::Permission);
    }
}

#[test]
fn a_parent_that_a_group_may_write_to_is_refused_unless_sticky_or_the_users_own_group() {
    let (root, dir) = private();
    let basic = |path: &Path| Checks::Basic.directory_to_save(path);
    let (user, group) = (caller(), rustix::process::getegid().as_raw());
    chmod(root.path(), 0o775);
    for check in [directory_to_save, directory_to_load, directory_for_ssd, basic] {
        let result = check(&dir);
        if group != 0 && group == user {
            assert!(result.is_ok(), "{result:?}");
        } else {
            let error = result.expect_err("refused");
            assert_eq!(error.kind(), Kind::Permission);
            assert!(error.to_string().contains(&format!("chmod g-w {}", root.path().display())), "{error}");
        }
    }
    assert!(Checks::Basic.directory_to_load(&dir).is_ok(), "who only reads is not told how others share");
    if std::os::unix::fs::chown(root.path(), None, Some(12345)).is_ok() {
        chmod(root.path(), 0o775);
        assert_eq!(kind(directory_for_ssd(&dir)), Kind::Permission);
        chmod(root.path(), 0o1775);
        assert!(directory_for_ssd(&dir).is_ok());
    }
}

#[test]
fn a_parent_of_another_user_is_refused_however_narrow_its_mode() {
    let (root, dir) = private();
    if std::os::unix::fs::chown(root.path(), Some(12345), None).is_err() {
        return; // only root may give a directory away
    }
    let basic = |path: &Path| Checks::Basic.directory_to_save(path);
    for mode in [0o755, 0o700, 0o1777] {
        chmod(root.path(), mode);
        for check in [directory_to_save, directory_to_load, directory_for_ssd, basic] {
            let error = check(&dir).expect_err("refused");
            assert_eq!(error.kind(), Kind::Permission);
            assert!(error.to_string().contains("user 12345 owns"), "{error}");
        }
        assert!(Checks::Basic.directory_to_load(&dir).is_ok(), "{mode:o}");
    }
}

#[test]
fn basic_checks_refuse_only_what_others_can_write_to() {
    let (root, dir) = private();
    for (mode, allowed) in [(0o755, true), (0o750, true), (0o711, true), (0o775, false), (0o757, false), (0o777, false)]
    {
        chmod(&dir, mode);
        for check in [Checks::directory_to_save, Checks::directory_to_load] {
            let result = check(Checks::Basic, &dir);
            assert_eq!(result.is_ok(), allowed, "{mode:o}: {result:?}");
            if !allowed {
                let error = result.expect_err("refused");
                assert_eq!(error.kind(), Kind::Permission);
                assert!(error.to_string().ends_with(&format!("chmod {:o} {}", mode & 0o755, dir.display())), "{error}");
            }
        }
    }
    for name in ["api_key", "my.password"] {
        assert!(Checks::Basic.directory_to_save(&root.path().join(name)).is_ok(), "{name}");
    }
    chmod(&dir, 0o750);
    if std::os::unix::fs::chown(&dir, Some(12345), None).is_ok() {
        assert!(Checks::Basic.directory_to_load(&dir).is_ok(), "a checkpoint of another user is there to read");
        assert_eq!(kind(Checks::Basic.directory_to_save(&dir)), Kind::Permission);
    }
}

#[test]
fn messages_name_both_cures_and_ask_nobody_to_change_a_shared_directory() {
    let (root, dir) = private();
    chmod(&dir, 0o755);
    let text = directory_to_save(&dir).expect_err("refused").to_string();
    assert!(text.contains("path_checks=\"basic\"") && text.contains("chmod 750"), "{text}");
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    let text = directory_to_save(&link).expect_err("refused").to_string();
    assert!(text.contains("path_checks=\"basic\"") && text.contains("name its target"), "{text}");
    chmod(&dir, 0o1777);
    for check in [directory_to_save, directory_to_load, directory_for_ssd] {
        let text = check(&dir).expect_err("refused").to_string();
        assert!(text.contains("make a directory of your own in it") && !text.contains("chmod"), "{text}");
    }
}

#[test]
fn a_leading_tilde_is_refused_with_what_replaces_it() {
    for path in ["~", "~/x", "~nobody/x"] {
        for check in [directory_to_save, directory_to_load, directory_for_ssd] {
            let error = check(Path::new(path)).expect_err("refused");
            assert_eq!(error.kind(), Kind::Path, "{path}");
            assert!(error.to_string().contains("expanduser"), "{error}");
        }
        assert_eq!(kind(Checks::Basic.resolve_to_load(Path::new(path))), Kind::Path);
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
        for resolve in [Checks::resolve_to_save, Checks::resolve_to_load] {
            let resolved = resolve(Checks::Basic, &base.join(given)).expect("resolved");
            assert_eq!(resolved, base.join(expected), "{given}");
        }
    }
    for given in ["round", "file", "file/x", "new/../x"] {
        assert_eq!(kind(Checks::Basic.resolve_to_load(&base.join(given))), Kind::Path, "{given}");
    }
}

#[test]
fn a_link_that_others_may_point_elsewhere_is_not_followed() {
    let (root, dir) = private();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    chmod(root.path(), 0o777);
    for resolve in [Checks::resolve_to_save, Checks::resolve_to_load] {
        assert_eq!(kind(resolve(Checks::Basic, &link)), Kind::Permission);
    }
    chmod(root.path(), 0o1777);
    assert_eq!(Checks::Basic.resolve_to_save(&link).expect("of the caller's own"), dir);
    if std::os::unix::fs::lchown(&link, Some(12345), None).is_ok() {
        for resolve in [Checks::resolve_to_save, Checks::resolve_to_load] {
            assert_eq!(kind(resolve(Checks::Basic, &link)), Kind::Permission);
        }
        std::os::unix::fs::chown(root.path(), Some(12345), None).expect("given away");
        assert_eq!(Checks::Basic.resolve_to_load(&link).expect("all of one user's"), dir);
        assert_eq!(kind(Checks::Basic.resolve_to_save(&link)), Kind::Permission);
    }
}
