//! Memory that processes of other tenants have open: a pause takes none of it, and waits until they let it go. So does a pause
//! by tag that one process begins for itself, where others of its tenant have that memory open.
//!
//! Nobody is stopped while that lasts, for who holds memory may wait for its owner, or for another borrower, before it lets
//! go. Behind shut gates nothing is lent any more, so a borrower that opens and closes memory again and again is seen to
//! hold none there; it is waited for for a moment, and then all run on and it begins again.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::Options;
use super::cast::{Cast, OnFailure};
use super::guards::{Refused, Tries};
use super::report::{MemberFailure, Step};
use super::session::{Session, Stop};
use sublet_protocol::identity::TenantName;
use sublet_protocol::references::Partner;
use sublet_protocol::run_dir::{NAMES_AGAIN_WITHIN, pause_thread};
use sublet_protocol::scope::Scope;
use sublet_protocol::wire::{Action, AskLent, FailureKind, Lending, Lent, Wanted};

/// The time that a pause waits in all, unless its options say otherwise.
const WAIT: Duration = Duration::from_secs(30);
/// The time for which all run before the gates are shut for the first time though something is lent. It doubles after
/// each time.
const LOOK: Duration = Duration::from_millis(50);
/// Of that, for how much the gates are then shut at most.
const SHUT_SHARE: u32 = 4;
const SHUT_MAX: Duration = Duration::from_millis(500);
/// Between two looks.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(50);

/// Does this leg ask who has memory of its members open? A pause does, if a member named a family when it was greeted, or
/// others than the one whose pause by tag this is take part.
pub(super) fn is_used(leg: &Session<'_>) -> bool {
    let asks = |index: &usize| shares(&leg.cast, leg.round.scope(), *index);
    leg.round.action() == Action::Pause && leg.members.iter().any(asks)
}

/// Does this member share memory with others than those of the pause?
fn shares(cast: &Cast<'_>, scope: &Scope, index: usize) -> bool {
    let info = cast.peers.info(index);
    info.is_some_and(|info| info.family.is_some() || !scope.is_about(info.id))
}

/// The end of all tries.
fn deadline(options: &Options, tries: &Tries) -> Instant {
    tries.began + options.timeout.unwrap_or(WAIT)
}

/// The time for which this try lets all run. Tries that end immediately are many.
fn look(options: &Options, tries: &Tries) -> Duration {
    match options.consent {
        // Applications that wait in a call of their own hear of the end of the first try: there is no other.
        Some(_) => options.timeout.unwrap_or(WAIT),
        None => LOOK.saturating_mul(1 << tries.lent.min(u32::BITS - 1)).min(WAIT),
    }
}

/// The time of that for which the gates are shut then.
fn shut(look: Duration) -> Duration {
    (look / SHUT_SHARE).min(SHUT_MAX)
}

/// Is there time for one more try, if a pause was refused only because other tenants have memory open?
pub(super) fn goes_on(tries: &mut Tries, refused: &mut Refused<'_>) -> bool {
    let (options, error) = (&refused.held.coordinator.options, refused.error);
    let is_lent = |failure: &MemberFailure| failure.failure.kind == FailureKind::Lent;
    let failures = error.failures();
    let is_lent = !failures.is_empty() && failures.iter().all(is_lent) && error.left_unchanged();
    tries.lent += 1;
    is_lent && options.consent.is_none() && Instant::now() < deadline(options, tries)
}

/// Waits once, with nobody stopped, until those that were refused as nameless have names again, or had the time to make
/// them, or it is called off.
pub(super) fn waits_for_names(tries: &mut Tries, refused: &mut Refused<'_>) -> bool {
    let Refused { held, error, .. } = refused;
    let options = &held.coordinator.options;
    let is_nameless = |failure: &&MemberFailure| failure.failure.kind == FailureKind::Nameless;
    let nameless: Vec<_> = error.failures().iter().filter(is_nameless).collect();
    if tries.named || nameless.is_empty() || options.consent.is_some() || !error.left_unchanged() {
        return false;
    }
    tries.named = true;
    let deadline = Instant::now() + NAMES_AGAIN_WITHIN;
    let goes_on = || !options.is_called_off() && Instant::now() < deadline;
    while !nameless.iter().all(|failure| held.dir.has_member(failure.who.member)) && goes_on() {
        pause_thread(REST_MAX);
    }
    true
}

