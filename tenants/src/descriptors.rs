//! Descriptors of this process: how many it may open. All that the table names are [`vmm_pool::Uninherited`], but for tickets, wake pipe and what a
//! reply has just brought.
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

use nix::sys::resource::{Resource, getrlimit};

/// Descriptors that are left to the application and the rest of us.
const DESCRIPTORS_KEPT_FREE: usize = 32;

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
