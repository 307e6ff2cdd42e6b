//! [`KvStore`]: an index in memory, a bounded queue, one thread that writes, and the folder.
//!
//! Two locks, always taken in this order:
//! - `files` is held while names of entries change on the disk: a rename, a removal, and the index's change
//!   with it. So no removal hits a newer file of the same address.
//! - `state` guards the index, the queue and the counts. It is never held during I/O, so a slow disk does not
//!   delay [`KvStore::contains`], [`KvStore::write`] and [`KvStore::stats`].
//!
//! [`Folder`] has a handle of the directory and opens all names relative to it without following links. So a
//! link in the folder leads to no file elsewhere, and a folder that replaces this one is not written to.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{
    Address, Cleared, Damage, KvStoreError, KvStoreStats, MAX_FILE_BYTES, Unreadable, UseTime, advice,
    decode, encode_header, file_bytes, nanoseconds,
};

/// Most bytes of files that wait to be written. A file fits in.
const QUEUE_BYTES: u64 = MAX_FILE_BYTES;
/// How long nothing is written after an error, so that a broken disk costs little time and few log lines.
const PAUSE: Duration = Duration::from_secs(30);
/// Shortest time between two log lines about the same kind of event.
const WARNING_PERIOD: Duration = Duration::from_secs(60);
/// Longest wait for the writer when the store is closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

const ENTRY_SUFFIX: &str = ".kv";
const TEMPORARY_SUFFIX: &str = ".tmp";
const LOCK_NAME: &str = "lock";
const SECRET_NAME: &str = "secret";

/// Flags of every open: no link is followed, no child process inherits the file, and no pipe makes the call
/// wait.
const SAFE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// A folder of entries, open and locked. Clones share it; it is closed with the last clone.
#[derive(Clone)]
pub struct KvStore {
    closing: Arc<Closing>,
}

impl KvStore {
    /// Opens the folder, makes it if it does not exist, and lists its entries. Removes oldest entries if they
    /// are more than `max_bytes` bytes together.
    ///
    /// # Errors
    /// Fails if another process or another `KvStore` has the folder open, if another user can enter it, or if
    /// it cannot be made, listed or locked.
    pub fn open(folder: &Path, max_bytes: u64) -> Result<Self, KvStoreError> {
        Self::open_with(folder, max_bytes, Options::default())
    }

    fn open_with(path: &Path, max_bytes: u64, options: Options) -> Result<Self, KvStoreError> {
        let failed = |action| move |error| KvStoreError::Io { action, folder: path.to_owned(), error };
        let folder = Folder::open(path)?;
        let secret = folder.secret().map_err(failed("read or write the file `secret` in"))?;
        let index = Index::new(folder.list().map_err(failed("list"))?);
        let state = Mutex::new(State { index, ..State::default() });
        let (files, work, idle) = (Mutex::new(()), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { folder, secret, max_bytes, options, files, state, work, idle });
        if let Err(error) = shared.evict_down_to(max_bytes) {
            shared.write_failed(&error);
        }
        let writer = Writer(Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("kv-disk".into()).spawn(move || writer.run());
        thread.map_err(failed("start a thread that writes to"))?;
        Ok(Self { closing: Arc::new(Closing(shared)) })
    }

    /// Whether the folder has an entry of this address, by the index in memory. Entries in the queue do not
    /// count, because they cannot be read yet, nor do entries that could not be read.
    pub fn contains(&self, address: &Address) -> bool {
        self.shared().state().index.readable(address).is_some()
    }

    /// The time for a use that happens now. It is later than all times before, also if the system's clock was set back.
    pub fn now(&self) -> UseTime {
        self.shared().state().index.now()
    }

    /// Records that what an entry holds is used, without a read. Returns whether the entry is in the folder, where it can be
    /// read, or in the queue.
    pub fn touch(&self, address: &Address, used: UseTime) -> bool {
        let shared = self.shared();
        let is_kept = shared.state().touch(address, used);
        shared.work.notify_one();
        is_kept
    }

    /// The secret of this folder. Salts that must be the same after a restart can be derived from it. It stays if
    /// the entries are removed.
    pub fn secret(&self) -> &[u8; 32] {
        &self.shared().secret
    }

    /// The payload of an entry, if it has exactly `bytes` bytes and is intact. Any other entry is damaged and is
    /// removed, because an address determines its payload. `None` too if there is no entry, or if it cannot be read.
    pub fn read(&self, address: &Address, bytes: usize, used: UseTime) -> Option<Vec<u8>> {
        let shared = self.shared();
        let inserted = shared.state().index.readable(address)?.inserted;
        let since = Instant::now();
        match shared.folder.read(address, bytes) {
            Ok(payload) => {
                shared.state().was_read(address, bytes, used, since.elapsed());
                shared.work.notify_one();
                Some(payload)
            }
            Err(Unreadable::Damage(damage)) => {
                shared.remove_damaged(address, inserted, damage);
                None
            }
            Err(Unreadable::Io(error)) if error.kind() == ErrorKind::NotFound => {
                shared.state().index.forget(address, inserted);
                None
            }
            Err(Unreadable::Io(error)) => {
                // It is not read again, so that a bad sector costs one read. The file stays and counts until it is
                // evicted, or written again.
                shared.state().index.set_unreadable(address, inserted);
                shared.read_failed("read from", &error);
                None
            }
        }
    }

    /// Puts an entry that is used then into the queue of the thread that writes; never waits. `true` too if the entry is
    /// already in the folder, where it can be read, or in the queue. `false` if it was dropped: it does not fit into the queue or
    /// into the folder, or the store pauses after an error.
    pub fn write(&self, address: Address, payload: Vec<u8>, used: UseTime) -> bool {
        let shared = self.shared();
        let job_bytes = file_bytes(payload.len());
        let mut state = shared.state();
        if state.touch(&address, used) {
            shared.work.notify_one();
            return true;
        }
        let is_too_large = job_bytes > shared.max_bytes.min(MAX_FILE_BYTES);
        let is_full = state.queued_bytes.saturating_add(job_bytes) > shared.options.queue_bytes;
        if is_too_large || is_full || state.is_closed || state.is_paused() {
            state.counts.dropped_entries += 1;
            return false;
        }
        state.jobs += 1;
        let number = state.jobs;
        state.queued.insert(address, Queued { number, used });
        state.queued_bytes += job_bytes;
        state.queue.push_back(Job { address, payload, number });
        shared.work.notify_one();
        true
    }

    /// Waits until the queue is empty: every entry in it was written, or was dropped after an error. `false`
    /// if that takes longer than `patience`.
    pub fn flush(&self, patience: Duration) -> bool {
        let is_busy = |state: &mut State| state.is_writing || !state.queue.is_empty();
        !self.shared().wait_while(patience, is_busy)
    }

    /// Removes entries that must not be read again, also from the queue. Returns immediately: the thread that writes
    /// removes the files.
    pub fn remove(&self, addresses: &[Address]) {
        let shared = self.shared();
        let mut state = shared.state();
        for address in addresses {
            state.drop_queued(address);
            if state.index.remove(address).is_some() {
                state.unwanted.push(*address);
            }
        }
        shared.work.notify_one();
    }

    /// How often all entries were removed. What a caller has still to write of the time before should not be written.
    pub fn clears(&self) -> u64 {
        self.shared().state().clears
    }

    /// Removes all entries, also those in the queue. Returns what was removed from the disk.
    ///
    /// # Errors
    /// The first error of a removal. The entries that could not be removed stay.
    pub fn clear(&self) -> io::Result<Cleared> {
        let shared = self.shared();
        let addresses: Vec<Address> = {
            let _files = shared.lock_files();
            let mut state = shared.state();
            state.clears += 1;
            state.drop_queue();
            // The entry that is written now is dropped when it is complete.
            state.queued.clear();
            state.index.entries.keys().copied().collect()
        };
        let mut cleared = Cleared::default();
        let mut result = Ok(());
        for address in addresses {
            match shared.remove(&shared.lock_files(), &address) {
                Ok(bytes) => {
                    cleared.entries += u64::from(bytes.is_some());
                    cleared.bytes += bytes.unwrap_or(0);
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        result.map(|()| cleared)
    }

    pub fn stats(&self) -> KvStoreStats {
        let shared = self.shared();
        let state = shared.state();
        KvStoreStats {
            entries: state.index.entries.len() as u64,
            bytes: state.index.bytes,
            max_bytes: shared.max_bytes,
            queued_bytes: state.queued_bytes,
            error: state.write_error.as_ref().or(state.read_error.as_ref()).cloned(),
            ..state.counts.clone()
        }
    }

    fn shared(&self) -> &Shared {
        &self.closing.0
    }
}

#[cfg(test)]
impl KvStore {
    /// A store that writes nothing while the lock is held, and then files without contents.
    pub(crate) fn open_gated(folder: &Path, gate: Arc<Mutex<()>>) -> Self {
        let write = move |_: &mut File, _: &[u8]| {
            drop(gate.lock());
            Ok(())
        };
        let options = Options { write: Box::new(write), ..Options::default() };
        Self::open_with(folder, u64::MAX, options).expect("a folder that can be used")
    }
}

impl fmt::Debug for KvStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvStore").field("folder", &self.shared().folder.path).finish_non_exhaustive()
    }
}

/// Removes all entries of a folder that no server uses. A folder that does not exist has none.
///
/// # Errors
/// Those of [`KvStore::open`]; `Io` if an entry cannot be removed.
pub fn clear_folder(folder: &Path) -> Result<Cleared, KvStoreError> {
    if folder.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(Cleared::default());
    }
    let cleared = KvStore::open(folder, u64::MAX)?.clear();
    cleared.map_err(|error| KvStoreError::Io {
        action: "remove entries of",
        folder: folder.to_owned(),
        error,
    })
}

/// Checks whether [`KvStore::open`] can use the folder, or make it. Changes nothing, and does not lock the folder, so a
/// running server may use it.
///
/// # Errors
/// Those of [`KvStore::open`] that a look at the folder shows, but not `Busy`.
pub fn check_folder(path: &Path) -> Result<(), KvStoreError> {
    let failed = |action| {
        move |error: Errno| KvStoreError::Io { action, folder: path.to_owned(), error: error.into() }
    };
    let is_missing =
        |path: &Path| path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
    let (nearest, action) = match is_missing(path) {
        false => {
            let root = open_root(path).map_err(failed("open"))?;
            check_access(path, &root)?;
            (path, "write to")
        }
        // The folder and its missing parents would be made in the nearest folder that exists.
        true => {
            let is_there = |parent: &&Path| !parent.as_os_str().is_empty() && !is_missing(parent);
            let nearest = path.ancestors().skip(1).find(is_there).unwrap_or(Path::new("."));
            open_root(nearest).map_err(failed("make the folder"))?;
            (nearest, "make the folder")
        }
    };
    let access = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::access(nearest, access).map_err(failed(action))
}

/// Ends the writer when the last [`KvStore`] is dropped.
struct Closing(Arc<Shared>);

impl Drop for Closing {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_closed = true;
        state.drop_queue();
        drop(state);
        self.0.work.notify_one();
        // A disk that hangs delays the caller for no longer than this. The folder is then unlocked when the
        // writer ends and closes the file.
        if !self.0.wait_while(CLOSE_PATIENCE, |state| !state.is_ended) {
            self.0.folder.unlock();
        }
    }
}

