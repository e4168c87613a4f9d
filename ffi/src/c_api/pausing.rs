//! Commands: pause and resume, whole or by tag; switches of the GPUs, and turns on them.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::command::{self, Asker, Change, Command, Wait};
use sublet_turns::Turn;
use tenants::coordinator::Trouble;
use tenants::identity::TenantName;

use crate::last_call::{ARGUMENT, OK, fail, guarded, joined, keep_report, nobody, refused, say_no};
use crate::{bindings, environment, runtime};

/// Returns the text at `pointer`, which is not null.
///
/// # Safety
/// `pointer` is a terminated string that outlives what is done with the result.
pub(super) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, c_int> {
    // SAFETY: as this function's caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| fail(ARGUMENT, &format!("{what} is not UTF-8: {text:?}")))
}

/// Returns a tenant's name; none for null, which means the caller's own tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
pub(super) unsafe fn name_of(tenant: *const c_char) -> Result<Option<String>, c_int> {
    // SAFETY: as this function's caller promises.
    let name = (!tenant.is_null()).then(|| unsafe { text(tenant, "the tenant's name") });
    Ok(name.transpose()?.map(str::to_owned))
}

fn own_tenant() -> Result<TenantName, Trouble> {
    match runtime::member() {
        Some(member) => Ok(member.presence().tenant().clone()),
        None if runtime::is_forked() => Err(nobody()),
        None => runtime::tenant_name().map_err(Trouble::Usage),
    }
}

/// Returns the code of work that fails with a code.
pub(super) fn code_of(work: impl FnOnce() -> Result<c_int, c_int>) -> c_int {
    guarded(|| work().unwrap_or_else(|code| code))
}

/// The longest wait until the other processes make the same call, unless a setting gives another time. They are at the same step,
/// so the wait is short unless one of them is stuck.
const TOGETHER_WAIT: Duration = Duration::from_mins(2);

/// Turns of this process that have begun and not ended.
static TURNS: Mutex<Vec<Turn>> = Mutex::new(Vec::new());

/// Runs a command, and returns its report in JSON.
pub(super) fn report_of(command: Command) -> Result<String, c_int> {
    runtime::start_log();
    let asker = Asker {
        run_dir: || Ok(runtime::run_dir()?),
        member: joined,
        tenant: own_tenant,
        together_wait: environment::current().settings.wait.unwrap_or(TOGETHER_WAIT),
        checkpointer: runtime::checkpointer,
        asks: is_called_off,
        is_paused,
        turns: &TURNS,
    };
    command::run(command, &asker).map_err(|trouble| refused(&trouble))
}

/// Runs a command, and keeps its report.
pub(crate) fn act(command: impl FnOnce() -> Result<Command, c_int>) -> c_int {
    code_of(|| Ok(keep_report(report_of(command()?)?)))
}

/// Carries out a command in JSON.
///
/// # Safety
/// `json` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_command(json: *const c_char) -> c_int {
    act(|| {
        if json.is_null() {
            return Err(fail(ARGUMENT, "a command is needed"));
        }
        // SAFETY: as this function's caller promises.
        let json = unsafe { text(json, "the command") }?;
        serde_json::from_str(json)
            .map_err(|error| fail(ARGUMENT, &format!("this is no command: {error}")))
    })
}

/// Returns a change of a whole tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
unsafe fn whole(tenant: *const c_char, timeout_ms: u32) -> Result<Change, c_int> {
    // SAFETY: as this function's caller promises.
    let tenant = unsafe { name_of(tenant) }?;
    Ok(Change { tenant, timeout_ms, ..Change::default() })
}

/// # Safety
/// `tenant` is null or a terminated string.
unsafe fn waits(tenant: *const c_char, wait_ms: u32) -> Result<Wait, c_int> {
    // SAFETY: as this function's caller promises.
    Ok(Wait { tenant: unsafe { name_of(tenant) }?, wait_ms })
}

/// Pauses every process of a tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_pause_tenant(tenant: *const c_char, timeout_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    act(|| unsafe { whole(tenant, timeout_ms) }.map(Command::Pause))
}

/// Resumes every process of a tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_resume_tenant(tenant: *const c_char, timeout_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    act(|| unsafe { whole(tenant, timeout_ms) }.map(Command::Resume))
}

