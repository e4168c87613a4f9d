//! What is asked before memory is made: drop-ins for other projects, which [`crate::DROP_INS`] lists. Those who
//! make memory know none of them.

/// What a drop-in has to say about memory that the calling thread is about to ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    /// Has it belong to what the thread has set.
    pub(crate) settle: fn(),
    /// Is a plain allocation of so many bytes on the current device refused, as if there were no memory?
    pub(crate) refuses: fn(usize) -> bool,
}

/// Before memory of any kind.
pub(crate) fn settle() {
    for guard in crate::DROP_INS {
        (guard.settle)();
    }
}

/// Before plain memory: does somebody refuse it? Also does what [`settle`] does.
pub(crate) fn refuses(size_bytes: usize) -> bool {
    settle();
    crate::DROP_INS.iter().any(|guard| (guard.refuses)(size_bytes))
}