/// What tests replace.
struct Options {
    queue_bytes: u64,
    pause: Duration,
    write: Box<WriteAll>,
}

type WriteAll = dyn Fn(&mut File, &[u8]) -> io::Result<()> + Send + Sync;

impl Default for Options {
    fn default() -> Self {
        Self { queue_bytes: QUEUE_BYTES, pause: PAUSE, write: Box::new(|file, bytes| file.write_all(bytes)) }
    }
}

// --- the state -----------------------------------------------------------------------------------------

/// What the clones of a store and its writer share.
struct Shared {
    folder: Folder,
    secret: [u8; 32],
    max_bytes: u64,
    options: Options,
    files: Mutex<()>,
    state: Mutex<State>,
    /// The queue has a new entry, an entry was touched or is unwanted, or the store is closed.
    work: Condvar,
    /// The writer finished an entry, or ended.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    index: Index,
    queue: VecDeque<Job>,
    /// The entries of the queue, and the one that is written now.
    queued: HashMap<Address, Queued>,
    /// Bytes of the files of the queue and of the entry that is written now.
    queued_bytes: u64,
    is_writing: bool,
    /// Entries whose last use is not yet recorded in the times of their files.
    touched: VecDeque<Address>,
    /// Entries that the index has no longer, and whose files are to be removed.
    unwanted: Vec<Address>,
    paused_until: Option<Instant>,
    /// Counts jobs.
    jobs: u64,
    /// Counts calls of `KvStore::clear`.
    clears: u64,
    is_closed: bool,
    /// The writer ended.
    is_ended: bool,
    /// What `KvStore::stats` returns, without what other fields have.
    counts: KvStoreStats,
    write_error: Option<String>,
    read_error: Option<String>,
    damage_warnings: Warnings,
    write_warnings: Warnings,
    read_warnings: Warnings,
}

/// An entry to write.
struct Job {
    address: Address,
    payload: Vec<u8>,
    /// It tells two jobs of the same address apart.
    number: u64,
}

/// What is known of an entry that is not written yet.
struct Queued {
    /// [`Job::number`] of its job.
    number: u64,
    /// Its last use.
    used: UseTime,
}

impl Job {
    fn bytes(&self) -> u64 {
        file_bytes(self.payload.len())
    }
}

impl State {
    fn is_paused(&self) -> bool {
        self.paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the thread that writes has to wait.
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.touched.is_empty() && self.unwanted.is_empty() && !self.is_closed
    }

    /// What is known of the entry of a job, if it was not removed since it was queued.
    fn queued_as(&self, job: &Job) -> Option<&Queued> {
        self.queued.get(&job.address).filter(|queued| queued.number == job.number)
    }

    /// Moves an entry whose file is complete, with this time, to the index. `false` if it was removed since it was queued.
    fn keep(&mut self, job: &Job, time_of_file: UseTime) -> bool {
        let Some(used) = self.queued_as(job).map(|queued| queued.used) else { return false };
        self.queued.remove(&job.address);
        self.index.insert(job.address, job.bytes(), time_of_file);
        // It may have been used since the file got its time.
        self.touch(&job.address, used)
    }

    /// Records a use of an entry that is in the queue, or in the folder where it can be read. Returns whether it is.
    fn touch(&mut self, address: &Address, used: UseTime) -> bool {
        if let Some(queued) = self.queued.get_mut(address) {
            queued.used = queued.used.max(used);
            return true;
        }
        if self.index.readable(address).is_none() {
            return false;
        }
        if self.index.touch(address, used) {
            self.touched.push_back(*address);
        }
        true
    }

    fn drop_queue(&mut self) {
        for job in std::mem::take(&mut self.queue) {
            self.queued.remove(&job.address);
            self.queued_bytes -= job.bytes();
            self.counts.dropped_entries += 1;
        }
    }

    /// Drops an entry from the queue. If it is being written, it is dropped when it is complete.
    fn drop_queued(&mut self, address: &Address) {
        self.queued.remove(address);
        if let Some(index) = self.queue.iter().position(|job| job.address == *address) {
            let job = self.queue.remove(index).expect("just found");
            self.queued_bytes -= job.bytes();
            self.counts.dropped_entries += 1;
        }
    }

    fn was_read(&mut self, address: &Address, bytes: usize, used: UseTime, took: Duration) {
        self.touch(address, used);
        self.counts.read_entries += 1;
        self.counts.read_bytes += file_bytes(bytes);
        self.counts.read_ns += nanoseconds(took);
        self.read_error = None;
    }

    fn was_written(&mut self, job: &Job, took: Duration) {
        self.counts.written_entries += 1;
        self.counts.written_bytes += job.bytes();
        self.counts.write_ns += nanoseconds(took);
        self.write_error = None;
    }
}

/// Bounds the log lines about one kind of event.
#[derive(Default)]
struct Warnings {
    last: Option<Instant>,
    events: u64,
}

