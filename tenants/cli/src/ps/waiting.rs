//! Sentences about the processes that change a tenant, and the processes in it that are waited for.

use tenants::wire::{MemberState, MemberStats};

use crate::view::TenantView;

/// The most processes that are named.
const NAMED_MAX: usize = 4;

/// Returns sentences, the most important first. Empty if no process waits. `command_of` gives the command line of a process.
pub(super) fn sentences(tenant: &TenantView, command_of: impl Fn(u32) -> String) -> Vec<String> {
    let members = &tenant.stats.members;
    let mut said = Vec::new();
    for pid in &tenant.changed_by {
        let command = command_of(*pid);
        let command = if command.is_empty() { command } else { format!(" ({command})") };
        said.push(format!("process {pid}{command} holds the tenant"));
    }
    let (held, free): (Vec<_>, Vec<_>) = members.iter().partition(|member| member.member.held);
    let runs: Vec<_> =
        free.into_iter().filter(|member| is_in(member, MemberState::Active)).collect();
    if !held.is_empty() && !runs.is_empty() {
        let (count, all) = (held.len(), members.len());
        said.push(format!("{count} of {all} processes are held, waiting for {}", named(&runs)));
    }
    let moving: Vec<_> = members
        .iter()
        .filter(|member| {
            is_in(member, MemberState::Offloading) || is_in(member, MemberState::Restoring)
        })
        .collect();
    for member in moving.iter().take(NAMED_MAX) {
        if let Some(asked) = member.member.asked {
            said.push(format!("process {} does: {}", member.member.pid, asked.phase.label()));
        }
    }
    if moving.len() > NAMED_MAX {
        said.push(format!("and {} more", moving.len() - NAMED_MAX));
    }
    if tenant.changed_by.is_empty() && !moving.is_empty() {
        said.push(
            "no command holds the tenant: its processes settle an interrupted change".to_owned(),
        );
    }
    said
}

fn is_in(member: &MemberStats, state: MemberState) -> bool {
    member.member.state == state
}

fn named(members: &[&MemberStats]) -> String {
    let pids: Vec<_> =
        members.iter().take(NAMED_MAX).map(|member| member.member.pid.to_string()).collect();
    let word = if members.len() == 1 { "process" } else { "processes" };
    let more = members.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{word} {}{more}", pids.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::tests::busy;

    #[test]
    fn the_holder_and_whoever_is_waited_for_are_named() {
        let view = busy();
        assert_eq!(sentences(&view.tenants[0], |_| String::new()), [""; 0]);
        let said = sentences(&view.tenants[1], |pid| format!("sublet pause {pid}"));
        assert_eq!(
            said,
            [
                "process 9999999 (sublet pause 9999999) holds the tenant",
                "1 of 2 processes are held, waiting for process 10",
                "process 11 does: prepare",
            ]
        );
    }

    #[test]
    fn a_change_that_nobody_holds_is_said_to_settle() {
        let mut view = busy();
        view.tenants[1].changed_by.clear();
        let said = sentences(&view.tenants[1], |_| String::new());
        assert!(said.last().is_some_and(|last| last.contains("settle")), "{said:?}");
    }
}
