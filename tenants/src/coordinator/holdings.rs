//! What the processes of several tenants hold: all are asked simultaneously, so that those that are silent cost no more time
//! than one.

use std::time::Instant;

use super::peers::{Everybody, Peers, gone};
use super::report::{Step, TenantStats};
use super::{Coordinator, CoordinatorError, budgets};
use crate::transport::is_stopped;
use crate::wire::Stats;

/// Of the time to answer, the part that connections to all of them may take: one that takes none has others behind it.
const CONNECT_SHARE: u32 = 4;

/// What there is to know of one tenant.
#[derive(Debug)]
pub struct Holdings {
    /// As [`Coordinator::stats`] says it.
    pub stats: Result<TenantStats, CoordinatorError>,
    /// Is there a process that lives and has said nothing?
    pub is_silent: bool,
    /// Was one of these waited for, until the time was up?
    pub is_overdue: bool,
}

impl Holdings {
    /// Asks the tenants of all these. Blocks for as long as one of them may take.
    pub fn of_all(all: &[&Coordinator]) -> Vec<Self> {
        let began = Instant::now();
        let asked = all.iter().map(|coordinator| coordinator.ask_stats(began));
        let (mut peers, mut found): (Vec<_>, Vec<_>) = asked.unzip();
        let mut each: Vec<&mut Peers> = peers.iter_mut().collect();
        while let Some((position, answer)) = Peers::next_of(&mut each, None) {
            let index = answer.peer;
            let who = each[position].list[index].who;
            let is_overdue = each[position].is_overdue(index);
            found[position].is_silent |= is_overdue;
            found[position].is_overdue |= is_overdue;
            let Ok(stats) = &mut found[position].stats else { continue };
            match answer.to(&Stats) {
                Ok(mut member) => {
                    // The kernel's id is in our namespace, the member's own may not be.
                    member.member.pid = who.pid.unwrap_or(member.member.pid);
                    stats.members.push(member);
                }
                Err(failure) => stats.failures.push(failure),
            }
        }
        for stats in found.iter_mut().filter_map(|found| found.stats.as_mut().ok()) {
            stats.members.sort_by_key(|stats| stats.member.pid);
        }
        found
    }
}

impl Coordinator {
    /// Asks all that can answer.
    fn ask_stats(&self, began: Instant) -> (Peers, Holdings) {
        match self.try_ask_stats(began) {
            Ok((peers, stats, is_silent)) => {
                (peers, Holdings { stats: Ok(stats), is_silent, is_overdue: false })
            }
            Err(error) => (
                Peers::default(),
                Holdings { stats: Err(error), is_silent: false, is_overdue: false },
            ),
        }
    }

    fn try_ask_stats(
        &self,
        began: Instant,
    ) -> Result<(Peers, TenantStats, bool), CoordinatorError> {
        let dir = self.dir()?;
        let timeout = self.options.contact_timeout;
        let connected = Everybody::connect(&dir, Step::Stats, began + timeout / CONNECT_SHARE);
        dir.remove_stale()?;
        let Everybody { mut peers, failures } = connected?;
        let mut is_silent = !failures.is_empty();
        let mut stats = TenantStats {
            tenant: self.tenant.to_string(),
            members: Vec::new(),
            budgets: budgets::of_dir(&dir)?,
            failures,
        };
        for index in 0..peers.list.len() {
            let who = peers.list[index].who;
            if let Some(pid) = who.pid.filter(|pid| is_stopped(*pid)) {
                is_silent = true;
                let message = format!("it is stopped (SIGSTOP): `kill -CONT {pid}` continues it");
                stats.failures.push(gone(who, Step::Stats, message));
            } else {
                stats.failures.extend(peers.ask(index, &Stats, timeout).err());
            }
        }
        Ok((peers, stats, is_silent))
    }
}
