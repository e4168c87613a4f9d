//! The gate that holds a process's device work back while its memory is away or on the move.
//!
//! Every hooked call passes it twice: in and out. Passing an open gate costs one atomic exchange and one
//! load on memory that belongs to the calling thread alone, so launches from many threads do not meet.
//! Closing is the slow side: it looks at every thread's slot (`slots.rs`) until all are out.
//!
//! Lock order: `slots` and `sleepers` are leaves; nothing is called while they are held.

use std::cell::{Cell, OnceCell};
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::slots::{Slot, Slots};
use crate::sync::{Arc, AtomicU8, AtomicU64, Condvar, Mutex, Ordering, PoisonError, thread_local};

/// What a call needs of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// Touches device memory or makes new: waits until all memory is there.
    Use,
    /// Gives memory up, or asks what is in the table: also possible while memory is away,
    /// when the ledger alone answers.
    GiveUp,
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
    static OWN_SLOT: OnceCell<Arc<Slot>> = const { OnceCell::new() };
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    // Was memory away when this thread went in? Of its outermost pass.
    static WAS_OFFLOADED: Cell<bool> = const { Cell::new(false) };
}

/// The gate of one process. There is one a process: threads keep one slot each.
#[derive(Debug)]
pub struct Gate {
    mode: AtomicU8,
    slots: Slots,
    sleepers: Mutex<()>,
    changed: Condvar,
    waits: AtomicU64,
}

