//! Names of sockets. By them the coordinator finds processes, and notices missing partners.

use super::super::{Partner, missing};
use super::{ALL, Memory, OWNER, State};
use crate::identity::MemberId;

impl State {
    pub(super) fn is_found(&self, who: usize) -> bool {
        self.is_in(who) && self.processes[who].is_named
    }

    /// The processes with which `who` shares the memory, as far as it knows.
    pub(super) fn partners(&self, who: usize) -> [bool; 3] {
        let has_imported = matches!(self.processes[who].memory, Memory::Resident(_) | Memory::Away);
        ALL.map(|other| {
            let is_partner = match (who, other) {
                (OWNER, OWNER) => false,
                (OWNER, other) => {
                    self.processes[OWNER].memory != Memory::None && self.importers[other]
                }
                (_, other) => other == OWNER && has_imported,
            };
            is_partner && self.processes[other].lives
        })
    }

    /// Does the coordinator miss one of the partners that all have `said`?
    pub(super) fn are_missing(said: Vec<[bool; 3]>, found: [bool; 3]) -> bool {
        let name = |who: usize| MemberId(who as u64);
        let partner = |who: usize| Partner { member: name(who), pid: None };
        let named = |said: [bool; 3]| ALL.into_iter().filter(move |who| said[*who]).map(partner);
        let found = ALL.into_iter().filter(|who| found[*who]).map(name).collect();
        !missing(said.into_iter().flat_map(named), &found).is_empty()
    }

    pub(super) fn somebody_joined(&self, members: [bool; 3]) -> bool {
        // A process that was paused before is known; only a process that runs can be new.
        ALL.into_iter().any(|who| self.runs(who) && self.is_found(who) && !members[who])
    }

    pub(super) fn said_partners(&self, members: [bool; 3]) -> Vec<[bool; 3]> {
        let said = ALL.into_iter().filter(|who| members[*who]);
        said.filter_map(|who| self.processes[who].said).map(|said| said.partners).collect()
    }

    /// Gives all processes the time to make their names again.
    pub(in super::super) fn find_names(&mut self) {
        for process in &mut self.processes {
            process.is_named = true;
        }
    }
}
