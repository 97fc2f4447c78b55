//! A block-level save: begun by whichever shard comes first, written shard by shard, and published by the last of them.

use serde::{Deserialize, Serialize};

use super::files::{MAX_MANIFEST_BYTES, read_small, render};
use super::index::{Indexes, check_whole};
use super::layout::InOrder;
use super::manifest::{SaveManifest, ShardManifest, parse};
use super::names::{BEGUN_FILE, BlockSaveName, INDEX_FILE, LATEST_FILE, LatestBlocks, NAMES_FILE, Shard, saves};
use crate::checkpoint::directory::Directory;
use crate::checkpoint::manifest::holds::{Wait, hold_root, hold_unread};
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::checkpoint::manifest::names::MANIFEST_FILE;
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, Hold, publish};

/// Which save a shard takes part in.
#[derive(Clone, Debug)]
pub enum Join {
    /// The newest that waits for this shard and whose shards saw the tables at the same steps; a new one where there is none.
    ///
    /// Steps tell saves apart where shards have no way to agree: a shard that was killed in one save and takes part in the next does
    /// not complete the first one with newer rows.
    NewestOrNew,
    /// A new one.
    New,
    /// The one of this name, which another shard began.
    Named(String),
}

/// A shard's part of a save, which nobody sweeps, and no other process writes, as long as this lives.
#[derive(Debug)]
pub struct BlockSave {
    root: Directory,
    /// The save's own directory.
    dir: Directory,
    name: BlockSaveName,
    shard: Shard,
    /// Of the save's directory, with the other shards; and of this shard, alone.
    _held: [DirLock; 2],
}

/// What the end of a shard's part did.
#[derive(Debug)]
pub enum Finished {
    /// Other shards have not saved yet.
    OthersWait,
    /// It was the last shard: a load finds the save. With it, the older saves that could not be removed; the next save tries again.
    Published(Vec<Error>),
}

/// `begun.json`.
#[derive(Serialize)]
struct Begun<'a> {
    shards: u32,
    steps: InOrder<'a, u64>,
}

/// The same, as it is read.
#[derive(Deserialize)]
struct FoundBegun {
    shards: u32,
    #[serde(deserialize_with = "in_order")]
    steps: Vec<(String, u64)>,
}

