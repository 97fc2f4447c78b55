//! Writes groups to data files. A group whose file gets no other is one image with its header; otherwise the header is
//! written when the file ends.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::format::{ColumnField, FileLayout, GroupLayout, MAX_FILE_BYTES};
use crate::checkpoint::chunked_file::{ImageFile, ImageWriter};
use crate::checkpoint::manifest::CHUNK_BYTES;
use crate::checkpoint::manifest::manifests::{DataFile, GroupEntry, GroupShape, MAX_GROUPS_PER_FILE};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::error::{Kind, Result};
use crate::io::{ALIGNMENT, AlignedBuf};

/// Writes the data files of one rank's shard of a table, or its files of counts.
pub(super) struct DataFileWriter<'a> {
    pub(super) output: ImageWriter,
    content: FileContent<'a>,
    /// Path of the file of each number.
    path: Box<dyn Fn(usize) -> PathBuf + 'a>,
    /// The file that gets more groups.
    open: Option<OpenDataFile>,
    files: Vec<DataFile>,
}

/// Contents of the files.
pub(super) struct FileContent<'a> {
    pub(super) spec: &'a TableSpec,
    /// Buckets of the rank.
    pub(super) buckets: Range<u32>,
    /// Number of columns of vectors.
    pub(super) columns: u32,
    /// Lays out a group. Returns `None` if the sizes overflow.
    pub(super) layout: Box<dyn Fn(GroupShape) -> Option<GroupLayout> + 'a>,
    /// Upper bound of the shapes of groups.
    pub(super) largest: GroupShape,
}

impl FileContent<'_> {
    fn layout(&self, shape: GroupShape) -> Result<GroupLayout> {
        (self.layout)(shape).ok_or_else(|| Kind::Input.error("a group's size overflows"))
    }

    /// Bytes that the header of a file of `groups` groups needs at most.
    fn header_bytes(&self, groups: usize) -> Result<usize> {
        Ok(FileLayout::max_header_bytes(self.spec, &self.buckets, groups, &self.layout(self.largest)?))
    }
}

/// A file of several groups.
struct OpenDataFile {
    output: Arc<ImageFile>,
    /// Maximum number of groups, for which there is space in the header.
    max_groups: usize,
    /// Bytes before the page of the first group, whole pages.
    header_bytes: usize,
    /// End of the last group.
    end: u64,
    groups: Vec<(u64, GroupLayout)>,
    entries: Vec<GroupEntry>,
}

