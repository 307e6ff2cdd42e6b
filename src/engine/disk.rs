//! Conversations on disk: what is written at the ends of turns, and what is read in place of computing it again.
//!
//! A text is stored as *entries*: the blocks of one pool in one group of successive blocks, or in the beginning of a group
//! if the text ends there. The address of an entry is a digest of the model, the salt, all tokens and images up to its end,
//! and the pool. So texts with the same beginning share its entries, and no salt finds the entries of another.
//!
//! ```text
//! blocks            0 1 2 3 4 5 6 7   8 9 . . . . . .        a text of 10 blocks in groups of 8
//! no window        | entry         | entry|                  all groups
//! window           |               | entry|                  the groups that the next token sees
//! ```
//!
//! Without its beginning, the rest of a text is of no use. So the beginning is written first, and its use is recorded as the
//! latest: if the store needs room, the end of a text is evicted first.
//!
//! A sequence can begin after a block if the entries of every pool are there that the next token sees. This is the same
//! rule as for the prefix cache. What is read becomes a part of the prefix cache, so the sequence then starts like any
//! other whose text is cached, and its bits are the same.
//!
//! A sequence waits for the disk only if the disk has a part of its text. The store writes in a thread of its own. A thread
//! reads entries, and the engine copies them to the device between two steps. One text is read at a time. An interactive
//! sequence does not wait for the text of a background one. A turn is stored if its blocks are still in the prefix cache
//! when the engine gets to it.
//!
//! Reading is worth it only if it takes less time than computing, with the reads for other sequences before it. Both are
//! predicted: the time of the steps by [`Pace`], and the time of reading from the reads before. As long as one of them is
//! unknown, the engine reads. A read that takes longer than computing would is given up. When a read ends, the sequences that
//! wait for theirs are judged again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use super::block_manager::{Digest, NodeRef, UnwrittenBlock, digests};
use super::pace::{Load, Pace};
use super::request::{CacheSalt, PromptImage};
use super::scheduler::{DiskLookup, EndedTurn, SaltedText, Scheduler};
use super::sequence::SequenceId;
use super::shared::DiskStats;
use crate::kv_disk::{Address, KvStore, UseTime};
use crate::model::{KvPool, Limits, PoolBlock, Runner, RunnerError, first_seen};

/// Tokens of a group of blocks, if they have no more than [`ENTRY_BYTES`].
const GROUP_TOKENS: usize = 128;
/// The most bytes of an entry that has more than one block, and of entries that are saved between two steps. The next step
/// waits until they are copied.
const ENTRY_BYTES: u64 = 16 << 20;
/// The most entries that are saved between two steps, because each of them has a cost of its own. Steps do not overlap as
/// long as entries wait, and other sequences may take their blocks.
const SAVES_AT_ONCE: usize = 8;
/// Entries that are read ahead of the device.
const READ_AHEAD: usize = 2;
/// Bytes that may wait to be written before the engine reads no more of them from the device.
const MAX_QUEUED_BYTES: u64 = 128 << 20;
/// How long a read may take if the time of computing is unknown.
const LONGEST_READ: Duration = Duration::from_secs(60);
/// A read may take at least this long, because its prediction is rough.
const LEAST_READ: Duration = Duration::from_secs(1);
/// The most sequences that are looked up before a step.
const LOOKUPS_AT_ONCE: usize = 8;
/// The most entries that wait to be read from the device.
const MAX_PENDING: usize = 65_536;

/// Where an engine keeps conversations, and which of them are its own.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    pub store: KvStore,
    /// A digest of everything but the prompt that keys and values depend on: weights, kernels, device, types. Different
    /// models must have different digests.
    pub model: [u8; 32],
    pub reads: ReadRule,
}

/// When a text on disk is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadRule {
    /// If reading is not predicted to take longer than computing.
    #[default]
    IfFaster,
    /// Always: for tests, whose models compute in no time.
    Always,
}

/// A group of blocks of one pool that is to be written.
struct Entry {
    address: Address,
    pool: usize,
    nodes: Vec<NodeRef>,
}

