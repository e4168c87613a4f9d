//! The limit of open files, raised while a resume needs more descriptors than the application ever had.
//!
//! An owner exports a descriptor for each allocation that it shares, and holds them until all have theirs. The
//! application needed none of them at a time, so its soft limit may be too low. It is not raised for good: programs
//! close all numbers up to it, and those that use `select` rely on small ones.

use std::sync::{Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// More than any tenant shares, and no more than programs can go through one by one.
const ENOUGH: u64 = 1 << 20;

/// What the soft limit was, while it is raised.
#[derive(Debug, Default)]
pub(super) struct DescriptorLimit(Mutex<Option<Raised>>);

#[derive(Clone, Copy, Debug)]
struct Raised {
    before: u64,
    to: u64,
}

impl DescriptorLimit {
    /// Raises the soft limit to the hard one, or to what is enough, until [`DescriptorLimit::put_back`].
    pub(super) fn raise(&self) {
        let mut raised = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Puts it back, unless the application has set another meanwhile.
    pub(super) fn put_back(&self) {
        put_back(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// As [`DescriptorLimit::put_back`], in a forked child, which has the limit of its parent at the fork.
    pub(super) fn put_back_in_child(&self) {
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
