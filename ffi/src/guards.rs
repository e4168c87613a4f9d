//! Questions that are asked before memory is made. Drop-ins for other projects answer them ([`crate::DROP_INS`] lists
//! these); the functions that make memory know none of them.

/// A drop-in's part in memory that the calling thread is about to ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    /// Files the memory under the thread's settings.
    pub(crate) settle: fn(),
    /// True when a plain allocation of so many bytes on the current device is to fail as if there were no memory.
    pub(crate) refuses: fn(usize) -> bool,
}

/// Before memory of any kind.
pub(crate) fn settle() {
    for guard in crate::DROP_INS {
        (guard.settle)();
    }
}

/// Before plain memory: [`settle`], then true when some drop-in refuses the allocation.
pub(crate) fn refuses(size_bytes: usize) -> bool {
    settle();
    crate::DROP_INS.iter().any(|guard| (guard.refuses)(size_bytes))
}
