//! Getting descriptors of memory that other processes own.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::stat::{SFlag, fstat};
use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;
use vmm_pool::{
    AllocationId, Borrowed, Class, Contents, Entered, Export, ImportSource, PoolError, Returning,
    Step, StepLog, VirtualHandle,
};

use super::Sharing;
use crate::presence::NAMES_AGAIN_AFTER;
use crate::signals::CallingOff;
use sublet_protocol::descriptors::free_descriptors;
use sublet_protocol::identity::MemberId;
use sublet_protocol::ticket::{self, Ticket};
use sublet_protocol::time::micros;
use sublet_protocol::transport::{Connection, TransportError};
use sublet_protocol::wire::{
    FDS_PER_MESSAGE_MAX, Failure, FailureKind, FetchFds, FetchPurpose, SentFds,
};

/// The reason why a ticket did not become memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Memory of one tenant was sent to a process of another, and this process names no family. The memory was not
    /// opened. Start both with one `--family NAME`.
    #[error(
        "the ticket is of tenant {theirs}, and this process is in {ours} and names no family: start both with one family \
         (sublet run --family NAME, or SUBLET_FAMILY), or run both in one tenant, to let them share device memory"
    )]
    OtherTenant {
        /// The tenant of the ticket.
        theirs: String,
        /// Ours.
        ours: String,
    },
    /// The tenant that owns the memory is not in this run directory. Two containers may use different directories.
    /// The memory was not opened. Give both the same `SUBLET_RUN_DIR`.
    #[error(
        "the ticket is of tenant {theirs}, which is not in this process's run directory: start both with one \
         SUBLET_RUN_DIR"
    )]
    NoLender {
        /// The tenant of the ticket.
        theirs: String,
    },
    /// The resume needs memory of a lender, and that tenant is paused. This tenant stays paused, and nothing is lost.
    /// Resume the lender first; the message names it.
    #[error("{count} allocations that this process has open are another tenant's: {failure}")]
    LenderAway {
        /// Allocations that were requested.
        count: usize,
        /// The failure that the owner reported.
        failure: Failure,
    },
    /// The owner of the memory uses a GPU that this process does not see. The memory was not opened. Start both
    /// tenants with the same `CUDA_VISIBLE_DEVICES`.
    #[error(
        "the memory is on GPU {device}, which this process does not see: start both tenants with the same GPUs \
         (CUDA_VISIBLE_DEVICES)"
    )]
    OtherDevice {
        /// The machine-wide name.
        device: String,
    },
    /// The owner freed the memory before this process opened it. Nothing was opened. The owner must keep the memory
    /// until the other process has it.
    #[error("the ticket is stale: its allocation {id:?} has been freed")]
    Stale {
        /// Its identity.
        id: AllocationId,
    },
    /// The owner has no file descriptor left to send memory to another process. Its memory is unchanged. Raise the
    /// limit (`ulimit -n`).
    #[error("no ticket could be made: {source}; raise the limit of open files (ulimit -n)")]
    NoTicket {
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The process that owns the shared memory gave no answer: it has ended, or is stopped. The reason follows.
    /// `sublet ps -v` shows the processes; continue a stopped one (`kill -CONT PID`).
    #[error("the owner of the memory, at {}, could not be asked: {source}", path.display())]
    Owner {
        /// Its socket.
        path: PathBuf,
        /// The transport's error.
        #[source]
        source: TransportError,
    },
    /// The process that owned the shared memory has died, and this memory is lost. The tenant stays paused, with all
    /// other contents. `sublet resume TENANT --without-lost` continues without that memory. `sublet save TENANT DIR`
    /// writes the other contents to files.
    #[error(
        "{owner} has ended, and with it {count} allocations that this process had imported from it: end \
         this process, or leave them out (sublet resume --without-lost)"
    )]
    OwnerEnded {
        /// The owner, in words.
        owner: String,
        /// Allocations that were requested.
        count: usize,
    },
    /// The process that owned the shared memory lives, and has freed it meanwhile. The tenant stays paused, with all
    /// other contents. `sublet resume TENANT --without-lost` continues without that memory.
    #[error(
        "{owner} does not have {count} allocations any more that this process had imported from it: leave them out \
         (sublet resume --without-lost)"
    )]
    Missing {
        /// The owner, in words.
        owner: String,
        /// Allocations that are missing.
        count: usize,
    },
    /// The process that owns the shared memory did not give it. The owner's reason follows: look it up on this page.
    #[error("the owner of the memory refused: {0}")]
    Refused(#[source] Failure),
    /// The owner of shared memory sent another number of pieces than was requested. The memory was not opened. The
    /// two processes have different versions (`sublet stats TENANT`), or this is a fault of Sublet.
    #[error(
        "the owner of the memory, at {}, sent {got} descriptors for {wanted} allocations",
        path.display()
    )]
    Miscounted {
        /// Its socket.
        path: PathBuf,
        /// The number of received descriptors.
        got: usize,
        /// The number of requested allocations.
        wanted: usize,
    },
    /// The owner of shared memory sent a file that is no device memory. The memory was not opened. The two processes
    /// have different versions (`sublet stats TENANT`), or this is a fault of Sublet.
    #[error("the owner of the memory, at {}, sent a descriptor that is no device's", path.display())]
    NotMemory {
        /// Its socket.
        path: PathBuf,
    },
    /// The driver refused.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// The answer of an owner to a fetch.
