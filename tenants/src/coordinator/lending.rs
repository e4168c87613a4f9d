//! Memory that processes of other tenants have open: a pause takes none of it, and waits until they let it go. So does a pause
//! by tag that one process begins for itself, where others of its tenant have that memory open.
//!
//! Nobody is stopped while that lasts, for who holds memory may wait for its owner, or for another borrower, before it lets
//! go. Behind shut gates nothing is lent any more, so a borrower that opens and closes memory again and again is seen to
//! hold none there; it is waited for for a moment, and then all run on and it begins again.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::cast::{Cast, OnFailure};
use super::report::{MemberFailure, Step};
use super::session::Stop;
use super::{Options, Trouble};
use crate::identity::TenantName;
use crate::references::Partner;
use crate::run_dir::{NAMES_AGAIN_WITHIN, TenantDir, pause_thread};
use crate::scope::Scope;
use crate::wire::{AskLent, FailureKind, Lending, Lent, Wanted};

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

/// The limits on a pause's waits for borrowers, over all its tries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    deadline: Instant,
    /// The time for which this try lets all run.
    look: Duration,
    tries_again: bool,
}

impl Patience {
    pub(super) fn new(options: &Options) -> Self {
        let wait = options.timeout.unwrap_or(WAIT);
        // Applications that wait in a call of their own hear of the end of the first try: there is no other.
        let look = if options.consent.is_some() { wait } else { LOOK };
        let tries_again = options.consent.is_none();
        Self { deadline: Instant::now() + wait, look, tries_again }
    }

    /// Is there time for one more try?
    pub(super) fn goes_on(&mut self) -> bool {
        // Tries that end immediately are many.
        self.look = (self.look * 2).min(WAIT);
        self.tries_again && !self.is_over()
    }

    fn shut(&self) -> Duration {
        (self.look / SHUT_SHARE).min(SHUT_MAX)
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }
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
    pub(super) fn wait_while_all_run(&mut self, patience: Patience) -> Result<(), Stop> {
        let lent = self.lent_at((Instant::now() + patience.look).min(patience.deadline))?;
        if lent.is_empty() || !patience.is_over() { Ok(()) } else { Err(Stop::Failed(lent)) }
    }

    /// Behind shut gates, where nothing is lent any more: waits for borrowers for a moment.
    pub(super) fn wait_behind_gates(&mut self, patience: Patience) -> Result<(), Stop> {
        let lent = self.lent_at(Instant::now() + patience.shut())?;
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
        members.retain(|index| {
            let info = self.cast.peers.info(*index);
            info.is_some_and(|info| info.family.is_some() || !self.scope.is_about(info.id))
        });
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

/// One wait for names, in all tries of a pause or resume.
#[derive(Debug, Default)]
pub(super) struct NamesWait(bool);

impl NamesWait {
    /// Is it worth one more try? Waits, with nobody stopped, until those that `error` names as nameless have names in `dir`,
    /// or had the time to make them, or it is called off.
    pub(super) fn waits(&mut self, options: &Options, dir: &TenantDir, error: &Trouble) -> bool {
        let is_nameless = |failure: &&MemberFailure| failure.failure.kind == FailureKind::Nameless;
        let nameless: Vec<_> = error.failures().iter().filter(is_nameless).collect();
        if self.0 || nameless.is_empty() || options.consent.is_some() || !error.left_unchanged() {
            return false;
        }
        self.0 = true;
        let deadline = Instant::now() + NAMES_AGAIN_WITHIN;
        while !nameless.iter().all(|failure| dir.has_member(failure.who.member)) {
            if options.is_called_off() || Instant::now() >= deadline {
                break;
            }
            pause_thread(REST_MAX);
        }
        true
    }
}

impl Trouble {
    /// Was a pause refused only because other tenants have memory open, with all as before?
    pub(super) fn is_lent(&self) -> bool {
        let is_lent = |failure: &MemberFailure| failure.failure.kind == FailureKind::Lent;
        let failures = self.failures();
        !failures.is_empty() && failures.iter().all(is_lent) && self.left_unchanged()
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
        let mut patience = Patience::new(&options);
        for _ in 0..8 {
            assert!(patience.shut() * SHUT_SHARE <= patience.look && patience.shut() <= SHUT_MAX);
            let before = patience.look;
            assert!(patience.goes_on());
            assert_eq!(patience.look, 2 * before);
        }
        let over = Options { timeout: Some(Duration::ZERO), ..options };
        assert!(!Patience::new(&over).goes_on());
    }
}