impl Warnings {
    /// Counts an event. Returns the number of events since the last log line, if it is time for another one.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.events += 1;
        if self.last.is_some_and(|last| now.duration_since(last) < WARNING_PERIOD) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.events))
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under this lock")
    }

    fn lock_files(&self) -> MutexGuard<'_, ()> {
        self.files.lock().expect("nothing panics under this lock")
    }

    /// Waits while `condition` holds, at most for `patience`; returns whether it still holds.
    fn wait_while(&self, patience: Duration, condition: impl FnMut(&mut State) -> bool) -> bool {
        let waited = self.idle.wait_timeout_while(self.state(), patience, condition);
        waited.expect("nothing panics under this lock").1.timed_out()
    }

    /// Removes an entry from the disk and from the index; returns its bytes, or `None` if the index does not
    /// have it.
    fn remove(&self, _files: &MutexGuard<()>, address: &Address) -> io::Result<Option<u64>> {
        self.folder.remove(address)?;
        Ok(self.state().index.remove(address))
    }

    /// Removes oldest entries until all entries together have at most `max_bytes` bytes.
    fn evict_down_to(&self, max_bytes: u64) -> io::Result<()> {
        loop {
            let files = self.lock_files();
            let oldest = self.state().index.oldest_above(max_bytes);
            let Some(address) = oldest else { return Ok(()) };
            if self.remove(&files, &address)?.is_some() {
                self.state().counts.evicted_entries += 1;
            }
        }
    }

    /// Removes the damaged file of the entry that a reader found, unless another thread removed or replaced
    /// it.
    fn remove_damaged(&self, address: &Address, inserted: u64, damage: Damage) {
        let files = self.lock_files();
        if self.state().index.entries.get(address).is_none_or(|entry| entry.inserted != inserted) {
            return;
        }
        if let Err(error) = self.remove(&files, address) {
            self.read_failed("remove a damaged file of", &error);
        }
        drop(files);
        let mut state = self.state();
        // Even if the file stays, it is not read again.
        state.index.forget(address, inserted);
        state.counts.damaged_entries += 1;
        let warning = state.damage_warnings.count(Instant::now());
        drop(state);
        if let Some(events) = warning {
            tracing::warn!(
                "{}: {events} damaged entries since the last such message were removed; the last one: \
                 {damage}. Their parts of conversations are computed again; if this repeats, check the disk",
                self.folder.path.display()
            );
        }
    }

    fn read_failed(&self, action: &str, error: &io::Error) {
        let text = self.folder.problem(action, error);
        let mut state = self.state();
        state.counts.read_errors += 1;
        let warning = state.read_warnings.count(Instant::now());
        state.read_error = Some(text.clone());
        drop(state);
        if let Some(events) = warning {
            tracing::warn!(
                "{text} ({events} errors since the last such message; parts of conversations are computed \
                 again)"
            );
        }
    }

    /// Pauses writing, and drops the queue, whose entries would all be tried during the pause.
    fn write_failed(&self, error: &io::Error) {
        let text = self.folder.problem("write to", error);
        let mut state = self.state();
        state.counts.write_errors += 1;
        state.paused_until = Some(Instant::now() + self.options.pause);
        state.drop_queue();
        let warning = state.write_warnings.count(Instant::now());
        state.write_error = Some(text.clone());
        drop(state);
        if let Some(events) = warning {
            tracing::warn!(
                "{text} ({events} errors since the last such message; conversations are not kept; answers \
                 are not affected; the next attempt is in {} s)",
                self.options.pause.as_secs()
            );
        }
    }
}

// --- the index -----------------------------------------------------------------------------------------

/// The entries of the folder, in the order of their last use.
#[derive(Default)]
struct Index {
    entries: HashMap<Address, Entry>,
    /// All entries by `Entry::used`, oldest first.
    order: BTreeSet<(UseTime, Address)>,
    bytes: u64,
    /// Counts insertions.
    insertions: u64,
    /// The latest time that `Index::now` returned, or that a file had at the start.
    latest: UseTime,
}

struct Entry {
    /// Bytes of the file.
    bytes: u64,
    /// The last use.
    used: UseTime,
    /// The number of insertions before. It tells two files of the same address apart.
    inserted: u64,
    /// Whether a read failed with an error of the file system.
    is_unreadable: bool,
    /// Whether the entry is in `State::touched`.
    is_touched: bool,
}

impl Index {
    fn new(found: Vec<Found>) -> Self {
        let mut index = Self::default();
        for Found { address, bytes, used } in found {
            index.insert(address, bytes, used);
            index.latest = index.latest.max(used);
        }
        index
    }

    fn now(&mut self) -> UseTime {
        self.latest = UseTime::after(self.latest);
        self.latest
    }

    fn insert(&mut self, address: Address, bytes: u64, used: UseTime) {
        self.remove(&address);
        let inserted = self.insertions;
        self.insertions += 1;
        let entry = Entry { bytes, used, inserted, is_unreadable: false, is_touched: false };
        self.entries.insert(address, entry);
        self.order.insert((used, address));
        self.bytes += bytes;
    }

    /// The entry, unless it could not be read.
    fn readable(&self, address: &Address) -> Option<&Entry> {
        self.entries.get(address).filter(|entry| !entry.is_unreadable)
    }

    /// Keeps an entry from being read, if it is still the one that was inserted then.
    fn set_unreadable(&mut self, address: &Address, inserted: u64) {
        if let Some(entry) = self.entries.get_mut(address).filter(|entry| entry.inserted == inserted) {
            entry.is_unreadable = true;
        }
    }

    /// Records a use of an entry, unless a later one is recorded. Returns whether it must be recorded in the time of the
    /// file too, and no earlier use waits for that.
    fn touch(&mut self, address: &Address, used: UseTime) -> bool {
        let Some(entry) = self.entries.get_mut(address).filter(|entry| entry.used < used) else {
            return false;
        };
        self.order.remove(&(entry.used, *address));
        self.order.insert((used, *address));
        entry.used = used;
        !std::mem::replace(&mut entry.is_touched, true)
    }

    /// The last use of an entry, which is recorded in the time of its file now. The next use must be recorded again.
    fn take_touched(&mut self, address: &Address) -> Option<UseTime> {
        let entry = self.entries.get_mut(address)?;
        entry.is_touched = false;
        Some(entry.used)
    }

    /// Removes an entry; returns its bytes.
    fn remove(&mut self, address: &Address) -> Option<u64> {
        let entry = self.entries.remove(address)?;
        self.order.remove(&(entry.used, *address));
        self.bytes -= entry.bytes;
        Some(entry.bytes)
    }

    /// Removes an entry, if it is still the one that was inserted then.
    fn forget(&mut self, address: &Address, inserted: u64) {
        if self.entries.get(address).is_some_and(|entry| entry.inserted == inserted) {
            self.remove(address);
        }
    }

    /// The oldest entry, if all entries together have more than `max_bytes` bytes.
    fn oldest_above(&self, max_bytes: u64) -> Option<Address> {
        self.order.first().filter(|_| self.bytes > max_bytes).map(|(_, address)| *address)
    }
}

// --- the writer ----------------------------------------------------------------------------------------

/// The thread that writes. When it ends, also by a panic, nothing waits for it any more.
struct Writer(Arc<Shared>);

/// What the writer does next.
enum Work {
    Write(Job),
    /// Removes the file of an entry.
    Remove(Address),
    /// Records the last use of an entry in the time of its file.
    Stamp(Address),
}

impl Writer {
    fn run(self) {
        while let Some(work) = self.next_work() {
            let job = match work {
                Work::Write(job) => job,
                Work::Remove(address) => {
                    self.remove_unwanted(&address);
                    continue;
                }
                Work::Stamp(address) => {
                    let used = self.0.state().index.take_touched(&address);
                    used.into_iter().for_each(|used| self.0.folder.stamp(&address, used));
                    continue;
                }
            };
            let since = Instant::now();
            let result = self.save(&job);
            match result {
                Ok(true) => self.0.state().was_written(&job, since.elapsed()),
                Ok(false) => self.0.state().counts.dropped_entries += 1,
                Err(error) => self.0.write_failed(&error),
            }
            self.finish(&job);
        }
    }

    /// Waits for work; `None` if the store is closed and nothing is left.
    fn next_work(&self) -> Option<Work> {
        let waited = self.0.work.wait_while(self.0.state(), |state| state.is_idle());
        let mut state = waited.expect("nothing panics under this lock");
        if let Some(address) = state.unwanted.pop() {
            return Some(Work::Remove(address));
        }
        if let Some(job) = state.queue.pop_front() {
            state.is_writing = true;
            return Some(Work::Write(job));
        }
        state.touched.pop_front().map(Work::Stamp)
    }

    /// Removes the file of an entry that the index has no longer.
    fn remove_unwanted(&self, address: &Address) {
        let _files = self.0.lock_files();
        // The entry may have been written again since.
        if self.0.state().index.entries.contains_key(address) {
            return;
        }
        if let Err(error) = self.0.folder.remove(address) {
            self.0.read_failed("remove a file of", &error);
        }
    }

    fn finish(&self, job: &Job) {
        let mut state = self.0.state();
        state.is_writing = false;
        state.queued_bytes -= job.bytes();
        // If it was removed, the address may be in the queue again.
        if state.queued_as(job).is_some() {
            state.queued.remove(&job.address);
        }
        drop(state);
        self.0.idle.notify_all();
    }