/// The memory that some members of a tenant share with other processes.
pub(super) struct Loans<'s, 'a> {
    cast: &'s mut Cast<'a>,
    /// The part of their memory that matters.
    scope: &'s Scope,
    members: &'s [usize],
}

impl<'s, 'a> Loans<'s, 'a> {
    /// Of `members`, as far as `scope` goes. Nobody is asked yet.
    pub(super) fn new(cast: &'s mut Cast<'a>, scope: &'s Scope, members: &'s [usize]) -> Self {
        Self { cast, scope, members }
    }

    /// Before anybody is stopped: waits for borrowers as long as this try may. Refuses when the time of all tries is over.
    pub(super) fn wait_while_all_run(&mut self, tries: &Tries) -> Result<(), Stop> {
        let (options, end) = (self.cast.options, deadline(self.cast.options, tries));
        let lent = self.lent_at((Instant::now() + look(options, tries)).min(end))?;
        if lent.is_empty() || Instant::now() < end { Ok(()) } else { Err(Stop::Failed(lent)) }
    }

    /// Behind shut gates, where nothing is lent any more: waits for borrowers for a moment.
    pub(super) fn wait_behind_gates(&mut self, tries: &Tries) -> Result<(), Stop> {
        let lent = self.lent_at(Instant::now() + shut(look(self.cast.options, tries)))?;
        if lent.is_empty() { Ok(()) } else { Err(Stop::Failed(lent)) }
    }

    /// One failure for each member that has lent memory still at `until`; none as soon as nobody has.
    fn lent_at(&mut self, until: Instant) -> Result<Vec<MemberFailure>, Stop> {
        let mut rest = REST_MIN;
        loop {
            let lent = self.lent()?;
            if self.cast.options.is_called_off() {
                return Err(Stop::CalledOff);
            }
            let left = until.saturating_duration_since(Instant::now());
            if lent.is_empty() || left.is_zero() {
                return Ok(lent);
            }
            self.rest(rest.min(left));
            rest = (2 * rest).min(REST_MAX);
        }
    }

    /// Waits for as long as `rest`, or until the pause is called off.
    fn rest(&self, rest: Duration) {
        match &self.cast.options.interrupt {
            Some(interrupt) => interrupt.wait(rest),
            None => pause_thread(rest),
        }
    }

    /// One failure for each member that has lent memory of this pause.
    fn lent(&mut self) -> Result<Vec<MemberFailure>, Vec<MemberFailure>> {
        let mut all = self.of_others()?;
        all.retain(|(_, lending)| !lending.lent.is_empty());
        let failure = |(index, lending): (usize, Lending)| {
            let (who, message) = (self.cast.peers.who(index), held_by(&lending.lent));
            MemberFailure::new(who, Step::Lending, FailureKind::Lent, message)
        };
        Ok(all.into_iter().map(failure).collect())
    }

    /// Asks the members that share memory with other tenants: those that named a family when they were greeted. The others
    /// share nothing but with the one whose pause by tag this is.
    fn of_others(&mut self) -> Result<Vec<(usize, Lending)>, Vec<MemberFailure>> {
        let mut members = self.members.to_vec();
        members.retain(|index| shares(self.cast, self.scope, *index));
        self.ask(&members)
    }

    /// The processes that the members share memory with.
    pub(super) fn partners(&mut self) -> Result<Vec<Partner>, Vec<MemberFailure>> {
        let all = self.ask(self.members)?;
        Ok(all.into_iter().flat_map(|(_, lending)| lending.partners).collect())
    }

    fn ask(&mut self, members: &[usize]) -> Result<Vec<(usize, Lending)>, Vec<MemberFailure>> {
        let timeout = self.cast.options.contact_timeout;
        let question = AskLent { scope: self.scope.clone() };
        self.cast.step(&question, members, timeout, OnFailure::Stop).of_all()
    }

