//! Which shared memory a pause leaves on its device: decided once, when all processes have said what they hold.

use std::collections::BTreeSet;
use std::time::Instant;

use super::TakesPart;
use super::peers::{Reached, reach};
use super::report::{MemberFailure, Step};
use super::session::{Session, Stop};
use crate::identity::MemberId;
use crate::references::{References, Stay, decide};
use crate::wire::{Drained, Failure, FailureKind, Phase};

impl Session<'_> {
    /// The decision over what the members have said. They hold still since, and hand nothing out.
    pub(super) fn agree_on_shared(&self, drained: &[(usize, Drained)]) -> Result<Vec<Stay>, Stop> {
        let said = drained.iter().map(|(index, said)| (*index, &said.references));
        let said: Vec<(usize, &References)> = said.collect();
        // The agents said at the shut gates that nothing is lent, and lend nothing since.
        if let Some((index, _)) = said.iter().find(|(_, references)| !references.lent.is_empty()) {
            return Err(Stop::Failed(vec![self.still_lent(*index)]));
        }
        if let TakesPart::Alone(_) = self.options.takes_part {
            let sharer = said.iter().find(|(_, references)| references.shares_scope);
            return match sharer {
                Some(&(index, _)) => Err(Stop::Failed(vec![self.shares(index)])),
                None => Ok(Vec::new()),
            };
        }
        // Before this moment a newcomer may have been given memory that nobody here would count.
        if self.somebody_joined() {
            return Err(Stop::Joined);
        }
        let name = |index: usize| self.peers.list[index].who.member;
        let said: Vec<(MemberId, &References)> =
            said.into_iter().map(|(index, references)| (name(index), references)).collect();
        let take_part: BTreeSet<MemberId> = said.iter().map(|(member, _)| *member).collect();
        let all = self.peers.list.iter().map(|peer| peer.who.member);
        let bystanders = all.filter(|member| !take_part.contains(member)).collect();
        Ok(decide(&said, &bystanders))
    }

    fn still_lent(&self, index: usize) -> MemberFailure {
        let message = "a process of another tenant has some of this memory open still".to_owned();
        let failure = Failure { kind: FailureKind::Lent, message };
        let step = Step::Phase(Phase::Drain);
        MemberFailure { who: self.peers.list[index].who, step, failure }
    }

    fn shares(&self, index: usize) -> MemberFailure {
        let failure = Failure {
            kind: FailureKind::Shared,
            message: "other processes hold some of this memory, or may come for it: pause it in all of them together"
                .to_owned(),
        };
        let step = Step::Phase(Phase::Drain);
        MemberFailure { who: self.peers.list[index].who, step, failure }
    }

    /// Is there a living process in the tenant that the members were listed without?
    fn somebody_joined(&self) -> bool {
        let Ok(sockets) = self.dir.members() else {
            return false;
        };
        let deadline = Instant::now() + self.options.contact_timeout;
        let is_known = |id| self.peers.list.iter().any(|peer| peer.who.member == id);
        let mut new = sockets.iter().filter(|socket| !is_known(socket.id));
        new.any(|socket| !matches!(reach(socket, deadline), Ok(Reached::Dead)))
    }
}