pub(super) struct Fetched {
    fds: HashMap<AllocationId, Borrowed>,
    /// The tags of redeemed tickets.
    tags: Vec<String>,
    /// The allocations that the owner does not have any more.
    missing: BTreeSet<AllocationId>,
}

/// Imports that a living owner does not have any more.
#[derive(Debug)]
pub(crate) struct Missing {
    /// The owner, in words.
    pub(super) owner: String,
    pub(super) ids: BTreeSet<AllocationId>,
}

impl From<Missing> for ImportError {
    fn from(missing: Missing) -> Self {
        Self::Missing { owner: missing.owner, count: missing.ids.len() }
    }
}

/// The shortest time between two questions to an owner that is paused, or about to be.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(100);

impl<D: Driver> Sharing<D> {
    /// Issues a ticket for `handle`, instead of the driver's descriptor.
    ///
    /// # Errors
    /// The error of the pool or of the system.
    pub fn issue_ticket(
        &self,
        entered: &Entered<'_, D>,
        handle: VirtualHandle,
    ) -> Result<OwnedFd, ImportError> {
        let export = entered.pool().front().export(entered, handle)?;
        let owner = export.owner.map_or(self.presence.id(), MemberId::from);
        // A process that redeems a ticket for borrowed memory asks the memory's owner.
        let tenant = self.sharers.lender(owner).unwrap_or_else(|| self.presence.tenant().clone());
        let ticket = Ticket {
            allocation: export.id,
            serial: export.serial,
            size_bytes: export.size_bytes,
            owner,
            tenant,
            part: export.part,
        };
        let fd = ticket.issue().map_err(|source| {
            entered.take_ticket_back(&export);
            ImportError::NoTicket { source }
        })?;
        if export.serial != 0 {
            match ticket::watch(fd.as_fd()) {
                Ok(watch) => entered.watch_ticket(&export, watch),
                Err(error) => {
                    tracing::debug!(%error, "a ticket is not watched: it lasts until it is redeemed");
                }
            }
        }
        Ok(fd)
    }

