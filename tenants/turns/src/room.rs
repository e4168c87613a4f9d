//! Allocations that wait until other tenants have freed memory on a full device.
//!
//! The thread that waits is outside the gate, in no call that the cut counts, in no stream capture, and holds no lock of ours. So
//! its own tenant can be paused and resumed meanwhile. If one of these does not hold, the thread does not wait. The settings of
//! the process limit the wait.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::{DeviceOrdinal, Driver, DriverCode};
use vmm_pool::gate::Gate;
use vmm_pool::{PoolError, PoolResult};

use super::SwitchOptions;
use super::queue::{AGAIN_AFTER, AGAIN_AFTER_MAX, CallsOff, Queue};
use super::signals::{self, HeldBack};
use crate::decision::scene::Wish;
use tenants::checkpoints::Checkpointer;
use tenants::class::TurnSettings;
use tenants::coordinator::{Interrupt, Trouble};
use tenants::cut::Cut;
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::member::Member;
use tenants::run_dir::{RunDir, RunDirError};
use tenants::wire::MemberState;

/// The number of consecutive failures after which an allocation is refused, although the figures say that it fits.
const IN_VAIN_MAX: u32 = 6;
/// The time that a switch may take past the deadline, if it has begun before and is not past its point of no return.
const BEYOND: Duration = Duration::from_secs(1);
/// The time after which a wait is reported in the log of the process.
const TOLD_AFTER: Duration = Duration::from_secs(2);
/// The time within which a library repeats a refused allocation after it has freed its caches.
const SECOND_WITHIN: Duration = Duration::from_secs(10);

/// An allocation that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// Its device; none for host memory, which never waits.
    pub device: Option<DeviceOrdinal>,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// Does the caller free its caches after a refusal, and try once more? Then the first try is refused without a wait.
    pub is_asked_twice: bool,
    /// May it wait at all? It may not in a call that others wait for.
    pub may_wait: bool,
}

thread_local! {
    /// The bytes of the last refusal on this thread, and its time.
    static REFUSED: Cell<Option<(u64, Instant)>> = const { Cell::new(None) };
}

/// Allocates memory with `make`, which enters and leaves the gate. If the device is full and the process takes part in turns,
/// waits for room and tries again. If that fails, it adds a note with the reason to the process, and returns the device's error.
///
/// # Errors
/// The last error of `make`.
pub fn with_room<D: Driver, T>(
    member: &Member<D>,
    allocation: Allocation,
    mut make: impl FnMut() -> PoolResult<T>,
) -> PoolResult<T> {
    let make = || match make() {
        Err(error) if gives_way(member, allocation, &error) => make(),
        done => done,
    };
    wait_for_room(member, allocation, is_full, make)
}

/// As [`with_room`], for memory that is allocated in another way. `is_full` says whether an error means that the device is full.
///
/// # Errors
/// The last error of `make`.
pub fn wait_for_room<D: Driver, T, E>(
    member: &Member<D>,
    allocation: Allocation,
    is_full: fn(&E) -> bool,
    mut make: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let refused = match make() {
        Err(error) if is_full(&error) => error,
        done => return done,
    };
    let TurnSettings { queues, wait, .. } = member.config().turns;
    let Some(device) = allocation.device.filter(|_| queues && may_wait(member, allocation)) else {
        return Err(refused);
    };
    let gpu = member.pool().devices().uuid(device);
    let wants = BTreeMap::from([(gpu.clone(), allocation.size_bytes)]);
    let began = Instant::now();
    // Others may switch for a long time. This thread waits for memory during that time too.
    let waits = member.cut().wait_for_memory_since(began);
    let (run_dir, tenant, wish) =
        (member.presence().run_dir(), member.presence().tenant(), Wish::Memory(wants));
    let _held_back = HeldBack::begin();
    let has_left = || member.presence().has_left() || signals::has_come();
    let calls_off = CallsOff::when(&has_left);
    let entered = Queue::enter(run_dir, tenant, wish, wait, calls_off);
    drop(waits);
    let why = match entered {
        Ok(mut queue) => {
            let make = || signals::let_in(&mut make);
            match try_again(member, &mut queue, (wait, began), is_full, make) {
                Ok(done) => return done,
                Err(why) => why,
            }
        }
        Err(error) => chain(&error),
    };
    // With `SUBLET_TURNS=auto`, an allocation waited until other tenants were paused, and none was in time. The
    // application got "out of memory", and runs on. The message names the tenants that hold the memory. Give a longer
    // wait (`SUBLET_TURNS=auto,wait=5m`), or pause one of them.
    member.notes().add(format!(
        "an allocation of {} bytes on {gpu} was refused after it had waited for {} s: {why}",
        allocation.size_bytes,
        began.elapsed().as_secs()
    ));
    Err(refused)
}

/// Is the device full? An allocation beyond a budget is refused even if others are paused.
fn is_full(error: &PoolError) -> bool {
    matches!(error, PoolError::Driver { .. }) && error.code() == Some(DriverCode::OUT_OF_MEMORY)
}

/// Was paged memory of this process evicted for the refused allocation? Frames are evicted before others are paused, and before a
/// library frees its caches.
fn gives_way<D: Driver>(member: &Member<D>, allocation: Allocation, error: &PoolError) -> bool {
    let is_short = error.code() == Some(DriverCode::OUT_OF_MEMORY);
    let device = allocation.device.filter(|_| is_short && !holds_others_up(member));
    device.is_some_and(|device| member.pool().make_room(device, allocation.size_bytes))
}

/// Is the thread at a point where others wait for it?
fn holds_others_up<D: Driver>(member: &Member<D>) -> bool {
    Gate::is_inside() || Cut::is_inside() || member.captures().under_way() > 0
}