/// Resumes a tenant in its place in the queue for the GPUs.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_resume_in_turn(tenant: *const c_char, wait_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    act(|| unsafe { waits(tenant, wait_ms) }.map(Command::ResumeInTurn))
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
    let none = std::ptr::null();
    // SAFETY: as this function's caller promises; there are no tags.
    unsafe { sublet_swap_tags(from, none, 0, to, none, 0, timeout_ms) }
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
    act(|| {
        // SAFETY: as this function's caller promises.
        let out_tags = unsafe { tags_of(out_tags, out_count) }?;
        // SAFETY: as this function's caller promises.
        let in_tags = unsafe { tags_of(in_tags, in_count) }?;
        // SAFETY: as this function's caller promises.
        let (tenant, to) = (unsafe { name_of(from) }?, unsafe { name_of(to) }?);
        Ok(Command::Swap { tenant, out_tags, to, in_tags, timeout_ms })
    })
}

/// Allocates host memory ahead of a tenant's next pause.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_prepare_tenant(tenant: *const c_char, wait_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    act(|| unsafe { waits(tenant, wait_ms) }.map(Command::Prepare))
}

/// Returns tags by name. An empty set means all.
///
/// # Safety
/// `tags` is null or points to `count` terminated strings.
unsafe fn tags_of(tags: *const *const c_char, count: usize) -> Result<BTreeSet<String>, c_int> {
    if tags.is_null() {
        return match count {
            0 => Ok(BTreeSet::new()),
            _ => Err(fail(ARGUMENT, &format!("the call announces {count} tags and names none"))),
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
    Ok(names)
}

/// # Safety
/// `tenant` is null or a terminated string; `tags` is null or points to `count` of them.
unsafe fn of_tags(
    tenant: *const c_char,
    tags: *const *const c_char,
    count: usize,
    whose: c_int,
    timeout_ms: u32,
) -> Result<Change, c_int> {
    // SAFETY: as this function's caller promises.
    let tags = Some(unsafe { tags_of(tags, count) }?);
    let is_own = match u32::try_from(whose) {
        Ok(bindings::SUBLET_WHOSE_TENANT) => false,
        Ok(bindings::SUBLET_WHOSE_PROCESS) => true,
        _ => {
            let message = format!("{whose} is no SUBLET_WHOSE_ value: use 0 or 1");
            return Err(fail(ARGUMENT, &message));
        }
    };
    // SAFETY: as this function's caller promises.
    let tenant = unsafe { name_of(tenant) }?;
    Ok(Change { tenant, tags, is_own, timeout_ms, ..Change::default() })
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
    act(|| unsafe { of_tags(tenant, tags, count, whose, timeout_ms) }.map(Command::Pause))
}

/// Resumes memory by tag.
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
    act(|| unsafe { of_tags(tenant, tags, count, whose, timeout_ms) }.map(Command::Resume))
}

/// Returns 1 while the calling process is paused as a whole.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_is_paused() -> c_int {
    c_int::from(is_paused())
}

/// Returns the number of steps of pauses and resumes in the calling process. As long as it is the same, a tag whose memory was
/// resident stays resident.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_changes() -> u64 {
    runtime::member().map_or(0, |member| member.lifecycle().changes())
}

/// Returns 1 while any of the calling process's memory with this tag is offloaded, 0 while all is resident, and -1 for an unknown
/// tag.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tag_is_paused(tag: *const c_char) -> c_int {
    let mut away = None;
    // The code is kept as the last error only.
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
    /// The function that this thread calls while it waits, and its argument.
    static ASKED: Cell<(bindings::sublet_is_called_off, *mut c_void)> = const { Cell::new((None, std::ptr::null_mut())) };
}

fn is_called_off() -> bool {
    let (asked, context) = ASKED.get();
    // SAFETY: this thread's caller has said that it takes this.
    asked.is_some_and(|asked| unsafe { asked(context) } != 0)
}

/// Sets the function that waits of this thread call to check whether they are called off.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_ask_while_waiting(
    is_called_off: bindings::sublet_is_called_off,
    context: *mut c_void,
) -> c_int {
    ASKED.set((is_called_off, context));
    OK
}

fn is_paused() -> bool {
    runtime::member().is_some_and(|member| member.lifecycle().is_paused_as_a_whole())
}

/// Gives a tenant its GPUs.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_switch_tenant(tenant: *const c_char, wait_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    act(|| unsafe { waits(tenant, wait_ms) }.map(Command::Switch))
}

/// Begins a turn of this process.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_turn_begin(wait_ms: u32) -> c_int {
    act(|| Ok(Command::TurnBegin { wait_ms }))
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
