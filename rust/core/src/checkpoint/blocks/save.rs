//! A RecIS-format save: created by the first shard, written shard by shard, and published by the last shard.

use serde::{Deserialize, Serialize};

use super::files::{MAX_MANIFEST_BYTES, read_small, render};
use super::index::{RecisIndexes, check_complete};
use super::layout::OrderedFields;
use super::manifest::{RecisSaveManifest, RecisShardManifest, parse};
use super::names::{
    BEGUN_FILE, INDEX_FILE, LATEST_FILE, LatestRecisSave, NAMES_FILE, RecisSaveName, RecisShard, list_saves,
};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::holds::{WaitCallback, hold_recis_root, hold_unread};
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::checkpoint::manifest::names::MANIFEST_FILE;
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, DirLockPurpose, write_atomically};

/// Selects the save that a shard joins.
#[derive(Clone, Debug)]
pub enum RecisJoinMode {
    /// The latest save that waits for this shard and whose shards saved the tables at the same steps; a new one if
    /// there is none.
    ///
    /// Steps distinguish saves if shards cannot communicate: a shard that was killed in one save and joins the next
    /// does not complete the first one with newer rows.
    NewestOrNew,
    /// A new save.
    New,
    /// The save of this name, which another shard created.
    Named(String),
}

/// A shard's part of a save. No other process removes the save or writes this shard while this exists.
#[derive(Debug)]
pub struct RecisSave {
    root: CheckpointDirectory,
    /// The save's own directory.
    dir: CheckpointDirectory,
    name: RecisSaveName,
    shard: RecisShard,
    /// Locks of the save's directory (shared with the other shards) and of this shard (exclusive).
    _held: [DirLock; 2],
}

/// Result of finishing a shard's part.
#[derive(Debug)]
pub enum RecisShardOutcome {
    /// Other shards have not saved yet.
    WaitingForShards,
    /// This was the last shard: loads find the save. Contains an error for each older save that could not be removed;
    /// the next save tries again.
    Published(Vec<Error>),
}

/// `begun.json`.
#[derive(Serialize)]
struct BegunRecord<'a> {
    shards: u32,
    steps: OrderedFields<'a, u64>,
}

/// `begun.json`, deserialized.
#[derive(Deserialize)]
struct ParsedBegunRecord {
    shards: u32,
    #[serde(deserialize_with = "in_order")]
    steps: Vec<(String, u64)>,
}

/// Deserializes the fields of a JSON object in their order.
fn in_order<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, u64)>, D::Error> {
    struct OrderedFieldsVisitor;
    impl<'de> serde::de::Visitor<'de> for OrderedFieldsVisitor {
        type Value = Vec<(String, u64)>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of numbers")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut fields = Vec::new();
            while let Some(field) = map.next_entry()? {
                fields.push(field);
            }
            Ok(fields)
        }
    }
    deserializer.deserialize_map(OrderedFieldsVisitor)
}

