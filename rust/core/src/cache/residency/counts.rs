//! Row counts of a table: present rows, and rows that batches in flight may add.

/// Row counts of one table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowCounts {
    /// Rows in all tiers: inserted and not removed.
    rows: u64,
    /// Rows that are planned and not inserted yet.
    provisional: u64,
    /// Provisional rows held by training plans in flight, summed over the plans: a row held by two plans counts twice.
    /// Evaluations pledge nothing, because they insert no rows.
    pledged: u64,
    /// Rows dropped because the table was full.
    dropped: u64,
    /// Rows expired by the table's eviction rule.
    expired: u64,
}

impl RowCounts {
    /// The counts of a table opened with `rows` rows.
    pub(crate) fn of(rows: u64) -> Self {
        Self { rows, ..Self::default() }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn provisional(&self) -> u64 {
        self.provisional
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// Maximum number of provisional rows that may be inserted.
    pub(crate) fn max_new_rows(&self) -> u64 {
        self.provisional.min(self.pledged)
    }

    /// Counts rows that became provisional.
    pub(crate) fn became_provisional(&mut self, rows: u64) {
        self.provisional += rows;
    }

    /// Counts provisional rows that were discarded without training.
    pub(crate) fn vanished(&mut self, rows: u64) {
        self.provisional -= rows;
    }

    /// Counts provisional rows that were trained for the first time.
    pub(crate) fn inserted(&mut self, rows: u64) {
        self.provisional -= rows;
        self.rows += rows;
    }

    /// Counts provisional rows that a training plan acquires.
    pub(crate) fn pledge(&mut self, rows: u64) {
        self.pledged += rows;
    }

    /// Counts provisional rows that a training plan releases.
    pub(crate) fn take_back_pledge(&mut self, rows: u64) {
        self.pledged -= rows;
    }

    /// Counts imported rows that were missing before.
    pub(crate) fn added(&mut self, rows: u64) {
        self.rows += rows;
    }

    /// Counts removed rows.
    pub(crate) fn removed(&mut self, rows: u64) {
        self.rows -= rows;
    }

    /// Counts rows expired by the table's eviction rule.
    pub(crate) fn expired_by_rule(&mut self, rows: u64) {
        self.rows -= rows;
        self.expired += rows;
    }

    /// Counts rows dropped because the table was full.
    pub(crate) fn dropped_when_full(&mut self, rows: u64) {
        self.rows -= rows;
        self.dropped += rows;
    }

    /// Resets the counts after all rows were removed. No plan holds any.
    pub(crate) fn cleared(&mut self) {
        self.rows = 0;
        self.provisional = 0;
    }
}