    /// Writes an entry, after the oldest ones made room for it. `false` if the entry was removed meanwhile.
    fn save(&self, job: &Job) -> io::Result<bool> {
        self.0.evict_down_to(self.0.max_bytes.saturating_sub(job.bytes()))?;
        match self.write_file(job) {
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                let bytes = self.0.state().index.bytes;
                self.0.evict_down_to(bytes.saturating_sub(job.bytes()))?;
                self.write_file(job)
            }
            result => result,
        }
    }

    /// Writes a temporary file and renames it. `false` if the entry was removed meanwhile.
    fn write_file(&self, job: &Job) -> io::Result<bool> {
        let names = Names::of(&job.address);
        let subfolder = self.0.folder.make_subfolder(&names.subfolder)?;
        let written = self.write_temporary(&subfolder, &names, job);
        let result = written.and_then(|used| self.commit(&subfolder, &names, job, used));
        if !matches!(result, Ok(true)) {
            let _ = discard(&subfolder, &names.temporary);
        }
        result
    }

    /// Returns the time of the file.
    fn write_temporary(&self, subfolder: &OwnedFd, names: &Names, job: &Job) -> io::Result<UseTime> {
        // An earlier removal of this file may have failed.
        discard(subfolder, &names.temporary)?;
        let flags = SAFE | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let mut file =
            File::from(rustix::fs::openat(subfolder, &names.temporary, flags, Mode::RUSR | Mode::WUSR)?);
        (self.0.options.write)(&mut file, &encode_header(&job.address, &job.payload))?;
        (self.0.options.write)(&mut file, &job.payload)?;
        // An entry that was removed meanwhile is not kept.
        let used = self.0.state().queued_as(job).map(|queued| queued.used).unwrap_or_default();
        file.set_modified(used.into())?;
        Ok(used)
    }

    fn commit(
        &self,
        subfolder: &OwnedFd,
        names: &Names,
        job: &Job,
        time_of_file: UseTime,
    ) -> io::Result<bool> {
        let _files = self.0.lock_files();
        rustix::fs::renameat(subfolder, &names.temporary, subfolder, &names.entry)?;
        // It may have been removed until now, and an entry that is removed from now on is in the index.
        let is_wanted = self.0.state().keep(job, time_of_file);
        if !is_wanted {
            discard(subfolder, &names.entry)?;
        }
        Ok(is_wanted)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // After a panic under the lock, all users of the store panic at it.
        if let Ok(mut state) = self.0.state.lock() {
            state.is_closed = true;
            state.is_ended = true;
            state.is_writing = false;
            state.drop_queue();
        }
        self.0.idle.notify_all();
    }
}

// --- the folder ----------------------------------------------------------------------------------------

/// The folder on the disk, locked.
struct Folder {
    /// For messages. Files are opened from `root`.
    path: PathBuf,
    root: OwnedFd,
    lock: OwnedFd,
}

/// An entry that a listing found.
struct Found {
    address: Address,
    bytes: u64,
    used: UseTime,
}

/// The names of an entry.
struct Names {
    subfolder: String,
    /// Names in the subfolder.
    entry: String,
    temporary: String,
}

impl Names {
    fn of(address: &Address) -> Self {
        let hex = address.to_string();
        let (subfolder, rest) = hex.split_at(2);
        let entry = format!("{rest}{ENTRY_SUFFIX}");
        Self { subfolder: subfolder.to_owned(), temporary: format!("{entry}{TEMPORARY_SUFFIX}"), entry }
    }
}

