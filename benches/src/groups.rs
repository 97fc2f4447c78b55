//! Groups of benches, and the command line of the program that has them all.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process::{Command, ExitCode};

use crate::measure::{Bench, Scale, measure};
use crate::process::die_with_parent;
use crate::serve::serve;

/// Returns true if the row of a name is requested.
pub type Wanted<'a> = &'a dyn Fn(&str) -> bool;

/// Benches of one subject. Their leftovers in the process, such as memory, do not affect other groups: a process
/// measures one group.
pub enum Group {
    /// Each bench is measured separately, in rounds.
    Alone(Vec<Bench>),
    /// One measurement gives several rows. See [`Group::rows`].
    Rows {
        /// The names of the rows.
        names: Vec<&'static str>,
        /// Measures, and prints the requested rows.
        measure: fn(Scale, Wanted<'_>),
        /// If true, it is measured only if it is named, because it takes very long.
        is_large: bool,
    },
}

impl Group {
    /// Creates a group whose one measurement gives the rows called `names`. `measure` prints the requested rows, each
    /// as soon as possible.
    pub fn rows(names: &[&'static str], measure: fn(Scale, Wanted<'_>)) -> Self {
        Self::Rows { names: names.to_vec(), measure, is_large: false }
    }

    /// Like [`Group::rows`], but a plain `cargo bench` skips the group, because it is too large.
    pub fn large_rows(names: &[&'static str], measure: fn(Scale, Wanted<'_>)) -> Self {
        Self::Rows { names: names.to_vec(), measure, is_large: true }
    }

    fn names(&self) -> Vec<&'static str> {
        match self {
            Self::Alone(benches) => benches.iter().map(|bench| bench.name).collect(),
            Self::Rows { names, .. } => names.clone(),
        }
    }

    fn is_large(&self) -> bool {
        matches!(self, Self::Rows { is_large: true, .. })
    }

    /// True if its benches are to be measured, for these names. An empty list means all.
    fn is_wanted(&self, named: &BTreeSet<&str>) -> bool {
        if named.is_empty() { !self.is_large() } else { self.names().iter().any(|name| named.contains(name)) }
    }

    fn measure(&self, scale: Scale, named: &BTreeSet<&str>) {
        let wanted = |name: &str| named.is_empty() || named.contains(name);
        match self {
            Self::Alone(benches) => {
                benches.iter().filter(|bench| wanted(bench.name)).for_each(|bench| measure(bench, scale));
            }
            Self::Rows { measure, .. } => measure(scale, &wanted),
        }
    }
}

/// The main function of the program that has these groups, each with its name. The crate's documentation describes its
/// arguments.
///
/// # Panics
/// Panics when its results cannot be written, and when it cannot start itself again.
pub fn run(groups: &[(&str, Group)]) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let flag = |name: &str| arguments.iter().any(|argument| argument == name);
    let scale = scale(&arguments);
    if flag("--list") {
        // A reader such as `head` may have closed the pipe.
        let _ = list(groups, &mut io::stdout().lock());
        return ExitCode::SUCCESS;
    }
    let named = match named_by(groups, &names(&arguments)) {
        Ok(named) => named,
        Err(unknown) => {
            eprintln!("no bench has {unknown} in its name; --list names them");
            return ExitCode::from(2);
        }
    };
    let wanted: Vec<&(&str, Group)> = groups.iter().filter(|(_, group)| group.is_wanted(&named)).collect();
    if flag("--serve") {
        let benches =
            wanted.iter().filter_map(|(_, group)| if let Group::Alone(benches) = group { Some(benches) } else { None });
        let bench = benches.flatten().find(|bench| named.contains(bench.name));
        serve(bench.expect("the driver names a bench that is served"), scale);
    } else if let [(_, group)] = wanted[..] {
        if flag("--rows") {
            die_with_parent();
        }
        group.measure(scale, &named);
    } else {
        return measure_each(&wanted, &named, scale);
    }
    ExitCode::SUCCESS
}

