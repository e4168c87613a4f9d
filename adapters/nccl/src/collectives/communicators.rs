//! The communicators of this process, by the pointers that NCCL gave out for them.
//!
//! Every collective looks a communicator up. So each thread remembers the last few, and forgets them when the table changes.
//!
//! Lock order: `by_pointer`, `pairs` and `polling` are leaves. The only call under `polling` is NCCL's `ncclCommGetAsyncError`,
//! which waits for nothing.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};

use tenants::cut::{CommunicatorId, Counter, Cut, Increment, Lane, Rank, Series};

use super::NcclResult;

/// One rank of a communicator, in this process.
#[derive(Debug)]
pub(super) struct Communicator {
    pub(super) pointer: usize,
    pub(super) local: Rank,
    /// The increment that one collective adds.
    pub(super) collective: [Increment; 1],
    pairs: Mutex<BTreeMap<Series, Increment>>,
    pub(super) numbers: Numbers,
    is_ending: AtomicBool,
    is_revoked: AtomicBool,
    is_given_up: AtomicBool,
    /// A call in non-blocking mode is in progress, as far as the application has seen.
    is_in_progress: AtomicBool,
    /// Held around queries about progress: NCCL does not expect two simultaneously.
    polling: Mutex<()>,
}

impl Communicator {
    pub(super) fn new(cut: &Cut, pointer: usize, local: Rank) -> Self {
        let lane = Lane { communicator: local.communicator, series: Series::Collectives };
        Self {
            pointer,
            local,
            collective: [Increment { counter: cut.counter(lane, local.rank), launches: 1 }],
            pairs: Mutex::default(),
            numbers: Numbers::default(),
            is_ending: AtomicBool::new(false),
            is_revoked: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
            is_in_progress: AtomicBool::new(false),
            polling: Mutex::default(),
        }
    }

    pub(super) fn id(&self) -> CommunicatorId {
        self.local.communicator
    }

    /// Returns the increment of one launch on a series of its own.
    pub(super) fn increment(&self, cut: &Cut, series: Series) -> Increment {
        let lane = Lane { communicator: self.id(), series };
        let make = || Increment { counter: cut.counter(lane, self.local.rank), launches: 1 };
        match series {
            Series::Collectives => self.collective[0].clone(),
            Series::Pair { .. } | Series::Expert { .. } | Series::Signal { .. } => {
                let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
                pairs.entry(series).or_insert_with(make).clone()
            }
            Series::Creation | Series::End => make(),
        }
    }

    /// Returns the counter whose [`Counter::is_gone`] says whether this rank has left.
    pub(super) fn seat(&self) -> &Arc<Counter> {
        &self.collective[0].counter
    }

    /// Records that the communicator's end begins. Returns false if it had begun before.
    pub(super) fn begin_end(&self) -> bool {
        !self.is_ending.swap(true, Ordering::Relaxed)
    }

    /// Records that the end has failed.
    pub(super) fn undo_end(&self) {
        self.is_ending.store(false, Ordering::Relaxed);
    }

    pub(super) fn revoke(&self) {
        self.is_revoked.store(true, Ordering::Relaxed);
    }

    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    /// Returns the uses that are left.
    pub(super) fn use_left(&self) -> UseLeft {
        if self.is_revoked.load(Ordering::Relaxed) {
            UseLeft::Ending
        } else if self.is_given_up.load(Ordering::Relaxed) {
            UseLeft::Uncounted
        } else {
            UseLeft::All
        }
    }

    /// Records that a call returned `ncclInProgress`.
    pub(super) fn begin_progress(&self) {
        self.is_in_progress.store(true, Ordering::SeqCst);
    }

    /// Records another call of the application on the communicator. By NCCL's rules the application then knows that the last
    /// call is over. From now on we must not query its progress.
    pub(super) fn application_goes_on(&self) {
        if self.is_in_progress.load(Ordering::Relaxed) {
            let _polling = self.polling.lock().unwrap_or_else(PoisonError::into_inner);
            self.is_in_progress.store(false, Ordering::SeqCst);
        }
    }

    /// Runs `ask`, by which the application queries the state.
    pub(super) fn asked_by_application(&self, ask: impl FnOnce() -> NcclResult) -> NcclResult {
        let _polling = self.polling.lock().unwrap_or_else(PoisonError::into_inner);
        let state = ask();
        if state != NcclResult::IN_PROGRESS {
            self.is_in_progress.store(false, Ordering::SeqCst);
        }
        state
    }

