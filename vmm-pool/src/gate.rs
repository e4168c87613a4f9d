//! The gate that holds a process's device work back while its memory is away or on the move.
//!
//! Every hooked call passes it twice: in and out. Passing an open gate costs one atomic exchange and one
//! load on memory that belongs to the calling thread alone, so launches from many threads do not meet.
//! Closing is the slow side: it looks at every thread's slot (`slots.rs`) until all are out.
//!
//! While it is shut, whoever keeps it can let each thread that waits make one call (`Gate::step`): work that is on
//! a device already may need what these threads come to launch.
//!
//! Lock order: `slots` and `sleepers` are leaves; nothing is called while they are held.

use std::cell::{Cell, OnceCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::slots::{Slot, Slots};
use crate::sync::{
    Arc, AtomicU8, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, PoisonError, thread_local,
};

/// What a call needs of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// Touches device memory or makes new: waits until all memory is there.
    Use,
    /// Gives memory up, or asks what is in the table: also possible while memory is away,
    /// when the ledger alone answers.
    GiveUp,
    /// Begins a stream capture: as [`Passage::Use`], but never let in while the gate is shut. The driver ends a capture
    /// when a device is waited for beside it.
    Capture,
}

impl Passage {
    /// May it go in for one call while the gate is shut?
    pub fn can_step(self) -> bool {
        match self {
            Self::Use | Self::GiveUp => true,
            Self::Capture => false,
        }
    }
}

/// Who may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// Everybody.
    Open = 0,
    /// Memory is away, and nothing moves: only [`Passage::GiveUp`].
    Offloaded = 1,
    /// A pause or resume is under way: nobody.
    Shut = 2,
}

impl Mode {
    fn of(mode: u8) -> Self {
        match mode {
            0 => Self::Open,
            1 => Self::Offloaded,
            _ => Self::Shut,
        }
    }

    fn admits(mode: u8, passage: Passage) -> bool {
        mode == Self::Open as u8 || (mode == Self::Offloaded as u8 && passage == Passage::GiveUp)
    }
}

thread_local! {
    static OWN_SLOT: Own = const { Own(OnceCell::new()) };
    // Without a destructor, so it outlives the slot: destructors that run after the slot's make calls too.
    static INSIDE: Cell<Inside> = const { Cell::new(Inside { depth: 0, was_offloaded: false }) };
}

/// How the calling thread went in.
#[derive(Clone, Copy, Debug)]
struct Inside {
    /// How many passes it has.
    depth: u32,
    /// Was memory away when it got the outermost?
    was_offloaded: bool,
}

/// The slot of one thread.
#[derive(Debug)]
struct Own(OnceCell<Arc<Slot>>);

impl Own {
    fn slot(&self, slots: &Slots) -> &Arc<Slot> {
        self.0.get_or_init(|| slots.add())
    }
}

impl Drop for Own {
    /// A thread that ends inside a call (a signal handler that calls `exit`) stays inside: its slot is leaked.
    fn drop(&mut self) {
        let is_inside = INSIDE.try_with(|inside| inside.get().depth > 0).unwrap_or(false);
        if is_inside && let Some(slot) = self.0.take() {
            let _leaked = std::mem::ManuallyDrop::new(slot);
        }
    }
}

/// The gate of one process. There is one a process: threads keep one slot each.
#[derive(Debug)]
pub struct Gate {
    mode: AtomicU8,
    slots: Slots,
    sleepers: Mutex<Sleepers>,
    changed: Condvar,
    waits: AtomicU64,
}

/// The threads that wait to go in.
#[derive(Debug, Default)]
struct Sleepers {
    list: BTreeMap<u64, Sleeper>,
    last: u64,
}

#[derive(Debug)]
struct Sleeper {
    slot: u64,
    call: Call,
    passage: Passage,
    since: Instant,
    /// It goes in, though the gate is shut, and has not marked its slot yet.
    let_in: bool,
}

impl Sleeper {
    fn call(&self) -> WaitingCall {
        let Self { slot, call, passage, since, .. } = *self;
        WaitingCall { slot, call, passage, waited: since.elapsed() }
    }
}

/// A thread that waits to go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingCall {
    /// Its slot, which is the thread's for as long as that lives.
    pub slot: u64,
    /// What it waits to do.
    pub call: Call,
    /// What it needs.
    pub passage: Passage,
    /// For how long.
    pub waited: Duration,
}

/// A call of the application's that passes the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Asks for memory, or gives it back. An allocator may hold a lock of its own meanwhile.
    Memory,
    /// Any other, by its name.
    Other(&'static str),
}

impl Call {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "a memory call",
            Self::Other(name) => name,
        }
    }
}