/// Measures each group in its own process.
fn measure_each(groups: &[&(&str, Group)], named: &BTreeSet<&str>, scale: Scale) -> ExitCode {
    let this = std::env::current_exe().expect("the program's own path");
    let mut failed = Vec::new();
    for (what, group) in groups {
        let names = group.names().into_iter().filter(|name| named.is_empty() || named.contains(name));
        let smoke = if scale == Scale::Smoke { &["--smoke"][..] } else { &[] };
        let ended = Command::new(&this).args(names).args(smoke).status().expect("the program can be started again");
        if !ended.success() {
            failed.push(*what);
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("these groups of benches failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

/// Prints the names of all benches. A name of a group's one measurement is followed by `rows` and the name of the
/// group.
fn list(groups: &[(&str, Group)], to: &mut impl Write) -> io::Result<()> {
    for (of, group) in groups {
        let how = if matches!(group, Group::Rows { .. }) { format!(" rows {of}") } else { String::new() };
        for name in group.names() {
            writeln!(to, "{name}{how}")?;
        }
    }
    Ok(())
}

/// The names of the benches that match `filters`: the one with this name, or else all whose name contains it. A large
/// group must be requested by complete names. The error is a filter without a match.
fn named_by<'a>(groups: &[(&str, Group)], filters: &BTreeSet<&'a str>) -> Result<BTreeSet<&'static str>, &'a str> {
    let all = |with_large: bool| {
        let groups = groups.iter().filter(move |(_, group)| with_large || !group.is_large());
        groups.flat_map(|(_, group)| group.names())
    };
    let mut named = BTreeSet::new();
    for &filter in filters {
        if let Some(name) = all(true).find(|name| *name == filter) {
            named.insert(name);
            continue;
        }
        let mut found = all(false).filter(|name| name.contains(filter)).peekable();
        found.peek().ok_or(filter)?;
        named.extend(found);
    }
    Ok(named)
}

fn scale(arguments: &[String]) -> Scale {
    let smoke = arguments.iter().any(|argument| argument == "--smoke");
    if smoke || std::env::var("EMBCACHE_BENCH").is_ok_and(|how| how == "smoke") { Scale::Smoke } else { Scale::Full }
}

/// The arguments that are names. Flags are skipped, and so are the values of criterion's flags.
fn names(arguments: &[String]) -> BTreeSet<&str> {
    let takes_value = ["--save-baseline", "--baseline", "--sample-size", "--measurement-time", "--warm-up-time"];
    let mut names = BTreeSet::new();
    let mut rest = arguments.iter().map(String::as_str);
    while let Some(argument) = rest.next() {
        if takes_value.contains(&argument) {
            rest.next();
        } else if !argument.starts_with('-') {
            names.insert(argument);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> [(&'static str, Group); 2] {
        let none: fn(Scale, Wanted<'_>) = |_, _| {};
        [
            ("ssd", Group::rows(&["ssd_read", "ssd_write", "read"], none)),
            ("large", Group::large_rows(&["large_read"], none)),
        ]
    }

    #[test]
    fn a_filter_is_a_name_or_a_part_of_names_of_groups_that_are_not_large() {
        let named = |filters: &[&'static str]| named_by(&groups(), &filters.iter().copied().collect());
        assert_eq!(named(&[]), Ok(BTreeSet::new()));
        assert_eq!(named(&["read"]), Ok(BTreeSet::from(["read"])));
        assert_eq!(named(&["ssd", "large_read"]), Ok(BTreeSet::from(["large_read", "ssd_read", "ssd_write"])));
        assert_eq!(named(&["rea"]), Ok(BTreeSet::from(["read", "ssd_read"])));
        assert_eq!(named(&["ssd", "larg"]), Err("larg"));
    }

    #[test]
    fn a_list_ends_where_its_reader_has_gone() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert_eq!(list(&groups(), &mut Gone).map_err(|error| error.kind()), Err(io::ErrorKind::BrokenPipe));
        let mut text = Vec::new();
        list(&groups(), &mut text).expect("memory takes it");
        assert_eq!(String::from_utf8_lossy(&text).lines().next(), Some("ssd_read rows ssd"));
    }
}