fn may_wait<D: Driver>(member: &Member<D>, allocation: Allocation) -> bool {
    if !allocation.may_wait || holds_others_up(member) || member.presence().has_left() {
        return false;
    }
    let asked = (allocation.size_bytes, Instant::now());
    let before = REFUSED.try_with(|refused| refused.replace(Some(asked))).ok().flatten();
    let is_second = before
        .is_some_and(|(bytes, at)| bytes == allocation.size_bytes && at.elapsed() < SECOND_WITHIN);
    is_second || !allocation.is_asked_twice
}

/// Waits for room, since `began`, and tries again whenever there is some.
///
/// # Errors
/// Why there is none.
fn try_again<D: Driver, T, E>(
    member: &Member<D>,
    queue: &mut Queue,
    (wait, began): (Duration, Instant),
    is_full: fn(&E) -> bool,
    mut make: impl FnMut() -> Result<T, E>,
) -> Result<Result<T, E>, String> {
    let is_told = Cell::new(false);
    let is_over = || {
        if began.elapsed() >= TOLD_AFTER && !is_told.replace(true) {
            let wait_s = wait.as_secs();
            tracing::warn!(
                "waiting for GPU memory that others hold, for {wait_s} s at most; `sublet turns` shows for whom"
            );
        }
        member.presence().has_left() || signals::has_come()
    };
    let checkpointer = (member.config().checkpointer)();
    let (mut in_vain, mut again_after) = (0, AGAIN_AFTER);
    let mut deadline = queue.deadline.unwrap_or_else(|| Instant::now() + wait);
    let is_running = || member.lifecycle().state() == MemberState::Active;
    // It waits for memory at all times except during a try. While it rests, its thread launches nothing either.
    let mut waits = None;
    loop {
        // Without a timer, the time of each step bounds it.
        let interrupt = Interrupt::at(deadline + BEYOND).ok();
        let checkpointer = checkpointer.clone();
        let options = SwitchOptions { interrupt, checkpointer, ..SwitchOptions::default() };
        waits = waits.or_else(|| Some(member.cut().wait_for_memory_since(began)));
        let went = queue.wait_and_go(&options, &is_over, &mut |_| {});
        let why = match went {
            Ok(switched) => {
                drop(waits.take());
                match make() {
                    Err(error) if is_full(&error) => {}
                    done => return Ok(done),
                }
                in_vain = if switched.victims.is_empty() { in_vain + 1 } else { 0 };
                if in_vain >= IN_VAIN_MAX {
                    return Err("the driver says that it is out of memory, and that there is room"
                        .to_owned());
                }
                "others took what was made free".to_owned()
            }
            Err(Trouble::NotSwitched { .. }) if signals::has_come() => {
                return Err("a signal asks the program to stop".to_owned());
            }
            Err(Trouble::NotSwitched { .. }) if is_over() => {
                return Err("its process has left its tenant".to_owned());
            }
            // The deadline has passed, whatever it waited for last.
            Err(Trouble::Never { why, .. } | Trouble::Busy { why, .. }) => {
                deadline = Instant::now();
                why
            }
            Err(
                error @ (Trouble::NotSwitched { .. }
                | Trouble::RunDir(RunDirError::Switching { .. })),
            ) => {
                deadline = Instant::now();
                chain(&error)
            }
            // Its own tenant was not resumed, or another was not paused in time.
            Err(error @ Trouble::Undone { .. }) => chain(&error),
            Err(error) => return Err(chain(&error)),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            waits = waits.or_else(|| Some(member.cut().wait_for_memory_since(began)));
            signals::wait(&mut [], again_after.min(left));
            again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
        } else if is_running() {
            return Err(why);
        } else {
            // Its own tenant is paused. This waits at the gate for the resume, as any call does, and its wait begins again.
            drop(waits.take());
            match make() {
                Err(error) if is_full(&error) => {}
                done => return Ok(done),
            }
            deadline = Instant::now() + wait;
            queue.wait_anew(deadline);
        }
    }
}

/// A process that wants a context.
#[derive(Debug)]
pub struct Newcomer<'a> {
    /// The run directory in which tenants live.
    pub run_dir: &'a RunDir,
    /// Its tenant.
    pub tenant: &'a TenantName,
    /// The device, by its machine-wide name.
    pub gpu: String,
    /// The longest time that it waits.
    pub wait: Duration,
    /// See [`SwitchOptions::checkpointer`].
    pub checkpointer: Option<Arc<dyn Checkpointer>>,
}

impl Newcomer<'_> {
    /// Waits for room and calls `make` until the context is created. `make` returns whether it was. Blocks.
    ///
    /// # Errors
    /// Why there is no room, for people.
    pub fn with_room(&self, mut make: impl FnMut() -> bool) -> Result<(), String> {
        let wish = Wish::Context(self.gpu.clone());
        let (run_dir, deadline) = (self.run_dir, Instant::now() + self.wait);
        let _held_back = HeldBack::begin();
        let calls_off = CallsOff::when(&signals::has_come);
        let mut queue = Queue::enter(run_dir, self.tenant, wish, self.wait, calls_off)
            .map_err(|error| chain(&error))?;
        let options =
            SwitchOptions { checkpointer: self.checkpointer.clone(), ..SwitchOptions::default() };
        let mut again_after = AGAIN_AFTER;
        loop {
            let why = match queue.wait_and_go(&options, &signals::has_come, &mut |_| {}) {
                Ok(_) if signals::let_in(&mut make) => return Ok(()),
                Ok(_) => "others took what was made free".to_owned(),
                Err(error @ Trouble::Undone { .. }) => chain(&error),
                Err(error) => return Err(chain(&error)),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(why);
            }
            signals::wait(&mut [], again_after.min(left));
            again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
        }
    }
}
