//! The decision that all processes of a pause follow once each is drained. It covers the shared memory that stays on its
//! device, the copies of earlier pauses that stay in host memory, and whether memory is released while the rest is still saved.

use std::time::{Duration, Instant};

use vmm_pool::{Copies, HostDemand, Schedule};

use super::cast::Cast;
use super::peers::{Peers, Reached, reach};
use super::report::{MemberFailure, Step, Who};
use super::round::Round;
use super::trouble::Stop;
use sublet_protocol::host_memory;
use sublet_protocol::identity::MemberId;
use sublet_protocol::references::{Partner, References, Stay, decide, missing};
use sublet_protocol::run_dir::MemberSocket;
use sublet_protocol::transport::is_stopped;
use sublet_protocol::wire::{Drained, FailureKind, Phase};

/// The decision that all processes of a pause follow, after [`Phase::Drain`].
#[derive(Debug, Default)]
pub(super) struct Agreed {
    /// Shared memory that this pause leaves on its device.
    pub(super) stays: Vec<Stay>,
    /// Copies of earlier pauses for which all processes have room in host memory.
    pub(super) copies: Copies,
    /// The time at which processes save.
    pub(super) schedule: Schedule,
    /// The longest time for saving after the point of no return, in one stage.
    pub(super) saving: Option<Duration>,
}

impl Agreed {
    /// Decides from the reports of drained members. Since then the members are stopped, and export no memory.
    pub(super) fn of(
        cast: &Cast<'_>,
        round: &Round<'_>,
        drained: &[(usize, Drained)],
    ) -> Result<Self, Stop> {
        refuse_host_shortage(&cast.peers, drained)?;
        let needs: Vec<_> = drained.iter().map(|(_, said)| &said.host).collect();
        let demands: Vec<_> = needs.iter().map(|need| need.demand).collect();
        let copies = host_memory::copies_with_room(&needs);
        let is_early = cast.options.releases_early || pays(&demands, copies);
        let (schedule, saving) = if round.overlaps {
            (Schedule::SaveMeanwhile, None)
        } else if is_early {
            (Schedule::SaveMeanwhile, Some(saving_time(&demands)))
        } else {
            (Schedule::SaveFirst, None)
        };
        Ok(Self { stays: agree_on_shared(cast, round, drained)?, copies, schedule, saving })
    }
}

/// Refuses if the members together need more host memory than there is. The member that needs most is named.
fn refuse_host_shortage(peers: &Peers, drained: &[(usize, Drained)]) -> Result<(), Stop> {
    let most = drained.iter().max_by_key(|(_, said)| said.host.demand.grow_bytes);
    let short = host_memory::shortage(drained.iter().map(|(_, said)| &said.host));
    let (Some(short), Some((most, _))) = (short, most) else { return Ok(()) };
    let step = Step::Phase(Phase::Prepare);
    let kind = FailureKind::OutOfHostMemory;
    let failure = MemberFailure::new(peers.who(*most), step, kind, short.to_string());
    Err(Stop::HostShort(Box::new(short), failure))
}

/// Decides about shared memory, from the members' reports.
fn agree_on_shared(
    cast: &Cast<'_>,
    round: &Round<'_>,
    drained: &[(usize, Drained)],
) -> Result<Vec<Stay>, Stop> {
    let said = drained.iter().map(|(index, said)| (cast.peers.who(*index), &said.references));
    let said: Vec<(Who, &References)> = said.collect();
    let refused = |who, kind, why| {
        let failure = MemberFailure::new(who, Step::Phase(Phase::Drain), kind, why);
        Err(Stop::Failed(vec![failure]))
    };
    // The agents reported with closed gates that nothing is lent, and have lent nothing since.
    let has_lent = |said: &&(Who, &References)| !said.1.lent.is_empty();
    let lender = said.iter().find(has_lent).filter(|_| cast.options.waits_for_borrowers());
    if let Some((who, _)) = lender {
        let why = "a process of another tenant has some of this memory open still";
        return refused(*who, FailureKind::Lent, why);
    }
    if round.acts_alone() {
        let Some((who, _)) = said.iter().find(|(_, references)| references.shares_scope) else {
            return Ok(Vec::new());
        };
        let why = "other processes hold some of this memory, or may come for it: pause it in all of them \
                   together";
        return refused(*who, FailureKind::Shared, why);
    }
    // Before this moment a newcomer may have received memory that no member here would count.
    let deadline = Instant::now() + cast.options.contact_timeout;
    let lives = |socket: &MemberSocket| !matches!(reach(socket, deadline), Ok(Reached::Dead));
    if cast.newcomers().iter().any(lives) {
        return Err(Stop::Joined);
    }
    refuse_missing(&cast.peers, said.iter().flat_map(|(_, references)| &references.partners))?;
    let said: Vec<(MemberId, &References)> =
        said.into_iter().map(|(who, references)| (who.member, references)).collect();
    let mut bystanders = cast.peers.names();
    for (member, _) in &said {
        bystanders.remove(member);
    }
    Ok(decide(&said, &bystanders))
}

/// Refuses if a process that shares memory with others is not among the processes that were found.
pub(super) fn refuse_missing<'p>(
    peers: &Peers,
    partners: impl Iterator<Item = &'p Partner>,
) -> Result<(), Vec<MemberFailure>> {
    let missing = missing(partners.copied(), &peers.names());
    let missing: Vec<_> = missing.into_iter().map(not_found).collect();
    if missing.is_empty() { Ok(()) } else { Err(missing) }
}

