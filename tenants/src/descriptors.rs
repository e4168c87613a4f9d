//! Descriptors of this process: how many it may open, and which of them a forked child lets go of.
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

use std::os::fd::{AsFd, AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use nix::sys::resource::{Resource, getrlimit};

/// Descriptors that are left to the application and the rest of us.
const DESCRIPTORS_KEPT_FREE: usize = 32;
/// Stands where there is no descriptor.
const NONE: RawFd = -1;

/// Numbers of open descriptors, for a forked child to close. No lock: a fork may come at any instant, on any thread.
#[derive(Debug)]
pub(crate) struct Numbers<const MOST: usize>([AtomicI32; MOST]);

/// A descriptor that a child would close. Dropped before the descriptor is: its number may then become another's.
#[derive(Debug)]
pub(crate) struct Noted(Option<&'static AtomicI32>);

impl<const MOST: usize> Numbers<MOST> {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicI32::new(NONE) }; MOST])
    }

    /// Notes the number of `file`.
    pub(crate) fn note(&'static self, file: &impl AsFd) -> Noted {
        let (order, number) = (Ordering::Relaxed, file.as_fd().as_raw_fd());
        let takes = |place: &&AtomicI32| place.compare_exchange(NONE, number, order, order).is_ok();
        Noted(self.0.iter().find(takes))
    }

    /// Is the number of `file` noted?
    #[cfg(test)]
    pub(crate) fn has(&self, file: &impl AsFd) -> bool {
        let number = file.as_fd().as_raw_fd();
        self.0.iter().any(|place| place.load(Ordering::Relaxed) == number)
    }

    /// Closes them all, in a forked child: there, no thread has any further use for them.
    pub(crate) fn close_in_child(&self) {
        for place in &self.0 {
            let number = place.swap(NONE, Ordering::Relaxed);
            if number != NONE {
                // It was open at the fork, and this is the only thread.
                let _closed = nix::unistd::close(number);
            }
        }
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            place.store(NONE, Ordering::Relaxed);
        }
    }
}

/// How many descriptors this process may have open.
fn descriptor_limit() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE)
        .map_or(usize::MAX, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX))
}

/// How many descriptors this process may open now, with some left over.
pub(crate) fn free_descriptors() -> usize {
    let limit = descriptor_limit();
    // Where /proc cannot be read, as many as are likely to be free.
    let open = std::fs::read_dir("/proc/self/fd").map_or(limit / 2, Iterator::count);
    limit.saturating_sub(open + DESCRIPTORS_KEPT_FREE)
}
