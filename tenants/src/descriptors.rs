//! How many descriptors this process may open.

use nix::sys::resource::{Resource, getrlimit};

/// Descriptors that are left to the application and the rest of us.
const DESCRIPTORS_KEPT_FREE: usize = 32;

/// How many descriptors this process may open now, with some left over.
pub(crate) fn free_descriptors() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE)
        .map_or(usize::MAX, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX));
    // Where /proc cannot be read, as many as are likely to be free.
    let open = std::fs::read_dir("/proc/self/fd").map_or(limit / 2, Iterator::count);
    limit.saturating_sub(open + DESCRIPTORS_KEPT_FREE)
}
