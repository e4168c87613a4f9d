//! Descriptors of this process, and the limit on their number. All descriptors in the table are [`vmm_pool::Uninherited`],
//! except for tickets, the wake pipe and the descriptors of a reply that just arrived.
//!
//! The limit is raised while a resume needs more descriptors than the application ever had. An owner exports a descriptor for
//! each allocation that it shares, and holds all of them until every importer has its own. The limit is not raised for good:
//! some programs close all numbers up to it, and programs that use `select` rely on small ones.
//!
//! | descriptor | owner | until |
//! | --- | --- | --- |
//! | the driver's export of a row | owner's pool | every ticket is redeemed, or the resume is over, or the pause releases |
//! | ticket | the library that asked | it closes it |
//! | ticket's watch, at most 256 | owner's pool | the ticket is closed everywhere, which is looked at from time to time |
//! | lease; its watch | borrower's pool; lender's pool | the driver has taken the handle back; the lease is closed everywhere |
//! | claim to a turn; budget file; locks | the member | the turn, the process, the action ends |
//! | descriptors in a reply | the receiver, close-on-exec from the receive on | the import is made |
//! | listener, connections, wake pipe | agent | the process ends |
//! | reserve, four | agent | a connection uses the number, after the application has used all others up |

use std::os::fd::AsFd;
use std::sync::Mutex;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use vmm_pool::UninheritedFd;
use vmm_pool::sync::lock;

/// Descriptors that are left to the application and to the rest of Sublet.
const DESCRIPTORS_KEPT_FREE: usize = 32;

/// Returns the most descriptors that this process may have open: its soft limit.
fn descriptor_limit() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE)
        .map_or(usize::MAX, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX))
}

/// Returns how many descriptors this process may open now, except for a few that are kept free.
pub fn free_descriptors() -> usize {
    let limit = descriptor_limit();
    // If /proc cannot be read, half the limit counts as open.
    let open = std::fs::read_dir("/proc/self/fd").map_or(limit / 2, Iterator::count);
    limit.saturating_sub(open + DESCRIPTORS_KEPT_FREE)
}

/// Descriptors that are kept for connections. They let this many peers at a time reach an application that has used all others
/// up.
#[derive(Debug, Default)]
pub struct Reserve(Vec<UninheritedFd>);

impl Reserve {
    const KEPT: usize = 4;

    /// Adds the missing descriptors, as copies of `any`, as far as there is room.
    pub fn fill(&mut self, any: &impl AsFd) {
        while self.0.len() < Self::KEPT {
            let Ok(copy) = any.as_fd().try_clone_to_owned() else { return };
            self.0.push(copy.into());
        }
    }

    /// Closes one, to free its number for the next descriptor that is opened. False if none is left.
    pub fn give_up(&mut self) -> bool {
        self.0.pop().is_some()
    }
}

/// This limit is more than any tenant shares, and no more than programs can go through one by one.
const ENOUGH: u64 = 1 << 20;

/// The raise of the soft limit of open files, with the former limit; none if it is not raised.
#[derive(Debug, Default)]
pub struct DescriptorLimit(Mutex<Option<Raised>>);

#[derive(Clone, Copy, Debug)]
struct Raised {
    before: u64,
    to: u64,
}

impl DescriptorLimit {
    /// Raises the soft limit to the hard one, or to a sufficient number, until [`DescriptorLimit::put_back`].
    pub fn raise(&self) {
        let mut raised = lock(&self.0);
        let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
            return;
        };
        let to = hard.min(ENOUGH);
        if raised.is_some() || soft >= to {
            return;
        }
        match setrlimit(Resource::RLIMIT_NOFILE, to, hard) {
            Ok(()) => *raised = Some(Raised { before: soft, to }),
            Err(error) => tracing::debug!(%error, soft, to, "the limit of open files stays"),
        }
    }

    /// Restores the former limit, unless the application has set another meanwhile.
    pub fn put_back(&self) {
        put_back(&mut lock(&self.0));
    }

    /// As [`DescriptorLimit::put_back`], in a forked child, which has the limit of its parent at the fork.
    pub fn put_back_in_child(&self) {
        if let Ok(mut raised) = self.0.try_lock() {
            put_back(&mut raised);
        }
    }
}

fn put_back(raised: &mut Option<Raised>) {
    let Some(Raised { before, to }) = raised.take() else {
        return;
    };
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft == to
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, before, hard)
    {
        tracing::warn!(%error, "the limit of open files was not put back");
    }
}
