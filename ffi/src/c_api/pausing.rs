//! Pausing and resuming, whole or by tag; getting the GPUs from others, and turns on them.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Meanwhile, Options, Waits, swap, swap_with_itself};
use tenants::identity::TenantName;
use tenants::member::Asking;
use tenants::requests;
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::switching::{self, SwitchOptions, Turn, TurnOptions};
use tenants::wire::Action;

use super::last_call::{
    brought_in, fail, guarded, not_joined, resumed_in_turn, say_no, settled, settled_for_own,
    swapped, switched,
};
use super::{ARGUMENT, OK, REFUSED};
use crate::{bindings, runtime};

/// The text at `pointer`, which is not null.
///
/// # Safety
/// `pointer` is a terminated string that outlives what is done with the result.
pub(super) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, c_int> {
    // SAFETY: as this function's caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| fail(ARGUMENT, &format!("{what} is not UTF-8: {text:?}")))
}

/// The tenant of that name; the caller's own when null.
///
/// # Safety
/// `tenant` is null or a terminated string.
pub(super) unsafe fn tenant_of(tenant: *const c_char) -> Result<TenantName, c_int> {
    if tenant.is_null() {
        if let Some(member) = runtime::member() {
            return Ok(member.tenant().clone());
        }
        if runtime::is_forked() {
            return Err(not_joined());
        }
        return runtime::tenant_name().map_err(|reason| fail(ARGUMENT, &reason));
    }
    // SAFETY: as this function's caller promises.
    let name = unsafe { text(tenant, "the tenant's name") }?;
    TenantName::new(name).map_err(|error| fail(ARGUMENT, &error.to_string()))
}

pub(super) fn run_dir() -> Result<RunDir, c_int> {
    runtime::run_dir().map_err(|reason| fail(REFUSED, &reason))
}

fn timeout_of(timeout_ms: u32) -> Option<Duration> {
    (timeout_ms > 0).then(|| Duration::from_millis(u64::from(timeout_ms)))
}

/// The result of work that fails with a code.
pub(super) fn code_of(work: impl FnOnce() -> Result<c_int, c_int>) -> c_int {
    guarded(|| work().unwrap_or_else(|code| code))
}

/// A mark that this process itself asks, where the tenant is its own; for as long as the value lives.
fn asking_for(tenant: &TenantName) -> Option<Asking<'static>> {
    runtime::member().filter(|member| member.tenant() == tenant).map(|member| member.asks_itself())
}

unsafe fn act_for_all(
    tenant: *const c_char,
    scope: Scope,
    action: Action,
    timeout_ms: u32,
) -> Result<c_int, c_int> {
    runtime::start_log();
    let settle = if tenant.is_null() && scope == Scope::Whole { settled_for_own } else { settled };
    // SAFETY: as this function's caller promises.
    let tenant = unsafe { tenant_of(tenant) }?;
    let timeout = timeout_of(timeout_ms);
    let asking = asking_for(&tenant);
    let meanwhile = meanwhile(asking.is_some());
    Ok(settle(requests::act_for_all(&run_dir()?, &tenant, scope, action, timeout, meanwhile)))
}

/// The conduct of processes while memory of theirs is away by tag: theirs, or somebody else's wish.
fn meanwhile(is_own_wish: bool) -> Meanwhile {
    if is_own_wish { Meanwhile::RunOn } else { Meanwhile::AsAgreed }
}

/// Pauses every process of a tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_pause_tenant(tenant: *const c_char, timeout_ms: u32) -> c_int {
    code_of(|| {
        // SAFETY: as this function's caller promises.
        let (run_dir, name) = (run_dir()?, unsafe { tenant_of(tenant) }?);
        // SAFETY: as above.
        let pause = || unsafe { act_for_all(tenant, Scope::Whole, Action::Pause, timeout_ms) };
        switching::by_name(&run_dir, &name, pause)
    })
}

