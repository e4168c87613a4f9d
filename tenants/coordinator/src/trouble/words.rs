//! The sentences from which the messages of trouble are made.

use std::fmt;

use super::Trouble;
use crate::{figures::DeviceShortage, report::MemberFailure};
use sublet_protocol::error_text::chain;
use sublet_protocol::identity::TenantName;
use sublet_protocol::transport::{command_of, is_stopped};
use sublet_protocol::wire::{Action, FailureKind};

pub(super) fn lost(losses: &[MemberFailure]) -> String {
    if losses.is_empty() { String::new() } else { format!(", but for: {}", listed(losses)) }
}

/// Does the failure end without help, after others have released memory or finished their work?
pub(super) fn may_pass(kind: FailureKind) -> bool {
    match kind {
        FailureKind::InCapture
        | FailureKind::CutNotReached
        | FailureKind::DrainTimeout
        | FailureKind::OutOfHostMemory
        | FailureKind::OutOfDeviceMemory { .. }
        | FailureKind::DoesNotFit { .. }
        | FailureKind::NoConsent
        | FailureKind::NotNow
        | FailureKind::Lent
        | FailureKind::LenderAway
        | FailureKind::Nameless
        | FailureKind::CalledOff => true,
        FailureKind::WrongState
        | FailureKind::Shared
        | FailureKind::PeerGone
        | FailureKind::Unknown
        | FailureKind::Driver
        | FailureKind::Faulted => false,
    }
}

/// Reports the removed sockets of dead processes.
pub(super) fn left_behind(dead: usize) -> String {
    let processes = if dead == 1 { "process" } else { "processes" };
    match dead {
        0 => String::new(),
        _ => format!("; what {dead} dead {processes} left behind was removed"),
    }
}

/// The last remedy for a resume that may never succeed.
pub(super) fn way_on(action: Action, tenant: &TenantName, failures: &[MemberFailure]) -> String {
    if action == Action::Pause || failures.iter().all(|failure| may_pass(failure.failure.kind)) {
        return String::new();
    }
    format!(". Should trying again not help, {}", save_hint(tenant))
}

pub(super) fn save_hint(tenant: &TenantName) -> String {
    format!("`sublet save {tenant} DIR` writes what is saved to files")
}

pub(super) fn gerund(action: Action) -> &'static str {
    match action {
        Action::Pause => "pausing",
        Action::Resume => "resuming",
    }
}

pub(super) fn noun(action: Action) -> &'static str {
    match action {
        Action::Pause => "pause",
        Action::Resume => "resume",
    }
}

/// Advice about a process that does not answer.
pub(crate) fn silence(failure: &MemberFailure) -> String {
    let Some(pid) = failure.who.pid else { return failure.to_string() };
    let command = Some(command_of(pid)).filter(|command| !command.is_empty());
    let command = command.map_or_else(String::new, |command| format!(" ({command})"));
    if is_stopped(pid) {
        return format!(
            "process {pid}{command} does not answer; it is stopped (SIGSTOP): continue it (kill -CONT {pid}) or end it"
        );
    }
    if let Some(limit) = full_of_files(pid) {
        return format!(
            "process {pid}{command} does not answer: it has as many files open as it may ({limit}): have it close some, or raise \
             that (prlimit --pid {pid} --nofile={})",
            2 * limit
        );
    }
    format!(
        "process {pid}{command} does not answer: {}; `--timeout` gives it more time, or end it",
        failure.failure
    )
}

/// The limit of open files of a process that has reached it. None also if that cannot be known.
fn full_of_files(pid: u32) -> Option<usize> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let soft: usize = soft.split_whitespace().next()?.parse().ok()?;
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    (open >= soft).then_some(soft)
}

pub(super) fn known(existing: &[TenantName]) -> String {
    if existing.is_empty() {
        return "no tenant is running: start one with `sublet run --tenant NAME -- COMMAND`"
            .to_owned();
    }
    let names: Vec<_> = existing.iter().map(TenantName::as_str).collect();
    format!("there are: {}", names.join(", "))
}

pub(super) fn quoted_tags(tags: &[String]) -> String {
    let names: Vec<_> = tags.iter().map(|tag| format!("'{tag}'")).collect();
    format!("{} {}", if tags.len() == 1 { "tag" } else { "tags" }, names.join(", "))
}

pub(super) fn known_tags(known: &[String]) -> String {
    if known.is_empty() {
        return "none of its memory has a tag: ask for it inside a region".to_owned();
    }
    format!("there is the {}", quoted_tags(known))
}

pub(super) fn joined(failures: &[MemberFailure]) -> String {
    failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

pub(super) fn listed(failures: &[MemberFailure]) -> String {
    if failures.iter().all(|failure| failure.failure.kind != FailureKind::CutNotReached) {
        return joined(failures);
    }
    // The positions of ranks are easier to read one below the other.
    let texts: Vec<_> = failures.iter().map(ToString::to_string).collect();
    format!(
        "the ranks did not reach a common cut in time:\n  {}\n  If they only need longer, give a longer \
         timeout; if one is stuck, see what its process waits for",
        texts.join("\n  ")
    )
}

/// Names each GPU that is too full once, and not for each process.
pub(super) fn causes(failures: &[MemberFailure], shortages: &[DeviceShortage]) -> String {
    let is_short = |failure: &&MemberFailure| {
        let is_short = matches!(failure.failure.kind, FailureKind::OutOfDeviceMemory { .. });
        is_short && !shortages.is_empty()
    };
    let others: Vec<_> = failures.iter().filter(|failure| !is_short(failure)).cloned().collect();
    let others = (!others.is_empty()).then(|| listed(&others));
    let shortages = shortages.iter().map(ToString::to_string);
    shortages.chain(others).collect::<Vec<_>>().join("; ")
}

pub(super) fn undone(
    action: Action,
    runs: bool,
    undo_failures: &[MemberFailure],
) -> impl fmt::Display {
    let state = match (action, runs) {
        (Action::Pause, true) => "active",
        (Action::Resume, true) => "active, and the memory of these tags is paused, contents kept,",
        (Action::Pause | Action::Resume, false) => "paused, contents kept",
    };
    if undo_failures.is_empty() {
        format!(". The tenant is {state} as before")
    } else {
        format!(
            ". The others are {state} as before, but taking back failed for {}. The next command for this tenant \
             tries that again",
            listed(undo_failures)
        )
    }
}

pub(super) fn back(were_paused: &[TenantName]) -> String {
    if were_paused.is_empty() {
        return "nothing was changed".to_owned();
    }
    let names: Vec<_> = were_paused.iter().map(|name| format!("'{name}'")).collect();
    format!("paused for it were {}, which are active again", names.join(", "))
}

pub(super) fn stay(stay_paused: &[(TenantName, Trouble)]) -> String {
    let one = |(name, error): &(TenantName, Trouble)| {
        format!(
            "'{name}' was paused for it, with all its contents, and did not come back ({}): `sublet resume {name}` tries again",
            chain(error)
        )
    };
    stay_paused.iter().map(one).collect::<Vec<_>>().join("; ")
}