    /// One failure for each member, which is paused, that has memory of tenant `lender` open.
    pub(super) fn wanted_of(
        &mut self,
        lender: &TenantName,
    ) -> Result<Vec<MemberFailure>, Vec<MemberFailure>> {
        let all = self.of_others()?;
        let mut failures = Vec::new();
        for (index, lending) in all {
            let of_lender = |wanted: &&Wanted| wanted.tenant == lender.as_str();
            let (mut count, mut bytes) = (0_u64, 0_u64);
            for wanted in lending.wanted.iter().filter(of_lender) {
                count += wanted.count;
                bytes = bytes.saturating_add(wanted.bytes);
            }
            if count > 0 {
                let message = format!(
                    "{bytes} bytes in {count} allocations that it has open are tenant '{lender}'s, which is to be paused: \
                     resume this tenant while '{lender}' runs, and have it let them go first ({})",
                    way_to_let_go(true, true)
                );
                let (who, kind) = (self.cast.peers.who(index), FailureKind::LenderAway);
                failures.push(MemberFailure::new(who, Step::Lending, kind, message));
            }
        }
        Ok(failures)
    }
}

fn way_to_let_go(handles: bool, tickets: bool) -> String {
    let by_handle =
        "cudaIpcCloseMemHandle; in PyTorch, drop the tensors and call torch.cuda.ipc_collect()";
    let by_ticket = "cuMemUnmap and cuMemRelease";
    match (handles, tickets) {
        (true, true) => format!("{by_handle}; for VMM imports, {by_ticket}"),
        (false, true) => by_ticket.to_owned(),
        (_, false) => by_handle.to_owned(),
    }
}

/// Says in words which process has what open, and how it is let go.
fn held_by(lent: &[Lent]) -> String {
    let mut text = String::new();
    let mut tenants: Vec<&str> = Vec::new();
    for Lent { tenant, pid, handles, tickets, bytes } in lent {
        if !text.is_empty() {
            text.push_str(", and ");
        }
        let who = pid.map_or("a process".to_owned(), |pid| format!("process {pid}"));
        let counts = match (handles, tickets) {
            (handles, 0) => format!("{handles} cudaIpc handle(s)"),
            (0, tickets) => format!("{tickets} VMM import(s)"),
            (handles, tickets) => {
                format!("{handles} cudaIpc handle(s) and {tickets} VMM import(s)")
            }
        };
        // Writing to a string does not fail.
        let _written = write!(
            text,
            "{who} of tenant '{tenant}' has {bytes} bytes of its memory open by {counts}"
        );
        if !tenants.contains(&tenant.as_str()) {
            tenants.push(tenant);
        }
    }
    let handles = lent.iter().any(|lent| lent.handles > 0);
    let tickets = lent.iter().any(|lent| lent.tickets > 0);
    let pauses: Vec<_> = tenants.iter().map(|tenant| format!("sublet pause {tenant}")).collect();
    format!(
        "{text}; it is let go by {}, or by a pause of that tenant ({})",
        way_to_let_go(handles, tickets),
        pauses.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lent(tenant: &str, pid: Option<u32>, handles: u64, tickets: u64) -> Lent {
        Lent { tenant: tenant.to_owned(), pid, handles, tickets, bytes: 4096 }
    }

    #[test]
    fn who_holds_what_and_how_it_is_let_go_is_said() {
        let one = held_by(&[lent("infer", Some(7), 2, 0)]);
        assert!(one.starts_with("process 7 of tenant 'infer' has 4096 bytes"), "{one}");
        assert!(one.contains("2 cudaIpc handle(s)") && one.contains("ipc_collect"), "{one}");
        assert!(!one.contains("cuMemUnmap") && one.contains("sublet pause infer"), "{one}");
        let two = held_by(&[lent("infer", None, 0, 3), lent("score", Some(8), 1, 1)]);
        assert!(two.contains("a process of tenant 'infer'") && two.contains("process 8"), "{two}");
        assert!(two.contains("cuMemUnmap and cuMemRelease"), "{two}");
        assert!(two.contains("sublet pause infer, sublet pause score"), "{two}");
    }

    #[test]
    fn each_try_lets_all_run_longer_and_stops_them_for_a_moment_only() {
        let options = Options { timeout: Some(Duration::from_mins(1)), ..Options::default() };
        let mut tries = Tries::default();
        for _ in 0..8 {
            let before = look(&options, &tries);
            assert!(shut(before) * SHUT_SHARE <= before && shut(before) <= SHUT_MAX);
            tries.lent += 1;
            assert_eq!(look(&options, &tries), 2 * before);
        }
        assert!(Instant::now() < deadline(&options, &tries));
        tries.lent = u32::MAX;
        assert_eq!(look(&options, &tries), WAIT);
        let over = Options { timeout: Some(Duration::ZERO), ..options };
        assert!(Instant::now() >= deadline(&over, &tries));
    }
}