/// The failure of a process that shares memory with others and that has no socket name for the moment.
fn not_found(partner: Partner) -> MemberFailure {
    let Partner { member, pid } = partner;
    let way_on = match pid {
        Some(pid) if is_stopped(pid) => {
            format!("it is stopped (SIGSTOP): continue it (kill -CONT {pid}) or end it")
        }
        Some(pid) => format!("try again, or end it (kill {pid})"),
        None => "try again, or end it".to_owned(),
    };
    // If the id of a process is not known, nobody can tell whether it lives.
    let lives = if pid.is_some() { "it lives" } else { "it may live" };
    let message = format!(
        "{lives} and shares memory with others, and its socket in the run directory is gone: {way_on}"
    );
    MemberFailure::new(Who { pid, member }, Step::Hello, FailureKind::Nameless, message)
}

// The rules for releasing memory while the rest is still saved.
//
// The driver clears released memory in the background, and copies to the device share the bandwidth with the clearing. So a
// resume right after a pause is slower, unless the clearing ran while the pause still copied. The price: the pause cannot be
// called off any more after its first release. So memory is released early only if host memory is there already, and enough is
// copied.

/// The least bytes that one process must copy for an early release to pay. The driver releases the bytes that one process
/// copies in 20 ms in under 1 ms, and clears them in some 4 ms.
const COPIED_BYTES_MIN: u64 = 1 << 30;

/// The least ratio of copied bytes to missing host memory at which it pays to make that memory first. At a lower ratio a pause
/// makes the memory during its copies.
const GROWTH_SHARE: u64 = 16;

/// The slowest speed of a stage, or of a step of spilling, in bytes a second: disks are that slow.
const SLOWEST_BYTES_PER_SECOND: u64 = 128 << 20;

/// Returns the longest time in which `bytes` move.
pub fn moving_time(bytes: u64) -> Duration {
    Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND)
}

/// The slowest speed at which a process copies to host memory, in bytes a second, whatever else its machine does.
const SLOWEST_TO_MEMORY: u64 = 512 << 20;

/// Does it pay for a pause to release memory while the rest is still saved? `drained` are the reports of the drained processes.
/// It pays if that is quicker, and if only the link limits the copies to host memory. So some process must copy a GiB, most of
/// the host memory for all must be there, and nothing may go to a file.
fn pays(drained: &[HostDemand], copies: Copies) -> bool {
    let copied_bytes = || drained.iter().map(|demand| demand.copying.to_memory_bytes);
    let growth = drained.iter().map(|demand| demand.grow_bytes_with(copies));
    let growth_bytes = growth.fold(0, u64::saturating_add);
    let all_bytes = copied_bytes().fold(0, u64::saturating_add);
    copied_bytes().any(|bytes| bytes >= COPIED_BYTES_MIN)
        && growth_bytes <= all_bytes / GROWTH_SHARE
        && drained.iter().all(|demand| demand.copying.to_file_bytes == 0)
}

/// Returns the longest time that saving takes. `drained` are the reports of the drained processes. The files of all processes
/// may be on one disk.
fn saving_time(drained: &[HostDemand]) -> Duration {
    let copying = || drained.iter().map(|demand| demand.copying);
    let to_memory = copying().map(|copying| copying.to_memory_bytes).max().unwrap_or(0);
    let to_files = copying().map(|copying| copying.to_file_bytes).fold(0, u64::saturating_add);
    Duration::from_secs(to_memory / SLOWEST_TO_MEMORY) + moving_time(to_files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_pool::Copying;

    const MIB: u64 = 1 << 20;
    const MANY: u64 = 2048 * MIB;

    /// The report of a process that copies `copied_bytes`, and needs `growth_bytes` of host memory for them.
    fn drained(copied_bytes: u64, growth_bytes: u64) -> HostDemand {
        HostDemand {
            saved_bytes: copied_bytes,
            copying: Copying { to_memory_bytes: copied_bytes, ..Copying::default() },
            held_bytes: copied_bytes.saturating_sub(growth_bytes),
            grow_bytes: growth_bytes,
            grow_with_needed_bytes: growth_bytes,
            grow_with_all_bytes: growth_bytes + MANY,
        }
    }

    fn filed(to_file_bytes: u64) -> HostDemand {
        let copying = Copying { to_file_bytes, ..Copying::default() };
        HostDemand { copying, ..HostDemand::default() }
    }

    fn pays(drained: &[HostDemand]) -> bool {
        super::pays(drained, Copies::Needed)
    }

    #[test]
    fn it_pays_where_one_process_copies_much_and_the_rest_does_not_matter() {
        assert!(pays(&[drained(MANY, 0)]));
        assert!(pays(&[drained(0, 0), drained(MANY, 0), HostDemand::default()]));
        assert!(!pays(&[]));
        assert!(!pays(&[drained(COPIED_BYTES_MIN - 1, 0), drained(COPIED_BYTES_MIN - 1, 0)]));
    }

    #[test]
    fn host_memory_is_made_beside_the_copies_where_there_is_much_to_make() {
        assert!(pays(&[drained(MANY, MANY / 16)]));
        assert!(!pays(&[drained(MANY, MANY / 16 + 1)]));
        assert!(!pays(&[drained(MANY, 0), drained(MANY / 4, MANY / 4)]));
        let said = drained(MANY, 0);
        assert!(!super::pays(&[said], Copies::All), "all copies take more");
    }

    #[test]
    fn files_keep_a_pause_from_it() {
        assert!(!pays(&[drained(MANY, 0), filed(1)]));
    }

    #[test]
    fn saving_takes_as_long_as_the_process_with_most_and_all_files() {
        let many = [drained(2 * MANY, 0), drained(MANY, 0), filed(MANY), filed(MANY)];
        assert_eq!(saving_time(&many), Duration::from_secs(8 + 32));
        assert_eq!(saving_time(&[]), Duration::ZERO);
    }
}