/// Resumes every process of a tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_resume_tenant(tenant: *const c_char, timeout_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    code_of(|| unsafe { act_for_all(tenant, Scope::Whole, Action::Resume, timeout_ms) })
}

/// Resumes a tenant in its place among those that wait for the GPUs.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_resume_in_turn(tenant: *const c_char, wait_ms: u32) -> c_int {
    code_of(|| {
        // SAFETY: as this function's caller promises.
        let (run_dir, tenant, options) = unsafe { to_switch(tenant, wait_ms) }?;
        let done = switching::resume_in_turn(&run_dir, &tenant, &options, &mut |_| {});
        Ok(resumed_in_turn(done))
    })
}

/// Pauses one tenant and resumes another simultaneously.
///
/// # Safety
/// Both are null or terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_swap_tenants(
    from: *const c_char,
    to: *const c_char,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: as this function's caller promises.
    code_of(|| unsafe { swap_scopes((from, Scope::Whole), (to, Scope::Whole), timeout_ms) })
}

/// # Safety
/// Both are null or terminated strings.
unsafe fn swap_scopes(
    (from, out): (*const c_char, Scope),
    (to, back): (*const c_char, Scope),
    timeout_ms: u32,
) -> Result<c_int, c_int> {
    runtime::start_log();
    // SAFETY: as this function's caller promises.
    let from = unsafe { tenant_of(from) }?;
    // SAFETY: as this function's caller promises.
    let to = unsafe { tenant_of(to) }?;
    if from == to {
        return Err(fail(ARGUMENT, &swap_with_itself(&from)));
    }
    let run_dir = run_dir()?;
    let timeout = timeout_of(timeout_ms);
    let asking = asking_for(&from);
    let meanwhile = meanwhile(asking.is_some());
    let options = |scope| Options { timeout, scope, meanwhile, ..Options::default() };
    let mut from = Coordinator::new(run_dir.clone(), from, options(out));
    let mut to = Coordinator::new(run_dir, to, options(back));
    Ok(swapped(swap(&mut from, &mut to, &mut |_| {})))
}

/// All of a tenant, or these tags of it.
///
/// # Safety
/// `tags` is null or points to `count` terminated strings.
unsafe fn scope_of(tags: *const *const c_char, count: usize) -> Result<Scope, c_int> {
    if tags.is_null() && count == 0 {
        return Ok(Scope::Whole);
    }
    // SAFETY: as this function's caller promises.
    let tags = unsafe { tags_of(tags, count) }?;
    Ok(Scope::Tags { tags, owner: None })
}

/// Pauses tags of one tenant and resumes tags of another simultaneously.
///
/// # Safety
/// Both names are null or terminated strings; tags are null or point to as many of them as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_swap_tags(
    from: *const c_char,
    out_tags: *const *const c_char,
    out_count: usize,
    to: *const c_char,
    in_tags: *const *const c_char,
    in_count: usize,
    timeout_ms: u32,
) -> c_int {
    code_of(|| {
        // SAFETY: as this function's caller promises.
        let out = unsafe { scope_of(out_tags, out_count) }?;
        // SAFETY: as this function's caller promises.
        let back = unsafe { scope_of(in_tags, in_count) }?;
        // SAFETY: as this function's caller promises.
        unsafe { swap_scopes((from, out), (to, back), timeout_ms) }
    })
}

/// Brings host memory in ahead of a tenant's next pause.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_prepare_tenant(tenant: *const c_char, wait_ms: u32) -> c_int {
    code_of(|| {
        runtime::start_log();
        // SAFETY: as this function's caller promises.
        let tenant = unsafe { tenant_of(tenant) }?;
        let until = Instant::now() + Duration::from_millis(u64::from(wait_ms));
        let mut coordinator = Coordinator::new(run_dir()?, tenant, Options::default());
        Ok(brought_in(coordinator.prepare(Waits::Until(until), &mut |_| {})))
    })
}