    /// Is the call in non-blocking mode over? Queries NCCL by `ask`, unless the application already knows.
    ///
    /// The query also frees what NCCL keeps of the call (`ncclCommGetAsyncError` in NCCL's `src/init.cc`). So it must not run
    /// during the application's own calls. The application's queries come through [`Self::asked_by_application`]. Other calls
    /// end our queries first.
    pub(super) fn is_finished(&self, ask: fn(usize) -> NcclResult) -> bool {
        if !self.is_in_progress.load(Ordering::SeqCst) {
            return true;
        }
        let _polling = match self.polling.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if !self.is_in_progress.load(Ordering::SeqCst) {
            return true;
        }
        let over = ask(self.pointer) != NcclResult::IN_PROGRESS;
        if over {
            self.is_in_progress.store(false, Ordering::SeqCst);
        }
        over
    }
}

/// The uses of a communicator that the application still has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseLeft {
    /// All uses.
    All,
    /// The communicator is revoked: others can be made from it, and it can be ended.
    Ending,
    /// Its ranks may have launched different numbers of collectives.
    Uncounted,
}

/// The way in which something is made from a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Derived {
    Split,
    Shrink,
    Grow,
    Experts,
}

/// The numbers of things that were made from a communicator, by the way in which they are made. All its ranks make the same
/// things, so the numbers are the same in all. An attempt that one rank alone fails to begin can be repeated, and must not
/// count.
#[derive(Debug, Default)]
pub(super) struct Numbers([AtomicU64; 4]);

impl Numbers {
    /// Returns the number of the next thing.
    pub(super) fn take(&self, what: Derived) -> u64 {
        self.0[what as usize].fetch_add(1, Ordering::Relaxed)
    }

    /// Gives the last number back: nothing was made.
    pub(super) fn give_back(&self, what: Derived) {
        self.0[what as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of communicators that a thread remembers. Scripts that use more than data, tensor, pipeline and expert groups on
/// one thread pay for a shared lock.
const REMEMBERED: usize = 8;

#[derive(Default)]
struct Remembered {
    version: u64,
    next: usize,
    last: [Option<Arc<Communicator>>; REMEMBERED],
}

thread_local! {
    static LAST: RefCell<Remembered> = RefCell::default();
}

/// Versions are never used twice in a process, so that threads cannot take one table for another.
static VERSIONS: AtomicU64 = AtomicU64::new(1);

fn next_version() -> u64 {
    VERSIONS.fetch_add(1, Ordering::Relaxed)
}

/// All communicators whose creation we have seen.
#[derive(Debug)]
pub(super) struct Communicators {
    version: AtomicU64,
    by_pointer: RwLock<HashMap<usize, Arc<Communicator>>>,
}

impl Default for Communicators {
    fn default() -> Self {
        Self { version: AtomicU64::new(next_version()), by_pointer: RwLock::default() }
    }
}

impl Communicators {
    pub(super) fn insert(&self, communicator: Arc<Communicator>) {
        let mut table = self.by_pointer.write().unwrap_or_else(PoisonError::into_inner);
        table.insert(communicator.pointer, communicator);
        self.version.store(next_version(), Ordering::Release);
    }

    /// Puts back a communicator that was taken out, unless its pointer names another by now.
    pub(super) fn put_back(&self, communicator: Arc<Communicator>) {
        let mut table = self.by_pointer.write().unwrap_or_else(PoisonError::into_inner);
        table.entry(communicator.pointer).or_insert(communicator);
        self.version.store(next_version(), Ordering::Release);
    }

    pub(super) fn remove(&self, pointer: usize) -> Option<Arc<Communicator>> {
        let mut table = self.by_pointer.write().unwrap_or_else(PoisonError::into_inner);
        let removed = table.remove(&pointer);
        self.version.store(next_version(), Ordering::Release);
        removed
    }

    pub(super) fn find(&self, pointer: usize) -> Option<Arc<Communicator>> {
        // A thread that is ending has lost its remembered communicators.
        LAST.try_with(|last| self.remember(&mut last.borrow_mut(), pointer))
            .unwrap_or_else(|_| self.look_up(pointer))
    }

    fn remember(&self, own: &mut Remembered, pointer: usize) -> Option<Arc<Communicator>> {
        let version = self.version.load(Ordering::Acquire);
        if own.version != version {
            *own = Remembered { version, ..Remembered::default() };
        }
        let known = own.last.iter().flatten().find(|known| known.pointer == pointer);
        if let Some(known) = known {
            return Some(Arc::clone(known));
        }
        let found = self.look_up(pointer)?;
        own.last[own.next] = Some(Arc::clone(&found));
        own.next = (own.next + 1) % REMEMBERED;
        Some(found)
    }

    fn look_up(&self, pointer: usize) -> Option<Arc<Communicator>> {
        let table = self.by_pointer.read().unwrap_or_else(PoisonError::into_inner);
        table.get(&pointer).cloned()
    }
}
