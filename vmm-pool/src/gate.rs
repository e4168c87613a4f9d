//! The gate that blocks a process's device work while its memory is off the device or being moved.
//!
//! Every hooked call passes the gate twice: in and out. Passing an open gate costs one look-up of thread-local storage,
//! and one atomic addition on memory of the calling thread alone. So launches from many threads do not share a cache
//! line. Closing is the slow side: it reads every thread's slot (`slots.rs`) until all threads are out.
//!
//! While the gate is shut, its keeper can let each waiting thread make one call (`Gate::step`): work that already runs
//! on a device may need what these threads are about to launch.
//!
//! Lock order: `slots` and `sleepers` are leaves; nothing is called while they are held.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use sublet_sync::slots::{Lease, Seat, Slot, Slots, Threads, Visit};
use sublet_sync::sync::{
    AtomicU8, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, PoisonError, thread_local,
};

/// The kind of access that a call needs from the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// Touches device memory or allocates it: waits until all memory is on its device.
    Use,
    /// Gives memory up, or reads the table. This is also possible while memory is off its device: the ledger alone
    /// answers then.
    GiveUp,
    /// Begins a stream capture: as [`Passage::Use`], but never let in while the gate is shut. If a thread waits for a
    /// device during a capture, the driver ends the capture.
    Capture,
}

impl Passage {
    /// May such a call go in for one step while the gate is shut?
    pub fn can_step(self) -> bool {
        match self {
            Self::Use | Self::GiveUp => true,
            Self::Capture => false,
        }
    }
}

/// The state of the gate, which decides the calls that may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// All calls pass.
    Open = 0,
    /// Memory is off its device, and nothing moves: only [`Passage::GiveUp`] passes.
    Offloaded = 1,
    /// A pause or resume is under way: no call passes.
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
    static SEAT: Cell<Seat> = const { Cell::new(Seat::None) };
    static LEASE: Lease = const { Lease::new() };
}

/// A slot's label is the mode that the gate had when its thread went in.
const HERE: Threads = Threads { seat: &SEAT, lease: &LEASE };

/// The gate of one process. Each process has only one, because threads keep one slot each.
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
    /// True once the thread may go in through the shut gate, until it has marked its slot.
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
    /// The number of the thread's slot, which the thread keeps for as long as it lives.
    pub slot: u64,
    /// The call that the thread waits to make.
    pub call: Call,
    /// The kind of access that the call needs.
    pub passage: Passage,
    /// The time that the thread has waited.
    pub waited: Duration,
}

/// A call of the application's that passes the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Allocates memory, or frees it. An allocator may hold a lock of its own meanwhile.
    Memory,
    /// Any other call, by its name.
    Other(&'static str),
}

impl Call {
    /// Returns the name of the call, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "a memory call",
            Self::Other(name) => name,
        }
    }
}

/// A thread that waits to go in, until it is dropped.
#[derive(Debug)]
struct Sleep<'a> {
    gate: &'a Gate,
    slot: &'static Slot,
    /// The sleeper's key in the list. None once it is off the list.
    number: Option<u64>,
}

impl Drop for Sleep<'_> {
    /// Removes the sleeper, also if the thread is cancelled while it waits.
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.gate.sleepers().list.remove(&number);
        }
        HERE.seat.set(Seat::Taken(self.slot));
    }
}

/// Proof that the thread is inside. Dropping it leaves the gate.
#[derive(Debug)]
#[must_use = "dropping the pass leaves the gate"]
pub struct Pass<'a> {
    gate: &'a Gate,
    /// None if the thread has another pass already.
    visit: Option<Visit>,
    /// Not `Send`: the thread that goes in must come out, because the slot is its own.
    _of_this_thread: PhantomData<*const ()>,
}

