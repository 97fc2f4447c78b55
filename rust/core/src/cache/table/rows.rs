//! Access to the rows of a table by id: reads, imports, removals.

use super::handle::Table;
use crate::cache::columns::PickedRows;
use crate::cache::locks::{TableGuard, TableInner};
use crate::cache::rows::{FoundRows, RowBlock};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::types::Id;

/// Number of rows read under one hold of the table's lock.
const ROWS_PER_READ: usize = 4096;
/// Number of rows of columns imported under one hold of the table's lock.
const ROWS_PER_IMPORT: usize = 65_536;
/// Bytes per row that an import or a removal uses while it runs: ids, their table for the comparison, and locations of
/// rows. Requested in one piece, before any change.
const SPACE_PER_ROW: usize = 128;

impl Table {
    /// Returns the current rows of `ids` (`[n]`, repetitions allowed), and initial values for ids that the table does
    /// not have.
    pub fn read_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        self.read_rows_if(ids, false)
    }

    /// Like [`Table::read_rows`], but works for a table that waits for a load too: for the load itself.
    pub fn read_incomplete_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        self.read_rows_if(ids, true)
    }

    fn read_rows_if(&self, ids: &[Id], incomplete: bool) -> Result<FoundRows> {
        let table = &self.inner;
        let mut all = FoundRows::default();
        memory::reserve(&mut all.headers, "read rows", ids.len())?;
        memory::reserve(&mut all.vectors, "read rows", ids.len() * table.floats())?;
        for ids in ids.chunks(ROWS_PER_READ) {
            let rows = table.reading_rows()?;
            let lock = || if incomplete { table.lock_any() } else { table.lock() };
            let (_, mut some) = table.with_device_rows(&rows, lock, |held| held.read(ids, rows.no_kernel_writes()))?;
            all.found.append(&mut some.found);
            all.headers.append(&mut some.headers);
            all.vectors.append(&mut some.vectors);
        }
        Ok(all)
    }

    /// Checks that no batch in flight uses any row.
    ///
    /// Errors: `State` while one does.
    pub fn check_unused(&self) -> Result<()> {
        self.inner.lock_any()?.check_unused()
    }

    /// Removes every row and the admission counts of pending ids, after an asynchronous save in progress.
    ///
    /// Errors: `State` while a batch in flight uses any row.
    pub fn clear(&self) -> Result<()> {
        self.clear_rows()?;
        self.inner.lock_any()?.clear_counts();
        Ok(())
    }

    /// Like [`Table::clear`], but keeps the admission counts.
    pub fn clear_rows(&self) -> Result<()> {
        let table = &self.inner;
        loop {
            table.check_process()?;
            table.wait_for_snapshot_end()?;
            let rows = table.reading_rows()?;
            let clear = |held: &mut TableGuard<'_>| {
                if held.has_snapshot() {
                    return Ok(false);
                }
                // The slots will be reused for other rows: no read may end in one of them.
                held.finish_loads();
                held.check_unused()?;
                held.clear().map(|()| true)
            };
            let (_, cleared) = table.with_device_rows(&rows, || table.lock_any(), clear)?;
            if cleared {
                return Ok(());
            }
        }
    }

    /// Allocates memory for `rows` more rows, as far as they fit the host budget.
    pub fn reserve_rows(&self, rows: u64) -> Result<()> {
        self.inner.lock_any()?.reserve(rows)
    }

    /// Overwrites or adds rows.
    ///
    /// Errors: `State` if a batch in flight uses one of them; `Input` for repeated ids, ids of another shard's buckets,
    /// or arrays of wrong lengths; `Capacity`; `Storage` and `Corruption` of existing rows that cannot be read. Nothing
    /// has changed then, unless the error states how many of the rows were imported: a table that drops rows when it is
    /// full imports them in parts, and an allocation may fail after a write has failed.
    pub fn import_rows(&self, block: RowBlock<'_>) -> Result<()> {
        memory::check()?;
        let table = &self.inner;
        let ids = check_block(table, block)?;
        let rows = table.reading_rows()?;
        let mut done = 0;
        let import = |held: &mut TableGuard<'_>| {
            held.finish_loads();
            let checked = table.check_writable().and_then(|()| held.check_rows_unused(ids[done..].iter().copied()));
            checked.map_err(|error| held.partial_error(error, done, ids.len(), "imported"))?;
            let imported = held.import(block, &ids, rows.no_kernel_writes(), &mut done);
            held.give_back_unused();
            imported
        };
        table.with_device_rows(&rows, || table.lock_any(), import).map(drop)
    }

    /// Like [`Table::import_rows`], for the distinct rows of a load. Rows that are new to the table and fit the host
    /// budget are copied directly to their slots. After an error any prefix of the rows may be in the table.
    pub fn import_columns(&self, rows: PickedRows<'_>) -> Result<()> {
        let floats = self.inner.floats();
        let mut begin = 0;
        while begin < rows.len() {
            let end = rows.len().min(begin + ROWS_PER_IMPORT);
            let done = begin + self.put_new(rows, begin, end)?;
            if done < end {
                // Some row exists already, or the tier is full: the rest of this part is imported like other rows.
                let (headers, vectors) = rows.block(done..end, floats)?;
                self.import_rows(RowBlock { headers: &headers, vectors: &vectors })?;
            }
            begin = end;
        }
        Ok(())
    }

    /// Puts the longest possible prefix of new rows into free slots of the host tier. Returns its length.
    fn put_new(&self, rows: PickedRows<'_>, begin: usize, end: usize) -> Result<usize> {
        memory::check()?;
        let table = &self.inner;
        let no_writes = table.reading_rows()?;
        let put = |held: &mut TableGuard<'_>| {
            table.check_writable()?;
            let put = held.put_new(rows, begin, &rows.ids(begin..end));
            held.give_back_unused();
            put
        };
        table.with_device_rows(&no_writes, || table.lock_any(), put).map(|(_, put)| put)
    }

    /// Removes rows. Returns the number of rows removed. Errors: as [`Table::import_rows`].
    pub fn remove_rows(&self, ids: &[Id]) -> Result<u64> {
        let table = &self.inner;
        let rows = table.reading_rows()?;
        memory::check_available("remove rows", ids.len() * SPACE_PER_ROW)?;
        let distinct: Vec<Id> = crate::index::dedupe(ids).unique;
        let forget = |held: &mut TableGuard<'_>| {
            table.check_writable()?;
            held.finish_loads();
            held.check_rows_unused(distinct.iter().copied())?;
            let forgotten = held.forget(&distinct, rows.no_kernel_writes());
            held.give_back_unused();
            forgotten
        };
        table.with_device_rows(&rows, || table.lock(), forget).map(|(_, removed)| removed)
    }
}

