//! An allocation that its device has no room for waits until others have made some.
//!
//! The thread that waits stands outside the gate, in no call that the cut counts and during no stream capture, and holds no lock of ours, so that its own tenant
//! can be paused and resumed meanwhile. Where it stands otherwise, it does not wait. It waits for so long at most as the process was told.

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

/// The number of failures in a row, with room by all figures, after which an allocation is refused.
const IN_VAIN_MAX: u32 = 6;
/// The time that a switch may take past the deadline, if it has begun by then and stops nobody for good yet.
const BEYOND: Duration = Duration::from_secs(1);
/// A wait that is longer is told, in the log of the process.
const TOLD_AFTER: Duration = Duration::from_secs(2);
/// Within this time a library that frees its caches when it is refused has asked again.
const SECOND_WITHIN: Duration = Duration::from_secs(10);

/// An allocation that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// Its device; none for memory of a host, which waits for nobody.
    pub device: Option<DeviceOrdinal>,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// Does the caller free what it caches when it is refused, and ask once more? Then the first refusal is for it.
    pub is_asked_twice: bool,
    /// Can it wait at all? Not in a call that holds others up.
    pub may_wait: bool,
}

thread_local! {
    /// The bytes that this thread was refused last, and the time of that.
    static REFUSED: Cell<Option<(u64, Instant)>> = const { Cell::new(None) };
}

/// Makes memory by `make`, which goes in through the gate and comes out again. Where the device has no room for it and the process queues, waits for room
/// and tries again; why it did not get any is a note of the process's then, and the device's refusal is the answer.
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

/// As [`with_room`], for memory that is made in another way: `is_full` says whether an error is for want of room on the device.
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
    // Others may be switching for long, and this thread waits for memory then, too.
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

/// Has the device no room? What is beyond a budget is refused even if others make way.
fn is_full(error: &PoolError) -> bool {
    matches!(error, PoolError::Driver { .. }) && error.code() == Some(DriverCode::OUT_OF_MEMORY)
}

/// Has paged memory of the process given way to what was refused? Frames go before others are asked, and before a library frees its caches.
fn gives_way<D: Driver>(member: &Member<D>, allocation: Allocation, error: &PoolError) -> bool {
    let is_short = error.code() == Some(DriverCode::OUT_OF_MEMORY);
    let device = allocation.device.filter(|_| is_short && !holds_others_up(member));
    device.is_some_and(|device| member.pool().make_room(device, allocation.size_bytes))
}

/// Does the thread stand where others wait for it?
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

/// Waits for room, since `began`, and tries again, as often as there is some.
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
    // It waits for memory at all times but while it tries: also while it rests no launch of its thread comes.
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
            // Its time is over, by whatever it has waited for last.
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
            // Its own tenant did not come, or somebody was not paused in time.
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
            // Its own tenant is away: this waits at the gate for that to end, as any call does, and its time begins again.
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
    /// For how long it waits at most.
    pub wait: Duration,
    /// See [`SwitchOptions::checkpointer`].
    pub checkpointer: Option<Arc<dyn Checkpointer>>,
}

impl Newcomer<'_> {
    /// Waits for room and calls `make`, which says whether the context was made, until it was. Blocks.
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