/// # Safety
/// `tags` is null or points to `count` terminated strings.
unsafe fn tags_of(tags: *const *const c_char, count: usize) -> Result<TagNames, c_int> {
    if tags.is_null() {
        return match count {
            0 => Ok(TagNames::All),
            _ => Err(fail(ARGUMENT, &format!("{count} tags were announced and none given"))),
        };
    }
    // SAFETY: the caller promises this many.
    let tags = unsafe { std::slice::from_raw_parts(tags, count) };
    let mut names = BTreeSet::new();
    for (index, &tag) in tags.iter().enumerate() {
        if tag.is_null() {
            return Err(fail(ARGUMENT, &format!("tag {index} of {count} is null")));
        }
        // SAFETY: the caller promises terminated strings.
        names.insert(unsafe { text(tag, "a tag") }?.to_owned());
    }
    if names.is_empty() {
        return Err(fail(ARGUMENT, "no tag was given: null stands for all of them"));
    }
    Ok(TagNames::Named(names))
}

unsafe fn act_for_tags(
    tenant: *const c_char,
    tags: (*const *const c_char, usize),
    whose: c_int,
    action: Action,
    timeout_ms: u32,
) -> Result<c_int, c_int> {
    runtime::start_log();
    // SAFETY: as this function's caller promises.
    let tags = unsafe { tags_of(tags.0, tags.1) }?;
    match u32::try_from(whose) {
        Ok(bindings::SUBLET_WHOSE_TENANT) => {
            let scope = Scope::Tags { tags, owner: None };
            // SAFETY: as this function's caller promises.
            unsafe { act_for_all(tenant, scope, action, timeout_ms) }
        }
        Ok(bindings::SUBLET_WHOSE_PROCESS) => {
            let Some(member) = runtime::member() else {
                return Err(not_joined());
            };
            // SAFETY: as this function's caller promises.
            let tenant = unsafe { tenant_of(tenant) }?;
            if tenant != *member.tenant() {
                let own = member.tenant();
                let message = format!("this process is of tenant '{own}', not of '{tenant}'");
                return Err(fail(ARGUMENT, &message));
            }
            if let (true, 1..) = tags.names_nccl() {
                let message = "tag 'nccl' is NCCL's memory in all processes: name it in a call of its own, or with \
                               SUBLET_WHOSE_TENANT";
                return Err(fail(ARGUMENT, message));
            }
            Ok(settled(requests::act_for_own_tags(member, tags, action, timeout_of(timeout_ms))))
        }
        _ => Err(fail(ARGUMENT, &format!("{whose} is no SUBLET_WHOSE_ value: use 0 or 1"))),
    }
}

/// Pauses memory by tag.
///
/// # Safety
/// `tenant` is null or a terminated string; `tags` is null or points to `count` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_pause_tags(
    tenant: *const c_char,
    tags: *const *const c_char,
    count: usize,
    whose: c_int,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: as this function's caller promises.
    code_of(|| unsafe { act_for_tags(tenant, (tags, count), whose, Action::Pause, timeout_ms) })
}

/// Brings memory back by tag.
///
/// # Safety
/// `tenant` is null or a terminated string; `tags` is null or points to `count` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_resume_tags(
    tenant: *const c_char,
    tags: *const *const c_char,
    count: usize,
    whose: c_int,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: as this function's caller promises.
    code_of(|| unsafe { act_for_tags(tenant, (tags, count), whose, Action::Resume, timeout_ms) })
}

/// 1 while the calling process is paused as a whole.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_is_paused() -> c_int {
    c_int::from(is_paused())
}

/// How many steps of pauses and resumes the calling process has come through. As long as that is the same, a tag whose
/// memory was all there is not away.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_changes() -> u64 {
    runtime::member().map_or(0, tenants::member::Member::changes)
}