/// The fields of a JSON object, in their order.
fn in_order<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, u64)>, D::Error> {
    struct Fields;
    impl<'de> serde::de::Visitor<'de> for Fields {
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
    deserializer.deserialize_map(Fields)
}

impl BlockSave {
    /// Take part in a save in `root`. `steps`: of the tables that the shard saves. `random` tells saves that begin at the same time
    /// apart. `wait` is called while another process begins or publishes one, and ends the wait by an error.
    ///
    /// Errors: `InUse` where a named save does not fit, or the shard takes part in it already; `Corruption` of `LATEST.blocks`; `Storage`.
    pub fn begin(
        root: &Directory,
        shard: Shard,
        steps: &[(String, u64)],
        join: &Join,
        random: u64,
        wait: &mut Wait<'_>,
    ) -> Result<Self> {
        root.check_to_save()?;
        let _alone = hold_root(root, Hold::ToChange, wait)?;
        let done = LatestBlocks::find(root)?.map_or(0, |latest| latest.name.seq());
        let saves = saves(root)?;
        if matches!(join, Join::NewestOrNew) && shard.count > 1 {
            for &name in saves.iter().rev().filter(|name| name.seq() > done) {
                if let Some(joined) = Self::join(root, name, shard, steps)? {
                    return Ok(joined);
                }
            }
        }
        if let Join::Named(name) = join {
            let name: BlockSaveName = name.parse()?;
            let Shard { index, count } = shard;
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
        let name = BlockSaveName(CheckpointName { seq, random });
        let dir = name.dir(root);
        let changed = || Error::corruption(&dir.join(BEGUN_FILE), 0, "the file", "as it was just written", "another");
        make(&dir, root, shard, steps)
            .and_then(|()| Self::join(root, name, shard, steps)?.ok_or_else(changed))
            .inspect_err(|_| drop(dir.remove()))
    }

    /// Take part in the save `name`; `None` where it does not fit, or where another process sweeps it or writes this shard.
    fn join(root: &Directory, name: BlockSaveName, shard: Shard, steps: &[(String, u64)]) -> Result<Option<Self>> {
        let dir = name.dir(root);
        let Some(FoundBegun { shards, steps: mut known }) = read_begun(&dir)? else {
            return Ok(None);
        };
        let other = |(table, step): &(String, u64)| known.iter().any(|(name, known)| name == table && known != step);
        let written = dir.has(&shard.manifest_file())?;
        if shards != shard.count || written || steps.iter().any(other) {
            return Ok(None);
        }
        let held = dir.hold(Hold::ToRead).and_then(|shared| {
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
            let begun = Begun { shards, steps: InOrder(&known) };
            publish(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)?;
        }
        Ok(Some(Self { root: root.clone(), dir, name, shard, _held: held }))
    }

    /// The save's name, for the other shards.
    pub fn name(&self) -> BlockSaveName {
        self.name
    }

    /// The shard.
    pub(super) fn shard(&self) -> Shard {
        self.shard
    }

    /// The save's own directory.
    pub(super) fn dir(&self) -> &Directory {
        &self.dir
    }

    /// Write the shard's manifest, when all that it names is durable. The last shard of all publishes the save.
    pub(super) fn finish(&self, manifest: &ShardManifest, wait: &mut Wait<'_>) -> Result<Finished> {
        let dir = &self.dir;
        publish(dir.engine(), &dir.join(self.shard.manifest_file()), &render(manifest)?)?;
        let _alone = hold_root(&self.root, Hold::ToChange, wait)?;
        if dir.has(MANIFEST_FILE)? {
            return Ok(Finished::OthersWait);
        }
        for shard in self.shard.all() {
            if !dir.has(&shard.manifest_file())? {
                return Ok(Finished::OthersWait);
            }
        }
        self.publish()?;
        Ok(Finished::Published(sweep(&self.root, self.name)))
    }

    /// Make the save the newest one. Called while the root is held alone and every shard's manifest is there.
    fn publish(&self) -> Result<()> {
        let (engine, dir) = (self.dir.engine(), &self.dir);
        if let Some(latest) = LatestBlocks::find(&self.root)?.filter(|latest| latest.name.seq() > self.name.seq()) {
            let what = format!(
                "{} is older than {}, which was completed meanwhile: save again",
                dir.path().display(),
                latest.name
            );
            return Err(Error::new(Kind::State, what));
        }
        let read = |shard: Shard| {
            let path = dir.join(shard.manifest_file());
            let bytes = read_small(engine, &path, MAX_MANIFEST_BYTES)?;
            Ok((crc32c::crc32c(&bytes), parse::<ShardManifest>(&bytes, &path)?))
        };
        let (checksums, manifests): (Vec<u32>, Vec<ShardManifest>) =
            self.shard.all().map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        check_whole(&manifests)?;
        let indexes = Indexes::new(&manifests)?;
        publish(engine, &dir.join(NAMES_FILE), &indexes.names)?;
        publish(engine, &dir.join(INDEX_FILE), &indexes.files)?;
        let manifest = render(&SaveManifest::new(checksums))?;
        publish(engine, &dir.join(MANIFEST_FILE), &manifest)?;
        let latest = LatestBlocks { name: self.name, manifest_crc32c: crc32c::crc32c(&manifest) };
        publish(engine, &self.root.join(LATEST_FILE), format!("{latest}\n").as_bytes())
    }

    /// Give the shard's part up. A save of one shard is removed, unless `LATEST.blocks` names it already. A save of several shards stays
    /// until a later save removes it: the others may have written theirs.
    pub fn abandon(self) -> Result<()> {
        let is_named =
            || Ok::<_, Error>(LatestBlocks::find(&self.root)?.is_some_and(|latest| latest.name == self.name));
        if self.shard.count > 1 || is_named()? {
            return Ok(());
        }
        self.dir.remove()
    }
}

/// Make the directory `dir` of a new save in `root`.
fn make(dir: &Directory, root: &Directory, shard: Shard, steps: &[(String, u64)]) -> Result<()> {
    dir.make()?;
    root.sync()?;
    let begun = Begun { shards: shard.count, steps: InOrder(steps) };
    publish(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)
}

/// What the save in `dir`, which was begun, waits for; `None` where that cannot be told.
fn read_begun(dir: &Directory) -> Result<Option<FoundBegun>> {
    if !dir.has(BEGUN_FILE)? {
        return Ok(None);
    }
    let path = dir.join(BEGUN_FILE);
    match read_small(dir.engine(), &path, MAX_MANIFEST_BYTES).and_then(|bytes| parse(&bytes, &path)) {
        Err(error) if error.kind() == Kind::Corruption => Ok(None),
        found => found.map(Some),
    }
}

/// Remove the saves before `kept` that nobody writes or reads. Returns why some could not be removed.
fn sweep(root: &Directory, kept: BlockSaveName) -> Vec<Error> {
    let remove = |name: BlockSaveName| {
        let dir = name.dir(root);
        let Some(_unused) = hold_unread(&dir)? else { return Ok(()) };
        dir.remove()
    };
    match saves(root) {
        Err(error) => vec![error],
        Ok(found) => {
            found.into_iter().filter(|name| name.seq() < kept.seq()).filter_map(|name| remove(name).err()).collect()
        }
    }
}