/// Proof of being inside. Leaving is dropping it.
#[derive(Debug)]
#[must_use = "dropping the pass leaves the gate"]
pub struct Pass<'a> {
    gate: &'a Gate,
    outermost: bool,
    /// A slot for this call alone: that of the thread is gone, as the thread ends.
    last: Option<Arc<Slot>>,
    /// Whoever goes in comes out: the slot is the thread's own.
    _of_this_thread: PhantomData<*const ()>,
}

/// Calls did not come out in time; the gate is open again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{inside} threads were still inside driver calls after {waited_ms} ms")]
pub struct StillInside {
    /// How many.
    pub inside: usize,
    /// How long was waited.
    pub waited_ms: u64,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            mode: AtomicU8::new(Mode::Open as u8),
            slots: Slots::default(),
            sleepers: Mutex::default(),
            changed: Condvar::new(),
            waits: AtomicU64::new(0),
        }
    }
}

impl Gate {
    /// Passes for a call that asks for memory or gives it back: [`Call::Memory`].
    pub fn pass(&self, passage: Passage) -> Pass<'_> {
        self.pass_with(Call::Memory, passage)
    }

    /// Passes for the call `what`, which is about no memory of its own: [`Call::Other`].
    pub fn pass_for(&self, what: &'static str, passage: Passage) -> Pass<'_> {
        self.pass_with(Call::Other(what), passage)
    }

    /// Waits as long as memory is away. Passes within a pass are free.
    fn pass_with(&self, call: Call, passage: Passage) -> Pass<'_> {
        let inside = INSIDE.get();
        let outermost = inside.depth == 0;
        // Counted before it waits: calls that a signal handler makes meanwhile are part of this one.
        INSIDE.set(Inside { depth: inside.depth + 1, ..inside });
        let mut last = None;
        if outermost {
            let entered = OWN_SLOT.try_with(|own| self.enter(own.slot(&self.slots), call, passage));
            let mode = entered
                .unwrap_or_else(|_| self.enter(last.insert(self.slots.add()), call, passage));
            INSIDE.set(Inside { depth: 1, was_offloaded: mode == Mode::Offloaded });
        }
        Pass { gate: self, outermost, last, _of_this_thread: PhantomData }
    }

    /// Says where the gate was that let the thread in.
    fn enter(&self, slot: &Slot, call: Call, passage: Passage) -> Mode {
        let mut waits_as = None;
        loop {
            slot.step_in();
            #[cfg(test)]
            tests::between_mark_and_look();
            let mode = self.mode.load(Ordering::SeqCst);
            if Mode::admits(mode, passage) {
                if let Some(number) = waits_as {
                    self.sleepers().list.remove(&number);
                }
                return Mode::of(mode);
            }
            slot.step_out();
            let mut sleepers = self.sleepers();
            let number = *waits_as.get_or_insert_with(|| {
                self.waits.fetch_add(1, Ordering::Relaxed);
                sleepers.last += 1;
                let sleeper = Sleeper {
                    slot: slot.number(),
                    call,
                    passage,
                    since: Instant::now(),
                    let_in: false,
                };
                let number = sleepers.last;
                sleepers.list.insert(number, sleeper);
                number
            });
            self.changed.notify_all();
            while !Mode::admits(self.mode.load(Ordering::SeqCst), passage) {
                if sleepers.list.get(&number).is_some_and(|sleeper| sleeper.let_in) {
                    // Under the lock: whoever looks finds it on the list or in its slot.
                    slot.step_in();
                    sleepers.list.remove(&number);
                    return Mode::Open;
                }
                sleepers = self.changed.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn sleepers(&self) -> MutexGuard<'_, Sleepers> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, last: Option<&Slot>) {
        if let Some(slot) = last {
            slot.step_out();
        } else {
            let _left = OWN_SLOT.try_with(|own| own.slot(&self.slots).step_out());
        }
        if self.mode.load(Ordering::Relaxed) != Mode::Open as u8 {
            let _guard = self.sleepers();
            self.changed.notify_all();
        }
    }

    /// Who may pass from now on.
    pub(crate) fn set(&self, mode: Mode) {
        self.swap(mode);
    }

    fn swap(&self, mode: Mode) -> Mode {
        let before = self.mode.swap(mode as u8, Ordering::SeqCst);
        let _guard = self.sleepers();
        self.changed.notify_all();
        Mode::of(before)
    }

    /// Shuts the gate for everybody. Those inside come out when their calls are over ([`Gate::inside`]). Says where it
    /// was.
    pub(crate) fn close(&self) -> Mode {
        self.swap(Mode::Shut)
    }

    /// How many threads are inside, or let in and on their way.
    pub fn inside(&self) -> usize {
        // In this order: one that was let in leaves the list when it has marked its slot.
        let let_in = self.sleepers().list.values().filter(|sleeper| sleeper.let_in).count();
        let_in + self.slots.inside().len()
    }

    /// The threads that wait to go in, by how long they have, longest first.
    pub fn waiting(&self) -> Vec<WaitingCall> {
        let sleepers = self.sleepers();
        let waiting = sleepers.list.values().filter(|sleeper| !sleeper.let_in);
        waiting.map(Sleeper::call).collect()
    }

    /// A number that stands still as long as no thread comes to the gate, goes in or comes out: nothing was launched between two
    /// looks that give the same.
    pub fn mark(&self) -> u64 {
        self.slots.mark()
    }

    /// Is memory away, and no pause or resume under way?
    pub fn is_offloaded(&self) -> bool {
        Mode::of(self.mode.load(Ordering::SeqCst)) == Mode::Offloaded
    }

    /// Is a pause or resume under way?
    pub fn is_shut(&self) -> bool {
        self.mode.load(Ordering::SeqCst) == Mode::Shut as u8
    }

    /// Does it let every call in?
    pub fn is_open(&self) -> bool {
        self.mode.load(Ordering::SeqCst) == Mode::Open as u8
    }

    /// Is the calling thread inside, or past the gate in a call of its own?
    pub fn is_inside() -> bool {
        INSIDE.get().depth > 0
    }

    /// All threads that have ever been inside and live, by their slots.
    pub fn threads(&self) -> Vec<u64> {
        self.slots.numbers()
    }

    /// Lets each thread of those that `chosen` picks make one call, where it waits at the shut gate. Captures are not
    /// begun. How many go in. Only for a gate that was open before, which a `Draining` stands for: all memory is there.
    pub(crate) fn step(&self, chosen: impl Fn(u64) -> bool) -> usize {
        let mut sleepers = self.sleepers();
        let mut count = 0;
        for sleeper in sleepers.list.values_mut() {
            if sleeper.passage.can_step() && !sleeper.let_in && chosen(sleeper.slot) {
                sleeper.let_in = true;
                count += 1;
            }
        }
        self.changed.notify_all();
        count
    }

    /// Waits until somebody comes, goes in or comes out, or for `time`. May return early.
    pub(crate) fn wait_for_change(&self, time: Duration) {
        let sleepers = self.sleepers();
        let _woken =
            self.changed.wait_timeout(sleepers, time).unwrap_or_else(PoisonError::into_inner);
    }

    /// Shuts the gate for everybody and waits until all are out. The caller must not be inside. Says where the gate
    /// was.
    ///
    /// # Errors
    /// [`StillInside`] at `deadline`, or when `called_off` says so, with the gate as it was before.
    pub(crate) fn shut(
        &self,
        deadline: Instant,
        called_off: impl Fn() -> bool,
    ) -> Result<Mode, StillInside> {
        // A missed wake-up costs one look more, not the deadline.
        const LOOK_EVERY: Duration = Duration::from_millis(2);
        let begin = Instant::now();
        let before = self.close();
        loop {
            let inside = self.inside();
            if inside == 0 {
                return Ok(before);
            }
            let now = Instant::now();
            if now >= deadline || called_off() {
                self.set(before);
                let waited = (now - begin).as_millis();
                let waited_ms = u64::try_from(waited).unwrap_or(u64::MAX);
                return Err(StillInside { inside, waited_ms });
            }
            self.wait_for_change(LOOK_EVERY.min(deadline - now));
        }
    }

    /// How many calls have had to wait.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }
}

impl Pass<'_> {
    /// Does the ledger alone answer, because memory was away when this thread went in? It stays so while the thread is
    /// inside: a resume that has begun since waits for it to come out.
    pub fn is_offloaded(&self) -> bool {
        INSIDE.get().was_offloaded
    }

    /// For a caller that has to wait for another process: leaves, waits until the gate is open, and is back inside. So
    /// a pause need not wait for it. Does nothing within a pass within a pass.
    pub fn step_aside(&self) {
        if INSIDE.get().depth != 1 {
            return;
        }
        let last = self.last.as_deref();
        self.gate.leave(last);
        let call = Call::Other("waiting for another process");
        let enter = |slot: &Slot| self.gate.enter(slot, call, Passage::Use);
        if let Some(slot) = last {
            enter(slot);
        } else {
            let _entered = OWN_SLOT.try_with(|own| enter(own.slot(&self.gate.slots)));
        }
        // Use goes in where all memory is there.
        INSIDE.set(Inside { depth: 1, was_offloaded: false });
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let inside = INSIDE.get();
        INSIDE.set(Inside { depth: inside.depth.saturating_sub(1), ..inside });
        if self.outermost {
            self.gate.leave(self.last.as_deref());
        }
    }
}

// The path is said because the interleaving tests take this file from another crate.
#[cfg(test)]
#[path = "gate/tests.rs"]
mod tests;
