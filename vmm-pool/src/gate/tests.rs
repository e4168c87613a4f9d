//! Tests of the gate alone: threads that go in, wait, or are let in.

use std::sync::{Arc, mpsc};

use super::*;

thread_local! {
    /// The work that this thread does once, after it has marked its slot and before it reads the mode.
    static BETWEEN: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

pub(super) fn between_mark_and_look() {
    // A thread that is ending has no work here any more.
    if let Ok(Some(work)) = BETWEEN.try_with(Cell::take) {
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
fn who_is_let_in_makes_one_call_and_waits_again() {
    let gate = Arc::new(Gate::default());
    gate.close();
    let (tell, hear) = mpsc::channel();
    let user = {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || {
            for call in ["first", "second"] {
                let pass = gate.pass_for(call, Passage::Use);
                assert!(!pass.is_offloaded());
                tell.send(call).unwrap();
                drop(pass);
            }
        })
    };
    let waits = |what| {
        while gate.waiting().first().is_none_or(|waiting| waiting.call.name() != what) {
            std::thread::yield_now();
        }
    };
    for (call, next) in [("first", Some("second")), ("second", None)] {
        waits(call);
        assert_eq!((gate.step(|_| true), gate.inside() > 0 || hear.try_recv().is_ok()), (1, true));
        while gate.inside() > 0 {
            std::thread::yield_now();
        }
        if let Some(next) = next {
            waits(next);
            assert!(!user.is_finished());
        }
    }
    user.join().unwrap();
    assert_eq!(gate.step(|_| true), 0);
}

#[test]
fn nobody_is_let_in_to_begin_a_capture_nor_who_is_not_chosen() {
    let gate = Arc::new(Gate::default());
    gate.close();
    let users = [Passage::Capture, Passage::Use].map(|passage| {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || drop(gate.pass(passage)))
    });
    while gate.waiting().len() < 2 {
        std::thread::yield_now();
    }
    let capture = gate.waiting().into_iter().find(|call| call.passage == Passage::Capture);
    let capture = capture.unwrap().slot;
    assert_eq!(gate.step(|slot| slot == capture), 0);
    assert_eq!(gate.step(|slot| slot != capture), 1);
    gate.set(Mode::Open);
    for user in users {
        user.join().unwrap();
    }
}

/// Runs at the end of its thread, behind the slot's destructor if it was made before the first pass.
struct AtEnd(Box<dyn Fn()>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        (self.0)();
    }
}

thread_local! {
    static AT_END: Cell<Option<AtEnd>> = const { Cell::new(None) };
}

/// A thread that has passed once, and does `work` while it ends.
fn ends_with(
    gate: &Arc<Gate>,
    work: impl Fn(&Gate) + Send + 'static,
) -> std::thread::JoinHandle<()> {
    let gate = Arc::clone(gate);
    let (tell, hear) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let at_end = Arc::clone(&gate);
        AT_END.set(Some(AtEnd(Box::new(move || {
            assert!(LEASE.try_with(|_| ()).is_err(), "the slot is gone by now");
            work(&at_end);
        }))));
        drop(gate.pass(Passage::Use));
        tell.send(()).unwrap();
    });
    hear.recv().unwrap();
    thread
}

fn until_one_waits(gate: &Gate) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while gate.waiting().is_empty() {
        assert!(Instant::now() < deadline, "nobody waits");
        std::thread::yield_now();
    }
}

#[test]
fn a_call_that_a_thread_makes_while_it_ends_waits_at_a_shut_gate() {
    let gate = Arc::new(Gate::default());
    let (tell, hear) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let thread = ends_with(&gate, move |gate| {
        wait.recv().unwrap();
        let pass = gate.pass_for("late", Passage::Use);
        drop(gate.pass(Passage::GiveUp));
        tell.send((pass.is_offloaded(), gate.inside())).unwrap();
    });
    gate.close();
    go.send(()).unwrap();
    until_one_waits(&gate);
    assert_eq!(gate.waiting().first().map(|waiting| waiting.call), Some(Call::Other("late")));
    assert_eq!(hear.try_recv(), Err(mpsc::TryRecvError::Empty));
    gate.set(Mode::Open);
    thread.join().unwrap();
    assert_eq!(hear.recv(), Ok((false, 1)), "it was counted");
    assert_eq!((gate.inside(), gate.threads()), (0, Vec::new()));
}

#[test]
fn a_thread_that_ends_can_give_memory_up_while_it_is_away_and_step_aside() {
    let gate = Arc::new(Gate::default());
    let (tell, hear) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let thread = ends_with(&gate, move |gate| {
        wait.recv().unwrap();
        let pass = gate.pass(Passage::GiveUp);
        let was_offloaded = pass.is_offloaded();
        pass.step_aside();
        tell.send((was_offloaded, pass.is_offloaded(), gate.inside())).unwrap();
    });
    gate.close();
    gate.set(Mode::Offloaded);
    go.send(()).unwrap();
    until_one_waits(&gate);
    assert_eq!(gate.inside(), 0, "it has stepped aside");
    gate.set(Mode::Open);
    thread.join().unwrap();
    assert_eq!(hear.recv(), Ok((true, false, 1)));
    assert_eq!(gate.inside(), 0);
}

#[test]
fn a_thread_that_ends_inside_a_call_stays_inside() {
    let gate = Arc::new(Gate::default());
    let other = Arc::clone(&gate);
    let thread = std::thread::spawn(move || {
        // As `exit` in a signal handler: the call never returns.
        let _never_left = std::mem::ManuallyDrop::new(other.pass(Passage::Use));
    });
    thread.join().unwrap();
    assert_eq!(gate.inside(), 1);
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