/// Returns the ids of rows to import, after checking that they are distinct and belong to this shard.
fn check_block(table: &TableInner, block: RowBlock<'_>) -> Result<Vec<Id>> {
    let (floats, name) = (table.floats(), &table.config.name);
    let refuse = |message: String| Err(Error::new(Kind::Input, format!("table {name:?}: {message}")));
    let rows = block.headers.len();
    if block.vectors.len() != rows * floats {
        return refuse(format!(
            "{rows} ids come with {} floats; {} are needed, {floats} a row",
            block.vectors.len(),
            rows * floats
        ));
    }
    let record_bytes = if table.ssd.is_some() { floats * 4 + size_of::<RowHeader>() } else { 0 };
    memory::check_available("import rows", rows * (SPACE_PER_ROW + record_bytes))?;
    let ids: Vec<Id> = block.headers.iter().map(|header| header.id).collect();
    let distinct = crate::index::dedupe(&ids);
    if distinct.unique.len() != ids.len() {
        // At the first repeated id, the number is not the next one.
        let twice = distinct.inverse.iter().enumerate().find(|&(position, &number)| position != number as usize);
        let id = twice.map_or(0, |(position, _)| ids[position]);
        return refuse(format!("id {id} is given twice"));
    }
    let (buckets, bucketing) = (&table.config.buckets, table.config.bucketing());
    if let Some(id) = ids.iter().copied().find(|&id| !buckets.contains(&bucketing.of(id))) {
        return refuse(format!(
            "id {id} is of bucket {}, this shard owns {buckets:?}; import it on its owner",
            bucketing.of(id)
        ));
    }
    Ok(ids)
}
