//! The rows of a table by id: read them, put them in, take them out.

use super::handle::Table;
use crate::cache::columns::PickedRows;
use crate::cache::locks::{TableGuard, TableInner};
use crate::cache::rows::{FoundRows, RowBlock};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::types::Id;

/// Rows that are read under one hold of the table's lock.
const ROWS_PER_READ: usize = 4096;
/// Rows of columns that are put in under one hold of the table's lock.
const ROWS_PER_IMPORT: usize = 65_536;
/// Bytes that an import or a removal takes for each of its rows while it runs: ids, their table while they are compared, and where rows
/// are. They are asked for in one piece, before anything has changed.
const SPACE_PER_ROW: usize = 128;

impl Table {
    /// The rows of `ids` (`[n]`, repetitions allowed) as they are now, and initial values for ids that the table does not have.
    pub fn read_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        self.read_rows_if(ids, false)
    }

    /// As [`Table::read_rows`], also of a table that waits for a load: for the load itself.
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

    /// Check that no batch in flight uses any row.
    ///
    /// Errors: `State` while one does.
    pub fn check_unused(&self) -> Result<()> {
        self.inner.lock_any()?.check_unused()
    }

    /// Forget every row, and the counts of ids that wait for rows, once a save beside training is over where one is under way.
    ///
    /// Errors: `State` while a batch in flight uses any row.
    pub fn clear(&self) -> Result<()> {
        self.clear_rows()?;
        self.inner.lock_any()?.clear_counts();
        Ok(())
    }

    /// As [`Table::clear`], without the counts, which stay.
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
                // The slots are about to be other rows': no read may end in one of them any more.
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

    /// Ask the system now for the memory of so many more rows, as far as the host budget has room for them.
    pub fn reserve_rows(&self, rows: u64) -> Result<()> {
        self.inner.lock_any()?.reserve(rows)
    }

    /// Overwrite or add rows.
    ///
    /// Errors: `State` when a batch in flight uses one of them; `Input` for repeated ids, ids of another shard's buckets, or arrays that
    /// do not fit; `Capacity`; `Storage` and `Corruption` of rows that are there and cannot be read. Nothing has changed then, unless the
    /// error says how many of the rows were imported: a table that drops rows when it is full takes them in parts, and the system may
    /// refuse memory once a write has failed.
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

    /// As [`Table::import_rows`], of rows that are each given once, for a load. Rows that are new to the table and fit the host budget go
    /// straight to their slots. After an error any number of the rows from the first on are in the table.
    pub fn import_columns(&self, rows: PickedRows<'_>) -> Result<()> {
        let floats = self.inner.floats();
        let mut begin = 0;
        while begin < rows.len() {
            let end = rows.len().min(begin + ROWS_PER_IMPORT);
            let done = begin + self.put_new(rows, begin, end)?;
            if done < end {
                // Some row is known already, or the tier is full: the rest of this part goes the usual way.
                let (headers, vectors) = rows.block(done..end, floats)?;
                self.import_rows(RowBlock { headers: &headers, vectors: &vectors })?;
            }
            begin = end;
        }
        Ok(())
    }

    /// Put rows that are new into free slots of the host tier, as many from the first on as possible. Returns how many.
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

    /// Forget rows. Returns how many of them the table had. Errors as [`Table::import_rows`].
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

/// The ids of rows that are to be imported. Each is there once and of this shard.
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
        // At the first id that was met before, the number is not the next one.
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
