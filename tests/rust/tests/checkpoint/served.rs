//! Checks of served rows, for the tests of this folder and for those of hostile files.

use embcache::rows::RowInitializer;
use embcache::serve::{ServedTable, TableServer};
use embcache::types::Id;

use super::made::Table;

/// Every id of `expected`, and as many others, read in one request.
pub(crate) fn check_table(served: &ServedTable, expected: &Table) {
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

/// Every row of all tables of the current version.
pub(crate) fn check(serving: &TableServer, expected: &[Table]) {
    let version = serving.pin().expect("a version");
    assert_eq!(version.tables().len(), expected.len());
    for table in expected {
        let name = format!("{}/{}", table.spec.module, table.spec.table);
        check_table(version.table(&name).expect("the table"), table);
    }
}