/// Proof of being inside. Leaving is dropping it.
#[derive(Debug)]
#[must_use = "dropping the pass leaves the gate"]
pub struct Pass<'a> {
    gate: &'a Gate,
    outermost: bool,
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
    /// Passes, waiting as long as memory is away. Passes within a pass are free.
    pub fn pass(&self, passage: Passage) -> Pass<'_> {
        let depth = DEPTH.get();
        DEPTH.set(depth + 1);
        let outermost = depth == 0;
        if outermost {
            // A thread that is being torn down has lost its slot; its few last calls go uncounted.
            let entered =
                OWN_SLOT.try_with(|own| self.enter(own.get_or_init(|| self.slots.add()), passage));
            let mode = entered.unwrap_or_else(|_| Mode::of(self.mode.load(Ordering::Relaxed)));
            WAS_OFFLOADED.set(mode == Mode::Offloaded);
        }
        Pass { gate: self, outermost, _of_this_thread: PhantomData }
    }

    /// Says where the gate was that let the thread in.
    fn enter(&self, slot: &Slot, passage: Passage) -> Mode {
        loop {
            slot.step_in();
            #[cfg(test)]
            tests::between_mark_and_look();
            let mode = self.mode.load(Ordering::SeqCst);
            if Mode::admits(mode, passage) {
                return Mode::of(mode);
            }
            slot.step_out();
            self.waits.fetch_add(1, Ordering::Relaxed);
            let mut guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            self.changed.notify_all();
            while !Mode::admits(self.mode.load(Ordering::SeqCst), passage) {
                guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn leave(&self) {
        let _left = OWN_SLOT.try_with(|own| {
            if let Some(slot) = own.get() {
                slot.step_out();
            }
        });
        if self.mode.load(Ordering::Relaxed) != Mode::Open as u8 {
            let _guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            self.changed.notify_all();
        }
    }

    /// Who may pass from now on.
    pub(crate) fn set(&self, mode: Mode) {
        self.swap(mode);
    }

    fn swap(&self, mode: Mode) -> Mode {
        let before = self.mode.swap(mode as u8, Ordering::SeqCst);
        let _guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.notify_all();
        Mode::of(before)
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
        let before = self.swap(Mode::Shut);
        loop {
            let inside = self.slots.inside().len();
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
            let guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            let wait = LOOK_EVERY.min(deadline - now);
            let _woken =
                self.changed.wait_timeout(guard, wait).unwrap_or_else(PoisonError::into_inner);
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
        WAS_OFFLOADED.get()
    }

    /// For a caller that has to wait for another process: leaves, waits until the gate is open, and is back inside. So
    /// a pause need not wait for it. Does nothing within a pass within a pass.
    pub fn step_aside(&self) {
        if DEPTH.get() != 1 {
            return;
        }
        self.gate.leave();
        let _entered = OWN_SLOT.try_with(|own| {
            self.gate.enter(own.get_or_init(|| self.gate.slots.add()), Passage::Use);
            // Use goes in where all memory is there.
            WAS_OFFLOADED.set(false);
        });
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get().saturating_sub(1));
        if self.outermost {
            self.gate.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    thread_local! {
        /// What this thread does, once, when it has marked its slot and not looked at the mode yet.
        static BETWEEN: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
    }

    pub(super) fn between_mark_and_look() {
        if let Some(work) = BETWEEN.take() {
            work();
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn a_gate_that_is_shut_at_the_last_instant_sees_the_thread_and_holds_it_back() {
        let gate = Arc::new(Gate::default());
        let (tell, hear) = mpsc::channel();
        let user = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                let other = Arc::clone(&gate);
                BETWEEN.set(Some(Box::new(move || {
                    tell.send(other.slots.inside().len()).unwrap();
                    other.set(Mode::Shut);
                })));
                drop(gate.pass(Passage::Use));
            })
        };
        assert_eq!(hear.recv_timeout(Duration::from_secs(10)), Ok(1));
        while gate.waits() == 0 && !user.is_finished() {
            std::thread::yield_now();
        }
        assert!(!user.is_finished(), "it looked before it marked its slot");
        gate.set(Mode::Open);
        user.join().unwrap();
    }

    #[test]
    fn a_shut_that_fails_leaves_a_offloaded_gate_offloaded() {
        let gate = Gate::default();
        gate.shut(soon(), || false).unwrap();
        gate.set(Mode::Offloaded);
        let pass = gate.pass(Passage::GiveUp);
        let closer = std::thread::scope(|scope| {
            scope.spawn(|| gate.shut(Instant::now(), || false)).join().unwrap()
        });
        assert_eq!(closer.unwrap_err().inside, 1);
        drop(pass);
        assert!(gate.pass(Passage::GiveUp).is_offloaded(), "the memory is still away");
    }

    #[test]
    fn who_goes_in_while_memory_is_away_knows_it_until_it_comes_out() {
        let gate = Gate::default();
        gate.shut(soon(), || false).unwrap();
        gate.set(Mode::Offloaded);
        let outer = gate.pass(Passage::GiveUp);
        assert!(outer.is_offloaded());
        // A resume begins, and waits for this thread.
        gate.set(Mode::Shut);
        assert!(outer.is_offloaded(), "memory is away until the resume has begun to move it");
        let inner = gate.pass(Passage::GiveUp);
        assert!(inner.is_offloaded(), "what was true for the outermost pass");
        drop((inner, outer));
        gate.set(Mode::Open);
        assert!(!gate.pass(Passage::GiveUp).is_offloaded());
        assert!(!gate.pass(Passage::Use).is_offloaded());
    }

    #[test]
    fn who_goes_in_while_memory_is_there_knows_it_until_it_comes_out() {
        let gate = Gate::default();
        let outer = gate.pass(Passage::GiveUp);
        // A pause begins, and waits for this thread.
        gate.set(Mode::Shut);
        assert!(!outer.is_offloaded());
        gate.set(Mode::Offloaded);
        assert!(!gate.pass(Passage::GiveUp).is_offloaded(), "what was true for the outermost pass");
        gate.set(Mode::Open);
    }

    #[test]
    fn who_steps_aside_comes_back_to_memory_that_is_there() {
        let gate = Gate::default();
        gate.shut(soon(), || false).unwrap();
        gate.set(Mode::Offloaded);
        let pass = gate.pass(Passage::GiveUp);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while gate.waits() == 0 {
                    std::thread::yield_now();
                }
                gate.set(Mode::Open);
            });
            pass.step_aside();
        });
        assert!(!pass.is_offloaded());
    }

    #[test]
    fn shutting_waits_for_the_thread_inside_and_holds_the_next_back() {
        let gate = Arc::new(Gate::default());
        let (tell, hear) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let inside = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                let pass = gate.pass(Passage::Use);
                tell.send("inside").unwrap();
                wait.recv().unwrap();
                drop(pass);
                let _pass = gate.pass(Passage::Use);
                tell.send("inside again").unwrap();
            })
        };
        assert_eq!(hear.recv().unwrap(), "inside");
        let early = gate.shut(Instant::now() + Duration::from_millis(20), || false).unwrap_err();
        assert_eq!(early.inside, 1);
        go.send(()).unwrap();
        assert_eq!(hear.recv_timeout(Duration::from_secs(10)).unwrap(), "inside again");
        inside.join().unwrap();
        gate.shut(soon(), || false).unwrap();
        let late = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || drop(gate.pass(Passage::Use)))
        };
        while gate.waits() == 0 {
            std::thread::yield_now();
        }
        assert!(!late.is_finished());
        gate.set(Mode::Open);
        late.join().unwrap();
    }

    #[test]
    fn a_offloaded_gate_admits_only_giving_up() {
        let gate = Arc::new(Gate::default());
        gate.shut(soon(), || false).unwrap();
        gate.set(Mode::Offloaded);
        drop(gate.pass(Passage::GiveUp));
        let user = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || drop(gate.pass(Passage::Use)))
        };
        while gate.waits() == 0 {
            std::thread::yield_now();
        }
        assert!(!user.is_finished());
        gate.set(Mode::Open);
        user.join().unwrap();
    }

    #[test]
    fn shutting_ends_early_when_it_is_called_off_and_the_gate_is_as_before() {
        let gate = Gate::default();
        let pass = gate.pass(Passage::Use);
        let begin = Instant::now();
        let closer = std::thread::scope(|scope| {
            scope.spawn(|| gate.shut(begin + Duration::from_mins(5), || true)).join().unwrap()
        });
        assert_eq!(closer.unwrap_err().inside, 1);
        assert!(begin.elapsed() < Duration::from_mins(1));
        drop(pass);
        drop(gate.pass(Passage::Use));
    }

    #[test]
    fn nested_passes_leave_once() {
        let gate = Gate::default();
        let outer = gate.pass(Passage::Use);
        drop(gate.pass(Passage::GiveUp));
        assert_eq!(gate.slots.inside().len(), 1);
        drop(outer);
        assert_eq!(gate.slots.inside().len(), 0);
    }
}
