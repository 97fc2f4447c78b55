//! Checks of served rows.
#![allow(clippy::missing_panics_doc)] // a helper of tests panics when a check fails

use std::path::Path;
use std::sync::Arc;

use embcache::io::IoEngine;
use embcache::rows::RowInitializer;
use embcache::serve::{ServeOptions, ServedTable, TableServer};
use embcache::types::Id;

use crate::checkpoint::{ROOT, Table};
use crate::{Contents, directory_in};

/// Checks every id of `expected`, and as many others, in one request.
pub fn check_table(served: &ServedTable, expected: &Table) {
    let dim = expected.spec.dim as usize;
    let absent = |id: &Id| !expected.rows.contains_key(id);
    let others = expected.rows.keys().map(|id| id.wrapping_mul(31) + 7).filter(absent);
    let ids: Vec<Id> = expected.rows.keys().copied().chain(others).collect();
    let (mut out, mut found) = (vec![f32::NAN; ids.len() * dim], vec![false; ids.len()]);
    let missing = served.lookup(&ids, &mut out, &mut found).expect("served");
    assert_eq!(missing, ids.len() - expected.rows.len());
    let birth =
        RowInitializer::new(expected.spec.initializer, expected.spec.seed, expected.spec.key).expect("an initializer");
    for (position, id) in ids.iter().enumerate() {
        let mut wanted = vec![0.0; dim];
        match expected.rows.get(id) {
            Some((_, vector)) => wanted.copy_from_slice(&vector[..dim]),
            None => birth.fill(*id, &mut wanted),
        }
        assert_eq!(found[position], !absent(id), "id {id}");
        assert_eq!(&out[position * dim..][..dim], wanted, "id {id}");
    }
}

/// Checks every row of all tables of the current version.
pub fn check(serving: &TableServer, expected: &[Table]) {
    let version = serving.pin().expect("a version");
    assert_eq!(version.tables().len(), expected.len());
    for table in expected {
        let name = format!("{}/{}", table.spec.module, table.spec.table);
        check_table(version.table(&name).expect("the table"), table);
    }
}

/// Checks that the current version has exactly these rows of table "t" of module "m", for some ids.
pub fn check_rows(serving: &TableServer, expected: &Contents) {
    let version = serving.pin().expect("a version");
    let table = version.table("m/t").expect("the table");
    let (dim, ids) = (table.dim(), (-50..20_000).chain(expected.keys().copied()).collect::<Vec<Id>>());
    let (mut out, mut found) = (vec![0.0_f32; ids.len() * dim], vec![false; ids.len()]);
    table.lookup(&ids, &mut out, &mut found).expect("served");
    for ((id, found), row) in ids.iter().zip(found).zip(out.chunks(dim)) {
        let wanted = expected.get(id);
        assert_eq!(found, wanted.is_some(), "id {id}");
        let right =
            wanted.is_none_or(|(_, bits)| row.iter().map(|weight| weight.to_bits()).eq(bits[..dim].iter().copied()));
        assert!(right, "id {id}");
    }
}

/// Checks the rows of table "t" of module "m" in the latest checkpoint, served by the latest existing index and the
/// deltas after it, and with `rebuilt`, by an index that is built from the entire chain.
pub fn check_contents(engine: &Arc<dyn IoEngine>, expected: &Contents, rebuilt: bool) {
    let check = || check_rows(&opened(engine, Path::new(ROOT), ServeOptions::default()), expected);
    check();
    if rebuilt {
        for checkpoint in engine.list(Path::new(ROOT)).expect("a directory") {
            let index = checkpoint.join("serve.idx");
            if engine.exists(&index).expect("a look") {
                engine.remove_file(&index).expect("removed");
            }
        }
        check();
    }
}

/// A server of the latest checkpoint.
pub fn opened(engine: &Arc<dyn IoEngine>, root: &Path, options: ServeOptions) -> Arc<TableServer> {
    TableServer::open(directory_in(engine, root), options).expect("opened")
}