impl RecisSave {
    /// Joins or creates a save in `root`. `steps` has the training step of each table that the shard saves. `random`
    /// distinguishes saves that start at the same time. `wait` is called while another process creates or publishes a
    /// save; an error from it aborts the wait.
    ///
    /// Errors: `InUse` if a named save does not match, or the shard takes part in it already; `Corruption` of
    /// `LATEST.blocks`; `Storage`.
    pub fn begin(
        root: &CheckpointDirectory,
        shard: RecisShard,
        steps: &[(String, u64)],
        join: &RecisJoinMode,
        random: u64,
        wait: &mut WaitCallback<'_>,
    ) -> Result<Self> {
        root.check_to_save()?;
        let _alone = hold_recis_root(root, DirLockPurpose::ToChange, wait)?;
        let done = LatestRecisSave::find(root)?.map_or(0, |latest| latest.name.seq());
        let saves = list_saves(root)?;
        if matches!(join, RecisJoinMode::NewestOrNew) && shard.count > 1 {
            for &name in saves.iter().rev().filter(|name| name.seq() > done) {
                if let Some(joined) = Self::join(root, name, shard, steps)? {
                    return Ok(joined);
                }
            }
        }
        if let RecisJoinMode::Named(name) = join {
            let name: RecisSaveName = name.parse()?;
            let RecisShard { index, count } = shard;
            return Self::join(root, name, shard, steps)?.ok_or_else(|| {
                let dir = name.dir(root);
                let what = format!(
                    "shard {index} of {count} does not fit, or takes part already in, {}",
                    dir.path().display()
                );
                Error::new(Kind::InUse, format!("{what}: save it once"))
            });
        }
        let highest = saves.last().map_or(0, |name| name.seq()).max(done);
        let used_up =
            || Error::new(Kind::Corruption, format!("{}: the numbers of saves are used up", root.path().display()));
        let seq = highest.checked_add(1).ok_or_else(used_up)?;
        let name = RecisSaveName(CheckpointName { seq, random });
        let dir = name.dir(root);
        let changed = || Error::corruption(&dir.join(BEGUN_FILE), 0, "the file", "as it was just written", "another");
        create_save(&dir, root, shard, steps)
            .and_then(|()| Self::join(root, name, shard, steps)?.ok_or_else(changed))
            .inspect_err(|_| drop(dir.remove()))
    }

    /// Joins the save `name`; returns `None` if it does not match, or if another process removes it or writes this
    /// shard.
    fn join(
        root: &CheckpointDirectory,
        name: RecisSaveName,
        shard: RecisShard,
        steps: &[(String, u64)],
    ) -> Result<Option<Self>> {
        let dir = name.dir(root);
        let Some(ParsedBegunRecord { shards, steps: mut known }) = read_begun(&dir)? else {
            return Ok(None);
        };
        let other = |(table, step): &(String, u64)| known.iter().any(|(name, known)| name == table && known != step);
        let written = dir.has(&shard.manifest_file())?;
        if shards != shard.count || written || steps.iter().any(other) {
            return Ok(None);
        }
        let held = dir.hold(DirLockPurpose::ToRead).and_then(|shared| {
            let alone = dir.engine().lock_file(&dir.join(shard.lock_file()))?;
            Ok([shared, alone])
        });
        let held = match held {
            Err(error) if error.kind() == Kind::InUse => return Ok(None),
            held => held?,
        };
        let more: Vec<(String, u64)> =
            steps.iter().filter(|(table, _)| known.iter().all(|(name, _)| name != table)).cloned().collect();
        if !more.is_empty() {
            known.extend(more);
            let begun = BegunRecord { shards, steps: OrderedFields(&known) };
            write_atomically(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)?;
        }
        Ok(Some(Self { root: root.clone(), dir, name, shard, _held: held }))
    }

    /// Name of the save, for the other shards.
    pub fn name(&self) -> RecisSaveName {
        self.name
    }

    pub(super) fn shard(&self) -> RecisShard {
        self.shard
    }

    /// The save's own directory.
    pub(super) fn dir(&self) -> &CheckpointDirectory {
        &self.dir
    }

    /// Writes the shard's manifest, after everything it refers to is durable. The last shard publishes the save.
    pub(super) fn finish(
        &self,
        manifest: &RecisShardManifest,
        wait: &mut WaitCallback<'_>,
    ) -> Result<RecisShardOutcome> {
        let dir = &self.dir;
        write_atomically(dir.engine(), &dir.join(self.shard.manifest_file()), &render(manifest)?)?;
        let _alone = hold_recis_root(&self.root, DirLockPurpose::ToChange, wait)?;
        if dir.has(MANIFEST_FILE)? {
            return Ok(RecisShardOutcome::WaitingForShards);
        }
        for shard in self.shard.all() {
            if !dir.has(&shard.manifest_file())? {
                return Ok(RecisShardOutcome::WaitingForShards);
            }
        }
        self.publish()?;
        Ok(RecisShardOutcome::Published(remove_older_saves(&self.root, self.name)))
    }

