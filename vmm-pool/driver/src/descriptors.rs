//! Descriptors that a forked child does not keep. An open descriptor of device memory holds that memory. Leases and locks show
//! others that something is in use. The end of a socket shows others that a process has ended. A child that kept such
//! descriptors would keep all of that for its whole life.
//!
//! A fork may come at any instant, on any thread, while any lock is held. So the numbers of the descriptors are recorded in a
//! table without a lock, and the child closes those numbers. For an instant after it is opened, and while it is being closed, a
//! descriptor is not in the table.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of descriptors that can be recorded: the most that Linux allows a process by default.
const NUMBERS: usize = 1 << 20;
const WORD_BITS: usize = 64;

/// One bit for each descriptor number.
struct DescriptorSet([AtomicU64; NUMBERS / WORD_BITS]);

static NOTED: DescriptorSet = DescriptorSet::new();

impl DescriptorSet {
    #[expect(clippy::large_stack_arrays, reason = "statics alone are made by it")]
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; NUMBERS / WORD_BITS])
    }

    fn place(&self, number: RawFd) -> Option<(&AtomicU64, u64)> {
        let number = usize::try_from(number).ok()?;
        Some((self.0.get(number / WORD_BITS)?, 1 << (number % WORD_BITS)))
    }

    /// Records the number. False where the table has no place for it.
    fn note(&self, number: RawFd) -> bool {
        let place = self.place(number);
        place.map(|(word, bit)| word.fetch_or(bit, Ordering::Relaxed)).is_some()
    }

    /// Removes the number. Returns whether it was recorded.
    fn forget(&self, number: RawFd) -> bool {
        let place = self.place(number);
        place.is_some_and(|(word, bit)| word.fetch_and(!bit, Ordering::Relaxed) & bit != 0)
    }

    /// Removes all numbers, and passes each to `each`.
    fn take_all(&self, mut each: impl FnMut(RawFd)) {
        for (index, word) in self.0.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                let number = index * WORD_BITS + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                each(RawFd::try_from(number).unwrap_or(RawFd::MAX));
            }
        }
    }
}

/// A value with a descriptor that a forked child does not keep. Otherwise it behaves as `F`.
#[derive(Debug)]
pub struct Uninherited<F: AsFd + IntoRawFd> {
    /// `Some` until the value is dropped or taken out.
    held: Option<F>,
    is_noted: bool,
}

/// A descriptor that a forked child does not keep.
pub type UninheritedFd = Uninherited<OwnedFd>;

impl<F: AsFd + IntoRawFd> Uninherited<F> {
    /// Takes the value out. A forked child keeps its descriptor from now on.
    pub fn into_inner(mut self) -> F {
        self.take().unwrap_or_else(|| unreachable!("it is taken once"))
    }

    /// Takes the value out. `None` in a child that has closed the descriptor: its number may be another's by now.
    fn take(&mut self) -> Option<F> {
        let held = self.held.take()?;
        if !self.is_noted || NOTED.forget(held.as_fd().as_raw_fd()) {
            return Some(held);
        }
        let _closed = held.into_raw_fd();
        None
    }
}

impl<F: AsFd + IntoRawFd> From<F> for Uninherited<F> {
    fn from(held: F) -> Self {
        let is_noted = NOTED.note(held.as_fd().as_raw_fd());
        Self { held: Some(held), is_noted }
    }
}

impl<F: AsFd + IntoRawFd> Deref for Uninherited<F> {
    type Target = F;

    fn deref(&self) -> &F {
        self.held.as_ref().unwrap_or_else(|| unreachable!("it is there until it is dropped"))
    }
}

impl<F: AsFd + IntoRawFd> AsFd for Uninherited<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl<F: AsFd + IntoRawFd> Drop for Uninherited<F> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Closes all [`Uninherited`] in a forked child, before anything else runs there. Takes no lock and does not block.
pub fn close_in_child() {
    NOTED.take_all(|number| {
        // The descriptor was open at the fork, and this is the only thread.
        let _closed = nix::unistd::close(number);
    });
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn numbers_are_noted_until_they_are_forgotten() {
        static TABLE: DescriptorSet = DescriptorSet::new();
        let most = RawFd::try_from(NUMBERS).unwrap();
        for number in [0, 63, 64, 65, 1023, most - 1] {
            assert!(TABLE.note(number));
        }
        assert!(!TABLE.note(most) && !TABLE.note(-1), "there is no place for them");
        assert!(TABLE.forget(64) && !TABLE.forget(64) && !TABLE.forget(most));
        let mut all = Vec::new();
        TABLE.take_all(|number| all.push(number));
        assert_eq!(all, [0, 63, 65, 1023, most - 1]);
        TABLE.take_all(|number| panic!("{number} is noted again"));
    }

    #[test]
    fn one_is_noted_as_long_as_it_is_one() {
        let is_noted = |number| {
            let (word, bit) = NOTED.place(number).unwrap();
            word.load(Ordering::Relaxed) & bit != 0
        };
        let fd = UninheritedFd::from(OwnedFd::from(File::open("/dev/null").unwrap()));
        let number = fd.as_fd().as_raw_fd();
        assert!(is_noted(number));
        let fd = fd.into_inner();
        assert!(!is_noted(number));
        drop(UninheritedFd::from(fd));
        // Another test of this process may have a descriptor with this number by now, but not a recorded one.
        assert!(!is_noted(number));
    }

    #[test]
    #[expect(unsafe_code, reason = "forks")]
    fn a_forked_child_keeps_none_open() {
        let (mut here, there) = std::io::pipe().unwrap();
        let (until, mut over) = std::io::pipe().unwrap();
        let there = UninheritedFd::from(OwnedFd::from(there));
        // SAFETY: the child makes system calls alone until it ends.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                close_in_child();
                let _told = nix::unistd::read(until, &mut [0]);
                // SAFETY: nothing of the child's is to be ended in order.
                unsafe { libc::_exit(0) }
            }
            nix::unistd::ForkResult::Parent { child } => {
                drop(there);
                // If the child had the descriptor, it would stay open as long as the child lives.
                assert_eq!(here.read(&mut [0]).unwrap(), 0);
                over.write_all(&[1]).unwrap();
                nix::sys::wait::waitpid(child, None).unwrap();
            }
        }
    }

    #[test]
    fn what_a_child_has_closed_it_closes_no_second_time() {
        let fd = UninheritedFd::from(OwnedFd::from(File::open("/dev/null").unwrap()));
        let number = fd.as_fd().as_raw_fd();
        // As after a fork in a child: the number now belongs to another descriptor.
        assert!(NOTED.forget(number));
        drop(fd);
        nix::unistd::close(number).expect("it was left open");
    }
}