    /// Opens the memory of `ticket`, for `library`. Its tag is its owner's.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn redeem_ticket(
        &self,
        entered: &Entered<'_, D>,
        ticket: &Ticket,
        library: &'static str,
    ) -> Result<VirtualHandle, ImportError> {
        let Ticket { allocation, serial, owner, part, .. } = *ticket;
        let front = entered.pool().front();
        let is_borrowed = ticket.tenant != *self.presence.tenant();
        if is_borrowed {
            self.sharers.approach(owner, &ticket.tenant)?;
        }
        let is_own = owner == self.presence.id();
        let (owned_by, size_bytes) = (Some(owner.into()), ticket.size_bytes);
        let of = Export { id: allocation, size_bytes, serial, owner: owned_by, part };
        if let Some(handle) = front.import_held(entered, &of)? {
            // The owner keeps memory for every ticket until it is redeemed, so this tells it of the redemption.
            if is_own || serial == 0 {
                return Ok(handle);
            }
            let Err(error) = self.redeem_from(entered, owner, allocation, serial) else {
                return Ok(handle);
            };
            let error = self.or_ended(owner, error, 1);
            if matches!(error, ImportError::OwnerEnded { .. }) {
                return Ok(handle);
            }
            // The ticket is still valid, and would hold the memory for ever if this were a success.
            front.release(entered, handle)?;
            return Err(error);
        }
        if is_own {
            return Err(ImportError::Stale { id: allocation });
        }
        let Fetched { mut fds, tags, .. } = self.redeem_from(entered, owner, allocation, serial)?;
        // Imported memory is released and restored with its owner's; borrowed memory with all memory of this process.
        let tag = tags.into_iter().next().unwrap_or_default();
        let class = Class { library, tag, contents: Contents::Keep };
        let lent = fds.remove(&allocation).ok_or(ImportError::Stale { id: allocation })?;
        let source = ImportSource { id: allocation, size_bytes, owner: owner.into() };
        Ok(front.import(entered, source, lent, class, part)?)
    }

    /// Redeems a ticket at its owner. If the owner is paused, or being paused, the call waits as it would at the own gate, and
    /// lets a pause of its own process through. For an owner of another tenant it waits only until a deadline. If the run
    /// directory was removed, it waits until both processes have their names again, or had the time for it.
    fn redeem_from(
        &self,
        entered: &Entered<'_, D>,
        owner: MemberId,
        id: AllocationId,
        serial: u64,
    ) -> Result<Fetched, ImportError> {
        let give_up = self.sharers.open_deadline(owner);
        let names_by = Instant::now() + NAMES_AGAIN_AFTER;
        let names_by = give_up.map_or(names_by, |at| at.min(names_by));
        let mut rest = REST_MIN;
        loop {
            let deadline = Instant::now() + self.sharers.answer_timeout(owner);
            let purpose = FetchPurpose::Redeem { serial };
            match self.fetch(owner, &[id], purpose, deadline) {
                Err(ImportError::Refused(failure)) if is_over_later(failure.kind) => {
                    if give_up.is_some_and(|at| Instant::now() >= at) {
                        let waited_ms = self.presence.config().family_wait.as_millis();
                        let message = format!("{failure}; it was waited for for {waited_ms} ms");
                        return Err(ImportError::Refused(Failure { message, ..failure }));
                    }
                }
                Err(error) if self.is_for_want_of_names(&error) && Instant::now() < names_by => {}
                answer => return answer,
            }
            entered.step_aside();
            self.lifecycle.rest(rest);
            rest = (2 * rest).min(REST_MAX);
        }
    }

    /// Was the owner not found, or did it not find this process, because the run directory was removed?
    fn is_for_want_of_names(&self, error: &ImportError) -> bool {
        let is_unknown = matches!(error, ImportError::Owner { source, .. } if source.nobody_listens())
            || matches!(error, ImportError::Refused(failure) if failure.kind == FailureKind::Unknown);
        is_unknown && !self.presence.names_stay()
    }

    /// Imports again all of `returning` that is not resident, from all owners. Imports that a living owner does not have any
    /// more stay as they are, and are returned. [`Returning::map_imports`] must follow.
    ///
    /// All descriptors are fetched before the first is imported, because the driver is slow if one process exports while
    /// another imports. But never more are open than this process may open.
    pub(crate) fn import_again(
        &self,
        returning: &mut Returning<D>,
        calling_off: &CallingOff,
        deadline: Instant,
    ) -> Result<(StepLog, Vec<Missing>), ImportError> {
        let begin = Instant::now();
        let (mut log, mut missing) = (StepLog::default(), Vec::new());
        let mut at_hand = HashMap::new();
        let mut batch = FDS_PER_MESSAGE_MAX;
        for request in returning.import_requests() {
            let owner = MemberId::from(request.owner);
            let mut gone = BTreeSet::new();
            let mut rest = request.ids.as_slice();
            while !rest.is_empty() {
                let room = free_descriptors();
                if room < batch.min(rest.len()) && !at_hand.is_empty() {
                    log.add(returning.import_batch(std::mem::take(&mut at_hand))?);
                    continue;
                }
                let each = if self.sharers.lender(owner).is_some() { 2 } else { 1 };
                let ids = &rest[..batch.min(room).div_euclid(each).max(1).min(rest.len())];
                match self.fetch_again(owner, ids, calling_off, deadline) {
                    Ok(fetched) => {
                        at_hand.extend(fetched.fds);
                        gone.extend(fetched.missing);
                        rest = &rest[ids.len()..];
                    }
                    // The owner, too, may lack room for so many descriptors together.
                    Err(ImportError::Refused(failure))
                        if failure.kind == FailureKind::Driver
                            && (ids.len() > 1 || !at_hand.is_empty()) =>
                    {
                        tracing::debug!(%failure, "descriptors are fetched in smaller batches");
                        batch = (ids.len() / 2).max(1);
                        log.add(returning.import_batch(std::mem::take(&mut at_hand))?);
                    }
                    Err(error) => return Err(self.or_ended(owner, error, ids.len())),
                }
            }
            if !gone.is_empty() {
                missing.push(Missing { owner: self.sharers.owner_in_words(owner), ids: gone });
            }
        }
        log.steps
            .insert(0, Step { name: "fetch descriptors", elapsed_us: micros(begin.elapsed()) });
        log.add(returning.import_batch(at_hand)?);
        Ok((log, missing))
    }

    /// Turns `error`, the failure to fetch `count` imports again, into one that says so if `owner` has ended.
    fn or_ended(&self, owner: MemberId, error: ImportError, count: usize) -> ImportError {
        let ImportError::Owner { path, source } = error else {
            return error;
        };
        let has_ended = source.nobody_listens() || source.peer_is_gone();
        match self.sharers.known_owner(owner).filter(|_| has_ended && self.sharers.has_ended(owner))
        {
            Some(owner) => ImportError::OwnerEnded { owner, count },
            None => ImportError::Owner { path, source },
        }
    }

    /// Fetches again after a pause of this process. The call waits for a lender that is being paused or resumed; it names a
    /// lender that is paused.
    fn fetch_again(
        &self,
        owner: MemberId,
        ids: &[AllocationId],
        calling_off: &CallingOff,
        deadline: Instant,
    ) -> Result<Fetched, ImportError> {
        let mut rest = REST_MIN;
        loop {
            match self.fetch(owner, ids, FetchPurpose::Again, deadline) {
                Err(ImportError::Refused(failure)) if self.waits_for(owner, &failure) => {
                    if Instant::now() + rest >= deadline || calling_off.is_raised() {
                        return Err(ImportError::Refused(failure));
                    }
                    self.lifecycle.rest(rest);
                    rest = (2 * rest).min(REST_MAX);
                }
                Err(ImportError::Refused(failure)) if failure.kind == FailureKind::LenderAway => {
                    return Err(ImportError::LenderAway { count: ids.len(), failure });
                }
                outcome => return outcome,
            }
        }
    }

    fn waits_for(&self, owner: MemberId, failure: &Failure) -> bool {
        failure.kind == FailureKind::NotNow && self.sharers.lender(owner).is_some()
    }

    fn fetch(
        &self,
        owner: MemberId,
        ids: &[AllocationId],
        purpose: FetchPurpose,
        deadline: Instant,
    ) -> Result<Fetched, ImportError> {
        let path = || self.sharers.place_of(owner);
        let failed = |source| ImportError::Owner { path: path(), source };
        let kept = lock(&self.sharers.idle).remove(&owner);
        let borrower = self.sharers.as_borrower(owner);
        let each = if borrower.is_some() { 2 } else { 1 };
        let question =
            FetchFds { allocations: ids.to_vec(), purpose, importer: self.presence.id(), borrower };
        let answer = match kept {
            None => self.ask_anew(owner, &question, deadline),
            Some(mut connection) => match connection.call(&question, deadline) {
                // The owner may have closed an idle connection; a new one tells whether the owner lives.
                Err(error) if error.peer_is_gone() => self.ask_anew(owner, &question, deadline),
                answer => answer.map(|answer| (answer, connection)),
            },
        };
        let (answer, connection) = answer.map_err(failed)?;
        lock(&self.sharers.idle).insert(owner, connection);
        let SentFds { count, fds, tags, missing, devices } =
            answer.map_err(ImportError::Refused)?;
        if count != fds.len() || fds.len() + each * missing.len() != each * ids.len() {
            let (got, wanted) = (fds.len(), ids.len());
            return Err(ImportError::Miscounted { path: path(), got, wanted });
        }
        if !fds.iter().all(may_be_the_drivers) {
            return Err(ImportError::NotMemory { path: path() });
        }
        let missing: BTreeSet<AllocationId> = missing.into_iter().collect();
        let found = ids.iter().copied().filter(|id| !missing.contains(id));
        if let Some(device) = devices.into_iter().find(|uuid| self.cannot_see(uuid)) {
            return Err(ImportError::OtherDevice { device });
        }
        let mut fds = fds.into_iter();
        let mut next = || {
            let fd = fds.next()?;
            let lease = if each == 2 { Some(fds.next()?) } else { None };
            Some(Borrowed { fd, lease })
        };
        let fds = found.map_while(|id| Some((id, next()?))).collect();
        Ok(Fetched { fds, tags, missing })
    }

    /// Is a device of this name certainly none of this process's?
    fn cannot_see(&self, uuid: &str) -> bool {
        let is_name = uuid.starts_with("GPU-");
        is_name && !self.pool.devices().sees(uuid)
    }

    fn ask_anew(
        &self,
        owner: MemberId,
        question: &FetchFds,
        deadline: Instant,
    ) -> Result<(Result<SentFds, Failure>, Connection), TransportError> {
        let mut connection = self.sharers.connect(owner, deadline)?;
        let answer = connection.call(question, deadline)?;
        Ok((answer, connection))
    }
}

/// Can the same question succeed a little later?
fn is_over_later(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::NotNow | FailureKind::LenderAway)
}

/// Tells whether a descriptor may come from the driver. The driver checks the file, but must never get
/// a socket, a pipe, a directory or a block device.
fn may_be_the_drivers(fd: &OwnedFd) -> bool {
    fstat(fd).is_ok_and(|status| {
        let kind = SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits());
        ![SFlag::S_IFSOCK, SFlag::S_IFIFO, SFlag::S_IFDIR, SFlag::S_IFBLK].contains(&kind)
    })
}