/// What the disk has of a text, beyond what the prefix cache has.
struct Found {
    /// The digests of the text's blocks, up to the end of what the disk has.
    digests: Vec<Digest>,
    /// The positions that need not be computed if it is read.
    positions: Range<usize>,
    /// The entries to read, with their bytes.
    entries: Vec<(Address, u64)>,
}

/// A read in progress.
struct Restore {
    sequence: SequenceId,
    addresses: HashSet<Address>,
    /// The blocks that are wanted of each entry that is still to come, with their indices in it.
    entries: VecDeque<Vec<(usize, PoolBlock)>>,
    /// The contents of each entry, in order. `None` = it could not be read.
    contents: Receiver<Option<Vec<u8>>>,
    began: Instant,
    /// The read is given up after this time.
    most: Duration,
    bytes: u64,
}

impl Restore {
    /// The bytes per second, if all bytes were read until now.
    fn rate(&self) -> f64 {
        self.bytes as f64 / self.began.elapsed().as_secs_f64().max(1e-6)
    }
}

/// An engine's conversations on disk.
pub(super) struct Disk {
    config: DiskConfig,
    limits: Limits,
    pending: VecDeque<Entry>,
    /// The last use of each entry of `pending`.
    pending_uses: HashMap<Address, UseTime>,
    /// How often the store was cleared before the turns of `pending` ended.
    clears: u64,
    restore: Option<Restore>,
    /// Bytes that are read in a second; `None` until the first read.
    bytes_per_s: Option<f64>,
    stats: DiskStats,
}

impl Disk {
    /// Panics if the runner does not read and write blocks.
    pub(super) fn new(config: DiskConfig, limits: &Limits) -> Self {
        assert_eq!(limits.block_bytes.len(), limits.kv.pools.len(), "bytes of the blocks of each pool");
        Self {
            clears: config.store.clears(),
            config,
            limits: limits.clone(),
            pending: VecDeque::new(),
            pending_uses: HashMap::new(),
            restore: None,
            bytes_per_s: None,
            stats: DiskStats::default(),
        }
    }

    pub(super) fn stats(&self, scheduler: &Scheduler) -> DiskStats {
        let (hits, hit_tokens) = scheduler.disk_hits();
        DiskStats { hits, hit_tokens, ..self.stats }
    }

    /// Whether blocks are to be copied now, from the device or to it.
    pub(super) fn is_busy(&self) -> bool {
        self.restore.is_some() || self.can_save()
    }

    pub(super) fn is_reading(&self) -> bool {
        self.restore.is_some()
    }