impl Folder {
    /// Makes the folder if it does not exist, checks who can enter it, and locks it.
    fn open(path: &Path) -> Result<Self, KvStoreError> {
        let failed = |action| move |error| KvStoreError::Io { action, folder: path.to_owned(), error };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("make the folder"))?;
        let root = open_root(path).map_err(io::Error::from).map_err(failed("open"))?;
        check_access(path, &root)?;
        let flags = SAFE | OFlags::RDWR | OFlags::CREATE;
        let lock = rustix::fs::openat(&root, LOCK_NAME, flags, Mode::RUSR | Mode::WUSR);
        let lock = lock.map_err(io::Error::from).map_err(failed("make the file `lock` in"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path: path.to_owned(), root, lock }),
            Err(Errno::WOULDBLOCK) => Err(KvStoreError::Busy { folder: path.to_owned() }),
            Err(error) => Err(failed("lock")(error.into())),
        }
    }

    /// Unlocks the folder at once. A child process that another thread starts now may have inherited the
    /// file, and would keep the lock for a while if the file was only closed.
    fn unlock(&self) {
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }

    /// One line that says what failed, where, why, and what to do.
    fn problem(&self, action: &str, error: &io::Error) -> String {
        format!("cannot {action} {}: {error}; {}", self.path.display(), advice(error))
    }

    /// Finds all entries. Removes what a killed process left, and what has a place or name of ours but is no
    /// entry. Files with other names stay.
    fn list(&self) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        let is_ours =
            |name: &String| name.len() == 2 && name.bytes().all(|byte| super::digit(byte).is_some());
        for name in names_in(&self.root)?.into_iter().filter(is_ours) {
            match self.open_subfolder(&name) {
                Ok(subfolder) => list_subfolder(&subfolder, &name, &mut found)?,
                Err(error) if is_other_type(error) => discard_logged(&self.root, &name),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(found)
    }

    fn open_subfolder(&self, name: &str) -> rustix::io::Result<OwnedFd> {
        rustix::fs::openat(&self.root, name, SAFE | OFlags::DIRECTORY, Mode::empty())
    }

    fn make_subfolder(&self, name: &str) -> io::Result<OwnedFd> {
        match self.open_subfolder(name) {
            Err(Errno::NOENT) => {}
            result => return Ok(result?),
        }
        match rustix::fs::mkdirat(&self.root, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Ok(self.open_subfolder(name)?),
            Err(error) => Err(error.into()),
        }
    }

    /// The secret of the folder, which is made if there is none.
    fn secret(&self) -> io::Result<[u8; 32]> {
        let open = |flags| rustix::fs::openat(&self.root, SECRET_NAME, SAFE | flags, Mode::RUSR | Mode::WUSR);
        let mut secret = [0; 32];
        match open(OFlags::RDONLY) {
            // A file of another length is one that a process was killed while it wrote it.
            Ok(file) => {
                let mut file = File::from(file);
                if file.metadata()?.len() == 32 {
                    file.read_exact(&mut secret)?;
                    return Ok(secret);
                }
            }
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let random = ring::rand::SystemRandom::new();
        let filled = ring::rand::SecureRandom::fill(&random, &mut secret);
        filled.map_err(|_| io::Error::other("the system has no random numbers"))?;
        let mut file = File::from(open(OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?);
        file.write_all(&secret)?;
        Ok(secret)
    }

    fn read(&self, address: &Address, bytes: usize) -> Result<Vec<u8>, Unreadable> {
        let file = self.open_entry(address).map_err(|error| match is_other_type(error) {
            true => Unreadable::Damage(Damage::NotAFile),
            false => Unreadable::Io(error.into()),
        })?;
        if !file.metadata()?.is_file() {
            return Err(Damage::NotAFile.into());
        }
        decode(&file, address, bytes)
    }

    /// Records a use of an entry in the time of its file. An error does not matter: only the order of evictions after a
    /// restart depends on that time.
    fn stamp(&self, address: &Address, used: UseTime) {
        let _ = self.open_entry(address).map(|file| file.set_modified(used.into()));
    }

    fn open_entry(&self, address: &Address) -> rustix::io::Result<File> {
        let names = Names::of(address);
        let subfolder = self.open_subfolder(&names.subfolder)?;
        let file = rustix::fs::openat(&subfolder, &names.entry, SAFE | OFlags::RDONLY, Mode::empty())?;
        Ok(File::from(file))
    }

    /// Removes an entry. That it is already gone is no error.
    fn remove(&self, address: &Address) -> io::Result<()> {
        let names = Names::of(address);
        match self.open_subfolder(&names.subfolder) {
            Ok(subfolder) => discard(&subfolder, &names.entry),
            Err(error) if error == Errno::NOENT || is_other_type(error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Opens a folder. Unlike the names in it, it may be a link.
fn open_root(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Whether a name was not opened because it is a link or a socket, or not the folder that was expected.
fn is_other_type(error: Errno) -> bool {
    matches!(error, Errno::LOOP | Errno::NOTDIR | Errno::NXIO)
}

/// Refuses a folder that other users may enter or own.
fn check_access(path: &Path, root: &OwnedFd) -> Result<(), KvStoreError> {
    let folder = path.to_owned();
    let stat = match rustix::fs::fstat(root) {
        Ok(stat) => stat,
        Err(error) => return Err(KvStoreError::Io { action: "check", folder, error: error.into() }),
    };
    let (user, mode) = (rustix::process::geteuid().as_raw(), stat.st_mode & 0o7777);
    if stat.st_uid != user {
        return Err(KvStoreError::Owner { folder, owner: stat.st_uid, user });
    }
    if mode & 0o077 != 0 {
        return Err(KvStoreError::Permissions { folder, mode });
    }
    Ok(())
}

/// The names in a folder that are UTF-8; all of ours are. The list is complete before a caller removes a
/// file, because a removal during a listing may hide other names.
fn names_in(folder: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        names.extend(entry?.file_name().to_str().ok().map(str::to_owned));
    }
    Ok(names)
}

fn list_subfolder(subfolder: &OwnedFd, prefix: &str, found: &mut Vec<Found>) -> io::Result<()> {
    for name in names_in(subfolder)? {
        if let Some(rest) = name.strip_suffix(ENTRY_SUFFIX) {
            let address = Address::parse(&format!("{prefix}{rest}"));
            match address.and_then(|address| find(subfolder, &name, address)) {
                Some(entry) => found.push(entry),
                None => discard_logged(subfolder, &name),
            }
        } else if name.ends_with(TEMPORARY_SUFFIX) {
            discard_logged(subfolder, &name);
        }
    }
    Ok(())
}

/// The entry with this name, if it is a regular file.
fn find(subfolder: &OwnedFd, name: &str, address: Address) -> Option<Found> {
    let stat = rustix::fs::statat(subfolder, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let used = UseTime::of_file(stat.st_mtime, stat.st_mtime_nsec as u64);
    is_file.then_some(Found { address, bytes: u64::try_from(stat.st_size).unwrap_or(0), used })
}

/// Removes a file, a link or an empty folder. That it is already gone is no error.
fn discard(folder: &OwnedFd, name: &str) -> io::Result<()> {
    let removed = match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR),
        result => result,
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes what is no entry. If that fails, it only wastes space.
fn discard_logged(folder: &OwnedFd, name: &str) {
    if let Err(error) = discard(folder, name) {
        tracing::debug!("{name} in the folder of the KV cache is no entry and cannot be removed: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::SystemTime;

    use rand::{Rng as _, RngCore as _, SeedableRng as _};
    use rand_chacha::ChaCha8Rng;
    use sha2::{Digest as _, Sha256};
    use tempfile::TempDir;

    use super::super::{BLOCK_BYTES, VERSION, array, fixed_fields};
    use super::*;

    /// Far longer than any test takes.
    const LONG: Duration = Duration::from_secs(600);
    /// Far more than any test writes.
    const MUCH: u64 = 1 << 40;

    /// A folder that only this user may enter.
    fn folder() -> TempDir {
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    fn open(folder: &TempDir, max_bytes: u64) -> KvStore {
        KvStore::open(folder.path(), max_bytes).unwrap()
    }

    fn open_with(folder: &TempDir, max_bytes: u64, write: Box<WriteAll>) -> KvStore {
        let options = Options { write, pause: LONG, ..Options::default() };
        KvStore::open_with(folder.path(), max_bytes, options).unwrap()
    }

    /// The payload of `bytes` bytes with this number, and its address.
    fn piece(number: u64, bytes: usize) -> (Address, Vec<u8>) {
        let mut payload = vec![0; bytes];
        ChaCha8Rng::seed_from_u64(number).fill_bytes(&mut payload);
        let hash = Sha256::new().chain_update(number.to_le_bytes()).chain_update(&payload);
        (Address::new(hash.finalize().into()), payload)
    }

    /// Writes a piece and waits until it is on the disk.
    fn put(store: &KvStore, number: u64, bytes: usize) -> Address {
        let (address, payload) = piece(number, bytes);
        assert!(store.write(address, payload, store.now()));
        assert!(store.flush(LONG));
        assert!(store.contains(&address));
        address
    }

    fn path_of(folder: &Path, address: &Address) -> PathBuf {
        let names = Names::of(address);
        folder.join(names.subfolder).join(names.entry)
    }

    /// The files in all subfolders, with their bytes.
    fn files_in(folder: &Path) -> Vec<(PathBuf, u64)> {
        let entries = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let subfolders = entries(folder).filter(|path| path.is_dir());
        let files = subfolders.flat_map(|subfolder| entries(&subfolder).collect::<Vec<_>>());
        files.map(|path| (path.clone(), path.symlink_metadata().unwrap().len())).collect()
    }

    fn assert_matches_disk(store: &KvStore, folder: &Path) {
        let (stats, files) = (store.stats(), files_in(folder));
        assert_eq!(stats.entries, files.len() as u64, "{files:?}");
        assert_eq!(stats.bytes, files.iter().map(|(_, bytes)| bytes).sum::<u64>());
        assert!(stats.bytes <= stats.max_bytes);
        assert_eq!(stats.queued_bytes, 0);
    }

    /// A write that tells when it begins, and that waits while the test holds the lock.
    fn gated_write(gate: &Arc<Mutex<()>>) -> (Box<WriteAll>, Receiver<()>) {
        let (gate, (begun, begins)) = (Arc::clone(gate), channel());
        let write = move |file: &mut File, bytes: &[u8]| {
            let _ = begun.send(());
            drop(gate.lock().unwrap());
            file.write_all(bytes)
        };
        (Box::new(write), begins)
    }

    /// Puts three entries of 10 bytes into the queue.
    fn queue_three(store: &KvStore) {
        for number in 0..3 {
            let (address, payload) = piece(number, 10);
            assert!(store.write(address, payload, store.now()));
        }
    }

    /// A store that has begun to write the first of three entries, and waits until the guard is dropped.
    fn writing_three<'a>(folder: &TempDir, gate: &'a Arc<Mutex<()>>) -> (KvStore, MutexGuard<'a, ()>) {
        let (write, begins) = gated_write(gate);
        let store = open_with(folder, MUCH, write);
        let closed = gate.lock().unwrap();
        queue_three(&store);
        begins.recv().unwrap();
        (store, closed)
    }

    /// Whether each of these entries is in the store.
    fn contained(store: &KvStore, addresses: &[Address]) -> Vec<bool> {
        addresses.iter().map(|address| store.contains(address)).collect()
    }

    /// A write that fails as a full disk does as often as the counter says. Half of the bytes are written
    /// before.
    fn failing_write(failures: &Arc<AtomicU32>) -> Box<WriteAll> {
        let failures = Arc::clone(failures);
        Box::new(move |file, bytes| {
            let one_less = |left: u32| left.checked_sub(1);
            if failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_err() {
                return file.write_all(bytes);
            }
            file.write_all(&bytes[..bytes.len() / 2])?;
            Err(Errno::NOSPC.into())
        })
    }

    #[test]
    fn an_address_in_text_is_64_lower_case_digits_and_parses_back() {
        let (address, _) = piece(1, 1);
        let text = address.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(Address::parse(&text), Some(address));
        assert_eq!(Address::new([0xab; 32]).to_string(), "ab".repeat(32));
        for wrong in ["AB".repeat(32), "ab".repeat(31), "ab".repeat(33), "+a".repeat(32), "é".repeat(32)] {
            assert_eq!(Address::parse(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_payload_of_any_length_is_read_as_it_was_written() {
        let folder = folder();
        let store = open(&folder, MUCH);
        for bytes in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5] {
            let address = put(&store, bytes as u64, bytes);
            assert_eq!(store.read(&address, bytes, store.now()), Some(piece(bytes as u64, bytes).1));
            let metadata = path_of(folder.path(), &address).metadata().unwrap();
            assert_eq!(metadata.len(), file_bytes(bytes));
            assert_eq!(metadata.mode() & 0o777, 0o600);
        }
        let stats = store.stats();
        assert_eq!((stats.entries, stats.written_entries, stats.read_entries), (5, 5, 5));
        assert_eq!((stats.written_bytes, stats.read_bytes), (stats.bytes, stats.bytes));
        assert!(stats.read_ns > 0 && stats.write_ns > 0);
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn an_address_that_is_already_there_is_not_written_again() {
        let folder = folder();
        let store = open(&folder, MUCH);
        put(&store, 1, 10);
        put(&store, 1, 10);
        assert_eq!(store.stats().written_entries, 1);
        let (unknown, _) = piece(2, 10);
        assert!(!store.contains(&unknown));
        assert_eq!(store.read(&unknown, 10, store.now()), None);
        assert_eq!(store.stats().damaged_entries, 0);
    }

    #[test]
    fn an_entry_of_another_length_than_asked_for_is_removed() {
        let folder = folder();
        let store = open(&folder, MUCH);
        for wrong in [9, 11, 3 * BLOCK_BYTES, usize::MAX] {
            let address = put(&store, 1, 10);
            assert_eq!(store.read(&address, wrong, store.now()), None);
            assert!(!store.contains(&address));
        }
        assert_eq!(store.stats().damaged_entries, 4);
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_reopened_store_has_the_entries_in_the_order_of_their_use() {
        let folder = folder();
        let store = open(&folder, MUCH);
        let addresses: Vec<Address> = (0..4).map(|number| put(&store, number, 100)).collect();
        assert!(store.read(&addresses[0], 100, store.now()).is_some());
        let bytes = store.stats().bytes;
        drop(store);

        let store = open(&folder, bytes);
        assert_eq!(store.stats().bytes, bytes);
        put(&store, 4, 100);
        assert_eq!(contained(&store, &addresses), [true, false, true, true]);
        drop(store);

        let store = open(&folder, 2 * file_bytes(100));
        assert_eq!((store.stats().entries, store.stats().evicted_entries), (2, 2));
        assert!(store.contains(&addresses[0]));
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_reopened_store_knows_the_uses_without_a_read() {
        let folder = folder();
        let store = open(&folder, MUCH);
        let addresses: Vec<Address> = (0..4).map(|number| put(&store, number, 100)).collect();
        store.touch(&addresses[1], store.now());
        store.touch(&addresses[0], store.now());
        store.touch(&piece(9, 100).0, store.now());
        drop(store);

        let store = open(&folder, 2 * file_bytes(100));
        assert_eq!(contained(&store, &addresses), [true, true, false, false]);
        assert_matches_disk(&store, folder.path());
    }

    /// They are written from the most valuable one on, so that the others are of use if the server ends meanwhile.
    #[test]
    fn of_entries_that_are_used_at_once_those_worth_less_are_evicted_first() {
        let folder = folder();
        let store = open(&folder, 4 * file_bytes(100));
        let old = put(&store, 9, 100);
        let used = store.now();
        let write = |number: u64| {
            let (address, payload) = piece(number, 100);
            assert!(store.write(address, payload, used.less(number as usize)) && store.flush(LONG));
            address
        };
        let addresses: Vec<Address> = (0..5).map(write).collect();
        assert!(!store.contains(&old));
        assert_eq!(
            contained(&store, &addresses),
            [true, true, true, false, true],
            "the last one needed room"
        );
        assert!(store.touch(&addresses[0], used.less(100)), "an earlier use changes nothing");
        drop(store);

        let store = open(&folder, 2 * file_bytes(100));
        assert_eq!(contained(&store, &addresses), [true, true, false, false, false]);
    }

    #[test]
    fn the_use_of_an_entry_that_waits_to_be_written_counts() {
        let (folder, gate) = (folder(), Arc::new(Mutex::new(())));
        let (store, closed) = writing_three(&folder, &gate);
        let addresses: Vec<Address> = (0..3).map(|number| piece(number, 10).0).collect();
        for address in &addresses[..2] {
            assert!(store.touch(address, store.now()) && !store.contains(address));
        }
        drop(closed);
        assert!(store.flush(LONG));
        drop(store);
        let store = open(&folder, 2 * file_bytes(10));
        assert_eq!(contained(&store, &addresses), [true, true, false]);
    }

    #[test]
    fn a_use_between_the_last_steps_of_a_write_is_recorded_in_the_file() {
        let (address, payload) = piece(1, 10);
        let job = Job { address, payload, number: 1 };
        let times = [1, 2, 3].map(UseTime);
        let mut state = State::default();
        state.queued.insert(address, Queued { number: job.number, used: times[0] });
        assert!(state.touch(&address, times[1]), "the file has its time already");
        assert!(state.keep(&job, times[0]));
        assert_eq!(state.touched.make_contiguous(), [address]);
        assert!(state.touch(&address, times[2]), "the writer has not finished");
        assert_eq!(state.index.take_touched(&address), Some(times[2]));
    }

    #[test]
    fn an_entry_is_newer_than_the_files_from_before_the_clock_was_set_back() {
        let folder = folder();
        let store = open(&folder, MUCH);
        let before = put(&store, 1, 100);
        let file = File::open(path_of(folder.path(), &before)).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
        drop(store);
        let after = put(&open(&folder, MUCH), 2, 100);
        let store = open(&folder, file_bytes(100));
        assert_eq!([store.contains(&before), store.contains(&after)], [false, true]);
    }

    /// As after an error of the disk, which a test cannot cause.
    #[test]
    fn an_entry_that_cannot_be_read_counts_until_it_is_evicted_or_written_again() {
        let folder = folder();
        let store = open(&folder, 3 * file_bytes(100));
        let addresses: Vec<Address> = (0..2).map(|number| put(&store, number, 100)).collect();
        for address in &addresses {
            let inserted = store.shared().state().index.entries[address].inserted;
            store.shared().state().index.set_unreadable(address, inserted);
            assert!(!store.contains(address) && store.read(address, 100, store.now()).is_none());
        }
        assert_matches_disk(&store, folder.path());
        put(&store, 1, 100);
        assert_eq!(store.read(&addresses[1], 100, store.now()), Some(piece(1, 100).1));
        assert_matches_disk(&store, folder.path());
        // Needs the room of the other one.
        put(&store, 2, 200);
        assert!(store.contains(&addresses[1]));
        assert_eq!(store.stats().evicted_entries, 1);
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_full_folder_evicts_the_oldest_entries_and_keeps_used_ones() {
        let folder = folder();
        let store = open(&folder, 4 * file_bytes(100));
        let addresses: Vec<Address> = (0..4).map(|number| put(&store, number, 100)).collect();
        assert!(store.read(&addresses[0], 100, store.now()).is_some());
        // Needs the room of two entries.
        put(&store, 9, 200);
        assert_eq!(contained(&store, &addresses), [true, false, false, true]);
        assert_eq!(store.stats().evicted_entries, 2);
        assert_matches_disk(&store, folder.path());

        let (large, payload) = piece(10, 1000);
        assert!(!store.write(large, payload, store.now()));
        assert_eq!((store.stats().entries, store.stats().dropped_entries), (3, 1));
    }

    /// Damages the file of an entry in one of ten ways. `spare` is a folder for other files.
    fn damage(kind: usize, path: &Path, spare: &Path, rng: &mut ChaCha8Rng) {
        let mut bytes = fs::read(path).unwrap();
        match kind {
            0 => bytes.truncate(rng.random_range(0..bytes.len())),
            1 | 2 => {
                let at = rng.random_range(0..bytes.len());
                bytes[at] ^= 1 << rng.random_range(0..8);
            }
            3 => {
                bytes[8] += 1;
                let end = header_bytes_of(&bytes) - 4;
                let checksum = crc32fast::hash(&bytes[..end]);
                bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());
            }
            4 => {
                let other = Address::new([7; 32]);
                let payload = bytes.split_off(header_bytes_of(&bytes));
                bytes = [encode_header(&other, &payload), payload].concat();
            }
            5 => bytes.clear(),
            6 => bytes.extend(vec![0; rng.random_range(1..1000)]),
            7 => bytes.fill(0),
            8 => {
                let intact = spare.join("intact");
                fs::rename(path, &intact).unwrap();
                return symlink(&intact, path).unwrap();
            }
            _ => {
                fs::remove_file(path).unwrap();
                return fs::create_dir(path).unwrap();
            }
        }
        let replacement = spare.join("replacement");
        fs::write(&replacement, bytes).unwrap();
        fs::rename(&replacement, path).unwrap();
    }

    fn header_bytes_of(file: &[u8]) -> usize {
        u32::from_le_bytes(array(&file[12..])) as usize
    }

    #[test]
    fn a_damaged_file_is_never_returned_and_is_removed() {
        let seed = 0x6b76;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (folder, spare) = (folder(), folder());
        let store = open(&folder, MUCH);
        for case in 0..40 {
            let bytes = if case < 10 { BLOCK_BYTES } else { 0 } + rng.random_range(1..3000);
            let address = put(&store, case as u64, bytes);
            let path = path_of(folder.path(), &address);
            damage(case % 10, &path, spare.path(), &mut rng);
            assert_eq!(store.read(&address, bytes, store.now()), None, "case {case}");
            assert!(path.symlink_metadata().is_err(), "case {case}");
            assert!(!store.contains(&address));
            assert_eq!(store.stats().damaged_entries, case as u64 + 1);
            // The address can be written again.
            put(&store, case as u64, bytes);
            assert!(store.read(&address, bytes, store.now()).is_some());
        }
        assert!(spare.path().join("intact").is_file());
        assert_eq!(store.stats().read_errors, 0);
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_file_that_moved_to_another_name_is_damaged_there_and_gone_here() {
        let folder = folder();
        let store = open(&folder, MUCH);
        let (from, to) = (put(&store, 1, 50), put(&store, 2, 50));
        fs::rename(path_of(folder.path(), &from), path_of(folder.path(), &to)).unwrap();
        assert_eq!(store.read(&to, 50, store.now()), None);
        assert_eq!(store.stats().damaged_entries, 1);
        assert_eq!(store.read(&from, 50, store.now()), None);
        assert_eq!((store.stats().damaged_entries, store.stats().read_errors), (1, 0));
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn decode_of_mutated_bytes_returns_the_payload_or_an_error_and_never_panics() {
        let seed = 0x6465;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..20_000 {
            let (address, payload) = piece(rng.random_range(0..50), rng.random_range(0..100));
            let mut file = [encode_header(&address, &payload), payload.clone()].concat();
            match rng.random_range(0..4) {
                0 => file.truncate(rng.random_range(0..=file.len())),
                1 => file.extend(vec![rng.random::<u8>(); rng.random_range(0..9)]),
                2 => rng.fill_bytes(&mut file),
                _ => {
                    for _ in 0..rng.random_range(0..4) {
                        let at = rng.random_range(0..file.len());
                        file[at] = rng.random();
                    }
                }
            }
            let bytes = if rng.random() {
                payload.len()
            } else {
                rng.random_range(0..usize::MAX) >> rng.random_range(0..63)
            };
            match decode(&file[..], &address, bytes) {
                Ok(decoded) => assert_eq!(decoded, payload),
                Err(Unreadable::Damage(_)) => {}
                Err(Unreadable::Io(error)) => panic!("bytes in memory cannot fail to be read: {error}"),
            }
        }
    }

    #[test]
    fn a_header_that_announces_too_much_is_refused_before_the_allocation() {
        let (address, _) = piece(1, 0);
        for bytes in [MAX_FILE_BYTES as usize, usize::MAX >> 1, usize::MAX] {
            let fields = fixed_fields(VERSION, &address, bytes);
            let result = decode(&fields[..], &address, bytes);
            assert!(matches!(result, Err(Unreadable::Damage(Damage::Length))), "{bytes}: {result:?}");
        }
    }

    #[test]
    fn a_link_in_the_place_of_a_subfolder_is_not_followed_and_is_removed() {
        let (folder, elsewhere) = (folder(), folder());
        let store = open(&folder, MUCH);
        let address = put(&store, 1, 50);
        let subfolder = path_of(folder.path(), &address).parent().unwrap().to_owned();
        let target = elsewhere.path().join("target");
        fs::rename(&subfolder, &target).unwrap();
        symlink(&target, &subfolder).unwrap();
        assert_eq!(store.read(&address, 50, store.now()), None);
        assert!(!store.contains(&address));
        // Writing there fails, and does not write to the target either.
        assert!(store.write(address, piece(1, 50).1, store.now()) && store.flush(LONG));
        assert_eq!(store.stats().write_errors, 1);
        drop(store);

        let store = open(&folder, MUCH);
        assert!(subfolder.symlink_metadata().is_err());
        put(&store, 1, 50);
        assert_eq!(files_in(elsewhere.path()).len(), 1);
    }

    #[test]
    fn a_full_disk_drops_writes_until_the_pause_is_over_and_then_recovers() {
        let (folder, failures) = (folder(), Arc::new(AtomicU32::new(u32::MAX)));
        let store = open_with(&folder, MUCH, failing_write(&failures));
        let (address, payload) = piece(1, 1000);
        assert!(store.write(address, payload, store.now()) && store.flush(LONG));
        let stats = store.stats();
        assert_eq!((stats.write_errors, stats.entries, stats.written_entries), (1, 0, 0));
        let error = stats.error.unwrap();
        assert!(error.contains(folder.path().to_str().unwrap()), "{error}");
        assert!(error.contains("No space left") && error.contains("free some space"), "{error}");
        assert_eq!(files_in(folder.path()), []);

        failures.store(0, Ordering::SeqCst);
        let (address, payload) = piece(2, 1000);
        assert!(!store.write(address, payload, store.now()));
        assert_eq!(store.stats().dropped_entries, 1);

        store.shared().state().paused_until = Some(Instant::now());
        let address = put(&store, 2, 1000);
        assert_eq!(store.read(&address, 1000, store.now()), Some(piece(2, 1000).1));
        assert_eq!(store.stats().error, None);
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_full_disk_evicts_as_many_bytes_as_the_entry_needs() {
        let (folder, failures) = (folder(), Arc::new(AtomicU32::new(0)));
        let store = open_with(&folder, MUCH, failing_write(&failures));
        let addresses: Vec<Address> = (0..4).map(|number| put(&store, number, 100)).collect();
        failures.store(1, Ordering::SeqCst);
        put(&store, 9, 150);
        assert_eq!(contained(&store, &addresses), [false, false, true, true]);
        assert_eq!((store.stats().write_errors, store.stats().evicted_entries), (0, 2));
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_failed_write_drops_the_queue() {
        let gate = Arc::new(Mutex::new(()));
        let (folder, failures) = (folder(), Arc::new(AtomicU32::new(u32::MAX)));
        let (wait, fail) = (gated_write(&gate).0, failing_write(&failures));
        let write: Box<WriteAll> =
            Box::new(move |file, bytes| wait(file, &[]).and_then(|()| fail(file, bytes)));
        let store = open_with(&folder, MUCH, write);
        let closed = gate.lock().unwrap();
        queue_three(&store);
        drop(closed);
        assert!(store.flush(LONG));
        assert_eq!((store.stats().write_errors, store.stats().dropped_entries), (1, 2));
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn a_folder_that_is_gone_makes_errors_and_no_panic() {
        let folder = folder();
        let store = open(&folder, MUCH);
        let address = put(&store, 1, 10);
        fs::remove_dir_all(folder.path()).unwrap();
        assert_eq!(store.read(&address, 10, store.now()), None);
        let (address, payload) = piece(2, 10);
        assert!(store.write(address, payload, store.now()) && store.flush(LONG));
        let stats = store.stats();
        assert_eq!((stats.write_errors, stats.damaged_entries, stats.entries), (1, 0, 0));
        assert!(stats.error.unwrap().contains("restart the server"));
        assert!(!folder.path().exists());
    }

    #[test]
    fn a_slow_disk_does_not_delay_other_calls_and_the_queue_is_bounded() {
        let (folder, gate) = (folder(), Arc::new(Mutex::new(())));
        let (write, begins) = gated_write(&gate);
        let options = Options { write, queue_bytes: 3 * file_bytes(100), pause: LONG };
        let store = KvStore::open_with(folder.path(), MUCH, options).unwrap();
        let closed = gate.lock().unwrap();
        let accepted: Vec<bool> =
            (0..5).map(|number| piece(number, 100)).map(|(a, p)| store.write(a, p, store.now())).collect();
        begins.recv().unwrap();
        assert_eq!(accepted, [true, true, true, false, false]);
        let (first, payload) = piece(0, 100);
        assert!(store.write(first, payload, store.now()));
        assert!(!store.contains(&first));
        let stats = store.stats();
        assert_eq!((stats.queued_bytes, stats.dropped_entries), (3 * file_bytes(100), 2));
        assert!(!store.flush(Duration::from_millis(1)));
        drop(closed);
        assert!(store.flush(LONG));
        assert_eq!((store.stats().entries, store.stats().queued_bytes), (3, 0));
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn the_last_drop_ends_the_writer_after_the_entry_at_hand() {
        let (folder, gate) = (folder(), Arc::new(Mutex::new(())));
        let (store, closed) = writing_three(&folder, &gate);
        let clone = store.clone();
        drop(store);
        assert!(clone.stats().queued_bytes > 0);
        let shared = Arc::clone(&clone.closing.0);
        let dropping = std::thread::spawn(move || drop(clone));
        while !shared.state().is_closed {
            std::thread::yield_now();
        }
        drop(closed);
        dropping.join().unwrap();

        let store = open(&folder, MUCH);
        assert_eq!(store.stats().entries, 1);
        assert!(store.read(&piece(0, 10).0, 10, store.now()).is_some());
    }

    #[test]
    fn a_writer_that_panics_closes_the_store() {
        let folder = folder();
        let store = open_with(&folder, MUCH, Box::new(|_, _| panic!("expected by a test")));
        let (address, payload) = piece(1, 10);
        assert!(store.write(address, payload, store.now()));
        assert!(store.flush(LONG));
        store.shared().wait_while(LONG, |state| !state.is_ended);
        let (address, payload) = piece(2, 10);
        assert!(!store.write(address, payload, store.now()));
        drop(store);
        assert_eq!(open(&folder, MUCH).stats().entries, 0);
        assert_eq!(files_in(folder.path()), []);
    }

    #[test]
    fn a_folder_in_use_is_refused() {
        let folder = folder();
        let store = open(&folder, MUCH);
        for error in
            [KvStore::open(folder.path(), MUCH).unwrap_err(), clear_folder(folder.path()).unwrap_err()]
        {
            assert!(matches!(error, KvStoreError::Busy { .. }));
            let text = error.to_string();
            assert!(text.contains("another server uses it"), "{text}");
            assert!(text.contains(folder.path().to_str().unwrap()), "{text}");
        }
        drop(store);
        open(&folder, MUCH);
    }

    #[test]
    fn a_new_folder_and_its_parents_are_made_for_this_user_alone() {
        let folder = folder();
        let path = folder.path().join("a/b");
        let store = KvStore::open(&path, MUCH).unwrap();
        let address = put(&store, 1, 1);
        let subfolder = path_of(&path, &address).parent().unwrap().to_owned();
        for made in [folder.path().join("a"), path, subfolder] {
            assert_eq!(made.metadata().unwrap().mode() & 0o7777, 0o700, "{made:?}");
        }
    }

    #[test]
    fn a_folder_that_others_may_enter_is_refused_with_the_command_to_run() {
        let folder = folder();
        for mode in [0o755, 0o710, 0o701, 0o770] {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
            let text = KvStore::open(folder.path(), MUCH).unwrap_err().to_string();
            assert!(text.contains(&format!("`chmod 700 {}`", folder.path().display())), "{text}");
            assert!(text.contains(&format!("{mode:o}")), "{text}");
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        open(&folder, MUCH);
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let folder = folder();
        // Only root can give a folder to another user. Every other user finds one of root.
        let path = match std::os::unix::fs::chown(folder.path(), Some(12345), None) {
            Ok(()) => folder.path(),
            Err(_) => Path::new("/"),
        };
        let error = KvStore::open(path, MUCH).unwrap_err();
        assert!(matches!(error, KvStoreError::Owner { .. }), "{error}");
    }

    #[test]
    fn a_path_that_is_no_folder_is_refused() {
        let folder = folder();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        let text = KvStore::open(&path, MUCH).unwrap_err().to_string();
        assert!(text.contains(path.to_str().unwrap()) && text.contains("choose a folder"), "{text}");
    }

    /// What the check says is what the start of a server does, and the check changes nothing.
    #[test]
    fn a_check_finds_a_folder_that_cannot_be_used_and_makes_none() {
        let folder = folder();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "").unwrap();
        fs::create_dir(at("open")).unwrap();
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        let before = names_in(&open_root(folder.path()).unwrap()).unwrap().len();
        for name in ["file", "file/kv", "open", "dangling"] {
            check_folder(&at(name)).expect_err(name);
            KvStore::open(&at(name), MUCH).expect_err(name);
        }
        for name in ["kv", "kv/deep"] {
            check_folder(&at(name)).unwrap();
        }
        assert_eq!(names_in(&open_root(folder.path()).unwrap()).unwrap().len(), before);
        let store = KvStore::open(&at("kv"), MUCH).unwrap();
        check_folder(&at("kv")).expect("a folder that a server uses");
        drop(store);
        // Root may write everywhere.
        if !rustix::process::geteuid().is_root() {
            fs::set_permissions(at("kv"), fs::Permissions::from_mode(0o500)).unwrap();
            check_folder(&at("kv")).expect_err("read-only");
            check_folder(&at("kv/deep")).expect_err("read-only parent");
            check_folder(Path::new("/unicorn-test/kv")).expect_err("the root folder is root's");
            fs::set_permissions(at("kv"), fs::Permissions::from_mode(0o700)).unwrap();
        }
    }

    #[test]
    fn opening_removes_leftovers_and_leaves_other_files() {
        let folder = folder();
        let address = put(&open(&folder, MUCH), 1, 10);
        let at = |name: &str| folder.path().join(name);
        let rest = "0".repeat(61);
        let ours = [
            "ab/x.kv".to_owned(),
            format!("ab/{rest}A.kv"),
            format!("ab/{rest}00.kv"),
            format!("ab/{rest}0.kv.tmp"),
            "ab/.tmp".to_owned(),
            "ab/.kv".to_owned(),
        ];
        let (link, directory, file) = (format!("ab/{rest}1.kv"), format!("ab/{rest}2.kv"), "cd");
        let others = ["notes", "x.tmp", "ab/notes", "AB/x.kv", "abc/x.kv", "zz/x.kv"];
        for folder in ["ab", "AB", "abc", "zz"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        ours.iter()
            .map(String::as_str)
            .chain(others)
            .chain([file])
            .for_each(|name| fs::write(at(name), "").unwrap());
        symlink(at("notes"), at(&link)).unwrap();
        fs::create_dir(at(&directory)).unwrap();

        let store = open(&folder, MUCH);
        for name in ours.iter().map(String::as_str).chain([&link[..], &directory, file]) {
            assert!(at(name).symlink_metadata().is_err(), "{name}");
        }
        for name in others {
            assert!(at(name).is_file(), "{name}");
        }
        assert_eq!((store.stats().entries, store.stats().bytes), (1, file_bytes(10)));
        assert!(store.read(&address, 10, store.now()).is_some());
    }

    #[test]
    fn clear_removes_all_entries_and_new_ones_can_be_written() {
        let folder = folder();
        let store = open(&folder, MUCH);
        for number in 0..3 {
            put(&store, number, 10);
        }
        assert_eq!(store.clear().unwrap(), Cleared { entries: 3, bytes: 3 * file_bytes(10) });
        assert_eq!(store.clear().unwrap(), Cleared::default());
        assert_matches_disk(&store, folder.path());
        put(&store, 0, 10);
        drop(store);
        assert_eq!(clear_folder(folder.path()).unwrap(), Cleared { entries: 1, bytes: file_bytes(10) });
        assert_eq!(files_in(folder.path()), []);
    }

    #[test]
    fn clear_of_a_folder_that_does_not_exist_does_not_make_it() {
        let folder = folder();
        let path = folder.path().join("none");
        assert_eq!(clear_folder(&path).unwrap(), Cleared::default());
        assert!(!path.exists());
    }

    /// Entries are removed from the folder, from the queue, and while they are written. Those of the same addresses that
    /// are queued later stay.
    #[test]
    fn removed_entries_are_gone_and_can_be_written_again() {
        let (folder, gate) = (folder(), Arc::new(Mutex::new(())));
        let (store, closed) = writing_three(&folder, &gate);
        let addresses: Vec<Address> = (0..2).map(|number| piece(number, 10).0).collect();
        store.remove(&addresses);
        let (first, payload) = piece(0, 10);
        assert!(store.write(first, payload.clone(), store.now()), "while the removed entry is written");
        drop(closed);
        assert!(store.flush(LONG));
        let has = |number| store.contains(&piece(number, 10).0);
        assert_eq!([has(0), has(1), has(2)], [true, false, true]);
        assert_eq!(store.read(&first, 10, store.now()), Some(payload.clone()));
        store.remove(&addresses);
        assert!(!has(0) && store.read(&first, 10, store.now()).is_none());
        let path = path_of(folder.path(), &first);
        while path.exists() {
            std::thread::yield_now();
        }
        assert!(store.write(first, payload.clone(), store.now()) && store.flush(LONG));
        assert_eq!(store.read(&first, 10, store.now()), Some(payload));
    }

    #[test]
    fn clear_drops_the_queue_and_the_entry_that_is_written_now() {
        let (folder, gate) = (folder(), Arc::new(Mutex::new(())));
        let (store, closed) = writing_three(&folder, &gate);
        assert_eq!(store.clear().unwrap(), Cleared::default());
        assert_eq!(store.stats().queued_bytes, file_bytes(10));
        // The same address again, while its first write is not complete.
        let (address, payload) = piece(0, 10);
        assert!(store.write(address, payload, store.now()));
        drop(closed);
        assert!(store.flush(LONG));
        let stats = store.stats();
        assert_eq!((stats.entries, stats.written_entries, stats.dropped_entries), (1, 1, 3));
        assert!(store.read(&address, 10, store.now()).is_some());
        assert_matches_disk(&store, folder.path());
    }

    #[test]
    fn threads_that_read_write_and_clear_see_only_what_was_written() {
        let seed = 0x7468;
        println!("seed {seed}");
        let folder = folder();
        let store = open(&folder, 600_000);
        let pieces: Vec<_> = (0..40).map(|number| piece(number, (number as usize * 7919) % 50_000)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (store, pieces) = (store.clone(), &pieces);
                let mut rng = ChaCha8Rng::seed_from_u64(seed + thread);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let (address, payload) = &pieces[rng.random_range(0..pieces.len())];
                        match rng.random_range(0..1000) {
                            0..450 => drop(store.write(*address, payload.clone(), store.now())),
                            450..900 => {
                                let read = store.read(address, payload.len(), store.now());
                                assert!(read.is_none_or(|read| read == *payload));
                            }
                            900..950 => assert!(store.stats().bytes <= 600_000),
                            950..990 => drop(store.contains(address)),
                            990..998 => assert!(store.flush(LONG)),
                            _ => drop(store.clear().unwrap()),
                        }
                    }
                });
            }
        });
        assert!(store.flush(LONG));
        let stats = store.stats();
        assert_eq!((stats.damaged_entries, stats.read_errors, stats.write_errors), (0, 0, 0));
        assert!(stats.read_entries > 0 && stats.evicted_entries > 0, "{stats:?}");
        assert_matches_disk(&store, folder.path());
        drop(store);
        assert_matches_disk(&open(&folder, 600_000), folder.path());
    }

    #[test]
    fn warnings_come_once_a_minute_with_the_number_of_events() {
        let (mut warnings, begin) = (Warnings::default(), Instant::now());
        let count = |warnings: &mut Warnings, seconds| warnings.count(begin + Duration::from_secs(seconds));
        assert_eq!(count(&mut warnings, 0), Some(1));
        assert_eq!(count(&mut warnings, 1), None);
        assert_eq!(count(&mut warnings, 59), None);
        assert_eq!(count(&mut warnings, 60), Some(3));
        assert_eq!(count(&mut warnings, 61), None);
    }
}