    /// Makes the save the latest one. The caller holds the root exclusively, and the manifests of all shards exist.
    fn publish(&self) -> Result<()> {
        let (engine, dir) = (self.dir.engine(), &self.dir);
        if let Some(latest) = LatestRecisSave::find(&self.root)?.filter(|latest| latest.name.seq() > self.name.seq()) {
            let what = format!(
                "{} is older than {}, which was completed meanwhile: save again",
                dir.path().display(),
                latest.name
            );
            return Err(Error::new(Kind::State, what));
        }
        let read = |shard: RecisShard| {
            let path = dir.join(shard.manifest_file());
            let bytes = read_small(engine, &path, MAX_MANIFEST_BYTES)?;
            Ok((crc32c::crc32c(&bytes), parse::<RecisShardManifest>(&bytes, &path)?))
        };
        let (checksums, manifests): (Vec<u32>, Vec<RecisShardManifest>) =
            self.shard.all().map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        check_complete(&manifests)?;
        let indexes = RecisIndexes::new(&manifests)?;
        write_atomically(engine, &dir.join(NAMES_FILE), &indexes.names)?;
        write_atomically(engine, &dir.join(INDEX_FILE), &indexes.files)?;
        let manifest = render(&RecisSaveManifest::new(checksums))?;
        write_atomically(engine, &dir.join(MANIFEST_FILE), &manifest)?;
        let latest = LatestRecisSave { name: self.name, manifest_crc32c: crc32c::crc32c(&manifest) };
        write_atomically(engine, &self.root.join(LATEST_FILE), format!("{latest}\n").as_bytes())
    }

    /// Abandons the shard's part. A save of one shard is removed, unless `LATEST.blocks` names it already. A save of
    /// several shards stays until a later save removes it, because the others may have written their parts.
    pub fn abandon(self) -> Result<()> {
        let is_named =
            || Ok::<_, Error>(LatestRecisSave::find(&self.root)?.is_some_and(|latest| latest.name == self.name));
        if self.shard.count > 1 || is_named()? {
            return Ok(());
        }
        self.dir.remove()
    }
}

/// Creates the directory `dir` of a new save in `root`.
fn create_save(
    dir: &CheckpointDirectory,
    root: &CheckpointDirectory,
    shard: RecisShard,
    steps: &[(String, u64)],
) -> Result<()> {
    dir.make()?;
    root.sync()?;
    let begun = BegunRecord { shards: shard.count, steps: OrderedFields(steps) };
    write_atomically(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)
}

/// Reads `begun.json` of the save in `dir`; returns `None` if it is missing or corrupted.
fn read_begun(dir: &CheckpointDirectory) -> Result<Option<ParsedBegunRecord>> {
    if !dir.has(BEGUN_FILE)? {
        return Ok(None);
    }
    let path = dir.join(BEGUN_FILE);
    match read_small(dir.engine(), &path, MAX_MANIFEST_BYTES).and_then(|bytes| parse(&bytes, &path)) {
        Err(error) if error.kind() == Kind::Corruption => Ok(None),
        found => found.map(Some),
    }
}

/// Removes the saves older than `kept` that no process writes or reads. Returns an error for each save that could not
/// be removed.
fn remove_older_saves(root: &CheckpointDirectory, kept: RecisSaveName) -> Vec<Error> {
    let remove = |name: RecisSaveName| {
        let dir = name.dir(root);
        let Some(_unused) = hold_unread(&dir)? else { return Ok(()) };
        dir.remove()
    };
    match list_saves(root) {
        Err(error) => vec![error],
        Ok(found) => {
            found.into_iter().filter(|name| name.seq() < kept.seq()).filter_map(|name| remove(name).err()).collect()
        }
    }
}