    /// Whether entries wait to be read from the device, and the store has a place for them.
    pub(super) fn can_save(&self) -> bool {
        !self.pending.is_empty() && self.config.store.stats().queued_bytes < MAX_QUEUED_BYTES
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Forgets everything in progress, because all blocks are empty.
    pub(super) fn clear(&mut self) {
        self.drop_pending();
        self.restore = None;
    }

    fn drop_pending(&mut self) {
        self.stats.lost_entries += self.pending.len() as u64;
        self.pending.clear();
        self.pending_uses.clear();
    }

    /// Forgets the turns that ended before the store was cleared, if it was. Otherwise they would be written after that.
    /// Returns whether it was.
    fn drop_cleared(&mut self) -> bool {
        let clears = self.config.store.clears();
        let is_cleared = std::mem::replace(&mut self.clears, clears) != clears;
        if is_cleared {
            self.drop_pending();
        }
        is_cleared
    }

    // --- the ends of turns ---

    /// Takes the turns that ended, and finds out which of their entries the store lacks.
    pub(super) fn take_turns(&mut self, scheduler: &mut Scheduler) {
        self.drop_cleared();
        for EndedTurn { text: SaltedText { salt, tokens, images }, nodes } in scheduler.take_turns() {
            self.stats.turns += 1;
            let digests = self.digests(&salt, &tokens, &images);
            let end = nodes.len();
            let now = self.config.store.now();
            for pool in 0..self.limits.kv.pools.len() {
                for blocks in self.entries(pool, end) {
                    let address = address(&digests[blocks.end - 1], pool);
                    let used = use_at(now, &blocks);
                    if !self.config.store.touch(&address, used)
                        && self.pending_uses.insert(address, used).is_none()
                    {
                        self.pending.push_back(Entry { address, pool, nodes: nodes[blocks].to_vec() });
                    }
                }
            }
        }
        for text in scheduler.take_forgotten() {
            self.forget(&text);
        }
        while self.pending.len() > MAX_PENDING {
            let oldest = self.pending.pop_front().expect("just counted");
            self.pending_uses.remove(&oldest.address);
            self.stats.lost_entries += 1;
        }
    }

    /// Removes the entries that begin a text. Without one of them, nothing that begins with the first group of blocks is found.
    fn forget(&mut self, SaltedText { salt, tokens, images }: &SaltedText) {
        let pools = 0..self.limits.kv.pools.len();
        let most = pools.clone().map(|pool| self.group(pool)).max().unwrap_or(0) * self.limits.kv.block_size;
        let digests = self.digests(salt, &tokens[..most.min(tokens.len())], images);
        let addresses: Vec<Address> =
            digests.iter().flat_map(|digest| pools.clone().map(|pool| address(digest, pool))).collect();
        self.pending.retain(|entry| !addresses.contains(&entry.address));
        self.pending_uses.retain(|pending, _| !addresses.contains(pending));
        self.config.store.remove(&addresses);
    }

    /// Saves the next entries, as many as are copied in a short time. No step may be in flight.
    pub(super) fn save_some(
        &mut self,
        scheduler: &Scheduler,
        runner: &mut dyn Runner,
    ) -> Result<(), RunnerError> {
        let mut bytes = 0;
        for number in 0..SAVES_AT_ONCE {
            let Some(next) = self.pending.front().filter(|_| self.can_save()) else { break };
            bytes += next.nodes.len() as u64 * self.limits.block_bytes[next.pool];
            // An entry of one block may be larger.
            if number > 0 && bytes > ENTRY_BYTES {
                break;
            }
            self.save_next(scheduler, runner)?;
        }
        Ok(())
    }

    /// Reads the next entry from the device and gives it to the store. No step may be in flight.
    fn save_next(&mut self, scheduler: &Scheduler, runner: &mut dyn Runner) -> Result<(), RunnerError> {
        self.drop_cleared();
        let Some(Entry { address, pool, nodes }) = self.pending.pop_front() else { return Ok(()) };
        let used = self.pending_uses.remove(&address).unwrap_or_default();
        let block = |node: &NodeRef| Some(PoolBlock { pool, block: scheduler.registered(*node, pool)? });
        let Some(blocks) = nodes.iter().map(block).collect::<Option<Vec<PoolBlock>>>() else {
            self.stats.lost_entries += 1;
            return Ok(());
        };
        let contents = runner.read_blocks(&blocks)?;
        let is_kept = !self.drop_cleared() && self.config.store.write(address, contents, used);
        self.stats.lost_entries += u64::from(!is_kept);
        Ok(())
    }

    /// Saves all entries that wait, for at most `patience`.
    pub(super) fn save_all(
        &mut self,
        scheduler: &mut Scheduler,
        runner: &mut dyn Runner,
        patience: Duration,
    ) -> Result<(), RunnerError> {
        let began = Instant::now();
        self.take_turns(scheduler);
        while !self.pending.is_empty() && began.elapsed() < patience {
            match self.can_save() {
                true => self.save_next(scheduler, runner)?,
                false => thread::sleep(Duration::from_millis(5)),
            }
        }
        Ok(())
    }

    // --- reading ---

    /// Looks up the sequences that start next. Begins to read what the disk has of the first of them, if nothing else is being
    /// read.
    pub(super) fn look_up(&mut self, scheduler: &mut Scheduler, pace: &Pace) {
        self.drop_lost_read(scheduler);
        for _ in 0..LOOKUPS_AT_ONCE {
            let is_free = scheduler.may_begin_restore();
            let Some(lookup) = scheduler.next_lookup() else { return };
            let id = lookup.id;
            let Some(found) = self.longest(&lookup) else {
                scheduler.settle(id);
                continue;
            };
            // What is being read for another sequence is in the cache when the wait for it ends.
            let is_shared =
                |address| self.restore.as_ref().is_some_and(|read| read.addresses.contains(address));
            let own = found.entries.iter().filter(|(address, _)| is_free || !is_shared(address));
            let bytes: u64 = own.map(|(_, bytes)| bytes).sum();
            let before = if is_free { Duration::ZERO } else { self.time_until_free(scheduler) };
            let computing = self.time_to_compute(pace, found.positions.clone());
            let reading = self.time_to_read(bytes).map(|own| own.saturating_add(before));
            let is_slower = reading.zip(computing).is_some_and(|(reading, computing)| reading > computing);
            if is_slower && self.config.reads == ReadRule::IfFaster {
                self.stats.slower_reads += 1;
                if is_free {
                    // The disk may become faster. After some such texts, one is read again.
                    self.bytes_per_s = self.bytes_per_s.map(|rate| 1.1 * rate);
                }
                scheduler.settle(id);
            } else if !is_free {
                scheduler.wait_for_disk(id, bytes, computing);
            } else {
                match self.begin(scheduler, id, &found, computing) {
                    Some(restore) => self.restore = Some(restore),
                    None => scheduler.settle(id),
                }
            }
        }
    }

    /// The predicted time of reading; `None` before the first read.
    fn time_to_read(&self, bytes: u64) -> Option<Duration> {
        self.bytes_per_s.map(|rate| time_to_read(bytes, rate))
    }

    /// The predicted time until everything is read that sequences wait for, as far as it is known.
    fn time_until_free(&self, scheduler: &Scheduler) -> Duration {
        let time = |bytes: u64| self.time_to_read(bytes).unwrap_or_default();
        let left = |read: &Restore| time(read.bytes).saturating_sub(read.began.elapsed());
        let now = self.restore.as_ref().map_or(Duration::ZERO, left);
        now.saturating_add(time(scheduler.awaited_bytes()))
    }

    /// Ends the read of a sequence whose client has left, or whose blocks a running sequence needed.
    fn drop_lost_read(&mut self, scheduler: &mut Scheduler) {
        if let Some(restore) = self.restore.take_if(|restore| !scheduler.is_restoring(restore.sequence)) {
            scheduler.settle(restore.sequence);
            self.stats.failed_reads += 1;
        }
    }

    /// The longest beginning of a text, longer than what the cache has, whose entries the store has.
    fn longest(&self, lookup: &DiskLookup<'_>) -> Option<Found> {
        let &DiskLookup { tokens, images, ref salt, ref known, .. } = lookup;
        let size = self.limits.kv.block_size;
        // The logits of the last token are needed, so its block is computed.
        let most = (tokens.len() - 1) / size;
        let first = known.tokens / size + 1;
        if most < first {
            return None;
        }
        let mut digests = self.digests(salt, &tokens[..most * size], images);
        let is_known = |pool: usize, mut blocks: Range<usize>| {
            blocks.all(|index| known.blocks.get(index).is_some_and(|has| has[pool]))
        };
        let has = |pool: usize, blocks: Range<usize>| {
            let end = blocks.end;
            is_known(pool, blocks) || self.config.store.contains(&address(&digests[end - 1], pool))
        };
        let pools = 0..self.limits.kv.pools.len();
        let whole_groups: Vec<Vec<bool>> = pools
            .clone()
            .map(|pool| {
                let group = self.group(pool);
                (0..most / group).map(|i| has(pool, i * group..(i + 1) * group)).collect()
            })
            .collect();
        let is_there = |pool: usize, blocks: Range<usize>| match whole_groups[pool]
            .get(blocks.start / self.group(pool))
        {
            Some(there) if blocks.len() == self.group(pool) => *there,
            _ => has(pool, blocks),
        };
        let splits_image = |end: usize| images.iter().any(|image| image.is_split_at(end * size));
        let is_complete = |end: usize| {
            // The last entries are rarely there, so they are looked up first.
            !splits_image(end)
                && pools
                    .clone()
                    .all(|pool| self.entries(pool, end).rev().all(|blocks| is_there(pool, blocks)))
        };
        let end = (first..=most).rev().find(|end| is_complete(*end))?;
        let mut entries = Vec::new();
        for pool in pools {
            for blocks in self.entries(pool, end).filter(|blocks| !is_known(pool, blocks.clone())) {
                let bytes = blocks.len() as u64 * self.limits.block_bytes[pool];
                entries.push((address(&digests[blocks.end - 1], pool), bytes));
            }
        }
        digests.truncate(end);
        Some(Found { digests, positions: known.tokens..end * size, entries })
    }

    /// Reserves blocks for a sequence, and begins to read their contents. `computing` is the predicted time of computing
    /// them. `None` if the sequence is to be computed.
    fn begin(
        &mut self,
        scheduler: &mut Scheduler,
        sequence: SequenceId,
        Found { digests, positions, .. }: &Found,
        computing: Option<Duration>,
    ) -> Option<Restore> {
        let end = digests.len();
        let Ok(unwritten) = scheduler.begin_restore(sequence, positions.start, end) else {
            self.stats.failed_reads += 1;
            return None;
        };
        let (mut entries, mut reads, mut bytes) = (VecDeque::new(), Vec::new(), 0);
        let begins = self.config.store.now();
        for pool in 0..self.limits.kv.pools.len() {
            let block_bytes = self.limits.block_bytes[pool] as usize;
            // They are in the order of their indices, as the entries are.
            let mut rest: Vec<&UnwrittenBlock> =
                unwritten.iter().filter(|block| block.pool == pool).collect();
            for blocks in self.entries(pool, end) {
                let later = rest.split_off(rest.partition_point(|block| block.index < blocks.end));
                let now = std::mem::replace(&mut rest, later);
                if now.is_empty() {
                    continue;
                }
                let place = |unwritten: &UnwrittenBlock| PoolBlock { pool, block: unwritten.block };
                entries
                    .push_back(now.iter().map(|block| (block.index - blocks.start, place(block))).collect());
                let address = address(&digests[blocks.end - 1], pool);
                reads.push((address, blocks.len() * block_bytes, use_at(begins, &blocks)));
                bytes += (blocks.len() * block_bytes) as u64;
            }
        }
        let addresses = reads.iter().map(|(address, ..)| *address).collect();
        let Some(contents) = read_ahead(&self.config.store, reads) else {
            self.stats.failed_reads += 1;
            scheduler.cancel_restore();
            return None;
        };
        let most = computing.map_or(LONGEST_READ, |computing| computing.max(LEAST_READ));
        Some(Restore { sequence, addresses, entries, contents, began: Instant::now(), most, bytes })
    }

    /// Writes to the device what was read, for about `budget` if there is more. If nothing was read yet, waits for `patience`.
    /// No step may be in flight.
    pub(super) fn write_next(
        &mut self,
        scheduler: &mut Scheduler,
        runner: &mut dyn Runner,
        budget: Duration,
        mut patience: Duration,
    ) -> Result<(), RunnerError> {
        let began = Instant::now();
        self.drop_lost_read(scheduler);
        while let Some(restore) = &mut self.restore {
            if restore.entries.is_empty() {
                let rate = restore.rate();
                self.restore = None;
                scheduler.finish_restore();
                self.learn(rate, scheduler);
                break;
            }
            let is_late = restore.began.elapsed() > restore.most;
            let contents = match restore.contents.recv_timeout(patience) {
                Ok(Some(contents)) if !is_late => contents,
                Err(RecvTimeoutError::Timeout) if !is_late => break,
                Ok(_) | Err(_) => {
                    let (sequence, rate) = (restore.sequence, restore.rate());
                    self.stats.failed_reads += 1;
                    self.restore = None;
                    scheduler.cancel_restore();
                    if is_late {
                        scheduler.settle(sequence);
                        // At this rate it would just have been in time. It is not known how much slower the disk is.
                        self.learn(0.5 * rate, scheduler);
                    } else {
                        scheduler.look_up_again(sequence);
                    }
                    break;
                }
            };
            patience = Duration::ZERO;
            let wanted = restore.entries.pop_front().expect("not empty");
            let pool = wanted[0].1.pool;
            let block_bytes = self.limits.block_bytes[pool] as usize;
            let (indices, blocks): (Vec<usize>, Vec<PoolBlock>) = wanted.into_iter().unzip();
            let of_block = |index: usize| &contents[index * block_bytes..(index + 1) * block_bytes];
            let bytes = indices.into_iter().map(of_block).collect::<Vec<_>>().concat();
            runner.write_blocks(&blocks, &bytes)?;
            if began.elapsed() >= budget {
                break;
            }
        }
        Ok(())
    }

    /// Takes the rate of a read into account, in bytes per second, and judges again which sequences wait for theirs.
    fn learn(&mut self, rate: f64, scheduler: &mut Scheduler) {
        let rate = self.bytes_per_s.map_or(rate, |before| 0.5 * (before + rate));
        self.bytes_per_s = Some(rate);
        if self.config.reads == ReadRule::IfFaster {
            self.stats.slower_reads += scheduler.settle_late(|bytes| time_to_read(bytes, rate));
        }
    }

    /// The predicted time of the steps that compute these positions. `None` after too few steps.
    fn time_to_compute(&self, pace: &Pace, positions: Range<usize>) -> Option<Duration> {
        let most = self.limits.max_batch_tokens;
        let steps = positions.clone().step_by(most);
        steps.map(|start| pace.predict(Load::default().with(start, most.min(positions.end - start)))).sum()
    }

    // --- entries ---

    fn digests(&self, salt: &CacheSalt, tokens: &[u32], images: &[PromptImage]) -> Vec<Digest> {
        digests(salt.digest(&self.config.model), self.limits.kv.block_size, tokens, images)
    }

    /// The number of blocks of a group. In a pool with a window, a group is at most a quarter of the window: the first group
    /// begins before the window, and its blocks are the first to be evicted.
    fn group(&self, pool: usize) -> usize {
        let size = self.limits.kv.block_size;
        let KvPool { window, .. } = self.limits.kv.pools[pool];
        let of_window = window.map_or(usize::MAX, |window| window / size / 4);
        let of_bytes = (ENTRY_BYTES / self.limits.block_bytes[pool].max(1)) as usize;
        (GROUP_TOKENS / size).min(of_window).min(of_bytes).max(1)
    }

    /// The blocks of each entry of a pool that a sequence needs to begin after `end` blocks.
    fn entries(&self, pool: usize, end: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let group = self.group(pool);
        let size = self.limits.kv.block_size;
        let first = first_seen(self.limits.kv.pools[pool].window, end * size) / size;
        // A pool without layers has nothing to store.
        let end = if self.limits.block_bytes[pool] == 0 { 0 } else { end };
        let groups = (first / group).min(end.div_ceil(group))..end.div_ceil(group);
        groups.map(move |i| i * group..end.min((i + 1) * group))
    }
}

/// The address of the entry of a pool that ends with the block of this digest.
fn address(digest: &Digest, pool: usize) -> Address {
    let mut hasher = Sha256::new();
    hasher.update(digest);
    hasher.update((pool as u64).to_le_bytes());
    Address::new(hasher.finalize().into())
}

/// The time of reading so many bytes at a rate in bytes per second.
fn time_to_read(bytes: u64, rate: f64) -> Duration {
    Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX)
}

