//! Rows that are handed over in large groups: where they lie, or gathered from smaller parts.

use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowHeader, RowList};

/// Takes rows in groups. Each group has at most as many rows as the sink has room for.
pub trait GroupSink {
    /// Floats of a row's vector part.
    fn vector_floats(&self) -> usize;
    /// Says about how many rows are to come, `usize::MAX` where that is not known. A sink may want smaller groups where there are few.
    fn expect_rows(&mut self, rows: usize) {
        let _ = rows;
    }
    /// Wait until there is room for a group. Returns the most rows that it may have, at least 1.
    fn wait_for_space(&mut self) -> Result<usize>;
    /// Take a group. It has at most as many rows as there is room for. The rows can be read during the call only. The caller may hold the
    /// lock of the rows' table meanwhile, so this must not wait for anything.
    fn take(&mut self, rows: RowList<'_>) -> Result<()>;
}

/// Copies rows that come in small parts into groups.
pub struct GroupGatherer<'a> {
    sink: &'a mut dyn GroupSink,
    floats: usize,
    /// How many rows make a full group. It is asked for when a group begins.
    group_rows: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl std::fmt::Debug for GroupGatherer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupGatherer").field("rows", &self.headers.len()).finish_non_exhaustive()
    }
}

impl<'a> GroupGatherer<'a> {
    /// Hand groups to `sink`.
    pub fn new(sink: &'a mut dyn GroupSink) -> Self {
        let floats = sink.vector_floats();
        Self { sink, floats, group_rows: 0, headers: Vec::new(), vectors: Vec::new() }
    }

    /// Add rows: headers `[n]` and vector parts `[n, V]`. Groups are smaller where the system has no memory for full ones.
    ///
    /// Errors: `Input` where the vector parts are not as long as that, `Memory`, and what the sink returns.
    pub fn add(&mut self, mut headers: &[RowHeader], mut vectors: &[f32]) -> Result<()> {
        if vectors.len() != headers.len() * self.floats {
            return Err(Error::new(
                Kind::Input,
                format!("{} rows come with {} floats instead of {} each", headers.len(), vectors.len(), self.floats),
            ));
        }
        while !headers.is_empty() {
            if self.headers.is_empty() {
                self.group_rows = self.sink.wait_for_space()?;
                if self.headers.capacity() == 0 {
                    // All at once, because growing would hold the group twice. Memory that is not filled yet is not resident.
                    self.headers = memory::vec_with_capacity(self.group_rows);
                    self.vectors = memory::vec_with_capacity(self.group_rows * self.floats);
                }
            }
            let fits = headers.len().min(self.group_rows - self.headers.len());
            if let Err(refused) = self.reserve(fits) {
                // Hand over a smaller group, which gives its memory back.
                if self.headers.is_empty() {
                    return Err(refused);
                }
                self.finish()?;
                continue;
            }
            let (head, rest) = headers.split_at(fits);
            let (values, rest_values) = vectors.split_at(fits * self.floats);
            self.headers.extend_from_slice(head);
            self.vectors.extend_from_slice(values);
            (headers, vectors) = (rest, rest_values);
            if self.headers.len() == self.group_rows {
                self.finish()?;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, rows: usize) -> Result<()> {
        memory::reserve(&mut self.headers, "gather rows for a file", rows)?;
        memory::reserve(&mut self.vectors, "gather rows for a file", rows * self.floats)
    }

    /// Hand over the group that was begun, if there is one.
    pub fn finish(&mut self) -> Result<()> {
        if self.headers.is_empty() {
            return Ok(());
        }
        self.sink.take(RowList::block(&self.headers, &self.vectors, self.floats))?;
        self.headers.clear();
        self.vectors.clear();
        Ok(())
    }
}