/// A driver call blocks for long, such as a copy that waits for a long kernel. The pause was undone, and the job
/// runs. Pause between two steps, or with a longer `--timeout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{inside} threads were still inside driver calls after {waited_ms} ms")]
pub struct StillInside {
    /// The number of threads that were still inside.
    pub inside: usize,
    /// The time waited, in milliseconds.
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
    /// Passes the gate for a call that allocates or frees memory: [`Call::Memory`].
    #[inline]
    pub fn pass(&self, passage: Passage) -> Pass<'_> {
        self.pass_with(Call::Memory, passage)
    }

    /// Passes the gate for the call `what`, which neither allocates nor frees memory: [`Call::Other`].
    #[inline]
    pub fn pass_for(&self, what: &'static str, passage: Passage) -> Pass<'_> {
        self.pass_with(Call::Other(what), passage)
    }

    /// Waits until the gate lets `passage` in. A pass within a pass costs nothing.
    #[inline]
    fn pass_with(&self, call: Call, passage: Passage) -> Pass<'_> {
        let visit = HERE.come(&self.slots);
        if let Some(visit) = &visit {
            self.enter(visit.slot, call, passage);
        }
        Pass { gate: self, visit, _of_this_thread: PhantomData }
    }

    #[inline]
    fn enter(&self, slot: &'static Slot, call: Call, passage: Passage) {
        let mode = self.mark_and_look(slot);
        if mode == Mode::Open as u8 {
            slot.set_label(usize::from(mode));
        } else {
            self.enter_behind(mode, slot, call, passage);
        }
    }

    /// Marks the thread's slot, and then reads the mode of the gate.
    #[inline]
    fn mark_and_look(&self, slot: &Slot) -> u8 {
        slot.step_in();
        #[cfg(test)]
        tests::between_mark_and_look();
        self.mode.load(Ordering::SeqCst)
    }

    /// Goes in through a gate that was not open: a thread has marked its slot, and then found `mode`.
    #[cold]
    fn enter_behind(&self, mut mode: u8, slot: &'static Slot, call: Call, passage: Passage) {
        let mut sleep = None;
        while !Mode::admits(mode, passage) {
            // Calls that a signal handler makes while this call waits are part of this call.
            HERE.seat.set(Seat::Coming);
            slot.step_out();
            let mut sleepers = self.sleepers();
            let sleep = sleep.get_or_insert_with(|| self.sleep(&mut sleepers, slot, call, passage));
            self.changed.notify_all();
            mode = loop {
                let now = self.mode.load(Ordering::SeqCst);
                if Mode::admits(now, passage) {
                    drop(sleepers);
                    break self.mark_and_look(slot);
                }
                let listed = sleep.number.and_then(|number| sleepers.list.get(&number));
                if listed.is_some_and(|sleeper| sleeper.let_in) {
                    // Under the lock, so that a thread that closes the gate finds this one on the list or in its slot.
                    slot.step_in();
                    if let Some(number) = sleep.number.take() {
                        sleepers.list.remove(&number);
                    }
                    break Mode::Open as u8;
                }
                sleepers = self.changed.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
            };
        }
        drop(sleep);
        slot.set_label(usize::from(mode));
    }

    fn sleep(
        &self,
        sleepers: &mut Sleepers,
        slot: &'static Slot,
        call: Call,
        passage: Passage,
    ) -> Sleep<'_> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        sleepers.last += 1;
        let number = sleepers.last;
        let since = Instant::now();
        let sleeper = Sleeper { slot: slot.number(), call, passage, since, let_in: false };
        sleepers.list.insert(number, sleeper);
        Sleep { gate: self, slot, number: Some(number) }
    }

    fn sleepers(&self) -> MutexGuard<'_, Sleepers> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn leave(&self, slot: &Slot) {
        slot.step_out();
        if self.mode.load(Ordering::Relaxed) != Mode::Open as u8 {
            self.tell_of_change();
        }
    }

    #[cold]
    fn tell_of_change(&self) {
        let _guard = self.sleepers();
        self.changed.notify_all();
    }

    /// Sets the mode, which decides the calls that may pass from now on.
    pub(crate) fn set(&self, mode: Mode) {
        self.swap(mode);
    }

    fn swap(&self, mode: Mode) -> Mode {
        let before = self.mode.swap(mode as u8, Ordering::SeqCst);
        self.tell_of_change();
        Mode::of(before)
    }

    /// Shuts the gate for all calls. Threads inside come out when their calls are over ([`Gate::inside`]). Returns the
    /// mode before.
    pub(crate) fn close(&self) -> Mode {
        self.swap(Mode::Shut)
    }

    /// Counts the threads that are inside, or about to go in because they were let in.
    pub fn inside(&self) -> usize {
        // In this order: a thread that was let in leaves the list once it has marked its slot.
        let let_in = self.sleepers().list.values().filter(|sleeper| sleeper.let_in).count();
        let_in + self.slots.inside().len()
    }

    /// Returns the threads that wait to go in, the longest wait first.
    pub fn waiting(&self) -> Vec<WaitingCall> {
        let sleepers = self.sleepers();
        let waiting = sleepers.list.values().filter(|sleeper| !sleeper.let_in);
        waiting.map(Sleeper::call).collect()
    }

    /// Returns a number that changes whenever a thread comes to the gate, goes in or comes out. If two reads return the
    /// same number, nothing was launched between them.
    pub fn mark(&self) -> u64 {
        self.slots.mark()
    }

    /// Is memory off its device, with no pause or resume under way?
    pub fn is_offloaded(&self) -> bool {
        Mode::of(self.mode.load(Ordering::SeqCst)) == Mode::Offloaded
    }

    /// Is a pause or resume under way?
    pub fn is_shut(&self) -> bool {
        self.mode.load(Ordering::SeqCst) == Mode::Shut as u8
    }

    /// Does the gate let every call in?
    pub fn is_open(&self) -> bool {
        self.mode.load(Ordering::SeqCst) == Mode::Open as u8
    }

    /// Is the calling thread inside a call, or does it wait to go in?
    pub fn is_inside() -> bool {
        HERE.is_inside()
    }

    /// Returns the slot numbers of all living threads that have ever been inside.
    pub fn threads(&self) -> Vec<u64> {
        self.slots.numbers()
    }

    /// Lets each thread that `chosen` picks, and that waits at the shut gate, make one call. It lets no capture begin.
    /// Returns how many threads go in. Use it only if the gate was open before, as a `Draining` guarantees: all memory
    /// is on its device.
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

    /// Waits until a thread comes, goes in or comes out, or until `time` has passed. May return early.
    pub(crate) fn wait_for_change(&self, time: Duration) {
        let sleepers = self.sleepers();
        let _woken =
            self.changed.wait_timeout(sleepers, time).unwrap_or_else(PoisonError::into_inner);
    }

    /// Shuts the gate for all calls and waits until all threads are out. The caller must not be inside. Returns the
    /// mode before.
    ///
    /// # Errors
    /// [`StillInside`] at `deadline`, or once `called_off` returns true. The gate then has its mode before.
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

    /// Returns the number of calls that had to wait.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }
}

impl Pass<'_> {
    /// Does the ledger alone answer, because memory was off its device when this thread went in? The answer stays true
    /// while the thread is inside: a resume that has begun since waits for the thread.
    #[inline]
    pub fn is_offloaded(&self) -> bool {
        let mode = self.visit.as_ref().map_or_else(|| HERE.label(), |visit| visit.slot.label());
        mode == Mode::Offloaded as usize
    }

    /// Leaves the gate, waits until it is open, and goes in again. It is for a caller that waits for another process: a
    /// pause need not wait for that caller. Does nothing within another pass. The caller must have no pass within this
    /// one.
    pub fn step_aside(&self) {
        if let Some(Visit { slot, .. }) = self.visit {
            self.gate.leave(slot);
            // `Use` goes in only when all memory is on its device.
            self.gate.enter(slot, Call::Other("waiting for another process"), Passage::Use);
        }
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(visit) = &self.visit {
            self.gate.leave(visit.slot);
            HERE.go(visit);
        }
    }
}

// The path is said because the interleaving tests take this file from another crate.
#[cfg(test)]
#[path = "gate/tests.rs"]
mod tests;