/// The use of an entry with these blocks, if its text is used at `now`.
fn use_at(now: UseTime, blocks: &Range<usize>) -> UseTime {
    now.less(blocks.start)
}

/// Reads entries in a thread of its own, until the receiver is dropped. `None` if the system has no thread. If an entry cannot
/// be read, the ones after it are read only so that the store finds all damaged ones.
fn read_ahead(store: &KvStore, reads: Vec<(Address, usize, UseTime)>) -> Option<Receiver<Option<Vec<u8>>>> {
    let (sender, receiver) = sync_channel(READ_AHEAD);
    let store = store.clone();
    let read = move || {
        let mut has_failed = false;
        for (address, bytes, used) in reads {
            let contents = store.read(&address, bytes, used);
            has_failed |= contents.is_none();
            if sender.send(contents).is_err() && !has_failed {
                return;
            }
        }
    };
    thread::Builder::new().name("kv reader".into()).spawn(read).ok()?;
    Some(receiver)
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::config::Courtesy;
    use crate::engine::request::Request;
    use crate::engine::scheduler::SchedulerConfig;
    use crate::engine::sequence::Sequence;
    use crate::model::{Batch, KvLimits, Sampled, Sampling, Ticket};

    const BLOCK_BYTES: u64 = 1000;
    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(600);

    /// A runner that only takes blocks.
    pub(in crate::engine) struct IdleRunner(pub Limits);

    impl Runner for IdleRunner {
        fn limits(&self) -> &Limits {
            &self.0
        }

        fn submit(&mut self, batch: &Batch, _: &Sampling) -> Result<Ticket, RunnerError> {
            panic!("this runner computes nothing: {batch:?}")
        }

        fn masks(&mut self, _: &Ticket, _: &[Arc<[u32]>]) -> Result<(), RunnerError> {
            Ok(())
        }

        fn set_courtesy(&mut self, _: Courtesy) -> Result<(), RunnerError> {
            Ok(())
        }

        fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
            panic!("this runner computes nothing: {ticket:?}")
        }

        fn write_blocks(&mut self, _: &[PoolBlock], _: &[u8]) -> Result<(), RunnerError> {
            Ok(())
        }

        fn probe(&mut self) -> Result<(), RunnerError> {
            Ok(())
        }
    }

    pub(in crate::engine) fn limits() -> Limits {
        Limits {
            max_batch_tokens: 16,
            max_sequences: 8,
            max_draws: 8,
            max_in_flight: 2,
            kv: KvLimits { block_size: 4, pools: vec![KvPool { window: None, blocks: 1000 }] },
            max_context: 500,
            vocab_size: 50,
            hidden_size: 8,
            step_bytes: Vec::new(),
            block_bytes: vec![BLOCK_BYTES],
            images: None,
        }
    }

    fn disk(store: KvStore) -> Disk {
        Disk::new(DiskConfig { store, model: [7; 32], reads: ReadRule::IfFaster }, &limits())
    }

    fn scheduler() -> Scheduler {
        Scheduler::new(limits(), SchedulerConfig { stores_turns: true, ..SchedulerConfig::default() })
    }

    /// A text of 40 blocks, and the token after it.
    fn text(n: u32) -> Vec<u32> {
        vec![n; 40 * limits().kv.block_size + 1]
    }

    /// Stores a text.
    fn keep(disk: &Disk, tokens: &[u32]) {
        let digests = disk.digests(&CacheSalt::default(), tokens, &[]);
        for blocks in disk.entries(0, digests.len()) {
            let contents = vec![0; blocks.len() * BLOCK_BYTES as usize];
            assert!(disk.config.store.write(
                address(&digests[blocks.end - 1], 0),
                contents,
                UseTime::default()
            ));
        }
        assert!(disk.config.store.flush(LONG));
    }

    /// Steps of 16 tokens take a second each.
    fn pace() -> Pace {
        let mut pace = Pace::new();
        (0..50).for_each(|i| pace.observe(Load::default().with(16 * i, 16), Duration::from_secs(1)));
        pace
    }

    /// A text takes ten seconds to compute and six to read. The second one would be read after twelve.
    #[test]
    fn a_text_is_computed_if_the_wait_for_other_reads_makes_its_own_slower() {
        let folder = tempfile::tempdir().unwrap();
        let mut disk = disk(KvStore::open(&folder.path().join("kv"), 1 << 30).unwrap());
        let (mut scheduler, pace) = (scheduler(), pace());
        [1, 2, 3].into_iter().for_each(|n| keep(&disk, &text(n)));
        disk.bytes_per_s = Some(40.0 * BLOCK_BYTES as f64 / 6.0);
        // The third sequence has the text that is read for the first one.
        for (id, n) in [(0, 1), (1, 2), (2, 1)] {
            scheduler.add(Sequence::new(id, Request::new(text(n)), 8));
        }
        disk.look_up(&mut scheduler, &pace);
        assert_eq!((scheduler.is_restoring(0), disk.stats.slower_reads), (true, 1));
        assert!(scheduler.wants_lookup());

        // Other reads that are awaited count too.
        disk.bytes_per_s = Some(40.0 * BLOCK_BYTES as f64 / 4.0);
        for (id, n) in [(3, 2), (4, 3)] {
            scheduler.add(Sequence::new(id, Request::new(text(n)), 8));
            disk.look_up(&mut scheduler, &pace);
        }
        assert_eq!((scheduler.awaited_bytes(), disk.stats.slower_reads), (40 * BLOCK_BYTES, 2));
    }

    /// Texts take ten seconds to compute. It is predicted that the second and the third one are read after six and nine
    /// seconds, with the first. The read of the first one takes long, so that three seconds for a text become six.
    #[test]
    fn sequences_that_wait_are_judged_again_if_the_disk_becomes_slower() {
        for is_late in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let mut disk = disk(KvStore::open(&folder.path().join("kv"), 1 << 30).unwrap());
            let (mut scheduler, pace) = (scheduler(), pace());
            for n in [1, 2, 3] {
                keep(&disk, &text(n));
                scheduler.add(Sequence::new(u64::from(n), Request::new(text(n)), 8));
            }
            disk.bytes_per_s = Some(40.0 * BLOCK_BYTES as f64 / 3.0);
            disk.look_up(&mut scheduler, &pace);
            assert_eq!((scheduler.is_restoring(1), scheduler.awaited_bytes()), (true, 80 * BLOCK_BYTES));
            let restore = disk.restore.as_mut().unwrap();
            restore.began = Instant::now().checked_sub(Duration::from_secs(2000)).unwrap();
            restore.most = if is_late { Duration::ZERO } else { LONG * 10 };
            while disk.is_reading() {
                disk.write_next(&mut scheduler, &mut IdleRunner(limits()), LONG, LONG).unwrap();
            }
            let stats = disk.stats;
            let judged = (scheduler.awaited_bytes(), stats.slower_reads);
            assert_eq!(judged, (40 * BLOCK_BYTES, 1), "late: {is_late}");
            assert_eq!(stats.failed_reads, u64::from(is_late));
        }
    }

    #[test]
    fn what_was_to_be_written_when_the_store_was_cleared_is_not_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let mut disk = disk(KvStore::open(&folder.path().join("kv"), 1 << 30).unwrap());
        let entry = || Entry { address: Address::new([1; 32]), pool: 0, nodes: Vec::new() };
        disk.pending.push_back(entry());
        disk.take_turns(&mut scheduler());
        assert!(disk.has_pending());
        disk.config.store.clear().unwrap();
        disk.take_turns(&mut scheduler());
        assert_eq!((disk.has_pending(), disk.stats.lost_entries), (false, 1));
        disk.pending.push_back(entry());
        disk.take_turns(&mut scheduler());
        assert!(disk.has_pending(), "a turn that ended after that");
    }

    /// An entry waits to be saved. The store has no place for it while `gate` is locked.
    pub(in crate::engine) fn disk_of_a_full_store(folder: &Path, gate: &Arc<Mutex<()>>) -> Disk {
        let store = KvStore::open_gated(&folder.join("kv"), Arc::clone(gate));
        let mut disk = disk(store.clone());
        assert!(!disk.is_busy());
        let address = Address::new([1; 32]);
        disk.pending.push_back(Entry { address, pool: 0, nodes: Vec::new() });
        assert!(disk.is_busy());
        assert!(store.write(Address::new([2; 32]), vec![0; MAX_QUEUED_BYTES as usize], store.now()));
        disk
    }

    /// Otherwise steps would not overlap as long as the disk hangs.
    #[test]
    fn nothing_is_to_be_copied_while_the_store_has_no_place() {
        let (folder, gate) = (tempfile::tempdir().unwrap(), Arc::default());
        let closed = Mutex::lock(&gate).unwrap();
        let disk = disk_of_a_full_store(folder.path(), &gate);
        assert!(disk.has_pending() && !disk.is_busy());
        drop(closed);
        assert!(disk.config.store.flush(LONG));
        assert!(disk.is_busy());
    }
}