/// 1 while any of the calling process's memory with this tag is offloaded, 0 while all is resident, -1 for a tag that it
/// does not have.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tag_is_paused(tag: *const c_char) -> c_int {
    let mut away = None;
    // Its code goes to the last error only.
    code_of(|| {
        if tag.is_null() {
            return Err(fail(ARGUMENT, "a tag is needed"));
        }
        // SAFETY: as this function's caller promises.
        let tag = unsafe { text(tag, "a tag") }?;
        let tags = runtime::member().map(tenants::member::Member::tags).unwrap_or_default();
        let found = tags.iter().find(|row| row.tag == tag);
        let known: Vec<_> = tags.iter().map(|row| row.tag.as_str()).collect();
        match found {
            Some(row) => {
                away = Some(row.away_bytes > 0);
                Ok(OK)
            }
            None => Err(say_no(ARGUMENT, &format!("no tag '{tag}' here: there are {known:?}"))),
        }
    });
    away.map_or(-1, c_int::from)
}

thread_local! {
    /// Whom this thread asks while it waits, and with what.
    static ASKED: Cell<(bindings::sublet_is_called_off, *mut c_void)> = const { Cell::new((None, std::ptr::null_mut())) };
}

fn is_called_off() -> bool {
    let (asked, context) = ASKED.get();
    // SAFETY: this thread's caller has said that it takes this.
    asked.is_some_and(|asked| unsafe { asked(context) } != 0)
}

/// Says whom waits of this thread ask whether they are called off.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_ask_while_waiting(
    is_called_off: bindings::sublet_is_called_off,
    context: *mut c_void,
) -> c_int {
    ASKED.set((is_called_off, context));
    OK
}

/// How long a turn is waited for where nothing is said.
const WAIT: Duration = Duration::from_mins(10);

/// Turns of this process that have begun and not ended.
static TURNS: Mutex<Vec<Turn>> = Mutex::new(Vec::new());

fn is_paused() -> bool {
    runtime::member().is_some_and(tenants::member::Member::is_paused_as_a_whole)
}

/// What a switch to `tenant` needs, which waits for so long at most.
///
/// # Safety
/// `tenant` is null or a terminated string.
unsafe fn to_switch(
    tenant: *const c_char,
    wait_ms: u32,
) -> Result<(RunDir, TenantName, SwitchOptions), c_int> {
    runtime::start_log();
    // SAFETY: as this function's caller promises.
    let tenant = unsafe { tenant_of(tenant) }?;
    let wait = Duration::from_millis(u64::from(wait_ms));
    let checkpointer = runtime::checkpointer();
    let asks = Some(is_called_off as fn() -> bool);
    Ok((run_dir()?, tenant, SwitchOptions { wait, checkpointer, asks, ..SwitchOptions::default() }))
}

/// Has a tenant get its GPUs.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_switch_tenant(tenant: *const c_char, wait_ms: u32) -> c_int {
    code_of(|| {
        // SAFETY: as this function's caller promises.
        let (run_dir, tenant, options) = unsafe { to_switch(tenant, wait_ms) }?;
        Ok(switched(switching::switch(&run_dir, &tenant, &options, &mut |_| {})))
    })
}

/// Begins a turn of this process.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_turn_begin(wait_ms: u32) -> c_int {
    code_of(|| {
        runtime::start_log();
        // SAFETY: null is the caller's own tenant.
        let tenant = unsafe { tenant_of(std::ptr::null()) }?;
        let wait = if wait_ms == 0 { WAIT } else { Duration::from_millis(u64::from(wait_ms)) };
        let options =
            TurnOptions { wait, checkpointer: runtime::checkpointer(), is_paused, is_called_off };
        let begun = Turn::begin(&run_dir()?, &tenant, options);
        Ok(switched(begun.map(|(turn, done)| {
            TURNS.lock().unwrap_or_else(PoisonError::into_inner).push(turn);
            done
        })))
    })
}

/// Ends the turn of this process that began last.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_turn_end() -> c_int {
    code_of(|| {
        let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let none = || fail(ARGUMENT, "no turn of this process has begun, or all have ended");
        drop(turn.ok_or_else(none)?);
        Ok(OK)
    })
}
