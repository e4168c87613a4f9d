//! Memory that processes of other tenants have open. A pause releases none of it, and waits until they close it. So does a
//! pause by tag of one process's own memory, if other processes of its tenant have that memory open.
//!
//! No process is stopped during that wait, because a process that holds memory may wait for its owner, or for another borrower,
//! before it closes the memory. Behind closed gates nothing is lent any more. So a borrower that opens and closes memory again
//! and again holds none there at some moment. The pause waits there for a short time. After that all processes run on and the
//! pause begins again.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::cast::{Cast, OnFailure};
use super::options::Options;
use super::report::{MemberFailure, Step};
use super::trouble::Stop;
use sublet_protocol::wire::{AskLent, FailureKind, Lending, Lent};
use sublet_protocol::{references::Partner, scope::Scope};

/// The time that a pause waits in all, unless its options say otherwise.
const WAIT: Duration = Duration::from_secs(30);
/// The time for which all processes run before the gates are closed for the first time although some memory is lent. It doubles
/// after each time.
const LOOK: Duration = Duration::from_millis(50);
/// The divisor of that time that gives the longest time with closed gates.
const SHUT_SHARE: u32 = 4;
const SHUT_MAX: Duration = Duration::from_millis(500);
/// The shortest time between two looks.
const REST_MIN: Duration = Duration::from_millis(1);
pub(super) const REST_MAX: Duration = Duration::from_millis(50);

/// The limits on a pause's waits for borrowers, over all its tries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) began: Instant,
    /// The number of tries that ended because memory was lent.
    pub(super) tries: u32,
}

impl Patience {
    /// The deadline of all tries.
    pub(super) fn deadline(self, options: &Options) -> Instant {
        self.began + options.timeout.unwrap_or(WAIT)
    }

    /// The time for which this try lets all processes run. Many tries end immediately.
    fn look(self, options: &Options) -> Duration {
        match options.consent {
            // Applications that wait in a call of their own learn of the end of the first try: there is no second.
            Some(_) => options.timeout.unwrap_or(WAIT),
            None => LOOK.saturating_mul(1 << self.tries.min(u32::BITS - 1)).min(WAIT),
        }
    }
}

/// The time for which the gates are closed after a look of length `look`.
fn shut(look: Duration) -> Duration {
    (look / SHUT_SHARE).min(SHUT_MAX)
}

/// The memory that some members of a tenant share with other processes.
pub(super) struct Loans<'s, 'a> {
    cast: &'s mut Cast<'a>,
    /// The part of the members' memory that matters.
    scope: &'s Scope,
    members: &'s [usize],
}

impl<'s, 'a> Loans<'s, 'a> {
    /// The loans of `members`, as far as `scope` goes. Nothing is sent yet.
    pub(super) fn new(cast: &'s mut Cast<'a>, scope: &'s Scope, members: &'s [usize]) -> Self {
        Self { cast, scope, members }
    }

    /// Before any process is stopped: waits for borrowers as long as this try may. Refuses after the time of all tries.
    pub(super) fn wait_while_all_run(&mut self, patience: Patience) -> Result<(), Stop> {
        let (options, end) = (self.cast.options, patience.deadline(self.cast.options));
        let lent = self.lent_at((Instant::now() + patience.look(options)).min(end))?;
        if lent.is_empty() || Instant::now() < end { Ok(()) } else { Err(Stop::Failed(lent)) }
    }

    /// Behind closed gates, where nothing is lent any more: waits for borrowers for a short time.
    pub(super) fn wait_behind_gates(&mut self, patience: Patience) -> Result<(), Stop> {
        let lent = self.lent_at(Instant::now() + shut(patience.look(self.cast.options)))?;
        if lent.is_empty() { Ok(()) } else { Err(Stop::Failed(lent)) }
    }

    /// One failure for each member that still has lent memory at `until`; none as soon as no member has.
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
            self.cast.options.rest(rest.min(left));
            rest = (2 * rest).min(REST_MAX);
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

    /// Asks the members that share memory with other tenants: those that named a family when they were greeted. The other
    /// members share memory only with the process whose own memory this pause by tag covers.
    pub(super) fn of_others(&mut self) -> Result<Vec<(usize, Lending)>, Vec<MemberFailure>> {
        let mut members = self.members.to_vec();
        members.retain(|index| self.cast.shares(self.scope, *index));
        self.ask(&members)
    }

    /// The processes with which the members share memory.
    pub(super) fn partners(&mut self) -> Result<Vec<Partner>, Vec<MemberFailure>> {
        let all = self.ask(self.members)?;
        Ok(all.into_iter().flat_map(|(_, lending)| lending.partners).collect())
    }

    fn ask(&mut self, members: &[usize]) -> Result<Vec<(usize, Lending)>, Vec<MemberFailure>> {
        let timeout = self.cast.options.contact_timeout;
        let question = AskLent { scope: self.scope.clone() };
        self.cast.step(&question, members, timeout, OnFailure::Stop).of_all()
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

/// Says in words which process has which memory open, and how it can be closed.
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
        let mut patience = Patience { began: Instant::now(), tries: 0 };
        for _ in 0..8 {
            let before = patience.look(&options);
            assert!(shut(before) * SHUT_SHARE <= before && shut(before) <= SHUT_MAX);
            patience.tries += 1;
            assert_eq!(patience.look(&options), 2 * before);
        }
        assert!(Instant::now() < patience.deadline(&options));
        patience.tries = u32::MAX;
        assert_eq!(patience.look(&options), WAIT);
        let over = Options { timeout: Some(Duration::ZERO), ..options };
        assert!(Instant::now() >= patience.deadline(&over));
    }
}