impl<'a> DataFileWriter<'a> {
    pub(super) fn new(
        output: ImageWriter,
        content: FileContent<'a>,
        path: impl Fn(usize) -> PathBuf + 'a,
    ) -> DataFileWriter<'a> {
        Self { output, content, path: Box::new(path), open: None, files: Vec::new() }
    }

    /// Upper bound of the size of the image of a group of this shape, in any file.
    pub(super) fn image_bytes(&self, shape: GroupShape) -> Result<usize> {
        // A page more covers the bucket offsets of a shape with fewer buckets, which may be more.
        Ok(self.content.header_bytes(1)? + self.content.layout(shape)?.data_bytes + 3 * ALIGNMENT)
    }

    /// Writes a group. `expected` is the approximate number of groups that are still to be written, including this one.
    /// `fill` receives the bytes of the columns with checksums, and their checksums to fill. After an error of `fill`
    /// nothing has changed. Does not wait if [`ImageWriter::wait_for_buffer`] has returned.
    pub(super) fn push(
        &mut self,
        shape: GroupShape,
        expected: usize,
        fill: impl FnOnce(&GroupLayout, &mut [u8], &mut [u32]) -> Result<()>,
    ) -> Result<()> {
        let layout = self.content.layout(shape)?;
        if self.open.as_ref().is_some_and(|open| !open.has_space(layout.data_bytes)) {
            self.end_file()?;
        }
        let alone = self.open.is_none() && expected <= 1;
        let header_bytes = match &self.open {
            Some(_) => 0,
            None if alone => self.content.header_bytes(1)?.next_multiple_of(64),
            None => self.content.header_bytes(expected.min(MAX_GROUPS_PER_FILE))?.next_multiple_of(ALIGNMENT),
        };
        // The image of a group starts with a page. The only group of a file is in the header's last page.
        let (page, start) = match &self.open {
            Some(open) => (open.end, layout.lead),
            None if alone => (0, header_bytes + layout.lead),
            None => (header_bytes as u64, layout.lead),
        };
        let len = (start + layout.data_bytes).next_multiple_of(ALIGNMENT);
        let mut image = self.output.buffer(len)?;
        // Before the first group are the blanks of the header, before others the padding of the previous one.
        image[..start].fill(if self.open.is_none() { b' ' } else { 0 });
        let group = (shape, page + start as u64);
        let written = layout.write(group, &mut image[start..len], |data, checksums| fill(&layout, data, checksums));
        let entry = match written {
            Ok(entry) => entry,
            Err(error) => {
                self.output.free.push(image);
                return Err(error);
            }
        };
        if alone {
            return self.write_alone((layout, entry), image, len);
        }
        let path = (self.path)(self.files.len());
        let open = self.open.get_or_insert_with(|| OpenDataFile::new(path, (header_bytes, len), expected));
        self.output.write(&open.output, page, image, len)?;
        open.end = page + len as u64;
        open.groups.push((entry.offset, layout));
        open.entries.push(entry);
        Ok(())
    }

    /// Like [`Self::push`]. `fill` receives each checksummed column, zero-initialized, in file order.
    pub(super) fn push_columns(
        &mut self,
        shape: GroupShape,
        expected: usize,
        mut fill: impl FnMut(&GroupLayout, ColumnField, &mut [u8]),
    ) -> Result<()> {
        self.push(shape, expected, |layout, data, checksums| {
            data.fill(0);
            for column in layout.checked_columns() {
                fill(layout, column.field, &mut data[column.range()]);
                let chunks = data[column.range()].chunks(CHUNK_BYTES);
                let to = checksums[column.first_checksum..].iter_mut();
                to.zip(chunks).for_each(|(to, chunk)| *to = crc32c::crc32c(chunk));
            }
            Ok(())
        })
    }

    /// Writes the only group of a file, whose image has space for the header.
    fn write_alone(
        &mut self,
        (layout, entry): (GroupLayout, GroupEntry),
        mut image: AlignedBuf,
        len: usize,
    ) -> Result<()> {
        let groups = [(entry.offset, layout)];
        let FileContent { spec, buckets, .. } = &self.content;
        let header = FileLayout { spec, buckets, groups: &groups, bytes: len as u64 }.header();
        image[..header.len()].copy_from_slice(&header);
        let file = Arc::new(ImageFile::new((self.path)(self.files.len()), len as u64));
        self.output.write_alone(&file, image, len)?;
        self.add_file(len as u64, &header, vec![entry]);
        Ok(())
    }

    /// Ends the file that was to get more groups. After `Memory` nothing has changed.
    fn end_file(&mut self) -> Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        let FileContent { spec, buckets, .. } = &self.content;
        let header = FileLayout { spec, buckets, groups: &open.groups, bytes: open.end }.header();
        let mut head = AlignedBuf::try_zeroed(open.header_bytes)?;
        head.copy_from_slice(&header[..open.header_bytes]);
        if let Some(OpenDataFile { output, end, entries, .. }) = self.open.take() {
            self.output.end_file(&output, head, end)?;
            self.add_file(end, &header, entries);
        }
        Ok(())
    }

    fn add_file(&mut self, bytes: u64, header: &[u8], groups: Vec<GroupEntry>) {
        let header_crc32c = crc32c::crc32c(header);
        self.files.push(DataFile { bytes, header_crc32c, column_begin: 0, column_end: self.content.columns, groups });
    }

    /// Waits until everything is written and synced. Returns the files.
    pub(super) fn finish(mut self) -> Result<Vec<DataFile>> {
        self.end_file()?;
        self.output.threads.end()?;
        Ok(self.files)
    }
}

impl OpenDataFile {
    /// Creates a file whose first group starts after `header_bytes`. `expected` is the approximate number of groups, whose
    /// images are `image_bytes` long.
    fn new(path: PathBuf, (header_bytes, image_bytes): (usize, usize), expected: usize) -> Self {
        let max_groups = expected.min(MAX_GROUPS_PER_FILE);
        // The last group may be smaller.
        let expected_bytes = if expected == usize::MAX { 0 } else { header_bytes + image_bytes * max_groups };
        Self {
            output: Arc::new(ImageFile::new(path, expected_bytes as u64)),
            max_groups,
            header_bytes,
            end: header_bytes as u64,
            groups: Vec::new(),
            entries: Vec::new(),
        }
    }

    fn has_space(&self, data_bytes: usize) -> bool {
        let end = self.end + (data_bytes + 2 * ALIGNMENT) as u64;
        self.groups.len() < self.max_groups && end <= MAX_FILE_BYTES
    }
}
