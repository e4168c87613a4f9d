//! Getting descriptors of memory that other processes of the tenant own.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Instant;

use vmm_pool::driver::Driver;
use vmm_pool::{AllocationId, Class, ImportSource, PoolError, VirtualHandle};

use super::{AGENT_TIMEOUT, Member};
use crate::ticket::Ticket;
use crate::transport::{Connection, TransportError};
use crate::wire::{FDS_PER_MESSAGE_MAX, Failure, Reply, Request};

/// Why a ticket did not become memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The ticket belongs to another tenant, whose pauses this process would not see.
    #[error(
        "the ticket is of tenant {theirs} and this process is in {ours}: run both in one tenant to let \
         them share device memory"
    )]
    OtherTenant {
        /// Whose it is.
        theirs: String,
        /// Ours.
        ours: String,
    },
    /// The allocation has been freed.
    #[error("the ticket is stale: its allocation {id:?} has been freed")]
    Stale {
        /// Its identity.
        id: AllocationId,
    },
    /// The system gave no descriptor for a ticket.
    #[error("no ticket could be made: {source}; raise the limit of open files (ulimit -n)")]
    NoTicket {
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The owner did not answer as it should.
    #[error("the owner of the memory, at {}, could not be asked: {source}", path.display())]
    Owner {
        /// Its socket.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: TransportError,
    },
    /// The owner refused.
    #[error("the owner of the memory refused: {0}")]
    Refused(#[source] Failure),
    /// The owner sent something else than was asked for.
    #[error(
        "the owner of the memory, at {}, sent {got} descriptors for {wanted} allocations",
        path.display()
    )]
    Miscounted {
        /// Its socket.
        path: PathBuf,
        /// Descriptors that came.
        got: usize,
        /// Allocations asked for.
        wanted: usize,
    },
    /// The driver refused.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl<D: Driver> Member<D> {
    /// A ticket for `handle`, in place of the driver's descriptor.
    ///
    /// # Errors
    /// What the pool or the system said.
    pub fn issue_ticket(&self, handle: u64) -> Result<OwnedFd, ImportError> {
        let export = self.pool.export(handle)?;
        let owner_socket = match self.pool.import_owner(handle)? {
            Some(owner) => path_of(&owner),
            None => self.socket_path.clone(),
        };
        let ticket = Ticket {
            allocation: export.id,
            serial: 0,
            size_bytes: export.size_bytes,
            owner: self.id,
            owner_socket,
            tenant: self.config.tenant.clone(),
        };
        ticket.issue().map_err(|source| ImportError::NoTicket { source })
    }

    /// The memory that `ticket` stands for.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn redeem_ticket(
        &self,
        ticket: &Ticket,
        class: Class,
    ) -> Result<VirtualHandle, ImportError> {
        if ticket.tenant != self.config.tenant {
            return Err(ImportError::OtherTenant {
                theirs: ticket.tenant.to_string(),
                ours: self.config.tenant.to_string(),
            });
        }
        let is_own = ticket.owner_socket == self.socket_path;
        let deadline = Instant::now() + AGENT_TIMEOUT;
        if let Some(handle) = self.pool.import_held(ticket.allocation) {
            if !is_own {
                // The owner keeps memory for every ticket until it is redeemed: tell it that this one is.
                if let Err(error) = self.fetch(&ticket.owner_socket, &[ticket.allocation], deadline)
                {
                    tracing::debug!(%error, "the owner was not told of a second ticket");
                }
            }
            return Ok(handle);
        }
        if is_own {
            return Err(ImportError::Stale { id: ticket.allocation });
        }
        let mut fds = self.fetch(&ticket.owner_socket, &[ticket.allocation], deadline)?;
        let fd =
            fds.remove(&ticket.allocation).ok_or(ImportError::Stale { id: ticket.allocation })?;
        let source = ImportSource {
            id: ticket.allocation,
            size_bytes: ticket.size_bytes,
            owner: ticket.owner_socket.as_os_str().as_bytes().to_vec(),
        };
        Ok(self.pool.import(source, fd.as_fd(), class)?)
    }

    /// Descriptors for everything imported that is not resident, from all owners.
    pub(super) fn fetch_imports(
        &self,
        deadline: Instant,
    ) -> Result<HashMap<AllocationId, OwnedFd>, ImportError> {
        let mut descriptors = HashMap::new();
        for request in self.pool.import_requests() {
            let path = path_of(&request.owner);
            for ids in request.ids.chunks(FDS_PER_MESSAGE_MAX) {
                descriptors.extend(self.fetch(&path, ids, deadline)?);
            }
        }
        Ok(descriptors)
    }

    fn fetch(
        &self,
        path: &Path,
        ids: &[AllocationId],
        deadline: Instant,
    ) -> Result<HashMap<AllocationId, OwnedFd>, ImportError> {
        let failed = |source| ImportError::Owner { path: path.to_owned(), source };
        let kept = self.peers.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
        let request = Request::FetchFds { allocations: ids.to_vec(), importer: self.id };
        let answer = match kept {
            Some(mut connection) => {
                let answer = connection.call(&request, ids.len(), deadline);
                answer.map(|answer| (answer, connection))
            }
            None => Connection::connect(path, deadline).and_then(|mut connection| {
                let answer = connection.call(&request, ids.len(), deadline)?;
                Ok((answer, connection))
            }),
        };
        let ((reply, fds), connection) = answer.map_err(failed)?;
        self.peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(path.to_owned(), connection);
        match reply {
            Reply::Fds { count } if count as usize == ids.len() && fds.len() == ids.len() => {
                Ok(ids.iter().copied().zip(fds).collect())
            }
            Reply::Failed(failure) => Err(ImportError::Refused(failure)),
            Reply::Fds { .. }
            | Reply::Member(_)
            | Reply::Stats(_)
            | Reply::Cut(_)
            | Reply::PhaseDone(..)
            | Reply::Consented => Err(ImportError::Miscounted {
                path: path.to_owned(),
                got: fds.len(),
                wanted: ids.len(),
            }),
        }
    }
}

fn path_of(owner: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(owner))
}
